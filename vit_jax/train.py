"""Trains and evaluates any task on any mesh: the only training loop.

python -m vit_jax.main --config=configs/digits.py --workdir=/tmp/digits
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
import shlex
import time
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import ml_collections
import numpy as np
import optax

from vit_jax import checkpoint, console, input_pipeline, preprocess
from vit_jax.configs import models as model_configs
from vit_jax.data import balance, class_counts, mixture, pixel_statistics, sources
from vit_jax.distributed import files, processes, sharding
from vit_jax.evaluators import base
from vit_jax.figures import pictures
from vit_jax.layers import (
  attention,
  attention_kernels,
  dtypes,
  patches,
  position_kinds,
)
from vit_jax.learning import (
  lora,
  losses,
  optim,
  rate_factors,
  schedules,
  state as state_lib,
)
from vit_jax.run import (
  checkpoints as checkpoints_lib,
  config as run_config,
  evaluators as run_evaluators,
  lock,
  loop,
  memory,
  metrics as metrics_lib,
  stopping,
  workdir as workdir_lib,
)

_FEW_STEPS = 20  # Runs of fewer updates are most likely a mistake.
Interrupted = stopping.Interrupted


class Program(NamedTuple):
  """The program of a config and its metadata; needs no data."""

  task: Any  # The objective, a vit_jax.tasks.base.Task.
  update: Callable[..., Any]  # (state, batch) -> (state, metrics), not compiled.
  create_state: Callable[..., Any]  # (weights by path, or {}) -> initial TrainState.
  abstract: state_lib.TrainState  # Shapes, types and shardings of the state.

  def jit_update(self) -> Callable[..., Any]:
    """Returns the jitted update, which donates the state."""
    return jax.jit(
      self.update,
      donate_argnums=0,
      out_shardings=(jax.tree.map(lambda x: x.sharding, self.abstract), None),
    )


def _computation(config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh) -> str:
  """Describes dtype and attention; ValueError if attention cannot run on the mesh."""
  layers = model_configs.layers_of(config.model)
  name = layers.get('attention', attention.AUTO)
  platform = mesh.devices.flat[0].platform
  dtype = dtypes.resolve(config.model.get('dtype', 'float32'), platform)
  dropout = layers.get('attention_dropout_rate', 0.0)
  relative = layers.get('position_embedding') in position_kinds.RELATIVE
  key = f'config.{model_configs.place_of_layers(config.model)}.attention'
  attention.check(name, dropout, platform, dtype, bias=relative, key=key)
  description = f'Computing in {dtype}'
  if 'attention' in layers:
    width = model_configs.vit_of(config.model).hidden_size
    is_plain = not (dropout or relative)
    choose = functools.partial(
      attention.choose, name, dtype, width // layers.num_heads, plain=is_plain
    )
    few_tokens = attention_kernels.FEW_TOKENS
    with jax.set_mesh(mesh):
      for_few, for_many = choose(few_tokens), choose(few_tokens + 1)
    description += f' with {for_few} attention'
    if for_many != for_few:
      description += f', {for_many} above {few_tokens} tokens'
  if platform != 'cpu' and dtype == 'float32' and 'dtype' in config.model:
    description += '; --config.model.dtype=auto (bfloat16) is faster'
  return description


def make_program(
  config: ml_collections.ConfigDict,
  metadata: Mapping[str, Any],
  mesh: jax.sharding.Mesh,
) -> Program:
  """Builds task, optimiser and update of a config; computes nothing.

  The complete config has numbers of steps; `metadata` are the task's, of the training
  data, such as class names. ValueError if they do not fit, attention does not run on
  the devices, or the rules for sharding or learning rates match nothing.
  """
  _computation(config, mesh)
  config = config.copy_and_resolve_references()
  if 'dtype' in config.model:
    platform = mesh.devices.flat[0].platform
    config.model.dtype = dtypes.resolve(config.model.dtype, platform)
  task = run_config.get_task(config.task)(config, metadata)
  schedule = schedules.create_learning_rate_schedule(
    config.total_steps,
    config.base_lr,
    config.decay_type,
    config.warmup_steps,
    decay_at=config.decay_at,
    decay_args=config.decay_args.to_dict(),
  )
  rng = jax.random.key(config.seed)
  # The functions below share one trace; inlined, their programs are the same.
  init = jax.jit(lora.adapted(task.init, config), inline=True)
  factors = rate_factors.make(config, lambda: jax.eval_shape(init, rng)[0])
  tx = optim.get_optimizer(config, schedule, factors)
  merge = functools.partial(lora.merged, config=config)
  create_state, abstract = state_lib.abstract_state(
    init, tx, rng, mesh, config.sharding_rules
  )
  update = state_lib.make_update(
    task, tx, schedule, config.seed, config.accum_steps, factors, merge
  )
  return Program(task, update, create_state, abstract)


def make_update_fn(
  *,
  apply_fn: Callable[..., jax.Array],
  accum_steps: int | None,
  tx: optax.GradientTransformation,
) -> Callable[..., tuple[Any, Any, jax.Array, jax.Array]]:
  """Returns a compiled update for training loops of users, as in the original.

  `apply_fn` is `model.apply`, `accum_steps` the number of micro-batches of a batch,
  and `tx` an optax.GradientTransformation. The update is a function (params, opt_state,
  batch, rng) -> (params, opt_state, loss, new rng). `batch` has `image` [B, H, W, C]
  and `label` [B, classes]; the loss is the softmax cross-entropy. `params` are donated:
  use the returned ones.
  """
  steps = accum_steps or 1

  def update_fn(
    params: Any, opt_state: optax.OptState, batch: dict[str, Any], rng: jax.Array
  ) -> tuple[Any, Any, jax.Array, jax.Array]:
    patches.check_keys(rng)
    _, new_rng = jax.random.split(rng)

    def loss_fn(params: Any, rows: Any, key: jax.Array) -> jax.Array:
      logits = apply_fn(
        {'params': params}, rows['image'], train=True, rngs={'dropout': key}
      )
      return losses.softmax_xent(logits, rows['label']).mean()

    def compute(rows: Any, number: Any) -> tuple[Any, Any]:
      key = jax.random.fold_in(rng, number)
      return jax.value_and_grad(loss_fn)(params, rows, key)

    total = optim.accumulate(compute, batch, steps)
    loss, grads = jax.tree.map(lambda x: x / steps, total)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss, new_rng

  return jax.jit(update_fn, donate_argnums=0)


class Prepared(NamedTuple):
  """Everything that a run needs, checked and opened; nothing is compiled yet."""

  config: ml_collections.ConfigDict  # Complete, with numbers of steps.
  mesh: jax.sharding.Mesh
  program: Program
  metadata: dict[str, Any]  # The task's, of the training data.
  train: Any  # The training data, see vit_jax.data.sources.Source.
  tests: dict[str, Any]  # Evaluation data, by the name of the evaluation.
  evaluators: dict[str, list]  # By the name of the evaluation.
  pictures: Any  # Draws images during training; see vit_jax.figures.pictures.
  labels: np.ndarray | None  # Classes of the training examples, if the run needs them.

  @property
  def metrics(self) -> dict[str, metrics_lib.Metric]:
    """The metrics of the evaluators by name, such as 'accuracy_test'."""
    metrics = {}
    for name, evaluators in self.evaluators.items():
      for evaluator in evaluators:
        for metric, kind in evaluator.metrics.items():
          metrics[f'{metric}_{name}'] = kind
    return metrics


def prepare(config: ml_collections.ConfigDict, workdir: str | None = None) -> Prepared:
  """Checks a config, opens its data and builds its program.

  ValueError or FileNotFoundError if the config, the data or the mesh are wrong.
  The list of a folder's images is stored in the workdir, see sources.open_split.
  """
  stored: Mapping[str, Any] = {}
  if workdir is not None:
    stored = workdir_lib.stored_config(workdir)
  config = checkpoint.with_model(config, stored)
  config = run_config.complete(checkpoint.with_preparation(config, stored))
  workdir_lib.keep_dtype(stored, config)
  mesh = check(config)
  config = pixel_statistics.resolve(config, stored)
  config = run_config.with_test_folder(config)
  processes.agree('the config', workdir_lib.facts(config))
  if workdir is not None:
    workdir_lib.check_config(workdir, config)
    if not checkpoints_lib.has_checkpoint(workdir):
      checkpoint.check_exists(config)
  task_class = run_config.get_task(config.task)
  features = task_class.record_features(config)
  train = sources.open_split(config, config.pp.train, features, workdir=workdir)
  metadata = {
    **task_class.make_metadata(config, train),
    **_learned(task_class, config, train, workdir),
  }
  evaluations = run_config.evaluations(config)
  tests = {}
  for name, split, dataset in evaluations:
    tests[name] = sources.open_for(
      config, task_class, metadata, split, dataset, workdir
    )
  config = run_config.resolve_steps(config, train.num_examples)
  train, labels, class_counts = _balance(task_class, config, train, workdir)
  program = make_program(config, {**metadata, **class_counts}, mesh)
  evaluators = _make_evaluators(program.task, mesh, tests, workdir)
  images = pictures.Pictures(program.task, mesh, next(iter(tests.values())))
  prepared = Prepared(
    config, mesh, program, metadata, train, tests, evaluators, images, labels
  )
  if config.best_metric not in prepared.metrics:
    raise ValueError(
      f"best_metric='{config.best_metric}' is not measured on the data of its "
      f'evaluation: use one of {", ".join(prepared.metrics)} (config.best_metric)'
    )
  return prepared


def _balance(
  task_class: Any, config: ml_collections.ConfigDict, train: Any, workdir: str | None
) -> tuple[Any, np.ndarray | None, dict[str, list[int]]]:
  """Returns the training data in the order of `config.sampling`, labels and counts.

  The labels are None and the counts are {} unless the run needs them.
  """
  is_balanced = config.sampling == 'balanced'
  needs_counts = task_class.needs_class_counts(config)
  if not (is_balanced or needs_counts):
    return train, None, {}
  labels = balance.labels(config, train, workdir)
  if is_balanced:
    train = balance.balanced(train, labels)
  if not needs_counts:
    return train, labels, {}
  counts = balance.counts(labels, train.class_names)
  return train, labels, {'class_counts': counts.tolist()}


def _make_evaluators(
  task: Any, mesh: jax.sharding.Mesh, tests: Mapping[str, Any], workdir: str | None
) -> dict[str, list[Any]]:
  """Returns the evaluators by the name of the evaluation."""
  evaluators: dict[str, list[Any]] = {}
  for name, split, dataset in run_config.evaluations(task.config):
    open_split = _opener(task, dataset, workdir, {split: tests[name]})
    evaluation = base.Evaluation(task, mesh, split, open_split, workdir)
    entries = run_evaluators.run_entries(task.config)
    instances = [entry.make(evaluation) for entry in entries if entry.is_in(name)]
    finals = [x for x in instances if getattr(x, 'final', False)]
    others = [x for x in instances if not getattr(x, 'final', False)]
    evaluators[name] = [
      *base.sharing_passes(evaluation, others),
      *base.sharing_passes(evaluation, finals),
    ]
  return evaluators


def _opener(
  task: Any, dataset: str | None, workdir: str | None, opened: Mapping[str, Any]
) -> Callable[..., Any]:
  """Returns the `open_split` of an Evaluation."""

  def open_split(
    split: str, more_features: tuple[str, ...] = (), other_dataset: str | None = None
  ) -> Any:
    if split in opened and not more_features and not other_dataset:
      return opened[split]
    metadata = {} if other_dataset else task.metadata
    data = other_dataset or dataset
    return sources.open_for(
      task.config, type(task), metadata, split, data, workdir, more_features
    )

  return open_split


def _learned(
  task_class: Any, config: ml_collections.ConfigDict, source: Any, workdir: str | None
) -> dict[str, Any]:
  """Returns metadata that the run learned before, or learns now."""
  if not task_class.LEARNED:
    return {}
  stored = workdir and workdir_lib.stored(workdir, task_class.METADATA)
  if stored:
    return {name: stored[name] for name in task_class.LEARNED}
  return task_class.learn(config, source)


def check(config: ml_collections.ConfigDict) -> jax.sharding.Mesh:
  """Checks a complete config without data and workdir; returns its mesh."""
  run_evaluators.check(config)
  schedules.check(config)
  optim.check(config)
  for name in config.trackers:
    console.require(name, name, f"trackers=('{name}',)")
  mesh = sharding.make_mesh(config.mesh)
  run_config.check_batch(config, sharding.batch_shards(mesh))
  run_config.check_sequence(config, sharding.sequence_shards(mesh))
  run_config.check_memory(config, jax.process_count())
  return mesh


def check_start(prepared: Prepared, workdir: str) -> dict[str, Any]:
  """Checks that a run can start or resume in a workdir; writes nothing.

  Returns the weights that the config names, by path; {} if it names none, or the
  run resumes from a checkpoint with all parameters.
  """
  config, program = prepared.config, prepared.program
  weights = _pretrained(prepared) if config.lora.rank else {}
  data = fingerprints(prepared, weights)
  processes.agree('the data', workdir_lib.flatten(data))
  workdir_lib.check(workdir, config, prepared.metadata, data)
  if _has_checkpoint(workdir):
    return weights
  weights = weights or _pretrained(prepared)
  program.task.check_weights(weights, program.abstract.params)
  return weights


@processes.by_first('looking for checkpoints')
def _has_checkpoint(workdir: str) -> bool:
  return checkpoints_lib.has_checkpoint(workdir)


def _pretrained(prepared: Prepared) -> dict[str, Any]:
  """Returns the weights that the config names, by path."""
  abstract = prepared.program.abstract
  params = lora.without_adapters(abstract.params)
  return checkpoint.pretrained_weights(
    prepared.config, prepared.program.task, params, abstract.extra
  )


def fingerprints(
  prepared: Prepared, weights: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
  """Returns short descriptions of a run's data, for comparison.

  Adapters also depend on the frozen ones of the `weights`, see check_start.
  """
  descriptions = {'train': prepared.train.fingerprint()}
  for name, source in prepared.tests.items():
    descriptions[f'evaluation {name}'] = source.fingerprint()
  params = prepared.program.abstract.params
  frozen = lora.base(weights or {}, params, prepared.config)
  return descriptions | lora.fingerprint(frozen)


def start(
  prepared: Prepared, workdir: str, weights: dict[str, Any]
) -> tuple[checkpoints_lib.Checkpoints, state_lib.TrainState, int]:
  """Creates the workdir; returns checkpoints, initial state, and its step.

  The state comes from the first of these that exists: the newest complete
  checkpoint; the weights that the config names, see check_start; random
  numbers.
  """
  config, program = prepared.config, prepared.program
  data = fingerprints(prepared, weights)
  previous = workdir_lib.stored_config(workdir)
  workdir_lib.create(workdir, config, prepared.metadata, data)
  if jax.process_index() == 0:
    for source in (prepared.train, *prepared.tests.values()):
      source.store(workdir)
    balance.store(prepared.train, prepared.labels, workdir)
  checkpoints = checkpoints_lib.Checkpoints(
    workdir,
    config.keep_checkpoints,
    config.best_metric,
    run_evaluators.is_low(config),
  )
  abstract = program.abstract
  params = lora.trained(abstract.params, config)
  state, step = checkpoints.restore(abstract.replace(params=params))
  if config.lora.rank and step:
    frozen = lora.base(weights, abstract.params, config)
    params = lora.whole(state.params, frozen, abstract.params)
    state = state.replace(params=params)
  if not step:
    weights = weights or _pretrained(prepared)
    state = program.create_state(weights)
    if weights:
      console.log(_describe_start(lora.without_adapters(abstract.params), weights))
  elif step == previous['total_steps'] < config.total_steps:
    console.log(
      f'Training the finished run of {step} steps on to step {config.total_steps}. '
      'Its learning rate now follows a run of this length.'
    )
  elif step < config.total_steps:
    console.log(f'Resuming from step {step}.')
  return checkpoints, state, step


def _describe_start(params: Any, weights: Mapping[str, Any]) -> str:
  """Describes which parameters of a run come from weights."""
  loaded: set[str] = set()
  new: set[str] = set()
  for path in flax.traverse_util.flatten_dict(params, sep='/'):
    names = loaded if path in weights else new
    names.add(path.split('/')[0])
  if len(loaded) < len(new):
    collections = ', '.join(sorted(loaded))
    return f'Starting from pre-trained weights of {collections}; the rest is new.'
  heads = f', with a new {", ".join(sorted(new))}' if new else ''
  return f'Starting from pre-trained weights{heads}.'


def train_and_evaluate(
  config: ml_collections.ConfigDict,
  workdir: str,
  workdir_lock: lock.Holder | None = None,
) -> tuple[state_lib.TrainState, dict[str, Any] | None]:
  """Trains to the last step of a config, resuming from the newest checkpoint.

  Args:
    config: has the keys of vit_jax/configs/common.py.
    workdir: folder for checkpoints, metrics and config, local or gs://.
    workdir_lock: the lock of the workdir, if the caller has taken it already.

  Returns:
    The final TrainState, and the metrics of the last evaluation.

  Raises:
    ValueError, FileNotFoundError: if the config, data, mesh or workdir are
      wrong, before anything is compiled, or if the devices have too little memory.
      The workdir is not written.
    FloatingPointError: if the loss is not finite.
    OSError: if the workdir cannot be written, or was moved or deleted.
    Interrupted: after a signal, when everything is saved.
  """
  start_time = time.perf_counter()
  workdir = files.expanded(workdir)
  prepared = prepare(config, workdir)
  weights = check_start(prepared, workdir)
  with contextlib.ExitStack() as stack:
    if workdir_lock is None:
      workdir_lock = stack.enter_context(lock.Holder(workdir))
    _describe(prepared)
    if not _has_checkpoint(workdir):
      memory.check(prepared.config, prepared.program, prepared.mesh)
    checkpoints, state, step = start(prepared, workdir, weights)
    del weights  # Frees their memory.
    run = loop.Run(prepared, workdir, checkpoints, state, step)
    metrics = _train(run, workdir_lock)
  _summarise(run, metrics or {}, time.perf_counter() - start_time)
  return run.state, metrics


def _train(run: loop.Run, workdir_lock: lock.Holder) -> dict[str, Any] | None:
  """Makes the remaining updates; returns the last metrics."""
  prepared, step = run.prepared, run.step
  config = prepared.config
  task = prepared.program.task
  mesh = prepared.mesh
  with (
    jax.set_mesh(mesh),
    contextlib.closing(run),
    stopping.StopRequest() as stop,
    run.checkpoints,
  ):
    metrics = run.catch_up(stop)
    if not run.done:
      workdir_lock.check()
      params = lora.merged(run.state.params, config)
      extra = run.state.extra
      try:
        task.begin(
          params, extra, prepared.train, mesh, run.workdir, stop.should_interrupt
        )
      except stopping.Stopped as e:
        raise Interrupted(step, stop.signal) from e
    batches = input_pipeline.train_batches(
      config, prepared.train, task.example, mesh, step
    )
    while not run.done:
      run.update(next(batches))
      if run.due(config.progress_every):
        run.report()
      metrics = run.evaluate(stop) if run.due(config.eval_every) else None
      is_best = metrics is not None and run.early_stopping.has_improved
      stop_now = stop.after(run.step)
      if stop_now:
        console.log(f'Stopping: saving step {run.step} ...')
      if stop_now or is_best or run.due(config.checkpoint_every):
        workdir_lib.check_present(run.workdir)
        workdir_lock.check()
        run.save()
      if stop_now:
        run.checkpoints.close()
        raise Interrupted(run.step, stop.signal)
  return metrics


def _describe(prepared: Prepared) -> None:
  """Prints a description of the run."""
  config, mesh, program = prepared.config, prepared.mesh, prepared.program
  params = program.abstract.params
  model_name = config.model.get('model_name') or 'model'
  num_params = sum(x.size for x in jax.tree.leaves(params))
  devices = console.pluralize(mesh.size, f'{mesh.devices.flat[0].platform} device')
  hosts = console.pluralize(jax.process_count(), 'process')
  console.log(
    f'{model_name}, {num_params:,} parameters, on {devices} in {hosts}, mesh '
    f'{dict(mesh.shape)}.\n{_describe_data(prepared)}'
  )
  if classes := '\n'.join(_describe_classes(prepared)):
    # The runs of a study print it once.
    console.log(classes, key=f'classes of {config.dataset}')
  lines = [
    _describe_length(prepared),
    f'{_computation(config, mesh)}.',
    *_warnings_of_length(prepared),
  ]
  frozen = sum(optim.frozen_sizes(lora.rules(config), params).values())
  if frozen:
    lines.append(f'{frozen:,} of the parameters are frozen.')
  rows = sharding.report(params)
  if any(row['spec'] != 'replicated' for row in rows):
    lines += [f'Parameters, {row["spec"]}: {sharding.describe(row)}.' for row in rows]
  if copied := sharding.not_split(params, mesh):
    lines.append(f'{copied}.')
  console.log('\n'.join(lines))


def _describe_data(prepared: Prepared) -> str:
  config = prepared.config
  evaluations = []
  for name, split, dataset in run_config.evaluations(config):
    text = f"{prepared.tests[name].num_examples:,} ('{split}')"
    evaluations.append(f'{text} of {dataset}' if dataset else text)
  examples = console.pluralize(prepared.train.num_examples, 'training example')
  line = (
    f"{mixture.describe(config.dataset)}: {examples} ('{config.pp.train}'), "
    f'{" and ".join(evaluations)} for evaluation'
  )
  objective = prepared.program.task.describe()
  return f'{line}, {objective}.' if objective else f'{line}.'


def _describe_classes(prepared: Prepared) -> Iterator[str]:
  """Yields lines on the classes of the images, as far as their labels are known."""
  class_names = prepared.metadata.get('class_names')
  if not class_names:
    return
  train_labels = prepared.labels
  if train_labels is None:
    train_labels = prepared.train.labels()
  test_labels = {}
  for name, source in prepared.tests.items():
    labels = source.labels()
    if labels is not None:
      test_labels[name] = labels
  yield from class_counts.describe(train_labels, test_labels, class_names)
  yield from class_counts.warnings(
    train_labels, test_labels, class_names, prepared.config.loss
  )


def _describe_length(prepared: Prepared) -> str:
  config = prepared.config
  images = 'image' if config.batch == 1 else 'images'
  if config.pp.channels == 1:
    images = f'grey {images}'
  elif config.pp.channels != 3:
    images = f'{config.pp.channels}-channel {images}'
  if not config.pp.sides:  # Canvases have several sizes.
    height, width = preprocess.crop_size(config.pp)
    images += f' of {height}x{width} pixels'
  steps = console.pluralize(config.total_steps, 'step')
  epochs = config.total_steps * config.batch / prepared.train.num_examples
  return f'{steps} of {config.batch:,} {images}: {epochs:,.1f} epochs.'


def _warnings_of_length(prepared: Prepared) -> Iterator[str]:
  """Yields remarks on a batch that is too large, and on few steps."""
  config = prepared.config
  num_examples = prepared.train.num_examples
  if config.batch > num_examples:
    yield (
      f'A batch of {config.batch:,} images repeats each of the {num_examples:,} '
      f'training images {config.batch / num_examples:.1f} times, which is slower and '
      f'adds nothing: lower --config.batch to {num_examples:,} or less.'
    )
  steps = config.total_steps
  if steps < _FEW_STEPS:
    count = '1 update is' if steps == 1 else f'{steps} updates are'
    yield (
      f'{count} too few to learn much: lower --config.batch or train longer '
      '(--config.total_epochs or --config.total_steps).'
    )


def _describe_early_stop(run: loop.Run) -> str:
  config = run.config
  options = config.early_stopping
  margin = f' by more than {options.min_delta:g}' if options.min_delta else ''
  return (
    f'Stopped early at step {run.step} of {config.total_steps}: {config.best_metric} '
    f'has not improved{margin} in {console.pluralize(options.patience, "evaluation")}.'
  )


def _summarise(run: loop.Run, metrics: Mapping[str, Any], seconds: float) -> None:
  """Prints final results, and suggests the next command."""
  prepared, workdir = run.prepared, run.workdir
  best_step = None
  if run.early_stopping.stops:
    best_step = run.checkpoints.best_step()
    console.log(_describe_early_stop(run))
  if best_step is not None:
    console.log(
      f'The best checkpoint is step {best_step}: pass --step={best_step} to use it.'
    )
  values = {name: value for name, value in metrics.items() if name != 'step'}
  results = metrics_lib.format_metrics(values, prepared.metrics)
  lines = [
    f'\nDone in {console.duration(seconds)}: {results}.',
    f'  checkpoints  {workdir}/checkpoints',
    f'  metrics      {workdir}/metrics.jsonl',
    f'  TensorBoard  tensorboard --logdir={workdir}',
    *(f'  picture      {path}' for path in run.pictures),
  ]
  console.log('\n'.join(lines))
  if jax.process_index():
    return
  arguments = [f'--workdir={shlex.quote(str(workdir))}']
  if best_step is not None:
    arguments.append(f'--step={best_step}')
  task_name = prepared.config.task
  if task_name not in run_config.TASKS:
    arguments.append(f'--task={shlex.quote(task_name)}')
  test = next(iter(prepared.tests.values()))
  arguments.append(shlex.quote(str(sources.example_file(test, workdir))))
  if flags := prepared.program.task.flags_to_predict():
    arguments.append(flags)
  console.log('To predict an image:\n  vit_jax predict ' + ' '.join(arguments))
