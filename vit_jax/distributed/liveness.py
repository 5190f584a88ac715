"""Detects lost processes of a run, and ends this one if another is lost.

Every two seconds each process writes a sign of life to the coordination service
of `jax.distributed`, and reads those of the others. JAX itself waits for 100
seconds and then aborts with a page of stack traces; here a process ends with
one sentence, and with the status of SIGTERM.
"""

import atexit
import ctypes
import functools
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time

import jax
from jax._src import distributed  # Its client has no public name.

# Seconds between two signs of life, and seconds without one until a process is
# lost.
PULSE = 2.0
SILENCE = 60.0
_SIGNS = 'vit_jax/signs/'

_hosts: list[str] = []


class Lost(RuntimeError):
  """Another process of the run has ended."""


def connect(*args, **kwargs):
  """Connects the processes of a run, and begins to watch them.

  Args:
    *args: for jax.distributed.initialize.
    **kwargs: likewise.
  """
  library = distributed._jax
  original = library.get_distributed_runtime_client
  # Replaces JAX's callback, which prints a page of stack traces. In this
  # version of JAX the call of the new one aborts, since its argument cannot be
  # converted to Python; `_on_abort` then handles SIGABRT.
  library.get_distributed_runtime_client = functools.partial(
    original, missed_heartbeat_callback=_on_abort
  )
  try:
    jax.distributed.initialize(*args, **kwargs)
  finally:
    library.get_distributed_runtime_client = original
  if jax.process_count() == 1:
    return
  global _jax_sigterm
  _jax_sigterm = _set_handler(signal.SIGTERM, int(signal.SIG_DFL))
  _set_handler(
    signal.SIGABRT, ctypes.cast(_abort_handler, ctypes.c_void_p).value
  )
  _hosts[:] = ['host unknown'] * jax.process_count()
  watch.start()
  atexit.register(watch.stop)


def here() -> str:
  """Returns host and process id of this process."""
  return f'{socket.gethostname()}, pid {os.getpid()}'


def set_hosts(hosts: list[str]):
  """Stores the results of `here` of all processes, for `name`."""
  _hosts[:] = hosts


def name(process: int) -> str:
  """Returns a name of a process for messages: 'process 1 (host-b, pid 7)'."""
  host = _hosts[process] if _hosts else socket.gethostname()
  return f'process {process} ({host})'


def listens_for_sigterm(listen: bool):
  """Sets whether JAX handles SIGTERM, to stop all processes after one step.

  Before and after the loop no code checks for JAX's notice, so SIGTERM ends the
  process.
  """
  if _jax_sigterm is not None:
    _set_handler(
      signal.SIGTERM, _jax_sigterm if listen else int(signal.SIG_DFL)
    )


def end_with(error: BaseException):
  """Tells the other processes the error that ends this one.

  If the error is due to a lost process, this process ends here with one
  sentence, without the usual shutdown between processes, which would wait or
  abort. Otherwise the caller raises the error.
  """
  if jax.process_count() == 1:
    return
  if isinstance(error, Lost):
    end(str(error))
  with _ending:  # Waits if another thread ends this process.
    pass
  # Errors of collectives whose peer closes its connection or never answers. A
  # bucket gives such errors too, while all processes live.
  if any(s in str(error) for s in ('Gloo', 'UNAVAILABLE', 'DEADLINE_EXCEEDED')):
    time.sleep(5 * PULSE)  # Living processes give a sign meanwhile.
    lost = watch.silent(4 * PULSE)
    if lost:
      end(are_gone(lost))
  watch.part(str(error) or type(error).__name__)


def client():
  """Returns the client of the coordination service; None in a single process."""
  return distributed.global_state.client


class Watch(threading.Thread):
  """Thread that gives signs of life, and watches those of the other processes.

  Attributes:
    doing: what this process is doing, for the other processes.
    error: the error that ends this process, for the other processes; '' while
      there is none.
  """

  def __init__(self):
    super().__init__(daemon=True)
    self.doing = 'the start'
    self.error = ''
    self._done = threading.Event()
    self._seen = {}  # Process -> (last sign of life, time of its arrival).

  def run(self):
    """Gives signs of life until stopped; ends the process if one is lost."""
    for count in itertools.count():
      if not self._beat(None if self.error else count):
        return  # The service in process 0 has ended: JAX ends this process.
      if not self._done.is_set() and not self.error:
        lost, failed = self.silent(SILENCE), self.failed(3 * PULSE)
        if failed:
          end(self.farewell(failed[0]))
        if lost:
          end(are_gone(lost))
      if self._done.wait(PULSE):
        return

  def stop(self):
    """Gives a last sign, after which silence does not mean a loss."""
    self._done.set()
    self.join()
    _set_handler(signal.SIGABRT, int(signal.SIG_DFL))
    if self._beat(None) and self.error:
      # JAX would wait for the other processes, which end after reading the
      # error.
      time.sleep(3 * PULSE)
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(1)

  def place(self, process: int) -> str:
    """Returns what a process was doing at its last sign."""
    sign, _ = self._seen.get(process, (None, 0))
    return sign[1] if sign else 'the start'

  def has_left(self, process: int) -> bool:
    """Returns whether a process has given its last sign."""
    sign, _ = self._seen.get(process, (None, 0))
    return sign is not None and sign[0] is None

  def farewell(self, process: int) -> str:
    """Returns who has left, and with which error, if with one."""
    error = self._seen[process][0][1]
    return f'{name(process)} has ended' + (f': {error}' if error else '')

  def failed(self, seconds: float) -> list[int]:
    """Returns who has left with an error `seconds` ago, the first one first.

    An error that all processes raise together is theirs to print meanwhile.
    """
    now = time.monotonic()
    found = [
      (since, process)
      for process, (sign, since) in self._seen.items()
      if sign[0] is None and sign[1] and now - since > seconds
    ]
    return [process for _, process in sorted(found)]

  def part(self, error: str):
    """Gives the last sign, with the error that ends this process."""
    self.error = error[:1000]
    self._beat(None)

  def silent(self, seconds: float) -> list[int]:
    """Returns the processes without a sign of life for `seconds`."""
    now = time.monotonic()
    return [
      process
      for process, (sign, since) in self._seen.items()
      if sign[0] is not None
      and now - since > seconds
      and process != jax.process_index()
    ]

  def _beat(self, count):
    """Writes a sign of life, reads those of the others; False on failure.

    Args:
      count: number of the sign; None for the last one.
    """
    sign = [count, self.doing if count is not None else self.error]
    try:
      service, me = client(), jax.process_index()
      service.key_value_set(
        f'{_SIGNS}{me}', json.dumps(sign), allow_overwrite=True
      )
      found = service.key_value_dir_get(_SIGNS)
    except Exception:  # pylint: disable=broad-except
      return False
    now = time.monotonic()
    for key, text in found:
      process, sign = int(key.rsplit('/', 1)[1]), json.loads(text)
      if process not in self._seen or self._seen[process][0] != sign:
        self._seen[process] = (sign, now)
    return True


def are_gone(lost: list[int]) -> str:
  """Returns that processes have ended without a word."""
  return (
    f'{" and ".join(map(name, lost))} {"are" if len(lost) > 1 else "is"} gone'
  )


def end(words: str):
  """Ends this process because of another one; works in any thread.

  Args:
    words: what has become of the other one, and why.
  """
  _ending.acquire()  # Never released: another thread waits here for the end.
  text = (
    f'\nError: {words}, so {name(jax.process_index())} stops. Start the same '
    'command again on all hosts: the run goes on from its last checkpoint.\n'
  )
  os.write(2, text.encode())
  if jax.process_index() == 0:
    time.sleep(3 * PULSE)  # The others read the cause from its service.
  os._exit(128 + signal.SIGTERM)


def _on_abort(_):
  """Explains why JAX aborts, which it does as soon as process 0 has ended."""
  _set_handler(signal.SIGABRT, int(signal.SIG_DFL))
  host, port = distributed.global_state.coordinator_address.rsplit(':', 1)
  for _ in range(3):
    time.sleep(1)  # A process that is ending may still accept a connection.
    try:
      socket.create_connection((host, int(port)), timeout=10).close()
    except OSError:
      end(are_gone([0]))
  lost = watch.silent(5 * PULSE)
  end(are_gone(lost) if lost else 'JAX aborted the run, see its message above')


def _set_handler(number, handler):
  """Sets the C handler of a signal; returns the address of the previous one."""
  signal_of_c = ctypes.CDLL(None).signal
  signal_of_c.restype = ctypes.c_void_p
  signal_of_c.argtypes = [ctypes.c_int, ctypes.c_void_p]
  return signal_of_c(number, handler)


# JAX's own handler of SIGTERM, a C function.
_jax_sigterm = None
_abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_on_abort)
watch = Watch()
_ending = threading.Lock()
