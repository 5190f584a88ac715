"""Saves and restores checkpoints of a run with Orbax's CheckpointManager.

Checkpoints are in `workdir/checkpoints/<step>`: the newest few and the best. They
are written in the background, get their name when complete, and can be restored
on any other mesh. Orbax has checksums for the index of the arrays, but not for
their values, so `default/checksums.json` has the CRC-32C of each file. It is part
of the checkpoint: both are complete or absent.
"""

from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import types
from typing import Any, NamedTuple

from absl import logging
from etils import epath
import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from vit_jax.distributed import files, processes
from vit_jax.learning import state as state_lib
from vit_jax.run import metrics as metrics_lib, workdir as workdir_lib

_ITEM = 'default'  # Orbax's name for the only item of a checkpoint.
_CHECKSUMS = 'checksums.json'
_CHUNK = 2**18  # Bytes read at a time; they fit into a core's cache.
_MOST_LEVELS = 100  # Deepest tree of parameters and optimiser state.
_AT_ONCE = 2**25  # Bytes of parameters read at the same time.
_NAMES = ocp.path.step.standard_name_format()


class Weights(NamedTuple):
  """The part of a checkpoint that evaluation and prediction need."""

  params: Any  # Averaged if the run kept an average.
  extra: Any  # See vit_jax.learning.state.TrainState.
  step: int  # Number of updates so far.


class Checkpoints:
  """The checkpoints of a run: the newest `keep`, and the best.

  The best one has the highest (`low`: lowest) value of `best_metric` in the run's
  metrics.jsonl. A `read_only` folder may belong to a run that writes to it.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    keep: int = 1,
    best_metric: str | None = None,
    low: bool = False,
    read_only: bool = False,
  ):
    self.directory = workdir_lib.absolute(workdir) / 'checkpoints'
    self._policy = _NewestAndBest(workdir, max(1, keep), best_metric, low)
    self._read_only = read_only
    # Created by the first `save`.
    self._manager: ocp.CheckpointManager | None = None

  # --- Writing ---

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    _: types.TracebackType | None,
  ) -> None:
    """Completes what is being written, also after an error in the `with` block.

    Only Ctrl-C does not wait.
    """
    if kind is None:
      self.close()
    elif issubclass(kind, Exception):
      try:
        self.close()
      except OSError as e:
        if str(e) != str(error):
          logging.error('%s', e)  # The error of the block is raised.

  def save(self, step: int, state: state_lib.TrainState) -> None:
    """Begins to write a checkpoint, after the previous one is complete.

    OSError if this or the previous checkpoint cannot be written.
    """
    with self._writing():
      if self._manager is None:
        self._manager = _make_manager(self.directory, self._policy)
      if not self._manager.save(step, args=_Save(_stored(state))):
        raise ValueError(f'step {step} or a later one exists already')

  def wait(self) -> None:
    """Waits until all checkpoints are written; raises OSError if that fails."""
    with self._writing():
      if self._manager:
        self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits like `wait`, and frees resources."""
    with self._writing():
      if self._manager:
        self._manager.close()
        self._manager = None

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    """Raises OSError for any error, after which a new manager is needed."""
    try:
      yield
    except Exception as e:
      self._manager = None
      if workdir_lib.is_missing(self.directory.parent):
        raise workdir_lib.missing_error(self.directory.parent) from e
      try:
        last = max(self.steps(), default='none')
      except OSError:
        last = 'unknown'
      raise OSError(
        f"a checkpoint could not be written to '{self.directory}': {_short(e)}. Last "
        f'complete step: {last}. Free some space (or repair the disk) and run the '
        'same command again to resume from there'
      ) from e

  # --- Reading ---

  def steps(self) -> list[int]:
    """Returns the steps of all complete checkpoints, ascending."""
    return sorted(metadata.step for metadata in _NAMES.find_all(self.directory))

  @processes.by_first('looking for the best checkpoint')
  def best_step(self) -> int | None:
    """Returns the step of the best checkpoint, on all processes; None without one."""
    return self._policy.best(self.steps())

  def restore(
    self, abstract: state_lib.TrainState, step: int | None = None
  ) -> tuple[Any, int]:
    """Restores the newest checkpoint onto the shardings of `abstract`.

    All processes must call it. Damaged checkpoints are moved to
    `workdir/damaged_checkpoints`, unless all are damaged. With `step`, only that
    one is tried.

    Returns (state, step); (None, 0) if there is no checkpoint. ValueError if all
    checkpoints are damaged or the newest is of another model.
    """
    target = _stored(abstract)
    fields, step = self._newest(functools.partial(_read, target=target), step)
    if fields is None:
      return None, 0
    return abstract.replace(**fields), step

  def restore_weights(
    self,
    params: Any = None,
    extra: Any = None,
    step: int | None = None,
    dtype: str | None = None,
  ) -> Weights:
    """Restores what evaluation and prediction need; all processes must call it.

    `params` is a tree of jax.ShapeDtypeStruct with shardings, whose types `dtype`
    replaces; None restores all parameters onto the host. `extra` is such a tree, or
    names in the extra state, to restore onto the host. FileNotFoundError if there is
    no complete checkpoint; ValueError if `step` (default: the newest) has none; see
    also `restore`.
    """
    if step is not None:
      steps = self._agreed_steps()
      if step not in steps:
        raise ValueError(
          f"step={step} is not among the checkpoints in '{self.directory}': {steps}"
        )

    def read(path: epath.Path) -> dict:
      return _read_weights(path, params, extra, dtype)

    fields, step = self._newest(read, step)
    if fields is None:
      raise FileNotFoundError(
        f"'{self.directory.parent}' has no complete checkpoint: train first, or longer"
      )
    extra = fields.get('extra', {}) if jax.tree.leaves(extra) else {}
    return Weights(fields['params'], extra, step)

  @processes.by_first('listing the checkpoints')
  def _agreed_steps(self) -> list[int]:
    """Returns the steps that process 0 finds, on all processes."""
    return self.steps()

  def _newest(
    self, read: Callable[[epath.Path], Any], step: int | None
  ) -> tuple[Any, int]:
    """Returns (read's result, step) of the newest undamaged checkpoint.

    (None, 0) if there is none; ValueError if all are damaged.
    """
    damages: dict[int, str] = {}
    for candidate in self._candidates(step):
      path = self.directory / str(candidate) / _ITEM
      damage = self._damage(path)
      if damage is None:
        try:
          fields = read(path)
        except (
          ValueError,
          KeyError,
          TypeError,
          AttributeError,
          FileNotFoundError,
        ) as e:
          damage = _check(path, 0, 1)  # A run may delete what is being read.
          if damage is None:
            raise ValueError(
              f"checkpoint '{path.parent}' cannot be restored: {_short(e)}; if it is "
              'from another model, use another --workdir'
            ) from e
        else:
          self._check_step(candidate, int(fields['step']))
          if damages and not self._read_only:
            self._move_aside(list(damages))
          return fields, candidate
      if self._read_only and candidate not in self.steps():
        continue  # A run has deleted it meanwhile.
      logging.warning('%s: checkpoint %d is not used', damage, candidate)
      damages[candidate] = damage
    if not damages:
      return None, 0
    newest, damage = next(iter(damages.items()))
    remedy = ''
    if not self._read_only:
      remedy = '; move the folder away to start anew, or use another --workdir'
    raise ValueError(
      f"no checkpoint in '{self.directory}' can be restored; the newest, step "
      f'{newest}: {damage}{remedy}'
    )

  def _check_step(self, step: int, stored_step: int) -> None:
    """Raises ValueError if the folder of a step holds the state of another one."""
    if stored_step != step:
      raise ValueError(
        f"checkpoint '{self.directory / str(step)}' holds the state of step "
        f'{stored_step}: the folder was renamed; rename it to {stored_step}, or delete '
        'it if there is a folder of that name'
      )

  def _candidates(self, step: int | None) -> Iterator[int]:
    """Yields the steps to try, the newest first; lists again for steps to come.

    While a reader looks, a run may delete these checkpoints and write others.
    """
    tried: set[int] = set()
    while True:
      untried = [x for x in self._agreed_steps() if x not in tried]
      if step is not None:
        untried = [x for x in untried if x == step]
      if not untried:
        return
      newest = untried[-1]
      tried.add(newest)
      yield newest

  def _damage(self, path: epath.Path) -> str | None:
    """Returns what is wrong with a checkpoint's files, in any process."""

    def check() -> str | None:
      return _check(path, jax.process_index(), jax.process_count())

    damages = processes.attempt('checking a checkpoint', check)
    return next(filter(None, damages), None)

  @processes.by_first('moving damaged checkpoints aside')
  def _move_aside(self, steps: Sequence[int]) -> None:
    folder = self.directory.parent / 'damaged_checkpoints'
    folder.mkdir(exist_ok=True)
    for step in steps:
      target = folder / str(step)
      if target.exists():
        target.rmtree()
      (self.directory / str(step)).rename(target)


@dataclasses.dataclass
class _NewestAndBest:
  """Orbax's PreservationPolicy: keeps the newest checkpoints, and the best.

  The metrics of a checkpoint may become known after it is saved, when a signal
  has interrupted an evaluation. Orbax's BestN does not support that.
  """

  workdir: Any
  keep: int
  metric: str | None
  low: bool

  def should_preserve(self, checkpoints: Sequence, *, context: Any) -> list[bool]:
    del context
    steps = [checkpoint.step for checkpoint in checkpoints]
    if jax.process_index():
      return [True] * len(steps)  # Process 0 deletes.
    preserved = [*steps[-self.keep :], self.best(steps)]
    return [step in preserved for step in steps]

  def best(self, steps: Sequence[int]) -> int | None:
    """Returns which of some steps has the best metric; None if none has it."""
    if not self.metric:
      return None
    sign = -1 if self.low else 1
    rated_steps = []
    for line in metrics_lib.read(self.workdir):
      value = line.get(self.metric, math.nan)
      if line['step'] in steps and math.isfinite(value):
        rated_steps.append((sign * value, line['step']))
    if not rated_steps:
      return None
    _, best_step = max(rated_steps)
    return best_step


def _make_manager(
  directory: epath.Path, policy: '_NewestAndBest'
) -> ocp.CheckpointManager:
  everyone = set(range(jax.process_count()))
  directory.mkdir(parents=True, exist_ok=True)
  options = ocp.CheckpointManagerOptions(
    create=False,  # Orbax does not create it with `active_processes`.
    preservation_policy=policy,
    cleanup_tmp_directories=True,
    save_root_metadata=False,
    lightweight_initialize=True,
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
  return ocp.CheckpointManager(directory, item_handlers=_Handler(), options=options)


class _Handler(ocp.PyTreeCheckpointHandler):
  """Writes a tree of arrays, and checksums before the checkpoint gets its name."""

  def __init__(self):
    # The copies of an array on several devices are written in parts, one from
    # each, where there are several processes. Each part compiles a program, so
    # small arrays are written whole.
    handlers = ocp.type_handlers
    arrays = handlers.ArrayHandler(
      use_replica_parallel=jax.process_count() > 1,
      min_slice_bytes_for_replica_parallel=2**20,
    )
    registry = handlers.create_type_handler_registry(
      (jax.Array, arrays),
      (np.ndarray, handlers.NumpyHandler()),
      (np.number, handlers.ScalarHandler()),
    )
    super().__init__(type_handler_registry=registry)

  def finalize(self, directory: epath.Path) -> None:
    """Completes the files, and writes their checksums, on process 0."""
    super().finalize(directory)
    names = []
    for folder, _, file_names in directory.walk():
      for name in file_names:
        names.append(f'{folder.relative_to(directory)}/{name}'.removeprefix('./'))
    table = json.dumps(_checksums(directory, sorted(names)), separators=(',', ':'))
    (directory / _CHECKSUMS).write_text(table)


# Orbax requires both arguments; restoring uses Orbax's own handler.
@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _Save(ocp.args.PyTreeSave):
  """What `_Handler` saves: a tree."""


def _checksums(directory: epath.Path, names: Sequence[str]) -> dict[str, int]:
  """Returns the CRC-32C of files by name."""

  def checksum(name: str) -> int:
    crc = 0
    with files.open_input(directory / name) as file:
      while chunk := file.read(_CHUNK):
        crc = google_crc32c.extend(crc, chunk)
    return crc

  with concurrent.futures.ThreadPoolExecutor(8) as executor:
    return dict(zip(names, executor.map(checksum, names), strict=True))


def _check(directory: epath.Path, process: int, num_processes: int) -> str | None:
  """Returns which file of a checkpoint is damaged, None if none is.

  Each process checks its share of the files.
  """
  path = directory / _CHECKSUMS
  try:
    stored = files.read_json(path)
    names = sorted(stored)[process::num_processes]
    computed = _checksums(directory, names)
  except FileNotFoundError as e:
    return f"'{e.filename or path}' is missing ({_CHECKSUMS} and its files)"
  except files.FileError as e:
    return str(e)
  except (ValueError, TypeError):
    return f"'{path}' is damaged (checksums of the files)"
  for name in names:
    if computed[name] != stored[name]:
      return f"'{directory / name}' is damaged (checksum)"
  return None


def has_checkpoint(workdir: epath.PathLike) -> bool:
  """Returns whether this process finds a complete checkpoint in a folder."""
  return bool(Checkpoints(workdir).steps())


def load_weights(workdir: epath.PathLike, extra: tuple[str, ...] = ()) -> Weights:
  """Loads the newest parameters of a run onto the host: dicts of numpy arrays.

  `extra` names what to load of the extra state, where the run has it. All
  processes must call it. Raises what Checkpoints.restore_weights does.
  """
  weights = Checkpoints(workdir, read_only=True).restore_weights(extra=extra)
  return weights._replace(extra={k: v for k, v in weights.extra.items() if k in extra})


@processes.by_first('deleting checkpoints')
def delete_but_newest(workdir: epath.PathLike, count: int) -> None:
  """Deletes the checkpoints of a finished run, except the newest `count`.

  Process 0 does so for all.
  """
  checkpoints = Checkpoints(workdir)
  steps = checkpoints.steps()
  for step in steps[: max(0, len(steps) - count)]:
    (checkpoints.directory / str(step)).rmtree()


def _stored(state: state_lib.TrainState) -> dict:
  """Returns the part of a state to write; without `extra` if that is empty."""
  tree = {key: getattr(state, key) for key in ('step', 'params', 'opt_state')}
  if jax.tree.leaves(state.extra):
    tree['extra'] = state.extra
  return tree


def _read(path: epath.Path, target: Any, at_once: int | None = None) -> Any:
  """Reads arrays onto the shardings of a tree; skips PLACEHOLDER leaves.

  Leaves without a sharding are read onto the host. `at_once` limits the bytes
  that are read at the same time, and must hold the largest array.
  """

  def argument(leaf: Any) -> ocp.RestoreArgs:
    if getattr(leaf, 'sharding', None) is None:
      return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.checkpoint_utils.construct_restore_args(leaf)

  limit = at_once / 10**9 if at_once else None
  handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit)
  restore_args = jax.tree.map(argument, target)
  with contextlib.closing(handler):
    _check_shapes(target, handler.metadata(path).tree)
    return handler.restore(
      path, args=ocp.args.PyTreeRestore(item=target, restore_args=restore_args)
    )


def _check_shapes(target: Any, stored: Any) -> None:
  """Raises ValueError if arrays to read have other shapes than the stored ones.

  Orbax's error does not name the array, and its pending reads print tracebacks.
  """
  shapes = ocp.tree.to_flat_dict(stored, sep='/')
  for name, leaf in ocp.tree.to_flat_dict(target, sep='/').items():
    shape = getattr(leaf, 'shape', None)
    if shape is not None and name in shapes and shapes[name].shape != shape:
      raise ValueError(
        f"its '{name}' has the shape {tuple(shapes[name].shape)}, and the model's {shape}"
      )


def _read_weights(
  path: epath.Path, params: Any, extra: Any, dtype: str | None = None
) -> dict:
  """Reads `step`, `params` (averaged if the run kept an average) and `extra`.

  See Checkpoints.restore_weights. What was not read is PLACEHOLDER.
  """
  _check_depth(path)
  with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
    tree = handler.metadata(path).tree
  target = jax.tree.map(lambda _: ocp.PLACEHOLDER, tree)
  target['step'] = 0
  average = _average(target)
  holder, key = (target, 'params') if average is None else (average, 'ema')
  if params is None:
    params = jax.tree.map(lambda _: 0, holder[key])
  elif dtype or average is not None:
    params = _with_dtype(params, dtype or 'float32')  # Averages are float32.
  holder[key] = params
  if isinstance(extra, tuple):
    stored = target.get('extra') or {}
    requested = {name: stored[name] for name in extra if name in stored}
    if requested:
      target['extra'] = {**stored, **jax.tree.map(lambda _: 0, requested)}
  elif jax.tree.leaves(extra):
    target['extra'] = extra
  # Arrays being read are in memory twice: as they are stored, and in their type.
  sizes = (getattr(x, 'size', 0) for x in jax.tree.leaves((params, extra)))
  largest = max(sizes, default=0)
  fields = _read(path, target, largest and max(_AT_ONCE, 8 * largest + 1))
  if average is not None:
    fields['params'] = _average(fields)['ema']
  return fields


def _with_dtype(params: Any, dtype: str) -> Any:
  """Returns the shapes and shardings of parameters with another type."""

  def convert(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype), sharding=x.sharding)

  return jax.tree.map(convert, params)


def _check_depth(path: epath.Path) -> None:
  """Raises ValueError for a tree so deep that Python could not build it."""
  leaves = files.read_json(path / '_METADATA')['tree_metadata'].values()
  levels = max((len(leaf['key_metadata']) for leaf in leaves), default=0)
  if levels > _MOST_LEVELS:
    raise ValueError(f'its tree has {levels:,} levels, more than {_MOST_LEVELS}')


def _average(tree: Any) -> Any:
  """Returns the part of a stored optimiser state that holds the average."""
  for part in tree['opt_state']:
    if isinstance(part, dict) and 'ema' in part:
      return part
  return None


def _short(error: Exception) -> str:
  """Returns the beginning and the end of an error: Orbax puts the cause last."""
  text = ' '.join(str(error).split()) or type(error).__name__
  return text if len(text) < 300 else f'{text[:120]} ... {text[-160:]}'
