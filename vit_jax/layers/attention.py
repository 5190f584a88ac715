"""Multi-head attention, and the ways to compute it.

`config.model.transformer.attention` chooses:

  default  matrix products and a softmax, with a backward pass of its own
  xla      jax.nn.dot_product_attention, as XLA has it
  cudnn    the same by cuDNN's flash attention: GPUs from Ampere on, 16 bits
  flash    JAX's flash attention in Pallas: TPUs, long sequences

The numbers are the same but for rounding, and so are the parameters. They differ
in what they can do:

           dropout of weights   other keys   causal   mask
  default  yes                  yes          yes      yes
  xla      no                   yes          yes      yes
  cudnn    no                   yes          yes      yes, as a bias in memory
  flash    no                   yes          yes      no

Other keys are those of another sequence (cross-attention). Who asks to see the
attention weights is shown those of the default, with causality and mask in them.
A query that may attend to nothing at all gets zeros, whatever computes it, and
passes no gradient on: its weights are zeros too.

Shapes: B images, Q tokens that ask, S tokens that are asked, K heads, E width of
a head, D and D' width of a token in the two sequences.
"""

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.layers import attention_kernels

IMPLEMENTATIONS = attention_kernels.IMPLEMENTATIONS
average = attention_kernels.average
check = attention_kernels.check


def first_token(x):
  """Returns the first of tokens [B, N, D], [B, 1, D].

  As a sum: for the sake of a slice the TPU's compiler would lay out the tokens of
  all layers in another way, a tenth slower by its own estimate.
  """
  first = jnp.arange(x.shape[1])[:, None] == 0
  return x.sum(axis=1, keepdims=True, where=first)


def _check_inputs(x, kv, mask, num_heads, causal):
  """Returns the mask with four dimensions.

  Raises:
    ValueError: where shapes or types are not those of attention.
  """
  if x.shape[-1] % num_heads:
    raise ValueError(
      f'num_heads={num_heads} does not divide the width {x.shape[-1]} '
      '(config.model.hidden_size): choose a divisor'
    )
  if kv is not None and causal:
    raise ValueError(
      'causal=True has no meaning for the keys of another sequence: leave kv '
      'out, or give a mask in its place'
    )
  if kv is not None and (kv.ndim != 3 or len(kv) != len(x)):
    raise ValueError(
      f'kv must be tokens [{len(x)}, tokens, width], got {kv.shape}'
    )
  if mask is None:
    return None
  keys = (x if kv is None else kv).shape[1]
  whole = (len(x), num_heads, x.shape[1], keys)
  fits = mask.ndim <= 4 and all(
    size in (1, full) for size, full in zip(mask.shape[::-1], whole[::-1])
  )
  if mask.dtype != bool or not fits:
    raise ValueError(
      'mask must be bool, True where a query may attend to a key, and broadcast '
      f'to [batch, heads, queries, keys] = {list(whole)}, got {mask.dtype} '
      f'{list(mask.shape)}; [batch, 1, 1, keys] leaves out keys'
    )
  return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


class MultiHeadDotProductAttention(nn.Module):
  """Multi-head attention (appendix A), softmax in float32.

  Attributes:
    num_heads: number of heads K; must divide the width.
    dropout_rate: dropout of the attention weights (0 in the paper).
    attention: how it is computed, see the top of this module.
    only_first: whether the result is wanted for the first token alone. It is the
      same as if all were computed: causal, the first token sees itself alone.
    causal: whether token i attends to tokens 0 to i alone; self-attention only.
    dtype: type of the computation.
    param_dtype: type of the parameters.
  """

  num_heads: int
  dropout_rate: float = 0.0
  attention: str = 'default'
  only_first: bool = False
  causal: bool = False
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x, kv=None, *, mask=None, deterministic):
    """Lets tokens attend to each other, or to those of another sequence.

    Args:
      x: the tokens that ask, [B, Q, D].
      kv: the tokens that are asked, [B, S, D'], from which keys and values are
        made; None: those of `x`.
      mask: bool, broadcastable to [B, K, Q, S], True where a query may attend to
        a key; None: everywhere.
      deterministic: whether dropout is off.

    Returns:
      [B, Q, D], or [B, 1, D] for the first token alone. Where a query may attend
      to nothing, the bias of the last layer.

    Raises:
      ValueError: if the heads do not divide the width, if `attention` is none of
        its values, or has no dropout or no mask, if `kv` or `mask` has another
        shape or type, or `kv` is given where attention is causal.
    """
    width = x.shape[-1]
    mask = _check_inputs(x, kv, mask, self.num_heads, self.causal)
    dropout = 0.0 if deterministic else self.dropout_rate
    check(self.attention, dropout, mask=mask is not None)
    head_dim = width // self.num_heads
    dense = functools.partial(
      nn.DenseGeneral,
      kernel_init=nn.initializers.xavier_uniform(),
      dtype=self.dtype,
      param_dtype=self.param_dtype,
    )
    heads = functools.partial(dense, features=(self.num_heads, head_dim))
    kv = x if kv is None else kv
    causal = self.causal and not self.only_first
    if self.only_first:
      x = first_token(x)  # [B, 1, D]
      kv = x if self.causal else kv
      if mask is not None:
        mask = mask[:, :, :1, : kv.shape[1]]
    query = heads(name='query')(x)  # [B, Q, K, E]
    query = query * head_dim**-0.5
    key = heads(name='key')(kv)  # [B, S, K, E]
    value = heads(name='value')(kv)  # [B, S, K, E]
    if (
      dropout
      or self.is_initializing()
      or self.is_mutable_collection('intermediates')
    ):
      weights = attention_kernels.attention_weights(query, key, mask, causal)
      self.sow('intermediates', 'attention_weights', weights)
      weights = nn.Dropout(self.dropout_rate)(
        weights.astype(value.dtype), deterministic=deterministic
      )
      x = jnp.einsum('bkqs,bske->bqke', weights, value)
    else:  # [B, Q, K, E]
      x = IMPLEMENTATIONS[self.attention](query, key, value, mask, causal)
    return dense(features=width, axis=(-2, -1), name='out')(x)  # [B, Q, D]
