"""The mask head of DETR: a mask of the image for each query.

As in "End-to-End Object Detection with Transformers" (arXiv 2005.12872, section
4.4 and figure 8). A query attends to the encoder's memory with several heads,
and the maps of its attention, concatenated with the features of the image, go
through convolutions that double the size three times with the help of the
backbone's earlier stages.

Shapes: B images, Q queries, h x w cells of the feature map, D width of a token,
K heads.
"""

from collections.abc import Sequence
import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from vit_jax.distributed import sharding
from vit_jax.layers import dtypes
from vit_jax.layers.dtypes import Array

# Greatest number of groups of a group norm.
_GROUPS = 8
_CONV_INIT = nn.initializers.variance_scaling(1.0, 'fan_in', 'uniform')


class Features(NamedTuple):
  """What the masks of a batch of images are computed from."""

  queries: Float[Array, 'B Q D']  # States of the queries after the decoder.
  memory: Float[Array, 'B h w D']  # Result of the encoder.
  mask: Bool[Array, 'B h w']  # True for cells that are not padding.
  projected: Float[Array, 'B h w D']  # Input of the encoder.
  # Results of the backbone's earlier stages, the smallest first.
  stages: Sequence[Float[Array, 'B H W F']]


def attention_maps(
  query: Float[Array, 'B Q K E'],
  key: Float[Array, 'B h w K E'],
  mask: Bool[Array, 'B h w'],
) -> Float[Array, 'B Q h w K']:
  """Computes attention that sums to 1 over all heads and cells of an image.

  Maps scaled queries [B, Q, K, E], keys [B, h, w, K, E] and a mask, bool [B, h,
  w], True for cells that may be attended to, to [B, Q, h, w, K]. An image without
  a real cell has uniform attention.
  """
  logits = jnp.einsum('bqke,bhwke->bqhwk', query, key)
  logits = logits.astype(jnp.float32)
  least = jnp.finfo(jnp.float32).min
  logits = jnp.where(mask[:, None, :, :, None], logits, least)
  return jax.nn.softmax(logits, axis=(2, 3, 4)).astype(query.dtype)


def enlarge(
  x: Float[Array, 'B h w F'], size: tuple[int, int]
) -> Float[Array, 'B H W F']:
  """Repeats the cells of maps [B, h, w, F] up to a size (height, width).

  The size is a multiple of the maps' or less than the next one, as in a
  backbone whose stages round sizes up.
  """
  for axis, cells in enumerate(size, start=1):
    x = jnp.repeat(x, -(-cells // x.shape[axis]), axis)
    x = jax.lax.slice_in_dim(x, 0, cells, axis=axis)
  return x


class Attention(nn.Module):
  """Attention weights without values."""

  num_heads: int  # K.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    queries: Float[Array, 'B Q D'],
    memory: Float[Array, 'B h w D'],
    mask: Bool[Array, 'B h w'],
  ) -> Float[Array, 'B Q h w K']:
    width = queries.shape[-1] // self.num_heads
    dense = functools.partial(
      nn.DenseGeneral,
      (self.num_heads, width),
      kernel_init=nn.initializers.xavier_uniform(),
      **dtypes.of(self),
    )
    query = dense(name='query')(queries) * width**-0.5
    return attention_maps(query, dense(name='key')(memory), mask)


class FirstConvolution(nn.Module):
  """The first convolution, of features concatenated with a query's maps.

  It is linear, so the term of the features, the same for all queries, is computed
  only once.
  """

  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, features: Float[Array, 'B h w D'], num_maps: int
  ) -> tuple[Float[Array, 'B h w C'], Float[Array, '3 3 K C']]:
    """Convolves features [B, h, w, D], for K = `num_maps` maps of each query.

    Returns the term of the features, [B, h, w, D + K], and the kernel of the maps,
    [3, 3, K, D + K].
    """
    width = features.shape[-1]
    channels = width + num_maps
    dtype = self.param_dtype
    shape = (3, 3, channels, channels)
    kernel = self.param('kernel', _CONV_INIT, shape, dtype).astype(self.dtype)
    bias = self.param('bias', nn.initializers.zeros, (channels,), dtype)
    shared = _convolve(features, kernel[:, :, :width])
    return shared + bias.astype(self.dtype), kernel[:, :, width:]


def _convolve(
  x: Float[Array, 'B h w F'], kernel: Float[Array, '3 3 F C']
) -> Float[Array, 'B h w C']:
  return jax.lax.conv_general_dilated(
    x, kernel, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
  )


class Convolutions(nn.Module):
  """The convolutions that turn the maps of queries into their masks.

  The channels are D + K and then D / 2, D / 4, D / 8, D / 16.
  """

  hidden_size: int  # D.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    maps: Float[Array, 'B Q h w K'],
    shared: Float[Array, 'B h w C'],
    kernel: Float[Array, '3 3 K C'],
    stages: Sequence[Float[Array, 'B _ _ _']],
  ) -> Float[Array, 'B Q H W']:
    """Computes the logits of masks, float32 [B, Q, H, W].

    Takes the attention of the queries, [B, Q, h, w, K], both results of
    FirstConvolution, and the adapted earlier features [B, H, W, D / 2], [B, ..,
    D / 4], ..., of which the last has the size of the result.
    """
    images, queries = maps.shape[:2]
    types = dtypes.of(self)
    by_query = functools.partial(jnp.repeat, repeats=queries, axis=0)  # [B Q, ...]

    def conv(features: int, name: str) -> nn.Conv:
      return nn.Conv(features, (3, 3), kernel_init=_CONV_INIT, name=name, **types)

    def norm(x: Float[Array, 'BQ h w F'], number: int) -> Float[Array, 'BQ h w F']:
      groups = math.gcd(_GROUPS, x.shape[-1])
      norm = nn.GroupNorm(groups, epsilon=1e-5, name=f'norm_{number}', **types)
      return sharding.constrain_batch(nn.relu(norm(x)))

    x = _convolve(maps.reshape(-1, *maps.shape[2:]), kernel)
    x = norm(x + by_query(shared), 0)
    x = norm(conv(self.hidden_size // 2, 'conv_1')(x), 1)
    for i, stage in enumerate(stages, start=2):
      x = enlarge(x, stage.shape[1:3]) + by_query(stage)
      x = norm(conv(self.hidden_size // 2**i, f'conv_{i}')(x), i)
    x = conv(1, 'output')(x).astype(jnp.float32)  # [B Q, H, W, 1]
    return x.reshape(images, queries, *x.shape[1:3])


class MaskHead(nn.Module):
  """Computes the logits of masks."""

  hidden_size: int  # D.
  num_heads: int  # K.
  # Number of queries whose masks are computed at a time, and again in the backward
  # pass, to save memory. 0: all.
  chunk_size: int = 0
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, features: Features) -> Float[Array, 'B Q H W']:
    """Computes the logits of a mask for each query, float32 [B, Q, H, W].

    H x W is the size of the largest stage.
    """
    types = dtypes.of(self)
    attend = Attention(self.num_heads, name='attention', **types)
    maps = attend(features.queries, features.memory, features.mask)  # [B, Q, h, w, K]
    stages = []
    for i, stage in enumerate(features.stages):
      width = self.hidden_size // 2 ** (i + 1)
      name = f'adapter_{i}'
      adapter = nn.Conv(width, (1, 1), kernel_init=_CONV_INIT, name=name, **types)
      stages.append(adapter(stage))
    first = FirstConvolution(name='conv_0', **types)
    shared, kernel = first(features.projected, self.num_heads)
    convolutions = Convolutions(self.hidden_size, name='convolutions', **types)

    def compute(
      module: nn.Module, maps: Float[Array, 'B Q h w K']
    ) -> Float[Array, 'B Q H W']:
      return module(maps, shared, kernel, stages)

    queries = maps.shape[1]
    size = self.chunk_size
    if not size or queries <= size:
      return compute(convolutions, maps)

    def compute_group(
      module: nn.Module, _: None, maps: Float[Array, 'B Q h w K']
    ) -> tuple[None, Float[Array, 'B Q H W']]:
      return None, nn.remat(compute, prevent_cse=False)(module, maps)

    # A loop over groups of queries, the last of which is filled up.
    missing = -queries % size
    maps = jnp.pad(maps, [(0, 0), (0, missing), (0, 0), (0, 0), (0, 0)])
    maps = maps.reshape(maps.shape[0], -1, size, *maps.shape[2:])
    loop = nn.scan(
      compute_group,
      variable_broadcast='params',
      split_rngs={'params': False},
      in_axes=1,
      out_axes=1,
    )
    _, masks = loop(convolutions, None, maps)  # [B, groups, size, H, W]
    return masks.reshape(masks.shape[0], -1, *masks.shape[3:])[:, :queries]
