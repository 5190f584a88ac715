"""BERT's encoder of text (arXiv 1810.04805), with the published names.

A post-norm Transformer: each branch is added to its input, and a LayerNorm
follows. GELU is its tanh approximation. There is no dropout.

Shapes: B texts, N tokens, D width of a token, M width of the MLP, K heads, E =
D/K width of a head.

Parameters:

  embedder/embedders_{token,position,segment}_ids/embedding  [rows, D]
  layer_norm
  encoder_block/layer_sequence/layers_<i>/
    attention_block/attention_layer/{query,key,value}/kernel  [D, D]
    attention_block/dense_layer/kernel                        [D, D]
    attention_block/layer_norm
    mlp_block/mlp/dense_layer/kernel                          [D, M]
    mlp_block/dense_layer/kernel                              [M, D]
    mlp_block/layer_norm
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.distributed import sharding
from vit_jax.layers import attention_kernels
from vit_jax.layers import dtypes

NORM_EPS = 1e-12
_INIT = nn.initializers.truncated_normal(0.02)


class _Layer(nn.Module):
  """A layer with the types of its computation and of its parameters."""

  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  def dense(self, features, name):
    types = dtypes.of(self)
    return nn.Dense(features, kernel_init=_INIT, name=name, **types)

  def norm(self):
    return nn.LayerNorm(NORM_EPS, name='layer_norm', **dtypes.of(self))


class _Embedder(_Layer):
  """Embeds tokens, positions and segments; see BertEncoder."""

  vocab_size: int = 0
  num_positions: int = 0
  num_segments: int = 0
  width: int = 0

  @nn.compact
  def __call__(self, tokens):
    types = dtypes.of(self)

    def embed(what, rows, ids):
      name = f'embedders_{what}_ids'
      return nn.Embed(
        rows, self.width, embedding_init=_INIT, name=name, **types
      )(ids)

    x = embed('token', self.vocab_size, tokens)  # [B, N, D]
    positions = jnp.arange(tokens.shape[1])
    x = x + embed('position', self.num_positions, positions)
    return x + embed('segment', self.num_segments, jnp.zeros_like(positions))


class _AttentionLayer(_Layer):
  """Maps tokens [B, N, D] to the heads' averages of the values, [B, N, D]."""

  num_heads: int = 1

  @nn.compact
  def __call__(self, x, mask):
    width = x.shape[-1]
    split = lambda x: x.reshape(*x.shape[:2], self.num_heads, -1)
    query, key, value = (
      split(self.dense(width, name)(x)) for name in ('query', 'key', 'value')
    )  # [B, N, K, E]
    query = query * query.shape[-1] ** -0.5
    attend = attention_kernels.IMPLEMENTATIONS['default']
    return attend(query, key, value, mask).reshape(x.shape)


class _AttentionBlock(_Layer):
  num_heads: int = 1

  @nn.compact
  def __call__(self, x, mask):
    attend = _AttentionLayer(
      name='attention_layer', **dtypes.of(self, 'num_heads')
    )
    y = self.dense(x.shape[-1], 'dense_layer')(attend(x, mask))
    return self.norm()(x + y)


class _Mlp(_Layer):
  mlp_dim: int = 0

  @nn.compact
  def __call__(self, x):
    x = self.dense(self.mlp_dim, 'dense_layer')(x)  # [B, N, M]
    return jax.nn.gelu(x, approximate=True)


class _MlpBlock(_Layer):
  mlp_dim: int = 0

  @nn.compact
  def __call__(self, x):
    y = _Mlp(name='mlp', **dtypes.of(self, 'mlp_dim'))(x)
    return self.norm()(x + self.dense(x.shape[-1], 'dense_layer')(y))


class _Block(_Layer):
  """One layer: attention, then an MLP."""

  num_heads: int = 1
  mlp_dim: int = 0

  @nn.compact
  def __call__(self, x, mask):
    attend = _AttentionBlock(
      name='attention_block', **dtypes.of(self, 'num_heads')
    )
    mlp = _MlpBlock(name='mlp_block', **dtypes.of(self, 'mlp_dim'))
    return sharding.constrain_batch(mlp(attend(x, mask)))


class _Layers(_Layer):
  """All layers, one after the other."""

  num_layers: int = 1
  num_heads: int = 1
  mlp_dim: int = 0

  @nn.compact
  def __call__(self, x, mask):
    block = functools.partial(_Block, **dtypes.of(self, 'num_heads', 'mlp_dim'))
    for i in range(self.num_layers):
      x = block(name=f'layers_{i}')(x, mask)
    return x


class _EncoderBlock(_Layers):
  @nn.compact
  def __call__(self, x, mask):
    fields = ('num_layers', 'num_heads', 'mlp_dim')
    return _Layers(name='layer_sequence', **dtypes.of(self, *fields))(x, mask)


class BertEncoder(_Layer):
  """BERT without its pooler.

  Attributes:
    width: D.
    num_layers: number of layers.
    num_heads: number of heads K.
    mlp_dim: M.
    vocab_size: number of tokens of the vocabulary.
    num_positions: greatest number of tokens of a text.
    num_segments: rows of the table of segments; a text is in the first.
  """

  width: int = 768
  num_layers: int = 12
  num_heads: int = 12
  mlp_dim: int = 3072
  vocab_size: int = 30_522
  num_positions: int = 512
  num_segments: int = 2

  @nn.compact
  def __call__(self, tokens):
    """Maps tokens, int32 [B, N], to [B, N, D].

    Tokens of number 0 are padding, to which no token attends.

    Raises:
      ValueError: if a text has more tokens than there are positions.
    """
    if tokens.shape[1] > self.num_positions:
      raise ValueError(
        f'tokens has {tokens.shape[1]} tokens a text, but the model has '
        f'{self.num_positions} positions: clip the texts (max_len of the '
        'tokenizer, config.model.pp.max_len)'
      )
    fields = ('vocab_size', 'num_positions', 'num_segments', 'width')
    x = _Embedder(name='embedder', **dtypes.of(self, *fields))(tokens)
    x = sharding.constrain_batch(self.norm()(x))
    mask = (tokens != 0)[:, None, None]  # [B, 1, 1, N]
    fields = ('num_layers', 'num_heads', 'mlp_dim')
    return _EncoderBlock(name='encoder_block', **dtypes.of(self, *fields))(
      x, mask
    )
