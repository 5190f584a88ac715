"""Runs updates, and evaluates, logs and saves at the steps of the config.

Terminals and notebooks show a progress bar, log files plain lines.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import math
import time
from typing import Any

from etils import epath
import jax
import numpy as np
from PIL import Image

from vit_jax import console
from vit_jax.distributed import files, processes
from vit_jax.learning import lora, state as state_lib
from vit_jax.run import (
  checkpoints as checkpoints_lib,
  early_stopping,
  evaluators as run_evaluators,
  memory,
  metrics as metrics_lib,
  stopping,
  workdir as workdir_lib,
)


class Run:
  """The updates of a run, with evaluation, logging and saving.

  Args:
    prepared: the vit_jax.train.Prepared of the run.
    workdir: folder of the run.
    checkpoints: its checkpoints.
    state: the TrainState to start from.
    step: its number of updates.
  """

  def __init__(
    self,
    prepared: Any,
    workdir: str,
    checkpoints: checkpoints_lib.Checkpoints,
    state: state_lib.TrainState,
    step: int,
  ):
    self.prepared = prepared
    self.config = prepared.config
    self.workdir = workdir
    self.checkpoints = checkpoints
    self.state = state
    self.step = step
    self._update = prepared.program.jit_update()
    self._log = metrics_lib.MetricsLog(workdir, step, self.config.trackers)
    self._progress = Progress(step, self.config.total_steps, self.config.batch)
    from clu import periodic_actions  # Imports TensorFlow.

    self._profile = periodic_actions.Profile(
      logdir=str(workdir),
      num_profile_steps=self.config.profile_steps,
      profile_duration_ms=1,  # Only `num_profile_steps` limits the profile.
      first_profile=step + 10,
    )
    # Metrics of the last steps, still on the devices.
    self._pending: list[dict[str, jax.Array]] = []
    # Metrics of the last fetched step.
    self._latest: dict[str, Any] = {}
    # Shapes of the batches that the update is compiled for.
    self._compiled: list[dict[str, tuple[int, ...]]] = []
    if not step:  # See memory.check.
      batch_spec = prepared.program.task.batch_spec(self.config.batch)
      self._compiled.append(_shapes(batch_spec))
    self._has_updated = False
    options = self.config.early_stopping
    earlier: Sequence[Any] = ()
    if options.patience:
      earlier = early_stopping.evaluated(workdir, self.config.best_metric, step)
    self.early_stopping = early_stopping.EarlyStopping(
      options.patience, options.min_delta, run_evaluators.is_low(self.config), earlier
    )
    # Paths of the pictures of the last evaluation.
    self.pictures: list[epath.Path] = []

  @property
  def done(self) -> bool:
    """Whether all updates are made, or the run has stopped early."""
    return self.step == self.config.total_steps or self.early_stopping.stops

  def due(self, every: int) -> bool:
    """Returns whether an action that runs every `every` steps is due now."""
    return self.done or (every > 0 and self.step % every == 0)

  def update(self, batch: Mapping[str, jax.Array]) -> None:
    """Makes one update."""
    is_first = not self._has_updated
    if is_first:
      self._log_start(batch)
    shapes = _shapes(batch)
    if shapes in self._compiled:
      self._update_once(batch)
    else:
      self._compiled.append(shapes)
      self._compile(batch)
    if is_first:
      self.fetch_metrics()
      self._progress.start(self.step)
    self._progress.update(self.step)
    if self.config.profile_steps:
      self._profile(self.step)

  def _log_start(self, batch: Mapping[str, jax.Array]) -> None:
    """Writes the config and the first images for TensorBoard."""
    self._has_updated = True
    self._log.write_config(self.step, self.config)
    images = self.prepared.pictures.training(batch, self.step)
    self._log.write_pictures(self.step + 1, images)

  def _update_once(self, batch: Mapping[str, jax.Array]) -> None:
    with memory.suggesting_remedy(self.config, self.prepared.program.task.image_size):
      self.state, metrics = self._update(self.state, batch)
      self.step += 1
      self._pending.append(metrics)
      if len(self._pending) > 2:
        # Limits how far the host runs ahead of the devices, so that after a
        # signal the state can be saved soon.
        jax.block_until_ready(self._pending[-3])
    if len(self._pending) >= 1000:
      self.fetch_metrics()

  def _compile(self, batch: Mapping[str, jax.Array]) -> None:
    """Makes the first update with images of another size, which compiles it."""
    self.fetch_metrics()  # Waits for the updates before this one.
    sizes = self.prepared.program.task.image_sizes
    with (
      self._progress.pause(steps=1),
      memory.compiling(batch, len(self._compiled), sizes),
    ):
      self._update_once(batch)
      self.fetch_metrics()

  def fetch_metrics(self) -> None:
    """Fetches pending metrics; raises FloatingPointError if not finite."""
    fetched = jax.device_get(self._pending)
    for i, metrics in enumerate(fetched):
      _check_finite(metrics, self.step - len(fetched) + i + 1, self.checkpoints)
      self._latest.update(metrics)
    self._pending.clear()

  def report(self) -> None:
    """Logs and shows the metrics of the last step, and the speed."""
    self.fetch_metrics()
    metrics = dict(self._latest)
    rate = self._progress.rate(self.step)
    if rate:
      metrics['img_sec_core_train'] = rate / self.prepared.mesh.size
    self._log.write(self.step, metrics)
    self._progress.show(self.step, self._latest['train_loss'], rate)

  def evaluate(self, stop: stopping.StopRequest) -> dict[str, Any] | None:
    """Evaluates and logs; returns None if a signal interrupts the evaluation."""
    params = lora.merged(state_lib.best_params(self.state), self.config)
    was_done = self.done
    with self._progress.pause():
      try:
        finals = (False, True) if was_done else (False,)
        metrics = self._measure(params, stop, finals)
        self._note_progress(metrics)
        if self.done and not was_done:
          metrics |= self._measure(params, stop, (True,))
      except stopping.Stopped:
        return None
      pictures = self.prepared.pictures.evaluation(params, self.state.extra)
    self._log.write(self.step, metrics)
    best_metric, kinds = self.config.best_metric, self.prepared.metrics
    best = {best_metric: metrics[best_metric]}
    self._progress.set_postfix(1, metrics_lib.format_metrics(best, kinds))
    self._log.write_pictures(self.step, pictures)
    if self.done:
      self._save_pictures(pictures)
    console.log(
      f'step {self.step}/{self.config.total_steps}  '
      + metrics_lib.format_metrics(metrics, kinds)
    )
    return metrics

  def _note_progress(self, metrics: Mapping[str, Any]) -> None:
    """Adds an evaluation for early stopping; all processes take the first's value."""
    if self.config.early_stopping.patience:
      value = processes.from_first(
        'comparing the best metric', lambda: float(metrics[self.config.best_metric])
      )
      self.early_stopping.add(value)

  def _measure(
    self, params: Any, stop: stopping.StopRequest, finals: Collection[bool]
  ) -> dict[str, Any]:
    """Returns the values, by name, of the evaluators with `final` among `finals`."""
    metrics = {}
    for evaluation, evaluators in self.prepared.evaluators.items():
      for evaluator in evaluators:
        if getattr(evaluator, 'final', False) not in finals:
          continue
        values = run_evaluators.run(
          evaluator, params, self.state.extra, stop.should_interrupt
        )
        for name, value in values.items():
          metrics[f'{name}_{evaluation}'] = value
    return metrics

  def _save_pictures(self, pictures: Mapping[str, np.ndarray]) -> None:
    for name, pixels in pictures.items():
      path = epath.Path(self.workdir) / f'{name}.png'
      with workdir_lib.writing(path), files.replacing(path) as file:
        Image.fromarray(pixels).save(file, 'PNG')
      self.pictures.append(path)

  def catch_up(self, stop: stopping.StopRequest) -> dict[str, Any] | None:
    """Evaluates the step that the run resumes from, if a signal prevented that."""
    last_metrics = processes.from_first(
      'looking for the last evaluation',
      lambda: metrics_lib.find(self.workdir, self.step, self.config.best_metric),
    )
    if last_metrics is not None:
      if self.done:
        console.log('This run is finished.')
      return last_metrics
    if not self.step or not self.due(self.config.eval_every):
      return None
    metrics = self.evaluate(stop)
    if metrics is None:
      raise stopping.Interrupted(self.step, stop.signal)
    return metrics

  def save(self) -> None:
    """Begins to write a checkpoint."""
    with self._progress.pause():
      self.fetch_metrics()  # Only states with finite metrics are saved.
      self._log.flush()
      params = lora.trained(self.state.params, self.config)
      self.checkpoints.save(self.step, self.state.replace(params=params))

  def close(self) -> None:
    """Writes the remaining metrics, and leaves the bar as it is."""
    self._progress.close()
    self._log.close()


def _shapes(batch: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of the arrays of a batch, by name."""
  return {name: array.shape for name, array in batch.items()}


def _check_finite(
  metrics: Mapping[str, Any], step: int, checkpoints: checkpoints_lib.Checkpoints
) -> None:
  """Raises FloatingPointError if the loss or the gradient is not finite."""
  if math.isfinite(metrics['train_loss'] + metrics['grad_norm']):
    return
  checkpoints.wait()
  steps = checkpoints.steps()
  last_saved = f'step {steps[-1]}' if steps else 'none'
  raise FloatingPointError(
    f'loss {metrics["train_loss"]} with gradient norm {metrics["grad_norm"]} at '
    f'step {step}: not finite. Lower --config.base_lr, warm up longer or clip the '
    f"gradient. Last good checkpoint: {last_saved} in '{checkpoints.directory}'"
  )


class Progress:
  """Counts steps, measures the speed, and shows both.

  The speed excludes the time inside `pause` (evaluation, checkpoints) and steps
  that compile. The run resumes after `step` of `total_steps` updates, each of
  `batch` images over all devices.
  """

  def __init__(self, step: int, total_steps: int, batch: int):
    self._total = total_steps
    self._batch = batch
    self._step = step
    self._start_step = step
    self._start_time = time.perf_counter()
    # Seconds and steps that do not count since then.
    self._paused_seconds, self._omitted_steps = 0.0, 0
    self._rate: float | None = None
    self._postfix = ['', '']  # Loss and speed; the last evaluation.
    self._bar = console.bar(total=total_steps, initial=step, unit='step')

  def start(self, step: int) -> None:
    """Starts the clock after the first step."""
    self._start_step = step
    self._start_time = time.perf_counter()
    self._paused_seconds, self._omitted_steps = 0.0, 0

  def update(self, step: int) -> None:
    """Moves the bar."""
    self._bar.update(step - self._step)
    self._step = step

  def rate(self, step: int) -> float | None:
    """Returns images per second since the last call, over all devices.

    None if only the first step, which compiles, has been made.
    """
    steps = step - self._start_step - self._omitted_steps
    seconds = time.perf_counter() - self._start_time - self._paused_seconds
    self.start(step)
    if steps > 0 and seconds > 0:
      self._rate = steps * self._batch / seconds
    return self._rate

  def show(self, step: int, loss: float, rate: float | None) -> None:
    """Shows loss and speed, and without a bar also the time left."""
    if not self._bar.disable:
      speed = f', {rate:,.0f} img/s' if rate else ''
      self.set_postfix(0, f'loss {loss:.4f}{speed}')
      return
    line = f'step {step:>{len(str(self._total))}}/{self._total}  loss {loss:.4f}'
    if rate:
      seconds_left = (self._total - step) * self._batch / rate
      line += f'  {rate:,.0f} img/s  {console.duration(seconds_left)} left'
    console.log(line)

  def set_postfix(self, place: int, text: str) -> None:
    """Shows loss and speed (0) or the last evaluation (1) next to the bar."""
    self._postfix[place] = text
    self._bar.set_postfix_str(', '.join(filter(None, self._postfix)))

  @contextlib.contextmanager
  def pause(self, steps: int = 0) -> Iterator[None]:
    """Stops the clock inside a `with` block, in which `steps` steps are made."""
    start_time = time.perf_counter()
    try:
      yield
    finally:
      self._paused_seconds += time.perf_counter() - start_time
      self._omitted_steps += steps

  def close(self) -> None:
    """Leaves the bar as it is."""
    self._bar.close()
