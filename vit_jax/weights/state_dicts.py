"""Reads state dicts of PyTorch without running code that a pickle may hold."""

import pickletools
import re
from typing import Any
import zipfile

from etils import epath
import numpy as np

from vit_jax import cli
from vit_jax.weights import arrays
from vit_jax.weights import fetch

# Pickle opcodes that import a name, and the names that a state dict may import.
_GLOBALS = ('GLOBAL', 'STACK_GLOBAL', 'INST', 'EXT1', 'EXT2', 'EXT4')
_HARMLESS = re.compile(
  r'collections (OrderedDict|Counter)|_codecs encode'
  r'|(builtins|__builtin__) (set|complex)'
  r'|torch(\.storage|\.nn\.parameter)? \w+|torch\.serialization _get_layout'
  r'|torch\._utils _rebuild_(tensor(_v[23])?|parameter(_with_state)?|qtensor'
  r'|sparse_tensor|meta_tensor_no_storage)'
)


def read(file: epath.Path) -> dict[str, np.ndarray]:
  """Reads a state dict of PyTorch."""
  torch = cli.needed('torch', 'torch', f"reading '{file}'")
  with (
    arrays.naming(file, 'is not a file of PyTorch weights'),
    fetch.local_input(file) as here,
  ):
    state = _load_torch(torch, here)
    for name, value in state.items():
      _check_tensor(torch, name, value)
    # Tensors may share storage, or repeat it with a stride of 0.
    bytes_in_all = sum(v.numel() * v.element_size() for v in state.values())
    arrays.check_size(bytes_in_all, here.stat().length)
    return {name: _to_numpy(torch, value) for name, value in state.items()}


def _load_torch(torch, file):
  """Loads the dict of tensors from a file, without running code in it."""
  try:
    _check_pickles(file)
    state = torch.load(file, map_location='cpu', weights_only=True)
  except (OSError, arrays.Unfolds):
    raise
  except Exception as e:  # pylint: disable=broad-except
    raise ValueError(
      'it is truncated, or holds pickled objects, which are never loaded'
    ) from e
  if isinstance(state, dict):
    state = state.get('state_dict', state.get('model', state))
  if not isinstance(state, dict):
    raise ValueError('it holds no state dict: arrays by name')
  return {k: v for k, v in state.items() if arrays.is_weights(k)}


def _check_pickles(file):
  """Raises ValueError if a pickle uses more than the parts of tensors.

  PyTorch admits everything that runs no code, also what may fill the memory: a
  bytearray of any size, or a tensor that repeats its storage.
  """
  if not zipfile.is_zipfile(file):
    with file.open('rb') as f:
      # Pickles: magic number, version, system, tensors, keys of the storages.
      for _ in range(5):
        _check_pickle(f)
    return
  with zipfile.ZipFile(file) as archive:
    members = archive.infolist()
    arrays.check_size(
      sum(info.file_size for info in members), file.stat().length
    )
    for info in members:
      if info.filename.endswith('.pkl'):
        _check_pickle(archive.read(info))


def _check_pickle(pickled):
  for opcode, argument, _ in pickletools.genops(pickled):
    if opcode.name in _GLOBALS and not _HARMLESS.fullmatch(str(argument)):
      raise ValueError(f'{argument} is pickled in it')


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
  arrays.check_array(name, str(value.dtype).removeprefix('torch.'), value.shape)


def _to_numpy(torch, value):
  value = value.detach()  # It may be a parameter.
  return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
