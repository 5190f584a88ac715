"""What a person sees of a run: a bar on a terminal, plain lines in a log."""

import contextlib
import sys
import threading
import time

import jax
import tqdm

_muted = False


@contextlib.contextmanager
def muted():
  """Shows nothing inside a `with` block, neither lines nor bars."""
  global _muted
  before, _muted = _muted, True
  try:
    yield
  finally:
    _muted = before


def say(text: str):
  """Prints a line, from the first process only, around a bar if one is shown."""
  if jax.process_index() == 0 and not _muted:
    tqdm.tqdm.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def waiting(text: str, every: float = 1.0):
  """Says what takes long inside a `with` block; on a terminal, how long so far.

  Args:
    text: what is done.
    every: seconds after which the time is shown anew.
  """
  # To stdout: what libraries write to stderr may be hidden meanwhile.
  if jax.process_index() or _muted or not sys.stdout.isatty():
    say(f'{text} ...')
    yield
    return
  done = threading.Event()

  def tick():
    while not done.wait(every):
      line.refresh()

  with tqdm.tqdm(
    desc=text,
    bar_format='{desc} ... {elapsed}',
    file=sys.stdout,
    dynamic_ncols=True,
  ) as line:
    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    try:
      yield
    finally:
      done.set()
      ticking.join()


def size(count: float | None) -> str:
  """Formats bytes as people read them: '3.2 MiB', '2.09 GiB', 'unknown'."""
  if count is None:
    return 'unknown'
  if count < 2**30 / 10:
    return f'{count / 2**20:.1f} MiB'
  return f'{count / 2**30:.2f} GiB'


def duration(seconds: float) -> str:
  """Formats seconds as people read them: '48s', '3m 05s', '2h 07m', '3d 04h'."""
  seconds = round(seconds)
  if seconds < 60:
    return f'{seconds}s'
  if seconds < 3600:
    return f'{seconds // 60}m {seconds % 60:02}s'
  if seconds < 86400:
    return f'{seconds // 3600}h {seconds % 3600 // 60:02}m'
  return f'{seconds // 86400}d {seconds % 86400 // 3600:02}h'


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
    if jax.process_index() == 0 and sys.stderr.isatty() and not _muted:
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
      line += f'  {rate:,.0f} img/s  {duration(left)} left'
    say(line)

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
