"""The ResNet in front of a hybrid ViT (arXiv 2010.11929, section 3.1, B.1).

Post-activation (v1) bottlenecks with GroupNorm and weight-standardised
convolutions, stride on the 3x3 convolution, parameter names as published.

Shapes in the comments: B images, H x W pixels, C channels, F features.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


def weight_standardize(w, axis, eps):
  """Subtracts the mean of `w` over `axis` and divides by its deviation + eps."""
  w = w - jnp.mean(w, axis=axis, keepdims=True)
  return w / (jnp.std(w, axis=axis, keepdims=True) + eps)


class StdConv(nn.Module):
  """A convolution without bias whose kernel is standardised before its use.

  Attributes:
    features: number F of output channels.
    kernel_size: (height, width) of the kernel.
    strides: (down, across).
    dtype: type of the computation.
    param_dtype: type of the parameters.
  """

  features: int
  kernel_size: tuple[int, int] = (1, 1)
  strides: tuple[int, int] = (1, 1)
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    """Maps [B, H, W, C] to [B, H / stride, W / stride, F]."""
    kernel = self.param(
      'kernel',
      nn.initializers.lecun_normal(),
      (*self.kernel_size, x.shape[-1], self.features),
      self.param_dtype,
    )
    kernel = weight_standardize(kernel, axis=(0, 1, 2), eps=1e-5)
    return jax.lax.conv_general_dilated(
      x.astype(self.dtype),
      kernel.astype(self.dtype),
      window_strides=self.strides,
      padding='SAME',
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )


class ResidualUnit(nn.Module):
  """One bottleneck: 1x1, 3x3, 1x1 to 4 F channels, added to the input.

  Attributes:
    features: channels F inside the bottleneck.
    strides: strides of the 3x3 convolution and of the projection.
    dtype: type of the computation.
    param_dtype: type of the parameters.
  """

  features: int
  strides: tuple[int, int] = (1, 1)
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    """Maps [B, H, W, C] to [B, H / stride, W / stride, 4 F]."""
    types = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    out = 4 * self.features
    residual = x
    if x.shape[-1] != out or self.strides != (1, 1):
      residual = StdConv(out, strides=self.strides, name='conv_proj', **types)(
        x
      )
      residual = nn.GroupNorm(name='gn_proj', **types)(residual)
    y = StdConv(self.features, name='conv1', **types)(x)
    y = nn.relu(nn.GroupNorm(name='gn1', **types)(y))
    y = StdConv(self.features, (3, 3), self.strides, name='conv2', **types)(y)
    y = nn.relu(nn.GroupNorm(name='gn2', **types)(y))
    y = StdConv(out, name='conv3', **types)(y)
    y = nn.GroupNorm(name='gn3', scale_init=nn.initializers.zeros, **types)(y)
    return nn.relu(residual + y)


class ResNetStage(nn.Module):
  """A row of units, the first of which may stride.

  Attributes:
    block_size: number of units.
    nout: channels F inside each bottleneck.
    first_stride: strides of the first unit.
    dtype: type of the computation.
    param_dtype: type of the parameters.
  """

  block_size: int
  nout: int
  first_stride: tuple[int, int] = (1, 1)
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    """Maps [B, H, W, C] to [B, H / stride, W / stride, 4 F]."""
    for i in range(self.block_size):
      x = ResidualUnit(
        self.nout,
        strides=self.first_stride if i == 0 else (1, 1),
        name=f'unit{i + 1}',
        dtype=self.dtype,
        param_dtype=self.param_dtype,
      )(x)
    return x


def apply_resnet(
  x,
  num_layers: Sequence[int],
  width_factor: float = 1,
  dtype: Any = jnp.float32,
  param_dtype: Any = jnp.float32,
):
  """Applies root block and stages, as submodules of the module that calls it.

  Args:
    x: images [B, H, W, C].
    num_layers: units in each stage; empty leaves the root block alone.
    width_factor: the root has 64 times as many channels.
    dtype: type of the computation.
    param_dtype: type of the parameters.

  Returns:
    Features: a quarter of the image's height and width after the root and the
    first stage, halved by each further stage.
  """
  types = dict(dtype=dtype, param_dtype=param_dtype)
  width = int(64 * width_factor)
  x = StdConv(width, (7, 7), (2, 2), name='conv_root', **types)(x)
  x = nn.relu(nn.GroupNorm(name='gn_root', **types)(x))
  x = nn.max_pool(x, window_shape=(3, 3), strides=(2, 2), padding='SAME')
  for i, units in enumerate(num_layers):
    x = ResNetStage(
      units,
      nout=width * 2**i,
      first_stride=(1, 1) if i == 0 else (2, 2),
      name=f'block{i + 1}',
      **types,
    )(x)
  return x
