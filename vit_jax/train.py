"""The training loop, the only one: whatever the task, on any mesh.

python -m vit_jax.main --config=configs/digits.py --workdir=/tmp/digits
"""

from collections.abc import Callable
import contextlib
import importlib
import math
import shlex
import time
from typing import Any
from typing import NamedTuple

from clu import periodic_actions
import jax
from jax.experimental import multihost_utils
import ml_collections
import optax

from vit_jax import checkpoint
from vit_jax import cli
from vit_jax import input_pipeline
from vit_jax import models
from vit_jax import preprocess
from vit_jax.data import sources
from vit_jax.layers import attention
from vit_jax.run import checkpoints as checkpoints_lib
from vit_jax.run import config as run_config
from vit_jax.run import losses
from vit_jax.run import metrics as metrics_lib
from vit_jax.run import optim
from vit_jax.run import progress as progress_lib
from vit_jax.run import state as state_lib
from vit_jax.run import stopping
from vit_jax.run import workdir as workdir_lib
from vit_jax.scale import sharding

say = cli.say


class Program(NamedTuple):
  """All that follows from a config and the classes, before any data is read.

  Attributes:
    task: the objective.
    update: (state, batch) -> (state, metrics), to be compiled.
    create_state: (weights by path, possibly none) -> the initial TrainState.
    abstract: its shapes, types and shardings.
  """

  task: Any
  update: Callable
  create_state: Callable
  abstract: state_lib.TrainState

  def jit_update(self) -> Callable:
    """Returns the update, to be compiled; the state is donated."""
    return jax.jit(
      self.update,
      donate_argnums=0,
      out_shardings=(jax.tree.map(lambda x: x.sharding, self.abstract), None),
    )


def pretrained_weights(config, params) -> dict:
  """Loads the published weights that a config names; {} where it names none.

  Args:
    config: reads `pretrained`, `pretrained_dir`, `model`, `pp.crop`.
    params: the parameters' shapes.

  Raises:
    FileNotFoundError, ValueError: if there is no such file or it does not fit.
  """
  path = config.pretrained
  if path is None and config.pretrained_dir is not None:
    name = config.model_or_filename
    path = (
      checkpoint.augreg_filename(name, config.pretrained_dir)
      if name
      else f'{config.pretrained_dir}/{config.model.model_name}.npz'
    )
  if path is None:
    return {}
  return checkpoint.transferable(
    path,
    params,
    config.model,
    grid=config.pretrained_grid,
    new_grid=models.patch_grid(config.model, preprocess.crop_size(config.pp)),
  )


class Interrupted(Exception):
  """A signal stopped the run, after a checkpoint was saved.

  Attributes:
    step: the step of the checkpoint.
    signal: number of the signal.
  """

  def __init__(self, step: int, signal: int):
    super().__init__(
      f'Stopped at step {step}, which is saved. The same command goes on there.'
    )
    self.step = step
    self.signal = signal


def make_program(config, class_names, mesh) -> Program:
  """Builds task, optimiser and update of a config; computes nothing.

  Args:
    config: with `total_steps` and `warmup_steps` as numbers.
    class_names: the classes of the training data.
    mesh: the mesh.

  Raises:
    ValueError: if model, attention, loss, optimiser, schedule or sharding rules
      are not right.
  """
  encoder = config.model.get('transformer') or {}
  attention.check(
    encoder.get('attention', 'default'),
    encoder.get('attention_dropout_rate', 0.0),
    mesh.devices.flat[0].platform,
    config.model.get('dtype', 'float32'),
  )
  task = importlib.import_module(f'vit_jax.tasks.{config.task}').make(
    config, class_names
  )
  schedule = optim.create_learning_rate_schedule(
    config.total_steps, config.base_lr, config.decay_type, config.warmup_steps
  )
  tx = optim.get_optimizer(config, schedule)
  create_state, abstract = state_lib.abstract_state(
    task.init, tx, jax.random.key(config.seed), mesh, config.sharding_rules
  )
  update = make_update(task.loss, tx, schedule, config.seed, config.accum_steps)
  return Program(task, update, create_state, abstract)


def make_update(
  loss_fn: Callable, tx, schedule: optax.Schedule, seed: int, accum_steps: int
) -> Callable:
  """Returns one update: (state, batch) -> (state, metrics).

  Args:
    loss_fn: (parameters, batch, random key) -> scalar, the mean over the batch.
    tx: the optimiser.
    schedule: learning rate by step.
    seed: seed of the run; dropout's noise follows from (seed, step), and with
      accumulation from the number of the micro-batch too.
    accum_steps: number of micro-batches that a batch is computed in.
  """

  def update(state, batch):
    rng = jax.random.fold_in(jax.random.key(seed), state.step)

    def compute(rows, number):
      key = jax.random.fold_in(rng, number) if accum_steps > 1 else rng
      return jax.value_and_grad(loss_fn)(state.params, rows, key)

    loss, grads = optim.accumulate(compute, batch, accum_steps)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {
      'train_loss': loss,
      'grad_norm': optax.tree.norm(grads),
      'lr': schedule(state.step),
    }
    return state_lib.TrainState(state.step + 1, params, opt_state), metrics

  return update


def make_update_fn(
  *, apply_fn: Callable, accum_steps: int | None, tx
) -> Callable:
  """Returns one compiled update for loops of one's own, as in the original.

  Args:
    apply_fn: `model.apply`.
    accum_steps: number of micro-batches that a batch is computed in.
    tx: an optax.GradientTransformation.

  Returns:
    (params, opt_state, batch, rng) -> (params, opt_state, loss, new rng), where
    `batch` has `image` [B, H, W, C] and `label` [B, classes] and the loss is the
    softmax cross-entropy. `params` are donated: use those that it returns.
  """

  def update_fn(params, opt_state, batch, rng):
    _, new_rng = jax.random.split(rng)

    def loss_fn(params, rows, key):
      logits = apply_fn(
        {'params': params}, rows['image'], train=True, rngs={'dropout': key}
      )
      return losses.softmax_xent(logits, rows['label']).mean()

    def compute(rows, number):
      key = jax.random.fold_in(rng, number)
      return jax.value_and_grad(loss_fn)(params, rows, key)

    loss, grads = optim.accumulate(compute, batch, accum_steps or 1)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss, new_rng

  return jax.jit(update_fn, donate_argnums=0)


def train_and_evaluate(config: ml_collections.ConfigDict, workdir: str):
  """Trains to the end of the config, from the newest checkpoint if there is one.

  Args:
    config: see vit_jax/configs/common.py.
    workdir: folder for checkpoints, metrics and config; gs:// works too.

  Returns:
    The TrainState at the end, and the metrics of the last evaluation.

  Raises:
    ValueError, FileNotFoundError: if config, data, mesh or workdir are not
      right; before anything is compiled or written.
    FloatingPointError: if the loss is no longer a finite number.
    OSError: if a checkpoint cannot be written.
    Interrupted: after a signal, once all is saved.
  """
  began = time.perf_counter()

  # Config, mesh, data.
  config = run_config.complete(config)
  run_config.check(config)
  mesh = sharding.make_mesh(config.mesh)
  run_config.check_batch(config, sharding.batch_shards(mesh))
  train = sources.open_split(config, config.pp.train)
  test = sources.open_split(config, config.pp.test, train.class_names)
  config = run_config.resolve_steps(config, train.num_examples)
  total_steps = config.total_steps

  # Task, optimiser, and the state's shapes and shardings.
  program = make_program(config, train.class_names, mesh)
  abstract = program.abstract

  # The workdir, which is written from here on. The state comes from, in order:
  # the newest complete checkpoint; published weights; random numbers.
  workdir_lib.check(workdir, config)
  weights = {}
  if not checkpoints_lib.has_checkpoint(workdir):
    weights = pretrained_weights(config, abstract.params)
  workdir_lib.create(workdir, config, train.class_names)
  checkpoints = checkpoints_lib.Checkpoints(
    workdir, config.keep_checkpoints, config.best_metric
  )
  _describe(config, abstract, train, test, mesh)
  state, step = checkpoints.restore(abstract)
  if not step:
    weights = weights or pretrained_weights(config, abstract.params)
    state = program.create_state(weights)
    if weights:
      say('Starting from pre-trained weights, with a new head.')
  elif step < total_steps:
    say(f'Going on from the checkpoint of step {step}.')

  update_fn = program.jit_update()
  evaluators = program.task.evaluators(mesh, test)
  batches = input_pipeline.train_batches(config, train, mesh, step)
  log = metrics_lib.MetricsLog(workdir, step)
  progress = progress_lib.Progress(step, total_steps, config.batch)
  profile = periodic_actions.Profile(
    logdir=str(workdir),
    num_profile_steps=config.profile_steps,
    profile_duration_ms=1,  # No least duration: so many steps, and no more.
    first_profile=step + 10,
  )
  unseen = []  # Metrics, still on the devices, that nobody has looked at.
  latest = {}  # Those of the last step that somebody has.

  def due(every):
    return step == total_steps or (every > 0 and step % every == 0)

  def look():
    """Fetches the metrics of the last steps; stops the run if one is not finite."""
    fetched = jax.device_get(unseen)
    for i, metrics in enumerate(fetched):
      _check_finite(metrics, step - len(fetched) + i + 1, checkpoints)
      latest.update(metrics)
    unseen.clear()

  def evaluate(stop):
    """Evaluates and logs; returns None if a signal broke it off."""
    params = state_lib.best_params(state)
    metrics = {}
    with progress.pause():
      for evaluator in evaluators:
        result = evaluator.run(params, stop.now)
        if result is None:
          return None
        metrics.update(result)
    log.write(step, metrics)
    say(f'step {step}/{total_steps}  ' + progress_lib.format_metrics(metrics))
    return metrics

  with (
    jax.set_mesh(mesh),
    contextlib.closing(log),
    contextlib.closing(progress),
    stopping.StopRequest() as stop,
  ):
    done = metrics_lib.find(workdir, step, config.best_metric)
    # All processes must agree on it, also where one sees the file later.
    if not multihost_utils.broadcast_one_to_all(done is not None):
      done = None
      if step and due(config.eval_every):
        done = evaluate(stop)  # A signal had come before it was done.
        if done is None:
          raise Interrupted(step, stop.signal)
    elif step == total_steps:
      say('This run is finished.')
    first = step
    while step < total_steps:
      batch = next(batches)
      if step == first:
        say('Compiling ...')
        compiling = time.perf_counter()
      state, metrics = update_fn(state, batch)
      step += 1
      unseen.append(metrics)
      if len(unseen) > 2:
        # The host may run ahead of the devices, but only so far: a signal then
        # finds little that must be finished before the state can be saved.
        jax.block_until_ready(unseen[-3])
      if step == first + 1:
        look()
        seconds = time.perf_counter() - compiling
        say(f'Compiled in {cli.duration(seconds)}.')
        progress.start(step)
      progress.update(step)
      if config.profile_steps:
        profile(step)

      if due(config.progress_every):
        look()
        rate = progress.rate(step)
        speed = {'img_sec_core_train': rate / mesh.size} if rate else {}
        log.write(step, {**latest, **speed})
        progress.show(step, latest['train_loss'], rate)
      elif len(unseen) >= 1000:
        look()

      done = None
      if due(config.eval_every):
        done = evaluate(stop)

      stop_now = stop.after(step)
      if stop_now:
        say(f'Stopping: step {step} is being saved ...')
      if stop_now or due(config.checkpoint_every):
        with progress.pause():
          look()  # What is saved is good.
          checkpoints.save(step, state, done)
      if stop_now:
        checkpoints.close()
        raise Interrupted(step, stop.signal)

  checkpoints.close()
  _summarise(
    workdir,
    done or {},
    time.perf_counter() - began,
    sources.example_file(test, workdir) if jax.process_index() == 0 else None,
  )
  return state, done


def _check_finite(metrics, step, checkpoints):
  """Stops the run where loss or gradient of a step are no numbers any more."""
  if math.isfinite(metrics['train_loss'] + metrics['grad_norm']):
    return
  checkpoints.wait()
  saved = checkpoints.steps()
  raise FloatingPointError(
    f'loss {metrics["train_loss"]} with gradient norm {metrics["grad_norm"]} at '
    f'step {step}: not finite. Lower --config.base_lr, warm up longer or clip the '
    f'gradient. Last good checkpoint: {f"step {saved[-1]}" if saved else "none"} '
    f"in '{checkpoints.directory}'"
  )


def _describe(config, abstract, train, test, mesh):
  """Says what is about to run."""
  count = sum(x.size for x in jax.tree.leaves(abstract.params))
  epochs = config.total_steps * config.batch / train.num_examples
  say(
    f'{config.model.get("model_name") or "model"}, {count:,} parameters, on '
    f'{mesh.size} {mesh.devices.flat[0].platform} device(s)'
    f' in {jax.process_count()} process(es), mesh {dict(mesh.shape)}.\n'
    f'{config.dataset}: {train.num_examples:,} examples to train on, '
    f'{test.num_examples:,} to test on, {len(train.class_names):,} classes.\n'
    f'{config.total_steps:,} steps of {config.batch:,} images: {epochs:,.1f} '
    'epochs.'
  )
  rows = sharding.report(abstract.params)
  if any(row['spec'] != 'replicated' for row in rows):
    for row in rows:
      say(f'Parameters, {row["spec"]}: {sharding.describe(row)}.')
  copied = sharding.not_split(abstract.params, mesh)
  if copied:
    say(f'{copied}.')


def _summarise(workdir, metrics, seconds, example):
  """Says how it ended, where everything lies and what to do next."""
  metrics = {k: v for k, v in metrics.items() if k != 'step'}
  say(
    f'\nDone in {cli.duration(seconds)}: '
    f'{progress_lib.format_metrics(metrics)}.\n'
    f'  checkpoints  {workdir}/checkpoints\n'
    f'  metrics      {workdir}/metrics.jsonl\n'
    f'  TensorBoard  tensorboard --logdir={workdir}\n'
    'Next, the classes of an image:\n'
    f'  python -m vit_jax.predict --workdir={shlex.quote(str(workdir))} '
    + shlex.quote(str(example))
  )
