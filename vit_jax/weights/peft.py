"""Writes adapters (vit_jax/learning/lora.py) as PEFT has them, for Hugging Face's models.

adapter_model.safetensors has the arrays lora_A [r, inputs] and lora_B [outputs, r] of
each adapted layer, and whole layers such as the head; adapter_config.json names them.
"""

from collections.abc import Mapping
import json
from typing import Any

from etils import epath
import numpy as np

from vit_jax.learning import lora
from vit_jax.weights import arrays, reading
from vit_jax.weights.families import base, families, leaves

_PREFIX = 'base_model.model.'


def write(model: Any, dst: epath.Path) -> list[str]:
  """Writes the adapters of a vit_jax.weights.writing.Model; returns notes."""
  family = families.from_config(model.config)
  config, trained = model.adapters
  flat = reading.leaves_of(model)
  names = _names(family, flat)
  converted = family.dump(flat, 'hf')
  state: dict[str, np.ndarray] = {}
  adapted_layers, whole_layers = set(), set()
  for path, x in trained.items():
    kernel, factor = lora.split_name(path)
    if kernel.startswith('embedding/') and _is_scaled(config.pretrained):
      raise ValueError(
        f"'{kernel}' has absorbed the pixel scaling of the base: write the merged "
        'weights (--to=hf)'
      )
    if kernel not in names:
      raise ValueError(
        f"'{kernel}' has no layer of its own in Hugging Face's model: write the merged "
        'weights (--to=hf)'
      )
    array = converted[names[kernel]]
    name = leaves.renamed(names[kernel], family.modules)
    layer = name.rpartition('.')[0]
    if not factor:
      whole_layers.add(layer)
      state[f'{_PREFIX}{name}'] = array
    elif factor == lora.A:
      adapted_layers.add(layer)
      state[f'{_PREFIX}{layer}.lora_A.weight'] = _to_peft_a(x, array.shape)
    else:
      state[f'{_PREFIX}{layer}.lora_B.weight'] = _to_peft_b(x, array.shape)
  for name in converted:
    name = leaves.renamed(name, family.modules)
    layers = {layer for layer in whole_layers if name.startswith(f'{layer}.')}
    if layers and (f'{_PREFIX}{name}' not in state or layers & adapted_layers):
      raise ValueError(
        f"only a part of '{min(layers)}' was trained, or next to an adapter, and PEFT has "
        'whole layers: write the merged weights (--to=hf)'
      )
  fields = {
    'peft_type': 'LORA',
    'base_model_name_or_path': str(config.pretrained).removeprefix('hf://'),
    'r': config.lora.rank,
    'lora_alpha': config.lora.alpha or config.lora.rank,
    'lora_dropout': 0.0,
    'bias': 'none',
    'target_modules': sorted(adapted_layers),
    'modules_to_save': sorted(whole_layers),
    'inference_mode': True,
  }
  (dst / 'adapter_config.json').write_text(json.dumps(fields, indent=1))
  state = {name: np.ascontiguousarray(x) for name, x in state.items()}
  arrays.write_safetensors(dst / 'adapter_model.safetensors', state)
  height, width = model.image_size
  return [
    f'the base is the model from which the run started, for {height}x{width} pixels; '
    'PEFT needs transformers 5 for these names'
  ]


def _to_peft_a(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Returns lora_A [r, *inputs] of a layer whose array in PyTorch has a shape."""
  x = x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.reshape(-1, x.shape[-1]).T
  return x.reshape(-1, *shape[1:])


def _to_peft_b(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Returns lora_B [outputs, r, 1, ...], with as many dimensions as a shape."""
  x = x.reshape(len(x), -1).T  # [outputs, r]
  return x.reshape(*x.shape, *[1] * len(shape[2:]))


def _is_scaled(base: str) -> bool:
  """Returns whether the weights of a base take pixels of another range than [-1, 1]."""
  return reading.read(base).preparation.is_scaled


def _names(family: base.Family, flat: Mapping[str, np.ndarray]) -> dict[str, str]:
  """Returns the names in Hugging Face's model of arrays that stay whole, by path."""
  # Each array is filled with its number, which shows where it is after the conversion.
  paths = dict(enumerate(flat, 1))
  numbered = {path: np.full(flat[path].shape, i, np.int32) for i, path in paths.items()}
  names = {}
  for name, x in family.dump(numbered, 'hf').items():
    if x.min() == x.max() and x.max() in paths:
      names[paths[x.max()]] = name
  return names
