"""Stopping without loss: Ctrl-C, SIGTERM and preemption notices."""

import os
import signal
import threading

import jax
from jax.experimental import multihost_utils

from vit_jax.scale import processes


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


class StopRequest:
  """Notices Ctrl-C, SIGTERM and preemption notices; a context manager.

  The first signal asks the loop to save and stop, the second Ctrl-C stops at
  once. With many processes all of them stop after the same step, whichever got
  the signal (jax.distributed tells the others, and listens for SIGTERM itself
  inside the `with` block; outside of it SIGTERM ends the process at once).
  """

  def __init__(self):
    self.signal = None
    self._previous = {}

  def __enter__(self):
    if threading.current_thread() is not threading.main_thread():
      return self  # Python gives signals to the main thread alone.
    handled = [signal.SIGINT]
    if jax.process_count() == 1:
      handled.append(signal.SIGTERM)
    for number in handled:
      self._previous[number] = signal.signal(number, self._handle)
    processes.listens_for_sigterm(True)
    return self

  def __exit__(self, *_):
    processes.listens_for_sigterm(False)
    for number, previous in self._previous.items():
      signal.signal(number, previous)

  def _handle(self, number, _):
    if self.signal == signal.SIGINT == number:
      raise KeyboardInterrupt(
        'Interrupted. The same command goes on from the last step that was saved.'
      )
    self.signal = number
    if jax.process_count() > 1:
      os.kill(os.getpid(), signal.SIGTERM)

  def after(self, step: int) -> bool:
    """Tells whether to stop after this step; all processes must ask."""
    if jax.process_count() == 1:
      return self.signal is not None
    stop = multihost_utils.reached_preemption_sync_point(step)
    if stop and self.signal is None:
      self.signal = signal.SIGTERM
    return stop

  def now(self) -> bool:
    """Tells whether to break off work between steps, an evaluation say.

    Always False with many processes, which may only stop after a step.
    """
    return jax.process_count() == 1 and self.signal is not None
