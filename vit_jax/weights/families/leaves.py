"""What the layouts of all families share: leaves, their shapes, their names.

A table pairs each leaf of a model's tree with its names elsewhere, and gives
the difference in layout, the leaf's kind:

  conv   [h, w, in, out]            here, [out, in, h, w] in PyTorch
  pixel  [in, out]                  here, [out, in, 1, 1] in PyTorch
  dense  [in, out]                  here, [out, in] in PyTorch
  heads  [in, heads, size]          here, [heads * size, in] in PyTorch
  bias   [heads, size]              here, [heads * size] in PyTorch
  out    [heads, size, out]         here, [out, heads * size] in PyTorch
  same   the same in both

Conversions only transpose and reshape: they are exact in both directions.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import re
from typing import Any

import flax.traverse_util
import jax
import numpy as np

_DIMENSIONS = {
  'conv': 4,
  'pixel': 4,
  'dense': 2,
  'heads': 2,
  'bias': 1,
  'out': 2,
}


def count(names: Iterable[str], pattern: str, first: int = 0) -> int:
  """Counts the layers, units or blocks in a list of names.

  Args:
    names: names of arrays.
    pattern: regex whose first group is the number of a layer; matched at the
      beginning of each name.
    first: number of the first layer.

  Raises:
    ValueError: if a number is missing.
  """
  found = {int(m[1]) for m in (re.match(pattern, name) for name in names) if m}
  if found and (min(found) != first or max(found) != first + len(found) - 1):
    shown = pattern.replace(r'(\d+)', 'N').replace('\\', '')
    raise ValueError(
      f"the names '{shown}' are numbered from {min(found)} to {max(found)}, but "
      f'there are only {len(found)} of them: some are missing'
    )
  return len(found)


def units(flat: Iterable[str]) -> tuple[int, ...]:
  """Returns the number of units in each stage of a ResNet.

  Args:
    flat: paths of its parameters.
  """
  stages = count(flat, r'block(\d+)/unit', first=1)
  return tuple(
    count(flat, rf'block{i + 1}/unit(\d+)/', first=1) for i in range(stages)
  )


def channels(flat: Mapping[str, Any]) -> int:
  """Returns the number of channels of a model's input images.

  Args:
    flat: arrays or shapes of its parameters by path.
  """
  for path in (
    'backbone/conv_root/kernel',
    'root_block/conv_root/kernel',
    'conv_root/kernel',
    'stem/kernel',
    'embedding/kernel',
  ):
    if path in flat:
      return flat[path].shape[2]
  raise KeyError('embedding/kernel')


def images(config, params, image_size) -> jax.ShapeDtypeStruct:
  """Returns shape and type of the input of a model of images, one image.

  Args:
    config: fields of the model.
    params: nested dict of its parameters.
    image_size: (height, width) in pixels.
  """
  del config
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  shape = (1, *image_size, channels(flat))
  return jax.ShapeDtypeStruct(shape, np.dtype('float32'))


def from_torch(
  value: np.ndarray, path: str, kind: str, num_heads: int | None
) -> np.ndarray:
  """Converts one array of PyTorch.

  Args:
    value: the array.
    path: path of the leaf, for messages.
    kind: kind of the leaf, see the top of this module.
    num_heads: number of attention heads.

  Raises:
    ValueError: if the array has another number of dimensions, or `num_heads`
      does not divide the width.
  """
  if value.ndim != _DIMENSIONS.get(kind, value.ndim):
    raise ValueError(
      f"'{path}' has the shape {value.shape} in the state dict: it must have "
      f'{_DIMENSIONS[kind]} dimensions'
    )
  if kind in ('heads', 'bias', 'out'):
    width = value.shape[1] if kind == 'out' else value.shape[0]
    if width % num_heads:
      raise ValueError(
        f'num_heads={num_heads} does not divide the width {width} of '
        f"'{path}': give the number of heads of the model"
      )
  if kind == 'conv':
    value = value.transpose(2, 3, 1, 0)
  elif kind == 'pixel':
    value = value[:, :, 0, 0].T
  elif kind == 'dense':
    value = value.T
  elif kind == 'heads':
    value = value.T.reshape(value.shape[1], num_heads, -1)
  elif kind == 'bias':
    value = value.reshape(num_heads, -1)
  elif kind == 'out':
    value = value.T.reshape(num_heads, -1, value.shape[0])
  return np.ascontiguousarray(value)


def to_torch(value: np.ndarray, kind: str) -> np.ndarray:
  """Converts one leaf to PyTorch's layout, see `from_torch`."""
  if kind == 'conv':
    value = value.transpose(3, 2, 0, 1)
  elif kind == 'pixel':
    value = value.T[:, :, None, None]
  elif kind == 'dense':
    value = value.T
  elif kind == 'heads':
    value = value.reshape(value.shape[0], -1).T
  elif kind == 'bias':
    value = value.reshape(-1)
  elif kind == 'out':
    value = value.reshape(-1, value.shape[-1]).T
  return np.ascontiguousarray(value)


def split(
  flat: Mapping[str, np.ndarray], joined: str, parts: Iterable[str]
) -> dict[str, np.ndarray]:
  """Splits arrays that hold several layers along their first axis.

  Args:
    flat: arrays by name.
    joined: part of the names of these arrays, such as '.qkv.'.
    parts: what replaces that part in the names of the layers, in order.

  Raises:
    ValueError: if an array cannot be split evenly.
  """
  result, parts = {}, tuple(parts)
  for name, value in flat.items():
    if joined not in name:
      result[name] = value
      continue
    if not value.ndim or len(value) % len(parts):
      raise ValueError(
        f"'{name}' of shape {value.shape} cannot be split into query, key and "
        'value'
      )
    for part, piece in zip(parts, np.split(value, len(parts))):
      result[name.replace(joined, part)] = piece
  return result


def join(
  flat: Mapping[str, np.ndarray], joined: str, parts: Iterable[str]
) -> dict[str, np.ndarray]:
  """Joins what `split` splits."""
  first, *others = parts
  result = dict(flat)
  for name in flat:
    if first in name:
      pieces = [result.pop(name)]
      pieces += [result.pop(name.replace(first, part)) for part in others]
      result[name.replace(first, joined)] = np.concatenate(pieces)
  return result


def fail_for_unknown(flat: Iterable[str], what: str, hint: str = '') -> None:
  """Raises ValueError if arrays are left that a model has no place for.

  Args:
    flat: names of these arrays.
    what: the model, in words.
    hint: what the arrays are, in words.
  """
  names = sorted(flat)
  if names:
    raise ValueError(
      f'these weights are not those of a {what}, which lacks '
      + ', '.join(names[:10])
      + (f' and {len(names) - 10} more' if len(names) > 10 else '')
      + hint
    )
