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
_NORM = (('scale', 'gamma'), ('bias', 'beta'))
# Table of a BiT ResNet, see vit_jax.weights.families.leaves.
_BIT: tuple[leaves.Group, ...] = (
  (
    'block{1}/unit{01}/',
    'resnet/block{1}/unit{01}/',
    (
      ('conv_proj/kernel', 'same', 'a/proj/standardized_conv2d/kernel'),
      *(
        (f'conv{i + 1}/kernel', 'same', f'{x}/standardized_conv2d/kernel')
        for i, x in enumerate('abc')
      ),
      *(
        (f'gn{i + 1}/{ours}', 'same', f'{x}/group_norm/{theirs}')
        for i, x in enumerate('abc')
        for ours, theirs in _NORM
      ),
    ),
  ),
  (
    '',
    'resnet/',
    (
      ('root_block/conv_root/kernel', 'same', 'root_block/standardized_conv2d/kernel'),
      *((f'norm-pre-head/{x}', 'same', f'group_norm/{y}') for x, y in _NORM),
      *((f'head/{x}', 'same', f'head/conv2d/{x}') for x in ('kernel', 'bias')),
    ),
  ),
)


def linen_names(names: Iterable[str]) -> dict[str, str]:
  """Returns the path in Linen of each name in a file."""
  # Some BiT files number the convolutions: standardized_conv2d_3.
  plain = {
    name: re.sub(r'^(opt/target/)?(params/)?|(?<=conv2d)_\d+(?=/)', '', name)
    for name in names
  }
  table = leaves.walk(_BIT, plain.values(), by_path=False)
  bit = {name: path for path, _, name in table}
  return {name: bit.get(x) or _in_block(x, _BLOCK) for name, x in plain.items()}


def file_names(paths: Iterable[str]) -> dict[str, str]:
  """Returns the name in a file of each path in Linen."""
  table = leaves.walk(_BIT, paths, by_path=True) if vit.is_bit(paths) else ()
  bit = {path: name for path, _, name in table}
  names = {linen: name for name, linen in _BLOCK.items()}
  return {path: bit.get(path) or _in_block(path, names) for path in paths}


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
