"""Identifies a model by the shapes of its parameters."""

from collections.abc import Mapping
import functools
import re
from typing import Any

import flax.traverse_util
import ml_collections

from vit_jax import models
from vit_jax.configs import models as model_configs
from vit_jax.layers import position_kinds
from vit_jax.weights.families import families, vit

# Fields that shapes do not determine.
_NOT_IN_FILES = re.compile(r'pp\..*|.+\.num_heads|(.+\.)?representation_size')


def model_config(
  params: Mapping[str, Any], known_fields: Mapping[str, Any] | None = None
) -> ml_collections.ConfigDict | None:
  """Returns a config whose model has these parameters, apart from the head.

  Args:
    params: nested dict of arrays or shapes, with Linen's names.
    known_fields: fields of the model that cannot be inferred from shapes, of a detector or
      iGPT.

  Returns:
    The fields of the model's class without `num_classes`. `model_name` is the name
    in the table of sizes, or a description of the sizes. None if no model of this
    package has these parameters.
  """
  flat = {}
  for path, leaf in flax.traverse_util.flatten_dict(params, sep='/').items():
    flat[path] = tuple(leaf.shape)
  family = families.from_tree(flat)
  try:
    sizes = family.sizes(flat, known_fields or {})
  except (KeyError, IndexError, ValueError):
    return None  # Leaves are missing, or have other numbers of dimensions.
  for name in model_configs.MODEL_CONFIGS:
    if name not in model_configs.TESTING and _matches(_fields_of(name), sizes):
      config = model_configs.get_config(name)
      break
  else:
    config = ml_collections.ConfigDict(family.defaults(sizes))
    config.model_name = family.describe(sizes)
  with config.ignore_type():
    config.update(sizes)
  return config


@functools.cache
def _fields_of(name: str) -> dict[str, Any]:
  """Returns the fields of a model of the table with their defaults, by path."""
  config = model_configs.MODEL_CONFIGS[name]
  dataclass_fields = models.class_of(config).__dataclass_fields__
  fields = {k: getattr(x, 'default', None) for k, x in dataclass_fields.items()}
  fields |= config.to_dict()
  return flax.traverse_util.flatten_dict(fields, sep='.')


def _matches(config_fields: Mapping[str, Any], sizes: Mapping[str, Any]) -> bool:
  """Returns whether a model of the table has these sizes, as far as files tell."""
  file_fields = flax.traverse_util.flatten_dict(sizes, sep='.')
  if _has_resnet(config_fields) != _has_resnet(file_fields):
    return False
  has_positions = file_fields.get('transformer.add_position_embedding', True)
  kind = config_fields.get('transformer.position_embedding', 'learned_1d')
  if has_positions != (position_kinds.table_kind(kind) != 'none'):
    return False
  # An encoder with a variation, or with queries, is not one without it.
  variations = (
    'num_queries',
    'registers',
    *(f'transformer.{key}' for key in vit.VARIATIONS),
  )
  keys = file_fields.keys() | {x for x in config_fields if x.endswith(variations)}
  for key in keys:
    if _NOT_IN_FILES.fullmatch(key):
      continue
    # No registers, or 0.
    if (config_fields.get(key) or None) != (file_fields.get(key) or None):
      return False
  return True


def _has_resnet(fields: Mapping[str, Any]) -> bool:
  return any('resnet.' in key for key in fields)


def num_classes(params: Mapping[str, Any]) -> int:
  """Returns the number of classes of a head; 0 without a head."""
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  return families.from_tree(flat).num_classes(flat)


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


def misfits(leaves: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
  """Lists the leaves, by path, whose shapes differ, each with both shapes."""
  problems = []
  for path in sorted(expected.keys() & leaves.keys()):
    shape = tuple(leaves[path].shape)
    model_shape = tuple(expected[path].shape)
    if shape != model_shape:
      problems.append(f'{path}: {shape} in the weights, {model_shape} in the model')
  return problems


def describe(params: Mapping[str, Any]) -> str:
  """Names the model that has these parameters, for messages."""
  config = model_config(params)
  return 'no model of this package' if config is None else config.model_name
