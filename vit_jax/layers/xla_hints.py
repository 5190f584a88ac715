"""Hints to XLA that make programs faster on GPUs and CPUs.

Outside of matrix products and attention, an update spends most of its time reading
and writing activations, and XLA's default choices on GPUs add extra passes. On CPUs,
its default form of some matrix products is slow, and products of 16 bits use no
instructions for them. On TPUs these functions do nothing.
"""

from collections.abc import Callable, Sequence
import math
import re
import string
from typing import Any

import jax
from jax.experimental import layout
from jax.extend import core
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp
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


def has_16_bits_on_cpus(x: Float[Array, '...']) -> bool:
  """Returns whether the program is for CPUs and `x` has 16 bits, see `einsum`."""
  return dtypes.platform() == 'cpu' and x.dtype.itemsize == 2


def _multiply(
  x: Float[Array, '...'], y: Float[Array, '...'], subscripts: str
) -> Float[Array, '...']:
  """Returns `jnp.einsum` as float32."""
  x_axes, y_axes, out_axes = re.split(',|->', subscripts)
  size = axis_sizes(subscripts, x.shape, y.shape)
  shared = [axis for axis in x_axes if axis in y_axes]
  batch = [axis for axis in shared if axis in out_axes]
  if not batch:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)
  summed = [axis for axis in shared if axis not in out_axes]
  rows = [axis for axis in x_axes if axis not in shared]
  columns = [axis for axis in y_axes if axis not in shared]

  def matrices(
    array: Float[Array, '...'], axes: str, groups: Sequence[Sequence[str]]
  ) -> Float[Array, 'matrix row column']:
    order = [axes.index(axis) for group in groups for axis in group]
    shape = [math.prod(size[axis] for axis in group) for group in groups]
    return array.transpose(order).reshape(shape)

  # XLA has fast programs for 16 bits only for one batch axis in front. The reshapes keep
  # it from merging transposes into the product.
  is_last = y_axes.endswith(''.join(summed))
  y_groups = (batch, columns, summed) if is_last else (batch, summed, columns)
  out = jax.lax.dot_general(
    matrices(x, x_axes, (batch, rows, summed)),
    matrices(y, y_axes, y_groups),
    (((2,), (y_groups.index(summed),)), ((0,), (0,))),
    preferred_element_type=jnp.float32,
  )
  axes = [*batch, *rows, *columns]
  out = out.reshape([size[axis] for axis in axes])
  return out.transpose([axes.index(axis) for axis in out_axes])


def axis_sizes(subscripts: str, x: Sequence[int], y: Sequence[int]) -> dict[str, int]:
  """Returns the sizes of the axes of an `einsum` of arrays with these shapes."""
  x_axes, y_axes, _ = re.split(',|->', subscripts)
  return dict(zip(x_axes + y_axes, (*x, *y)))


# A primitive, since JAX multiplies gradients of `dot_general` in the type of its result.
PRODUCT = 'product_of_16_bits'
_product = core.Primitive(PRODUCT)
_product.def_impl(jax.jit(_multiply, static_argnames='subscripts'))
mlir.register_lowering(_product, mlir.lower_fun(_multiply, multiple_results=False))


@_product.def_abstract_eval
def _product_type(x: Any, y: Any, *, subscripts: str) -> jax.core.ShapedArray:
  *_, out_axes = re.split(',|->', subscripts)
  size = axis_sizes(subscripts, x.shape, y.shape)
  return jax.core.ShapedArray([size[axis] for axis in out_axes], jnp.float32)


def _x_gradient(
  gradient: Float[Array, '...'], x: Any, y: Float[Array, '...'], *, subscripts: str
) -> Float[Array, '...']:
  x_axes, y_axes, out_axes = re.split(',|->', subscripts)
  gradient = gradient.astype(y.dtype)
  return einsum(f'{out_axes},{y_axes}->{x_axes}', gradient, y).astype(y.dtype)


def _y_gradient(
  gradient: Float[Array, '...'], x: Float[Array, '...'], y: Any, *, subscripts: str
) -> Float[Array, '...']:
  x_axes, y_axes, out_axes = re.split(',|->', subscripts)
  gradient = gradient.astype(x.dtype)
  return einsum(f'{x_axes},{out_axes}->{y_axes}', x, gradient).astype(x.dtype)


ad.defbilinear(_product, _x_gradient, _y_gradient)


def _batch_product(
  operands: Sequence[Float[Array, '...']],
  axes: Sequence[int | None],
  *,
  subscripts: str,
) -> tuple[Float[Array, '...'], int]:
  """Returns the products under jax.vmap, and the position of their batch axis."""
  x_axes, y_axes, out_axes = re.split(',|->', subscripts)
  names = [x_axes, y_axes]
  new = next(axis for axis in string.ascii_letters if axis not in subscripts)
  moved = []
  for i, axis in enumerate(axes):
    operand = operands[i]
    if axis is not None:
      operand = jnp.moveaxis(operand, axis, 0)
      names[i] = new + names[i]
    moved.append(operand)
  return einsum(f'{names[0]},{names[1]}->{new}{out_axes}', *moved), 0


batching.primitive_batchers[_product] = _batch_product


def einsum(
  subscripts: str, x: Float[Array, '...'], y: Float[Array, '...']
) -> Float[Array, '...']:
  """Returns `jnp.einsum`; on CPUs, that of numbers of 16 bits is float32.

  XLA's programs for CPUs use the processor's instructions for 16 bits only for products
  whose result is float32; otherwise they convert all numbers to float32 first.
  """
  if has_16_bits_on_cpus(x):
    return _product.bind(x, y, subscripts=subscripts)
  return jnp.einsum(subscripts, x, y)


def dot_general(
  x: Float[Array, '...'],
  kernel: Float[Array, '...'],
  dimensions: jax.lax.DotDimensionNumbers,
  **options: Any,
) -> Float[Array, '...']:
  """Multiplies the last axes of `x` with the first of a kernel, for flax.linen.Dense.

  As `jax.lax.dot_general`, with the result of `einsum`.
  """
  if has_16_bits_on_cpus(x):
    rows = x.ndim - len(dimensions[0][0])
    x_axes = string.ascii_lowercase[: x.ndim]
    columns = string.ascii_uppercase[: rows + kernel.ndim - x.ndim]
    subscripts = f'{x_axes},{x_axes[rows:]}{columns}->{x_axes[:rows]}{columns}'
    return einsum(subscripts, x, kernel)
  if dtypes.platform() == 'cpu' and kernel.ndim == 2:
    kernel = _kernel(kernel)
  return jax.lax.dot_general(x, kernel, dimensions, **options)


def rounded(x: Float[Array, '*axes'], dtype: Any) -> Float[Array, '*axes']:
  """Returns what a layer with this `dtype` has computed from products of 16 bits."""
  return x if dtype is None else x.astype(dtype)
