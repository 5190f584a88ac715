"""Writes, checks and reads the files of one checkpoint, with checksums.

Orbax has checksums for the index of the arrays, but not for their values. Here
each process reads back the files that it wrote, and the first process all other
files, before the checkpoint appears under its name:

  default/checksums/process_N.json   the files of process N
  default/checksums.json             all other files, including those above

  default/metrics.json               the metric that selects the best, if known;
                                     it has a checksum of its own, since it may
                                     become known later

A checkpoint that a kill interrupted does not have its name yet.
"""

from collections.abc import Callable, Iterable, Mapping
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re

from absl import logging
from etils import epath
import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from vit_jax.configs import schema
from vit_jax.distributed import files

NAME = 'checksums.json'
METRICS = 'metrics.json'
_FOLDER = 'checksums'
_MISSING = (FileNotFoundError, NotADirectoryError)
# Words in TensorStore's ValueError for storage that does not answer.
_UNAVAILABLE = re.compile(
  r'\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|CANCELLED|'
  r'PERMISSION_DENIED|UNAUTHENTICATED|INTERNAL|UNKNOWN)\b'
)
_BLOCK = 2**24  # Bytes with one checksum; threads work on different blocks.
_CHUNK = 2**18  # Bytes read at a time, which a core's cache holds.
_AT_ONCE = 2**25  # Bytes of parameters read at the same time.


class DamagedError(ValueError):
  """The content of a checkpoint differs from what was written."""


class Handler(ocp.PyTreeCheckpointHandler):
  """Writes a tree of arrays, metrics, and checksums of all of their files."""

  _metrics: Mapping[str, float]

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

  async def async_save(self, directory, args=None):
    """Begins to save; the last future writes this process's checksums."""
    self._metrics = args.metrics
    futures = await super().async_save(directory, args=args)
    return [ocp.future.ChainedFuture(futures or [], lambda: _write_own(directory))]

  def finalize(self, directory):
    """Completes the files and writes the other checksums, on process 0."""
    super().finalize(directory)
    names = set(_files(directory))
    for part in (directory / _FOLDER).iterdir():
      names -= _load(part).keys()
    _write(directory, directory / NAME, names)
    write_metrics(directory, self._metrics)


# Orbax requires both arguments; restoring uses Orbax's own handler.
@ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
@dataclasses.dataclass
class Save(ocp.args.PyTreeSave):
  """What `Handler` saves: a tree, and metrics by name."""

  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


def write_metrics(directory: epath.Path, metrics: Mapping[str, float]):
  """Writes the metrics of a checkpoint, if there are any."""
  if metrics:
    files.write(directory / METRICS, _with_checksum(dict(metrics)))


def read_metric(checkpoint: epath.Path, name: str) -> float | None:
  """Returns a metric of the checkpoint in a folder; None if it is unknown."""
  path = checkpoint / 'default' / METRICS
  try:
    value = _load(path).get(name)
  except _MISSING:
    return None
  except DamagedError as e:
    logging.warning(
      "'%s' is damaged: %s. The checkpoint can be restored, but is not counted "
      'among those that may be the best',
      path,
      e,
    )
    return None
  return value if schema.is_number(value) else None


def check(directory: epath.Path, part: int = 0, parts: int = 1):
  """Raises DamagedError if files of a checkpoint differ from their checksums.

  Each of `parts` processes reads a part of similar size.
  """
  names = _files(directory)
  if NAME not in names:
    raise DamagedError(f"'{directory / NAME}' is missing")
  want = {}
  for name in names:
    if name == NAME or name.startswith(f'{_FOLDER}/'):
      want.update(_load(directory / name))
  sizes = _sizes(directory, [n for n in names if n in want])
  for name, table in want.items():
    if sizes.get(name) != table['size']:
      raise DamagedError(
        f"'{directory / name}' has {sizes.get(name, 'no')} bytes, not {table['size']}"
      )
  blocks = _blocks(sizes)[part::parts]
  for (name, number), digest in _digests(directory, blocks):
    if want[name]['digests'][number] != digest:
      raise DamagedError(
        f"'{directory / name}' is not what was written: its checksum differs"
      )


def attempt(path: epath.Path, step: int, read: Callable):
  """Checks and reads a checkpoint; returns (read's result, damage, error)."""
  try:
    check(path, jax.process_index(), jax.process_count())
    found = read(path)
    if int(found['step']) != step:
      raise DamagedError(f'the state in it is of step {int(found["step"])}')
    return found, None, None
  except Exception as e:  # pylint: disable=broad-except
    return (None, short(e), None) if _is_damage(e) else (None, None, short(e))


def read(path: epath.Path, wanted, at_once: int | None = None):
  """Reads arrays onto the shardings of a tree; skips PLACEHOLDER leaves.

  Leaves without a sharding are read onto the host. `at_once` limits the bytes
  that are read at the same time, and must hold the largest array.
  """

  def argument(leaf):
    if getattr(leaf, 'sharding', None) is None:
      return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.checkpoint_utils.construct_restore_args(leaf)

  limit = at_once / 10**9 if at_once else None
  handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit)
  with contextlib.closing(handler):
    return handler.restore(
      path,
      args=ocp.args.PyTreeRestore(
        item=wanted, restore_args=jax.tree.map(argument, wanted)
      ),
    )


def read_weights(path: epath.Path, params, extra, dtype=None) -> dict:
  """Reads `step`, `params` (averaged if the run kept an average) and `extra`.

  See Checkpoints.restore_weights. What was not read is PLACEHOLDER.
  """
  with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
    tree = handler.metadata(path).tree
  wanted = jax.tree.map(lambda _: ocp.PLACEHOLDER, tree)
  wanted['step'] = 0
  average = _average(wanted)
  holder, key = (wanted, 'params') if average is None else (average, 'ema')
  if params is None:
    params = jax.tree.map(lambda _: 0, holder[key])
  elif dtype or average is not None:
    kind = jnp.dtype(dtype or 'float32')  # That of averages.
    params = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, kind, sharding=x.sharding), params
    )
  holder[key] = params
  if isinstance(extra, tuple):
    stored = wanted.get('extra') or {}
    named = {name: stored[name] for name in extra if name in stored}
    if named:
      wanted['extra'] = {**stored, **jax.tree.map(lambda _: 0, named)}
  elif jax.tree.leaves(extra):
    wanted['extra'] = extra
  # What is being read is in memory twice: as it is stored, and in its type.
  sizes = (getattr(x, 'size', 0) for x in jax.tree.leaves((params, extra)))
  largest = max(sizes, default=0)
  found = read(path, wanted, largest and max(_AT_ONCE, 8 * largest + 1))
  if average is not None:
    found['params'] = _average(found)['ema']
  return found


def _average(tree):
  """Returns the part of a stored optimiser state that holds the average."""
  for part in tree['opt_state']:
    if isinstance(part, dict) and 'ema' in part:
      return part
  return None


def _is_damage(error: Exception) -> bool:
  """Returns whether an error is lasting damage, not a passing storage error."""
  if isinstance(error, DamagedError | FileNotFoundError):
    return True
  kinds = (ValueError, TypeError, LookupError, AttributeError)
  return isinstance(error, kinds) and not _UNAVAILABLE.search(str(error))


def short(error: Exception) -> str:
  """Returns the beginning and the end of an error's text.

  Orbax's texts are long, with the cause at the end.
  """
  text = ' '.join(str(error).split()) or type(error).__name__
  return text if len(text) < 300 else f'{text[:120]} ... {text[-160:]}'


def _write_own(directory):
  """Writes the checksums of the files that this process wrote."""
  own, names = f'process_{jax.process_index()}', []
  for name in (f'ocdbt.{own}', f'array_metadatas/{own}'):
    if (directory / name).is_dir():
      names += [f'{name}/{inner}' for inner in _files(directory / name)]
    elif (directory / name).exists():
      names.append(name)
  (directory / _FOLDER).mkdir(exist_ok=True)
  _write(directory, directory / _FOLDER / f'{own}.json', names)


def _write(directory, path, names: Iterable[str]):
  """Writes the checksums of some files of a folder."""
  sizes = _sizes(directory, sorted(names))
  table = {name: {'size': size, 'digests': []} for name, size in sizes.items()}
  for (name, _), digest in _digests(directory, _blocks(sizes)):
    table[name]['digests'].append(digest)
  path.write_text(_with_checksum(table))


def _with_checksum(content) -> str:
  """Returns the text of a file that `_load` reads."""
  text = json.dumps(content)
  return f'{google_crc32c.value(text.encode())}\n{text}'


def _sizes(directory, names) -> dict[str, int]:
  """Returns the bytes of some files of a folder by name."""
  return {name: (directory / name).stat().length for name in names}


def _blocks(sizes) -> list[tuple[str, int]]:
  """Returns (name, number of the block) for all blocks of some files."""
  return [
    (name, number)
    for name, size in sizes.items()
    for number in range(-(-size // _BLOCK))
  ]


def _load(path) -> dict:
  """Reads JSON with a checksum, such as {name: {'size': .., 'digests': [..]}}."""
  digest, _, text = path.read_bytes().partition(b'\n')
  if digest != str(google_crc32c.value(text)).encode():
    raise DamagedError(f"'{path}' is not what was written: checksum differs")
  return json.loads(text)


def _files(directory) -> list[str]:
  """Returns the names of all files below a folder, relative to the folder."""
  names = []
  for path in directory.iterdir():
    if path.is_dir():
      names += [f'{path.name}/{name}' for name in _files(path)]
    else:
      names.append(path.name)
  return names


def _digests(directory, blocks) -> list[tuple]:
  """Returns (block, digest) of each; threads overlap their reading."""
  threads = max(1, min(8, os.cpu_count() or 1, len(blocks)))
  with concurrent.futures.ThreadPoolExecutor(threads) as executor:
    found = executor.map(lambda b: _digest(directory / b[0], b[1]), blocks)
    return list(zip(blocks, found, strict=True))


def _digest(path, block: int) -> int:
  """Returns the CRC-32C of a block of a file."""
  crc = 0
  with path.open('rb') as file:
    file.seek(block * _BLOCK)
    for _ in range(_BLOCK // _CHUNK):
      crc = google_crc32c.extend(crc, file.read(_CHUNK))
  return crc
