"""Factors on the learning rates of parameters.

`config.lr_multipliers` and adapters give rules; `config.layer_decay` makes the learning
rate decrease from block to block (BEiT, arXiv 2106.08254, section 3.2). As in timm, the
head, attention pooling and the norm of pooled tokens then have the full rate; the last
block of a Vision Transformer and the norm after it, `layer_decay` times the rate; the
block before, `layer_decay` squared; and so on down to the embeddings. What a model adds
to a Vision Transformer, such as a detector's decoder, has the full rate.
"""

from collections.abc import Callable
import operator
import re
from typing import Any

import jax
import ml_collections
import optax

from vit_jax.configs import models as model_configs
from vit_jax.distributed import sharding
from vit_jax.learning import lora, optim

_AFTER_ENCODER = re.compile(
  '^(head|head_dist|pre_logits|MAPHead_0|pool_norm|class_head|mask_mlp|upscale_[0-9]+)/'
  '|^queries$'
)
_BLOCK = re.compile('encoderblock_([0-9]+)/')


def make(
  config: ml_collections.ConfigDict, make_params: Callable[[], optax.Params]
) -> Any:
  """Returns the factor of each parameter, a tree of floats; None if all are 1.

  A factor of 0 freezes a parameter. `make_params` returns the parameters or their
  shapes, and is called only if there are factors. Raises ValueError if a rule applies to
  no parameter, or `layer_decay` is set for a model without Vision Transformer.
  """
  rules = lora.rules(config)
  if not rules and config.layer_decay == 1:
    return None
  params = make_params()
  factors = optim.multipliers(rules, params)
  if config.layer_decay == 1:
    return factors
  return jax.tree.map(operator.mul, factors, _by_layer(config, params))


def _by_layer(config: ml_collections.ConfigDict, params: optax.Params) -> Any:
  """Returns the factors of `layer_decay`, a tree of floats."""
  model = model_configs.vit_of(config.model)
  if not model.get('transformer'):
    raise ValueError(
      f'layer_decay={config.layer_decay} needs a Vision Transformer, and this model has '
      'none: leave it out (config.layer_decay)'
    )
  num_layers = model.transformer.num_layers
  prefixes = tuple(f'{name}/' for name in model_configs.parts_of(config.model))

  def factor(path: sharding.KeyPath, _: jax.Array) -> float:
    name = sharding.path_name(path)
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), '')
    if prefixes and not prefix:
      return 1.0
    name = name.removeprefix(prefix)
    if _AFTER_ENCODER.search(name):
      return 1.0
    return config.layer_decay ** _distance(name, num_layers)

  return jax.tree_util.tree_map_with_path(factor, params)


def _distance(name: str, num_layers: int) -> int:
  """Returns the number of layers from a parameter's layer to the head."""
  if block := _BLOCK.search(name):
    return num_layers - int(block[1])
  if 'encoder_norm/' in name:
    return 1
  return num_layers + 1
