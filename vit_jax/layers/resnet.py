"""ResNets: what hybrids, BiT and detectors share, and the backbones of detectors.

The backbone of detectors is the post-activation ResNet (v1.5: the stride is on the
3x3 convolution) that torchvision and timm publish, with one of two norms. Frozen
batch norm is an affine map with constants that are never trained; they are in the
collection `frozen`, apart from the parameters, and come from published weights.
Group norm is for training from random weights.

Shapes in the comments: B images, H x W pixels, C channels, F features.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from vit_jax.distributed import sharding
from vit_jax.layers import dtypes
from vit_jax.layers.dtypes import Array

# Name -> units per stage (arXiv 1512.03385, table 1).
UNITS = {'r50': (3, 4, 6, 3), 'r101': (3, 4, 23, 3)}


def convolution(
  cls: type[nn.Conv],
  features: int,
  size: int,
  strides: tuple[int, int],
  dilation: int = 1,
  **kwargs: Any,
) -> nn.Conv:
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


def stem(
  x: Float[Array, 'B H W C'],
  conv: Callable,
  norm: Callable | None,
  padding: str | Sequence[tuple[int, int]],
) -> Float[Array, 'B _ _ F']:
  """Applies a 7x7 convolution, norm and ReLU if any, and a 3x3 max-pool.

  `conv` and `norm` are layers; both the convolution and the pool halve the size.
  """
  x = conv(x)
  if norm is not None:
    x = nn.relu(norm(x))
  return nn.max_pool(x, (3, 3), (2, 2), padding)


class Bottleneck(nn.Module):
  """1x1, 3x3, 1x1 convolutions to 4 F channels, added to the input.

  Maps [B, H, W, C] to [B, H / stride, W / stride, 4 F]. Norm and ReLU come after a
  convolution (arXiv 1512.03385), or with `norms_first` before it (arXiv 1603.05027).

  A subclass makes the layers: `conv`, of names 'conv1' to 'conv3' and 'conv_proj', and
  `norm`, of names '1' to '3', or '_proj' for the one after the projection.
  """

  features: int  # F, the channels inside.
  # Strides of the 3x3 convolution and of the projection.
  strides: tuple[int, int] = (1, 1)
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  norms_first: ClassVar[bool] = False

  def conv(
    self, features: int, size: int, strides: tuple[int, int], name: str
  ) -> nn.Module:
    """Returns a square convolution of `size` x `size` with `features` channels."""
    raise NotImplementedError

  def norm(self, name: str) -> nn.Module:
    """Returns the norm of a name."""
    raise NotImplementedError

  @nn.compact
  def __call__(
    self, x: Float[Array, 'B H W C']
  ) -> Float[Array, 'B _ _ 4*{self.features}']:
    features, first = self.features, self.norms_first
    out = 4 * features
    one = (1, 1)
    residual = x
    if first:
      x = nn.relu(self.norm('1')(x))
    if residual.shape[-1] != out or tuple(self.strides) != one:
      residual = self.conv(out, 1, self.strides, 'conv_proj')(x)
      if not first:
        residual = self.norm('_proj')(residual)
    y = self.conv(features, 1, one, 'conv1')(x)
    y = nn.relu(self.norm('2' if first else '1')(y))
    y = self.conv(features, 3, self.strides, 'conv2')(y)
    y = nn.relu(self.norm('3' if first else '2')(y))
    y = self.conv(out, 1, one, 'conv3')(y)
    y = residual + y if first else nn.relu(residual + self.norm('3')(y))
    return sharding.constrain_batch(y)


class Stage(nn.Module):
  """A sequence of units; maps [B, H, W, C] to [B, H / stride, W / stride, 4 F]."""

  unit: Callable  # Makes a unit from fields and a name.
  count: int
  first: Mapping[str, Any]  # Fields of the first unit.
  others: Mapping[str, Any]  # Fields of the other units.
  names: str = 'unit{}'  # Format of a unit's name.

  @nn.compact
  def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B _ _ _']:
    for i in range(self.count):
      fields = self.others if i else self.first
      x = self.unit(**fields, name=self.names.format(i + 1))(x)
    return x


class FrozenBatchNorm(nn.Module):
  """Batch norm [B, H, W, C] whose statistics, scale and bias are constants."""

  eps: float = 1e-5  # Added to the variance.
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B H W C']:
    shape = x.shape[-1:]
    mean = self.variable('frozen', 'mean', jnp.zeros, shape).value
    bias = self.variable('frozen', 'bias', jnp.zeros, shape).value
    variance = self.variable('frozen', 'var', jnp.ones, shape).value
    scale = self.variable('frozen', 'scale', jnp.ones, shape).value
    scale = scale * jax.lax.rsqrt(variance + self.eps)
    bias = bias - mean * scale
    return x.astype(self.dtype) * scale.astype(self.dtype) + bias.astype(self.dtype)


def _norm(kind: str, types: dict[str, Any], name: str) -> nn.Module:
  if kind == 'group':
    return nn.GroupNorm(num_groups=None, group_size=8, name=name, **types)
  return FrozenBatchNorm(dtype=types['dtype'], name=name)


_conv = functools.partial(
  convolution,
  nn.Conv,
  kernel_init=nn.initializers.variance_scaling(2.0, 'fan_out', 'normal'),
)


class _Unit(Bottleneck):
  kind: str = 'frozen_batch'
  dilation: int = 1  # Dilation of the 3x3 convolution.

  def conv(
    self, features: int, size: int, strides: tuple[int, int], name: str
  ) -> nn.Module:
    dilation = self.dilation if size > 1 else 1
    return _conv(features, size, strides, dilation, name=name, **dtypes.of(self))

  def norm(self, name: str) -> nn.Module:
    return _norm(self.kind, dtypes.of(self), f'bn{name}')


class ResNet(nn.Module):
  """A ResNet without its head."""

  units: Sequence[int]  # Bottlenecks per stage, see UNITS.
  width: int = 64  # Channels of the root; stages have 4, 8, 16 and 32 times as many.
  # Whether the last stage is dilated, not strided ("DC5", arXiv 2005.12872, section 4).
  dilate_last: bool = False
  norm: str = 'frozen_batch'
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, 'B H W C']) -> list[Float[Array, 'B _ _ _']]:
    """Maps images [B, H, W, C] to the feature maps of all stages.

    Returns one map per stage, [B, H / s, W / s, F], with s = 4, 8, 16, 32 (the
    last 16 if `dilate_last`), sizes rounded up.
    """
    types = dtypes.of(self)
    root = _conv(self.width, 7, (2, 2), name='conv_root', **types)
    x = stem(x, root, _norm(self.norm, types, 'bn_root'), ((1, 1), (1, 1)))
    maps = []
    for i, units in enumerate(self.units):
      is_dilated = self.dilate_last and i == len(self.units) - 1
      stride = 1 if i == 0 or is_dilated else 2
      dilation = 2 if is_dilated else 1
      unit = functools.partial(_Unit, self.width * 2**i, kind=self.norm, **types)
      stage = Stage(
        unit,
        units,
        first={'strides': (stride, stride)},
        others={'dilation': dilation},
        name=f'block{i + 1}',
      )
      x = stage(x)
      maps.append(x)
    return maps
