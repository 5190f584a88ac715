"""Signs of life of the processes of a run; ends this one if another is lost.

Every two seconds each process writes a sign to the coordination service of
`jax.distributed`, which runs in process 0, and reads those of the others. JAX
itself waits for 100 seconds (its heartbeat_timeout_seconds) and then aborts
with a page of stack traces; here a process ends with one sentence, which names
the process that is lost or has failed first, and with the status of SIGTERM.
"""

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time

import jax

from vit_jax import console

# Seconds between two signs of life, and seconds without one until a process is
# lost.
PULSE = 2.0
SILENCE = 60.0
_SIGNS = 'vit_jax/signs/'


class Lost(RuntimeError):
  """Another process of the run has ended."""


def client():
  """Returns the client of the coordination service.

  JAX has no public name for it, Orbax has one.
  """
  from orbax import checkpoint as ocp  # Imported late, since it takes seconds.

  return ocp.multihost.get_jax_distributed_client()


def here() -> str:
  """Returns host and process id of this process."""
  return f'{socket.gethostname()}, pid {os.getpid()}'


def name(process: int) -> str:
  """Returns a name of a process for messages: 'process 1 (host-b, pid 7)'."""
  return f'process {process} ({watch.hosts.get(process, "host unknown")})'


class Watch:
  """Gives signs of life in a thread, and watches those of the other processes.

  Attributes:
    connects: whether this process waits for the others to connect.
    watches: whether there are other processes to watch.
    hosts: results of `here` by process.
    doing: what this process is doing, for the other processes.
    error: the error that ends this process, for the others; '' while there is none.
  """

  def __init__(self):
    self._thread = None  # Made late: a forked process could not start it.
    self.connects = self.watches = False
    self.hosts = {}
    self.doing = 'the start'
    self.error = ''
    self._signs = {}  # Process -> (its last sign, time of its arrival).
    self._read, self._parted = 0.0, 0.0  # Times: of reading signs, of `part`.
    self._ended, self._wake = threading.Event(), threading.Event()
    # The stop of all processes after the same step; see `passed`.
    self._lock = threading.Lock()  # Of the next three.
    self._asked = False
    self._at = self._published = (0, 0)
    self._last, self._decided = None, threading.Event()

  # --- Life and death ---

  def start(self):
    """Begins to watch; until the process exits."""
    self.watches, self._read = True, time.monotonic()
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._thread.start()
    atexit.register(self.stop)

  def _run(self):
    """Gives signs of life until stopped; ends the process if one is lost."""
    for count in itertools.count():
      self._beat(count)
      if self._ended.is_set():
        return
      if self.error:
        # Threads that wait for other processes may keep this one from its end.
        pulses = 5 if jax.process_index() else 8  # The first holds the signs.
        if time.monotonic() > self._parted + pulses * PULSE:
          _exit(1)
      elif words := self.trouble(SILENCE):
        end(words)
      self._wake.wait(PULSE if self._decided.is_set() == self._asked else 0.1)
      self._wake.clear()

  def stop(self):
    """Gives a last sign, after which silence does not mean a loss."""
    self._ended.set()
    self._wake.set()
    self._thread.join()
    self._beat(None)
    if self.error:
      # JAX would wait for the other processes, which end after reading the
      # error.
      time.sleep(3 * PULSE)
      _exit(1)

  def part(self, error: str):
    """Gives the last sign, with the error that ends this process."""
    self._parted, self.error = time.monotonic(), error[:1000]
    self._beat(None)

  def place(self, process: int) -> str:
    """Returns what a process was doing at its last sign."""
    sign, _ = self._signs.get(process, ({'doing': 'the start'}, 0))
    return sign['doing']

  def farewell(self, process: int) -> str:
    """Returns that a process has ended, and with which error; '' if it has not."""
    sign, _ = self._signs.get(process, ({'count': 0}, 0))
    if sign['count'] is not None:
      return ''
    error = sign['error']
    return f'{name(process)} has ended' + (f': {error}' if error else '')

  def trouble(self, silence: float) -> str:
    """Returns which process has failed or is lost, in words; '' if none.

    A process is lost after `silence` seconds without a sign of life. An error
    that all processes raise together is theirs to print for a while.
    """
    now = time.monotonic()
    signs = sorted(self._signs.items(), key=lambda item: item[1][1])
    for process, (sign, since) in signs:  # The first one first.
      if sign['error'] and now - since > 3 * PULSE:
        return self.farewell(process)
    lost = [
      process
      for process, (sign, since) in signs
      if sign['count'] is not None and self._read - since > silence
    ]
    if jax.process_index() and now - self._read > 5 * PULSE:
      lost = [0]  # It holds all signs, and does not answer.
    who = ' and '.join(map(name, lost))
    return f'{who} {"are" if len(lost) > 1 else "is"} gone' if lost else ''

  def _beat(self, count: int | None):
    """Writes a sign of life, None for the last one; reads those of the others."""
    with self._lock:
      if not self._asked:
        self._published = self._at
      sign = {
        'count': None if self.error else count,
        'doing': self.doing,
        'error': self.error,
        'stop': self._published if self._asked else None,
      }
    try:
      client().key_value_set(
        f'{_SIGNS}{jax.process_index()}', json.dumps(sign), allow_overwrite=True
      )
    except Exception:  # pylint: disable=broad-except
      return  # Process 0 does not answer.
    if self.look():
      self._agree_on_stop()

  def look(self) -> bool:
    """Reads the signs of all processes; returns whether process 0 answers."""
    try:
      found = client().key_value_dir_get(_SIGNS)
    except Exception:  # pylint: disable=broad-except
      return False
    self._read = time.monotonic()
    for key, text in found:
      process, sign = int(key.rsplit('/', 1)[1]), json.loads(text)
      if process not in self._signs or self._signs[process][0] != sign:
        self._signs[process] = (sign, self._read)
    return True

  # --- Stopping together ---

  def ask_to_stop(self):
    """Asks all processes to stop after the same step."""
    with self._lock:
      if not self._asked:
        self._asked, self._published = True, self._at
    self._wake.set()

  def passed(self, at: tuple[int, int]) -> bool:
    """Returns whether all processes stop here; all must call it after each step.

    `at` are the numbers of the loop and of the step in it, the same on all
    processes. When a process is asked to stop, each one publishes the last step
    that it has passed, and none passes another one until it knows all of these.
    They stop after the step that follows the greatest.
    """
    with self._lock:
      self._at = at
      asked = self._asked
    if asked:
      self._decided.wait()
    return self._last is not None and at > self._last

  def _agree_on_stop(self):
    """Takes part if a process asks to stop; decides if all have published."""
    stops = {
      process: sign['stop'] and tuple(sign['stop'])
      for process, (sign, _) in self._signs.items()
      if sign['count'] is not None
    }
    if any(stops.values()) and not self._asked:
      first = next(process for process in stops if stops[process])
      console.say(f'{name(first)} was told to stop: all stop after the same step.')
      self.ask_to_stop()
    elif (
      self._asked
      and not self._decided.is_set()
      and len(self._signs) == jax.process_count()
      and all(stops.values())
    ):
      self._last = max(stops.values(), default=self._published)
      self._decided.set()


def end_with(error: BaseException):
  """Tells the other processes the error that ends this one.

  If the error is due to a lost process, this process ends here with one
  sentence, without the usual shutdown between processes, which would wait or
  abort. Otherwise the caller raises the error.
  """
  if not watch.watches:
    return
  if isinstance(error, Lost):
    end(str(error))
  with _ending:  # Waits if another thread ends this process.
    pass
  # Errors of collectives whose peer closes its connection or never answers. A
  # bucket gives such errors too, while all processes live.
  if any(s in str(error) for s in ('Gloo', 'UNAVAILABLE', 'DEADLINE_EXCEEDED')):
    time.sleep(5 * PULSE)  # Living processes give a sign meanwhile.
    watch.look()
    if words := watch.trouble(4 * PULSE):
      end(words)
  watch.part(str(error) or type(error).__name__)


def end(words: str):
  """Ends this process, in any thread, because another one `words`."""
  _ending.acquire()  # Never released: another thread waits here for the end.
  me = name(jax.process_index()) if watch.watches else 'this process'
  text = (
    f'\nError: {words}, so {me} stops. Start the same command again on all '
    'hosts: the run goes on from its last checkpoint.\n'
  )
  with contextlib.suppress(OSError):  # Perhaps nobody reads it any more.
    os.write(2, text.encode())
  if watch.watches and jax.process_index() == 0:
    time.sleep(3 * PULSE)  # The others read the cause from its service.
  os._exit(128 + signal.SIGTERM)


def _exit(status):
  """Ends this process without the usual shutdown."""
  with contextlib.suppress(OSError):
    sys.stdout.flush()
    sys.stderr.flush()
  os._exit(status)


def speak_on_abort():
  """Has this process end with a sentence where JAX aborts it.

  JAX aborts a process that the others do not join, and each process as soon as
  it loses the connection to process 0. It prints a page of stack traces, and
  has no public way to prevent that. This C handler of SIGABRT is the only part
  that is no public Python: delete this function when jax.distributed.initialize
  raises an error for the first, and takes a function to call for the second.
  """
  set_handler = ctypes.CDLL(None).signal
  set_handler.argtypes = [ctypes.c_int, ctypes.c_void_p]

  def handle(number):
    set_handler(number, int(signal.SIG_DFL))
    if watch.connects:
      end('not all processes came to the coordinator in time')
    if watch.error:
      _exit(1)  # It has said why.
    time.sleep(6 * PULSE)
    if words := watch.watches and watch.trouble(SILENCE):
      end(words)
    # Otherwise the abort has another reason, and goes on.

  speak_on_abort.handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
  set_handler(signal.SIGABRT, ctypes.cast(speak_on_abort.handler, ctypes.c_void_p))


watch = Watch()
_ending = threading.Lock()
