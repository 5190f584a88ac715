"""Communication between the processes of a run, host to host.

All functions use the coordination service of `jax.distributed`, which runs in
process 0: no device is needed, nothing is compiled, and an error names the process
that is missing. All processes must make the same calls in the same order; a different
call is an error on all of them. With a single process nothing is sent.
"""

from collections.abc import Callable, Mapping
import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import threading
import time
from typing import Any

import jax

from vit_jax import console
from vit_jax.distributed import heartbeats

# Seconds that a process waits for the others; work of process 0 for all, such
# as listing a folder, may take longer.
DEADLINE = float(os.environ.get('VIT_JAX_DEADLINE', 600))
_WORK_DEADLINE = 12 * DEADLINE
_CALLS = 'vit_jax/calls'
_numbers = itertools.count()  # Of the calls of `gather`.
# Types of errors that are raised again as such on the other processes.
_TYPES = (ValueError, FileNotFoundError, TimeoutError, OSError)


def initialize(*args, **kwargs):
  """Connects the processes of a run; see jax.distributed.initialize.

  JAX ends this process if the others do not come, or if one of them is lost later.
  """
  # JAX's handler would keep SIGTERM from ending a process between trainings.
  jax.config.update('jax_enable_preemption_service', False)
  timeout = kwargs.setdefault('initialization_timeout', 300)
  kwargs.setdefault('heartbeat_timeout_seconds', heartbeats.HEARTBEAT)
  text = (
    'Waiting for the other processes to connect: start the same command on all '
    f'hosts, within {timeout} seconds.'
  )
  reminder = threading.Timer(min(20, timeout / 2), print, [text], {'flush': True})
  reminder.daemon = True
  reminder.start()
  try:
    jax.distributed.initialize(*args, **kwargs)
  finally:
    reminder.cancel()
  if jax.process_count() > 1:
    if jax.config.jax_compilation_cache_dir == str(console.compiled_folder()):
      # Only process 0 writes to it. If it then compiles less than the others, they
      # wait for its part of what GPUs compile together.
      jax.config.update('jax_compilation_cache_dir', None)
    hosts = gather('exchanging the names of the hosts', heartbeats.here())
    heartbeats.watch.hosts = dict(enumerate(hosts))
    heartbeats.watch.start()


@contextlib.contextmanager
def connected(**flags):
  """Connects the processes of a run for a `with` block; see `connect`.

  An error in the block that not all processes raise ends the other processes too.
  """
  try:
    connect(**flags)
    yield
  except (Exception, KeyboardInterrupt) as e:
    if heartbeats.watch.watches and not is_common(e):
      heartbeats.watch.report(e)
    raise


def connect(
  distributed: bool = True,
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
):
  """Connects the processes of a run, if there are several.

  `distributed` says whether to look for the other hosts of a TPU pod or a SLURM
  job. Elsewhere, `coordinator` is the HOST:PORT of process 0, next to the number of
  processes and the number of this one.
  """
  given = (coordinator, num_processes, process_id)
  if any(value is not None for value in given):
    _check(*given)
    initialize(*given)
    return
  if not distributed:
    return
  try:
    initialize()
  except ValueError as e:
    # Without a cluster, where JAX raises this error, the run has one process. Any
    # other error is due to a cluster, whose hosts must not train separately.
    if 'coordinator_address' not in str(e):
      raise


def _check(coordinator, num_processes, process_id):
  """Checks the flags that name a coordinator; raises ValueError."""
  if None in (coordinator, num_processes, process_id):
    raise ValueError(
      '--coordinator, --num_processes and --process_id must be given together'
    )
  port = re.fullmatch('.+:([1-9][0-9]{0,4})', coordinator)
  if not port or int(port[1]) > 65535:
    raise ValueError(
      f"coordinator='{coordinator}' must be HOST:PORT of process 0, with a port "
      'from 1 to 65535, such as host0:1234 (--coordinator)'
    )
  if not 0 <= process_id < num_processes:
    raise ValueError(
      f'process_id={process_id} must be from 0 to {num_processes - 1}, for '
      f'--num_processes={num_processes} (--process_id)'
    )


def gather(what: str, value, deadline: float = DEADLINE) -> list:
  """Returns the values of all processes, in the order of the processes.

  Process 0 collects the values and publishes them all. `what` says what is being
  done, such as 'reading the index', for errors; `value` is for JSON, some kilobytes
  at most. TimeoutError if a process does not call within `deadline` seconds,
  RuntimeError if it makes another call.
  """
  if jax.process_count() == 1:
    return [json.loads(json.dumps(value))]
  client, me, number = heartbeats.client(), jax.process_index(), next(_numbers)
  place, own = f'{_CALLS}/{number}', json.dumps([what, value])
  if me:
    client.key_value_set(f'{place}/{me}', own)
    # Process 0 raises first, and names the process that is missing.
    values, failed = json.loads(_get(f'{place}/all', 0, what, deadline + 60))
  else:
    values, failed, last = [], None, jax.process_count() - 1
    try:
      # Most others have arrived when the last one has: they take one call.
      texts = {last: _get(f'{place}/{last}', last, what, deadline), 0: own}
      for key, text in client.key_value_dir_get(f'{place}/'):
        texts[int(key.rpartition('/')[2])] = text
      for process in range(jax.process_count()):
        text = texts.get(process) or _get(f'{place}/{process}', process, what, deadline)
        theirs, value = json.loads(text)
        if theirs != what:
          raise RuntimeError(
            f'the processes are not in step: {heartbeats.name(process)} is at '
            f"'{theirs}', {heartbeats.name(0)} at '{what}'; start all with the same "
            'command, versions and files'
          )
        values.append(value)
    except (TimeoutError, RuntimeError) as e:
      failed = [type(e).__name__, str(e)]
    client.key_value_set(f'{place}/all', json.dumps([values, failed]))
    if number:
      # All processes have begun this call, so all have finished the previous one.
      client.key_value_delete(f'{_CALLS}/{number - 1}')
  if failed:
    raise (TimeoutError if failed[0] == 'TimeoutError' else RuntimeError)(failed[1])
  return values


def _get(key, process, what, deadline):
  """Returns the value that a process writes for a key."""
  begun, who = time.monotonic(), heartbeats.name(process)
  while True:
    try:
      # Short, so that Python handles signals between two of them.
      return heartbeats.client().blocking_key_value_get(key, 1000)
    except Exception as e:  # pylint: disable=broad-except
      if 'DEADLINE_EXCEEDED' not in str(e):
        raise
    seconds = time.monotonic() - begun
    if seconds > deadline:
      raise TimeoutError(
        f'{who} did not arrive within {deadline:g} seconds at: {what}. Check that '
        'process; the environment variable VIT_JAX_DEADLINE=SECONDS sets another '
        'deadline'
      )
    if int(seconds) % 60 == 30:
      console.say(f'Waiting for {who} at: {what} ...')


def from_first(what: str, make: Callable[[], Any]):
  """Returns the result of `make` on process 0, a value for JSON, on all processes.

  An error of `make` is raised on all of them; see also gather.
  """
  return attempt(what, make if jax.process_index() == 0 else lambda: None)[0]


def by_first(what: str):
  """Makes a function one that process 0 calls for all, see `from_first`."""

  def decorate(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
      return from_first(what, lambda: function(*args, **kwargs))

    return call

  return decorate


def attempt(what: str, function: Callable[[], Any]) -> list:
  """Calls a function on every process; returns all results, see `gather`.

  The function returns a value for JSON, and must not wait for other processes.
  If it fails anywhere, all processes raise: their own error, or else the error of the
  first process that failed, with its name, as a ValueError or OSError if it is one,
  else as a RuntimeError.
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
  report = None if error is None else [kind, str(error) or type(error).__name__]
  answers = gather(what, [value, report], _WORK_DEADLINE)
  if error is not None:
    raise _together(error)
  types = {t.__name__: t for t in _TYPES}
  for process, (_, failed) in enumerate(answers):
    if failed:
      kind = types.get(failed[0], RuntimeError)
      raise _together(kind(f'{heartbeats.name(process)}: {failed[1]}'))
  return [value for value, _ in answers]


def agree(what: str, facts: Mapping[str, Any]):
  """Raises ValueError on all processes, with a list, if their facts differ.

  Facts are short values for JSON by name. Hashes are compared first.
  """
  text = json.dumps(dict(facts), sort_keys=True)
  hashes = gather(f'comparing {what}', hashlib.sha256(text.encode()).hexdigest())
  if len(set(hashes)) == 1:
    return
  everywhere = gather(f'naming the differences in {what}', dict(facts))
  differing = []
  for key in dict.fromkeys(k for found in everywhere for k in found):
    first = {}  # Value -> the first process that has it.
    for process, found in enumerate(everywhere):
      first.setdefault(json.dumps(found.get(key)), heartbeats.name(process))
    if len(first) > 1:
      values = (f'{value[:200]} on {name}' for value, name in first.items())
      differing.append(f'  {key}: {"; ".join(values)}')
  raise _together(
    ValueError(
      f'the processes of this run differ in {what}:\n'
      + '\n'.join(differing)
      + '\nGive all of them the same command and the same files'
    )
  )


def is_common(error: Exception) -> bool:
  """Returns whether all processes have raised an error, at the same call."""
  return jax.process_count() == 1 or hasattr(error, '_raised_together')


def _together(error: Exception) -> Exception:
  """Marks an error that all processes raise, for `is_common`."""
  error._raised_together = True  # pylint: disable=protected-access
  return error
