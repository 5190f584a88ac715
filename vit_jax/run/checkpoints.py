"""Saves and restores checkpoints of a run (Orbax): the newest and the best.

Checkpoints lie in `workdir/checkpoints/<step>`. They are written in the
background, appear under their name only when complete, and can be restored on
any other mesh.

Reading can fail in two ways. Damage (a wrong checksum, a missing file, arrays
of another model) is permanent: all processes together take the next older
checkpoint. An error of the storage may pass: all processes try again, and in
the end raise the error without renaming anything.
"""

from collections.abc import Callable
import concurrent.futures
import itertools
import math
import re
import time
from typing import Any, NamedTuple

from absl import logging
from etils import epath
import jax
import orbax.checkpoint as ocp

from vit_jax.distributed import processes
from vit_jax.learning import state as state_lib
from vit_jax.run import checkpoint_files as files, workdir as workdir_lib

# Seconds to wait before each new attempt to reach the storage.
RETRY_AFTER = (1, 4, 16)
# Attempts of a reader to list checkpoints while a run writes and deletes them.
_LISTINGS = 20
_STEP = re.compile('0|[1-9][0-9]*')  # Name of the folder of a checkpoint.
_ITEM = 'default'  # Orbax's name for the only item of a checkpoint.
_UNFINISHED = '.orbax-checkpoint-tmp'  # In the names that Orbax writes to.


class Weights(NamedTuple):
  """The part of a checkpoint that evaluation and prediction need.

  Attributes:
    params: the parameters; averaged if the run kept an average.
    extra: see vit_jax.learning.state.TrainState.
    step: number of updates so far.
  """

  params: Any
  extra: Any
  step: int


class Checkpoints:
  """The checkpoints of a run: the newest few, and the best.

  Args:
    workdir: folder of the run.
    keep: number of newest checkpoints to keep.
    best_metric: metric that selects one more checkpoint to keep, the best.
    low: whether the lowest metric is the best.
    read_only: whether the folder is only read, perhaps while a run writes to
      it.
  """

  def __init__(
    self,
    workdir,
    keep: int = 1,
    best_metric: str | None = None,
    low: bool = False,
    read_only: bool = False,
  ):
    self._read_only = read_only
    self.directory = workdir_lib.absolute(workdir) / 'checkpoints'
    self._keep, self._best_metric = max(1, keep), best_metric
    self._sign = -1 if low else 1
    self._writer = None  # Created by the first `save`.
    self._deletion = None  # The deletion that the last `save` began.

  # --- Writing ---

  def __enter__(self):
    return self

  def __exit__(self, kind, *_):
    """Completes what is being written, whatever the `with` block has raised.

    Ctrl-C alone does not wait.
    """
    if kind is None:
      self.close()
    elif issubclass(kind, Exception):
      try:
        self.close()
      except OSError as e:
        logging.error('%s', e)  # Beside the error of the block.

  def save(self, step: int, state: state_lib.TrainState, metrics: dict | None = None):
    """Begins to write a checkpoint, after the previous one is complete.

    Old checkpoints are deleted meanwhile.

    OSError if this or the previous checkpoint cannot be written.
    """
    try:
      if self._writer is None:
        self._writer = _make_writer()
      self._writer.wait_until_finished()
      # In Orbax the other processes would wait for a process that fails here.
      processes.attempt('beginning a checkpoint', lambda: self._make_way(step))
      item = files.Save(_stored(state), metrics=self._rated(metrics))
      self._writer.save(
        self.directory / str(step), args=ocp.args.Composite(**{_ITEM: item})
      )
      if jax.process_index() == 0:
        thread = concurrent.futures.ThreadPoolExecutor(1)
        self._deletion = thread.submit(self._delete_old)
        thread.shutdown(wait=False)
    except Exception as e:
      if jax.process_count() > 1:
        # Its threads may wait for those of a process that has failed.
        self._writer = None
      raise self._failure(e) from e

  @processes.by_first('rating a checkpoint')
  def rate(self, step: int, metrics: dict):
    """Stores the metrics of a checkpoint, if there is one, saved without them.

    Process 0 does so for all.
    """
    folder = self.directory / str(step) / _ITEM
    if folder.is_dir():
      files.write_metrics(folder, self._rated(metrics))

  def _rated(self, metrics) -> dict[str, float]:
    """Returns the metric that selects the best by name, if it is known."""
    value = (metrics or {}).get(self._best_metric)
    return {} if value is None else {self._best_metric: float(value)}

  def _make_way(self, step):
    """Checks that this process can write; process 0 makes way for a step."""
    self.directory.mkdir(parents=True, exist_ok=True)
    probe = self.directory / f'.probe_{jax.process_index()}'
    probe.write_text('')
    probe.unlink()
    if jax.process_index():
      return
    self._end_deletion()
    if max(self.steps(), default=-1) >= step:
      raise ValueError(f'there is a checkpoint of step {step} or a later one already')
    for path in self.directory.iterdir():
      if path.name == str(step):
        self._rename([step])
      elif _UNFINISHED in path.name:  # Of a run that was killed.
        path.rmtree()

  def _delete_old(self):
    """Deletes all complete checkpoints but the newest few and the best."""
    steps = self.steps()
    kept, name = steps[-self._keep :], self._best_metric
    values = {
      step: name and files.read_metric(self.directory / str(step), name)
      for step in steps
    }
    rated = [step for step in steps if values[step] is not None]
    if rated:
      kept.append(max(rated, key=lambda x: (self._sign * values[x], x)))
    for step in set(steps) - set(kept):
      (self.directory / str(step)).rmtree()

  def _end_deletion(self):
    """Waits for the deletion of old checkpoints, and raises its error."""
    deletion, self._deletion = self._deletion, None
    if deletion is not None:
      deletion.result()

  def wait(self):
    """Waits until all checkpoints are written; raises OSError if that fails."""
    self._finish(last=False)

  def close(self):
    """Waits like `wait`, deletes old checkpoints, and frees resources."""
    self._finish(last=True)

  def _finish(self, last: bool):
    if self._writer is None:
      return
    writer, self._writer = self._writer, None  # After an error it is of no use.
    try:
      writer.wait_until_finished()
      self._end_deletion()
      if last:
        writer.close()
        if jax.process_index() == 0:
          self._delete_old()
    except Exception as e:
      raise self._failure(e) from e
    if not last:
      self._writer = writer

  def _failure(self, cause):
    try:
      steps = self.steps()
      last = f'step {steps[-1]}' if steps else 'none'
    except OSError:
      last = 'unknown, the folder cannot be listed'
    return OSError(
      f"a checkpoint could not be written to '{self.directory}': "
      f'{files.short(cause)}. The last complete one: {last}. Free some space '
      '(or repair the disk) and start the same command again: the run resumes '
      'from there'
    )

  # --- Reading ---

  def steps(self) -> list[int]:
    """Returns the steps of all complete checkpoints, ascending."""
    return _list(self.directory, complete=True)

  def restore(self, abstract: state_lib.TrainState, step: int | None = None):
    """Restores the newest checkpoint onto the shardings of `abstract`.

    All processes must call it. Checkpoints that are damaged or of another run
    are moved aside after an older one is restored. With `step`, only that one
    is tried.

    Returns (state, step); (None, 0) if there is no checkpoint. ValueError if
    there are checkpoints, but all are damaged; OSError if the storage does not
    answer.
    """
    wanted = _stored(abstract)
    found, step = self._newest(lambda path: files.read(path, wanted), step)
    return (abstract.replace(**found), step) if found else (None, 0)

  def restore_weights(
    self,
    params=None,
    extra=None,
    step: int | None = None,
    dtype: str | None = None,
  ) -> Weights:
    """Restores what evaluation and prediction need; all processes must call it.

    Args:
      params: a tree of jax.ShapeDtypeStruct with shardings; None: all
        parameters, onto the host.
      extra: likewise; None: nothing; or names in the extra state, onto the
        host.
      step: step of the checkpoint; by default the newest.
      dtype: type of the parameters; by default as in `params`.

    Raises:
      FileNotFoundError: if there is no complete checkpoint.
      ValueError, OSError: if the step has no checkpoint; and see `restore`.
    """
    if step is not None and step not in (steps := self._agreed(complete=True)):
      raise ValueError(
        f"step={step} is not among the checkpoints in '{self.directory}': {steps}"
      )
    found, step = self._newest(
      lambda path: files.read_weights(path, params, extra, dtype), step
    )
    if found is None:
      raise FileNotFoundError(
        f"'{self.directory.parent}' has no complete checkpoint: train first, or longer"
      )
    extra = found.get('extra', {}) if jax.tree.leaves(extra) else {}
    return Weights(found['params'], extra, step)

  def _newest(self, read: Callable, step: int | None):
    """Returns (read's result, step) of the newest undamaged checkpoint."""
    for _ in range(_LISTINGS):
      # A run also moves incomplete checkpoints aside.
      steps = self._agreed(complete=self._read_only)
      damaged = {}
      for candidate in steps[::-1] if step is None else [step]:
        found, damage = self._restore(candidate, read)
        if damage is None:
          if damaged:
            logging.warning('Restored the older checkpoint of step %d', candidate)
          if damaged and not self._read_only:
            aside = processes.by_first('moving damaged checkpoints aside')
            aside(self._rename)(list(damaged))
          return found, candidate
        damaged[candidate] = damage
        logging.warning(
          'Checkpoint %s/%d cannot be restored (it is damaged or of another run): %s',
          self.directory,
          candidate,
          damage,
        )
      # A run may meanwhile have deleted these checkpoints and written others.
      if not self._read_only or self._agreed(complete=True) == steps:
        break
    if not damaged:
      return None, 0
    newest, damage = next(iter(damaged.items()))
    remedy = '. Move the folder away to start anew, or use another --workdir'
    raise ValueError(
      f"no checkpoint in '{self.directory}' can be restored; the newest, step "
      f'{newest}: {damage}{"" if self._read_only else remedy}'
    )

  def _restore(self, step: int, read: Callable):
    """Reads one checkpoint; returns (result of `read`, None) or (None, damage).

    All processes return the same kind, or raise OSError.
    """
    path, suspect = self.directory / str(step) / _ITEM, False
    delays = iter((0, *RETRY_AFTER, None))
    while True:
      found, damage, error = files.attempt(path, step, read)
      everyone = processes.gather(
        f'restoring the checkpoint of step {step}',
        [damage, error],
        deadline=12 * processes.DEADLINE,
      )
      damages = [damage for damage, _ in everyone if damage]
      errors = [error for _, error in everyone if error]
      if errors:
        _try_again(f"the checkpoint '{path.parent}'", errors[0], next(delays))
      elif not damages:
        return found, None
      elif suspect:  # Damage seen twice is not a passing error.
        return None, damages[0]
      suspect = not errors

  @processes.by_first('listing the checkpoints')
  def _agreed(self, complete: bool) -> list[int]:
    """Returns the steps that the first process finds, on all processes."""
    return _find(self.directory, complete)

  def _rename(self, steps):
    """Moves what lies under the names of steps to another folder."""
    for number in itertools.count():
      name = f'damaged_checkpoints{f"_{number}" if number else ""}'
      target = self.directory.parent / name
      if target.is_dir() or not target.exists():
        break
    target.mkdir(parents=True, exist_ok=True)
    for step in steps:
      count = sum(1 for _ in target.iterdir())
      (self.directory / str(step)).rename(target / f'{step}_{count}')


def _make_writer() -> ocp.AsyncCheckpointer:
  everyone = set(range(jax.process_count()))
  return ocp.AsyncCheckpointer(
    ocp.CompositeCheckpointHandler(**{_ITEM: files.Handler()}),
    # If creation in the background fails, all other threads wait for minutes.
    async_options=ocp.AsyncOptions(
      create_directories_asynchronously=False,
      timeout_secs=math.ceil(2 * processes.DEADLINE),
    ),
    # With explicit processes, they wait for each other with a deadline.
    multiprocessing_options=ocp.options.MultiprocessingOptions(
      active_processes=everyone if len(everyone) > 1 else None
    ),
  )


def has_checkpoint(workdir) -> bool:
  """Returns whether this process finds a complete checkpoint in a folder."""
  directory = workdir_lib.absolute(workdir) / 'checkpoints'
  return bool(_find(directory, complete=True))


def load_weights(workdir, extra: tuple[str, ...] = ()) -> Weights:
  """Loads the newest parameters of a run onto the host: dicts of numpy arrays.

  `extra` names what to load of the extra state, where the run has it. All
  processes must call it. Raises what Checkpoints.restore_weights does.
  """
  found = Checkpoints(workdir, read_only=True).restore_weights(extra=extra)
  return found._replace(extra={k: v for k, v in found.extra.items() if k in extra})


@processes.by_first('deleting checkpoints')
def delete_but_newest(workdir, count: int):
  """Deletes the checkpoints of a finished run, except the newest `count`.

  Process 0 does so for all.
  """
  directory = workdir_lib.absolute(workdir) / 'checkpoints'
  steps = _find(directory, complete=True)
  for step in steps[: max(0, len(steps) - count)]:
    (directory / str(step)).rmtree()


def _list(directory: epath.Path, complete: bool) -> list[int]:
  """Returns the steps that have a folder, ascending."""
  try:
    paths = [path for path in directory.iterdir() if _STEP.fullmatch(path.name)]
  except (FileNotFoundError, NotADirectoryError):
    return []
  # In a bucket nothing is renamed; a file marks complete checkpoints.
  needed = [f'{_ITEM}/_METADATA']
  if str(directory).startswith('gs:'):
    needed.append('commit_success.txt')
  return sorted(
    int(path.name)
    for path in paths
    if all(_exists(path / name) for name in needed) or (not complete and path.is_dir())
  )


def _find(directory: epath.Path, complete: bool) -> list[int]:
  """Calls `_list`; tries again if the storage does not answer."""
  for delay in (*RETRY_AFTER, None):
    try:
      return _list(directory, complete)
    except Exception as e:  # pylint: disable=broad-except
      _try_again(f"the folder '{directory}'", files.short(e), delay)


def _exists(path: epath.Path) -> bool:
  """Returns whether a file exists; unlike `exists`, raises storage errors."""
  try:
    path.stat()
    return True
  except (FileNotFoundError, NotADirectoryError):
    return False


def _stored(state: state_lib.TrainState) -> dict:
  """Returns the part of a state to write; without `extra` if that is empty."""
  tree = {key: getattr(state, key) for key in ('step', 'params', 'opt_state')}
  if jax.tree.leaves(state.extra):
    tree['extra'] = state.extra
  return tree


def _try_again(what: str, error: str, delay: float | None):
  """Logs an error and waits; raises OSError if `delay` is None."""
  if delay is None:
    raise OSError(
      f'{what} cannot be read now: {error}. Nothing was renamed or removed: start '
      'the same command again when the storage answers'
    )
  logging.warning('%s: %s. Trying again in %s s', what, error, delay)
  time.sleep(delay)
