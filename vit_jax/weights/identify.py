"""Which model is it? Answers from the shapes of the parameters alone."""

from collections.abc import Mapping
import re
from typing import Any

import flax.traverse_util
import ml_collections

from vit_jax.configs import models as model_configs

_POSEMB = 'Transformer/posembed_input/pos_embedding'


def _numbers(flat, pattern):
  """The numbers that a pattern finds in the paths, largest first."""
  found = {int(m[1]) for m in (re.match(pattern, path) for path in flat) if m}
  return sorted(found, reverse=True)


def model_config(params: Mapping[str, Any]) -> ml_collections.ConfigDict | None:
  """Returns a config whose model has these parameters, but for the head.

  Args:
    params: nested dict of arrays or shapes, Linen's names.

  Returns:
    The fields of VisionTransformer or MlpMixer but for `num_classes`; a model
    of the table of sizes has its `model_name`, any other is named after its
    sizes. None if these are the parameters of no such model.
  """
  flat = {
    path: tuple(leaf.shape)
    for path, leaf in flax.traverse_util.flatten_dict(params, sep='/').items()
  }
  try:
    sizes = _mixer_sizes(flat) if 'stem/kernel' in flat else _vit_sizes(flat)
  except (KeyError, IndexError, ValueError):
    return None
  for name in model_configs.MODEL_CONFIGS:
    config = model_configs.get_config(name)
    if name != 'testing' and _matches(config, sizes):
      break
  else:
    config = model_configs.get_config(
      'mixer_b16' if 'stem/kernel' in flat else 'b16'
    )
    config.model_name = _describe_sizes(sizes)  # fmt: skip
  with config.ignore_type():
    config.update(sizes)
  return config


def _vit_sizes(flat):
  *patch, _, width = flat['embedding/kernel']
  blocks = _numbers(flat, r'Transformer/encoderblock_(\d+)/')
  block = f'Transformer/encoderblock_{blocks[0]}/'
  attention = f'{block}MultiHeadDotProductAttention_0/query/kernel'
  transformer = dict(
    num_layers=blocks[0] + 1,
    mlp_dim=flat[f'{block}MlpBlock_0/Dense_0/kernel'][1],
    num_heads=flat[attention][1],
  )
  if _POSEMB not in flat:
    transformer['add_position_embedding'] = False
  sizes = dict(
    patches=dict(size=tuple(patch)),
    hidden_size=width,
    transformer=transformer,
    classifier='token' if 'cls' in flat else 'gap',
  )
  if 'pre_logits/kernel' in flat:
    sizes['representation_size'] = flat['pre_logits/kernel'][1]
  if 'conv_root/kernel' in flat:
    stages = _numbers(flat, r'block(\d+)/unit')[::-1]
    sizes['resnet'] = dict(
      num_layers=tuple(
        _numbers(flat, rf'block{i}/unit(\d+)/')[0] for i in stages
      ),
      width_factor=flat['conv_root/kernel'][-1] // 64,
    )
  return sizes


def _mixer_sizes(flat):
  *patch, _, width = flat['stem/kernel']
  blocks = _numbers(flat, r'MixerBlock_(\d+)/')
  return dict(
    patches=dict(size=tuple(patch)),
    hidden_dim=width,
    num_blocks=blocks[0] + 1,
    tokens_mlp_dim=flat['MixerBlock_0/token_mixing/Dense_0/kernel'][1],
    channels_mlp_dim=flat['MixerBlock_0/channel_mixing/Dense_0/kernel'][1],
  )


def _matches(config, sizes):
  """Whether a config of the table has these sizes.

  The pre-logits layer and the number of heads, which some files do not tell, may
  be others.
  """
  if ('resnet' in config) != ('resnet' in sizes):
    return False
  for key, value in sizes.items():
    if key == 'representation_size':
      continue
    have = config.get(key)
    if isinstance(value, dict):
      if have is None or any(
        have.get(k) != v for k, v in value.items() if k != 'num_heads'
      ):
        return False
    elif have != value:
      return False
  return True


def _describe_sizes(sizes):
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


def describe(params: Mapping[str, Any]) -> str:
  """Names the model that has these parameters, for messages."""
  config = model_config(params)
  return 'no model of this package' if config is None else config.model_name
