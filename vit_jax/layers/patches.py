"""What models of images begin and end with: patches of an image, and the head.

Shapes in the comments:
  B images    H, W image height and width    C channels
  h, w patches down and across    D width of a token
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


def check_images(images):
  """Raises ValueError if `images` are not [B, H, W, C]."""
  if images.ndim != 4:
    raise ValueError(
      'images must be [batch, height, width, channels], got '
      f'{images.shape}; batches have no device dimension here'
    )


def check_keys(rngs):
  """Raises ValueError if there is a batch of random keys in place of one.

  Args:
    rngs: a random key, old-style (uint32 [2]) or new, or keys by name.
  """
  keys = rngs if isinstance(rngs, Mapping) else {'params': rngs}
  for name, key in keys.items():
    dtype = getattr(key, 'dtype', None)
    is_new = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if jnp.ndim(key) > (0 if is_new else 1):
      raise ValueError(
        f"rngs['{name}'] must be one random key, got {dtype}{list(key.shape)}: "
        'take one of them, or hand them out by jax.vmap or jax.pmap; where it was '
        'made by flax.jax_utils.replicate, give the key itself'
      )


class ImageModel(nn.Module):
  """What the models share: they say what is wrong with random keys."""

  @nn.nowrap
  def init(self, rngs, *args, **kwargs):
    """Makes the variables; see flax.linen.Module.init."""
    check_keys(rngs)
    return super().init(rngs, *args, **kwargs)

  @nn.nowrap
  def apply(self, variables, *args, rngs=None, **kwargs):
    """Applies the model to inputs; see flax.linen.Module.apply."""
    if rngs is not None:
      check_keys(rngs)
    return super().apply(variables, *args, rngs=rngs, **kwargs)


def make_head(num_classes: int, bias: float, dtype, param_dtype) -> nn.Dense:
  """The linear classifier, of zeros at first; logits are float32 or wider.

  Args:
    num_classes: number of logits.
    bias: initial value of the bias.
    dtype: type of the computation before it.
    param_dtype: type of the parameters.
  """
  return nn.Dense(
    num_classes,
    name='head',
    kernel_init=nn.initializers.zeros,
    bias_init=nn.initializers.constant(bias),
    dtype=jnp.promote_types(dtype, jnp.float32),
    param_dtype=param_dtype,
  )


class PatchEmbedding(nn.Module):
  """Cuts images into patches and maps each to a token (equation 1).

  The same numbers as a convolution whose stride is its size, written as one
  matrix product, which is faster on every backend.

  Attributes:
    features: width D of a token.
    patch_size: (height, width) of a patch in pixels.
    dtype: type of the computation.
    param_dtype: type of the parameters.
  """

  features: int
  patch_size: tuple[int, int]
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    """Maps images [B, H, W, C] to a grid of tokens [B, h, w, D].

    Raises:
      ValueError: if patches do not divide the image.
    """
    ph, pw = self.patch_size
    b, height, width, c = x.shape
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
    kernel = self.param(
      'kernel',
      nn.initializers.lecun_normal(),
      (ph, pw, c, self.features),
      self.param_dtype,
    )
    bias = self.param(
      'bias', nn.initializers.zeros, (self.features,), self.param_dtype
    )
    x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
    h, w = height // ph, width // pw
    x = x.reshape(b, h, ph, w, pw, c).swapaxes(2, 3)  # [B, h, w, ph, pw, C]
    x = x.reshape(b, h, w, ph * pw * c)
    return x @ kernel.reshape(-1, self.features) + bias  # [B, h, w, D]
