"""Mesh, sharding rules and constraints: how one program spans many devices.

A mesh names its axes. Every axis but `model` splits the batch; `data` is there
always, others as `config.mesh` wants them. Parameters and the optimiser's state
follow an ordered list of (regex, spec) rules on their path, for example

  ('Transformer/.*/MlpBlock_0/Dense_0/kernel', (None, 'model'))

where the first rule found in the path decides and what no rule matches is
replicated.
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

MODEL_AXIS = 'model'

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
    raise ValueError(
      f'mesh={dict(axes)} does not fit {len(devices)} device(s): the sizes must '
      f'multiply to {len(devices)}; --config.mesh.data=-1 takes what is left'
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
  where no mesh is set.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
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


def path_name(path) -> str:
  """Joins a key path of jax.tree_util with '/'."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def tree_shardings(tree, rules: Rules, mesh):
  """Returns the sharding of every leaf of `tree` (parameters, optimiser state).

  Args:
    tree: a tree of arrays or of jax.ShapeDtypeStruct.
    rules: ordered (regex, spec) pairs; the regex is searched in the leaf's path
      ('/'-joined), the spec names a mesh axis, several, or None for each
      dimension. Scalars and what no rule matches are replicated.
    mesh: the mesh.

  Raises:
    ValueError: if a rule names no axis of the mesh, has more dimensions than
      the leaf, or does not divide it.
  """
  rules = [(re.compile(regex), P(*map(_axis, spec))) for regex, spec in rules]

  def leaf_sharding(path, leaf):
    name = path_name(path)
    for regex, spec in rules:
      if leaf.ndim and regex.search(name):
        _check_spec(name, leaf.shape, regex.pattern, spec, mesh)
        return NamedSharding(mesh, spec)
    return NamedSharding(mesh, P())

  return jax.tree_util.tree_map_with_path(leaf_sharding, tree)


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
          f"{where}: the mesh {dict(mesh.shape)} has no axis '{axis}'; add it "
          f'with --config.mesh.{axis}'
        )
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if size % parts:
      raise ValueError(f'{where}: {parts} parts do not divide {size}')
