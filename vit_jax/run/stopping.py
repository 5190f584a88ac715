"""Saves and stops a run on Ctrl-C, SIGTERM, SIGHUP and preemption notices."""

import contextlib
import itertools
import os
import signal
import threading
import types
from typing import Any

import jax

from vit_jax import console
from vit_jax.distributed import heartbeats

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUTPUTS = (1, 2)  # File descriptors of stdout and stderr.
_numbers = itertools.count(1)  # Numbers of the loops of this process.


class Stopped(Exception):
  """The `stop` of a caller became true before the work was done."""


class Interrupted(Exception):
  """A signal of some number stopped the run, after a step was saved."""

  def __init__(self, step: int, signal: int):
    super().__init__(
      f'Saved step {step} and stopped. Run the same command again to resume.'
    )
    self.step = step
    self.signal = signal

  def _render_traceback_(self) -> list[str]:
    """Returns what a notebook shows instead of a traceback."""
    return [f'Saved step {self.step} and stopped. Run this cell again to resume.']


class StopRequest:
  """Context manager that notices Ctrl-C, SIGTERM, SIGHUP and preemption notices.

  The first signal asks the loop to save and stop; a second Ctrl-C stops at
  once. With several processes all of them stop after the same step, whichever
  received the signal. Outside of the `with` block SIGTERM and SIGHUP end a process at
  once. SIGHUP, of a terminal that was closed, stays ignored if it was, as by nohup.
  """

  def __init__(self):
    self.signal: Any = None  # Number of the signal that asks to stop.
    self._number = next(_numbers)
    self._previous: dict[int, Any] = {}
    # File descriptor that receives the numbers of signals.
    self._notices: int | None = None
    self._terminals = [fd for fd in _OUTPUTS if os.isatty(fd)]

  def __enter__(self) -> 'StopRequest':
    if threading.current_thread() is not threading.main_thread():
      return self  # Python delivers signals to the main thread only.
    self._listen()
    for number in _HANDLED:
      if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
        continue
      self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_: Any) -> None:
    for number, previous in self._previous.items():
      signal.signal(number, previous)
    if self._notices is not None:
      signal.set_wakeup_fd(-1)
      os.close(self._notices)  # The thread reads to the end, and ends.
      self._notices = None

  def _listen(self) -> None:
    """Starts a thread that reports a signal at once.

    Python handles signals in the main thread when it returns from C++, which a
    compilation may do after minutes.
    """
    wakeup_fd = signal.set_wakeup_fd(-1)
    if wakeup_fd != -1:  # Set by the event loop of a notebook.
      signal.set_wakeup_fd(wakeup_fd)
      return
    reader, notices = os.pipe()
    os.set_blocking(notices, False)
    signal.set_wakeup_fd(notices, warn_on_full_buffer=False)
    self._notices = notices
    threading.Thread(target=_report, args=(reader,), daemon=True).start()

  def _handle(self, number: int, _: types.FrameType | None) -> None:
    if self.signal == signal.SIGINT == number:
      raise KeyboardInterrupt(
        'Interrupted. Run the same command again to resume from the last saved step.'
      )
    if number == signal.SIGHUP:
      self._leave_terminals()
    self.signal = number

  def _leave_terminals(self) -> None:
    """Discards further output to terminals, where writing is an error once closed."""
    null = os.open(os.devnull, os.O_WRONLY)
    for terminal in self._terminals:
      os.dup2(null, terminal)
    os.close(null)

  def after(self, step: int) -> bool:
    """Returns whether to stop after this step; all processes must call it."""
    if jax.process_count() == 1:
      return self.signal is not None
    if self.signal is not None:
      heartbeats.watch.ask_to_stop()
    stop = heartbeats.watch.passed((self._number, step))
    if stop and self.signal is None:
      self.signal = signal.SIGTERM
    return stop

  def should_interrupt(self) -> bool:
    """Returns whether to interrupt work between steps, such as an evaluation.

    Always False with several processes, which may only stop after a step.
    """
    return jax.process_count() == 1 and self.signal is not None


def _report(reader: int) -> None:
  """Reports the first signal, and asks other processes to stop too."""
  reported = False
  with open(reader, 'rb', buffering=0) as numbers:
    while number := numbers.read(1):
      if number[0] in _HANDLED and not reported:
        reported = True
        if heartbeats.watch.watches:
          heartbeats.watch.ask_to_stop()
        name = signal.Signals(number[0]).name
        with contextlib.suppress(OSError):  # The terminal was closed.
          console.log(
            f'{name}: stopping after this step (and its compilation, if it is running).'
          )
