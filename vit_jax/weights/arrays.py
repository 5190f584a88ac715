"""Reads named arrays from untrusted files, and writes them.

NumPy, PyTorch and safetensors load data only: no code in a file is run.
"""

from collections.abc import Iterator
import contextlib
import errno
import re
from typing import Any
import zipfile

from absl import logging
from etils import epath
import numpy as np
import safetensors
import safetensors.numpy

from vit_jax.distributed import files
from vit_jax.weights import fetch

_FLOATS = ('bfloat16', 'float16', 'float32', 'float64')
TORCH_ENDINGS = ('.bin', '.pt', '.pth', '.tar', '.ckpt')
_LONGEST_HEADER = 100_000_000  # Bytes that the safetensors library accepts.
# Trees are built of names, one level of the tree for each part between slashes.
_MOST_LEVELS, _LONGEST_NAME = 32, 1000
# Buffers of PyTorch's models that hold no weights: counters of batch norm, causal
# masks, and position indices.
_NO_WEIGHTS = re.compile(
  r"""
  (.+\.)?(
    num_batches_tracked
    | attn\.(masked_)?bias
    | attn\.relative_position_index
    | embeddings\.position_ids
    | attn_mask
  )
  """,
  re.VERBOSE,
)


@contextlib.contextmanager
def file_errors(file: epath.PathLike) -> Iterator[None]:
  """Turns errors about the content of a file into a files.FileError."""
  try:
    yield
  except (ImportError, files.FileError):
    raise
  except Exception as e:  # Libraries raise errors of many types.
    # A wrong offset in a file makes libraries seek before its start: EINVAL.
    if isinstance(e, OSError) and e.errno != errno.EINVAL:
      raise
    reason = e if isinstance(e, ValueError) else f'damaged ({type(e).__name__}: {e})'
    raise files.FileError(f"'{file}' cannot be used: {reason}") from e


def read_npz(file: epath.Path, dtype: str | None = None) -> dict[str, np.ndarray]:
  """Reads the arrays of an .npz file.

  With a `dtype`, arrays of several dimensions are converted to it one by one.
  """
  with fetch.local_input(file) as local_file, files.open_input(local_file) as archive:
    if not zipfile.is_zipfile(archive):  # NumPy takes other files for pickles.
      raise ValueError('not an .npz archive, or only part of one')
    archive.seek(0)
    with np.load(archive, allow_pickle=False) as content:
      return {name: checked(name, content[name], dtype) for name in content}


def read_safetensors(
  file: epath.Path, dtype: str | None = None
) -> dict[str, np.ndarray]:
  """Reads the arrays of a .safetensors file; for `dtype` see read_npz."""
  with fetch.local_input(file) as local_file:
    files.check_input(local_file)
    with safetensors.safe_open(local_file, framework='numpy') as f:
      names = [name for name in f.keys() if not _NO_WEIGHTS.fullmatch(name)]
    arrays = {}
    for name in names:
      # Reopened, since pages read through an open file stay in memory.
      with safetensors.safe_open(local_file, framework='numpy') as f:
        value = f.get_tensor(name)
      if not is_buffer(name, value):
        arrays[name] = checked(name, value, dtype)
    return arrays


def format_of(file: epath.Path) -> str:
  """Returns 'npz', 'safetensors' or 'torch', by a file's content or else its ending."""
  if files.is_remote(file) or not file.exists():
    return _format_of_name(file.name)
  files.check_input(file)
  with file.open('rb') as f:
    start = f.read(9)
    # Its header is JSON, whose length comes first.
    if start[8:] == b'{' and int.from_bytes(start[:8], 'little') <= _LONGEST_HEADER:
      return 'safetensors'
    if start.startswith(b'\x80'):  # A pickle.
      return 'torch'
    if start.startswith(b'PK') and zipfile.is_zipfile(f):
      with file_errors(file), zipfile.ZipFile(f) as archive:
        is_torch = any(name.endswith('/data.pkl') for name in archive.namelist())
        return 'torch' if is_torch else 'npz'
  return _format_of_name(file.name)


def _format_of_name(name: str) -> str:
  if name.endswith('.safetensors'):
    return 'safetensors'
  return 'torch' if name.endswith(TORCH_ENDINGS) else 'npz'


def write_safetensors(path: epath.Path, arrays: dict[str, np.ndarray]) -> None:
  """Writes a .safetensors file as PyTorch has them; it appears when it is complete."""
  with files.replacing(path) as file:
    file.write(safetensors.numpy.save(arrays, metadata={'format': 'pt'}))


def is_buffer(name: str, value: Any) -> bool:
  """Returns whether an entry of a state dict is a buffer, a count or a setting."""
  if isinstance(value, (int, float, str)) or _NO_WEIGHTS.fullmatch(name):
    return True
  # Such as OpenAI CLIP's input_resolution.
  return np.shape(value) == () and 'int' in str(getattr(value, 'dtype', ''))


def checked(name: str, array: np.ndarray, dtype: str | None) -> np.ndarray:
  """Returns an array of floats in native byte order; converts it to a `dtype`."""
  levels = 1 + name.count('/')
  if levels > _MOST_LEVELS or len(name) > _LONGEST_NAME:
    raise ValueError(
      f"'{name[:60]} ...' has {len(name):,} characters and {levels:,} levels, but names "
      f'of weights have at most {_LONGEST_NAME:,} and {_MOST_LEVELS}'
    )
  if array.dtype.name not in _FLOATS:
    raise ValueError(
      f"'{name}' is of type {array.dtype.name}, but weights are "
      f'{", ".join(_FLOATS)}: save it as float32'
    )
  if dtype and array.ndim > 1:
    return array.astype(dtype, copy=False)
  return array.astype(array.dtype.newbyteorder('='), copy=False)


def warn_if_not_finite(file: epath.PathLike, arrays: dict[str, np.ndarray]) -> None:
  """Warns of arrays that hold NaN or infinity."""
  names = [name for name, array in arrays.items() if not np.isfinite(array).all()]
  if names:
    logging.warning(
      f"'{file}' has NaN or infinite values in {join_names(names)}: everything computed "
      'with them will have them too'
    )


def join_names(names: list[str]) -> str:
  """Joins names for a message; leaves out those after the tenth."""
  text = ', '.join(names[:10])
  if len(names) > 10:
    text += f' and {len(names) - 10} more'
  return text
