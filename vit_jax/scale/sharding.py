"""Mesh, sharding rules and constraints: how one program spans many devices.

A mesh names its axes, and all of them but `model` split the batch:

  data    copies of the parameters (data parallelism)
  fsdp    every large array, parameters and optimiser's state, is split over it
          along its largest dimension that it divides (fully sharded)
  model   heads and hidden layers are split over it (tensor parallelism)

So `--config.mesh.fsdp=8` or `--config.mesh.model=2` is all that most runs need.
`config.sharding_rules`, ordered (regex, spec) pairs, go before that, for example

  ('Transformer/.*/MlpBlock_0/Dense_0/kernel', (None, 'model'))

where the first rule found in the path decides for a leaf, and nothing is added.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import math
import re
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from vit_jax import cli

MODEL_AXIS = 'model'
FSDP_AXIS = 'fsdp'

# Tensor parallelism: a head, or a hidden unit, lives on one device. Where the
# axis does not divide the dimension, the leaf is not split over it.
TENSOR_RULES = (
  ('(query|key|value)/kernel', (None, MODEL_AXIS)),
  ('(query|key|value)/bias', (MODEL_AXIS,)),
  ('MultiHeadDotProductAttention_0/out/kernel', (MODEL_AXIS,)),
  ('(MlpBlock_0|_mixing)/Dense_0/kernel', (None, MODEL_AXIS)),
  ('(MlpBlock_0|_mixing)/Dense_0/bias', (MODEL_AXIS,)),
  ('(MlpBlock_0|_mixing)/Dense_1/kernel', (MODEL_AXIS,)),
  ('head/kernel', (None, MODEL_AXIS)),
  ('head/bias', (MODEL_AXIS,)),
)

# Elements from which an array is split over the axis `fsdp`: to gather a small
# one takes longer than it saves.
FSDP_MIN_SIZE = 2**14

Rules = Sequence[tuple[str, Sequence[Any]]]


def make_mesh(axes: Mapping[str, int], devices=None) -> jax.sharding.Mesh:
  """Builds the mesh of `config.mesh`.

  Args:
    axes: size of each axis by name; one of them may be -1, "the rest".
    devices: the devices, by default all of the run.

  Returns:
    A mesh with these axes, in this order.

  Raises:
    ValueError: if the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = {name: int(size) for name, size in axes.items() if size is not None}
  free = [name for name, size in sizes.items() if size == -1]
  bad = {n: s for n, s in sizes.items() if s < 1 and s != -1}
  if bad or len(free) > 1 or 'data' not in sizes:
    raise ValueError(
      f'mesh={dict(axes)}: sizes must be positive, at most one of them -1 (the '
      "rest), and the axis 'data' is needed; use --config.mesh.data=-1"
    )
  fixed = math.prod(size for size in sizes.values() if size != -1)
  if len(devices) % fixed or (not free and fixed != len(devices)):
    remedy = (
      f'the sizes given multiply to {fixed}, which must divide {len(devices)}'
      if free
      else f'the sizes must multiply to {len(devices)}; --config.mesh.data=-1 takes '
      'what is left'
    )
    raise ValueError(
      f'mesh={dict(axes)} does not fit {len(devices)} device(s): {remedy}'
    )
  for name in free:
    sizes[name] = len(devices) // fixed
  return jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
    devices=devices,
  )


def batch_axes(mesh) -> tuple[str, ...]:
  """Returns the names of the axes that split the batch."""
  return tuple(name for name in mesh.axis_names if name != MODEL_AXIS)


def batch_shards(mesh) -> int:
  """Returns into how many parts the batch is split."""
  return math.prod(mesh.shape[name] for name in batch_axes(mesh))


def batch_sharding(mesh) -> NamedSharding:
  """Returns the sharding of an array whose first dimension is the batch."""
  return NamedSharding(mesh, P(batch_axes(mesh)))


def constrain_batch(x):
  """Says that the first dimension of `x` is the batch, split over the mesh.

  Without it the partitioner may follow the parameters' sharding into the
  activations, which more than halves the speed of a sharded model. Does nothing
  where no mesh of `make_mesh` is set, or where somebody else says how arrays are
  split: in jax.pmap and jax.shard_map, whose axes are manual, and under a mesh of
  explicit axes.
  """
  mesh = jax.sharding.get_abstract_mesh()
  automatic = set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
  if not automatic or 'data' not in mesh.axis_names:
    return x
  return jax.lax.with_sharding_constraint(x, P(batch_axes(mesh)))


def local_rows(mesh, batch_size: int) -> np.ndarray:
  """Returns which rows of a global batch this process feeds, in order.

  Args:
    mesh: the mesh.
    batch_size: number of rows of the global batch.

  Returns:
    int64 [rows]: all of them where there is one process.

  Raises:
    ValueError: if the devices do not divide the batch.
  """
  shards = batch_shards(mesh)
  if batch_size % shards:
    raise ValueError(
      f'batch={batch_size} is not a multiple of the {shards} parts into which '
      f'the mesh {dict(mesh.shape)} splits it: use '
      f'{max(1, batch_size // shards) * shards}'
    )
  slices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
  rows = np.arange(batch_size)
  return np.unique(np.concatenate([rows[index] for index in slices.values()]))


def row_parts(mesh) -> int:
  """Returns into how many parts a batch falls that processes feed as a whole.

  The parts are equal and stand in the order of the rows. The processes that feed
  one row of a part feed all of them: one process, or several that the axis `model`
  spans. All processes get the same answer.

  Args:
    mesh: the mesh.
  """
  shards = batch_shards(mesh)
  feeders = [set() for _ in range(shards)]
  where = batch_sharding(mesh).devices_indices_map((shards,))
  for device, (rows,) in where.items():
    for shard in range(shards)[rows]:
      feeders[shard].add(device.process_index)
  return count_parts(feeders)


def count_parts(feeders: Sequence) -> int:
  """Returns the least number of equal parts such that each is of one kind.

  Args:
    feeders: who feeds each row.
  """
  total = len(feeders)
  for parts in range(1, total):
    size, rest = divmod(total, parts)
    if not rest and all(
      feeders[row] == feeders[row - row % size] for row in range(total)
    ):
      return parts
  return total


def path_name(path) -> str:
  """Joins a key path of jax.tree_util with '/'."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def tree_shardings(tree, rules: Rules, mesh):
  """Returns the sharding of every leaf of `tree` (parameters, optimiser state).

  Args:
    tree: a tree of arrays or of jax.ShapeDtypeStruct.
    rules: ordered (regex, spec) pairs; the regex is searched in the leaf's path
      ('/'-joined), the spec names a mesh axis, several, or None for each
      dimension. What no rule matches follows from the axes, as the top of this
      module says; scalars are replicated.
    mesh: the mesh.

  Raises:
    ValueError: if a rule names no axis of the mesh, has more dimensions than
      the leaf, does not divide it, or matches no leaf at all.
  """
  rules = [(re.compile(regex), P(*map(_axis, spec))) for regex, spec in rules]
  unused = {regex.pattern for regex, _ in rules}

  def leaf_sharding(path, leaf):
    name = path_name(path)
    for regex, spec in rules:
      if regex.search(name):
        unused.discard(regex.pattern)
        if leaf.ndim:
          _check_spec(name, leaf.shape, regex.pattern, spec, mesh)
          return NamedSharding(mesh, spec)
    return NamedSharding(mesh, _default_spec(name, leaf.shape, mesh))

  shardings = jax.tree_util.tree_map_with_path(leaf_sharding, tree)
  if unused:
    names = [path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)]
    raise ValueError(
      f'sharding rules {sorted(unused)} match nothing: paths are like '
      f"'{max(names, key=len)}' (config.sharding_rules)"
    )
  return shardings


def _default_spec(name, shape, mesh):
  """Spec of a leaf for which there is no rule."""
  spec = [None] * len(shape)
  parts = mesh.shape.get(MODEL_AXIS, 1)
  if parts > 1:
    for regex, wanted in TENSOR_RULES:
      if re.search(regex, name):
        for i, axis in enumerate(wanted[: len(shape)]):
          if axis and shape[i] % parts == 0:
            spec[i] = axis
        break
  parts = mesh.shape.get(FSDP_AXIS, 1)
  if parts > 1 and math.prod(shape) >= FSDP_MIN_SIZE:
    free = [
      i for i, size in enumerate(shape) if spec[i] is None and size % parts == 0
    ]
    if free:
      preferred = [i for i in free if i == _attention_width(name)]
      spec[(preferred or sorted(free, key=lambda i: -shape[i]))[0]] = FSDP_AXIS
  return P(*spec)


def _attention_width(name):
  """The dimension of a head's width in a kernel of attention, else None.

  Where attention's kernels are split there, the TPU's compiler needs no copy to
  bring what it gathers into the layout that it computes with.
  """
  if re.search('(query|key|value)/kernel$', name):
    return 2
  return (
    1 if re.search('MultiHeadDotProductAttention_0/out/kernel$', name) else None
  )


def report(abstract) -> list[dict]:
  """Says what is split how, and how much of it lies on one device.

  Args:
    abstract: a tree of jax.ShapeDtypeStruct with shardings.

  Returns:
    A row for each way to split that occurs, the largest first: `spec`, `arrays`,
    `bytes` in all and `bytes_per_device`.
  """
  rows = {}
  for leaf in jax.tree.leaves(abstract):
    # Where in the array the axes stand does not matter here.
    axes = [a for a in jax.tree.leaves(tuple(leaf.sharding.spec)) if a]
    row = rows.setdefault(
      '+'.join(sorted(axes)) or 'replicated',
      {'arrays': 0, 'bytes': 0, 'bytes_per_device': 0},
    )
    shard = leaf.sharding.shard_shape(leaf.shape)
    row['arrays'] += 1
    row['bytes'] += leaf.size * leaf.dtype.itemsize
    row['bytes_per_device'] += math.prod(shard) * leaf.dtype.itemsize
  return sorted(
    ({'spec': spec, **row} for spec, row in rows.items()),
    key=lambda row: -row['bytes'],
  )


def not_split(abstract, mesh) -> str:
  """Says which arrays the axis `model` would split, but does not divide.

  Args:
    abstract: a tree of jax.ShapeDtypeStruct with shardings: the parameters.
    mesh: the mesh.

  Returns:
    '' where there are none.
  """
  parts = mesh.shape.get(MODEL_AXIS, 1)
  if parts == 1:
    return ''

  def divides(name, shape):
    return not any(
      axis and size % parts
      for regex, wanted in TENSOR_RULES
      if re.search(regex, name)
      for size, axis in zip(shape, wanted)
    )

  names = [
    f'{path_name(path)} {leaf.shape}'
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract)
    if MODEL_AXIS not in jax.tree.leaves(tuple(leaf.sharding.spec))
    and not divides(path_name(path), leaf.shape)
  ]
  return (
    f'{len(names)} arrays are not split over model={parts}, which does not divide '
    f'them, {max(names, key=len)} for one'
    if names
    else ''
  )


def describe(row: Mapping[str, Any]) -> str:
  """Says in words what a row of `report` holds, but for its axes."""
  return (
    f'{row["arrays"]} arrays, {cli.size(row["bytes_per_device"])} of '
    f'{cli.size(row["bytes"])} on each device'
  )


def _axis(entry):
  """Turns the list that a config or a JSON file holds into a tuple."""
  return tuple(entry) if isinstance(entry, (list, tuple)) else entry


def _check_spec(name, shape, regex, spec, mesh):
  where = f"sharding rule ('{regex}', {tuple(spec)}) on {name} {tuple(shape)}"
  if len(spec) > len(shape):
    raise ValueError(f'{where}: more dimensions than the array has')
  for size, entry in zip(shape, spec):
    axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
    for axis in axes:
      if axis not in mesh.shape:
        raise ValueError(
          f"{where}: the mesh {dict(mesh.shape)} has no axis '{axis}': use "
          f'one of {", ".join(mesh.axis_names)}'
        )
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if size % parts:
      raise ValueError(f'{where}: {parts} parts do not divide {size}')
