"""How the processes of a run end together.

JAX's heartbeats end a run that has lost a process: HEARTBEAT seconds after its last
heartbeat, JAX aborts the other processes with a message that names it. This module
adds what JAX lacks: a process that fails reports the cause to the others, which end
within seconds, and all processes agree on the step after which they stop. Both use
keys of the coordination service of `jax.distributed` that are written only then;
each process waits for them in two threads.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import threading
import time
from typing import Any

import jax

from vit_jax import console

# Seconds without a heartbeat after which JAX considers a process lost.
HEARTBEAT = 50
# Seconds that a process has to print its own error before the error of another
# process ends it.
GRACE = 4.0
_KEYS = 'vit_jax/end/'
_HOUR = 3_600_000  # In milliseconds.


def client() -> Any:
  """Returns the client of the coordination service.

  JAX has no public name for it, Orbax has one.
  """
  from orbax import checkpoint as ocp  # Imported late, since it takes seconds.

  return ocp.multihost.get_jax_distributed_client()


def here() -> str:
  """Returns the host and the process id of this process."""
  return f'{socket.gethostname()}, pid {os.getpid()}'


def name(process: int) -> str:
  """Returns the name of a process in messages: 'process 1 (host-b, pid 7)'."""
  return f'process {process} ({watch.hosts.get(process, "host unknown")})'


def _set(key: str, value: Any) -> None:
  """Writes a key, unless another process was first."""
  with contextlib.suppress(Exception):
    client().key_value_set(_KEYS + key, json.dumps(value))


def _wait_for(key: str) -> Any:
  """Returns the value of a key once it is written, None when this process exits."""
  while True:
    try:
      return json.loads(client().blocking_key_value_get(_KEYS + key, _HOUR))
    except Exception as e:  # pylint: disable=broad-except
      if 'DEADLINE_EXCEEDED' not in str(e):
        return None


class Watch:
  """Waits for the failure of a process and for a request to stop."""

  def __init__(self):
    self.watches = False  # Whether there are other processes.
    self.failed = False  # Whether this process has reported an error.
    self.hosts: dict[int, str] = {}  # Results of `here` by process.
    self._threads: list[threading.Thread] = []
    self._lock = threading.Lock()  # Guards `_asked` and `_at`.
    self._asked = False
    self._at = (0, 0)
    self._last: tuple[int, int] | None = None
    self._decided = threading.Event()

  def start(self) -> None:
    """Begins to watch, until the process exits."""
    self.watches = True
    for wait in (self._end_on_failure, self._agree_on_stop):
      thread = threading.Thread(target=wait, daemon=True)
      self._threads.append(thread)
      thread.start()
    atexit.register(self._leave)

  def _leave(self) -> None:
    """Disconnects this process, which ends the threads."""
    if self.failed:  # JAX would wait for the others, which end on their own.
      if jax.process_index() == 0:
        time.sleep(2 * GRACE)  # The others read the error from its service.
      console.exit_at_once(1)
    jax.distributed.shutdown()
    for thread in self._threads:
      thread.join()

  def report(self, error: BaseException) -> None:
    """Reports the error that ends this process to the others."""
    text = str(error) or type(error).__name__
    # Errors of collectives that have lost a process. Storage gives similar ones.
    lost = any(s in text for s in ('Gloo', 'UNAVAILABLE', 'DEADLINE_EXCEEDED'))
    if lost and not isinstance(error, OSError):
      seconds = HEARTBEAT + 5 * GRACE
      console.log_error(
        f'Lost the connection to another process ({text.splitlines()[0]:.200}); it will '
        f'be named within {seconds:.0f} seconds.'
      )
      time.sleep(seconds)  # A message of that process, or JAX, ends this one.
    self.failed = True
    _set('failed', [jax.process_index(), text[:1000]])

  def _end_on_failure(self) -> None:
    """Ends this process if one has failed; waits for that in a thread."""
    failure = _wait_for('failed')
    if failure is None:
      return
    time.sleep(GRACE)
    if self.failed:
      # Threads that wait for other processes may keep this one from its end.
      time.sleep(5 * GRACE)
      console.exit_at_once(1)
    process, error = failure
    text = (
      f'\nError: {name(process)} has failed: {error}\n'
      f'{name(jax.process_index())} stops. Fix the cause, and start the same command '
      'again on all hosts to resume from the last checkpoint.\n'
    )
    with contextlib.suppress(OSError):  # Perhaps nobody reads it any more.
      os.write(2, console.printable(text).encode())
    if jax.process_index() == 0:
      time.sleep(2 * GRACE)
    console.exit_at_once(128 + signal.SIGTERM)

  # --- Stopping together ---

  def ask_to_stop(self) -> None:
    """Asks all processes to stop after the same step."""
    _set('stop', jax.process_index())

  def passed(self, at: tuple[int, int]) -> bool:
    """Returns whether all processes stop here; all must call it after each step.

    `at` are the numbers of the loop and of the step in it, the same on all
    processes. When one of them is asked to stop, each publishes the last step that
    it has passed, and does not pass another one before the greatest of these is
    known. All stop after the step that follows it.
    """
    with self._lock:
      self._at = at
      asked = self._asked
    if asked:
      self._decided.wait()
    return self._last is not None and at > self._last

  def _agree_on_stop(self) -> None:
    """Agrees on the last step when a process asks to stop; waits in a thread."""
    first = _wait_for('stop')
    me = jax.process_index()
    if first is None:
      return
    if first != me:
      console.log(
        f'{name(first)} was asked to stop: all processes stop after the same step.'
      )
    with self._lock:
      self._asked = True
      _set(f'at/{me}', self._at)
    if me == 0:
      positions = [_wait_for(f'at/{i}') for i in range(jax.process_count())]
      if None not in positions:
        _set('last', max(positions))
    last = _wait_for('last')
    if last is not None:
      loop, step = last
      self._last = (loop, step)
      self._decided.set()


watch = Watch()
