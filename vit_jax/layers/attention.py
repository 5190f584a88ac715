"""Multi-head self-attention, and the ways to compute it.

`config.model.transformer.attention` chooses:

  default  matrix products and a softmax, with a backward pass of its own
  xla      jax.nn.dot_product_attention, as XLA has it
  cudnn    the same by cuDNN's flash attention: GPUs from Ampere on, 16 bits
  flash    JAX's flash attention in Pallas: TPUs, long sequences

The numbers are the same but for rounding, and so are the parameters. Only the
default has dropout of the attention weights, and shows them.

Shapes: B images, Q tokens that ask, S tokens that are asked, K heads, E width of
a head.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.scale import sharding

# The flash attention of TPUs works on blocks of so many tokens.
_BLOCK = 128


def first_token(x):
  """Returns the first of tokens [B, N, D], [B, 1, D].

  As a sum: for the sake of a slice the TPU's compiler would lay out the tokens of
  all layers in another way, a tenth slower by its own estimate.
  """
  first = jnp.arange(x.shape[1])[:, None] == 0
  return x.sum(axis=1, keepdims=True, where=first)


def _softmax(logits, dtype):
  """Softmax over the last axis, computed in float32, returned as `dtype`."""
  wide = jnp.promote_types(logits.dtype, jnp.float32)
  return jax.nn.softmax(logits.astype(wide), axis=-1).astype(dtype)


@jax.custom_jvp
def average(logits, value):
  """Averages values with the softmax of logits as weights.

  The tangent is written so that the backward pass needs of the weights' own
  gradient, the largest array of a layer, no sum: the sum over S of weight times
  gradient is that over E of output times its gradient (as in FlashAttention,
  arXiv 2205.14135, appendix B.2). The gradient of the logits is then written to
  memory once, where JAX's softmax writes and reads that of the weights too.

  Args:
    logits: [B, K, Q, S].
    value: [B, S, K, E].

  Returns:
    [B, Q, K, E], of the type of `value`.
  """
  return jnp.einsum('bkqs,bske->bqke', _softmax(logits, value.dtype), value)


@average.defjvp
def _average_jvp(primals, tangents):
  logits, value = primals
  logits_dot, value_dot = tangents
  weights = _softmax(logits, value.dtype)
  out = jnp.einsum('bkqs,bske->bqke', weights, value)
  # Of softmax(logits)' = weights * (logits' - sum(weights * logits')).
  wide = jnp.promote_types(logits.dtype, jnp.float32)
  first = _softmax(logits, wide) * logits_dot.astype(wide)
  mean = first.sum(axis=-1).swapaxes(1, 2)[..., None]  # [B, Q, K, 1]
  dot = (
    jnp.einsum('bkqs,bske->bqke', weights, value_dot)
    + jnp.einsum('bkqs,bske->bqke', first.astype(value.dtype), value)
    - (mean * out.astype(wide)).astype(value.dtype)
  )
  return out, dot


def _flash(query, key, value):
  """Flash attention on each device's own images, and heads where those are split.

  The compiler cannot split a kernel by itself. One query, as the last layer has,
  is no work for blocks of them.
  """
  if query.shape[1] == 1:
    return _default(query, key, value)
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return _flash_on_one_device(query, key, value)
  parts = mesh.shape.get(sharding.MODEL_AXIS, 1)
  heads = (
    sharding.MODEL_AXIS if parts > 1 and query.shape[2] % parts == 0 else None
  )
  spec = jax.P(sharding.batch_axes(mesh), None, heads)
  return jax.shard_map(
    _flash_on_one_device,
    in_specs=(spec, spec, spec),
    out_specs=spec,
    check_vma=False,
  )(query, key, value)


def _flash_on_one_device(query, key, value):
  """JAX's flash attention for TPUs, which wants whole blocks of tokens."""
  from jax.experimental.pallas.ops.tpu import flash_attention

  def blocks(x):  # [B, N, K, E] -> [B, K, whole blocks, E]
    rest = -x.shape[1] % _BLOCK
    return jnp.pad(x, ((0, 0), (0, rest), (0, 0), (0, 0))).swapaxes(1, 2)

  def segments(x):  # What is padded is a segment of its own.
    length = x.shape[1] + -x.shape[1] % _BLOCK
    return jnp.broadcast_to(
      (jnp.arange(length) >= x.shape[1]).astype(jnp.int32), (len(x), length)
    )

  out = flash_attention.flash_attention(
    *map(blocks, (query, key, value)),
    segment_ids=flash_attention.SegmentIds(segments(query), segments(key)),
  )
  return out.swapaxes(1, 2)[:, : query.shape[1]]


def _default(query, key, value):
  return average(jnp.einsum('bqke,bske->bkqs', query, key), value)


# (queries [B, Q, K, E], already scaled; keys, values [B, S, K, E]) -> [B, Q, K, E].
IMPLEMENTATIONS = {
  'default': _default,
  'xla': functools.partial(
    jax.nn.dot_product_attention, scale=1.0, implementation='xla'
  ),
  'cudnn': functools.partial(
    jax.nn.dot_product_attention, scale=1.0, implementation='cudnn'
  ),
  'flash': _flash,
}


def check(
  name: str, dropout_rate: float, platform: str | None = None, dtype: str = ''
) -> None:
  """Checks that a way to compute attention goes with the devices.

  Args:
    name: `config.model.transformer.attention`.
    dropout_rate: of the attention weights.
    platform: of the devices: 'cpu', 'gpu' or 'tpu'; None where it is not known.
    dtype: `config.model.dtype`.

  Raises:
    ValueError: says what it needs, and the remedy.
  """
  problem = None
  if name not in IMPLEMENTATIONS:
    problem = f'is unknown: use one of {", ".join(IMPLEMENTATIONS)}'
  elif (
    name == 'cudnn' and platform and (platform, dtype) != ('gpu', 'bfloat16')
  ):
    problem = (
      'needs NVIDIA GPUs from Ampere on and --config.model.dtype=bfloat16, and '
      f"these are '{platform}' devices with {dtype}: use 'default'"
    )
  elif name == 'flash' and platform not in ('tpu', None):
    problem = f"needs TPUs, and these are '{platform}' devices: use 'default'"
  elif name != 'default' and dropout_rate:
    problem = (
      'has no dropout of the attention weights: set '
      "--config.model.transformer.attention_dropout_rate=0.0, or use 'default'"
    )
  if problem:
    raise ValueError(
      f"attention='{name}' {problem} (config.model.transformer.attention)"
    )


class MultiHeadDotProductAttention(nn.Module):
  """Multi-head self-attention (appendix A), softmax in float32.

  Attributes:
    num_heads: number of heads K; must divide the width.
    dropout_rate: dropout of the attention weights (0 in the paper).
    attention: how it is computed, see the top of this module.
    only_first: whether the result is wanted for the first token alone, which
      attends to all.
    dtype: type of the computation.
    param_dtype: type of the parameters.
  """

  num_heads: int
  dropout_rate: float = 0.0
  attention: str = 'default'
  only_first: bool = False
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x, *, deterministic):
    """Maps tokens [B, N, D] to [B, N, D], or to [B, 1, D].

    Raises:
      ValueError: if the heads do not divide the width, if `attention` is none of
        its values, or has no dropout.
    """
    width = x.shape[-1]
    if width % self.num_heads:
      raise ValueError(
        f'num_heads={self.num_heads} does not divide the width {width} '
        '(config.model.hidden_size): choose a divisor'
      )
    dropout = 0.0 if deterministic else self.dropout_rate
    check(self.attention, dropout)
    head_dim = width // self.num_heads
    dense = functools.partial(
      nn.DenseGeneral,
      kernel_init=nn.initializers.xavier_uniform(),
      dtype=self.dtype,
      param_dtype=self.param_dtype,
    )
    heads = functools.partial(dense, features=(self.num_heads, head_dim))
    asking = first_token(x) if self.only_first else x
    query = heads(name='query')(asking)  # [B, Q, K, E]
    query = query * head_dim**-0.5
    key = heads(name='key')(x)  # [B, S, K, E]
    value = heads(name='value')(x)  # [B, S, K, E]
    if (
      dropout
      or self.is_initializing()
      or self.is_mutable_collection('intermediates')
    ):
      # Logits are stored as `dtype`: in bfloat16 half the traffic of the largest
      # array of the layer.
      logits = jnp.einsum('bqke,bske->bkqs', query, key)  # [B, K, Q, S]
      weights = _softmax(logits, jnp.promote_types(logits.dtype, jnp.float32))
      self.sow('intermediates', 'attention_weights', weights)
      weights = nn.Dropout(self.dropout_rate)(
        weights.astype(value.dtype), deterministic=deterministic
      )
      x = jnp.einsum('bkqs,bske->bqke', weights, value)
    else:
      x = IMPLEMENTATIONS[self.attention](query, key, value)  # [B, Q, K, E]
    return dense(features=width, axis=(-2, -1), name='out')(x)  # [B, Q, D]
