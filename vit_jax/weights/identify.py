"""Identifies a model by the shapes of its parameters."""

from collections.abc import Mapping
import re
from typing import Any

import flax.traverse_util
import ml_collections

from vit_jax import models
from vit_jax.configs import models as model_configs
from vit_jax.weights.families import families, vit


def model_config(
  params: Mapping[str, Any], given: Mapping[str, Any] | None = None
) -> ml_collections.ConfigDict | None:
  """Returns a config whose model has these parameters, apart from the head.

  Args:
    params: nested dict of arrays or shapes, with Linen's names.
    given: fields of the model that cannot be inferred from shapes, of a detector or
      iGPT.

  Returns:
    The fields of the model's class without `num_classes`. `model_name` is the name
    in the table of sizes, or a description of the sizes. None if no model of this
    package has these parameters.
  """
  flat = {
    path: tuple(leaf.shape)
    for path, leaf in flax.traverse_util.flatten_dict(params, sep='/').items()
  }
  family = families.of_tree(flat)
  try:
    sizes = family.sizes(flat, given or {})
  except (KeyError, IndexError, ValueError):
    return None  # Leaves are missing, or have other numbers of dimensions.
  for name in model_configs.MODEL_CONFIGS:
    config = model_configs.get_config(name)
    if name not in model_configs.TESTING and _matches(config, sizes):
      break
  else:
    config = ml_collections.ConfigDict(family.defaults(sizes))
    config.model_name = family.describe(sizes)
  with config.ignore_type():
    config.update(sizes)
  return config


def _matches(config, sizes):
  """Returns whether a config of the table has these sizes, as far as files tell."""
  fields = models.class_of(config).__dataclass_fields__
  defaults = {k: getattr(field, 'default', None) for k, field in fields.items()}
  have, want = (
    flax.traverse_util.flatten_dict(x, sep='.')
    for x in ({**defaults, **config.to_dict()}, sizes)
  )
  untold = re.compile(r'pp\..*|.+\.num_heads|(.+\.)?representation_size')
  resnets = [any('resnet.' in key for key in x) for x in (have, want)]
  # An encoder with a variation is not one without it.
  varied = ('registers', *(f'transformer.{key}' for key in vit.VARIATIONS))
  keys = want.keys() | {key for key in have if key.endswith(varied)}
  return resnets[0] == resnets[1] and all(
    (have.get(key) or None) == (want.get(key) or None)  # No registers, or 0.
    for key in keys
    if not untold.fullmatch(key)
  )


def num_classes(params: Mapping[str, Any]) -> int:
  """Returns the number of classes of a head; 0 without a head."""
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  return families.of_tree(flat).num_classes(flat)


_PUBLISHED = re.compile(
  r"""
  cls | register_tokens
  | Transformer/posembed_input/pos_embedding
  | (
      embedding | stem | pre_logits | head
      | Transformer/encoderblock_\d+ / (
          MultiHeadDotProductAttention_0/(query|key|value|out) | MlpBlock_0/(Dense_[01]|gate)
        )
      | MixerBlock_\d+/(token|channel)_mixing/Dense_[01]
    ) / (kernel | bias)
  | (
      (Transformer/encoderblock|MixerBlock)_\d+/LayerNorm_[01]
      | Transformer/encoder_norm | pre_head_layer_norm | gn_root | norm-pre-head
      | block\d+/unit\d+/gn(\d|_proj)
    ) / (scale | bias)
  | Transformer/encoderblock_\d+/LayerScale_[01]/gamma
  | ((root_block/)?conv_root | block\d+/unit\d+/conv(\d|_proj)) / kernel
  """,
  re.VERBOSE,
)


def is_published(path: str) -> bool:
  """Returns whether published models have a parameter of this path."""
  return _PUBLISHED.fullmatch(path) is not None


def misfits(have: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
  """Lists the leaves, by path, whose shapes differ, each with both shapes."""
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
