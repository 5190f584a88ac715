"""The files of one checkpoint: written with checksums, checked and read.

What Orbax offers covers the index of the arrays, not the numbers in it. So each
process reads back what it wrote itself, and the first the rest, before the
checkpoint appears under its name:

  default/checksums/process_N.json   the files of process N
  default/checksums.json             all others, those above among them

A checkpoint without the second is of an older version: there is nothing to check.
One that was broken off by a kill has no name yet.
"""

from collections.abc import Callable
from collections.abc import Iterable
import concurrent.futures
import contextlib
import json
import os
import re
import zlib

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

NAME = 'checksums.json'
_FOLDER = 'checksums'
# What TensorStore says of storage that does not answer, in a ValueError.
_UNAVAILABLE = re.compile(
  r'\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|CANCELLED|'
  r'PERMISSION_DENIED|UNAUTHENTICATED|INTERNAL|UNKNOWN)\b'
)
_BLOCK = 2**24  # Bytes that have a checksum of their own, for several threads.
_CHUNK = 2**18  # Bytes read at a time: they fit into a core's cache.
_PIECE = 2**16  # Bytes of one sum, see _digest.


class DamagedError(ValueError):
  """A checkpoint is not what was written, whatever read it."""


class Handler(ocp.PyTreeCheckpointHandler):
  """Writes a tree of arrays, and checksums of all its files."""

  async def async_save(self, directory, args=None):
    """Begins to save; the last of the futures writes this process's checksums."""
    futures = await super().async_save(directory, args=args)
    return [
      ocp.future.ChainedFuture(futures or [], lambda: _write_own(directory))
    ]

  def finalize(self, directory):
    """Completes the files, on the first process, and writes the other checksums."""
    super().finalize(directory)
    names = set(_files(directory))
    for part in (directory / _FOLDER).iterdir():
      names -= _load(part).keys()
    _write(directory, directory / NAME, names)


# Orbax knows no handler without both. Restored it is by that of its own.
@ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
class Save(ocp.args.PyTreeSave):
  """What `Handler` is given to save."""


def check(directory: epath.Path, part: int = 0, parts: int = 1):
  """Reads files of a checkpoint and compares them with their checksums.

  Args:
    directory: folder of the arrays, `checkpoints/STEP/default`.
    part: which of `parts` shares to read, all of about the same size, so that as
      many processes can do it together.
    parts: number of shares.

  Raises:
    DamagedError: if a file is missing, is of another size, or is not the same.
    OSError: if a file cannot be read.
  """
  names = _files(directory)
  tables = [n for n in names if n == NAME or n.startswith(f'{_FOLDER}/')]
  if tables and NAME not in tables:
    raise DamagedError(f"'{directory / NAME}' is missing")
  want = {}
  for name in tables:
    want.update(_load(directory / name))
  sizes = {n: (directory / n).stat().length for n in names if n in want}
  for name, table in want.items():
    if sizes.get(name) != table['size']:
      raise DamagedError(
        f"'{directory / name}' has {sizes.get(name, 'no')} bytes, not "
        f'{table["size"]}'
      )
  if not want:  # All is read the same, to see whether the storage answers.
    sizes = {n: (directory / n).stat().length for n in names}
  blocks = _blocks(sizes)[part::parts]
  found = _in_threads(lambda b: _digest(directory / b[0], b[1]), blocks)
  for (name, number), digest in zip(blocks, found, strict=True):
    if want and want[name]['digests'][number] != digest:
      raise DamagedError(
        f"'{directory / name}' is not what was written: its checksum differs"
      )


def attempt(path: epath.Path, step: int, read: Callable):
  """Checks and reads a checkpoint; returns (what is read, damage, error)."""
  try:
    check(path, jax.process_index(), jax.process_count())
    found = read(path)
    if int(found['step']) != step:
      raise DamagedError(f'the state in it is of step {int(found["step"])}')
    return found, None, None
  except Exception as e:  # pylint: disable=broad-except
    return (None, short(e), None) if _is_damage(e) else (None, None, short(e))


def read(path: epath.Path, wanted):
  """Reads arrays onto the shardings of a tree; PLACEHOLDER stands for none.

  What of the tree has no sharding is read onto the host.
  """

  def argument(leaf):
    if getattr(leaf, 'sharding', None) is None:
      return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.checkpoint_utils.construct_restore_args(leaf)

  with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
    return handler.restore(
      path,
      args=ocp.args.PyTreeRestore(
        item=wanted, restore_args=jax.tree.map(argument, wanted)
      ),
    )


def read_weights(path: epath.Path, params, extra) -> dict:
  """Reads `step`, `params` (their average where there is one) and `extra`.

  Args:
    path: folder of the arrays.
    params: a tree of jax.ShapeDtypeStruct; None: as they are, onto the host.
    extra: likewise; None: none of it.

  Returns:
    The tree of the checkpoint; what is not read is PLACEHOLDER.
  """
  with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
    tree = handler.metadata(path).tree
  wanted = jax.tree.map(lambda _: ocp.PLACEHOLDER, tree)
  wanted['step'] = 0
  average = _average(wanted)
  holder, key = (wanted, 'params') if average is None else (average, 'ema')
  if params is None:
    params = jax.tree.map(lambda _: 0, holder[key])
  elif average is not None:
    params = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding),
      params,
    )
  holder[key] = params
  if jax.tree.leaves(extra):
    wanted['extra'] = extra
  found = read(path, wanted)
  if average is not None:
    found['params'] = _average(found)['ema']
  return found


def _average(tree):
  """Returns what of an optimiser's state, as it lies on disk, is the average."""
  for part in tree['opt_state']:
    if isinstance(part, dict) and 'ema' in part:
      return part
  return None


def _is_damage(error: Exception) -> bool:
  """Tells what stays as it is from an error of the storage, which may pass."""
  if isinstance(error, DamagedError | FileNotFoundError):
    return True
  kinds = (ValueError, TypeError, LookupError, AttributeError)
  return isinstance(error, kinds) and not _UNAVAILABLE.search(str(error))


def short(error: Exception) -> str:
  """Begin and end of an error's text; Orbax's are long, the cause stands last."""
  text = ' '.join(str(error).split()) or type(error).__name__
  return text if len(text) < 300 else f'{text[:120]} ... {text[-160:]}'


def _write_own(directory):
  """Writes the checksums of the files that this process has written."""
  own = f'process_{jax.process_index()}'
  names = []
  for name in (f'ocdbt.{own}', f'array_metadatas/{own}'):
    if (directory / name).is_dir():
      names += [f'{name}/{inner}' for inner in _files(directory / name)]
    elif (directory / name).exists():
      names.append(name)
  (directory / _FOLDER).mkdir(exist_ok=True)
  _write(directory, directory / _FOLDER / f'{own}.json', names)


def _write(directory, path, names: Iterable[str]):
  """Writes the checksums of some files of a folder."""
  sizes = {n: (directory / n).stat().length for n in sorted(names)}
  table = {name: {'size': size, 'digests': []} for name, size in sizes.items()}
  blocks = _blocks(sizes)
  found = _in_threads(lambda b: _digest(directory / b[0], b[1]), blocks)
  for (name, _), digest in zip(blocks, found, strict=True):
    table[name]['digests'].append(digest)
  text = json.dumps(table)
  path.write_text(f'{zlib.crc32(text.encode())}\n{text}')


def _blocks(sizes) -> list[tuple[str, int]]:
  """Returns (name, number of the block) for all blocks of files of these sizes."""
  return [
    (name, number)
    for name, size in sizes.items()
    for number in range(-(-size // _BLOCK))
  ]


def _load(path) -> dict:
  """Returns what `_write` wrote: {name: {'size': bytes, 'digests': [...]}}."""
  data = path.read_bytes()
  digest, _, text = data.partition(b'\n')
  if digest != str(zlib.crc32(text)).encode():
    raise DamagedError(f"'{path}' is not what was written: checksum differs")
  return json.loads(text)


def _files(directory) -> list[str]:
  """Returns all files below a folder, by their names relative to it."""
  names = []
  for path in directory.iterdir():
    if path.is_dir():
      names += [f'{path.name}/{name}' for name in _files(path)]
    else:
      names.append(path.name)
  return names


def _digest(path, block: int) -> int:
  """Returns the digest of a block of a file.

  It is the CRC-32 of the sums of its 64-bit words, a sum for each _PIECE bytes,
  and of the bytes that are left over: three times as fast as that of all bytes,
  and a change of one word, or of any that lie together, still changes it.
  """
  value, left = 0, _BLOCK
  with path.open('rb') as file:
    file.seek(block * _BLOCK)
    while left and (data := file.read(min(_CHUNK, left))):
      whole = len(data) // _PIECE * _PIECE
      words = np.frombuffer(data, '<u8', whole // 8)
      sums = words.reshape(-1, _PIECE // 8).sum(axis=1)
      value = zlib.crc32(sums.tobytes(), value)
      value = zlib.crc32(memoryview(data)[whole:], value)
      left -= len(data)
  return value


def _in_threads(function, blocks) -> list:
  """Maps in threads: neither reading nor zlib holds Python's lock."""
  threads = min(8, os.cpu_count() or 1, len(blocks))
  if threads < 2:
    return list(map(function, blocks))
  with concurrent.futures.ThreadPoolExecutor(threads) as executor:
    return list(executor.map(function, blocks))
