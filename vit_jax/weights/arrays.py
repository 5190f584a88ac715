"""Reads named arrays from untrusted files.

No code in a file is run, which NumPy, PyTorch and safetensors see to. Every fault
of a file becomes a ValueError that names it.
"""

from collections.abc import Callable, Iterable
import contextlib
import errno
import itertools
import re
from typing import Any
import zipfile

from absl import logging
from etils import epath
import numpy as np
import safetensors

from vit_jax import console
from vit_jax.weights import fetch

FLOATS = ('bfloat16', 'float16', 'float32', 'float64')
_SAFETENSORS_FLOATS = dict(zip(('BF16', 'F16', 'F32', 'F64'), FLOATS))
# Greatest number of '/'-separated parts of a name; published names have up to 5.
_DEEPEST = 32
# Buffers of PyTorch's models that hold no weights: counters of batch norm, causal
# masks, and numbers of positions.
_NO_WEIGHTS = re.compile(
  r'(.+\.)?(num_batches_tracked|attn\.(masked_)?bias'
  r'|embeddings\.position_ids)'
)  # fmt: skip


def _is_weights(name: Any) -> bool:
  """Returns whether an array of this name in a state dict holds weights."""
  return not (isinstance(name, str) and _NO_WEIGHTS.fullmatch(name))


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
  file: epath.Path,
  rename: Callable[[str], str] = str,
  dtype: str | None = None,
) -> dict[str, np.ndarray]:
  """Reads the arrays of an .npz file, with their names changed by `rename`.

  With a `dtype`, arrays of several dimensions are converted to it one by one.
  """
  with (
    naming(file, 'is not an .npz file of weights'),
    fetch.local_input(file) as here,
  ):
    try:
      with zipfile.ZipFile(here) as archive:
        members = archive.infolist()
    except zipfile.BadZipFile as e:
      raise ValueError('it is no zip archive, or only part of one') from e
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
        _check_array(name, array.dtype.name, array.shape)
        array = array.astype(array.dtype.newbyteorder('='), copy=False)
        arrays[name] = _converted(array, dtype)
  return arrays


def read_safetensors(
  file: epath.Path, dtype: str | None = None
) -> dict[str, np.ndarray]:
  """Reads the arrays of a .safetensors file; for `dtype` see read_npz."""
  with (
    naming(file, 'is not a .safetensors file of weights'),
    fetch.local_input(file) as here,
  ):
    try:
      with safetensors.safe_open(here, framework='numpy') as f:
        names = list(filter(_is_weights, f.keys()))
        for name in names:
          header = f.get_slice(name)
          kind = header.get_dtype()
          kind = _SAFETENSORS_FLOATS.get(kind, kind)
          _check_array(name, kind, header.get_shape())
      arrays = {}
      for name in names:
        # Opened again, since what was read of an open file stays in memory.
        with safetensors.safe_open(here, framework='numpy') as f:
          arrays[name] = _converted(f.get_tensor(name), dtype)
      return arrays
    except safetensors.SafetensorError as e:
      raise ValueError(f'it is no .safetensors file, or only part of one: {e}') from e


def read_torch(file: epath.Path, dtype: str | None = None) -> dict[str, np.ndarray]:
  """Reads a state dict of PyTorch; for `dtype` see read_npz."""
  torch = console.needed('torch', 'torch', f"reading '{file}'")
  with (
    naming(file, 'is not a file of PyTorch weights'),
    fetch.local_input(file) as here,
  ):
    state = _load_torch(torch, here)
    for name, value in state.items():
      _check_tensor(torch, name, value)
    return {
      name: _converted(_to_numpy(torch, state.pop(name)), dtype) for name in list(state)
    }


def _load_torch(torch, file):
  """Loads the dict of tensors from a file, without running code in it."""
  try:
    state = torch.load(file, map_location='cpu', weights_only=True)
  except OSError:
    raise
  except Exception as e:  # pylint: disable=broad-except
    raise ValueError(
      'it is truncated, or holds pickled objects, which are never loaded'
    ) from e
  if isinstance(state, dict):
    state = state.get('state_dict', state.get('model', state))
  if not isinstance(state, dict):
    raise ValueError('it holds no state dict: arrays by name')
  return {k: v for k, v in state.items() if _is_weights(k)}


def _check_tensor(torch, name: Any, value: Any):
  """Raises ValueError unless `value` is a named plain tensor of floats."""
  if not isinstance(name, str) or not isinstance(value, torch.Tensor):
    raise ValueError(
      f'it holds no state dict, arrays by name: {name!r:.80} is a '
      f'{type(value).__name__}'
    )
  kind = None
  if value.is_meta:
    kind = 'on the device meta, which holds no values'
  elif value.is_quantized:
    kind = 'quantised: save it with .dequantize()'
  elif value.layout != torch.strided or value.is_nested:
    kind = f'of the layout {value.layout}: save it with .to_dense()'
  if kind:
    raise ValueError(f"the tensor '{name}' is {kind}")
  _check_array(name, str(value.dtype).removeprefix('torch.'), value.shape)


def _to_numpy(torch, value):
  value = value.detach()  # It may be a parameter.
  return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _converted(array, dtype):
  """Returns an array of several dimensions in a type, if one is given."""
  return array.astype(dtype, copy=False) if dtype and array.ndim > 1 else array


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


def _check_array(name: str, dtype: str, shape: Iterable[int]):
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
