"""Translates a JAX function to an ONNX graph, operation by operation.

The function is traced with a symbolic batch size, and each operation of the trace
becomes one or a few nodes. The models of this package need about fifty operations
(docs/export.md compares converters).

A broadcast result keeps its small shape until a node needs the full one, since
elementwise nodes broadcast themselves.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from vit_jax import console

OPSET, IR_VERSION = 18, 8  # From 2022, for old runtimes.
_LAST = np.iinfo(np.int64).max  # The end of an axis, for Slice.


class Value(NamedTuple):
  """A tensor of the graph: its name, and its shape before broadcasting."""

  name: str
  shape: tuple[Any, ...]  # Sizes are integers, or symbols of jax.export.


def make_model(
  function: Callable[..., dict[str, jax.Array]],
  weights: Any,
  inputs: dict[str, jax.ShapeDtypeStruct],
) -> Any:
  """Returns an onnx.ModelProto; raises ValueError for an unknown operation.

  The function takes `weights`, a tree of NumPy arrays, whose paths become their names
  in the graph, and `inputs` as keywords; it returns arrays by name. The first dimension
  of each input is the same jax.export symbol, the others are numbers.
  """
  onnx = console.require('onnx', 'onnx', 'exporting to ONNX')
  closed_jaxpr, outputs = jax.make_jaxpr(function, return_shape=True)(weights, **inputs)
  graph = _Graph(onnx, next(iter(inputs.values())).shape[0], min(inputs))
  leaves, _ = jax.tree_util.tree_flatten_with_path(weights)
  values = []
  for path, x in leaves:
    name = jax.tree_util.keystr(path[1:], simple=True, separator='/')
    values.append(graph.constant(x, name))
  for name in sorted(inputs):
    values.append(Value(name, inputs[name].shape))
  results = graph.run(closed_jaxpr.jaxpr, closed_jaxpr.consts, values)
  for value, name in zip(results, sorted(outputs)):
    graph.node('Identity', graph.broadcast(value, outputs[name].shape), name=name)
  onnx_graph = onnx.helper.make_graph(
    graph.nodes,
    'vit_jax',
    inputs=[graph.value_info(name, inputs[name]) for name in sorted(inputs)],
    outputs=[graph.value_info(name, outputs[name]) for name in sorted(outputs)],
    initializer=graph.used_constants(),
  )
  return onnx.helper.make_model(
    onnx_graph,
    opset_imports=[onnx.helper.make_opsetid('', OPSET)],
    ir_version=IR_VERSION,
    producer_name='vit_jax',
  )


class _Graph:
  """The nodes so far.

  The first dimension of the input `first` is the symbol `batch`.
  """

  def __init__(self, onnx: Any, batch: Any, first: str) -> None:
    self.nodes: list[Any] = []
    self.constants: list[Any] = []
    self._onnx = onnx
    self._batch = batch
    self._count = 0
    self._batch_size = self.node('Shape', Value(first, ()), shape=(1,), start=0, end=1)

  def node(
    self,
    op: str,
    *inputs: Any,
    shape: Sequence[Any] | None = None,
    name: str | None = None,
    **kwargs: Any,
  ) -> Value:
    """Adds a node with one output, by default of the broadcast shape of its inputs.

    Inputs are Values, arrays, or integers and lists of them, constants of int64.
    """
    values = list(map(self.value, inputs))
    if shape is None:
      shape = jnp.broadcast_shapes(*(x.shape for x in values))
    self._count += 1
    name = name or f'{op}_{self._count}'
    names = [x.name for x in values]
    self.nodes.append(self._onnx.helper.make_node(op, names, [name], **kwargs))
    return Value(name, tuple(shape))

  def value(self, x: Any) -> Value:
    """Returns a Value as it is, and adds an array or integers as a constant."""
    return x if isinstance(x, Value) else self.constant(x)

  def constant(self, x: Any, name: str | None = None) -> Value:
    """Adds a constant: an array, or integers."""
    x = np.asarray(x, None if hasattr(x, 'dtype') else np.int64)
    self._count += 1
    name = name or f'constant_{self._count}'
    self.constants.append(self._onnx.numpy_helper.from_array(x, name))
    return Value(name, x.shape)

  def used_constants(self) -> list[Any]:
    """Returns the constants that nodes read."""
    used_names = set()
    for node in self.nodes:
      used_names.update(node.input)
    return [x for x in self.constants if x.name in used_names]

  def value_info(self, name: str, spec: jax.ShapeDtypeStruct) -> Any:
    """Describes an input or output; symbolic sizes become names."""
    shape = [size if isinstance(size, int) else str(size) for size in spec.shape]
    return self._onnx.helper.make_tensor_value_info(
      name, self.type_of(spec.dtype), shape
    )

  def type_of(self, dtype: Any) -> int:
    """Returns ONNX's number of a type."""
    return self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

  def cast(self, value: Value, dtype: Any) -> Value:
    """Converts to another type."""
    return self.node('Cast', value, to=self.type_of(dtype))

  def reshape(self, value: Value, shape: Sequence[Any]) -> Value:
    """Changes the shape of a tensor that is not broadcast."""
    if value.shape == tuple(shape):
      return value
    sizes = [n if isinstance(n, int) else -1 for n in shape]
    return self.node('Reshape', value, sizes, shape=shape)

  def transpose(self, value: Value, order: Sequence[int]) -> Value:
    """Changes the order of the dimensions of a tensor that is not broadcast."""
    if list(order) == sorted(order):
      return value
    shape = [value.shape[i] for i in order]
    return self.node('Transpose', value, shape=shape, perm=list(order))

  def broadcast(self, value: Value, shape: Sequence[Any]) -> Value:
    """Broadcasts a tensor to a shape."""
    if value.shape == tuple(shape):
      return value
    sizes = []
    for size in shape:
      sizes.append([size] if isinstance(size, int) else self._length(size))
    target = self.node('Concat', *sizes, shape=(len(sizes),), axis=0)
    return self.node('Expand', value, target, shape=shape)

  def _length(self, size: Any) -> Value:
    """Returns a list of one length, a multiple of the batch."""
    factor = size // self._batch
    if not isinstance(factor, int):
      raise _unknown(f'the size {size}')
    if factor == 1:
      return self._batch_size
    return self.node('Mul', self._batch_size, [factor])

  def run(
    self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Value]
  ) -> list[Value]:
    """Adds the operations of a trace; returns its outputs."""
    env = dict(zip(jaxpr.constvars, map(self.value, consts)))
    env.update(zip(jaxpr.invars, args))

    def read(var: Any) -> Value:
      if isinstance(var, core.Literal):
        return self.constant(np.asarray(var.val, var.aval.dtype))
      return env[var]

    for eqn in jaxpr.eqns:
      values = [read(x) for x in eqn.invars]
      env.update(zip(eqn.outvars, self._translate(eqn, values)))
    return [read(x) for x in jaxpr.outvars]

  def _translate(self, eqn: core.JaxprEqn, values: Sequence[Value]) -> list[Value]:
    """Adds one operation; returns its outputs."""
    name = eqn.primitive.name
    params = eqn.params
    if name in _CALLS:
      inner = params[_CALLS[name]]
      if not hasattr(inner, 'consts'):
        return self.run(inner, (), values)
      return self.run(inner.jaxpr, inner.consts, values)
    if name in _IDENTITIES:
      return list(values)
    if name in _NODES:
      first_op, *other_ops = _NODES[name]
      value = self.node(first_op, *values)
      for op in other_ops:
        value = self.node(op, value)
      return [value]
    if name in _UNBROADCAST:
      return [_UNBROADCAST[name](self, eqn, *values)]
    if name not in _BROADCAST:
      raise _unknown(f"the operation '{name}'")
    operands = []
    for value, var in zip(values, eqn.invars):
      operands.append(self.broadcast(value, var.aval.shape))
    outputs = _BROADCAST[name](self, eqn, *operands)
    return outputs if isinstance(outputs, list) else [outputs]


def _unknown(operation: str) -> ValueError:
  return ValueError(
    f'{operation} of the model has no translation to ONNX: use --to=stablehlo or '
    '--to=saved_model'
  )


# Translates an operation: (graph, eqn, *operands) -> a Value, or a list of them.
Translation = Callable[..., Any]

# Operations that call a trace -> the parameter that holds it.
_CALLS = {
  'closed_call': 'call_jaxpr',
  'custom_jvp_call': 'call_jaxpr',
  'custom_vjp_call': 'call_jaxpr',
  'jit': 'jaxpr',
  'remat2': 'jaxpr',
}
# Operations that are the identity in inference.
_IDENTITIES = ('stop_gradient', 'copy', 'optimization_barrier')
# Elementwise operation -> nodes of ONNX, the second on the result of the first.
_NODES = {
  'abs': ['Abs'],
  'add': ['Add'],
  'add_any': ['Add'],
  'and': ['And'],
  'ceil': ['Ceil'],
  'cos': ['Cos'],
  'div': ['Div'],
  'eq': ['Equal'],
  'erf': ['Erf'],
  'exp': ['Exp'],
  'floor': ['Floor'],
  'ge': ['GreaterOrEqual'],
  'gt': ['Greater'],
  'le': ['LessOrEqual'],
  'log': ['Log'],
  'logistic': ['Sigmoid'],
  'lt': ['Less'],
  'max': ['Max'],
  'min': ['Min'],
  'mul': ['Mul'],
  'ne': ['Equal', 'Not'],
  'neg': ['Neg'],
  'not': ['Not'],
  'or': ['Or'],
  'pow': ['Pow'],
  'rsqrt': ['Sqrt', 'Reciprocal'],
  'sign': ['Sign'],
  'sin': ['Sin'],
  'sqrt': ['Sqrt'],
  'sub': ['Sub'],
  'tanh': ['Tanh'],
}


# --- Operations whose operands need not be broadcast ---


def _power(graph: _Graph, eqn: core.JaxprEqn, x: Value) -> Value:
  """x ** y for an integer y."""
  y = eqn.params['y']
  if y == 2:
    return graph.node('Mul', x, x)
  return graph.node('Pow', x, np.array(y, eqn.invars[0].aval.dtype))


def _erfc(graph: _Graph, eqn: core.JaxprEqn, x: Value) -> Value:
  one = np.array(1, eqn.invars[0].aval.dtype)
  return graph.node('Sub', one, graph.node('Erf', x))


def _broadcast_in_dim(graph: _Graph, eqn: core.JaxprEqn, x: Value) -> Value:
  shape, dimensions = eqn.params['shape'], eqn.params['broadcast_dimensions']
  rank = len(eqn.invars[0].aval.shape)
  if list(dimensions) == list(range(len(shape) - rank, len(shape))):
    return x  # Aligned to the right, as in NumPy's broadcasting.
  operand_shape = (1,) * (rank - len(x.shape)) + x.shape
  sizes = [1] * len(shape)
  for dimension, size in zip(dimensions, operand_shape):
    sizes[dimension] = size
  return graph.reshape(x, sizes)


def _clamp(
  graph: _Graph, eqn: core.JaxprEqn, low: Value, x: Value, high: Value
) -> Value:
  return graph.node('Min', graph.node('Max', x, low), high)


def _convert(graph: _Graph, eqn: core.JaxprEqn, x: Value) -> Value:
  return graph.cast(x, eqn.params['new_dtype'])


def _remainder(graph: _Graph, eqn: core.JaxprEqn, x: Value, y: Value) -> Value:
  return graph.node('Mod', x, y, fmod=1)


def _select(
  graph: _Graph, eqn: core.JaxprEqn, predicate: Value, on_false: Value, on_true: Value
) -> Value:
  return graph.node('Where', predicate, on_true, on_false)


def _square(graph: _Graph, eqn: core.JaxprEqn, x: Value) -> Value:
  return graph.node('Mul', x, x)


_UNBROADCAST: dict[str, Translation] = {
  'broadcast_in_dim': _broadcast_in_dim,
  'clamp': _clamp,
  'convert_element_type': _convert,
  'erfc': _erfc,
  'integer_pow': _power,
  'rem': _remainder,
  'select_n': _select,
  'square': _square,
}


# --- Operations on broadcast operands ---


def _shape(eqn: core.JaxprEqn) -> tuple[Any, ...]:
  return eqn.outvars[0].aval.shape


def _reduce(op: str, cast: bool = False) -> Translation:
  """Translates a reduction; with `cast`, bools are reduced as integers."""

  def translate(graph: _Graph, eqn: core.JaxprEqn, x: Value) -> Value:
    axes = list(eqn.params['axes'])
    if not axes:  # ONNX would reduce all.
      return x
    x = graph.cast(x, np.int32) if cast else x
    result = graph.node(op, x, axes, shape=_shape(eqn), keepdims=0)
    return graph.cast(result, np.bool_) if cast else result

  return translate


def _arg(op: str) -> Translation:
  def translate(graph: _Graph, eqn: core.JaxprEqn, x: Value) -> Value:
    [axis] = eqn.params['axes']
    result = graph.node(op, x, shape=_shape(eqn), axis=axis, keepdims=0)
    return graph.cast(result, eqn.params['index_dtype'])

  return translate


def _dot(graph: _Graph, eqn: core.JaxprEqn, lhs: Value, rhs: Value) -> Value:
  """A product over some dimensions, by MatMul.

  The left operand becomes [batch..., rows..., K], the right one [batch..., K, N],
  where K and N are all summed and all free dimensions of the right one, in one.
  """
  (sum_lhs, sum_rhs), (batch_lhs, batch_rhs) = eqn.params['dimension_numbers']
  rows = _other_dims(lhs, sum_lhs, batch_lhs)
  columns = _other_dims(rhs, sum_rhs, batch_rhs)
  batch = [lhs.shape[i] for i in batch_lhs]
  free = [lhs.shape[i] for i in rows]
  depth = math.prod(lhs.shape[i] for i in sum_lhs)
  width = math.prod(rhs.shape[i] for i in columns)
  if batch or not rows:  # Else MatMul would treat rows as batch dimensions.
    free = [math.prod(free)]
  lhs = graph.transpose(lhs, [*batch_lhs, *rows, *sum_lhs])
  lhs = graph.reshape(lhs, [*batch, *free, depth])
  rhs = graph.transpose(rhs, [*batch_rhs, *sum_rhs, *columns])
  rhs = graph.reshape(rhs, [*batch, depth, width])
  product = graph.node('MatMul', lhs, rhs, shape=[*batch, *free, width])
  product = graph.reshape(product, _shape(eqn))
  dtype = eqn.outvars[0].aval.dtype
  if all(x.aval.dtype == dtype for x in eqn.invars):
    return product
  return graph.cast(product, dtype)


def _other_dims(value: Value, *groups: Sequence[int]) -> list[int]:
  """Returns the dimensions that are in none of the groups, in order."""
  covered = set().union(*groups)
  return [i for i in range(len(value.shape)) if i not in covered]


def _pads(padding: Sequence[tuple[int, int]]) -> list[int]:
  """Returns pairs (before, after) in the order of ONNX."""
  before, after = zip(*padding)
  return [*before, *after]


def _convolve(graph: _Graph, eqn: core.JaxprEqn, images: Value, kernel: Value) -> Value:
  params = eqn.params
  order = params['dimension_numbers']
  if params['batch_group_count'] != 1 or set(params['lhs_dilation']) != {1}:
    raise _unknown('a transposed convolution')
  result = graph.node(
    'Conv',
    graph.transpose(images, order.lhs_spec),
    graph.transpose(kernel, order.rhs_spec),
    shape=[_shape(eqn)[i] for i in order.out_spec],
    strides=list(params['window_strides']),
    pads=_pads(params['padding']),
    dilations=list(params['rhs_dilation']),
    group=params['feature_group_count'],
  )
  return graph.transpose(result, np.argsort(order.out_spec).tolist())


def _max_pool(graph: _Graph, eqn: core.JaxprEqn, images: Value) -> Value:
  """The maxima of windows of images [B, H, W, C]."""
  params = eqn.params
  window = params['window_dimensions']
  dilations = {*params['base_dilation'], *params['window_dilation']}
  is_spatial = len(window) == 4 and window[0] == window[3] == 1
  if not is_spatial or dilations != {1}:
    raise _unknown('a pooling over dimensions other than height and width')
  result = graph.node(
    'MaxPool',
    graph.transpose(images, [0, 3, 1, 2]),
    shape=[_shape(eqn)[i] for i in (0, 3, 1, 2)],
    kernel_shape=list(window[1:3]),
    strides=list(params['window_strides'][1:3]),
    pads=_pads(params['padding'][1:3]),
  )
  return graph.transpose(result, [0, 2, 3, 1])


def _pad(graph: _Graph, eqn: core.JaxprEqn, x: Value, value: Value) -> Value:
  padding = []
  for before, after, interior in eqn.params['padding_config']:
    if interior:
      raise _unknown('padding between elements')
    padding.append((before, after))
  return graph.node('Pad', x, _pads(padding), value, shape=_shape(eqn))


def _slice(graph: _Graph, eqn: core.JaxprEqn, x: Value) -> Value:
  rank = len(x.shape)
  starts = list(eqn.params['start_indices'])
  ends = [n if isinstance(n, int) else _LAST for n in eqn.params['limit_indices']]
  axes = list(range(rank))
  strides = list(eqn.params['strides'] or [1] * rank)
  return graph.node('Slice', x, starts, ends, axes, strides, shape=_shape(eqn))


def _gather(graph: _Graph, eqn: core.JaxprEqn, x: Value, indices: Value) -> Value:
  """Takes a range of one dimension, or slices at several positions of it."""
  numbers, sizes = eqn.params['dimension_numbers'], eqn.params['slice_sizes']
  axes, batch_dims = numbers.start_index_map, numbers.operand_batching_dims
  first_dims = tuple(range(len(batch_dims)))
  slice_dims = _other_dims(x, batch_dims, axes)
  if (
    len(axes) != 1
    or batch_dims != first_dims
    or numbers.start_indices_batching_dims != first_dims
    or any(sizes[i] != x.shape[i] for i in slice_dims)
  ):
    raise _unknown('an indexing of several dimensions')
  [axis] = axes
  indices = graph.cast(indices, np.int64)  # [batch_dims..., positions..., 1]
  if indices.shape == (1,):
    end = graph.node('Add', indices, [sizes[axis]])
    result = graph.node('Slice', x, indices, end, [axis], shape=sizes)
    return graph.reshape(result, _shape(eqn))
  if sizes[axis] != 1:
    raise _unknown('an indexing by ranges')
  x = graph.transpose(x, [*first_dims, axis, *slice_dims])
  slice_shape = [sizes[i] for i in slice_dims]
  shape = [*indices.shape[:-1], *slice_shape]
  result = graph.node('GatherND', x, indices, shape=shape, batch_dims=len(first_dims))
  # `offset_dims`: positions in the result of the dimensions that are not collapsed.
  uncollapsed = _other_dims(x, batch_dims, numbers.collapsed_slice_dims)
  offsets = dict(zip(uncollapsed, numbers.offset_dims))
  order = sorted(set(range(len(_shape(eqn)))) - set(numbers.offset_dims))
  for i in slice_dims:
    order.append(offsets[i])
  result = graph.transpose(result, np.argsort(order).tolist())
  return graph.reshape(result, _shape(eqn))


def _join(graph: _Graph, axis: int, values: Sequence[Value]) -> Value:
  """Joins tensors along a dimension."""
  shape = list(values[0].shape)
  shape[axis] = sum(x.shape[axis] for x in values)
  return graph.node('Concat', *values, shape=shape, axis=axis)


def _stack(graph: _Graph, axis: int, values: Sequence[Value]) -> Value:
  """Joins tensors along a new dimension."""
  shape = list(values[0].shape)
  shape.insert(axis, 1)
  return _join(graph, axis, [graph.reshape(x, shape) for x in values])


def _scan(graph: _Graph, eqn: core.JaxprEqn, *values: Value) -> list[Value]:
  """A loop, unrolled."""
  body = eqn.params['jaxpr']
  # Operands are constants, carried values and rows; results are carried values and rows.
  num_carried = _count_whole(eqn.outvars, body.jaxpr.outvars)
  num_whole = _count_whole(eqn.invars, body.jaxpr.invars)
  consts = values[: num_whole - num_carried]
  carry = list(values[num_whole - num_carried : num_whole])
  inputs = values[num_whole:]
  body_consts = [graph.constant(x) for x in body.consts]
  steps = range(eqn.params['length'])
  rows = []
  for step in reversed(steps) if eqn.params['reverse'] else steps:
    row = [graph.node('Gather', x, step, shape=x.shape[1:], axis=0) for x in inputs]
    outputs = graph.run(body.jaxpr, body_consts, [*consts, *carry, *row])
    results = []
    for value, var in zip(outputs, body.jaxpr.outvars):
      results.append(graph.broadcast(value, var.aval.shape))
    carry = results[:num_carried]
    rows.append(results[num_carried:])
  if eqn.params['reverse']:
    rows.reverse()
  stacked = [_stack(graph, 0, column) for column in zip(*rows)]
  return [*carry, *stacked]


def _count_whole(variables: Sequence[Any], body_variables: Sequence[Any]) -> int:
  """Counts the variables of a loop that its body does not read or write row by row.

  JAX 0.11 renamed the parameters with these counts; rows have one dimension less.
  """
  pairs = zip(variables, body_variables)
  return sum(x.aval.ndim == y.aval.ndim for x, y in pairs)


def _iota(graph: _Graph, eqn: core.JaxprEqn) -> Value:
  shape, dimension = eqn.params['shape'], eqn.params['dimension']
  if not isinstance(shape[dimension], int):
    raise _unknown('a count over the batch')
  column = [-1] + [1] * (len(shape) - dimension - 1)
  numbers = np.arange(shape[dimension], dtype=eqn.params['dtype'])
  return graph.broadcast(graph.constant(numbers.reshape(column)), shape)


def _cumsum(graph: _Graph, eqn: core.JaxprEqn, x: Value) -> Value:
  reverse = int(eqn.params['reverse'])
  return graph.node('CumSum', x, eqn.params['axis'], shape=x.shape, reverse=reverse)


def _reshape(graph: _Graph, eqn: core.JaxprEqn, x: Value) -> Value:
  return graph.reshape(x, _shape(eqn))


def _concatenate(graph: _Graph, eqn: core.JaxprEqn, *values: Value) -> Value:
  return _join(graph, eqn.params['dimension'], values)


def _stack_operands(graph: _Graph, eqn: core.JaxprEqn, *values: Value) -> Value:
  return _stack(graph, eqn.params['axis'], values)


def _transpose(graph: _Graph, eqn: core.JaxprEqn, x: Value) -> Value:
  return graph.transpose(x, eqn.params['permutation'])


_BROADCAST: dict[str, Translation] = {
  'argmax': _arg('ArgMax'),
  'argmin': _arg('ArgMin'),
  'concatenate': _concatenate,
  'conv_general_dilated': _convolve,
  'cumsum': _cumsum,
  'dot_general': _dot,
  'gather': _gather,
  'iota': _iota,
  'pad': _pad,
  'reduce_and': _reduce('ReduceMin', cast=True),
  'reduce_max': _reduce('ReduceMax'),
  'reduce_min': _reduce('ReduceMin'),
  'reduce_or': _reduce('ReduceMax', cast=True),
  'reduce_sum': _reduce('ReduceSum'),
  'reduce_window_max': _max_pool,
  'reshape': _reshape,
  'scan': _scan,
  'slice': _slice,
  'squeeze': _reshape,
  'stack': _stack_operands,
  'transpose': _transpose,
}
