"""Multi-head attention with a choice of implementations.

`config.model.transformer.attention` selects one:

  auto     cudnn or flash where they run and suit, else default, see `choose`
  default  matrix products and a softmax, with its own backward pass
  xla      jax.nn.dot_product_attention, compiled by XLA
  cudnn    the same function with cuDNN's flash attention: GPUs from Ampere on,
           16 bits
  flash    Pallas kernels that write no logits: TPUs

All implementations have the same parameters and give the same results up to
rounding. They differ in what they support:

           dropout of weights   cross-attention   causal   mask        relative
  default  yes                  yes               yes      yes         yes
  xla      no                   yes               yes      yes         yes
  cudnn    no                   yes               yes      as a bias   no
  flash    no                   yes               yes      no          no

If the collection `intermediates` is mutable, matrix products and a softmax run, and
the attention weights are sown, with causality and mask applied. The collection
`perturbations`, if it is passed, is added to them: for gradients by the weights. In
every implementation, a query that may not attend to any key yields zeros, has zero
attention weights and passes on no gradient.

Shapes: B images, Q queries, S keys and values, K heads, E width of a head, D
and D' width of a token in the sequences of the queries and of the keys.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Bool, Float

from vit_jax.distributed import sharding
from vit_jax.layers import attention_kernels, dtypes, norms, positions, xla_hints
from vit_jax.layers.dtypes import Array

IMPLEMENTATIONS = attention_kernels.IMPLEMENTATIONS
AUTO, NAMES = attention_kernels.AUTO, attention_kernels.NAMES
check, choose = attention_kernels.check, attention_kernels.choose


def first_token(x: Float[Array, 'B N D']) -> Float[Array, 'B 1 D']:
  """Returns the first of tokens [B, N, D] as [B, 1, D].

  Written as a sum, since a slice makes the TPU compiler change the layout of the
  tokens in all layers, which it estimates to be a tenth slower.
  """
  first = jnp.arange(x.shape[1])[:, None] == 0
  return x.sum(axis=1, keepdims=True, where=first)


def check_heads(num_heads: int, width: int) -> None:
  """Raises ValueError unless a number of heads divides the width."""
  if width % num_heads:
    raise ValueError(
      f'num_heads={num_heads} does not divide the width {width} '
      '(config.model.hidden_size): choose a divisor'
    )


def _check_inputs(
  x: Float[Array, 'B Q D'],
  kv: Float[Array, 'B S _'] | None,
  mask: Array | None,
  relative: Float[Array, '...'] | None,
  num_heads: int,
  causal: bool,
) -> Bool[Array, '#B #K #Q #S'] | None:
  """Checks shapes and types; returns the mask with four dimensions."""
  images, queries, width = x.shape
  check_heads(num_heads, width)
  if kv is not None and (causal or relative is not None):
    name = 'causal=True' if causal else 'relative'
    raise ValueError(
      f'{name} needs keys of the same sequence, since positions of another one (kv) '
      'have no offset: leave out one of them'
    )
  shape = [2 * queries - 1, width // num_heads]
  bias = [num_heads, queries, queries]
  if relative is not None and list(relative.shape) not in (shape, bias):
    raise ValueError(
      f'relative must be [heads, queries, keys] = {bias}, or [2 x {queries} tokens - 1, '
      f'width of a head] = {shape}, got {list(relative.shape)}'
    )
  if mask is None:
    return None
  full = (images, num_heads, queries, (x if kv is None else kv).shape[1])
  mask_shape = (1,) * (4 - mask.ndim) + mask.shape
  fits = len(mask_shape) == 4 and all(
    size in (1, limit) for size, limit in zip(mask_shape, full)
  )
  if mask.dtype != bool or not fits:
    raise ValueError(
      'mask must be bool, True where a query may attend to a key, and broadcast '
      f'to [batch, heads, queries, keys] = {list(full)}, got {mask.dtype} '
      f'{list(mask.shape)}; [batch, 1, 1, keys] hides keys from all queries'
    )
  return mask.reshape(mask_shape)


class _Heads(nn.Module):
  """A dense layer from tokens [B, N, D] to heads [B, N, K, E].

  It has the parameters of nn.DenseGeneral. Except on TPUs, the bias is one vector, which
  is fused into the matrix product; a bias [K, E] takes two more passes over memory.
  """

  num_heads: int
  head_dim: int
  use_bias: bool = True
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: Float[Array, 'B N D']) -> Float[Array, 'B N K E']:
    shape = (self.num_heads, self.head_dim)
    width = math.prod(shape)

    def init(rng: Array, shape: tuple[int, ...], dtype: Any) -> Float[Array, 'D K E']:
      flat = nn.initializers.xavier_uniform()(rng, (shape[0], width), dtype)
      return flat.reshape(shape)

    kernel = self.param('kernel', init, (x.shape[-1], *shape), self.param_dtype)
    bias = None
    if self.use_bias:
      bias = self.param('bias', nn.initializers.zeros, shape, self.param_dtype)
    x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
    if xla_hints.on_tpus():
      x = jnp.einsum('bnd,dke->bnke', x, kernel)
      return x if bias is None else x + bias
    dimension_numbers = ((x.ndim - 1,), (0,)), ((), ())
    x = xla_hints.dot_general(x, kernel.reshape(-1, width), dimension_numbers)
    x = x if bias is None else x + bias.reshape(width)
    return x.astype(kernel.dtype).reshape(*x.shape[:-1], *shape)


class MultiHeadDotProductAttention(nn.Module):
  """Multi-head attention (appendix A), softmax in float32."""

  num_heads: int  # K, which must divide the width.
  dropout_rate: float = 0.0  # Dropout of the attention weights; 0 in the paper.
  attention: str = AUTO  # The implementation, see the top of this module.
  # Whether to compute the output of the first query only. It equals the first one of a
  # full computation.
  only_first: bool = False
  causal: bool = False  # Whether token i attends to tokens 0 to i only.
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  qkv_bias: bool = True  # Whether queries, keys and values have biases.
  # Whether norms follow the projections to queries and keys, one over each head.
  qk_norm: bool = False
  norm: str = 'layer'  # Kind of these norms, see vit_jax.layers.norms.
  norm_eps: float = 1e-6  # Added to the variance in these norms.
  # Whether a norm over all heads precedes the last layer.
  attention_norm: bool = False

  @nn.compact
  def __call__(
    self,
    x: Float[Array, 'B Q D'],
    kv: Float[Array, 'B S _'] | None = None,
    *,
    values: Float[Array, 'B S _'] | None = None,
    mask: Array | None = None,
    relative: Float[Array, '...'] | None = None,
    length: int | None = None,
    angles: Float[Array, 'Q half_E'] | None = None,
    deterministic: bool,
  ) -> Float[Array, 'B _ D']:
    """Applies self-attention, or cross-attention to another sequence.

    Args:
      x: tokens of the queries, [B, Q, D].
      kv: tokens of the keys and values, [B, S, D']; None: `x`.
      values: tokens of the values, if they differ from `kv`.
      mask: bool, broadcastable to [B, K, Q, S], True where a query may attend
        to a key; None: everywhere.
      relative: embeddings of the offsets between the positions of two tokens,
        [2Q - 1, E], from 1 - Q to Q - 1; the query times the embedding of p_q - p_k
        is added to a logit. Or these biases, [K, Q, Q]. Self-attention only.
      length: number of keys before the padding; None: there is no padding.
      angles: of rotary embeddings, [Q, E/2], see vit_jax.layers.positions;
        self-attention only.
      deterministic: whether dropout is off.

    Returns:
      [B, Q, D], or [B, 1, D] with `only_first`. A query that may not attend to
      any key yields the bias of the last layer.

    Raises ValueError if the arguments do not fit together, or `attention` does
    not support them.
    """
    width = x.shape[-1]
    mask = _check_inputs(x, kv, mask, relative, self.num_heads, self.causal)
    dropout_rate = 0.0 if deterministic else self.dropout_rate
    check(
      self.attention, dropout_rate, mask=mask is not None, bias=relative is not None
    )
    kv = x if kv is None else kv
    causal = self.causal
    if self.only_first:
      x = first_token(x)  # [B, 1, D]
      if causal:  # The first query sees the first token only.
        kv, causal = x, False
      mask = None if mask is None else mask[:, :, :1, : kv.shape[1]]

    head_dim = width // self.num_heads
    types = dtypes.of(self)
    heads = functools.partial(_Heads, self.num_heads, head_dim, self.qkv_bias, **types)
    query = heads(name='query')(x)  # [B, Q, K, E]
    key = heads(name='key')(kv)  # [B, S, K, E]
    if self.qk_norm:
      query = self._norm('query_ln')(query)
      key = self._norm('key_ln')(key)
    if angles is not None:
      query = positions.rotate(query, angles[: query.shape[1]])
      key = positions.rotate(key, angles)
    value = heads(name='value')(kv if values is None else values)
    query, key, value = sharding.gather_keys(query, key, value)

    options = attention_kernels.Options(
      mask, causal, length, relative, scale=head_dim**-0.5
    )
    attend = self._implementation(head_dim, key.shape[1], options, dropout_rate)
    x = attend(query, key, value, options)  # [B, Q, K, E]
    if self.attention_norm:
      flat = x.reshape(*x.shape[:2], width)
      x = self._norm('out_ln')(flat).reshape(x.shape)
    out = nn.DenseGeneral(
      features=width,
      axis=(-2, -1),
      kernel_init=nn.initializers.xavier_uniform(),
      dot_general=xla_hints.dot_general,
      name='out',
      **types,
    )(x)
    return out.astype(dtypes.result_of(self, kv))  # [B, Q, D]

  @nn.nowrap
  def _norm(self, name: str) -> nn.Module:
    return norms.make(self.norm, self.norm_eps, name, **dtypes.of(self))

  @nn.nowrap
  def _implementation(
    self,
    head_dim: int,
    tokens: int,
    options: attention_kernels.Options,
    dropout_rate: float,
  ) -> attention_kernels.Implementation:
    """Returns the chosen implementation, or the one that has the weights."""
    sows = self.is_initializing() or self.is_mutable_collection('intermediates')
    if dropout_rate or sows:
      return functools.partial(self._with_weights, dropout_rate)
    has_bias = options.mask is not None or options.relative is not None
    is_plain = not has_bias and not self.only_first
    name = choose(self.attention, self.dtype, head_dim, tokens, is_plain)
    return IMPLEMENTATIONS[name]

  @nn.nowrap
  def _with_weights(
    self,
    dropout_rate: float,
    query: attention_kernels.Queries,
    key: attention_kernels.Keys,
    value: attention_kernels.Keys,
    options: attention_kernels.Options,
  ) -> attention_kernels.Queries:
    """Computes attention with its weights as an array, which it sows."""
    weights = attention_kernels.attention_weights(query, key, options)
    self.sow('intermediates', 'attention_weights', weights)
    if not self.is_initializing():
      weights = self.perturb('attention_weights', weights)
    drop = nn.Dropout(self.dropout_rate, deterministic=not dropout_rate)
    weights = drop(weights.astype(value.dtype))
    return attention_kernels.dot_values(weights, value)
