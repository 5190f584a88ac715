"""The models under their public names: `from vit_jax import models`.

Importing this loads neither TensorFlow nor anything of the trainer.

`config.model.kind` says of which class a model is. Research code adds its own,
a Linen module with the fields `num_classes`, `dtype` and `param_dtype`:

  models.register('mine', MyModel)  # Then config.model.kind = 'mine'.
"""

import importlib

import flax.linen as nn
import jax.numpy as jnp

from vit_jax import models_mixer
from vit_jax import models_resnet
from vit_jax import models_vit
from vit_jax.configs import models as model_configs

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

# kind (config.model.kind): the class, or 'module:name' to import it when needed.
KINDS = {
  'vit': 'vit_jax.models_vit:VisionTransformer',
  'mixer': 'vit_jax.models_mixer:MlpMixer',
}


def register(kind: str, cls: type[nn.Module]) -> None:
  """Makes a class known as `config.model.kind`.

  Args:
    kind: its name.
    cls: the class; its fields are the keys of `config.model`.

  Raises:
    ValueError: if the name is that of another class, or `cls` is no Linen module.
  """
  if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
    raise ValueError(
      f"kind='{kind}' must be a class of Linen modules, got {cls}"
    )
  location = f'{cls.__module__}:{cls.__qualname__}'
  if kind in KINDS and _location(KINDS[kind]) != location:
    raise ValueError(
      f"kind='{kind}' is taken by {_location(KINDS[kind])}: use another name"
    )
  KINDS[kind] = cls  # Once more, where a notebook defines its class again.


def _location(entry):
  """Returns 'module:name' of an entry of KINDS."""
  if isinstance(entry, str):
    return entry
  return f'{entry.__module__}:{entry.__qualname__}'


def kind_of(config) -> str:
  """Returns the kind of a model, a key of KINDS.

  Args:
    config: reads `kind`; without one a Mixer is known by `tokens_mlp_dim`, and
      all else is a Vision Transformer.

  Raises:
    ValueError: if there is no such kind.
  """
  kind = config.get('kind')
  if kind is None:
    return 'mixer' if 'tokens_mlp_dim' in config else 'vit'
  if kind not in KINDS:
    raise ValueError(
      f"kind='{kind}' is unknown: use one of {', '.join(KINDS)}, or "
      'models.register another (config.model.kind)'
    )
  return kind


def class_of(config) -> type[nn.Module]:
  """Returns the class of a model's config.

  Args:
    config: see kind_of.

  Raises:
    ValueError: if there is no such kind.
  """
  entry = KINDS[kind_of(config)]
  if not isinstance(entry, str):
    return entry
  module, name = entry.split(':')
  return getattr(importlib.import_module(module), name)


def get_model(name: str, **kwargs) -> nn.Module:
  """Returns the model of that name.

  Args:
    name: 'ViT-B_16', 'R50+ViT-L_32', 'Mixer-B_16', ... or its short form 'b16',
      'r50_l32', 'mixer_b16', or as AugReg's files begin, 'R_Ti_16': see
      `vit_jax.configs.models.get_config`.
    **kwargs: fields of the model, `num_classes` for one; they win over those of
      the config. `cls` as for make_model.

  Raises:
    ValueError: if there is no such model.
  """
  return make_model(model_configs.get_config(name), **kwargs)


def make_model(config, cls: type[nn.Module] | None = None, **kwargs):
  """Returns the model of a config (`config.model` of a run).

  Args:
    config: fields of the model, and possibly `kind`, which says what it is.
    cls: the class, in place of the one that `kind` says: a task's own subclass.
    **kwargs: fields that win over those of the config.

  Returns:
    The model, a Linen module.

  Raises:
    ValueError: if there is no such kind, field or type, or no `num_classes`.
  """
  fields = {**config, **kwargs}
  model = cls or class_of(fields)
  fields.pop('kind', None)
  for key in ('dtype', 'param_dtype'):
    try:
      known = jnp.issubdtype(
        jnp.dtype(fields.get(key, 'float32')), jnp.floating
      )
    except TypeError:
      known = False
    if not known:
      raise ValueError(
        f"{key}='{fields[key]}' is unknown: use 'float32' or 'bfloat16' "
        f'(config.model.{key})'
      )
  known = model.__dataclass_fields__
  if 'num_classes' in known and 'num_classes' not in fields:
    raise ValueError(
      'num_classes is missing: give the width of the head, or 0 for none'
    )
  _check_fields(fields, model)
  if 'encoder' in known:
    encoder = fields.get('encoder', known['encoder'].default)
    models_vit.encoder_fields(encoder, fields.get('transformer') or {})
  return model(**fields)


def _check_fields(given, cls):
  """Raises ValueError if a class has not all of the fields that are given."""
  names = set(cls.__dataclass_fields__) - {'parent', 'name'}
  unknown = sorted(set(given) - names)
  if unknown:
    raise ValueError(
      f'config.model has unknown fields {unknown}: {cls.__name__} takes '
      f'{sorted(names)}'
    )


def patch_grid(config, image_size: tuple[int, int]) -> tuple[int, int]:
  """Returns how many patches (down, across) a model cuts an image into.

  Args:
    config: reads `patches.size` and `resnet`.
    image_size: (height, width) in pixels.
  """
  stride = 1
  if config.get('resnet') is not None:
    # The root divides by 4, every stage but the first by 2.
    stride = 4 * 2 ** max(0, len(config.resnet.num_layers) - 1)
  cells = (-(-size // stride) for size in image_size)
  height, width = (c // p for c, p in zip(cells, config.patches.size))
  return height, width
