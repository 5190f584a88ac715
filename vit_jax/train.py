"""Trains and evaluates any task on any mesh: the only training loop.

python -m vit_jax.main --config=configs/digits.py --workdir=/tmp/digits
"""

from collections.abc import Callable
import contextlib
import functools
import shlex
import time
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import ml_collections
import optax

from vit_jax import checkpoint, console, input_pipeline, preprocess
from vit_jax.configs import models as model_configs
from vit_jax.data import mixture, sources
from vit_jax.distributed import files, processes, sharding
from vit_jax.evaluators import probes, real
from vit_jax.figures import pictures
from vit_jax.layers import attention, dtypes, patches, position_kinds
from vit_jax.learning import lora, losses, optim, state as state_lib
from vit_jax.run import (
  checkpoints as checkpoints_lib,
  config as run_config,
  lock,
  loop,
  memory,
  metrics as metrics_lib,
  stopping,
  workdir as workdir_lib,
)

say = console.say
_FEW = 20  # Runs of fewer updates are most likely a mistake.
Interrupted = stopping.Interrupted


class Program(NamedTuple):
  """The program of a config and its metadata; needs no data."""

  task: Any  # The objective, a vit_jax.tasks.base.Task.
  update: Callable  # (state, batch) -> (state, metrics), not compiled.
  create_state: Callable  # (weights by path, possibly empty) -> initial TrainState.
  abstract: state_lib.TrainState  # Shapes, types and shardings of the state.

  def jit_update(self) -> Callable:
    """Returns the jitted update, which donates the state."""
    return jax.jit(
      self.update,
      donate_argnums=0,
      out_shardings=(jax.tree.map(lambda x: x.sharding, self.abstract), None),
    )


def _computation(config, mesh) -> str:
  """Describes dtype and attention; ValueError if attention cannot run on the mesh."""
  layers = model_configs.layers_of(config.model)
  name = layers.get('attention', attention.AUTO)
  platform = mesh.devices.flat[0].platform
  dtype = dtypes.resolve(config.model.get('dtype', 'float32'), platform)
  dropout = layers.get('attention_dropout_rate', 0.0)
  relative = layers.get('position_embedding') in position_kinds.RELATIVE
  key = f'config.{model_configs.place_of_layers(config.model)}.attention'
  attention.check(name, dropout, platform, dtype, bias=relative, key=key)
  words = f'Computing in {dtype}'
  if 'attention' in layers:
    width = model_configs.vit_of(config.model).hidden_size
    with jax.set_mesh(mesh):
      plain = not (dropout or relative)
      name = attention.choose(name, dtype, width // layers.num_heads, plain)
    words += f' with {name} attention'
  if platform != 'cpu' and dtype == 'float32' and 'dtype' in config.model:
    words += '; --config.model.dtype=auto (bfloat16) is faster'
  return words


def make_program(config, metadata, mesh) -> Program:
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
  schedule = optim.create_learning_rate_schedule(
    config.total_steps,
    config.base_lr,
    config.decay_type,
    config.warmup_steps,
    decay_at=config.decay_at,
  )
  rng = jax.random.key(config.seed)
  init, rules, factors = lora.adapted(task.init, config), lora.rules(config), None
  if rules:
    params, _ = jax.eval_shape(init, rng)
    factors = optim.multipliers(rules, params)
  tx = optim.get_optimizer(config, schedule, factors)
  merge = functools.partial(lora.merged, config=config)
  create_state, abstract = state_lib.abstract_state(
    init, tx, rng, mesh, config.sharding_rules
  )
  update = state_lib.make_update(
    task, tx, schedule, config.seed, config.accum_steps, factors, merge
  )
  return Program(task, update, create_state, abstract)


def make_update_fn(*, apply_fn: Callable, accum_steps: int | None, tx) -> Callable:
  """Returns a compiled update for training loops of users, as in the original.

  `apply_fn` is `model.apply`, `accum_steps` the number of micro-batches of a batch,
  and `tx` an optax.GradientTransformation. The update is a function (params, opt_state,
  batch, rng) -> (params, opt_state, loss, new rng). `batch` has `image` [B, H, W, C]
  and `label` [B, classes]; the loss is the softmax cross-entropy. `params` are donated:
  use the returned ones.
  """
  steps = accum_steps or 1

  def update_fn(params, opt_state, batch, rng):
    patches.check_keys(rng)
    _, new_rng = jax.random.split(rng)

    def loss_fn(params, rows, key):
      logits = apply_fn(
        {'params': params}, rows['image'], train=True, rngs={'dropout': key}
      )
      return losses.softmax_xent(logits, rows['label']).mean()

    def compute(rows, number):
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


def prepare(config: ml_collections.ConfigDict, workdir=None) -> Prepared:
  """Checks a config, opens its data and builds its program.

  ValueError or FileNotFoundError if the config, the data or the mesh are wrong.
  The list of a folder's images is stored in the workdir, see sources.open_split.
  """
  stored = workdir_lib.stored_config(workdir) if workdir is not None else {}
  config = checkpoint.with_model(config, stored)
  config = run_config.complete(checkpoint.with_preparation(config, stored))
  workdir_lib.keep_dtype(stored, config)
  mesh = check(config)
  config = run_config.with_test_folder(config)
  processes.agree('the config', workdir_lib.facts(config))
  if workdir is not None:
    workdir_lib.check_config(workdir, config)
    if not checkpoints_lib.has_checkpoint(workdir):
      checkpoint.check_exists(config)
  task_class = run_config.get_task(config.task)
  train = sources.open_split(
    config, config.pp.train, task_class.FEATURES, workdir=workdir
  )
  metadata = {
    **task_class.make_metadata(config, train),
    **_learned(task_class, config, train, workdir),
  }
  evaluations = run_config.evaluations(config)
  tests = {
    name: sources.open_for(config, task_class, metadata, split, dataset, workdir)
    for name, split, dataset in evaluations
  }
  config = run_config.resolve_steps(config, train.num_examples)
  program = make_program(config, metadata, mesh)
  evaluators = {}
  for name, split, dataset in evaluations:
    opened = {split: tests[name]}
    open_split = _opener(program.task, dataset, workdir, opened)
    evaluators[name] = [*program.task.evaluators(mesh, split, open_split)]
    if len(evaluators) == 1:
      evaluators[name] += _probes(program.task, mesh, workdir, split, open_split)
  _check_best(config.best_metric, evaluators)
  drawn = pictures.Pictures(program.task, mesh, next(iter(tests.values())))
  return Prepared(config, mesh, program, metadata, train, tests, evaluators, drawn)


def _check_best(best: str, evaluators):
  """Raises ValueError if the evaluators of a run do not measure its best metric."""
  for name, those in evaluators.items():
    metrics = [getattr(each, 'metrics', None) for each in those]
    if best.endswith(f'_{name}') and None not in metrics:
      known = [f'{each}_{name}' for group in metrics for each in group or ()]
      if best not in known:
        raise ValueError(
          f"best_metric='{best}' is not measured on the data of the evaluation "
          f"'{name}': use one of {', '.join(known)} (config.best_metric)"
        )


def _opener(task, dataset, workdir, opened) -> Callable:
  """Returns the `open_split` of vit_jax.tasks.base.Task.evaluators."""

  def open_split(wanted, further=(), other=None):
    if wanted in opened and not further and not other:
      return opened[wanted]
    given = task.config, type(task), {} if other else task.metadata
    return sources.open_for(*given, wanted, other or dataset, workdir, further)

  return open_split


def _learned(task_class, config, source, workdir) -> dict[str, Any]:
  """Returns metadata that the run learned before, or learns now."""
  if not task_class.LEARNED:
    return {}
  stored = workdir and workdir_lib.stored(workdir, task_class.METADATA)
  if stored:
    return {name: stored[name] for name in task_class.LEARNED}
  return task_class.learn(config, source)


def check(config: ml_collections.ConfigDict) -> jax.sharding.Mesh:
  """Checks a complete config without data and workdir; returns its mesh."""
  run_config.check(config)
  for name in config.trackers:
    console.needed(name, name, f"trackers=('{name}',)")
  mesh = sharding.make_mesh(config.mesh)
  run_config.check_batch(config, sharding.batch_shards(mesh))
  run_config.check_sequence(config, sharding.sequence_shards(mesh))
  run_config.check_memory(config, jax.process_count())
  return mesh


def _probes(task, mesh, workdir, split, open_split) -> list:
  """Returns the evaluators that the config adds to the task's."""
  config = task.config
  found: list[Any] = []
  if config.fewshot.shots or config.fewshot.knn:
    found.append(probes.FewShot(task, mesh, workdir))
  if config.layer_probe:
    found.append(probes.LayerProbe(task, mesh, workdir))
  if config.real_labels is not None:
    found.append(real.Real(task, mesh, open_split, split, config.real_labels))
  return found


def check_start(prepared: Prepared, workdir) -> dict:
  """Checks that a run can start or resume in a workdir; writes nothing.

  Returns the weights that the config names, by path; {} if it names none, or the
  run resumes from a checkpoint with all parameters.
  """
  config, program = prepared.config, prepared.program
  weights = _pretrained(prepared) if config.lora.rank else {}
  data = fingerprints(prepared, weights)
  processes.agree('the data', workdir_lib.flatten(data))
  workdir_lib.check(workdir, config, prepared.metadata, data)
  begun = processes.from_first(
    'looking for checkpoints', lambda: checkpoints_lib.has_checkpoint(workdir)
  )
  if begun:
    return weights
  weights = weights or _pretrained(prepared)
  program.task.check_weights(weights, program.abstract.params)
  memory.check(config, program, prepared.mesh)
  return weights


def _pretrained(prepared: Prepared) -> dict:
  """Returns the weights that the config names, by path."""
  abstract = prepared.program.abstract
  params = lora.without_adapters(abstract.params)
  return checkpoint.pretrained_weights(
    prepared.config, prepared.program.task, params, abstract.extra
  )


def fingerprints(prepared: Prepared, weights=()) -> dict[str, dict]:
  """Returns short descriptions of a run's data, for comparison.

  Adapters also depend on the frozen ones of the `weights`, see check_start.
  """
  sources_ = {f'evaluation {k}': v for k, v in prepared.tests.items()}
  frozen = lora.base(weights, prepared.program.abstract.params, prepared.config)
  return {
    name: source.fingerprint()
    for name, source in {'train': prepared.train, **sources_}.items()
  } | lora.fingerprint(frozen)


def start(prepared: Prepared, workdir, weights):
  """Creates the workdir; returns checkpoints, initial state, and its step.

  The state comes from the first of these that exists: the newest complete
  checkpoint; the weights that the config names, see check_start; random
  numbers.
  """
  config, program = prepared.config, prepared.program
  data = fingerprints(prepared, weights)
  workdir_lib.create(workdir, config, prepared.metadata, data)
  if jax.process_index() == 0:
    for source in (prepared.train, *prepared.tests.values()):
      source.store(workdir)
  checkpoints = checkpoints_lib.Checkpoints(
    workdir,
    config.keep_checkpoints,
    config.best_metric,
    run_config.is_low(config),
  )
  _describe(prepared)
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
      say(_describe_start(lora.without_adapters(abstract.params), weights))
  elif step < config.total_steps:
    say(f'Resuming from step {step}.')
  return checkpoints, state, step


def _describe_start(params, weights) -> str:
  """Describes which parameters of a run come from weights."""
  paths = flax.traverse_util.flatten_dict(params, sep='/')
  taken, new = (
    sorted({path.split('/')[0] for path in paths if (path in weights) == known})
    for known in (True, False)
  )
  if len(taken) < len(new):
    return f'Starting from pre-trained weights of {", ".join(taken)}; the rest is new.'
  heads = f', with a new {", ".join(new)}' if new else ''
  return f'Starting from pre-trained weights{heads}.'


def train_and_evaluate(
  config: ml_collections.ConfigDict,
  workdir: str,
  held: lock.Holder | None = None,
):
  """Trains to the last step of a config, resuming from the newest checkpoint.

  `config` has the keys of vit_jax/configs/common.py. Checkpoints, metrics and config go
  to `workdir`, local or gs://, whose lock is `held` if the caller has taken it already.
  Returns the final TrainState, and the metrics of the last evaluation.

  Raises:
    ValueError, FileNotFoundError: if the config, data, mesh or workdir are
      wrong; before anything is compiled or written.
    FloatingPointError: if the loss is not finite.
    OSError: if the workdir cannot be written, or was moved or deleted.
    Interrupted: after a signal, when everything is saved.
  """
  began = time.perf_counter()
  workdir = files.expanded(workdir)
  prepared = prepare(config, workdir)
  weights = check_start(prepared, workdir)
  taken = contextlib.nullcontext(held) if held else lock.Holder(workdir)
  with taken as held:
    begun = start(prepared, workdir, weights)
    del weights  # Frees their memory.
    run, metrics = _train(prepared, workdir, held, *begun)
  _summarise(run, metrics or {}, time.perf_counter() - began)
  return run.state, metrics


def _train(prepared, workdir, held, checkpoints, state, step):
  """Makes the remaining updates; returns the run and the last metrics."""
  config, task, mesh = prepared.config, prepared.program.task, prepared.mesh
  run = loop.Run(prepared, workdir, checkpoints, state, step)
  with (
    jax.set_mesh(mesh),
    contextlib.closing(run),
    stopping.StopRequest() as stop,
    checkpoints,
  ):
    metrics = run.catch_up(stop)
    if step < config.total_steps:
      held.check()
      try:
        params = lora.merged(state.params, config)
        task.begin(params, state.extra, prepared.train, mesh, workdir, stop.now)
      except stopping.Stopped as e:
        raise Interrupted(step, stop.signal) from e
    batches = input_pipeline.train_batches(
      config, prepared.train, task.example, mesh, step
    )
    while run.step < config.total_steps:
      run.update(next(batches))
      if run.due(config.progress_every):
        run.report()
      metrics = run.evaluate(stop) if run.due(config.eval_every) else None
      stop_now = stop.after(run.step)
      if stop_now:
        say(f'Stopping: saving step {run.step} ...')
      if stop_now or run.due(config.checkpoint_every):
        workdir_lib.check_present(workdir)
        held.check()
        run.save()
      if stop_now:
        checkpoints.close()
        raise Interrupted(run.step, stop.signal)
  return run, metrics


def _describe(prepared):
  """Prints a description of the run."""
  config, mesh, program = prepared[:3]
  params, task = program.abstract.params, program.task
  examples, steps = prepared.train.num_examples, config.total_steps
  count = sum(x.size for x in jax.tree.leaves(params))
  tested = ' and '.join(
    f"{prepared.tests[name].num_examples:,} ('{split}')"
    + (f' of {dataset}' if dataset else '')
    for name, split, dataset in run_config.evaluations(config)
  )
  words = task.describe()
  images = 'image' if config.batch == 1 else 'images'
  if config.pp.channels == 1:
    images = f'grey {images}'
  if not config.pp.sides:  # Those of canvases have several sizes.
    images += ' of {}x{} pixels'.format(*preprocess.crop_size(config.pp))
  lines = [
    f'{config.model.get("model_name") or "model"}, {count:,} parameters, on '
    f'{console.counted(mesh.size, f"{mesh.devices.flat[0].platform} device")} in '
    f'{console.counted(jax.process_count(), "process")}, mesh {dict(mesh.shape)}.',
    f'{mixture.describe(config.dataset)}: '
    f'{console.counted(examples, "training example")} '
    f"('{config.pp.train}'), {tested} for evaluation"
    f'{f", {words}" if words else ""}.',
    f'{console.counted(steps, "step")} of {config.batch:,} {images}: '
    f'{steps * config.batch / examples:,.1f} epochs.',
    f'{_computation(config, mesh)}.',
  ]
  times = config.batch / examples
  if times > 1:
    lines.append(
      f'A batch of {config.batch:,} images repeats each of the {examples:,} '
      f'training images {times:.1f} times, which is slower and adds nothing: lower '
      f'--config.batch to {examples:,} or less.'
    )
  if steps < _FEW:
    few = '1 update is' if steps == 1 else f'{steps} updates are'
    lines.append(
      f'{few} too few to learn much: lower --config.batch or train longer '
      '(--config.total_epochs or --config.total_steps).'
    )
  frozen = sum(optim.frozen_sizes(lora.rules(config), params).values())
  if frozen:
    lines.append(f'{frozen:,} of the parameters are frozen.')
  rows = sharding.report(params)
  if any(row['spec'] != 'replicated' for row in rows):
    lines += [f'Parameters, {row["spec"]}: {sharding.describe(row)}.' for row in rows]
  copied = sharding.not_split(params, mesh)
  if copied:
    lines.append(f'{copied}.')
  say('\n'.join(lines))


def _summarise(run, metrics, seconds):
  """Prints final results, and suggests the next command."""
  prepared, workdir = run.prepared, run.workdir
  metrics = {k: v for k, v in metrics.items() if k != 'step'}
  lines = [
    f'\nDone in {console.duration(seconds)}: {metrics_lib.format_metrics(metrics)}.',
    f'  checkpoints  {workdir}/checkpoints',
    f'  metrics      {workdir}/metrics.jsonl',
    f'  TensorBoard  tensorboard --logdir={workdir}',
    *(f'  picture      {path}' for path in run.pictures),
  ]
  say('\n'.join(lines))
  if jax.process_index() == 0:
    test = next(iter(prepared.tests.values()))
    example = sources.example_file(test, workdir)
    name = prepared.config.task
    words = [
      f'--workdir={shlex.quote(str(workdir))}',
      '' if name in run_config.TASKS else f'--task={shlex.quote(name)}',
      shlex.quote(str(example)),
      prepared.program.task.flags_to_predict(),
    ]
    say('To predict an image:\n  vit_jax predict ' + ' '.join(filter(None, words)))
