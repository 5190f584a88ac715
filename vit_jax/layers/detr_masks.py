"""The mask head of DETR: a mask of the image for each query.

As in "End-to-End Object Detection with Transformers" (arXiv 2005.12872, section
4.4 and figure 8). A query attends to the encoder's memory with several heads,
and the maps of its attention, beside the features of the image, go through
convolutions that double the size three times with the help of the backbone's
earlier stages.

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

from vit_jax.distributed import sharding
from vit_jax.layers import dtypes

# Greatest number of groups of a group norm.
_GROUPS = 8
_CONV_INIT = nn.initializers.variance_scaling(1.0, 'fan_in', 'uniform')


class Features(NamedTuple):
  """What the masks of a batch of images are computed from."""

  queries: Any  # States of the queries after the decoder, [B, Q, D].
  memory: Any  # Result of the encoder, [B, h, w, D].
  mask: Any  # bool [B, h, w], True for cells that are no padding.
  projected: Any  # Input of the encoder, [B, h, w, D].
  # Results of the backbone's earlier stages, [B, H, W, F], the smallest first.
  stages: Sequence[Any]


def attention_maps(query, key, mask):
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


def enlarge(x, size: tuple[int, int]):
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
  def __call__(self, queries, memory, mask):
    """Maps [B, Q, D], [B, h, w, D], bool [B, h, w] to [B, Q, h, w, K]."""
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
  """A convolution of features beside maps, in two parts.

  The convolution is linear: the part of the features is the same for all
  queries and is computed once.
  """

  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, features, num_maps: int):
    """Convolves features [B, h, w, D], for so many maps K of a query.

    Returns the part of the features, [B, h, w, D + K], and the kernel of the
    maps, [3, 3, K, D + K].
    """
    width = features.shape[-1]
    channels, dtype = width + num_maps, self.param_dtype
    shape = (3, 3, channels, channels)
    kernel = self.param('kernel', _CONV_INIT, shape, dtype).astype(self.dtype)
    bias = self.param('bias', nn.initializers.zeros, (channels,), dtype)
    shared = _convolve(features, kernel[:, :, :width])
    return shared + bias.astype(self.dtype), kernel[:, :, width:]


def _convolve(x, kernel):
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
  def __call__(self, _, maps, shared, kernel, stages):
    """Computes (None, logits), float32 [B, Q, H, W], as `nn.scan` wants it.

    Takes nothing, the attention of the queries [B, Q, h, w, K], both results of
    FirstConvolution, and the adapted earlier features [B, H, W, D / 2], [B, ..,
    D / 4], ..., of which the last has the size of the result.
    """
    images, queries = maps.shape[:2]
    types = dtypes.of(self)
    conv = functools.partial(
      nn.Conv, kernel_size=(3, 3), kernel_init=_CONV_INIT, **types
    )

    def norm(x, number):
      groups = math.gcd(_GROUPS, x.shape[-1])
      norm = nn.GroupNorm(groups, epsilon=1e-5, name=f'norm_{number}', **types)
      return sharding.constrain_batch(nn.relu(norm(x)))

    def of_queries(x):
      return jnp.repeat(x, queries, axis=0)  # [B Q, ...]

    x = _convolve(maps.reshape(-1, *maps.shape[2:]), kernel)
    x = norm(x + of_queries(shared), 0)
    x = norm(conv(self.hidden_size // 2, name='conv_1')(x), 1)
    for i, stage in enumerate(stages, start=2):
      x = enlarge(x, stage.shape[1:3]) + of_queries(stage)
      x = norm(conv(self.hidden_size // 2**i, name=f'conv_{i}')(x), i)
    x = conv(1, name='output')(x).astype(jnp.float32)  # [B Q, H, W, 1]
    return None, x.reshape(images, queries, *x.shape[1:3])


class MaskHead(nn.Module):
  """Computes the logits of masks."""

  hidden_size: int  # D.
  num_heads: int  # K.
  # Number of queries that are computed together; others wait, and are computed
  # anew in the backward pass, to save memory. 0: all.
  at_a_time: int = 0
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, features: Features):
    """Computes the logits of a mask for each query, float32 [B, Q, H, W].

    H x W is the size of the largest stage.
    """
    types = dtypes.of(self)
    maps = Attention(self.num_heads, name='attention', **types)(
      features.queries, features.memory, features.mask
    )  # [B, Q, h, w, K]
    adapter = functools.partial(
      nn.Conv, kernel_size=(1, 1), kernel_init=_CONV_INIT, **types
    )
    stages = [
      adapter(self.hidden_size // 2 ** (i + 1), name=f'adapter_{i}')(stage)
      for i, stage in enumerate(features.stages)
    ]
    shared, kernel = FirstConvolution(name='conv_0', **types)(
      features.projected, self.num_heads
    )
    images, queries = maps.shape[:2]
    part = self.at_a_time
    kwargs = dict(hidden_size=self.hidden_size, name='convolutions', **types)
    if not part or queries <= part:
      return Convolutions(**kwargs)(None, maps, shared, kernel, stages)[1]
    parts = -(-queries // part)
    missing = [(0, 0)] * maps.ndim
    missing[1] = (0, parts * part - queries)
    maps = jnp.pad(maps, missing)
    maps = maps.reshape(images, parts, part, *maps.shape[2:])
    scanned = nn.scan(
      nn.remat(Convolutions, prevent_cse=False),
      variable_broadcast='params',
      split_rngs={'params': False},
      in_axes=(1, nn.broadcast, nn.broadcast, nn.broadcast),
      out_axes=1,
    )
    masks = scanned(**kwargs)(None, maps, shared, kernel, stages)[1]
    return masks.reshape(images, -1, *masks.shape[3:])[:, :queries]
