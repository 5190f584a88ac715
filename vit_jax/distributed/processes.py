"""Communication between the processes of a run, host to host.

All functions use the coordination service of `jax.distributed`, which runs in
process 0: no device is needed, nothing is compiled, and an error names the process
that is missing. All processes must make the same calls in the same order; a different
call is an error on all of them. With a single process nothing is sent.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import threading
import time
from typing import Any, TypeVar

import jax

from vit_jax import console
from vit_jax.distributed import heartbeats

_T = TypeVar('_T')
# Seconds that a process waits for the others; work of process 0 for all, such
# as listing a folder, may take longer.
DEADLINE = float(os.environ.get('VIT_JAX_DEADLINE', 600))
_WORK_DEADLINE = 12 * DEADLINE
_CALLS = 'vit_jax/calls'
_numbers = itertools.count()  # Numbers of the calls of `gather`.
# Types of errors that are raised again as such on the other processes.
_TYPES = (ValueError, FileNotFoundError, TimeoutError, OSError)


def initialize(*args: Any, **kwargs: Any) -> None:
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
def connected(**flags: Any) -> Iterator[None]:
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
) -> None:
  """Connects the processes of a run, if there are several.

  `distributed` says whether to look for the other hosts of a TPU pod or a SLURM
  job. Elsewhere, `coordinator` is the HOST:PORT of process 0, next to the number of
  processes and the number of this one.
  """
  if coordinator is not None or num_processes is not None or process_id is not None:
    _check(coordinator, num_processes, process_id)
    initialize(coordinator, num_processes, process_id)
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


def _check(
  coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
  """Checks the flags that name a coordinator; raises ValueError."""
  if coordinator is None or num_processes is None or process_id is None:
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


def gather(activity: str, value: Any, deadline: float = DEADLINE) -> list:
  """Returns the values of all processes, in the order of the processes.

  Process 0 collects the values and publishes them all. `activity` names the work in
  errors, such as 'reading the index'; `value` is for JSON, some kilobytes at most.
  TimeoutError if a process does not call within `deadline` seconds, RuntimeError if it
  makes another call.
  """
  if jax.process_count() == 1:
    return [json.loads(json.dumps(value))]
  client = heartbeats.client()
  number = next(_numbers)
  folder = f'{_CALLS}/{number}'
  process = jax.process_index()
  message = json.dumps([activity, value])
  if process:
    client.key_value_set(f'{folder}/{process}', message)
    # Process 0 raises first, and names the process that is missing.
    values, failure = json.loads(_get(f'{folder}/all', 0, activity, deadline + 60))
  else:
    values, failure = [], None
    try:
      values = _collect(folder, message, activity, deadline)
    except (TimeoutError, RuntimeError) as e:
      failure = [type(e).__name__, str(e)]
    client.key_value_set(f'{folder}/all', json.dumps([values, failure]))
    if number:
      # All processes have begun this call, so all have finished the previous one.
      client.key_value_delete(f'{_CALLS}/{number - 1}')
  if failure:
    kind, text = failure
    raise TimeoutError(text) if kind == 'TimeoutError' else RuntimeError(text)
  return values


def _collect(folder: str, message: str, activity: str, deadline: float) -> list:
  """Returns the values of all processes on process 0, whose own message is given."""
  last = jax.process_count() - 1
  # Most others have arrived when the last one has: they take one call.
  messages = {last: _get(f'{folder}/{last}', last, activity, deadline)}
  messages[0] = message
  for key, text in heartbeats.client().key_value_dir_get(f'{folder}/'):
    messages[int(key.rpartition('/')[2])] = text
  values = []
  for process in range(jax.process_count()):
    if process not in messages:
      messages[process] = _get(f'{folder}/{process}', process, activity, deadline)
    remote_activity, value = json.loads(messages[process])
    if remote_activity != activity:
      raise RuntimeError(
        f'the processes are not in step: {heartbeats.name(process)} is at '
        f"'{remote_activity}', {heartbeats.name(0)} at '{activity}'; start all with the "
        'same command, versions and files'
      )
    values.append(value)
  return values


def _get(key: str, process: int, activity: str, deadline: float) -> str:
  """Returns the value that a process writes for a key."""
  start_time = time.monotonic()
  name = heartbeats.name(process)
  while True:
    try:
      # Short, so that Python handles signals between two of them.
      return heartbeats.client().blocking_key_value_get(key, 1000)
    except Exception as e:  # pylint: disable=broad-except
      if 'DEADLINE_EXCEEDED' not in str(e):
        raise
    seconds = time.monotonic() - start_time
    if seconds > deadline:
      raise TimeoutError(
        f'{name} did not arrive within {deadline:g} seconds at: {activity}. Check that '
        'process; the environment variable VIT_JAX_DEADLINE=SECONDS sets another '
        'deadline'
      )
    if int(seconds) % 60 == 30:
      console.log(f'Waiting for {name} at: {activity} ...')


def from_first(activity: str, make: Callable[[], Any]) -> Any:
  """Returns the result of `make` on process 0, a value for JSON, on all processes.

  An error of `make` is raised on all of them; see also gather.
  """

  def make_on_first() -> Any:
    return make() if jax.process_index() == 0 else None

  return attempt(activity, make_on_first)[0]


def by_first(activity: str) -> Callable:
  """Makes a function one that process 0 calls for all, see `from_first`."""

  def decorate(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
      return from_first(activity, lambda: function(*args, **kwargs))

    return call

  return decorate


def attempt(activity: str, function: Callable[[], Any]) -> list:
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
  failure = None
  if error is not None:
    kind = next((t.__name__ for t in _TYPES if isinstance(error, t)), None)
    failure = [kind, str(error) or type(error).__name__]
  results = gather(activity, [value, failure], _WORK_DEADLINE)
  if error is not None:
    raise _together(error)
  types: dict[str, type[Exception]] = {t.__name__: t for t in _TYPES}
  for process, (_, failure) in enumerate(results):
    if failure:
      kind, text = failure
      error_type = types.get(kind, RuntimeError)
      raise _together(error_type(f'{heartbeats.name(process)}: {text}'))
  return [value for value, _ in results]


def attempt_local(activity: str, function: Callable[[], _T]) -> _T:
  """Calls a function on every process; returns the result of this one, of any type.

  If it fails anywhere, all processes raise, see `attempt`.
  """
  results: list[_T] = []
  attempt(activity, lambda: results.append(function()))
  return results[0]


def first_before_others(activity: str, function: Callable[[], _T]) -> _T:
  """Calls a function on process 0, and when that is done on the others.

  What it writes to a shared disk is written once, and to separate disks on each. Returns
  the result of this process; for errors see `attempt`.
  """
  if jax.process_index() == 0:
    result = attempt_local(activity, function)
    attempt(activity, _nothing)
  else:
    attempt(activity, _nothing)
    result = attempt_local(activity, function)
  return result


def _nothing() -> None:
  """Takes part in `attempt` without a task."""


def agree(subject: str, facts: Mapping[str, Any]) -> None:
  """Raises ValueError on all processes, with a list, if their facts differ.

  Facts are short values for JSON by name. Hashes are compared first.
  """
  text = json.dumps(dict(facts), sort_keys=True)
  hashes = gather(f'comparing {subject}', hashlib.sha256(text.encode()).hexdigest())
  if len(set(hashes)) == 1:
    return
  facts_by_process = gather(f'naming the differences in {subject}', dict(facts))
  keys: dict[str, None] = {}
  for process_facts in facts_by_process:
    keys |= dict.fromkeys(process_facts)
  differing = []
  for key in keys:
    first: dict[str, str] = {}  # Value -> the first process that has it.
    for process, process_facts in enumerate(facts_by_process):
      first.setdefault(json.dumps(process_facts.get(key)), heartbeats.name(process))
    if len(first) > 1:
      values = (f'{value[:200]} on {name}' for value, name in first.items())
      differing.append(f'  {key}: {"; ".join(values)}')
  raise _together(
    ValueError(
      f'the processes of this run differ in {subject}:\n'
      + '\n'.join(differing)
      + '\nGive all of them the same command and the same files'
    )
  )


def is_common(error: BaseException) -> bool:
  """Returns whether all processes have raised an error, at the same call."""
  return jax.process_count() == 1 or hasattr(error, '_raised_together')


def _together(error: Exception) -> Exception:
  """Marks an error that all processes raise, for `is_common`."""
  error._raised_together = True  # type: ignore[attr-defined]
  return error
