"""Hints to XLA that make programs faster on GPUs and CPUs.

Outside of matrix products and attention, an update spends most of its time reading
and writing activations, and XLA's default choices on GPUs add extra passes. On CPUs,
its default form of some matrix products is slow. On TPUs these functions do nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import layout
from jaxtyping import Float

from vit_jax.layers import dtypes
from vit_jax.layers.dtypes import Array


def on_gpus() -> bool:
  """Returns whether the program that is traced is for GPUs."""
  return dtypes.platform() in ('gpu', 'cuda')


def on_tpus() -> bool:
  """Returns whether the program that is traced is for TPUs."""
  return dtypes.platform() == 'tpu'


@jax.jit
def _row_major(x: Float[Array, '*axes']) -> Float[Array, '*axes']:
  order = layout.Layout(tuple(range(x.ndim)))
  return layout.with_layout_constraint(x, order)


def row_major(x: Float[Array, '*axes']) -> Float[Array, '*axes']:
  """Stores the activations `x` with their last dimension contiguous.

  By default XLA stores tokens [B, N, D] with the batch contiguous, and transposes
  them around every matrix product. Has no effect on several devices before JAX 0.11,
  which would gather the batch.
  """
  splits = jax.__version_info__ >= (0, 11) or jax.device_count() == 1
  return _row_major(x) if splits and on_gpus() else x


@jax.custom_jvp
def _apart(x: Float[Array, '*axes']) -> Float[Array, '*axes']:
  """Returns `x`, computed on its own; its gradient is computed freely."""
  return jax.lax.optimization_barrier(x)


@_apart.defjvp
def _apart_jvp(
  primals: tuple[Float[Array, '*axes']], tangents: tuple[Float[Array, '*axes']]
) -> tuple[Float[Array, '*axes'], Float[Array, '*axes']]:
  return _apart(*primals), *tangents


def residual(
  x: Float[Array, 'B N D'], branch: Float[Array, 'B N D'], train: bool
) -> Float[Array, 'B N D']:
  """Adds the result of a branch to `x`.

  XLA lets a matrix product add its result to `x` in place, which first copies
  `x` if the backward pass reads it too (`train`). The sum then costs less where
  it is computed together with the norm that follows.
  """
  if train and on_gpus():
    branch = _apart(branch)
  return x + branch


def recomputed(function: Callable) -> Callable:
  """Returns a function whose backward pass stores only the arguments."""
  return function if on_tpus() else jax.checkpoint(function)


@jax.custom_jvp
def _kernel(x: Float[Array, 'D E']) -> Float[Array, 'D E']:
  """Returns a kernel whose gradient is a product [E, D], transposed at the end.

  XLA would merge the transpose into the product, and has a slower program for that.
  """
  return x


@_kernel.defjvp
def _kernel_jvp(
  primals: tuple[Float[Array, 'D E']], tangents: tuple[Float[Array, 'D E']]
) -> tuple[Float[Array, 'D E'], Float[Array, 'D E']]:
  return primals[0], jax.lax.optimization_barrier(tangents[0].T).T


def dot_general(
  x: Float[Array, '*axes D'], kernel: Float[Array, 'D E'], *args: Any, **options: Any
) -> Float[Array, '*axes E']:
  """Multiplies `x` with a kernel, as `jax.lax.dot_general`."""
  if dtypes.platform() == 'cpu':
    kernel = _kernel(kernel)
  return jax.lax.dot_general(x, kernel, *args, **options)
