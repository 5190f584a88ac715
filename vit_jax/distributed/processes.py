"""Communication between the processes of a run, host to host.

All functions use the coordination service of `jax.distributed`, which runs in
process 0. It needs no device, has deadlines, and errors name the missing
process. All processes must make the same calls in the same order; a different
call is an error on all of them. With a single process nothing is sent.
"""

from collections.abc import Callable, Mapping
import contextlib
import functools
import itertools
import json
import os
import re
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

  If another process is lost later, this process names it and exits with the
  status of SIGTERM.
  """
  heartbeats.speak_on_abort()
  heartbeats.watch.connects = True
  try:
    # JAX's handler would keep SIGTERM from ending a process between trainings.
    jax.config.update('jax_enable_preemption_service', False)
    jax.distributed.initialize(*args, **kwargs)
  finally:
    heartbeats.watch.connects = False
  if jax.process_count() > 1:
    if jax.config.jax_compilation_cache_dir == str(console.compiled_folder()):
      # Process 0 alone writes to it. If it then compiles less than the others,
      # they wait for its part of what GPUs compile together.
      jax.config.update('jax_compilation_cache_dir', None)
    heartbeats.watch.start()
    hosts = gather('telling each other their hosts', heartbeats.here())
    heartbeats.watch.hosts = dict(enumerate(hosts))


@contextlib.contextmanager
def connected(**flags):
  """Connects the processes of a run for a `with` block; see `connect`.

  An error in the block is also told to the other processes, which end with it.
  """
  try:
    connect(**flags)
    yield
  except (Exception, KeyboardInterrupt) as e:
    heartbeats.end_with(e)
    raise


def connect(
  distributed: bool = True,
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
):
  """Connects the processes of a run, if there are several.

  `distributed` tells whether to look for the other hosts of a TPU pod or a
  SLURM job. Where they are not found so, `coordinator` is the HOST:PORT of
  process 0, with the number of processes and that of this one.
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
    # JAX raises this error if it finds no cluster: the run has one process. Any
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

  `what` says what is being done, such as 'reading the index', for errors;
  `value` is for JSON, some kilobytes at most. Lost if a process has ended,
  TimeoutError if one does not call within `deadline` seconds, RuntimeError if
  it makes another call.
  """
  if jax.process_count() == 1:
    return [json.loads(json.dumps(value))]
  heartbeats.watch.doing = what
  client, me, number = heartbeats.client(), jax.process_index(), next(_numbers)
  text = json.dumps({'what': what, 'value': value})
  client.key_value_set(f'{_CALLS}/{number}/{me}', text)
  begun, values = time.monotonic(), []
  while len(values) < jax.process_count():
    process = len(values)
    try:
      # Short, so that Python handles signals between two of them.
      text = client.blocking_key_value_get(f'{_CALLS}/{number}/{process}', 1000)
    except Exception as e:  # pylint: disable=broad-except
      if 'DEADLINE_EXCEEDED' not in str(e):
        raise heartbeats.Lost(f'{heartbeats.name(0)} is gone') from e
      _check_waiting(what, process, time.monotonic() - begun, deadline)
      continue
    theirs = json.loads(text)
    if theirs['what'] != what:
      raise RuntimeError(
        f'the processes do not do the same: {heartbeats.name(process)} is at '
        f"'{theirs['what']}', {heartbeats.name(me)} at '{what}'; start all with the "
        'same command, versions and files'
      )
    values.append(theirs['value'])
  if number:
    # All processes have begun this call, so all have finished the previous one.
    client.key_value_delete(f'{_CALLS}/{number - 1}/{me}')
  return values


def _check_waiting(what, process, seconds, deadline):
  """Raises an error if waiting for a process is in vain; else may say who it is."""
  if words := heartbeats.watch.farewell(process):
    raise heartbeats.Lost(words)
  who = heartbeats.name(process)
  if seconds > deadline:
    raise TimeoutError(
      f'{who} did not come within the deadline, at {what}; it is at '
      f'{heartbeats.watch.place(process)}. Check that process; the environment '
      'variable VIT_JAX_DEADLINE=SECONDS sets a longer deadline'
    )
  if int(seconds) % 60 == 30:
    console.say(f'Waiting for {who}, at {what} ...')


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
  If it fails anywhere, all processes raise: their own error, or else that of
  the first process with an error, with its name, as a ValueError or OSError if
  it is one, else as a RuntimeError.
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
    raise _together(error)
  types = {t.__name__: t for t in _TYPES}
  for process, (_, failed) in enumerate(answers):
    if failed:
      kind = types.get(failed[0], RuntimeError)
      raise _together(kind(f'{heartbeats.name(process)}: {failed[1]}'))
  return [value for value, _ in answers]


def agree(what: str, facts: Mapping[str, Any]):
  """Raises ValueError on all processes, with a list, if their facts differ.

  Facts are short values for JSON by name.
  """
  everywhere = gather(f'comparing {what}', dict(facts))
  differing = []
  for key in dict.fromkeys(k for found in everywhere for k in found):
    first = {}  # Value -> the first process that has it.
    for process, found in enumerate(everywhere):
      first.setdefault(json.dumps(found.get(key)), heartbeats.name(process))
    if len(first) > 1:
      words = (f'{value[:200]} on {name}' for value, name in first.items())
      differing.append(f'  {key}: {"; ".join(words)}')
  if differing:
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
