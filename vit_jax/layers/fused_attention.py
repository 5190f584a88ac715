"""Attention of few tokens on TPUs, whose logits stay in the vector memory of the core.

A program of the kernel handles all tokens and several heads of one image: it reads
queries, keys and values once, and writes the result, or in the backward pass the three
gradients. The attention that XLA compiles writes the logits, B K N N numbers, and reads
them several times, which for 197 tokens is half of a layer's memory traffic.

Shapes: B images, N tokens, K heads, E width of a head; D = K E. Heads lie side by side.
"""

from collections.abc import Callable
import functools
import math
from typing import Any, TypeAlias

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jaxtyping import Float

from vit_jax.layers.dtypes import Array

Tokens: TypeAlias = Float[Array, 'B N D']
# Memory for the arrays of a program, in bytes; the rest is for logits.
_ARRAY_BYTES = 6 * 2**20
# Programs with more heads compile slowly, since the code is repeated for each head.
_MOST_HEADS = 8
_LANES = 128
_LOWEST = -1e30


def attend(
  query: Tokens,
  key: Tokens,
  value: Tokens,
  head_dim: int,
  causal: bool = False,
  multiply_as: Any = None,
) -> Tokens:
  """Averages values, weighted by the softmax of the products of queries and keys.

  Args:
    query: queries that are already scaled, at most 640 tokens, since the logits of more
      do not fit into the vector memory of a core.
    key: keys, as many as queries.
    value: values, as many as keys.
    head_dim: E.
    causal: whether token i attends to tokens 0 to i only.
    multiply_as: the type of the factors of matrix products; None: that of the arrays.
      Sums and the softmax are float32.

  Returns:
    The averages, in the type of the queries.
  """
  dtype = jnp.dtype(multiply_as or query.dtype)
  return _attend(query, key, value, head_dim, causal, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _attend(
  query: Tokens, key: Tokens, value: Tokens, head_dim: int, causal: bool, dtype: Any
) -> Tokens:
  kernel = functools.partial(
    _forward_kernel, head_dim=head_dim, causal=causal, dtype=dtype
  )
  [out] = _call(kernel, 1, head_dim, query, key, value)
  return out


def _forward(
  query: Tokens, key: Tokens, value: Tokens, head_dim: int, causal: bool, dtype: Any
) -> tuple[Tokens, tuple[Tokens, ...]]:
  out = _attend(query, key, value, head_dim, causal, dtype)
  return out, (query, key, value)


def _backward(
  head_dim: int, causal: bool, dtype: Any, inputs: tuple[Tokens, ...], gradient: Tokens
) -> tuple[Tokens, ...]:
  kernel = functools.partial(
    _backward_kernel, head_dim=head_dim, causal=causal, dtype=dtype
  )
  return _call(kernel, 3, head_dim, *inputs, gradient)


_attend.defvjp(_forward, _backward)


def _call(
  kernel: Callable[..., None], num_outputs: int, head_dim: int, *inputs: Tokens
) -> tuple[Tokens, ...]:
  """Runs a kernel on each image and group of heads."""
  num_images, num_tokens, width = inputs[0].shape
  lanes = _lanes(num_tokens, width, head_dim, inputs[0].dtype.itemsize)
  block = pl.BlockSpec((1, num_tokens, lanes), lambda image, group: (image, 0, group))
  out = jax.ShapeDtypeStruct(inputs[0].shape, inputs[0].dtype)
  compute = pl.pallas_call(
    kernel,
    grid=(num_images, width // lanes),
    in_specs=[block] * len(inputs),
    out_specs=[block] * num_outputs,
    out_shape=[out] * num_outputs,
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel')),
  )
  return tuple(compute(*inputs))


def _lanes(num_tokens: int, width: int, head_dim: int, itemsize: int) -> int:
  """Returns the total width of a program's heads, as many as fit into memory.

  It is a multiple of 128, or the whole width.
  """
  unit = math.lcm(head_dim, _LANES)
  if width % unit:
    return width
  # Seven arrays in the backward pass, each twice: the next ones are read meanwhile.
  most = min(_ARRAY_BYTES // (14 * num_tokens * itemsize), _MOST_HEADS * head_dim)
  num_units = width // unit
  fitting = [
    n for n in range(1, num_units + 1) if num_units % n == 0 and n * unit <= most
  ]
  return unit * max(fitting, default=1)


def _forward_kernel(
  query_ref: Any,
  key_ref: Any,
  value_ref: Any,
  out_ref: Any,
  *,
  head_dim: int,
  causal: bool,
  dtype: Any,
) -> None:
  query, key, value = (x[0].astype(dtype) for x in (query_ref, key_ref, value_ref))
  for start in range(0, query.shape[1], head_dim):
    head = slice(start, start + head_dim)
    weights = _weights(query[:, head], key[:, head], causal)
    out = _dot(weights.astype(dtype), value[:, head], (1, 0))
    out_ref[0, :, head] = out.astype(out_ref.dtype)


def _backward_kernel(
  query_ref: Any,
  key_ref: Any,
  value_ref: Any,
  gradient_ref: Any,
  query_gradient_ref: Any,
  key_gradient_ref: Any,
  value_gradient_ref: Any,
  *,
  head_dim: int,
  causal: bool,
  dtype: Any,
) -> None:
  query, key, value = (x[0].astype(dtype) for x in (query_ref, key_ref, value_ref))
  gradient = gradient_ref[0].astype(dtype)
  for start in range(0, query.shape[1], head_dim):
    head = slice(start, start + head_dim)
    weights = _weights(query[:, head], key[:, head], causal)
    weight_gradient = _dot(gradient[:, head], value[:, head], (1, 1))
    mean = (weights * weight_gradient).sum(axis=-1, keepdims=True)
    logit_gradient = (weights * (weight_gradient - mean)).astype(dtype)
    query_gradient = _dot(logit_gradient, key[:, head], (1, 0))
    key_gradient = _dot(logit_gradient, query[:, head], (0, 0))
    value_gradient = _dot(weights.astype(dtype), gradient[:, head], (0, 0))
    query_gradient_ref[0, :, head] = query_gradient.astype(query_gradient_ref.dtype)
    key_gradient_ref[0, :, head] = key_gradient.astype(key_gradient_ref.dtype)
    value_gradient_ref[0, :, head] = value_gradient.astype(value_gradient_ref.dtype)


def _weights(
  query: Float[Array, 'N E'], key: Float[Array, 'N E'], causal: bool
) -> Float[Array, 'N N']:
  """Returns the attention weights of a head, float32."""
  logits = _dot(query, key, (1, 1))
  if causal:
    rows = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    logits = jnp.where(columns <= rows, logits, _LOWEST)
  exponentials = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
  return exponentials / exponentials.sum(axis=-1, keepdims=True)


def _dot(
  x: Float[Array, '_ _'], y: Float[Array, '_ _'], axes: tuple[int, int]
) -> Float[Array, '_ _']:
  """Multiplies matrices over one axis of each, float32."""
  contracted = ((axes[0],), (axes[1],))
  return jax.lax.dot_general(
    x, y, (contracted, ((), ())), preferred_element_type=jnp.float32
  )
