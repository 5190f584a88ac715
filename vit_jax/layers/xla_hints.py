"""Hints to XLA that make programs faster on GPUs and CPUs.

Outside of matrix products and attention, an update spends most of its time reading
and writing activations, and XLA's default choices on GPUs add extra passes. On CPUs,
its default form of some matrix products is slow. On TPUs these functions do nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import layout

from vit_jax.layers import dtypes


def on_gpus() -> bool:
  """Returns whether the program that is traced is for GPUs."""
  return dtypes.platform() in ('gpu', 'cuda')


def on_tpus() -> bool:
  """Returns whether the program that is traced is for TPUs."""
  return dtypes.platform() == 'tpu'


@jax.jit
def _row_major(x: jax.Array) -> jax.Array:
  order = layout.Layout(tuple(range(x.ndim)))
  return layout.with_layout_constraint(x, order)


def row_major(x: jax.Array) -> jax.Array:
  """Stores the activations `x` with their last dimension contiguous.

  By default XLA stores tokens [B, N, D] with the batch contiguous, and transposes
  them around every matrix product. Has no effect on several devices before JAX 0.11,
  which would gather the batch.
  """
  splits = jax.__version_info__ >= (0, 11) or jax.device_count() == 1
  return _row_major(x) if splits and on_gpus() else x


@jax.custom_jvp
def _apart(x: jax.Array) -> jax.Array:
  """Returns `x`, computed on its own; its gradient is computed freely."""
  return jax.lax.optimization_barrier(x)


@_apart.defjvp
def _apart_jvp(
  primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  return _apart(*primals), *tangents


def residual(x: jax.Array, branch: jax.Array, train: bool) -> jax.Array:
  """Adds the result of a branch to `x`, both [B, N, D].

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
def _kernel(x: jax.Array) -> jax.Array:
  """Returns a kernel [D, E] whose gradient is a product [E, D], transposed at the end.

  XLA would merge the transpose into the product, and has a slower program for that.
  """
  return x


@_kernel.defjvp
def _kernel_jvp(
  primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  return primals[0], jax.lax.optimization_barrier(tangents[0].T).T


def dot_general(
  x: jax.Array, kernel: jax.Array, *args: Any, **options: Any
) -> jax.Array:
  """Multiplies `x` with a kernel [D, E], as `jax.lax.dot_general`."""
  if dtypes.platform() == 'cpu':
    kernel = _kernel(kernel)
  return jax.lax.dot_general(x, kernel, *args, **options)
