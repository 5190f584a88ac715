"""Patch embedding and head, cutting images into patches, checks of arguments.

Shapes in the comments:
  B images    H, W height and width of an image    C channels
  h, w patches down and across    D width of a token
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float
import ml_collections

from vit_jax.configs import models as model_configs, schema
from vit_jax.distributed import sharding
from vit_jax.layers import dtypes, xla_hints
from vit_jax.layers.dtypes import Array


def check_images(images: Array) -> None:
  """Raises ValueError if `images` are not floats [B, H, W, C]."""
  if images.ndim != 4:
    raise ValueError(
      'images must be [batch, height, width, channels], got '
      f'{images.shape}; batches have no device dimension here'
    )
  if jnp.issubdtype(images.dtype, jnp.integer):
    raise ValueError(
      f'images are {images.dtype}: pass floats, as models were trained on, such as '
      'images / 127.5 - 1 of values from 0 to 255'
    )
  _, height, _, channels = images.shape
  if height in (1, 3) and channels not in (1, 3):
    raise ValueError(
      f'images are {list(images.shape)}, which looks like [batch, channels, height, '
      'width]: move the channels to the end, images.transpose(0, 2, 3, 1)'
    )


def check_keys(rngs: Any) -> None:
  """Raises ValueError for a batch of keys, old-style or new-style, or a dict of such."""
  keys = rngs if isinstance(rngs, Mapping) else {'params': rngs}
  for name, key in keys.items():
    dtype = getattr(key, 'dtype', None)
    is_new = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if jnp.ndim(key) > (0 if is_new else 1):
      raise ValueError(
        f"rngs['{name}'] must be one random key, got {dtype}{list(key.shape)}: "
        'pass one key of the batch, or distribute the keys with jax.vmap or '
        'jax.pmap; if the keys come from flax.jax_utils.replicate, pass the key '
        'from before that call'
      )


def sow_mean(module: nn.Module, name: str, x: Float[Array, 'B ... D']) -> None:
  """Sows the mean of a layer for probes, see vit_jax.evaluators.features.

  It is the mean, float32 [B, D], of tokens [B, N, D] or a feature map [B, h, w, D],
  computed only if the collection `intermediates` of the module is mutable.
  """
  if module.is_mutable_collection('intermediates'):
    axes = tuple(range(1, x.ndim - 1))
    module.sow('intermediates', name, x.astype(jnp.float32).mean(axis=axes))


def frozen(value: Any) -> Any:
  """Returns a hashable copy of mappings and lists; other values stay as they are."""

  def plain(value: Any) -> Any:
    if schema.is_mapping(value):
      return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
      return tuple(plain(item) for item in value)
    return value

  value = plain(value)
  return ml_collections.FrozenConfigDict(value) if isinstance(value, dict) else value


class ImageModel(nn.Module):
  """Base class of the models: hashable, and checks the random keys passed to it.

  Models whose fields have equal values are equal, so that a model can be a static
  argument of `jax.jit`. Mappings become ml_collections.FrozenConfigDict, lists tuples.
  """

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if schema.is_mapping(value) or isinstance(value, list):
        object.__setattr__(self, field.name, frozen(value))
    super().__post_init__()

  @nn.nowrap
  def init(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes the variables; see flax.linen.Module.init."""
    check_keys(rngs)
    args, kwargs = sharding.replicate_explicit((args, kwargs))
    return super().init(rngs, *args, **kwargs)

  @nn.nowrap
  def apply(self, variables: Any, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
    """Applies the model to inputs; see flax.linen.Module.apply."""
    if rngs is not None:
      check_keys(rngs)
    compute = super().apply

    def apply(variables: Any, args: Any, rngs: Any, kwargs: Any) -> Any:
      return compute(variables, *args, rngs=rngs, **kwargs)

    inputs = args, kwargs
    return sharding.with_automatic_axes(
      apply, variables, args, rngs, kwargs, batch=inputs
    )


# Initialisers of a head's kernel by name: zeros for classes, another one where the
# direction of the result matters.
HEAD_INITS = {
  'zeros': nn.initializers.zeros,
  'lecun_normal': nn.initializers.lecun_normal(),
}


def make_head(
  num_classes: int,
  bias: float,
  dtype: Any,
  param_dtype: Any,
  init: str = 'zeros',
  name: str = 'head',
) -> nn.Dense:
  """Returns the linear classifier, with an initial bias.

  `dtype` is the type of the preceding layers; logits are float32 or wider. `init` is
  one of HEAD_INITS.
  """
  schema.check('head_init', init, model_configs.HeadInit, 'config.model.')
  return nn.Dense(
    num_classes,
    name=name,
    kernel_init=HEAD_INITS[init],
    bias_init=nn.initializers.constant(bias),
    dtype=jnp.promote_types(dtype, jnp.float32),
    param_dtype=param_dtype,
  )


class PatchEmbedding(nn.Module):
  """Cuts images into patches and maps each to a token (equation 1).

  Computes a convolution whose stride equals its kernel size, as one matrix
  product, which is faster on every backend.
  """

  features: int  # D, the width of a token.
  patch_size: tuple[int, int]  # (height, width) in pixels.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B h w D']:
    """Maps images [B, H, W, C] to a grid of tokens [B, h, w, D].

    Raises ValueError if the patch size does not divide the image size.
    """
    ph, pw = self.patch_size
    b, height, width, c = x.shape
    h, w = height // ph, width // pw
    for name, size, patch in (('height', height, ph), ('width', width, pw)):
      if size < patch:
        raise ValueError(
          f'image {name} {size} is smaller than one patch of {patch}: resize '
          f'the images to a multiple of {patch} (config.pp.crop) or use smaller '
          'patches (config.model.patches.size)'
        )
      if size % patch:
        low = size - size % patch
        raise ValueError(
          f'image {name} {size} is not a multiple of the patch {name} {patch}: '
          f'use {low} or {low + patch} (config.pp.crop) or other patches '
          '(config.model.patches.size)'
        )
    inits, dtype = nn.initializers, self.param_dtype
    shape = (ph, pw, c, self.features)
    kernel = self.param('kernel', inits.lecun_normal(), shape, dtype)
    bias = self.param('bias', inits.zeros, shape[-1:], dtype)
    x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
    x = x.reshape(b, h, ph, w, pw, c).swapaxes(2, 3)  # [B, h, w, ph, pw, C]
    x = x.reshape(b, h, w, ph * pw * c)
    kernel = kernel.reshape(-1, self.features)
    tokens = xla_hints.einsum('bhwp,pd->bhwd', x, kernel) + bias  # [B, h, w, D]
    return tokens.astype(kernel.dtype)


def cut(images: dtypes.ArrayT, grid: tuple[int, int]) -> dtypes.ArrayT:
  """Cuts images into patches, in rows from the top left.

  Maps an array [B, H, W, C] of NumPy or JAX to [B, N, p, q, C], of N = h * w
  patches of p x q pixels. `grid` is (h, w), which divides (H, W).
  """
  b, height, width, c = images.shape
  h, w = grid
  x = images.reshape(b, h, height // h, w, width // w, c).swapaxes(2, 3)
  return x.reshape(b, h * w, height // h, width // w, c)


def paste(patches: dtypes.ArrayT, grid: tuple[int, int]) -> dtypes.ArrayT:
  """Joins patches [B, N, p, q, C] into images [B, H, W, C]; inverts `cut`."""
  b, _, p, q, c = patches.shape
  h, w = grid
  x = patches.reshape(b, h, w, p, q, c).swapaxes(2, 3)
  return x.reshape(b, h * p, w * q, c)
