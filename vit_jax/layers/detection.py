"""The Transformer of a detector: post-norm encoder and decoder, sine positions.

As in "End-to-End Object Detection with Transformers" (arXiv 2005.12872,
section 3.2 and appendix A.4). Positions are added to queries and keys in every
layer, never to values.

Shapes: B images, h x w cells of the feature map, S = h*w tokens of the image,
Q object queries, D width of a token.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Bool, Float

from vit_jax.distributed import sharding
from vit_jax.layers import attention, dtypes
from vit_jax.layers.dtypes import Array

_NORM_EPS = 1e-5
_TEMPERATURE = 10_000.0  # Greatest wavelength of `sine_positions` over 2 pi.


def sine_positions(mask: Bool[Array, 'B h w'], width: int) -> Float[Array, 'B h w D']:
  """Computes position embeddings of the cells of padded images.

  A cell's row and column are counted among the cells that are not padding, and
  scaled so that the last one is at 2 pi. Half of the features encode the row,
  the other half the column, as sines and cosines in turn.

  Maps a mask, bool [B, h, w], True for cells that are not padding, to float32
  [B, h, w, D]. The width D is a multiple of 4.
  """
  half = width // 2
  powers = _TEMPERATURE ** (2 * (jnp.arange(half) // 2) / half)  # [D/2]
  weights = mask.astype(jnp.float32)
  features = []
  for axis in (1, 2):
    place = jnp.cumsum(weights, axis)  # [B, h, w]
    last = jnp.take(place, jnp.array([-1]), axis=axis)
    place = place / (last + 1e-6) * 2 * math.pi
    angle = place[..., None] / powers  # [B, h, w, D/2]
    even = jnp.arange(half) % 2 == 0
    features.append(jnp.where(even, jnp.sin(angle), jnp.cos(angle)))
  return jnp.concatenate(features, axis=-1)


class _Layer(nn.Module):
  """What the layers of encoder and decoder share; fields as in Detr."""

  num_heads: int
  mlp_dim: int
  dropout_rate: float = 0.1
  attention_dropout_rate: float = 0.1
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  def _attend(
    self,
    x: Float[Array, 'B N D'],
    name: str,
    norm: str,
    offsets: Float[Array, 'B N D'],
    train: bool,
    **kwargs: Any,
  ) -> Float[Array, 'B N D']:
    """Adds the attention of x + offsets to the residual x, and normalises."""
    attend = attention.MultiHeadDotProductAttention(
      self.num_heads, self.attention_dropout_rate, name=name, **dtypes.of(self)
    )
    y = attend(x + offsets, deterministic=not train, **kwargs)
    y = nn.Dropout(self.dropout_rate)(y, deterministic=not train)
    return nn.LayerNorm(_NORM_EPS, name=norm, **dtypes.of(self))(x + y)

  def _mlp(
    self, x: Float[Array, 'B N D'], norm: str, deterministic: bool
  ) -> Float[Array, 'B N D']:
    """Adds an MLP's result to tokens x, and normalises the sum."""
    dense = functools.partial(
      nn.Dense, kernel_init=nn.initializers.xavier_uniform(), **dtypes.of(self)
    )
    drop = functools.partial(nn.Dropout(self.dropout_rate), deterministic=deterministic)
    y = drop(nn.relu(dense(self.mlp_dim, name='Dense_0')(x)))
    y = drop(dense(x.shape[-1], name='Dense_1')(y))
    x = nn.LayerNorm(_NORM_EPS, name=norm, **dtypes.of(self))(x + y)
    return sharding.constrain_batch(x)


class EncoderLayer(_Layer):
  """Self-attention over the image, then an MLP; post-norm."""

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B S D'],
    positions: Float[Array, 'B S D'],
    mask: Bool[Array, 'B 1 1 S'],
    *,
    train: bool,
  ) -> Float[Array, 'B S D']:
    """Maps tokens [B, S, D] with positions [B, S, D] to [B, S, D].

    The mask, bool [B, 1, 1, S], is True for tokens that may be attended to.
    """
    x = self._attend(
      x, 'self_attention', 'LayerNorm_0', positions, train, values=x, mask=mask
    )
    return self._mlp(x, 'LayerNorm_1', not train)


class DecoderLayer(_Layer):
  """Self-attention over the queries, attention to the image, an MLP."""

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B Q D'],
    queries: Float[Array, 'B Q D'],
    memory: Float[Array, 'B S D'],
    positions: Float[Array, 'B S D'],
    mask: Bool[Array, 'B 1 1 S'],
    *,
    train: bool,
  ) -> Float[Array, 'B Q D']:
    """Maps the state of the queries [B, Q, D] to [B, Q, D].

    `queries` are their own embeddings [B, Q, D], `memory` the result of the
    encoder [B, S, D], `positions` the image's positions [B, S, D], and `mask`,
    bool [B, 1, 1, S], is True for tokens that may be attended to.
    """
    x = self._attend(x, 'self_attention', 'LayerNorm_0', queries, train, values=x)
    x = self._attend(
      x,
      'cross_attention',
      'LayerNorm_1',
      queries,
      train,
      kv=memory + positions,
      values=memory,
      mask=mask,
    )
    return self._mlp(x, 'LayerNorm_2', not train)
