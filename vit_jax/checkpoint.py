"""Published weights, .npz files, in and out of a model's parameters.

The files name the layers of a block by their place (LayerNorm_0,
MultiHeadDotProductAttention_1, LayerNorm_2, MlpBlock_3), Linen counts each kind
on its own (LayerNorm_0, MultiHeadDotProductAttention_0, LayerNorm_1,
MlpBlock_0). Reading takes both; writing gives the former, which the original's
readers and timm's `load_npz` understand.
"""

from collections.abc import Sequence
import math
import re
from typing import Any
import zipfile

from absl import logging
from etils import epath
import flax.traverse_util
import jax
import numpy as np

# Name in a file -> name in Linen, for the layers of an encoder block.
_LINEN_NAMES = {
  'LayerNorm_2': 'LayerNorm_1',
  'MlpBlock_3': 'MlpBlock_0',
  'MultiHeadDotProductAttention_1': 'MultiHeadDotProductAttention_0',
}
_FILE_NAMES = {linen: name for name, linen in _LINEN_NAMES.items()}
_PREFIXES = ('opt/target/', 'params/')
_POSEMB = 'Transformer/posembed_input/pos_embedding'


def recover_tree(keys: Sequence[str], values: Sequence[Any]) -> dict:
  """Makes a nested dict of '/'-joined keys and their values."""
  return flax.traverse_util.unflatten_dict(dict(zip(keys, values)), sep='/')


def load(path: str) -> dict:
  """Loads a published .npz file.

  Args:
    path: the file, local or gs://.

  Returns:
    Parameters as nested dict of numpy arrays, by Linen's names.

  Raises:
    FileNotFoundError: if there is no such file.
    ValueError: if it is no .npz file, is truncated, or holds pickled objects.
  """
  file = epath.Path(path)
  if not file.is_file():
    raise FileNotFoundError(
      f"there is no weights file '{path}': give the path of a published .npz "
      '(config.pretrained), or their folder (config.pretrained_dir)'
    )
  flat = {}
  try:
    with file.open('rb') as f, np.load(f, allow_pickle=False) as arrays:
      for key in arrays.files:
        flat[_linen_name(key)] = arrays[key]
  except (
    ValueError,
    OSError,
    EOFError,
    AttributeError,
    zipfile.BadZipFile,
  ) as e:
    raise ValueError(
      f"'{path}' is not an .npz file of weights, or only part of one: {e}"
    ) from e
  for key, value in flat.items():
    # Old files keep the scale and bias of GroupNorms with dimensions of 1.
    if re.search(r'gn[^/]*/(scale|bias)$', key):
      flat[key] = value.reshape(-1)
  return recover_tree(*_split(flat))


def save(params, path: str):
  """Writes parameters as an .npz file, by the published names.

  Args:
    params: nested dict of arrays; their types are kept, but for bfloat16, which
      .npz cannot hold and which becomes float32.
    path: the file; it appears only when it is complete.
  """
  flat = flax.traverse_util.flatten_dict(jax.device_get(params), sep='/')
  flat = {
    _file_name(key): np.asarray(v, np.float32 if v.dtype.name == 'bfloat16' else None)
    for key, v in flat.items()
  }  # fmt: skip
  target = epath.Path(path)
  temporary = target.parent / f'.{target.name}.tmp'
  with temporary.open('wb') as f:
    np.savez(f, **flat)
  temporary.replace(target)


def _linen_name(key):
  for prefix in _PREFIXES:
    key = key.removeprefix(prefix)
  return _rename_block(key, _LINEN_NAMES)


def _file_name(key):
  return _rename_block(key, _FILE_NAMES)


def _rename_block(key, names):
  """Renames the layer that comes after 'encoderblock_<i>/'."""
  return re.sub(
    r'(encoderblock_\d+/)([^/]+)',
    lambda match: match[1] + names.get(match[2], match[2]),
    key,
  )


def inspect_params(
  *,
  params: dict,
  expected: dict,
  fail_if_extra: bool = True,
  fail_if_missing: bool = True,
) -> dict:
  """Compares the leaves of `params` with those expected.

  Args:
    params: nested dict of arrays.
    expected: nested dict of arrays or jax.ShapeDtypeStruct.
    fail_if_extra: whether a leaf that is not expected is an error.
    fail_if_missing: whether a leaf that is missing is an error.

  Returns:
    `params`.

  Raises:
    ValueError: lists the leaves that are missing, extra, or of another shape.
  """
  have = flax.traverse_util.flatten_dict(params, sep='/')
  want = flax.traverse_util.flatten_dict(expected, sep='/')
  missing, extra = sorted(want.keys() - have), sorted(have.keys() - want)
  problems = [
    f'{key}: {tuple(have[key].shape)} in the weights, '
    f'{tuple(want[key].shape)} in the model'
    for key in sorted(want.keys() & have)
    if tuple(have[key].shape) != tuple(want[key].shape)
  ]
  if missing:
    logging.info('The weights lack: %s', missing)
  if extra:
    logging.info('The weights have, beside those of the model: %s', extra)
  if missing and fail_if_missing:
    problems += [f'{key}: missing in the weights' for key in missing]
  if extra and fail_if_extra:
    problems += [f'{key}: not in the model' for key in extra]
  if problems:
    shown = problems[:20] + [f'and {len(problems) - 20} more'] * (
      len(problems) > 20
    )
    raise ValueError(
      'the weights do not fit the model:\n  ' + '\n  '.join(shown)
    )
  return params


def interpolate_posembed(
  posemb,
  num_tokens: int,
  has_class_token: bool,
  grid: tuple[int, int] | None = None,
  new_grid: tuple[int, int] | None = None,
) -> np.ndarray:
  """Resizes position embeddings to another number of patches (section 3.2).

  Bilinear with corners aligned, what `scipy.ndimage.zoom(order=1)` computes. The
  class token's embedding is kept as it is.

  Args:
    posemb: [1, N, D], that of the class token first if there is one.
    num_tokens: number of tokens wanted, the class token included.
    has_class_token: whether the first token is a class token.
    grid: (height, width) of the patches in `posemb`; None: a square.
    new_grid: (height, width) wanted; None: a square.

  Returns:
    float32 [1, num_tokens, D].

  Raises:
    ValueError: if a grid is not what the number of tokens allows.
  """
  posemb = np.asarray(posemb, np.float32)
  extra = int(has_class_token)
  grid = _check_grid(grid, posemb.shape[1] - extra, 'the weights')
  new_grid = _check_grid(new_grid, num_tokens - extra, 'the model')
  table = posemb[0, extra:].reshape(*grid, -1)  # [h, w, D]
  for axis, size in enumerate(new_grid):
    table = _resize_axis(table, axis, size)
  table = table.reshape(1, math.prod(new_grid), -1)
  return np.concatenate([posemb[:, :extra], table], axis=1)


def _check_grid(grid, patches, where):
  side = math.isqrt(patches)
  grid = (side, side) if grid is None else tuple(grid)
  if math.prod(grid) != patches:
    raise ValueError(
      f'the {patches} position embeddings of {where} are no grid of {grid[0]} x '
      f'{grid[1]} patches: say which they are with grid=(height, width) and '
      'new_grid=(height, width)'
    )
  return grid


def _resize_axis(table, axis, size):
  """Linear interpolation along an axis, first and last entry kept in place."""
  old = table.shape[axis]
  if old == size:
    return table
  positions = np.linspace(0, old - 1, size, dtype=np.float64)
  low = np.clip(np.floor(positions).astype(int), 0, max(old - 2, 0))
  high = np.minimum(low + 1, old - 1)
  shape = [1] * table.ndim
  shape[axis] = size
  weight = (positions - low).astype(np.float32).reshape(shape)
  return (
    np.take(table, low, axis) * (1 - weight)
    + np.take(table, high, axis) * weight
  )


def load_pretrained(
  *,
  pretrained_path: str,
  init_params: dict,
  model_config,
  grid: tuple[int, int] | None = None,
  new_grid: tuple[int, int] | None = None,
) -> dict:
  """Loads published weights to fine-tune them (appendix B.1.1).

  The head is that of `init_params` (zeros, in a new model), and so is the
  pre-logits layer where the model wants one that the file lacks; a pre-logits
  layer that the model does not want is dropped; position embeddings are resized.

  Args:
    pretrained_path: an .npz file, local or gs://.
    init_params: parameters of the model, newly initialised.
    model_config: reads `representation_size`.
    grid: patches (height, width) of the weights; None: a square.
    new_grid: patches (height, width) of the model; None: a square.

  Returns:
    Parameters of the shapes of `init_params`.

  Raises:
    FileNotFoundError, ValueError: if the file cannot be read or does not fit;
      lists the leaves at fault, with both shapes.
  """
  taken = transferable(
    pretrained_path, init_params, model_config, grid, new_grid
  )
  init = flax.traverse_util.flatten_dict(init_params, sep='/')
  return flax.traverse_util.unflatten_dict({**init, **taken}, sep='/')


def transferable(
  pretrained_path: str, expected: dict, model_config, grid=None, new_grid=None
) -> dict[str, np.ndarray]:
  """Returns what `load_pretrained` takes from the file, by '/'-joined path.

  Args:
    pretrained_path: an .npz file, local or gs://.
    expected: parameters of the model, arrays or jax.ShapeDtypeStruct.
    model_config: reads `representation_size`.
    grid: patches (height, width) of the weights; None: a square.
    new_grid: patches (height, width) of the model; None: a square.

  Raises:
    FileNotFoundError, ValueError: see load_pretrained.
  """
  flat = flax.traverse_util.flatten_dict(load(pretrained_path), sep='/')
  want = flax.traverse_util.flatten_dict(expected, sep='/')
  head = flat.get('head/kernel')
  if head is not None and not head.any():
    logging.warning(
      "The head of '%s' is all zeros: no classifier comes with these weights",
      pretrained_path,
    )
  new = ['head/']
  if model_config.get('representation_size') is None:
    new.append('pre_logits/')
  flat = {k: v for k, v in flat.items() if not k.startswith(tuple(new))}
  if not any(key.startswith('pre_logits/') for key in flat):
    new.append('pre_logits/')
  want = {k: v for k, v in want.items() if not k.startswith(tuple(new))}
  has_class_token = 'cls' in flat
  if {_POSEMB} <= flat.keys() & want.keys() and has_class_token == (
    'cls' in want
  ):
    old, resized = flat[_POSEMB].shape, want[_POSEMB].shape
    if old != resized and old[2] == resized[2]:
      flat[_POSEMB] = interpolate_posembed(
        flat[_POSEMB], resized[1], has_class_token, grid, new_grid
      )
  try:
    inspect_params(
      params=recover_tree(*_split(flat)), expected=recover_tree(*_split(want))
    )
  except ValueError as e:
    raise ValueError(f"'{pretrained_path}': {e}") from None
  return flat


def _split(flat):
  return list(flat), list(flat.values())
