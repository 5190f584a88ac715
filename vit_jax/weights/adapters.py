"""Merges low-rank adapters (LoRA, arXiv 2106.09685) as PEFT writes them into a base.

adapter_config.json and adapter_model.safetensors are a change of another model, their
base. vit_jax/weights/peft.py writes such files.
"""

import collections
from collections.abc import Iterable, Mapping
import math
import re
from typing import Any, Literal, NamedTuple

import numpy as np

from vit_jax.configs import schema
from vit_jax.weights import descriptions
from vit_jax.weights.families import leaves

CONFIG = 'adapter_config.json'
_PREFIX = re.compile(r'^base_model\.model\.')
# PEFT's wrappers of a layer, which are in names of biases and of whole layers.
_WRAPPER = re.compile(r'\.(base_layer|(modules_to_save\.)?default)(?=\.)')
_LORA = '.lora_'
# Values of init_lora_weights with which PEFT keeps the base as it is. With others, such
# as PiSSA, it subtracts the initial adapters from the base whenever it loads them.
_Initialization = bool | Literal['gaussian', 'eva', 'orthogonal'] | None


class Adapters(NamedTuple):
  """Adapters of a model in another program.

  Attributes:
    state: arrays by PEFT's names.
    alpha: the product of two low-rank arrays is multiplied by alpha / rank.
    by_root: whether it is multiplied by alpha / sqrt(rank) instead (rsLoRA).
    ranks: the ranks that the config allows.
  """

  state: dict[str, np.ndarray]
  alpha: float
  by_root: bool
  ranks: set[int]


def has_adapters(names: Iterable[str]) -> bool:
  """Returns whether a state dict with these names has adapters."""
  return any(_LORA in name for name in names)


def describe_base(config: Mapping[str, Any]) -> str:
  """Returns the base that adapter_config.json names, as a phrase for messages."""
  name = descriptions.field(config, 'base_model_name_or_path', str)
  return 'an unnamed model' if name is None else f'the model {name!r:.200}'


def from_config(config: Mapping[str, Any], state: dict[str, np.ndarray]) -> Adapters:
  """Returns adapters as adapter_config.json describes them.

  ValueError if PEFT computes something else with them than this package.
  """
  descriptions.field(config, 'peft_type', Literal['LORA'])
  descriptions.check_supported(
    config, use_dora=False, fan_in_fan_out=False, alpha_pattern={}, lora_bias=False
  )
  alpha = descriptions.field(config, 'lora_alpha', schema.Positive)
  if alpha is None:
    raise ValueError('it lacks lora_alpha: use the adapter_config.json that PEFT wrote')
  descriptions.field(config, 'init_lora_weights', _Initialization)
  by_root = descriptions.field(config, 'use_rslora', bool, False)
  rank = descriptions.field(config, 'r', schema.Count, 8)  # PEFT's default.
  other_ranks = descriptions.field(config, 'rank_pattern', dict | None) or {}
  return Adapters(state, float(alpha), by_root, {rank, *other_ranks.values()})


def merge(
  flat: dict[str, np.ndarray], adapters: Adapters, old_names: Iterable[tuple[str, str]]
) -> None:
  """Adds adapters to the arrays of their base, in place.

  Args:
    flat: arrays of the base by name.
    adapters: the adapters.
    old_names: how both are renamed, see vit_jax.weights.families.leaves.Naming.

  Raises:
    ValueError: if the base lacks a layer, or has another shape.
  """
  leaves.rename(flat, old_names)
  factors_by_name: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
  for name, x in adapters.state.items():
    name = _WRAPPER.sub('', _PREFIX.sub('', name))
    layer, is_lora, factor = name.partition(_LORA)
    if is_lora:
      weight = leaves.renamed(f'{layer}.weight', old_names)
      factors_by_name[weight][factor] = x
    else:  # A layer that was trained as a whole, such as the head.
      flat[leaves.renamed(name, old_names)] = x
  for name, factors in factors_by_name.items():
    if factors.keys() != {'A.weight', 'B.weight'}:
      raise ValueError(f"the adapter of '{name}' has {sorted(factors)}, not A and B")
    a, b = factors['A.weight'], factors['B.weight']
    rank = len(a)
    shape = flat[name].shape if name in flat else None
    if (len(b), *a.shape[1:]) != shape or b.shape[1] != rank:
      raise ValueError(
        f"the adapter of '{name}' has the shapes {a.shape} and {b.shape}, but the layer "
        f'of the base {shape}: use the base that it was trained with'
      )
    if rank not in adapters.ranks:
      raise ValueError(
        f"the adapter of '{name}' has rank {rank}, and {CONFIG} allows "
        f'{sorted(adapters.ranks)}: use the {CONFIG} of these adapters'
      )
    product = np.tensordot(b.reshape(len(b), rank), a, 1)
    scale = adapters.alpha / (math.sqrt(rank) if adapters.by_root else rank)
    flat[name] = (flat[name] + scale * product).astype(flat[name].dtype)
