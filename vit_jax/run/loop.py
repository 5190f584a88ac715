"""A run under way: updates, and what is done beside them now and then.

What a person sees of it is a bar on a terminal, plain lines in a log.
"""

import math
import sys
import time

from clu import periodic_actions
import jax
import tqdm

from vit_jax import cli
from vit_jax.learning import state as state_lib
from vit_jax.run import metrics as metrics_lib
from vit_jax.run import stopping
from vit_jax.scale import processes


class Run:
  """A run under way.

  Args:
    prepared: see vit_jax.train.Prepared.
    workdir: folder of the run.
    checkpoints: see vit_jax.run.checkpoints.Checkpoints.
    state: the TrainState to go on from.
    step: its number of updates.
  """

  def __init__(self, prepared, workdir, checkpoints, state, step):
    self.prepared = prepared
    self.config = prepared.config
    self.workdir = workdir
    self.checkpoints = checkpoints
    self.state = state
    self.step = step
    self._update = prepared.program.jit_update()
    self._log = metrics_lib.MetricsLog(workdir, step)
    self._progress = Progress(step, self.config.total_steps, self.config.batch)
    self._profile = periodic_actions.Profile(
      logdir=str(workdir),
      num_profile_steps=self.config.profile_steps,
      profile_duration_ms=1,  # No least duration: so many steps, and no more.
      first_profile=step + 10,
    )
    self._unseen = []  # Metrics on the devices that nobody has looked at.
    self._latest = {}  # Those of the last step that somebody has.
    self._compiled = False

  def due(self, every: int) -> bool:
    """Tells whether what is done every so many steps is to be done now."""
    last = self.step == self.config.total_steps
    return last or (every > 0 and self.step % every == 0)

  def update(self, batch):
    """Makes one update."""
    if not self._compiled:
      cli.say('Compiling ...')
      compiling = time.perf_counter()
    self.state, metrics = self._update(self.state, batch)
    self.step += 1
    self._unseen.append(metrics)
    if len(self._unseen) > 2:
      # The host may run ahead of the devices, but only so far: a signal then
      # finds little that must be finished before the state can be saved.
      jax.block_until_ready(self._unseen[-3])
    if not self._compiled:
      self._compiled = True
      self.look()
      seconds = time.perf_counter() - compiling
      cli.say(f'Compiled in {cli.duration(seconds)}.')
      self._progress.start(self.step)
    elif len(self._unseen) >= 1000:
      self.look()
    self._progress.update(self.step)
    if self.config.profile_steps:
      self._profile(self.step)

  def look(self):
    """Fetches the metrics of the last steps; stops the run if one is not finite."""
    fetched = jax.device_get(self._unseen)
    for i, metrics in enumerate(fetched):
      _check_finite(metrics, self.step - len(fetched) + i + 1, self.checkpoints)
      self._latest.update(metrics)
    self._unseen.clear()

  def report(self):
    """Logs and shows the metrics of the last step, and the speed."""
    self.look()
    rate = self._progress.rate(self.step)
    speed = (
      {'img_sec_core_train': rate / self.prepared.mesh.size} if rate else {}
    )
    self._log.write(self.step, {**self._latest, **speed})
    self._progress.show(self.step, self._latest['train_loss'], rate)

  def evaluate(self, stop) -> dict | None:
    """Evaluates and logs; returns None if a signal broke it off."""
    params, metrics = state_lib.best_params(self.state), {}
    with self._progress.pause():
      for name, evaluators in self.prepared.evaluators.items():
        for evaluator in evaluators:
          result = evaluator.run(params, self.state.extra, stop.now)
          if result is None:
            return None
          metrics.update({f'{k}_{name}': v for k, v in result.items()})
    self._log.write(self.step, metrics)
    cli.say(
      f'step {self.step}/{self.config.total_steps}  '
      + metrics_lib.format_metrics(metrics)
    )
    return metrics

  def catch_up(self, stop) -> dict | None:
    """Does the evaluation of the step to go on from, if it was not done yet."""
    done = processes.from_first(
      'looking for the last evaluation',
      lambda: metrics_lib.find(
        self.workdir, self.step, self.config.best_metric
      ),
    )
    if done is not None:
      if self.step == self.config.total_steps:
        cli.say('This run is finished.')
      return done
    if not self.step or not self.due(self.config.eval_every):
      return None
    done = self.evaluate(stop)  # A signal had come before it was done.
    if done is None:
      raise stopping.Interrupted(self.step, stop.signal)
    return done

  def save(self, metrics: dict | None):
    """Begins to write a checkpoint."""
    with self._progress.pause():
      self.look()  # What is saved is good.
      self._log.flush()
      self.checkpoints.save(self.step, self.state, metrics)

  def close(self):
    """Writes what is still held of the metrics, and leaves the bar as it is."""
    self._progress.close()
    self._log.close()


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


class Progress:
  """Counts steps, measures speed, and shows both.

  Time between `pause` and `resume` (evaluation, checkpoints) and that of the
  first step (compilation) does not count in the speed.

  Args:
    step: number of updates made already.
    total_steps: number of updates of the whole run.
    batch: images per update, over all devices.
  """

  def __init__(self, step: int, total_steps: int, batch: int):
    self._total = total_steps
    self._batch = batch
    self._step = step
    self._mark = None
    self._paused = 0.0
    self._rate = None
    self._bar = None
    if jax.process_index() == 0 and sys.stderr.isatty() and not cli.is_muted():
      self._bar = tqdm.tqdm(
        total=total_steps, initial=step, unit='step', dynamic_ncols=True
      )

  def start(self, step: int):
    """Starts the clock, once the first step is done."""
    self._mark = (step, time.perf_counter())

  def update(self, step: int):
    """Moves the bar."""
    self._step = step
    if self._bar is not None:
      self._bar.update(step - self._bar.n)

  def rate(self, step: int) -> float | None:
    """Returns images per second since the last call, over all devices.

    None where no step but the first, which compiles, has been made.
    """
    now = time.perf_counter()
    before, then = self._mark
    seconds = now - then - self._paused
    self._mark, self._paused = (step, now), 0.0
    if step > before and seconds > 0:
      self._rate = (step - before) * self._batch / seconds
    return self._rate

  def show(self, step: int, loss: float, rate: float | None):
    """Shows loss, speed and time left."""
    if self._bar is not None:
      speed = f', {rate:,.0f} img/s' if rate else ''
      self._bar.set_postfix_str(f'loss {loss:.4f}{speed}')
      return
    line = (
      f'step {step:>{len(str(self._total))}}/{self._total}  loss {loss:.4f}'
    )
    if rate:
      left = (self._total - step) * self._batch / rate
      line += f'  {rate:,.0f} img/s  {cli.duration(left)} left'
    cli.say(line)

  def pause(self) -> 'Progress':
    """Stops the clock inside a `with` block."""
    return self

  def __enter__(self):
    self._pause_start = time.perf_counter()

  def __exit__(self, *_):
    self._paused += time.perf_counter() - self._pause_start

  def close(self):
    """Leaves the bar as it is."""
    if self._bar is not None:
      self._bar.close()
