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
  consts = [graph.constant(np.asarray(x)) for x in traced.consts]
  found = graph.run(traced.jaxpr, consts, values)
  for value, name in zip(found, sorted(outputs)):
    whole = graph.whole(value, outputs[name].shape)
    graph.node('Identity', [whole.name], (), name=name)

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
  made = onnx.helper.make_graph(
    graph.nodes,
    'vit_jax',
    described(inputs),
    described(outputs),
    [x for x in graph.constants if x.name in used],
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
    self._size = self.node('Shape', [first], (1,), start=0, end=1)

  def node(self, op: str, inputs: Sequence[str], shape, name=None, **kwargs):
    """Adds a node with one output of this shape; returns its Value."""
    self._count += 1
    name = name or f'{op}_{self._count}'
    made = self._onnx.helper.make_node(op, inputs, [name], **kwargs)
    self.nodes.append(made)
    return Value(name, tuple(shape))

  def constant(self, x, name: str | None = None) -> Value:
    """Adds a constant array."""
    self._count += 1
    name = name or f'constant_{self._count}'
    self.constants.append(self._onnx.numpy_helper.from_array(x, name))
    return Value(name, x.shape)

  def integers(self, *numbers: int) -> str:
    """Adds a constant list of int64; returns its name."""
    return self.constant(np.array(numbers, np.int64)).name

  def type_of(self, dtype) -> int:
    """Returns ONNX's number of a type."""
    return self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

  def cast(self, value: Value, dtype) -> Value:
    """Converts to another type."""
    to = self.type_of(dtype)
    return self.node('Cast', [value.name], value.shape, to=to)

  def reshape(self, value: Value, shape) -> Value:
    """Changes the shape of a whole tensor."""
    if value.shape == tuple(shape):
      return value
    sizes = [n if isinstance(n, int) else -1 for n in shape]
    return self.node('Reshape', [value.name, self.integers(*sizes)], shape)

  def transpose(self, value: Value, order: Sequence[int]) -> Value:
    """Changes the order of the dimensions of a whole tensor."""
    if list(order) == sorted(order):
      return value
    shape = [value.shape[i] for i in order]
    return self.node('Transpose', [value.name], shape, perm=list(order))

  def whole(self, value: Value, shape) -> Value:
    """Broadcasts a tensor to a shape."""
    if value.shape == tuple(shape):
      return value
    sizes = [self.integers(n) if isinstance(n, int) else self._length(n) for n in shape]
    target = self.node('Concat', sizes, (len(sizes),), axis=0)
    return self.node('Expand', [value.name, target.name], shape)

  def _length(self, size) -> str:
    """Returns the name of a list of one length, a multiple of the batch."""
    factor = size // self._batch
    if not isinstance(factor, int):
      raise _unknown(f'the size {size}')
    if factor == 1:
      return self._size.name
    return self.node('Mul', [self._size.name, self.integers(factor)], (1,)).name

  def run(self, jaxpr, consts, args) -> list[Value]:
    """Adds the operations of a trace; returns its outputs."""
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
      consts = [self.constant(np.asarray(x)) for x in inner.consts]
      return self.run(inner.jaxpr, consts, values)
    if name in _SAME:
      return values
    if name in _ELEMENTWISE:
      shape = jnp.broadcast_shapes(*(x.shape for x in values))
      return [_ELEMENTWISE[name](self, values, shape, eqn)]
    if name == 'broadcast_in_dim':
      return [self._broadcast_in_dim(values[0], eqn)]
    values = [self.whole(value, x.aval.shape) for value, x in zip(values, eqn.invars)]
    if name not in _OTHERS:
      raise _unknown(f"the operation '{name}'")
    found = _OTHERS[name](self, values, eqn)
    return found if isinstance(found, list) else [found]

  def _broadcast_in_dim(self, value, eqn):
    shape = eqn.params['shape']
    places = eqn.params['broadcast_dimensions']
    own = len(eqn.invars[0].aval.shape)
    if list(places) == list(range(len(shape) - own, len(shape))):
      return value  # Aligned to the right, as in NumPy's broadcasting.
    sizes = [1] * len(shape)
    aligned = (1,) * (own - len(value.shape)) + value.shape
    for place, size in zip(places, aligned):
      sizes[place] = size
    return self.reshape(value, sizes)


def _unknown(what: str) -> ValueError:
  return ValueError(
    f'{what} of the model has no translation to ONNX: use --to=stablehlo or '
    '--to=saved_model'
  )


# Operations that call a trace, and which of their parameters it is.
_CALLS = {
  'closed_call': 'call_jaxpr',
  'custom_jvp_call': 'call_jaxpr',
  'custom_vjp_call': 'call_jaxpr',
  'jit': 'jaxpr',
  'remat2': 'jaxpr',
}
# Operations that are the identity in inference.
_SAME = ('stop_gradient', 'copy', 'optimization_barrier')


# --- Elementwise operations: functions (graph, values, shape, equation) ---


def _simple(*ops: str):
  """Translates to a node of the first operation, then the others on its result."""

  def translate(graph, values, shape, eqn):
    first, *rest = ops
    found = graph.node(first, [x.name for x in values], shape)
    for op in rest:
      found = graph.node(op, [found.name], shape)
    return found

  return translate


def _power(graph, values, shape, eqn):
  """x ** y for integers y; 2 for 'square'."""
  name, y = values[0].name, eqn.params.get('y', 2)
  if y == 2:
    return graph.node('Mul', [name, name], shape)
  exponent = graph.constant(np.array(y, eqn.invars[0].aval.dtype))
  return graph.node('Pow', [name, exponent.name], shape)


def _erfc(graph, values, shape, eqn):
  one = graph.constant(np.array(1, eqn.invars[0].aval.dtype))
  erf = graph.node('Erf', [values[0].name], shape)
  return graph.node('Sub', [one.name, erf.name], shape)


def _select(graph, values, shape, eqn):
  which, no, yes = (x.name for x in values)
  return graph.node('Where', [which, yes, no], shape)


def _clamp(graph, values, shape, eqn):
  low, x, high = (value.name for value in values)
  least = graph.node('Max', [x, low], shape)
  return graph.node('Min', [least.name, high], shape)


# Operation -> nodes of ONNX, the second on the result of the first.
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
_ELEMENTWISE = {
  **{name: _simple(*ops) for name, ops in _NODES.items()},
  'clamp': _clamp,
  'convert_element_type': lambda graph, values, shape, eqn: graph.cast(
    values[0], eqn.params['new_dtype']
  ),
  'erfc': _erfc,
  'integer_pow': _power,
  'rem': lambda graph, values, shape, eqn: graph.node(
    'Mod', [x.name for x in values], shape, fmod=1
  ),
  'select_n': _select,
  'square': _power,
}


# --- Other operations: functions (graph, whole values, equation) ---


def _shape(eqn) -> tuple:
  return eqn.outvars[0].aval.shape


def _reduce(op: str):
  def translate(graph, values, eqn):
    if not eqn.params['axes']:  # ONNX would reduce all.
      return values[0]
    names = [values[0].name, graph.integers(*eqn.params['axes'])]
    return graph.node(op, names, _shape(eqn), keepdims=0)

  return translate


def _reduce_bool(op: str):
  def translate(graph, values, eqn):
    numbers = graph.cast(values[0], np.int32)
    return graph.cast(_reduce(op)(graph, [numbers], eqn), np.bool_)

  return translate


def _arg(op: str):
  def translate(graph, values, eqn):
    [axis] = eqn.params['axes']
    found = graph.node(op, [values[0].name], _shape(eqn), axis=axis, keepdims=0)
    return graph.cast(found, eqn.params['index_dtype'])

  return translate


def _dot(graph, values, eqn):
  """A product over some dimensions, by MatMul.

  The left tensor becomes [batch..., rows..., K], the right one [batch..., K, N],
  where K and N are all summed and all free dimensions of the right one, in one.
  """
  (sum_left, sum_right), (batch_left, batch_right) = eqn.params['dimension_numbers']
  left, right = values
  depth = [left.shape[i] for i in sum_left]
  rows = _others(left, sum_left, batch_left)
  left = graph.transpose(left, [*batch_left, *rows, *sum_left])
  columns = _others(right, sum_right, batch_right)
  right = graph.transpose(right, [*batch_right, *sum_right, *columns])
  batch = left.shape[: len(batch_left)]
  free_left = left.shape[len(batch) : len(batch) + len(rows)]
  free_right = right.shape[len(batch) + len(depth) :]
  if batch or not rows:  # Else MatMul would treat rows as batch dimensions.
    left = graph.reshape(left, [*batch, math.prod(free_left), math.prod(depth)])
    free = [math.prod(free_left)]
  else:
    left = graph.reshape(left, [*free_left, math.prod(depth)])
    free = free_left
  right = graph.reshape(right, [*batch, math.prod(depth), math.prod(free_right)])
  shape = [*batch, *free, math.prod(free_right)]
  found = graph.node('MatMul', [left.name, right.name], shape)
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


def _convolve(graph, values, eqn):
  params = eqn.params
  order = params['dimension_numbers']
  if params['batch_group_count'] != 1 or set(params['lhs_dilation']) != {1}:
    raise _unknown('a transposed convolution')
  images = graph.transpose(values[0], order.lhs_spec)
  kernel = graph.transpose(values[1], order.rhs_spec)
  found = graph.node(
    'Conv',
    [images.name, kernel.name],
    [_shape(eqn)[i] for i in order.out_spec],
    strides=list(params['window_strides']),
    pads=_pads(params['padding']),
    dilations=list(params['rhs_dilation']),
    group=params['feature_group_count'],
  )
  return graph.transpose(found, np.argsort(order.out_spec).tolist())


def _max_pool(graph, values, eqn):
  """The maxima of windows of images [B, H, W, C]."""
  params = eqn.params
  window, dilation = params['window_dimensions'], params['window_dilation']
  flat = len(window) == 4 and window[0] == window[3] == 1
  if not flat or {*params['base_dilation'], *dilation} != {1}:
    raise _unknown('a pooling over dimensions other than height and width')
  images = graph.transpose(values[0], [0, 3, 1, 2])
  shape = [_shape(eqn)[i] for i in (0, 3, 1, 2)]
  found = graph.node(
    'MaxPool',
    [images.name],
    shape,
    kernel_shape=list(window[1:3]),
    strides=list(params['window_strides'][1:3]),
    pads=_pads(params['padding'][1:3]),
  )
  return graph.transpose(found, [0, 2, 3, 1])


def _pad(graph, values, eqn):
  config = eqn.params['padding_config']
  if any(inner for *_, inner in config):
    raise _unknown('padding between elements')
  pads = graph.integers(*_pads([pair[:2] for pair in config]))
  names = [values[0].name, pads, values[1].name]
  return graph.node('Pad', names, _shape(eqn))


def _slice(graph, values, eqn):
  params, rank = eqn.params, len(_shape(eqn))
  ends = [n if isinstance(n, int) else _LAST for n in params['limit_indices']]
  strides = params['strides'] or (1,) * rank
  parts = (params['start_indices'], ends, range(rank), strides)
  lists = [graph.integers(*part) for part in parts]
  return graph.node('Slice', [values[0].name, *lists], _shape(eqn))


def _gather(graph, values, eqn):
  """Takes a range of one dimension, or slices at several positions of it."""
  numbers, sizes = eqn.params['dimension_numbers'], eqn.params['slice_sizes']
  x, indices = values
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
    size = graph.integers(sizes[axis])
    end = graph.node('Add', [indices.name, size], (1,))
    names = [x.name, indices.name, end.name, graph.integers(axis)]
    return graph.reshape(graph.node('Slice', names, sizes), _shape(eqn))
  if sizes[axis] != 1:
    raise _unknown('an indexing by ranges')
  x = graph.transpose(x, [*first, axis, *others])
  shape = [*indices.shape[:-1], *(sizes[i] for i in others)]
  names = [x.name, indices.name]
  found = graph.node('GatherND', names, shape, batch_dims=len(first))
  # `offset_dims`: positions of the slices' dimensions in the result.
  kept = _others(x, batches, numbers.collapsed_slice_dims)
  offsets = dict(zip(kept, numbers.offset_dims))
  inner = [offsets[i] for i in others]
  outer = set(range(len(_shape(eqn)))) - set(numbers.offset_dims)
  order = [*sorted(outer), *inner]
  found = graph.transpose(found, np.argsort(order).tolist())
  return graph.reshape(found, _shape(eqn))


def _stack(graph, values, axis: int):
  """Joins tensors along a new dimension."""
  shape = list(values[0].shape)
  shape.insert(axis, 1)
  parts = [graph.reshape(x, shape) for x in values]
  shape[axis] = len(parts)
  return graph.node('Concat', [x.name for x in parts], shape, axis=axis)


def _scan(graph, values, eqn):
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
  inner = [graph.constant(np.asarray(x)) for x in body.consts]
  shapes = [x.aval.shape for x in body.jaxpr.outvars]
  numbers = range(steps)
  for step in reversed(numbers) if params['reverse'] else numbers:
    index = graph.constant(np.array(step, np.int64)).name
    row = [graph.node('Gather', [x.name, index], x.shape[1:], axis=0) for x in rows]
    results = graph.run(body.jaxpr, inner, [*consts, *carry, *row])
    results = [graph.whole(x, shape) for x, shape in zip(results, shapes)]
    carry = results[:kept]
    found.append(results[kept:])
  found = found[::-1] if params['reverse'] else found
  return [*carry, *(_stack(graph, column, 0) for column in zip(*found))]


def _iota(graph, values, eqn):
  shape, dimension = eqn.params['shape'], eqn.params['dimension']
  if not isinstance(shape[dimension], int):
    raise _unknown('a count over the batch')
  column = [-1] + [1] * (len(shape) - dimension - 1)
  numbers = np.arange(shape[dimension], dtype=eqn.params['dtype'])
  return graph.whole(graph.constant(numbers.reshape(column)), shape)


_OTHERS = {
  'argmax': _arg('ArgMax'),
  'argmin': _arg('ArgMin'),
  'concatenate': lambda graph, values, eqn: graph.node(
    'Concat',
    [x.name for x in values],
    _shape(eqn),
    axis=eqn.params['dimension'],
  ),
  'conv_general_dilated': _convolve,
  'cumsum': lambda graph, values, eqn: graph.node(
    'CumSum',
    [values[0].name, graph.constant(np.array(eqn.params['axis'])).name],
    _shape(eqn),
    reverse=int(eqn.params['reverse']),
  ),
  'dot_general': _dot,
  'gather': _gather,
  'iota': _iota,
  'pad': _pad,
  'reduce_and': _reduce_bool('ReduceMin'),
  'reduce_max': _reduce('ReduceMax'),
  'reduce_min': _reduce('ReduceMin'),
  'reduce_or': _reduce_bool('ReduceMax'),
  'reduce_sum': _reduce('ReduceSum'),
  'reduce_window_max': _max_pool,
  'reshape': lambda graph, values, eqn: graph.reshape(values[0], _shape(eqn)),
  'scan': _scan,
  'slice': _slice,
  'squeeze': lambda graph, values, eqn: graph.reshape(values[0], _shape(eqn)),
  'stack': lambda graph, values, eqn: _stack(graph, values, eqn.params['axis']),
  'transpose': lambda graph, values, eqn: graph.transpose(
    values[0], eqn.params['permutation']
  ),
}
