"""The layers of iGPT: a pre-norm Transformer without biases.

As in the released code of "Generative Pretraining from Pixels" (Chen et al.,
ICML 2020, section 2.2): the norms have a gain only and do not subtract the
mean, and each branch starts with the standard deviations listed there.

Attention to earlier tokens can be computed piece by piece: keys and values of
the tokens so far are kept in a cache, and each call appends its own.

Shapes: B images, N tokens, P of all pieces, Q of one piece, D width of a token, K heads,
E = D/K width of a head.
"""

import functools
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from vit_jax.distributed import sharding
from vit_jax.layers import (
  attention as attention_lib,
  attention_kernels,
  dtypes,
  encoder,
)
from vit_jax.layers.dtypes import Array

# Keys and values of all tokens.
Cache: TypeAlias = tuple[Float[Array, 'B K P E'], Float[Array, 'B K P E']]
# The number of a token.
Position: TypeAlias = int | Int[Array, '']

NORM_EPS = 1e-5
# By what the logits of attention are divided: the root of the head's width, or
# the root without its fraction, as versions of Hugging Face's ImageGPT do.
SCALES = {
  'exact': lambda width: width**0.5,
  'truncated': lambda width: int(width**0.5),
}


def attend_to_past(
  query: Float[Array, 'B Q K E'],
  key: Float[Array, 'B K P E'],
  value: Float[Array, 'B K P E'],
  start: Position,
) -> Float[Array, 'B Q K E']:
  """Computes causal attention of some tokens to themselves and earlier ones.

  Maps scaled queries [B, Q, K, E] of the tokens from number `start` on, and keys
  and values [B, K, N, E] of all tokens, of which later ones do not matter, to
  [B, Q, K, E].
  """
  logits = jnp.einsum('bqke,bkne->bkqn', query, key)
  last = start + jnp.arange(query.shape[1])[:, None]  # [Q, 1]
  is_past = jnp.arange(key.shape[2]) <= last  # [Q, N]
  logits = jnp.where(is_past, logits.astype(jnp.float32), -jnp.inf)
  weights = jax.nn.softmax(logits).astype(value.dtype)
  return jnp.einsum('bkqn,bkne->bqke', weights, value)


class _Layer(nn.Module):
  """What Attention and Block share; fields as in models_igpt.ImageGPT."""

  num_heads: int
  num_layers: int  # Depth of the model, for the initial output.
  causal: bool = True
  attention: str = attention_lib.AUTO
  scale: str = 'exact'
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32


class Attention(_Layer):
  """Self-attention without biases."""

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B N D'],
    cache: Cache | None = None,
    start: Position = 0,
  ) -> tuple[Float[Array, 'B N D'], Cache | None]:
    """Maps tokens [B, N, D] to [B, N, D]; see Block."""
    width = x.shape[-1]
    head_dim = width // self.num_heads
    normal = nn.initializers.normal
    dense = functools.partial(nn.DenseGeneral, use_bias=False, **dtypes.of(self))
    heads = functools.partial(
      dense, (self.num_heads, head_dim), kernel_init=normal(width**-0.5)
    )
    query = heads(name='query')(x) / SCALES[self.scale](head_dim)
    key, value = heads(name='key')(x), heads(name='value')(x)  # [B, N, K, E]
    if cache is None:
      name = attention_lib.choose(self.attention, self.dtype, head_dim, x.shape[1])
      compute = attention_lib.IMPLEMENTATIONS[name]
      options = attention_kernels.Options(causal=self.causal)
      x = compute(query, key, value, options)
    else:
      cache = tuple(
        jax.lax.dynamic_update_slice_in_dim(old, new.swapaxes(1, 2), start, 2)
        for old, new in zip(cache, (key, value))
      )
      x = attend_to_past(query, *cache, start)
    init = normal((width * self.num_layers) ** -0.5)
    return dense(width, axis=(-2, -1), kernel_init=init, name='out')(x), cache


class Mlp(nn.Module):
  """Two dense layers without biases, four times as wide between."""

  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, 'B N D']) -> Float[Array, 'B N D']:
    """Maps tokens [B, N, D] to [B, N, D]."""
    width = x.shape[-1]
    init = nn.initializers.normal(0.02)
    dense = functools.partial(
      nn.Dense, use_bias=False, kernel_init=init, **dtypes.of(self)
    )
    x = encoder.quick_gelu(dense(4 * width, name='hidden')(x))
    return dense(width, name='output')(x)


class Block(_Layer):
  """One layer: attention, then an MLP, each after a norm without a mean.

  Sows `layer_<layer>`, float32 [B, D], the mean over the tokens of what enters
  the attention.
  """

  layer: int = 0  # Its number.

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B N D'],
    cache: Cache | None = None,
    start: Position = 0,
  ) -> tuple[Float[Array, 'B N D'], Cache | None]:
    """Maps tokens [B, N, D] to tokens [B, N, D]; also returns the cache.

    With a cache, keys and values of all tokens, [B, K, N, E] each, `x` are the
    tokens from number `start` on, an int32 scalar, and the cache gains theirs.
    """
    types = dtypes.of(self)
    y = nn.RMSNorm(NORM_EPS, name='norm_1', **types)(x)
    mean = y.mean(axis=1, dtype=jnp.float32)
    self.sow('intermediates', f'layer_{self.layer}', mean)
    fields = ('num_heads', 'num_layers', 'causal', 'attention', 'scale')
    attend = Attention(name='attention', **dtypes.of(self, *fields))
    y, cache = attend(y, cache, start)
    x = x + y
    y = nn.RMSNorm(NORM_EPS, name='norm_2', **types)(x)
    x = x + Mlp(name='mlp', **types)(y)
    return sharding.constrain_batch(x), cache
