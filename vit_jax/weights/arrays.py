"""Reads named arrays from untrusted files.

No code in a file is run, and no file fills the memory with what it does not
hold. Every fault of a file becomes a ValueError that names it.
"""

from collections.abc import Callable
from collections.abc import Iterable
import contextlib
import errno
import itertools
import re
from typing import Any
import zipfile

from absl import logging
from etils import epath
import numpy as np

from vit_jax import cli
from vit_jax.weights import fetch

FLOATS = ('bfloat16', 'float16', 'float32', 'float64')
_SAFETENSORS_FLOATS = dict(zip(('BF16', 'F16', 'F32', 'F64'), FLOATS))
# Weights hardly compress. A file that decompresses to more than this multiple
# of its size, and to more than this many bytes, is refused.
_UNFOLDS = 20
_SMALL = 2**26
# Greatest number of '/'-separated parts of a name; published names have up to 5.
_DEEPEST = 32
# Buffers of PyTorch's models that hold no weights: counters of batch norm, and
# causal masks.
_NO_WEIGHTS = re.compile(
  r'(.+\.)?(num_batches_tracked|attn\.(masked_)?bias)'
)  # fmt: skip


def is_weights(name: Any) -> bool:
  """Returns whether an array of this name in a state dict holds weights."""
  return not (isinstance(name, str) and _NO_WEIGHTS.fullmatch(name))


class Unfolds(ValueError):
  """A file decompresses to far more than its size."""


@contextlib.contextmanager
def naming(file, fault: str):
  """Turns errors about a file's content into a ValueError: '<file> <fault>: why'.

  OSError and ImportError say nothing about the content and pass unchanged.
  """
  try:
    yield
  except ImportError:
    raise
  except Exception as e:  # pylint: disable=broad-except
    # Libraries turn a wrong offset into a seek before the file's start: EINVAL.
    if isinstance(e, OSError) and e.errno != errno.EINVAL:
      raise
    known = isinstance(e, ValueError) and str(e)
    reason = e if known else f'it is damaged ({type(e).__name__}: {e})'
    raise ValueError(f"'{file}' {fault}: {reason}") from e


def read_npz(
  file: epath.Path, rename: Callable[[str], str] = str
) -> dict[str, np.ndarray]:
  """Reads the arrays of an .npz file, with their names changed by `rename`."""
  with (
    naming(file, 'is not an .npz file of weights'),
    fetch.local_input(file) as here,
  ):
    try:
      with zipfile.ZipFile(here) as archive:
        members = archive.infolist()
    except zipfile.BadZipFile as e:
      raise ValueError('it is no zip archive, or only part of one') from e
    check_size(sum(info.file_size for info in members), here.stat().length)
    names = [rename(info.filename.removesuffix('.npy')) for info in members]
    _check_names(names)
    arrays = {}
    with np.load(here, allow_pickle=False) as content:
      for name, info in zip(names, members):
        try:
          array = content[info.filename]
        except ValueError as e:
          raise ValueError(
            f"'{info.filename}' in it is no array, or holds pickled objects, "
            f'which are never loaded: {e}'
          ) from e
        if not isinstance(array, np.ndarray):
          raise ValueError(f"'{info.filename}' in it is no array")
        check_array(name, array.dtype.name, array.shape)
        arrays[name] = array.astype(array.dtype.newbyteorder('='), copy=False)
  return arrays


def read_safetensors(file: epath.Path) -> dict[str, np.ndarray]:
  """Reads the arrays of a .safetensors file."""
  safetensors = cli.needed('safetensors', 'interop', f"reading '{file}'")
  with (
    naming(file, 'is not a .safetensors file of weights'),
    fetch.local_input(file) as here,
  ):
    try:
      with safetensors.safe_open(here, framework='numpy') as f:
        names = list(filter(is_weights, f.keys()))
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
  """Raises Unfolds if `length` bytes decompress to far more, `unfolded`."""
  limit = max(_SMALL, _UNFOLDS * length)
  if unfolded > limit:
    raise Unfolds(
      f'its {length:,} bytes unfold to {unfolded:,}, far more than weights do '
      f'(limit {limit:,}): save them uncompressed, without repeated arrays'
    )


def _check_names(names: Iterable[str]):
  """Raises ValueError unless the names form a tree."""
  paths = sorted(name.split('/') for name in names)
  for one, other in itertools.pairwise(paths):
    if other[: len(one)] == one:
      name = '/'.join(one)
      raise ValueError(
        f"it holds several arrays named '{name}'"
        if one == other
        else f"'{name}' is both an array and a prefix of other names"
      )
  if len(longest := max(paths, key=len, default=[])) > _DEEPEST:
    raise ValueError(
      f"the name '{'/'.join(longest):.80}...' has more than {_DEEPEST} parts"
    )


def check_array(name: str, dtype: str, shape: Iterable[int]):
  """Raises ValueError unless type and shape are possible for weights."""
  if dtype not in FLOATS:
    raise ValueError(
      f"'{name}' is of type {dtype}, but weights are {', '.join(FLOATS)}: save it "
      'as float32'
    )
  if not all(size > 0 for size in shape):
    raise ValueError(f"'{name}' of shape {tuple(shape)} has no elements")


def warn_of_what_is_not_finite(file, arrays: dict[str, np.ndarray]):
  """Warns of arrays that hold NaN or infinity."""
  names = [name for name, array in arrays.items() if not _is_finite(array)]
  if names:
    more = f' and {len(names) - 10} more' if len(names) > 10 else ''
    logging.warning(
      f"'{file}' holds values that are NaN or infinite, so everything computed "
      f'with them will be too: {", ".join(names[:10])}{more}'
    )


def _is_finite(array):
  with np.errstate(over='ignore', invalid='ignore'):
    # NaN and infinity persist in a sum; the sum itself may overflow.
    return bool(np.isfinite(array.sum()) or np.isfinite(array).all())
