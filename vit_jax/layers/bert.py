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

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from vit_jax.distributed import sharding
from vit_jax.layers import attention_kernels, dtypes
from vit_jax.layers.dtypes import Array

NORM_EPS = 1e-12
_INIT = nn.initializers.truncated_normal(0.02)


class _Layer(nn.Module):
  """A layer; fields as in BertEncoder."""

  num_heads: int = 1
  mlp_dim: int = 0
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  def dense(self, features: int, name: str = 'dense_layer') -> nn.Dense:
    types = dtypes.of(self)
    return nn.Dense(features, kernel_init=_INIT, name=name, **types)

  def norm(self) -> nn.LayerNorm:
    return nn.LayerNorm(NORM_EPS, name='layer_norm', **dtypes.of(self))

  def make(self, cls: type[nn.Module], name: str | None = None, **kwargs: Any) -> Any:
    """Returns a layer inside of this one, with the same fields."""
    return cls(name=name, **dtypes.of(self, 'num_heads', 'mlp_dim'), **kwargs)


class _Embedder(nn.Module):
  """Embeds tokens, positions and segments; `rows` are the sizes of their tables."""

  rows: tuple[int, int, int]
  width: int
  dtype: Any
  param_dtype: Any

  @nn.compact
  def __call__(self, tokens: Int[Array, 'B N']) -> Float[Array, 'B N D']:
    def embed(name: str, rows: int, ids: Int[Array, '*B N']) -> Float[Array, '*B N D']:
      fields = dict(name=f'embedders_{name}_ids', **dtypes.of(self))
      return nn.Embed(rows, self.width, embedding_init=_INIT, **fields)(ids)

    vocabulary, places, segments = self.rows
    positions = jnp.arange(tokens.shape[1])
    token = embed('token', vocabulary, tokens)
    position = embed('position', places, positions)
    segment = embed('segment', segments, jnp.zeros_like(positions))
    return token + position + segment  # [B, N, D]


class _AttentionLayer(_Layer):
  """Maps tokens [B, N, D] to the heads' averages of the values, [B, N, D]."""

  @nn.compact
  def __call__(
    self, x: Float[Array, 'B N D'], mask: Bool[Array, 'B 1 1 N']
  ) -> Float[Array, 'B N D']:
    width = x.shape[-1]

    def heads(name: str) -> Float[Array, 'B N K E']:
      y = self.dense(width, name)(x)
      return y.reshape(*y.shape[:2], self.num_heads, -1)

    query, key, value = heads('query'), heads('key'), heads('value')
    query = query * query.shape[-1] ** -0.5
    attend = attention_kernels.IMPLEMENTATIONS['default']
    options = attention_kernels.Options(mask=mask)
    return attend(query, key, value, options).reshape(x.shape)


class _AttentionBlock(_Layer):
  @nn.compact
  def __call__(
    self, x: Float[Array, 'B N D'], mask: Bool[Array, 'B 1 1 N']
  ) -> Float[Array, 'B N D']:
    y = self.make(_AttentionLayer, 'attention_layer')(x, mask)
    return self.norm()(x + self.dense(x.shape[-1])(y))


class _Mlp(_Layer):
  @nn.compact
  def __call__(self, x: Float[Array, 'B N D']) -> Float[Array, 'B N M']:
    return jax.nn.gelu(self.dense(self.mlp_dim)(x), approximate=True)


class _MlpBlock(_Layer):
  @nn.compact
  def __call__(self, x: Float[Array, 'B N D']) -> Float[Array, 'B N D']:
    y = self.make(_Mlp, 'mlp')(x)  # [B, N, M]
    return self.norm()(x + self.dense(x.shape[-1])(y))


class _Block(_Layer):
  """One layer: attention, then an MLP; also returns the mask."""

  @nn.compact
  def __call__(
    self, x: Float[Array, 'B N D'], mask: Bool[Array, 'B 1 1 N']
  ) -> tuple[Float[Array, 'B N D'], Bool[Array, 'B 1 1 N']]:
    x = self.make(_AttentionBlock, 'attention_block')(x, mask)
    x = self.make(_MlpBlock, 'mlp_block')(x)
    return sharding.constrain_batch(x), mask


class _EncoderBlock(_Layer):
  """All layers, one after the other."""

  num_layers: int = 1

  @nn.compact
  def __call__(
    self, x: Float[Array, 'B N D'], mask: Bool[Array, 'B 1 1 N']
  ) -> Float[Array, 'B N D']:
    blocks = [self.make(_Block, parent=None) for _ in range(self.num_layers)]
    return nn.Sequential(blocks, name='layer_sequence')(x, mask)[0]


class BertEncoder(_Layer):
  """BERT without its pooler."""

  width: int = 768  # D.
  num_layers: int = 12
  num_heads: int = 12  # K.
  mlp_dim: int = 3072  # M.
  vocab_size: int = 30_522
  num_positions: int = 512  # The greatest number of tokens of a text.
  num_segments: int = 2  # A text is in the first.

  @nn.compact
  def __call__(self, tokens: Int[Array, 'B N']) -> Float[Array, 'B N D']:
    """Maps tokens, int32 [B, N], to [B, N, D].

    Tokens of number 0 are padding, to which no token attends. Raises ValueError if a
    text has more tokens than there are positions.
    """
    if tokens.shape[1] > self.num_positions:
      raise ValueError(
        f'tokens has {tokens.shape[1]} tokens per text, but the model has '
        f'{self.num_positions} positions: clip the texts (max_len of the '
        'tokenizer, config.model.pp.max_len)'
      )
    rows = (self.vocab_size, self.num_positions, self.num_segments)
    x = _Embedder(rows, self.width, name='embedder', **dtypes.of(self))(tokens)
    x = sharding.constrain_batch(self.norm()(x))
    mask = (tokens != 0)[:, None, None]  # [B, 1, 1, N]
    layers = self.make(_EncoderBlock, 'encoder_block', num_layers=self.num_layers)
    return layers(x, mask)
