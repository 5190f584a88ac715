"""Names of parameters in published .npz files, of ViT, Mixer and BiT."""

from collections.abc import Iterable, Mapping
import re

import numpy as np

from vit_jax.weights.families import leaves, vit

# Name in a file -> name in Linen of the layers in an encoder block. Files number
# the layers by their place in the block, Linen counts each kind separately.
_BLOCK = {
  'LayerNorm_2': 'LayerNorm_1',
  'MlpBlock_3': 'MlpBlock_0',
  'MultiHeadDotProductAttention_1': 'MultiHeadDotProductAttention_0',
}


def _norm(path: str, name: str) -> tuple[leaves.Row, ...]:
  """Returns the rows of a GroupNorm."""
  return (
    (f'{path}/scale', 'same', f'{name}/gamma'),
    (f'{path}/bias', 'same', f'{name}/beta'),
  )


# Table of a BiT ResNet, see vit_jax.weights.families.leaves.
_BIT_UNIT = (
  ('conv_proj/kernel', 'same', 'a/proj/standardized_conv2d/kernel'),
  ('conv1/kernel', 'same', 'a/standardized_conv2d/kernel'),
  ('conv2/kernel', 'same', 'b/standardized_conv2d/kernel'),
  ('conv3/kernel', 'same', 'c/standardized_conv2d/kernel'),
  *_norm('gn1', 'a/group_norm'),
  *_norm('gn2', 'b/group_norm'),
  *_norm('gn3', 'c/group_norm'),
)
_BIT_STEM = (
  ('root_block/conv_root/kernel', 'same', 'root_block/standardized_conv2d/kernel'),
  *_norm('norm-pre-head', 'group_norm'),
  ('head/kernel', 'same', 'head/conv2d/kernel'),
  ('head/bias', 'same', 'head/conv2d/bias'),
)
_BIT: tuple[leaves.Group, ...] = (
  ('block{1}/unit{01}/', 'resnet/block{1}/unit{01}/', _BIT_UNIT),
  ('', 'resnet/', _BIT_STEM),
)


def linen_names(names: Iterable[str]) -> dict[str, str]:
  """Returns the path in Linen of each name in a file."""
  # Some BiT files number the convolutions: standardized_conv2d_3.
  ignored = re.compile(r'^(opt/target/)?(params/)?|(?<=conv2d)_\d+(?=/)')
  plain = {name: ignored.sub('', name) for name in names}
  table = leaves.walk(_BIT, plain.values(), by_path=False)
  bit_paths = {name: path for path, _, name in table}
  paths = {}
  for name, plain_name in plain.items():
    paths[name] = bit_paths.get(plain_name) or _in_block(plain_name, _BLOCK)
  return paths


def file_names(paths: Iterable[str]) -> dict[str, str]:
  """Returns the name in a file of each path in Linen."""
  layers = {linen: name for name, linen in _BLOCK.items()}
  names = {path: _in_block(path, layers) for path in paths}
  if vit.is_bit(paths):
    for path, _, name in leaves.walk(_BIT, paths, by_path=True):
      if path in names:
        names[path] = name
  return names


def _in_block(path: str, names: Mapping[str, str]) -> str:
  """Renames the layer that follows 'encoderblock_<i>/' in a path."""
  return re.sub(
    r'(?<=encoderblock_)(\d+)/([^/]+)',
    lambda match: f'{match[1]}/{names.get(match[2], match[2])}',
    path,
  )


def without_ones(path: str, leaf: np.ndarray) -> np.ndarray:
  """Returns a leaf without the dimensions of 1 that some files add.

  Old files keep the scale and bias of GroupNorms as [1, 1, 1, C], and BiT files
  the kernel of the head as [1, 1, D, classes].
  """
  if re.search(r'(gn[^/]*|norm-pre-head)/(scale|bias)$', path):
    return leaf.reshape(-1)
  if path == 'head/kernel' and leaf.ndim == 4 and leaf.shape[:2] == (1, 1):
    return leaf[0, 0]
  return leaf
