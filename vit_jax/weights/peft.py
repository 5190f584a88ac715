"""Writes adapters (vit_jax/learning/lora.py) as PEFT has them, for Hugging Face's models.

adapter_model.safetensors has the arrays lora_A [r, inputs] and lora_B [outputs, r] of
each adapted layer, and whole layers such as the head; adapter_config.json names them.
"""

from collections.abc import Iterable, Mapping
import json
from typing import Any, NamedTuple

from etils import epath
import numpy as np

from vit_jax.learning import lora
from vit_jax.weights import arrays, reading
from vit_jax.weights.families import base, families, leaves

_PREFIX = 'base_model.model.'


class _Layers(NamedTuple):
  """The layers that a run has trained.

  Attributes:
    state: arrays by PEFT's names.
    adapted: names of layers with adapters.
    whole: names of layers that were trained as a whole.
  """

  state: dict[str, np.ndarray]
  adapted: set[str]
  whole: set[str]


def write(model: Any, dst: epath.Path) -> list[str]:
  """Writes the adapters of a vit_jax.weights.writing.Model; returns notes."""
  config, trained = model.adapters
  layers = _trained_layers(model, trained, config.pretrained)
  fields = {
    'peft_type': 'LORA',
    'base_model_name_or_path': str(config.pretrained).removeprefix('hf://'),
    'r': config.lora.rank,
    'lora_alpha': config.lora.alpha or config.lora.rank,
    'lora_dropout': 0.0,
    'bias': 'none',
    'target_modules': sorted(layers.adapted),
    'modules_to_save': sorted(layers.whole),
    'inference_mode': True,
  }
  (dst / 'adapter_config.json').write_text(json.dumps(fields, indent=1))
  arrays.write_safetensors(dst / 'adapter_model.safetensors', layers.state)
  height, width = model.image_size
  return [
    f'the base is the model from which the run started, for {height}x{width} pixels; '
    'PEFT needs transformers 5 for these names'
  ]


def _trained_layers(
  model: Any, trained: Mapping[str, np.ndarray], pretrained: str
) -> _Layers:
  """Returns what was trained, by path, under Hugging Face's names."""
  family = families.from_config(model.config)
  flat = reading.leaves_of(model)
  names = _names(family, flat)
  converted = family.dump(flat, 'hf')
  layers = _Layers({}, set(), set())
  for path, x in trained.items():
    kernel, factor = lora.split_name(path)
    if kernel.startswith('embedding/') and _is_scaled(pretrained):
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
      layers.whole.add(layer)
    elif factor == lora.A:
      layers.adapted.add(layer)
      name = f'{layer}.lora_A.weight'
      array = _to_peft_a(x, array.shape)
    else:
      name = f'{layer}.lora_B.weight'
      array = _to_peft_b(x, array.shape)
    layers.state[f'{_PREFIX}{name}'] = np.ascontiguousarray(array)
  _check_whole(layers, [leaves.renamed(name, family.modules) for name in converted])
  return layers


def _check_whole(layers: _Layers, names: Iterable[str]) -> None:
  """Raises ValueError if a layer was trained in part, or next to an adapter."""
  for name in names:
    for layer in layers.whole:
      if not name.startswith(f'{layer}.'):
        continue
      if f'{_PREFIX}{name}' not in layers.state or layer in layers.adapted:
        raise ValueError(
          f"only a part of '{layer}' was trained, or next to an adapter, and PEFT has "
          'whole layers: write the merged weights (--to=hf)'
        )


def _to_peft_a(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Returns lora_A [r, *inputs] of a layer whose array in PyTorch has a shape."""
  if x.ndim == 4:
    x = x.transpose(3, 2, 0, 1)
  else:
    x = x.reshape(-1, x.shape[-1]).T
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
  numbered = {}
  for i, path in paths.items():
    numbered[path] = np.full(flat[path].shape, i, np.int32)
  names = {}
  for name, x in family.dump(numbered, 'hf').items():
    if x.min() == x.max() and x.max() in paths:
      names[paths[x.max()]] = name
  return names
