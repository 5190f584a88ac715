"""The models under their public names: `from vit_jax import models`.

Importing this module loads neither TensorFlow nor the trainer.

`config.model.kind` names the class of a model. Research code can register its
own, a Linen module with the fields `num_classes`, `dtype` and `param_dtype`:

  models.register('mine', MyModel)  # Then config.model.kind = 'mine'.
"""

from collections.abc import Mapping
import fnmatch
import importlib
from typing import Any

import flax.linen as nn
import ml_collections

from vit_jax import models_mixer, models_resnet, models_vit
from vit_jax.configs import models as model_configs
from vit_jax.layers import dtypes

AddPositionEmbs = models_vit.AddPositionEmbs
Encoder = models_vit.Encoder
Encoder1DBlock = models_vit.Encoder1DBlock
IdentityLayer = models_vit.IdentityLayer
MlpBlock = models_vit.MlpBlock
MlpMixer = models_mixer.MlpMixer
ResidualUnit = models_resnet.ResidualUnit
ResNetStage = models_resnet.ResNetStage
StdConv = models_resnet.StdConv
VisionTransformer = models_vit.VisionTransformer

# Kind (config.model.kind) -> class, or 'module:name' to import when needed.
KINDS: dict[str, str | type[nn.Module]] = {
  'vit': 'vit_jax.models_vit:VisionTransformer',
  'mixer': 'vit_jax.models_mixer:MlpMixer',
  'bit': 'vit_jax.models_bit:BitResNet',
  'detr': 'vit_jax.models_detr:Detr',
  'eomt': 'vit_jax.models_eomt:Eomt',
  'igpt': 'vit_jax.models_igpt:ImageGPT',
  'lit': 'vit_jax.models_lit:LitModel',
}


def __getattr__(name: str) -> Any:
  # A name of the original, loaded when it is asked for, as other kinds are.
  if name == 'LitModel':
    return class_of({'kind': 'lit'})
  raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def _location(cls: type) -> str:
  return f'{cls.__module__}:{cls.__qualname__}'


def register(kind: str, cls: type[nn.Module]) -> None:
  """Registers a class, whose fields become keys of `config.model`, under a kind.

  Raises ValueError if another class has this kind.
  """
  registered = KINDS.get(kind, cls)
  path = registered if isinstance(registered, str) else _location(registered)
  if path != _location(cls):
    raise ValueError(f"kind='{kind}' is taken by {path}: use another name")
  KINDS[kind] = cls  # Replaces the class if a notebook defines it again.


def kind_of(config: Mapping[str, Any] | ml_collections.ConfigDict) -> str:
  """Returns the kind of a model, a key of KINDS; raises ValueError otherwise.

  Without `kind` in the config, a model with `tokens_mlp_dim` is a Mixer and any
  other a Vision Transformer.
  """
  kind = model_configs.kind_of(config)
  if kind not in KINDS:
    raise ValueError(
      f"kind='{kind}' is unknown: use one of {', '.join(KINDS)}, or add it with "
      'models.register (config.model.kind)'
    )
  return kind


def class_of(config: Mapping[str, Any] | ml_collections.ConfigDict) -> type[nn.Module]:
  """Returns the class of a model, see kind_of."""
  entry = KINDS[kind_of(config)]
  if not isinstance(entry, str):
    return entry
  module, name = entry.split(':')
  return getattr(importlib.import_module(module), name)


def get_model(name: str, **kwargs: Any) -> nn.Module:
  """Returns a model by name; raises ValueError if the name is unknown.

  Args:
    name: a name such as 'ViT-B_16', 'R50+ViT-L_32', 'BiT-R50x1' or 'iGPT-S',
      its short form such as 'b16', 'r50_l32', 'bit_r50x1' or 'igpt_s', or the
      beginning of an AugReg file such as 'R_Ti_16'; see
      `vit_jax.configs.models.get_config`.
    **kwargs: fields of the model, such as `num_classes`, which override the
      config; also `cls`, see `make_model`.
  """
  return make_model(model_configs.get_config(name), **kwargs)


def list_models(pattern: str = '*') -> list[str]:
  """Returns the short names of models, all of which `get_model` takes.

  `pattern` is matched with the short name and the long one, ignoring case; '*dino*'
  lists 'dinov2_s14' and others.
  """
  return [
    short
    for short, name in model_configs.SHORT_NAMES.items()
    if fnmatch.fnmatchcase(short, pattern.lower())
    or fnmatch.fnmatchcase(name.lower(), pattern.lower())
  ]


def make_model(
  config: Mapping[str, Any] | ml_collections.ConfigDict,
  cls: type[nn.Module] | None = None,
  **kwargs: Any,
) -> nn.Module:
  """Returns the model of a config (`config.model` of a run), a Linen module.

  `kwargs` are fields that override the config; `cls`, such as a task's own subclass,
  overrides its `kind`. Raises ValueError if the kind or a field is unknown, and
  TypeError if a field is missing, such as `num_classes`.
  """
  fields = {**config, **kwargs}
  model = cls or class_of(fields)
  fields.pop('kind', None)
  if 'dtype' in fields:
    fields['dtype'] = dtypes.resolve(fields['dtype'])
  known_fields = model.__dataclass_fields__
  names = set(known_fields) - {'parent', 'name'}
  unknown = sorted(set(fields) - names)
  if unknown:
    raise ValueError(
      f'config.model has unknown fields {unknown}: {model.__name__} takes '
      f'{sorted(names)}'
    )
  if 'encoder' in known_fields:
    encoder = fields.get('encoder', known_fields['encoder'].default)
    if fields.get('transformer') is not None:
      models_vit.encoder_fields(encoder, fields['transformer'])
  return model(**fields)


def patch_grid(
  config: ml_collections.ConfigDict, image_size: tuple[int, int]
) -> tuple[int, int] | None:
  """Returns the number of patches (down, across) of an image (height, width).

  None for a model without patches, such as BiT.
  """
  return None if config.get('patches') is None else count_patches(config, image_size)


def count_patches(
  config: ml_collections.ConfigDict, image_size: tuple[int, int]
) -> tuple[int, int]:
  """Returns the `patch_grid` of a model with patches."""
  stride = 1
  if config.get('resnet') is not None:
    # The root block divides the size by 4, every stage but the first by 2.
    stride = 4 * 2 ** max(0, len(config.resnet.num_layers) - 1)
  cells = (-(-size // stride) for size in image_size)
  height, width = (c // p for c, p in zip(cells, config.patches.size))
  return height, width
