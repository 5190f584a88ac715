"""Arrays by name, from files that anybody may have written.

Such a file is not believed: no code in it is run, types and sizes are read from its
headers and checked before memory is taken, and whatever goes wrong becomes a
ValueError that names the file.
"""

from collections.abc import Callable
from collections.abc import Iterable
import contextlib
import errno
import math
import zipfile

from absl import logging
from etils import epath
import jax
import numpy as np

from vit_jax.weights import fetch

FLOATS = ('bfloat16', 'float16', 'float32', 'float64')
_SAFETENSORS_FLOATS = dict(zip(('BF16', 'F16', 'F32', 'F64'), FLOATS))
# Weights hardly compress; what unfolds to more than so many times its file, and
# to more than so many bytes, is made to fill the memory.
_UNFOLDS = 20
_SMALL = 2**26
# Published names have up to five parts.
_DEEPEST = 32


class Unfolds(ValueError):
  """A file unfolds to far more than it is."""


@contextlib.contextmanager
def naming(file, fault: str):
  """Turns what goes wrong with a file's content into an error that names it.

  Args:
    file: the path to name.
    fault: what to say of the file, before the reason.

  Raises:
    ValueError: for any error inside the `with` block but those below.
    OSError, ImportError: as they are; they are no damage.
  """
  try:
    yield
  except ImportError:
    raise
  except Exception as e:  # pylint: disable=broad-except
    # Libraries follow a wrong offset to before the start of the file: EINVAL.
    if isinstance(e, OSError) and e.errno != errno.EINVAL:
      raise
    known = isinstance(e, ValueError) and str(e)
    reason = e if known else f'it is damaged ({type(e).__name__}: {e})'
    raise ValueError(f"'{file}' {fault}: {reason}") from e


def read_npz(
  file: epath.Path,
  rename: Callable[[str], str] = str,
  check: Callable[[dict[str, jax.ShapeDtypeStruct]], None] = lambda shapes: (
    None
  ),
) -> dict[str, np.ndarray]:
  """Reads the arrays of an .npz file.

  Args:
    file: its path.
    rename: makes of a name in the file the one in the result.
    check: called with the shapes before the arrays are read; may raise.

  Raises:
    ValueError: if it is no .npz file of weights; see `naming`.
  """
  with fetch.local_input(file) as here:
    with _archive(file, here) as archive:
      shapes = _headers(archive, here.stat().length, rename)
    check(shapes)
    arrays = {}
    with _archive(file, here) as archive:
      for name, info in zip(shapes, archive.infolist(), strict=True):
        with archive.open(info) as member:
          array = np.lib.format.read_array(member, allow_pickle=False)
        arrays[name] = array.astype(array.dtype.newbyteorder('='), copy=False)
  return arrays


@contextlib.contextmanager
def _archive(file, here):
  """Opens the zip archive `here`; what goes wrong with it names `file`."""
  with naming(file, 'is not an .npz file of weights'):
    try:
      archive = zipfile.ZipFile(here)
    except zipfile.BadZipFile as e:
      raise ValueError('it is no zip archive, or only part of one') from e
    with archive:
      yield archive


def _headers(archive, length, rename):
  """Checks the members of an archive, and lists their shapes by name."""
  members = archive.infolist()
  check_size(sum(info.file_size for info in members), length)
  names = [rename(info.filename.removesuffix('.npy')) for info in members]
  _check_names(names)
  shapes = {}
  for name, info in zip(names, members):
    with archive.open(info) as member:
      shape, dtype = _header(member, info.filename)
      claimed = math.prod(shape) * dtype.itemsize
      has = info.file_size - member.tell()
    check_array(name, dtype.name, shape)
    if claimed != has:
      raise ValueError(
        f"the header of '{name}' claims {claimed:,} bytes of data, there are "
        f'{has:,}'
      )
    shapes[name] = jax.ShapeDtypeStruct(shape, dtype.newbyteorder('='))
  return shapes


def _header(member, name):
  """Reads the header of an .npy file: (shape, dtype)."""
  try:
    version = np.lib.format.read_magic(member)
    read = {
      (1, 0): np.lib.format.read_array_header_1_0,
      (2, 0): np.lib.format.read_array_header_2_0,
    }[version]
    shape, _, dtype = read(member)
  except OSError:
    raise
  except Exception as e:  # pylint: disable=broad-except
    raise ValueError(f"'{name}' in it is no array: {e}") from e
  if dtype.hasobject:
    raise ValueError(
      f"'{name}' in it holds pickled objects, which are never loaded"
    )
  return shape, dtype


def read_safetensors(file: epath.Path) -> dict[str, np.ndarray]:
  """Reads the arrays of a .safetensors file.

  Raises:
    ValueError: if it is no .safetensors file of weights; see `naming`.
    ImportError: if safetensors is missing.
  """
  try:
    import safetensors
  except ImportError as e:
    raise ImportError(
      f"'{file}' needs the package safetensors: pip install -e '.[interop]' in "
      'the checkout of vit_jax'
    ) from e
  with (
    naming(file, 'is not a .safetensors file of weights'),
    fetch.local_input(file) as here,
  ):
    try:
      with safetensors.safe_open(here, framework='numpy') as f:
        names = list(f.keys())
        for name in names:
          header = f.get_slice(name)
          dtype = header.get_dtype()
          dtype = _SAFETENSORS_FLOATS.get(dtype, dtype)
          check_array(name, dtype, header.get_shape())
        return {name: f.get_tensor(name) for name in names}
    except safetensors.SafetensorError as e:
      raise ValueError(
        f'it is no .safetensors file, or only part of one: {e}'
      ) from e


def check_size(unfolded: int, length: int):
  """Checks that a file does not unfold to far more than it is.

  Args:
    unfolded: bytes that reading it takes.
    length: bytes of the file.
  """
  limit = max(_SMALL, _UNFOLDS * length)
  if unfolded > limit:
    raise Unfolds(
      f'its {length:,} bytes unfold to {unfolded:,}, which no weights do (more '
      f'than {limit:,}): save them uncompressed, each array as it is'
    )


def _check_names(names: Iterable[str]):
  """Checks that names make a tree."""
  seen = set()
  for name in names:
    if name in seen:
      raise ValueError(f"it holds several arrays of the name '{name}'")
    if name.count('/') >= _DEEPEST:
      raise ValueError(
        f"the name '{name[:80]}...' has more than {_DEEPEST} parts"
      )
    seen.add(name)
  branches = set()
  for name in seen:
    parts = name.split('/')
    branches.update('/'.join(parts[:i]) for i in range(1, len(parts)))
  if seen & branches:
    raise ValueError(
      f"'{min(seen & branches)}' is an array, and has arrays below it too"
    )


def check_array(name: str, dtype: str, shape: Iterable[int]):
  """Checks from its header that an array may be one of weights."""
  if dtype not in FLOATS:
    raise ValueError(
      f"'{name}' is of type {dtype}, weights are of {', '.join(FLOATS)}: save it "
      'as float32'
    )
  if not all(size > 0 for size in shape):
    raise ValueError(f"'{name}' of shape {tuple(shape)} has no elements")


def warn_of_what_is_not_finite(file, arrays: dict[str, np.ndarray]):
  """Warns of arrays with values that are NaN or infinite, by their names."""
  names = [name for name, array in arrays.items() if not _is_finite(array)]
  if names:
    shown = ', '.join(names[:10])
    more = f' and {len(names) - 10} more' if len(names) > 10 else ''
    logging.warning(
      "'%s' holds values that are NaN or infinite, and so will be what is "
      'computed with them: %s%s',
      file,
      shown,
      more,
    )


def _is_finite(array):
  with np.errstate(over='ignore', invalid='ignore'):
    # NaN and infinity stay in a sum; a sum that overflows is looked at closely.
    return bool(np.isfinite(array.sum())) or bool(np.isfinite(array).all())
