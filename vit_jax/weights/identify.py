"""Identifies a model by the shapes of its parameters."""

from collections.abc import Iterable
from collections.abc import Mapping
import math
import re
from typing import Any

import flax.traverse_util
import jax
import ml_collections
import numpy as np

from vit_jax import models
from vit_jax.configs import models as model_configs
from vit_jax.weights.families import families
from vit_jax.weights.families import leaves

_POSEMB = 'Transformer/posembed_input/pos_embedding'


def model_config(
  params: Mapping[str, Any], told: Mapping[str, Any] | None = None
) -> ml_collections.ConfigDict | None:
  """Returns a config whose model has these parameters, apart from the head.

  Args:
    params: nested dict of arrays or shapes, with Linen's names.
    told: fields of a model other than a classifier that shapes do not tell.

  Returns:
    The fields of VisionTransformer, MlpMixer or BitResNet without
    `num_classes`, or those of the class of another `kind`. `model_name` is the
    name in the table of sizes, or a description of the sizes. None if the
    parameters are those of no such model.
  """
  flat = {
    path: tuple(leaf.shape)
    for path, leaf in flax.traverse_util.flatten_dict(params, sep='/').items()
  }
  other = families.of_tree(flat)
  sizes_of, like = next(
    (found for leaf, found in _FAMILIES.items() if leaf in flat),
    (_vit_sizes, 'b16'),
  )
  try:
    sizes = (
      {**other.layout.sizes(flat), **(told or {})} if other else sizes_of(flat)
    )
  except (KeyError, IndexError, ValueError):
    return None  # Leaves are missing, or have other numbers of dimensions.
  for name in model_configs.MODEL_CONFIGS:
    config = model_configs.get_config(name)
    if name not in model_configs.TESTING and _matches(config, sizes):
      break
  else:
    describe = other.layout.describe if other else _describe_sizes
    config = ml_collections.ConfigDict({})
    if not other:
      config = model_configs.get_config(like)
    config.model_name = describe(sizes)
  with config.ignore_type():
    config.update(sizes)
  return config


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
      num_layers=units(flat),
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
    num_layers=units(flat),
    width_factor=flat['root_block/conv_root/kernel'][-1] / 64,
  )


def units(flat: Iterable[str]) -> tuple[int, ...]:
  """Returns the number of units in each stage of a ResNet.

  Args:
    flat: paths of its parameters.
  """
  stages = leaves.count(flat, r'block(\d+)/unit', first=1)
  return tuple(
    leaves.count(flat, rf'block{i + 1}/unit(\d+)/', first=1)
    for i in range(stages)
  )


# A leaf that only one family of models has -> the function that reads the
# family's sizes, and a model of it. All others are Vision Transformers.
_FAMILIES = {
  'root_block/conv_root/kernel': (_bit_sizes, 'bit_r50x1'),
  'stem/kernel': (_mixer_sizes, 'mixer_b16'),
}


def _matches(config, sizes):
  """Returns whether a config of the table has these sizes.

  The pre-logits layer and the number of heads are not compared: some files do
  not tell them.
  """
  if ('resnet' in config) != ('resnet' in sizes):
    return False
  for key, value in sizes.items():
    if key == 'representation_size':
      continue
    have = config[key] if key in config else _default(config, key)
    if isinstance(value, dict):
      if have is None or any(
        have.get(k) != v for k, v in value.items() if k != 'num_heads'
      ):
        return False
    elif have != value:
      return False
  return True


def _default(config, key):
  """Returns the default of a field of a model; None if there is no such field."""
  field = models.class_of(config).__dataclass_fields__.get(key)
  return None if field is None else field.default


def _describe_sizes(sizes):
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


def channels(params: Mapping[str, Any]) -> int:
  """Returns the number of channels of a model's input images."""
  flat = flax.traverse_util.flatten_dict(params, sep='/')
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


def num_classes(params: Mapping[str, Any]) -> int:
  """Returns the number of classes that a head tells apart; 0 for no head."""
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  for path in ('head/bias', 'class_head/bias', 'class_head/kernel'):
    if path in flat:
      # A detector's last one is "no object".
      return math.prod(flat[path].shape[-1:]) - ('query_embedding' in flat)
  return 0


def inputs(
  config, params: Mapping[str, Any], image_size: tuple[int, int]
) -> jax.ShapeDtypeStruct:
  """Returns shape and type of a model's input, one image."""
  if config.get('kind') == 'igpt':
    return jax.ShapeDtypeStruct((1, config.num_positions), np.dtype('int32'))
  return jax.ShapeDtypeStruct(
    (1, *image_size, channels(params)), np.dtype('float32')
  )


_PUBLISHED = re.compile(
  r"""
  cls
  | (embedding | stem | pre_logits | head) / (kernel | bias)
  | Transformer/posembed_input/pos_embedding
  | Transformer/encoderblock_\d+ / (
      LayerNorm_[01] / (scale | bias)
      | MultiHeadDotProductAttention_0/(query|key|value|out) / (kernel | bias)
      | MlpBlock_0/Dense_[01] / (kernel | bias)
    )
  | MixerBlock_\d+ / (
      LayerNorm_[01] / (scale | bias)
      | (token|channel)_mixing/Dense_[01] / (kernel | bias)
    )
  | (
      Transformer/encoder_norm | pre_head_layer_norm | gn_root | norm-pre-head
    ) / (scale | bias)
  | (root_block/)?conv_root/kernel
  | block\d+/unit\d+ / (
      conv(\d|_proj)/kernel
      | gn(\d|_proj) / (scale | bias)
    )
  """,
  re.VERBOSE,
)


def is_published(path: str) -> bool:
  """Returns whether published models have a parameter of this path."""
  return _PUBLISHED.fullmatch(path) is not None


def misfits(have: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
  """Lists the leaves whose shapes differ, each with both shapes.

  Args:
    have: leaves of weights, arrays or shapes, by '/'-joined path.
    want: leaves of a model, likewise.
  """
  return [
    f'{path}: {tuple(have[path].shape)} in the weights, '
    f'{tuple(want[path].shape)} in the model'
    for path in sorted(want.keys() & have.keys())
    if tuple(have[path].shape) != tuple(want[path].shape)
  ]


def describe(params: Mapping[str, Any]) -> str:
  """Names the model that has these parameters, for messages."""
  config = model_config(params)
  return 'no model of this package' if config is None else config.model_name
