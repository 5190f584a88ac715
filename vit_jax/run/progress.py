"""What a person sees of a run: a bar on a terminal, plain lines in a log."""

import sys
import time

import jax
import tqdm

from vit_jax import cli


def format_metrics(metrics: dict) -> str:
  """Writes numbers for people: accuracies in percent, the rest short."""
  return ', '.join(
    f'{name} {100 * value:.2f} %'
    if 'accuracy' in name
    else f'{name} {value:,.4g}'
    for name, value in metrics.items()
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
