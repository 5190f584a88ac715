"""The models under their public names: `from vit_jax import models`.

Importing this loads neither TensorFlow nor anything of the trainer.
"""

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


def get_model(name: str, **kwargs) -> VisionTransformer | MlpMixer:
  """Returns the model of that name.

  Args:
    name: 'ViT-B_16', 'R50+ViT-L_32', 'Mixer-B_16', ... or its short form 'b16',
      'r50_l32', 'mixer_b16'; a key of `vit_jax.configs.models.MODEL_CONFIGS`.
    **kwargs: fields of the model, `num_classes` for one; they win over those of
      the config.

  Raises:
    ValueError: if there is no such model.
  """
  return make_model(model_configs.get_config(name), **kwargs)


def make_model(config, **kwargs) -> VisionTransformer | MlpMixer:
  """Returns the model of a config (`config.model` of a run).

  Args:
    config: fields of VisionTransformer, or of MlpMixer, which it is when it has
      `tokens_mlp_dim`.
    **kwargs: fields that win over those of the config.

  Raises:
    ValueError: if there is no such field or type, or no `num_classes`.
  """
  fields = {**config, **kwargs}
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
  if 'num_classes' not in fields:
    raise ValueError(
      'num_classes is missing: give the width of the head, or 0 for none'
    )
  model = MlpMixer if is_mixer(config) else VisionTransformer
  for given, known in (
    (fields, model),
    (fields.get('transformer') or {}, fields.get('encoder', Encoder)),
  ):
    names = set(known.__dataclass_fields__) - {'parent', 'name'}
    unknown = sorted(set(given) - names)
    if unknown:
      raise ValueError(
        f'config.model has unknown fields {unknown}: {known.__name__} takes '
        f'{sorted(names)}'
      )
  return model(**fields)


def is_mixer(config) -> bool:
  """Tells whether a model's config is that of a Mixer."""
  return 'tokens_mlp_dim' in config


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
