"""The ResNet in front of a hybrid ViT (arXiv 2010.11929, section 3.1, B.1).

Post-activation (v1) bottlenecks with GroupNorm and weight-standardised
convolutions, stride on the 3x3 convolution, parameter names as published.

Shapes in the comments: B images, H x W pixels, C channels, F features.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from vit_jax.configs import models as model_configs, schema
from vit_jax.layers import dtypes, resnet
from vit_jax.layers.dtypes import Array


class Epsilons(NamedTuple):
  """Constants that keep divisions finite."""

  norm: float  # Added to the variance in GroupNorm.
  std: float  # Added to the standard deviation of a kernel.
  std_variance: float  # Added to the variance of a kernel.


# By name (config.model.resnet.eps): the constants of the published models, and of
# timm.
EPSILONS = {
  'published': Epsilons(norm=1e-6, std=1e-5, std_variance=0.0),
  'timm': Epsilons(norm=1e-5, std=0.0, std_variance=1e-8),
}


def weight_standardize(
  w: Float[Array, '*axes'], axis: Sequence[int], eps: float, variance_eps: float = 0.0
) -> Float[Array, '*axes']:
  """Subtracts the mean of a kernel and divides by its standard deviation.

  Both are taken over `axis`. `eps` is added to the standard deviation,
  `variance_eps` to the variance.
  """
  w = w - jnp.mean(w, axis=axis, keepdims=True)
  variance = jnp.mean(w**2, axis=axis, keepdims=True)
  return w / (jnp.sqrt(variance + variance_eps) + eps)


class StdConv(nn.Conv):
  """A convolution with a standardised kernel; see flax.linen.Conv."""

  eps: Epsilons = EPSILONS['published']

  @nn.nowrap
  def param(self, name: str, *args: Any, **kwargs: Any) -> Array:
    """Declares a parameter; returns it, standardised if it is the kernel."""
    value = super().param(name, *args, **kwargs)
    if name != 'kernel':
      return value
    inputs = tuple(range(value.ndim - 1))  # All axes but the output channels.
    return weight_standardize(value, inputs, self.eps.std, self.eps.std_variance)


class ResidualUnit(resnet.Bottleneck):
  """One bottleneck, see vit_jax.layers.resnet.Bottleneck."""

  eps: Epsilons = EPSILONS['published']

  def conv(
    self, features: int, size: int, strides: tuple[int, int], name: str
  ) -> nn.Module:
    kwargs = dict(use_bias=False, name=name, **dtypes.of(self, 'eps'))
    return StdConv(features, (size, size), strides, **kwargs)

  def norm(self, name: str) -> nn.Module:
    # A new unit returns its projection only.
    init = nn.initializers.zeros if name == '3' else nn.initializers.ones
    kwargs = dict(epsilon=self.eps.norm, scale_init=init, **dtypes.of(self))
    return nn.GroupNorm(name=f'gn{name}', **kwargs)


class ResNetStage(nn.Module):
  """A sequence of units, of which only the first may be strided."""

  block_size: int  # Number of units.
  nout: int  # Channels F inside each bottleneck.
  first_stride: tuple[int, int] = (1, 1)
  eps: Epsilons = EPSILONS['published']
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B _ _ _']:
    """Maps [B, H, W, C] to [B, H / stride, W / stride, 4 F]."""
    unit = functools.partial(ResidualUnit, self.nout, **dtypes.of(self, 'eps'))
    for i in range(self.block_size):
      strides = (1, 1) if i else self.first_stride
      x = unit(strides=strides, name=f'unit{i + 1}')(x)
    return x


def make_resnet(
  num_layers: Sequence[int],
  width_factor: float = 1,
  eps: str = 'published',
  dtype: Any = jnp.float32,
  param_dtype: Any = jnp.float32,
) -> list[nn.Module]:
  """Creates root block and stages, as submodules of the calling module.

  Returns the layers for `apply_resnet`: convolution and norm of the root, then a stage
  of each number of units in `num_layers`. The root has 64 channels times
  `width_factor`; `eps` is a key of EPSILONS.
  """
  schema.check('eps', eps, model_configs.Epsilons, 'config.model.resnet.')
  epsilons = EPSILONS[eps]
  types = dict(dtype=dtype, param_dtype=param_dtype)
  width = int(64 * width_factor)
  root = dict(use_bias=False, name='conv_root', eps=epsilons, **types)
  layers: list[nn.Module] = [
    StdConv(width, (7, 7), (2, 2), **root),
    nn.GroupNorm(name='gn_root', epsilon=epsilons.norm, **types),
  ]
  for i, units in enumerate(num_layers):
    stride = (2, 2) if i else (1, 1)
    stage = ResNetStage(
      units, width * 2**i, stride, eps=epsilons, name=f'block{i + 1}', **types
    )
    layers.append(stage)
  return layers


def apply_resnet(
  x: Float[Array, 'B H W C'],
  layers: Sequence[nn.Module],
  see: Callable[[int, Array], None] = lambda i, x: None,
) -> Float[Array, 'B _ _ F']:
  """Applies the layers of `make_resnet`.

  Maps images [B, H, W, C] to features. Height and width are a quarter of the image's
  after the root and the first stage, and each further stage halves them. `see` is
  called with i and the features that enter stage i, from 0, and with the number of
  stages and the result.
  """
  conv, norm, *stages = layers
  x = resnet.stem(x, conv, norm, 'SAME')
  for i, stage in enumerate(stages):
    see(i, x)
    x = stage(x)
  see(len(stages), x)
  return x
