"""Reads checkpoints of PyTorch, which are pickles, without running code in them.

PyTorch's own reader builds nothing but containers, tensors and the classes that it is
given. Those are stand-ins that do nothing, for the settings that training programs
store: argparse.Namespace, numbers of NumPy and paths.
"""

import re
from typing import Any

from etils import epath
import numpy as np

from vit_jax import console
from vit_jax.distributed import files
from vit_jax.weights import arrays, fetch

_SETTINGS = (
  'argparse.Namespace',
  'numpy.dtype',
  'numpy.core.multiarray.scalar',
  'numpy._core.multiarray.scalar',
  'numpy.dtypes.Float32DType',
  'numpy.dtypes.Float64DType',
  'numpy.dtypes.Int64DType',
  'numpy.dtypes.BoolDType',
  'pathlib.PosixPath',
  'pathlib.WindowsPath',
  'pathlib._local.PosixPath',
  'pathlib._local.WindowsPath',
)


class _StandIn:
  """Stands for an object in a checkpoint, and drops what it holds."""

  def __init__(self, *args: Any) -> None:
    pass

  def __setstate__(self, state: Any) -> None:
    pass


def _stand_ins() -> list[type]:
  """Returns stand-ins with the names in `_SETTINGS`."""
  classes = []
  for path in _SETTINGS:
    module, _, name = path.rpartition('.')
    fields = {'__module__': module, '__qualname__': name}
    classes.append(type(name, (_StandIn,), fields))
  return classes


def load(file: epath.Path) -> Any:
  """Loads a checkpoint: nested dicts of tensors, and of settings.

  ValueError if it is damaged or holds other objects; ImportError without PyTorch.
  """
  torch = console.require('torch', 'torch', f"reading '{file}'")
  with fetch.local_input(file) as local_file, files.open_input(local_file) as content:
    try:
      with torch.serialization.safe_globals(_stand_ins()):
        return torch.load(content, map_location='cpu', weights_only=True)
    except Exception as e:  # Its messages are paragraphs.
      raise ValueError(_explanation(str(e))) from e


def _explanation(error: str) -> str:
  """Explains an error of PyTorch's reader."""
  if 'TorchScript' in error:
    return (
      'it is a TorchScript program, which is never run: save its weights with '
      'torch.save(torch.jit.load(FILE).state_dict(), NEW_FILE)'
    )
  match = re.search(r'GLOBAL ([\w.]+)', error)
  name = match[1] if match else 'of an unknown kind'
  return (
    f'it is truncated, or holds pickled objects ({name}), which are never loaded: save '
    "only the model's state_dict()"
  )


def to_numpy(state: dict[str, Any], dtype: str | None) -> dict[str, np.ndarray]:
  """Converts tensors by name, which it removes; for `dtype` see arrays.read_npz."""
  converted = {}
  for name in list(state):
    value = state.pop(name)
    if hasattr(value, 'detach'):
      value = value.detach()  # It may be a parameter.
      value = value.float() if str(value.dtype) == 'torch.bfloat16' else value
      value = arrays.checked(name, value.numpy(), dtype)
    converted[name] = value
    if not isinstance(value, np.ndarray):
      remedy = ': name the entry to read (--entry)' if isinstance(value, dict) else ''
      raise ValueError(f"'{name}' is a {type(value).__name__}, not an array{remedy}")
  return converted
