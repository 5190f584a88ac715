"""BiT, the ResNets that the paper compares with (arXiv 1912.11370, section 3.3).

Pre-activation (v2) bottlenecks with GroupNorm and weight-standardised
convolutions, stride on the 3x3 convolution. A width factor multiplies the
channels of every layer: R101x3 has three times the channels of a ResNet-101. The
parameters have the names of big_vision's `bit_paper`.

Shapes in the comments:
  B images    H, W height and width    C channels
  F channels inside a bottleneck       D width of the features
"""

from collections.abc import Sequence
import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from vit_jax import models_resnet
from vit_jax.configs import models as model_configs, schema
from vit_jax.distributed import sharding
from vit_jax.layers import dtypes, layer_stack, patches, resnet
from vit_jax.layers.dtypes import Array

# By name (config.model.eps): the constants of the published models, and of timm.
EPSILONS = {
  'published': models_resnet.Epsilons(norm=1e-5, std=0.0, std_variance=1e-10),
  'timm': models_resnet.EPSILONS['timm'],
}


def _group_norm(
  eps: models_resnet.Epsilons, types: dict[str, Any], name: str
) -> nn.GroupNorm:
  return nn.GroupNorm(32, epsilon=eps.norm, use_fast_variance=False, name=name, **types)


_conv = functools.partial(resnet.convolution, models_resnet.StdConv)


class ResidualUnit(resnet.Bottleneck):
  """One bottleneck, with norm and ReLU before each convolution."""

  eps: models_resnet.Epsilons = EPSILONS['published']
  norms_first = True

  def conv(
    self, features: int, size: int, strides: tuple[int, int], name: str
  ) -> nn.Module:
    return _conv(features, size, strides, name=name, **dtypes.of(self, 'eps'))

  def norm(self, name: str) -> nn.Module:
    return _group_norm(self.eps, dtypes.of(self), f'gn{name}')


class RootBlock(nn.Module):
  """The first layers: a 7x7 convolution and a max-pool, each of stride 2."""

  features: int  # F.
  eps: models_resnet.Epsilons = EPSILONS['published']
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, 'B H W C']) -> Float[Array, 'B _ _ F']:
    """Maps images to [B, H / 4, W / 4, F]."""
    conv = _conv(self.features, 7, (2, 2), name='conv_root', **dtypes.of(self, 'eps'))

    def padded_conv(x: Float[Array, 'B H W C']) -> Float[Array, 'B _ _ F']:
      # The published models pad with zeros, which count in the maximum.
      return jnp.pad(conv(x), ((0, 0), (1, 1), (1, 1), (0, 0)))

    return sharding.constrain_batch(resnet.stem(x, padded_conv, None, 'VALID'))


class BitResNet(patches.ImageModel):
  """A BiT ResNet.

  `model.apply(..., mutable='intermediates')` also returns `features` [B, D],
  the mean over the last feature map, and `layer_0`, `layer_1`, ..., the means
  over the maps that enter the stages, and over the last one.

  The statistics of norms and the logits are always float32.
  """

  num_classes: int | None  # Width of the head; 0 or None: returns features.
  num_layers: Sequence[int]  # Units of each stage, (3, 4, 6, 3) for R50.
  width_factor: float = 1.0  # Multiplies the channels; 1 gives a ResNet.
  head_bias_init: float = 0.0
  eps: str = 'published'  # A key of EPSILONS.
  # Activations that the backward pass recomputes. '': none; 'full': all inside a unit.
  remat: str = ''
  model_name: str | None = None  # Name in the table of configs; has no effect.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, inputs: Float[Array, 'B H W C'], *, train: bool
  ) -> Float[Array, 'B _']:
    """Computes logits.

    Maps images, float [B, H, W, C] in [-1, 1], of any size, to float32 [B,
    num_classes]; without a head to features [B, D]. `train` has no effect, as there
    is no dropout. Raises ValueError for inputs of another rank and wrong fields.
    """
    del train
    inputs = jnp.asarray(inputs)  # Accepts TensorFlow's tensors.
    patches.check_images(inputs)
    schema.check('eps', self.eps, model_configs.Epsilons, 'config.model.')
    schema.check('remat', self.remat, model_configs.UnitRemat, 'config.model.')
    if not self.width_factor > 0 or self.width_factor % 0.5:
      raise ValueError(
        f'width_factor={self.width_factor} must be a multiple of 0.5 above 0, so '
        'that 32 groups divide the channels (config.model.width_factor)'
      )
    types = dtypes.of(self)
    eps = EPSILONS[self.eps]
    width = int(64 * self.width_factor)
    unit: type = layer_stack.recomputed(ResidualUnit, self.remat)
    x = RootBlock(width, eps=eps, name='root_block', **types)(inputs)
    for i, num_units in enumerate(self.num_layers):
      patches.sow_mean(self, f'layer_{i}', x)
      make = functools.partial(unit, width * 2**i, eps=eps, **types)
      first = {'strides': (2, 2) if i else (1, 1)}
      name = f'block{i + 1}'
      names = 'unit{:02d}'
      x = resnet.Stage(make, num_units, first, {}, names, name=name)(x)
    x = nn.relu(_group_norm(eps, types, 'norm-pre-head')(x))  # [B, h, w, D]
    patches.sow_mean(self, f'layer_{len(self.num_layers)}', x)
    x = x.mean(axis=(1, 2))  # [B, D]
    self.sow('intermediates', 'features', x)
    if not self.num_classes:
      return x
    return patches.make_head(self.num_classes, self.head_bias_init, **types)(x)
