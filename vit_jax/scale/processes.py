"""What the processes of a run tell each other, host to host.

Everything here goes through the coordination service of `jax.distributed`, which
lives in process 0. It needs no device, has a deadline, and says who is waited for.
All processes must make the same calls in the same order; a call that differs is an
error on all of them. Where there is one process, nothing is sent.
"""

import atexit
from collections.abc import Callable
from collections.abc import Mapping
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
from typing import Any

import jax
from jax._src import distributed  # Its client has no public name.

from vit_jax import cli

# Seconds that one process waits for the others; work that process 0 does for all,
# listing a folder for one, may take longer.
DEADLINE = float(os.environ.get('VIT_JAX_DEADLINE', 600))
_WORK_DEADLINE = 12 * DEADLINE
# Seconds between two signs of life, and those of silence that mean death. JAX takes
# 100, and aborts then.
_PULSE = 2.0
_SILENCE = 60.0
_SIGNS = 'vit_jax/signs/'
_GIVEN_UP = 'vit_jax/given_up/'
# Errors that keep their type on the processes that only hear of them.
_TYPES = (ValueError, FileNotFoundError, TimeoutError, OSError)

_calls = itertools.count()
_place = 'the start'
_hosts: list[str] = []
_meetings = itertools.count()
_met: list[str] = []
_parting = ''  # The error with which this process ends.


class Lost(RuntimeError):
  """Another process of the run is gone."""


def initialize(*args, **kwargs):
  """Connects the processes of a run; see jax.distributed.initialize.

  Where a process is lost later, this one says which and ends with the status of
  SIGTERM. Until `listens_for_sigterm`, SIGTERM ends it at once.

  Args:
    *args: for jax.distributed.initialize.
    **kwargs: likewise.
  """
  library = distributed._jax
  original = library.get_distributed_runtime_client
  # By default JAX prints a page of stack traces. (This is not even called, in this
  # version, but aborts: its argument cannot be made one of Python. See _on_abort.)
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
  me = f'{socket.gethostname()}, pid {os.getpid()}'
  _hosts[:] = ['host unknown'] * jax.process_count()
  _watch.start()
  atexit.register(_watch.stop)
  _hosts[:] = gather('telling each other their hosts', me)


def name(process: int) -> str:
  """Names a process as people know it: 'process 1 (host-b, pid 7)'."""
  host = _hosts[process] if _hosts else socket.gethostname()
  return f'process {process} ({host})'


def gather(what: str, value, deadline: float = DEADLINE) -> list:
  """Returns what every process gave, in the order of the processes.

  Args:
    what: what is being done, 'reading the index' for one; it stands in errors.
    value: what JSON can hold, some kilobytes at most.
    deadline: seconds to wait.

  Raises:
    Lost: if a process is gone.
    TimeoutError: if a process does not come within the deadline.
    RuntimeError: if a process is at another call.
  """
  global _place
  if jax.process_count() == 1:
    return [json.loads(json.dumps(value))]
  _place = what
  client, me, call = _client(), jax.process_index(), next(_calls)
  content = json.dumps({'what': what, 'value': value})
  client.key_value_set(f'vit_jax/{call}/{me}', content)
  end = time.monotonic() + deadline
  values = []
  for process in range(jax.process_count()):
    theirs = json.loads(_receive(call, process, what, end))
    if theirs['what'] != what:
      raise RuntimeError(
        f'the processes do not do the same: {name(process)} is at '
        f"'{theirs['what']}', {name(me)} at '{what}'; start all with the same "
        'command, versions and files'
      )
    values.append(theirs['value'])
  if call:
    # All have begun this call, so all have done with the one before.
    client.key_value_delete(f'vit_jax/{call - 1}/{me}')
  return values


def from_first(what: str, make: Callable[[], Any]):
  """Returns what process 0 makes, on all processes.

  Args:
    what: see gather.
    make: called by process 0 alone; returns what JSON can hold.

  Raises:
    what `make` raises, on all; and see gather.
  """
  return attempt(what, make if jax.process_index() == 0 else lambda: None)[0]


def attempt(what: str, function: Callable[[], Any]) -> list:
  """Calls a function on every process; where one fails, all of them raise.

  Args:
    what: see gather.
    function: returns what JSON can hold; must not wait for other processes.

  Returns:
    What it returned on every process, in the order of the processes.

  Raises:
    The error of this process if it has one, else that of the first which has one,
    with its name; of the same type if that is a ValueError or an OSError, else a
    RuntimeError. And see gather.
  """
  error, value = None, None
  try:
    value = function()
  except Exception as e:  # pylint: disable=broad-except
    error = e
  if jax.process_count() == 1:
    if error is not None:
      raise error
    return [json.loads(json.dumps(value))]
  kind = next((t.__name__ for t in _TYPES if isinstance(error, t)), None)
  told = None if error is None else [kind, str(error) or type(error).__name__]
  answers = gather(what, [value, told], _WORK_DEADLINE)
  if error is not None:
    raise error
  types = {t.__name__: t for t in _TYPES}
  for process, (_, failed) in enumerate(answers):
    if failed:
      raise types.get(failed[0], RuntimeError)(f'{name(process)}: {failed[1]}')
  return [value for value, _ in answers]


def agree(what: str, facts: Mapping[str, Any]):
  """Checks that all processes found the same.

  Args:
    what: what the facts are about, 'the data' for one.
    facts: by their names; what JSON can hold, in few words each.

  Raises:
    ValueError: the same on all processes, which says what differs and where; and
      see gather.
  """
  everywhere = gather(f'comparing {what}', dict(facts))
  differing = []
  for key in dict.fromkeys(k for found in everywhere for k in found):
    values = {}
    for process, found in enumerate(everywhere):
      values.setdefault(json.dumps(found.get(key)), []).append(process)
    if len(values) > 1:
      differing.append(
        f'  {key}: '
        + '; '.join(
          f'{value[:200]} on {name(which[0])}'
          + (f' and {len(which) - 1} more' if len(which) > 1 else '')
          for value, which in values.items()
        )
      )
  if differing:
    raise ValueError(
      f'the processes of this run differ in {what}:\n'
      + '\n'.join(differing)
      + '\nGive all of them the same command and the same files'
    )


def barrier(what: str):
  """Waits until all processes are there; see gather."""
  gather(what, None)


def give_up(why: str):
  """Tells the threads of other processes that wait in `meet` not to wait."""
  if jax.process_count() > 1:
    _client().key_value_set(
      f'{_GIVEN_UP}{jax.process_index()}', why, allow_overwrite=True
    )


def meet(what: str, deadline: float):
  """Waits until all processes are there; for a thread beside the main one.

  Args:
    what: what is being done. All processes meet in the same order.
    deadline: seconds to wait.

  Raises:
    OSError: if a process has given up.
    TimeoutError: if one does not come within the deadline.
  """
  client, me = _client(), jax.process_index()
  own = f'vit_jax/meet/{next(_meetings)}/'
  client.key_value_set(f'{own}{me}', '')
  end, pause = time.monotonic() + deadline, 0.01
  while len(client.key_value_dir_get(own)) < jax.process_count():
    for path, why in client.key_value_dir_get(_GIVEN_UP):
      raise OSError(f'{name(int(path.rsplit("/", 1)[1]))}: {why}')
    if time.monotonic() > end:
      raise TimeoutError(f'not all processes came to {what} in time')
    time.sleep(pause)
    pause = min(1.5 * pause, 1)
  _met.append(f'{own}{me}')
  if len(_met) > 2:  # All have left the meeting before the last.
    client.key_value_delete(_met.pop(0))


def listens_for_sigterm(listen: bool):
  """Lets JAX notice SIGTERM, to stop all processes after the same step, or not.

  Before and after the loop nobody asks JAX, and SIGTERM ends the process.
  """
  if _jax_sigterm is not None:
    _set_handler(
      signal.SIGTERM, _jax_sigterm if listen else int(signal.SIG_DFL)
    )


def end_with(error: BaseException):
  """Ends this process, in one sentence, if its error comes of one that is gone.

  Without the usual goodbyes between processes, which would wait, or abort.

  Args:
    error: what an update, or the transfer of an array, raised. Where it is of
      another kind, nothing is done but that the others will hear of it.
  """
  if jax.process_count() == 1:
    return
  global _parting
  _parting = f'{error}'[:1000]
  if isinstance(error, Lost):
    _end(words=str(error))
  # What a collective raises when a peer closes its connection, or never answers.
  if any(s in str(error) for s in ('Gloo', 'UNAVAILABLE', 'DEADLINE_EXCEEDED')):
    time.sleep(5 * _PULSE)  # Whoever still lives gives a sign meanwhile.
    _end(_watch.silent(4 * _PULSE))


def _client():
  return distributed.global_state.client


def _receive(call, process, what, end):
  """Returns what a process set for a call."""
  key, said = f'vit_jax/{call}/{process}', time.monotonic() + 30
  while True:
    try:
      # In short waits, so that Python sees signals between them.
      return _client().blocking_key_value_get(key, 1000)
    except Exception as e:  # pylint: disable=broad-except
      if 'DEADLINE_EXCEEDED' not in str(e):
        raise Lost(f'{name(0)} is gone') from e
    if _watch.has_left(process):
      raise Lost(f'{name(process)} has ended{_watch.parting(process)}')
    now = time.monotonic()
    if now > said:
      said = now + 60
      cli.say(f'Waiting for {name(process)}, at {what} ...')
    if now > end:
      raise TimeoutError(
        f'{name(process)} did not come within the deadline, at {what}; it is at '
        f'{_watch.place(process)}. Look what it does there; VIT_JAX_DEADLINE='
        'SECONDS in the environment gives it longer'
      )


class _Watch(threading.Thread):
  """Shows the others that this process lives, and looks whether they do."""

  def __init__(self):
    super().__init__(daemon=True)
    self._done = threading.Event()
    self._seen = {}  # process: (last sign of life, when it was new here)

  def run(self):
    """Beats until it is stopped; ends the process where another is gone."""
    for count in itertools.count():
      if not self._beat([count, _place]):
        return  # What lives in process 0 is gone: JAX ends this process.
      lost = self.silent(_SILENCE)
      if lost and not self._done.is_set():
        _end(lost)
      if self._done.wait(_PULSE):
        return

  def stop(self):
    """Takes leave: from now on silence is no sign of death."""
    self._done.set()
    self.join()
    _set_handler(signal.SIGABRT, int(signal.SIG_DFL))
    if self._beat([None, _parting]) and _parting:
      # JAX would wait for the others, which end when they have heard of it.
      time.sleep(3 * _PULSE)
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(1)

  def place(self, process: int) -> str:
    """Returns where a process was when it last said so."""
    sign, _ = self._seen.get(process, (None, 0))
    return sign[1] if sign else 'the start'

  def has_left(self, process: int) -> bool:
    """Tells whether a process took leave."""
    sign, _ = self._seen.get(process, (None, 0))
    return sign is not None and sign[0] is None

  def parting(self, process: int) -> str:
    """Returns the error with which a process took leave, after a colon."""
    error = self._seen[process][0][1]
    return f': {error}' if error else ''

  def silent(self, seconds: float) -> list[int]:
    """Returns the processes that gave no sign of life for so long."""
    now = time.monotonic()
    return [
      process
      for process, (sign, since) in self._seen.items()
      if sign[0] is not None
      and now - since > seconds
      and process != jax.process_index()
    ]

  def _beat(self, sign):
    """Shows a sign of life, and takes in those of the others."""
    try:
      client, me = _client(), jax.process_index()
      client.key_value_set(
        f'{_SIGNS}{me}', json.dumps(sign), allow_overwrite=True
      )
      found = client.key_value_dir_get(_SIGNS)
    except Exception:  # pylint: disable=broad-except
      return False
    now = time.monotonic()
    for key, text in found:
      process, sign = int(key.rsplit('/', 1)[1]), json.loads(text)
      if process not in self._seen or self._seen[process][0] != sign:
        self._seen[process] = (sign, now)
    return True


def _end(lost=(), *, words: str = ''):
  """Ends this process since another is gone; from whatever thread."""
  if not _ending.acquire(blocking=False):
    time.sleep(60)  # Another thread has begun to, and ends this one too.
  if not words:
    who = ' and '.join(map(name, lost)) or 'another process'
    words = f'{who} {"are" if len(lost) > 1 else "is"} gone'
  text = (
    f'\nError: {words}, so {name(jax.process_index())} stops. Start the same '
    'command again on all hosts: the run goes on from its last checkpoint.\n'
  )
  os.write(2, text.encode())
  os._exit(128 + signal.SIGTERM)


def _on_abort(_):
  """Says why JAX aborts, which it does as soon as process 0 is gone."""
  _set_handler(signal.SIGABRT, int(signal.SIG_DFL))
  host, port = distributed.global_state.coordinator_address.rsplit(':', 1)
  for _ in range(3):
    time.sleep(1)  # A process that dies may still accept a connection.
    try:
      socket.create_connection((host, int(port)), timeout=10).close()
    except OSError:
      _end([0])
  lost = _watch.silent(5 * _PULSE)
  _end(lost, words='' if lost else 'JAX found the run broken, as it says above')


def _set_handler(number, handler):
  """Sets the C handler of a signal; returns the address of the one before."""
  signal_of_c = ctypes.CDLL(None).signal
  signal_of_c.restype = ctypes.c_void_p
  signal_of_c.argtypes = [ctypes.c_int, ctypes.c_void_p]
  return signal_of_c(number, handler)


# JAX's own handler of SIGTERM, which is one of C.
_jax_sigterm = None
_abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_on_abort)
_watch = _Watch()
_ending = threading.Lock()
