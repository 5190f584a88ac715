"""Hints to XLA that make programs faster on GPUs and CPUs.

Outside of matrix products and attention, an update spends most of its time reading
and writing activations, and XLA's default choices on GPUs add extra passes. On CPUs,
its default form of some matrix products is slow, and it converts 16-bit products to
float32 instead of using the processor's 16-bit instructions. On TPUs these functions do
nothing.
"""

from collections.abc import Callable, Sequence
import functools
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
  """Returns whether the traced program targets GPUs."""
  return dtypes.platform() in ('gpu', 'cuda')


def on_tpus() -> bool:
  """Returns whether the traced program targets TPUs."""
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
  mesh = jax.sharding.get_abstract_mesh()
  num_devices = jax.device_count() if mesh.empty else mesh.size
  splits = jax.__version_info__ >= (0, 11) or num_devices == 1
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


def is_16_bit_on_cpu(x: Float[Array, '...']) -> bool:
  """Returns whether `x` has 16 bits and the traced program targets CPUs.

  Inside jax.shard_map it returns False: JAX tracks what varies between devices for its
  own operations only, and would not sum gradients over devices.
  """
  types = jax.sharding.get_abstract_mesh().axis_types
  is_manual = jax.sharding.AxisType.Manual in (types or ())
  return dtypes.platform() == 'cpu' and x.dtype.itemsize == 2 and not is_manual


def axis_sizes(
  subscripts: str, x_shape: Sequence[int], y_shape: Sequence[int]
) -> dict[str, int]:
  """Returns the sizes of the axes of an `einsum` of arrays with these shapes."""
  x_axes, y_axes, _ = _split(subscripts)
  return dict(zip(x_axes + y_axes, (*x_shape, *y_shape)))


def batch_axes(subscripts: str) -> list[str]:
  """Returns the axes of an `einsum` that both operands and the result have."""
  x_axes, y_axes, out_axes = _split(subscripts)
  return [axis for axis in x_axes if axis in y_axes and axis in out_axes]


def _split(subscripts: str) -> list[str]:
  return re.split(',|->', subscripts)


def _multiply(
  x: Float[Array, '...'], y: Float[Array, '...'], subscripts: str
) -> Float[Array, '...']:
  """Computes `jnp.einsum` of two arrays, with a float32 result.

  XLA fails to run some 16-bit products with such a result. Forms other than those that
  were tested are computed in float32.
  """
  size = axis_sizes(subscripts, x.shape, y.shape)
  x_axes, y_axes, out_axes = _split(subscripts)
  batch = ''.join(batch_axes(subscripts))
  contracted = ''.join(axis for axis in x_axes if axis not in out_axes)
  rows = ''.join(axis for axis in x_axes if axis not in y_axes)
  columns = ''.join(axis for axis in y_axes if axis not in x_axes)

  def matrices(array: Float[Array, '...'], axes: str, *groups: str) -> Array:
    order = [axes.index(axis) for group in groups for axis in group]
    shape = [math.prod(size[axis] for axis in group) for group in groups]
    return array.transpose(order).reshape(shape)

  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  ordered = x_axes == rows + contracted
  ordered = ordered and y_axes in (contracted + columns, columns + contracted)
  if batch or ordered:
    # With one batch axis. The reshapes keep XLA from merging transposes into the product.
    x = matrices(x, x_axes, batch, rows, contracted)
    if y_axes.endswith(contracted):  # Spares a transpose of y.
      out = product('bnd,bed->bne', x, matrices(y, y_axes, batch, columns, contracted))
    else:
      out = product('bnd,bde->bne', x, matrices(y, y_axes, batch, contracted, columns))
  elif (x_axes, y_axes) == (contracted + rows, contracted + columns) and (
    len(rows) == len(columns) == 1
  ):  # The gradient of a kernel.
    out = product(f'{x_axes},{y_axes}->{rows}{columns}', x, y)
  else:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    out = jnp.einsum(f'{x_axes},{y_axes}->{rows}{columns}', x, y)
  # The barrier keeps XLA from merging a transpose of the result into the product.
  axes = batch + rows + columns
  out = jax.lax.optimization_barrier(out).reshape([size[axis] for axis in axes])
  return out.transpose([axes.index(axis) for axis in out_axes])


# The transpose rule of JAX's own product with a float32 result multiplies the gradient
# in float32, which is slow. jax.custom_vjp would allow another rule, but not forward mode,
# which the rule of vit_jax.layers.attention_kernels.average needs. Hence a primitive.
PRODUCT = 'einsum_16_bit'
_einsum_p = core.Primitive(PRODUCT)
_einsum_p.def_impl(jax.jit(_multiply, static_argnames='subscripts'))
mlir.register_lowering(_einsum_p, mlir.lower_fun(_multiply, multiple_results=False))


@_einsum_p.def_abstract_eval
def _abstract_eval(x: Any, y: Any, *, subscripts: str) -> jax.core.ShapedArray:
  size = axis_sizes(subscripts, x.shape, y.shape)
  *_, out_axes = _split(subscripts)
  return jax.core.ShapedArray([size[axis] for axis in out_axes], jnp.float32)


def _transpose_x(
  cotangent: Float[Array, '...'], x: Any, y: Float[Array, '...'], *, subscripts: str
) -> Float[Array, '...']:
  x_axes, y_axes, out_axes = _split(subscripts)
  cotangent = cotangent.astype(y.dtype)
  return einsum(f'{out_axes},{y_axes}->{x_axes}', cotangent, y).astype(y.dtype)


def _transpose_y(
  cotangent: Float[Array, '...'], x: Float[Array, '...'], y: Any, *, subscripts: str
) -> Float[Array, '...']:
  x_axes, y_axes, out_axes = _split(subscripts)
  cotangent = cotangent.astype(x.dtype)
  return einsum(f'{x_axes},{out_axes}->{y_axes}', x, cotangent).astype(x.dtype)


ad.defbilinear(_einsum_p, _transpose_x, _transpose_y)


def _batching_rule(
  operands: Sequence[Float[Array, '...']],
  positions: Sequence[int | None],
  *,
  subscripts: str,
) -> tuple[Float[Array, '...'], int]:
  """Returns the batched product and its batch axis, 0."""
  x_axes, y_axes, out_axes = _split(subscripts)
  new = next(axis for axis in string.ascii_letters if axis not in subscripts)

  def insert(axes: str, position: int | None) -> str:
    return axes if position is None else axes[:position] + new + axes[position:]

  x_axes, y_axes = insert(x_axes, positions[0]), insert(y_axes, positions[1])
  return einsum(f'{x_axes},{y_axes}->{new}{out_axes}', *operands), 0


batching.primitive_batchers[_einsum_p] = _batching_rule


def einsum(
  subscripts: str,
  x: Float[Array, '...'],
  y: Float[Array, '...'],
  preferred_element_type: Any = None,
) -> Float[Array, '...']:
  """Computes `jnp.einsum` of two arrays; on CPUs, 16-bit arrays give a float32 result.

  XLA's CPU backend uses the processor's 16-bit instructions only for products with a
  float32 result; otherwise it first converts the arrays to float32. Gradients have the
  type of the arrays.

  Args:
    subscripts: with an explicit output and without ellipsis. Each axis of an array is
      also an axis of the other one or of the output.
    x: an array.
    y: an array, of the same type for a float32 result.
    preferred_element_type: type of the result elsewhere; None: the type of the arrays.
  """
  if is_16_bit_on_cpu(x) and x.dtype == y.dtype:
    return _einsum_p.bind(x, y, subscripts=subscripts)
  return jnp.einsum(subscripts, x, y, preferred_element_type=preferred_element_type)


def dot_general(
  x: Float[Array, '...'],
  kernel: Float[Array, '...'],
  dimension_numbers: jax.lax.DotDimensionNumbers,
  **options: Any,
) -> Float[Array, '...']:
  """A `jax.lax.dot_general` for `flax.linen.Dense` and `flax.linen.DenseGeneral`.

  Contracts the last axes of `x` with the first of `kernel`. On CPUs, 16-bit arrays give
  a float32 result, and `options` have no effect, see `einsum`.
  """
  if is_16_bit_on_cpu(x):
    contracted = len(dimension_numbers[0][0])
    x_axes = string.ascii_letters[: x.ndim]
    columns = string.ascii_letters[x.ndim :][: kernel.ndim - contracted]
    rows, shared = x_axes[:-contracted], x_axes[-contracted:]
    return einsum(f'{x_axes},{shared}{columns}->{rows}{columns}', x, kernel)
  if dtypes.platform() == 'cpu' and kernel.ndim == 2:
    kernel = _kernel(kernel)
  return jax.lax.dot_general(x, kernel, dimension_numbers, **options)
