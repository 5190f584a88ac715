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
  shape: tuple


def make_model(
  function: Callable[..., dict[str, jax.Array]],
  weights: Any,
  inputs: dict[str, jax.ShapeDtypeStruct],
):
  """Returns an onnx.ModelProto; raises ValueError for an unknown operation.

  The function takes `weights`, a tree of NumPy arrays, whose paths become their names
  in the graph, and `inputs` as keywords; it returns arrays by name. The first dimension
  of each input is the same jax.export symbol, the others are numbers.
  """
  onnx = console.needed('onnx', 'onnx', 'exporting to ONNX')
  traced, outputs = jax.make_jaxpr(function, return_shape=True)(weights, **inputs)
  graph = _Graph(onnx, next(iter(inputs.values())).shape[0], min(inputs))
  leaves, _ = jax.tree_util.tree_flatten_with_path(weights)
  values = [
    graph.constant(x, jax.tree_util.keystr(path[1:], simple=True, separator='/'))
    for path, x in leaves
  ]
  values += [Value(name, inputs[name].shape) for name in sorted(inputs)]
  found = graph.run(traced.jaxpr, traced.consts, values)
  for value, name in zip(found, sorted(outputs)):
    graph.node('Identity', graph.whole(value, outputs[name].shape), name=name)

  def described(specs):
    return [
      onnx.helper.make_tensor_value_info(
        name,
        graph.type_of(x.dtype),
        [n if isinstance(n, int) else str(n) for n in x.shape],
      )
      for name, x in sorted(specs.items())
    ]

  used = {name for node in graph.nodes for name in node.input}
  constants = [x for x in graph.constants if x.name in used]
  made = onnx.helper.make_graph(
    graph.nodes, 'vit_jax', described(inputs), described(outputs), constants
  )
  return onnx.helper.make_model(
    made,
    opset_imports=[onnx.helper.make_opsetid('', OPSET)],
    ir_version=IR_VERSION,
    producer_name='vit_jax',
  )


class _Graph:
  """The nodes so far; the first dimension of the input `first` is the symbol `batch`."""

  def __init__(self, onnx, batch, first: str):
    self.nodes, self.constants = [], []
    self._onnx, self._batch, self._count = onnx, batch, 0
    self._size = self.node('Shape', Value(first, ()), shape=(1,), start=0, end=1)

  def node(self, op: str, *inputs, shape=None, name=None, **kwargs) -> Value:
    """Adds a node with one output, by default of the broadcast shape of its inputs.

    Inputs are Values, arrays, or integers and lists of them, constants of int64.
    """
    inputs = [x if isinstance(x, Value) else self.constant(x) for x in inputs]
    if shape is None:
      shape = jnp.broadcast_shapes(*(x.shape for x in inputs))
    self._count += 1
    name = name or f'{op}_{self._count}'
    names = [x.name for x in inputs]
    self.nodes.append(self._onnx.helper.make_node(op, names, [name], **kwargs))
    return Value(name, tuple(shape))

  def constant(self, x, name: str | None = None) -> Value:
    """Adds a constant: an array, or integers."""
    x = np.asarray(x, None if hasattr(x, 'dtype') else np.int64)
    self._count += 1
    name = name or f'constant_{self._count}'
    self.constants.append(self._onnx.numpy_helper.from_array(x, name))
    return Value(name, x.shape)

  def type_of(self, dtype) -> int:
    """Returns ONNX's number of a type."""
    return self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

  def cast(self, value: Value, dtype) -> Value:
    """Converts to another type."""
    return self.node('Cast', value, to=self.type_of(dtype))

  def reshape(self, value: Value, shape) -> Value:
    """Changes the shape of a whole tensor."""
    if value.shape == tuple(shape):
      return value
    sizes = [n if isinstance(n, int) else -1 for n in shape]
    return self.node('Reshape', value, sizes, shape=shape)

  def transpose(self, value: Value, order: Sequence[int]) -> Value:
    """Changes the order of the dimensions of a whole tensor."""
    if list(order) == sorted(order):
      return value
    shape = [value.shape[i] for i in order]
    return self.node('Transpose', value, shape=shape, perm=list(order))

  def whole(self, value: Value, shape) -> Value:
    """Broadcasts a tensor to a shape."""
    if value.shape == tuple(shape):
      return value
    sizes = [[n] if isinstance(n, int) else self._length(n) for n in shape]
    target = self.node('Concat', *sizes, shape=(len(sizes),), axis=0)
    return self.node('Expand', value, target, shape=shape)

  def _length(self, size) -> Value:
    """Returns a list of one length, a multiple of the batch."""
    factor = size // self._batch
    if not isinstance(factor, int):
      raise _unknown(f'the size {size}')
    return self._size if factor == 1 else self.node('Mul', self._size, [factor])

  def run(self, jaxpr, consts, args) -> list[Value]:
    """Adds the operations of a trace; returns its outputs."""
    consts = [x if isinstance(x, Value) else self.constant(x) for x in consts]
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))

    def read(x):
      if isinstance(x, core.Literal):
        return self.constant(np.asarray(x.val, x.aval.dtype))
      return known[x]

    for eqn in jaxpr.eqns:
      values = [read(x) for x in eqn.invars]
      known.update(zip(eqn.outvars, self._translate(eqn, values)))
    return [read(x) for x in jaxpr.outvars]

  def _translate(self, eqn, values) -> list[Value]:
    """Adds one operation; returns its outputs."""
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
      inner = params[_CALLS[name]]
      if not hasattr(inner, 'consts'):
        return self.run(inner, (), values)
      return self.run(inner.jaxpr, inner.consts, values)
    if name in _SAME:
      return values
    if name in _NODES:
      first, *rest = _NODES[name]
      found = self.node(first, *values)
      for op in rest:
        found = self.node(op, found)
      return [found]
    if name in _ELEMENTWISE:
      return [_ELEMENTWISE[name](self, eqn, *values)]
    values = [self.whole(value, x.aval.shape) for value, x in zip(values, eqn.invars)]
    if name not in _OTHERS:
      raise _unknown(f"the operation '{name}'")
    found = _OTHERS[name](self, eqn, *values)
    return found if isinstance(found, list) else [found]


def _unknown(what: str) -> ValueError:
  return ValueError(
    f'{what} of the model has no translation to ONNX: use --to=stablehlo or '
    '--to=saved_model'
  )


# Operations that call a trace, and which of their parameters it is.
_CALLS = {
  'closed_call': 'call_jaxpr', 'custom_jvp_call': 'call_jaxpr',
  'custom_vjp_call': 'call_jaxpr', 'jit': 'jaxpr', 'remat2': 'jaxpr',
}  # fmt: skip
# Operations that are the identity in inference.
_SAME = ('stop_gradient', 'copy', 'optimization_barrier')
# Elementwise operation -> nodes of ONNX, the second on the result of the first.
_NODES = {
  'abs': ['Abs'], 'add': ['Add'], 'add_any': ['Add'], 'and': ['And'], 'ceil': ['Ceil'],
  'cos': ['Cos'], 'div': ['Div'], 'eq': ['Equal'], 'erf': ['Erf'], 'exp': ['Exp'],
  'floor': ['Floor'], 'ge': ['GreaterOrEqual'], 'gt': ['Greater'],
  'le': ['LessOrEqual'], 'log': ['Log'], 'logistic': ['Sigmoid'], 'lt': ['Less'],
  'max': ['Max'], 'min': ['Min'], 'mul': ['Mul'], 'ne': ['Equal', 'Not'],
  'neg': ['Neg'], 'not': ['Not'], 'or': ['Or'], 'pow': ['Pow'],
  'rsqrt': ['Sqrt', 'Reciprocal'], 'sign': ['Sign'], 'sin': ['Sin'], 'sqrt': ['Sqrt'],
  'sub': ['Sub'], 'tanh': ['Tanh'],
}  # fmt: skip


# --- Operations on values that need not be whole: functions (graph, eqn, *values) ---


def _power(graph, eqn, x):
  """x ** y for an integer y."""
  y = eqn.params['y']
  if y == 2:
    return graph.node('Mul', x, x)
  return graph.node('Pow', x, np.array(y, eqn.invars[0].aval.dtype))


def _erfc(graph, eqn, x):
  one = np.array(1, eqn.invars[0].aval.dtype)
  return graph.node('Sub', one, graph.node('Erf', x))


def _broadcast_in_dim(graph, eqn, x):
  shape, places = eqn.params['shape'], eqn.params['broadcast_dimensions']
  own = len(eqn.invars[0].aval.shape)
  if list(places) == list(range(len(shape) - own, len(shape))):
    return x  # Aligned to the right, as in NumPy's broadcasting.
  sizes = [1] * len(shape)
  aligned = (1,) * (own - len(x.shape)) + x.shape
  for place, size in zip(places, aligned):
    sizes[place] = size
  return graph.reshape(x, sizes)


_ELEMENTWISE = {
  'broadcast_in_dim': _broadcast_in_dim,
  'clamp': lambda graph, eqn, low, x, high: graph.node(
    'Min', graph.node('Max', x, low), high
  ),
  'convert_element_type': lambda graph, eqn, x: graph.cast(x, eqn.params['new_dtype']),
  'erfc': _erfc,
  'integer_pow': _power,
  'rem': lambda graph, eqn, x, y: graph.node('Mod', x, y, fmod=1),
  'select_n': lambda graph, eqn, which, no, yes: graph.node('Where', which, yes, no),
  'square': lambda graph, eqn, x: graph.node('Mul', x, x),
}


# --- Other operations: functions (graph, eqn, *whole values) ---


def _shape(eqn) -> tuple:
  return eqn.outvars[0].aval.shape


def _reduce(op: str, cast: bool = False):
  """Translates a reduction; with `cast`, one of bools by integers."""

  def translate(graph, eqn, x):
    axes = list(eqn.params['axes'])
    if not axes:  # ONNX would reduce all.
      return x
    x = graph.cast(x, np.int32) if cast else x
    found = graph.node(op, x, axes, shape=_shape(eqn), keepdims=0)
    return graph.cast(found, np.bool_) if cast else found

  return translate


def _arg(op: str):
  def translate(graph, eqn, x):
    [axis] = eqn.params['axes']
    found = graph.node(op, x, shape=_shape(eqn), axis=axis, keepdims=0)
    return graph.cast(found, eqn.params['index_dtype'])

  return translate


def _dot(graph, eqn, left, right):
  """A product over some dimensions, by MatMul.

  The left tensor becomes [batch..., rows..., K], the right one [batch..., K, N],
  where K and N are all summed and all free dimensions of the right one, in one.
  """
  (sum_left, sum_right), (batch_left, batch_right) = eqn.params['dimension_numbers']
  rows = _others(left, sum_left, batch_left)
  columns = _others(right, sum_right, batch_right)
  batch = [left.shape[i] for i in batch_left]
  free = [left.shape[i] for i in rows]
  depth = math.prod(left.shape[i] for i in sum_left)
  width = math.prod(right.shape[i] for i in columns)
  if batch or not rows:  # Else MatMul would treat rows as batch dimensions.
    free = [math.prod(free)]
  left = graph.transpose(left, [*batch_left, *rows, *sum_left])
  left = graph.reshape(left, [*batch, *free, depth])
  right = graph.transpose(right, [*batch_right, *sum_right, *columns])
  right = graph.reshape(right, [*batch, depth, width])
  found = graph.node('MatMul', left, right, shape=[*batch, *free, width])
  found = graph.reshape(found, _shape(eqn))
  wanted = eqn.outvars[0].aval.dtype
  same = all(x.aval.dtype == wanted for x in eqn.invars)
  return found if same else graph.cast(found, wanted)


def _others(value, *groups) -> list[int]:
  """Returns the dimensions that are in none of the groups, in order."""
  taken = {i for group in groups for i in group}
  return [i for i in range(len(value.shape)) if i not in taken]


def _pads(padding) -> list[int]:
  """Returns pairs (before, after) in the order of ONNX."""
  return [before for before, _ in padding] + [after for _, after in padding]


def _convolve(graph, eqn, images, kernel):
  params = eqn.params
  order = params['dimension_numbers']
  if params['batch_group_count'] != 1 or set(params['lhs_dilation']) != {1}:
    raise _unknown('a transposed convolution')
  found = graph.node(
    'Conv',
    graph.transpose(images, order.lhs_spec),
    graph.transpose(kernel, order.rhs_spec),
    shape=[_shape(eqn)[i] for i in order.out_spec],
    strides=list(params['window_strides']),
    pads=_pads(params['padding']),
    dilations=list(params['rhs_dilation']),
    group=params['feature_group_count'],
  )
  return graph.transpose(found, np.argsort(order.out_spec).tolist())


def _max_pool(graph, eqn, images):
  """The maxima of windows of images [B, H, W, C]."""
  params = eqn.params
  window, dilation = params['window_dimensions'], params['window_dilation']
  flat = len(window) == 4 and window[0] == window[3] == 1
  if not flat or {*params['base_dilation'], *dilation} != {1}:
    raise _unknown('a pooling over dimensions other than height and width')
  found = graph.node(
    'MaxPool',
    graph.transpose(images, [0, 3, 1, 2]),
    shape=[_shape(eqn)[i] for i in (0, 3, 1, 2)],
    kernel_shape=list(window[1:3]),
    strides=list(params['window_strides'][1:3]),
    pads=_pads(params['padding'][1:3]),
  )
  return graph.transpose(found, [0, 2, 3, 1])


def _pad(graph, eqn, x, value):
  config = eqn.params['padding_config']
  if any(inner for *_, inner in config):
    raise _unknown('padding between elements')
  pads = _pads([pair[:2] for pair in config])
  return graph.node('Pad', x, pads, value, shape=_shape(eqn))


def _slice(graph, eqn, x):
  params, rank = eqn.params, len(x.shape)
  ends = [n if isinstance(n, int) else _LAST for n in params['limit_indices']]
  strides = params['strides'] or (1,) * rank
  parts = params['start_indices'], ends, range(rank), strides
  return graph.node('Slice', x, *map(list, parts), shape=_shape(eqn))


def _gather(graph, eqn, x, indices):
  """Takes a range of one dimension, or slices at several positions of it."""
  numbers, sizes = eqn.params['dimension_numbers'], eqn.params['slice_sizes']
  axes, batches = numbers.start_index_map, numbers.operand_batching_dims
  first = tuple(range(len(batches)))
  others = _others(x, batches, axes)
  if (
    len(axes) != 1
    or (batches, numbers.start_indices_batching_dims) != (first, first)
    or any(sizes[i] != x.shape[i] for i in others)
  ):
    raise _unknown('an indexing of several dimensions')
  [axis] = axes
  indices = graph.cast(indices, np.int64)  # [batches..., more..., 1]
  if indices.shape == (1,):
    end = graph.node('Add', indices, [sizes[axis]])
    found = graph.node('Slice', x, indices, end, [axis], shape=sizes)
    return graph.reshape(found, _shape(eqn))
  if sizes[axis] != 1:
    raise _unknown('an indexing by ranges')
  x = graph.transpose(x, [*first, axis, *others])
  shape = [*indices.shape[:-1], *(sizes[i] for i in others)]
  found = graph.node('GatherND', x, indices, shape=shape, batch_dims=len(first))
  # `offset_dims`: positions of the slices' dimensions in the result.
  kept = _others(x, batches, numbers.collapsed_slice_dims)
  offsets = dict(zip(kept, numbers.offset_dims))
  outer = set(range(len(_shape(eqn)))) - set(numbers.offset_dims)
  order = [*sorted(outer), *(offsets[i] for i in others)]
  found = graph.transpose(found, np.argsort(order).tolist())
  return graph.reshape(found, _shape(eqn))


def _join(graph, axis: int, values):
  """Joins whole tensors along a dimension."""
  shape = list(values[0].shape)
  shape[axis] = sum(x.shape[axis] for x in values)
  return graph.node('Concat', *values, shape=shape, axis=axis)


def _stack(graph, axis: int, values):
  """Joins whole tensors along a new dimension."""
  shape = list(values[0].shape)
  shape.insert(axis, 1)
  return _join(graph, axis, [graph.reshape(x, shape) for x in values])


def _scan(graph, eqn, *values):
  """A loop, unrolled."""
  params = eqn.params
  steps, body = params['length'], params['jaxpr']
  # Only rows have another shape inside the loop. (JAX 0.11 renamed the counts of
  # constants, carried values and rows.)
  kept, read = (
    sum(x.aval.ndim == y.aval.ndim for x, y in zip(*both))
    for both in (
      (eqn.outvars, body.jaxpr.outvars),
      (eqn.invars, body.jaxpr.invars),
    )
  )
  consts, carry = values[: read - kept], values[read - kept : read]
  rows, found = values[read:], []
  inner = [graph.constant(x) for x in body.consts]
  shapes = [x.aval.shape for x in body.jaxpr.outvars]
  numbers = range(steps)
  for step in reversed(numbers) if params['reverse'] else numbers:
    row = [graph.node('Gather', x, step, shape=x.shape[1:], axis=0) for x in rows]
    results = graph.run(body.jaxpr, inner, [*consts, *carry, *row])
    results = [graph.whole(x, shape) for x, shape in zip(results, shapes)]
    carry = results[:kept]
    found.append(results[kept:])
  found = found[::-1] if params['reverse'] else found
  return [*carry, *(_stack(graph, 0, column) for column in zip(*found))]


def _iota(graph, eqn):
  shape, dimension = eqn.params['shape'], eqn.params['dimension']
  if not isinstance(shape[dimension], int):
    raise _unknown('a count over the batch')
  column = [-1] + [1] * (len(shape) - dimension - 1)
  numbers = np.arange(shape[dimension], dtype=eqn.params['dtype'])
  return graph.whole(graph.constant(numbers.reshape(column)), shape)


def _cumsum(graph, eqn, x):
  reverse = int(eqn.params['reverse'])
  return graph.node('CumSum', x, eqn.params['axis'], shape=x.shape, reverse=reverse)


def _reshape(graph, eqn, x):
  return graph.reshape(x, _shape(eqn))


_OTHERS = {
  'argmax': _arg('ArgMax'),
  'argmin': _arg('ArgMin'),
  'concatenate': lambda graph, eqn, *x: _join(graph, eqn.params['dimension'], x),
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
  'stack': lambda graph, eqn, *x: _stack(graph, eqn.params['axis'], x),
  'transpose': lambda graph, eqn, x: graph.transpose(x, eqn.params['permutation']),
}
