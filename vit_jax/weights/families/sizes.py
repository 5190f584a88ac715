"""Reads the sizes of a classifier from the shapes of its parameters."""

from collections.abc import Mapping
from typing import Any

import ml_collections

from vit_jax.configs import models as model_configs
from vit_jax.weights.families import leaves

_POSEMB = 'Transformer/posembed_input/pos_embedding'


def sizes(
  flat: Mapping[str, tuple[int, ...]], told: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Returns the fields of the ViT, hybrid, Mixer or BiT that has these leaves.

  Args:
    flat: shapes by path.
    told: fields of the model that shapes do not tell; none of them is a size.

  Raises:
    KeyError, IndexError, ValueError: if leaves are missing, or have other
      numbers of dimensions.
  """
  del told
  if 'root_block/conv_root/kernel' in flat:
    return _bit_sizes(flat)
  return (_mixer_sizes if 'stem/kernel' in flat else _vit_sizes)(flat)


def defaults(fields: Mapping[str, Any]) -> ml_collections.ConfigDict:
  """Returns a config of the class of a model that is in no table of sizes."""
  if 'patches' not in fields:
    return model_configs.get_config('bit_r50x1')
  return model_configs.get_config(
    'mixer_b16' if 'num_blocks' in fields else 'b16'
  )


def _vit_sizes(flat):
  down, across, _, width = flat['embedding/kernel']
  num_layers = leaves.count(flat, r'Transformer/encoderblock_(\d+)/')
  block = f'Transformer/encoderblock_{num_layers - 1}/'
  attention = f'{block}MultiHeadDotProductAttention_0/query/kernel'
  transformer = dict(
    num_layers=num_layers,
    mlp_dim=flat[f'{block}MlpBlock_0/Dense_0/kernel'][1],
    num_heads=flat[attention][1],
  )
  transformer.update(_position_fields(flat))
  sizes = dict(
    patches=dict(size=(down, across)),
    hidden_size=width,
    transformer=transformer,
    classifier='token' if 'cls' in flat else 'gap',
  )
  if 'pre_logits/kernel' in flat:
    sizes['representation_size'] = flat['pre_logits/kernel'][1]
  if 'conv_root/kernel' in flat:
    sizes['resnet'] = dict(
      num_layers=leaves.units(flat),
      width_factor=flat['conv_root/kernel'][-1] // 64,
    )
  return sizes


def _position_fields(flat):
  """Returns the fields of position embeddings, see layers/positions.py.

  Parameters do not tell 'stem' from 'shared', nor 'sincos2d' from 'none'.
  """
  if _POSEMB in flat:
    if len(flat[_POSEMB]) != 3:
      raise ValueError(f'{_POSEMB} has the shape {flat[_POSEMB]}')
    return {}
  for leaf, kind in (
    ('pos_embedding', 'learned_1d'),
    ('x_embedding', 'learned_2d'),
    ('relative_embedding', 'relative'),
  ):
    one = 'shared' if kind == 'relative' else 'stem'
    for name, layers in (('posembed_input', one), ('posembed_0', 'every')):
      if f'Transformer/{name}/{leaf}' in flat:
        return {'position_embedding': kind, 'position_layers': layers}
  return {'add_position_embedding': False}


def _mixer_sizes(flat):
  down, across, _, width = flat['stem/kernel']
  tokens_mlp, channels_mlp = (
    f'MixerBlock_0/{part}_mixing/Dense_0/kernel'
    for part in ('token', 'channel')
  )
  return dict(
    patches=dict(size=(down, across)),
    hidden_dim=width,
    num_blocks=leaves.count(flat, r'MixerBlock_(\d+)/'),
    tokens_mlp_dim=flat[tokens_mlp][1],
    channels_mlp_dim=flat[channels_mlp][1],
  )


def _bit_sizes(flat):
  return dict(
    num_layers=leaves.units(flat),
    width_factor=flat['root_block/conv_root/kernel'][-1] / 64,
  )


def describe(sizes: Mapping[str, Any]) -> str:
  """Names a model by its fields, see `sizes`."""
  if 'patches' not in sizes:
    return (
      f'BiT ResNet of {sizes["num_layers"]} units, {sizes["width_factor"]:g} '
      'times the width'
    )
  patch = 'x'.join(str(size) for size in sizes['patches']['size'])
  if 'num_blocks' in sizes:
    return (
      f'Mixer of {sizes["num_blocks"]} blocks, width {sizes["hidden_dim"]}, '
      f'patches {patch}'
    )
  encoder = sizes['transformer']
  resnet = f'R{sizes["resnet"]["num_layers"]}+' if 'resnet' in sizes else ''
  return (
    f'{resnet}ViT of {encoder["num_layers"]} layers, width '
    f'{sizes["hidden_size"]}, MLP {encoder["mlp_dim"]}, '
    f'{encoder["num_heads"]} heads, patches {patch}'
    + ('' if sizes['classifier'] == 'token' else ', mean pooling')
  )
