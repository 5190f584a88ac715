"""ResNets: what hybrids, BiT and detectors share, and the backbones of detectors.

A model passes its convolution and its norm to `stem` and `bottleneck`: functions
from (features, kernel size, strides, name) and from a name to a layer.

The backbone of detectors is the post-activation ResNet (v1.5: the stride is on the
3x3 convolution) that torchvision and timm publish, with one of two norms. Frozen
batch norm is an affine map with constants that are never trained; they are in the
collection `frozen`, apart from the parameters, and come from published weights.
Group norm is for training from random weights.

Shapes in the comments: B images, H x W pixels, C channels, F features.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.distributed import sharding
from vit_jax.layers import dtypes

# Name -> units per stage (arXiv 1512.03385, table 1).
UNITS = {'r50': (3, 4, 6, 3), 'r101': (3, 4, 23, 3)}


def convolution(cls, features, size, strides, dilation=1, **kwargs) -> nn.Conv:
  """Returns a square convolution without bias, padded as PyTorch pads."""
  pad = dilation * (size // 2)
  return cls(
    features,
    (size, size),
    strides,
    padding=((pad, pad), (pad, pad)),
    kernel_dilation=dilation,
    use_bias=False,
    **kwargs,
  )


def stem(x, conv: Callable, norm: Callable | None, padding):
  """Applies a 7x7 convolution, norm and ReLU if any, and a 3x3 max-pool.

  `conv` and `norm` are layers; both the convolution and the pool halve the size.
  """
  x = conv(x)
  if norm is not None:
    x = nn.relu(norm(x))
  return nn.max_pool(x, (3, 3), (2, 2), padding)


def bottleneck(
  x,
  features: int,
  strides: tuple[int, int],
  conv: Callable,
  norm: Callable,
  norms_first: bool = False,
):
  """Applies 1x1, 3x3, 1x1 convolutions to 4 F channels, and adds the input.

  The stride is on the 3x3 convolution. Norm and ReLU come after a convolution
  (arXiv 1512.03385), or with `norms_first` before it (arXiv 1603.05027).

  Maps [B, H, W, C] to [B, H / stride, W / stride, 4 F]. Names of convolutions are
  'conv1' to 'conv3' and 'conv_proj'; of norms, '1' to '3' or '_proj'.
  """
  out, one = 4 * features, (1, 1)
  residual = x
  if norms_first:
    x = nn.relu(norm('1')(x))
  if residual.shape[-1] != out or tuple(strides) != one:
    residual = conv(out, 1, strides, name='conv_proj')(x)
    if not norms_first:
      residual = norm('_proj')(residual)
  second, third = '23' if norms_first else '12'
  y = conv(features, 1, one, name='conv1')(x)
  y = nn.relu(norm(second)(y))
  y = conv(features, 3, strides, name='conv2')(y)
  y = nn.relu(norm(third)(y))
  y = conv(out, 1, one, name='conv3')(y)
  return residual + y if norms_first else nn.relu(residual + norm('3')(y))


class Stage(nn.Module):
  """A sequence of units; maps [B, H, W, C] to [B, H / stride, W / stride, 4 F]."""

  unit: Callable  # Makes a unit from fields and a name.
  count: int
  first: Mapping[str, Any]  # Fields of the first unit.
  others: Mapping[str, Any]  # Fields of the other units.
  names: str = 'unit{}'  # Format of a unit's name.

  @nn.compact
  def __call__(self, x):
    for i in range(self.count):
      fields = self.others if i else self.first
      x = self.unit(**fields, name=self.names.format(i + 1))(x)
    return x


class FrozenBatchNorm(nn.Module):
  """Batch norm [B, H, W, C] whose statistics, scale and bias are constants."""

  eps: float = 1e-5  # Added to the variance.
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    shape = x.shape[-1:]
    value = lambda name, init: self.variable('frozen', name, init, shape).value
    mean, bias = (value(name, jnp.zeros) for name in ('mean', 'bias'))
    var, scale = (value(name, jnp.ones) for name in ('var', 'scale'))
    scale = scale * jax.lax.rsqrt(var + self.eps)
    bias = bias - mean * scale
    x, scale, bias = (y.astype(self.dtype) for y in (x, scale, bias))
    return x * scale + bias


NORMS = ('frozen_batch', 'group')


def _norm(kind, types, name):
  """Returns a norm, see NORMS."""
  if kind == 'group':
    return nn.GroupNorm(num_groups=None, group_size=8, name=name, **types)
  return FrozenBatchNorm(dtype=types['dtype'], name=name)


_conv = functools.partial(
  convolution,
  nn.Conv,
  kernel_init=nn.initializers.variance_scaling(2.0, 'fan_out', 'normal'),
)


class Bottleneck(nn.Module):
  """Maps [B, H, W, C] to [B, H / stride, W / stride, 4 F], see `bottleneck`."""

  features: int  # F, the channels inside.
  stride: int = 1  # Of the 3x3 convolution and of the projection.
  dilation: int = 1  # Of the 3x3 convolution.
  norm: str = NORMS[0]
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    types = dtypes.of(self)

    def conv(features, size, strides, name):
      dilation = self.dilation if size > 1 else 1
      return _conv(features, size, strides, dilation, name=name, **types)

    norm = lambda name: _norm(self.norm, types, f'bn{name}')
    strides = (self.stride, self.stride)
    return bottleneck(x, self.features, strides, conv, norm)


class ResNet(nn.Module):
  """A ResNet without its head.

  Attributes:
    units: bottlenecks per stage, see UNITS.
    width: channels of the root; the stages have 4, 8, 16 and 32 times as many.
    dilate_last: whether the last stage is dilated instead of strided ("DC5", arXiv
      2005.12872, section 4).
    norm: one of NORMS.
  """

  units: Sequence[int]
  width: int = 64
  dilate_last: bool = False
  norm: str = NORMS[0]
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    """Maps images [B, H, W, C] to the feature maps of all stages.

    Returns one map per stage, [B, H / s, W / s, F], with s = 4, 8, 16, 32 (the
    last 16 if `dilate_last`), sizes rounded up.
    """
    types = dtypes.of(self)
    root = _conv(self.width, 7, (2, 2), name='conv_root', **types)
    x = stem(x, root, _norm(self.norm, types, 'bn_root'), ((1, 1), (1, 1)))
    maps = []
    for i, units in enumerate(self.units):
      dilated = self.dilate_last and i == len(self.units) - 1
      unit = functools.partial(Bottleneck, self.width * 2**i, norm=self.norm, **types)
      first = {'stride': 1 if i == 0 or dilated else 2}
      others = {'dilation': 2 if dilated else 1}
      x = Stage(unit, units, first, others, name=f'block{i + 1}')(x)
      x = sharding.constrain_batch(x)
      maps.append(x)
    return maps
