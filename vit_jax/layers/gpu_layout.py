"""Layout and recomputation hints that reduce memory traffic on GPUs.

Outside of matrix products and attention, an update spends most of its time reading
and writing activations, and XLA's default choices on GPUs add extra passes. On other
devices these functions do nothing.
"""

from collections.abc import Callable

import jax
from jax.experimental import layout

from vit_jax.layers import dtypes


def on_gpus() -> bool:
  """Returns whether the program that is traced is for GPUs."""
  return dtypes.platform() in ('gpu', 'cuda')


@jax.jit
def _row_major(x):
  order = layout.Layout(tuple(range(x.ndim)))
  return layout.with_layout_constraint(x, order)


def row_major(x):
  """Stores the activations `x` with their last dimension contiguous.

  By default XLA stores tokens [B, N, D] with the batch contiguous, and transposes
  them around every matrix product. Has no effect on several devices before JAX 0.11,
  which would gather the batch.
  """
  splits = jax.__version_info__ >= (0, 11) or jax.device_count() == 1
  return _row_major(x) if splits and on_gpus() else x


@jax.custom_jvp
def _apart(x):
  """Returns `x`, computed on its own; its gradient is computed freely."""
  return jax.lax.optimization_barrier(x)


@_apart.defjvp
def _apart_jvp(primals, tangents):
  return _apart(*primals), *tangents


def residual(x, branch, train):
  """Adds the result of a branch to `x`, both [B, N, D].

  XLA lets a matrix product add its result to `x` in place, which first copies
  `x` if the backward pass reads it too (`train`). The sum then costs less where
  it is computed together with the norm that follows.
  """
  if train and on_gpus():
    branch = _apart(branch)
  return x + branch


def recomputed(function: Callable) -> Callable:
  """Returns a function of one array whose backward pass stores only that array."""
  return jax.checkpoint(function) if on_gpus() else function
