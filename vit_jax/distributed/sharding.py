"""Builds the mesh and the shardings: how one program spans many devices.

The axes of a mesh, of which all but `model` and `sequence` split the batch:

  data      replicates the parameters (data parallelism)
  fsdp      splits each large array, of parameters and optimiser state, along its
            largest dimension that the axis divides (fully sharded)
  model     splits heads and hidden layers (tensor parallelism)
  sequence  splits the tokens of each image; attention gathers keys and values
            (context parallelism, arXiv 2407.21783, section 3.3.2)

Most runs need no more than `--config.mesh.fsdp=8` or `--config.mesh.model=2`.
`config.sharding_rules` overrides these defaults. It is an ordered list of
(regex, spec) pairs, for example

  ('Transformer/.*/MlpBlock_0/Dense_0/kernel', (None, 'model'))

The first rule whose regex is found in a leaf's path gives the whole spec of
that leaf.
"""

from collections.abc import Callable, Mapping, Sequence
import hashlib
import math
import re
from typing import Any

import jax
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.tree_util import KeyPath
import numpy as np

from vit_jax import console

MODEL_AXIS = 'model'
FSDP_AXIS = 'fsdp'
SEQUENCE_AXIS = 'sequence'

# The kernel from the heads of an attention layer to its output.
_OUT = '(MultiHeadDotProductAttention_0|attention)/out/kernel'
# The MLPs of a Vision Transformer or Mixer, of a detector, and of an iGPT.
_MLP = r'(MlpBlock_0|_mixing|coder_layer_\d+|box_head)'

# Tensor parallelism: each head and each hidden unit lies on one device. A
# dimension that the axis does not divide is not split.
TENSOR_RULES = (
  ('(query|key|value)/kernel', (None, MODEL_AXIS)),
  ('(query|key|value)/bias', (MODEL_AXIS,)),
  (_OUT, (MODEL_AXIS,)),
  (f'({_MLP}/(Dense_0|gate)|mlp/hidden)/kernel', (None, MODEL_AXIS)),
  (f'{_MLP}/(Dense_0|gate)/bias', (MODEL_AXIS,)),
  (f'({_MLP}/Dense_1|mlp/output)/kernel', (MODEL_AXIS,)),
  ('head(_dist)?/kernel', (None, MODEL_AXIS)),
  ('head(_dist)?/bias', (MODEL_AXIS,)),
)

# Least number of elements for an array to be split over the axis `fsdp`:
# gathering a smaller one takes longer than the split saves.
FSDP_MIN_SIZE = 2**14

Rules = Sequence[tuple[str, Sequence[Any]]]


def make_mesh(
  axes: Mapping[str, int], devices: Sequence[Any] | None = None
) -> jax.sharding.Mesh:
  """Builds the mesh of `config.mesh`.

  `axes` are the sizes by name, in the order of the mesh; one size may be -1,
  for "the rest". The first axis whose size allows it, usually 'data', crosses the
  slower network between slices (of TPUs). ValueError if the sizes do not multiply to
  the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = _axis_sizes(axes, len(devices))
  names = tuple(sizes)
  shape = tuple(sizes.values())
  types = (jax.sharding.AxisType.Auto,) * len(sizes)
  num_slices = len({getattr(device, 'slice_index', 0) for device in devices})
  if num_slices == 1:
    try:
      return jax.make_mesh(shape, names, axis_types=types, devices=devices)
    except NotImplementedError:  # An axis takes only a part of an axis of the torus.
      arranged = mesh_utils.create_device_mesh(
        shape, devices, allow_split_physical_axes=True
      )
      return jax.sharding.Mesh(arranged, names, axis_types=types)
  # Number of slices that each axis crosses.
  across = []
  for size in shape:
    crossed = math.gcd(size, num_slices)
    across.append(crossed)
    num_slices //= crossed
  within = [size // crossed for size, crossed in zip(shape, across)]
  arranged = mesh_utils.create_hybrid_device_mesh(
    within, across, devices, allow_split_physical_axes=True
  )
  return jax.sharding.Mesh(arranged, names, axis_types=types)


def _axis_sizes(axes: Mapping[str, int], num_devices: int) -> dict[str, int]:
  """Returns the sizes of the axes by name, none of them -1; see `make_mesh`."""
  sizes = {}
  free = []
  fixed = 1
  for name, size in axes.items():
    if size is None:
      continue
    sizes[name] = int(size)
    if sizes[name] == -1:
      free.append(name)
    else:
      fixed *= sizes[name]
  is_positive = all(size > 0 for name, size in sizes.items() if name not in free)
  if not is_positive or len(free) > 1 or 'data' not in sizes:
    raise ValueError(
      f'mesh={dict(axes)}: sizes must be positive, at most one of them -1 (the '
      "rest), and the axis 'data' is needed; use --config.mesh.data=-1"
    )
  if num_devices % fixed or (not free and fixed != num_devices):
    raise ValueError(
      f'mesh={dict(axes)} does not fit {num_devices} devices: the sizes must '
      f'multiply to {num_devices}, of which --config.mesh.data=-1 takes the rest'
    )
  for name in free:
    sizes[name] = num_devices // fixed
  return sizes


def batch_axes(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> tuple[str, ...]:
  """Returns the names of the axes that split the batch."""
  model_axes = (MODEL_AXIS, SEQUENCE_AXIS)
  return tuple(name for name in mesh.axis_names if name not in model_axes)


def mesh_of(tree: Any) -> jax.sharding.Mesh:
  """Returns the mesh of the arrays of a tree, or a mesh of one device."""
  arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
  placement = next((x.sharding for x in arrays), None)
  if isinstance(placement, NamedSharding):
    return placement.mesh
  devices = placement.device_set if placement else jax.local_devices()[:1]
  return make_mesh({'data': 1}, list(devices))


def batch_shards(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
  """Returns the number of parts into which the mesh splits the batch."""
  return math.prod(mesh.shape[name] for name in batch_axes(mesh))


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of an array whose first dimension is the batch."""
  return NamedSharding(mesh, P(batch_axes(mesh)))


def abstract_batch(batch: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns the shapes and types of a batch with their sharding."""
  rows = batch_sharding(mesh)

  def abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)

  return jax.tree.map(abstract, batch)


def constrain_batch(x: jax.Array) -> jax.Array:
  """Splits the first dimension of `x`, the batch, over the mesh.

  Without this constraint the partitioner may carry the parameters' sharding
  into the activations, which more than halves the speed of a sharded model.
  Has no effect without a mesh of `make_mesh`, and under jax.pmap or jax.shard_map, where
  the caller splits the arrays.
  """
  mesh = _current_mesh()
  if mesh is None:
    return x
  return jax.lax.with_sharding_constraint(x, P(batch_axes(mesh)))


def with_automatic_axes(function: Callable[..., Any], *args: Any, batch: Any) -> Any:
  """Calls a function with the explicit axes of the mesh made automatic.

  On explicit axes, some operations, such as most reshapes, must be told how their
  result is split. Inside the function the compiler decides, as on a mesh of `make_mesh`.
  Without explicit axes, the function is called as it is.

  Args:
    function: the function.
    *args: its arguments, trees of arrays and of any other leaves.
    batch: arguments whose arrays have the batch as their first dimension.

  Returns the results, on explicit axes: the first dimension of the size of the batch is
  split as the batch is, all others are replicated.
  """
  mesh = _explicit_mesh(args)
  if mesh is None:
    return function(*args)
  explicit = []
  for name, kind in zip(mesh.axis_names, mesh.axis_types):
    if kind == jax.sharding.AxisType.Explicit:
      explicit.append(name)
  automatic = mesh.update_axis_types(
    dict.fromkeys(explicit, jax.sharding.AxisType.Auto)
  )
  size, axes = _batch_split(batch)

  def spec(shape: tuple[int, ...]) -> P:
    if size not in shape:
      return P()
    return P(*[None] * shape.index(size), axes)

  with jax.sharding.use_abstract_mesh(automatic):
    outputs = function(*_resharded(args, lambda shape: P()))
  with jax.sharding.use_abstract_mesh(mesh):
    return _resharded(outputs, spec)


def replicate_explicit(tree: Any) -> Any:
  """Replicates the arrays of a tree that lie on explicit axes; others stay as they are."""
  mesh = _explicit_mesh(tree)
  if mesh is None:
    return tree
  with jax.sharding.use_abstract_mesh(mesh):
    return _resharded(tree, lambda shape: P())


def _explicit_mesh(tree: Any) -> jax.sharding.AbstractMesh | None:
  """Returns the current mesh, else the arrays' mesh, if it has explicit axes."""
  meshes = [jax.sharding.get_abstract_mesh()]
  if meshes[0].empty:
    meshes = [jax.typeof(x).sharding.mesh for x in _arrays(tree)]
  explicit = jax.sharding.AxisType.Explicit
  return next((mesh for mesh in meshes if explicit in mesh.axis_types), None)


def _batch_split(tree: Any) -> tuple[int | None, Any]:
  """Returns size and axes of the first split first dimension, or None, None."""
  for x in _arrays(tree):
    spec = jax.typeof(x).sharding.spec
    if spec and spec[0] is not None:
      return x.shape[0], spec[0]
  return None, None


def _arrays(tree: Any) -> list[jax.Array]:
  return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def _resharded(tree: Any, spec: Callable[[tuple[int, ...]], P]) -> Any:
  """Splits the arrays of a tree over the mesh that is set, by a function of the shape."""

  def reshard(x: Any) -> Any:
    return jax.sharding.reshard(x, spec(x.shape)) if isinstance(x, jax.Array) else x

  return jax.tree.map(reshard, tree)


def sequence_shards(mesh: jax.sharding.Mesh | None = None) -> int:
  """Returns into how many parts a mesh splits tokens; None: the mesh that is set."""
  mesh = _current_mesh() if mesh is None else mesh
  return 1 if mesh is None else mesh.shape.get(SEQUENCE_AXIS, 1)


def constrain_tokens(x: jax.Array) -> jax.Array:
  """Splits tokens [B, N, D] like `constrain_batch`, and N over the axis `sequence`.

  The axis need not divide N: the compiler pads the last part. Fewer tokens than parts,
  such as a class token [B, 1, D], stay whole.
  """
  shards = sequence_shards()
  if shards == 1 or x.shape[1] < shards:
    return constrain_batch(x)
  batch = batch_axes(_current_mesh())
  return jax.lax.with_sharding_constraint(x, P(batch, SEQUENCE_AXIS))


def gather_keys(
  query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Splits queries [B, Q, K, E] over `sequence`; gathers keys, values [B, S, K, E].

  Each device then computes the attention of its own queries. Heads stay split as they
  are. A single query, as of a class token, needs the sums over split keys only. Has no
  effect without the axis `sequence`.
  """
  shards = sequence_shards()
  if shards == 1 or query.shape[1] < shards:
    return query, key, value
  batch = batch_axes(_current_mesh())
  heads = (P.UNCONSTRAINED, P.UNCONSTRAINED)
  split = P(batch, SEQUENCE_AXIS, *heads)
  gathered = P(batch, None, *heads)
  constrain = jax.lax.with_sharding_constraint
  return constrain(query, split), constrain(key, gathered), constrain(value, gathered)


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Returns the sharding of an array of which every device has a copy."""
  return NamedSharding(mesh, P())


def shard_map_rows(function: Callable, *args: jax.Array, axis: int = 0) -> Any:
  """Applies a function on each device to the rows of the batch that lie there.

  With automatic partitioning, a loop whose length depends on the data would wait for
  all devices in every iteration. Where `constrain_batch` has no effect, or the mesh
  does not divide the rows, the function is applied to all rows at once. Rows
  must not depend on each other; `axis` is the dimension of each argument that
  is the batch.
  """
  mesh = _current_mesh()
  if mesh is None or args[0].shape[axis] % batch_shards(mesh):
    return function(*args)
  spec = P(*[None] * axis, batch_axes(mesh))
  mapped = jax.shard_map(
    function, in_specs=(spec,) * len(args), out_specs=spec, check_vma=False
  )
  return mapped(*args)


def _current_mesh() -> jax.sharding.AbstractMesh | None:
  """Returns the mesh of `make_mesh` that is set, or None."""
  mesh = jax.sharding.get_abstract_mesh()
  automatic = set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
  return mesh if automatic and 'data' in mesh.axis_names else None


def local_rows(mesh: jax.sharding.Mesh, batch_size: int) -> np.ndarray:
  """Returns the rows of a global batch that this process feeds: int64 [rows]."""
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


def path_name(path: KeyPath) -> str:
  """Joins a key path of jax.tree_util with '/'."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def digest(tree: Any) -> str:
  """Returns a hash of the arrays of a tree and of their names, as 32 digits.

  It does not depend on how they are split. All processes of their mesh must
  call it.
  """
  state = hashlib.blake2b(digest_size=16)
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    if not getattr(x, 'is_fully_addressable', True):
      x = multihost_utils.process_allgather(x, tiled=True)
    x = np.asarray(x)
    state.update(f'{path_name(path)} {x.dtype} {x.shape}\n'.encode())
    state.update(x.tobytes())
  return state.hexdigest()


def gather_bytes(content: bytes) -> list[bytes]:
  """Returns the contents of all processes, in their order; all must call it."""
  if jax.process_count() == 1:
    return [content]
  lengths = multihost_utils.process_allgather(np.int32(len(content)))
  padded = np.zeros(lengths.max(), np.uint8)
  padded[: len(content)] = np.frombuffer(content, np.uint8)
  rows = multihost_utils.process_allgather(padded)  # [processes, bytes]
  return [row[:length].tobytes() for row, length in zip(rows, lengths)]


def tree_shardings(tree: Any, rules: Rules, mesh: jax.sharding.Mesh) -> Any:
  """Returns the sharding of every leaf of `tree` (parameters, optimiser state).

  `tree` has arrays or jax.ShapeDtypeStructs; for `rules` see the top of this
  module. A spec gives a mesh axis, several axes or None for each dimension.
  Leaves that no rule matches are split by the defaults there; scalars are
  replicated. Factors of Adafactor's second moment follow their parameters.
  ValueError if a rule does not fit a leaf or the mesh, or matches no leaf.
  """
  shapes = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    shapes[path_name(path)] = leaf.shape

  def leaf_sharding(path: KeyPath, leaf: Any, rule_number: int) -> NamedSharding:
    name = path_name(path)
    shape, reduced_axis = _factored(name, leaf.shape, shapes)
    if shape is None:
      return replicated(mesh)
    if rule_number < 0 or not shape:
      sharding = NamedSharding(mesh, _default_spec(name, shape, mesh))
    else:
      regex, rule = rules[rule_number]
      sharding = _sharding_by_rule(name, shape, regex, rule, mesh)
    if reduced_axis is None:
      return sharding
    spec = list(sharding.spec)
    spec += [None] * (len(shape) - len(spec))
    del spec[reduced_axis]
    return NamedSharding(mesh, P(*spec))

  numbers = first_matches('sharding_rules', rules, tree)
  return jax.tree_util.tree_map_with_path(leaf_sharding, tree, numbers)


def _factored(
  name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...] | None, int | None]:
  """Returns the shape that a leaf is split by, and the axis it lacks, if any.

  The shape is None for the placeholders of optax.scale_by_factored_rms.
  """
  factor = re.search('/(v_row|v_col|v)/(.*)', name)
  if factor is None:
    return shape, None
  param_shape = shapes.get(f'params/{factor[2]}')
  if param_shape is None or shape == param_shape:
    return shape, None
  if shape == (1,):
    return None, None
  axes = np.argsort(param_shape).tolist()  # Adafactor factors the two largest.
  return param_shape, axes[-1] if factor[1] == 'v_row' else axes[-2]


def first_matches(key: str, rules: Rules, tree: Any) -> Any:
  """Returns, for each leaf, the number of the first rule found in its path.

  It is -1 where the regex of no rule is found. ValueError, which names the
  `key` of the config, if a rule decides on no leaf.
  """
  compiled = [re.compile(regex) for regex, _ in rules]

  def number(path: KeyPath, _: Any) -> int:
    name = path_name(path)
    matches = (i for i, regex in enumerate(compiled) if regex.search(name))
    return next(matches, -1)

  numbers = jax.tree_util.tree_map_with_path(number, tree)
  unused = {*range(len(rules))} - {*jax.tree.leaves(numbers)}
  if unused:
    names = [path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)]
    tops = dict.fromkeys(re.sub('/.*', '/', name) for name in names)
    raise ValueError(
      f'{key}: {[rules[i][0] for i in sorted(unused)]} match nothing, or only '
      f'what an earlier rule matches; paths begin with {", ".join(tops)}, as '
      f"'{max(names, key=len)}' (config.{key})"
    )
  return numbers


def _default_spec(name: str, shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> P:
  """Returns the spec of a leaf that no rule matches."""
  spec: list[str | None] = [None] * len(shape)
  model_size = mesh.shape.get(MODEL_AXIS, 1)
  if model_size > 1 and '_lora_' not in name:  # Adapters are small.
    for i, axis in enumerate(_tensor_rule(name)[: len(shape)]):
      if axis and shape[i] % model_size == 0:
        spec[i] = axis
  fsdp_size = mesh.shape.get(FSDP_AXIS, 1)
  if fsdp_size > 1 and math.prod(shape) >= FSDP_MIN_SIZE:
    divisible = []
    for i, size in enumerate(shape):
      if spec[i] is None and size % fsdp_size == 0:
        divisible.append(i)
    width = _attention_width(name)
    if width in divisible:
      spec[width] = FSDP_AXIS
    elif divisible:
      spec[max(divisible, key=shape.__getitem__)] = FSDP_AXIS
  return P(*spec)


def _tensor_rule(name: str) -> tuple[str | None, ...]:
  """Returns the spec of the first rule of TENSOR_RULES that matches; () if none."""
  for regex, spec in TENSOR_RULES:
    if re.search(regex, name):
      return spec
  return ()


def _attention_width(name: str) -> int | None:
  """Returns the dimension of the head width in an attention kernel, else None.

  With attention kernels split there, the TPU compiler needs no copy to bring
  the gathered kernel into the layout of the computation.
  """
  if re.search('(query|key|value)/kernel$', name):
    return 2
  return 1 if re.search(f'{_OUT}$', name) else None


def report(abstract: Any) -> list[dict]:
  """Reports how the arrays of a tree are split, and the bytes on each device.

  Returns a row for each kind of split, the largest first: `spec`, the number of
  `arrays`, total `bytes`, and `bytes_per_device`.
  """
  rows: dict[str, dict[str, int]] = {}
  for leaf in jax.tree.leaves(abstract):
    # The order of the axes within the array does not matter here.
    axes = [a for a in jax.tree.leaves(tuple(leaf.sharding.spec)) if a]
    row = rows.setdefault(
      '+'.join(sorted(axes)) or 'replicated',
      {'arrays': 0, 'bytes': 0, 'bytes_per_device': 0},
    )
    shard = leaf.sharding.shard_shape(leaf.shape)
    row['arrays'] += 1
    row['bytes'] += leaf.size * leaf.dtype.itemsize
    row['bytes_per_device'] += math.prod(shard) * leaf.dtype.itemsize
  by_size = sorted(rows.items(), key=lambda item: item[1]['bytes'], reverse=True)
  return [{'spec': spec, **row} for spec, row in by_size]


def not_split(abstract: Any, mesh: jax.sharding.Mesh) -> str:
  """Describes the parameters that `model` should split but cannot; '' if none."""
  model_size = mesh.shape.get(MODEL_AXIS, 1)
  names = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
    if MODEL_AXIS in jax.tree.leaves(tuple(leaf.sharding.spec)):
      continue
    name = path_name(path)
    rule = _tensor_rule(name)
    if any(axis and size % model_size for size, axis in zip(leaf.shape, rule)):
      names.append(f'{name} {leaf.shape}')
  if not names:
    return ''
  return (
    f'{len(names)} arrays are not split over model={model_size}, which does not divide '
    f'their dimensions, for example {max(names, key=len)}'
  )


def describe(row: Mapping[str, Any]) -> str:
  """Describes a row of `report`, without its axes."""
  return (
    f'{row["arrays"]} arrays, {console.size(row["bytes_per_device"])} of '
    f'{console.size(row["bytes"])} on each device'
  )


def _sharding_by_rule(
  name: str,
  shape: tuple[int, ...],
  regex: str,
  spec: Sequence[Any],
  mesh: jax.sharding.Mesh,
) -> NamedSharding:
  """Returns the sharding of a leaf; JAX says why a spec does not fit it."""
  # Configs and JSON files hold several axes as a list.
  axes = [tuple(axis) if isinstance(axis, list) else axis for axis in spec]
  try:
    if len(axes) > len(shape):
      raise ValueError('more dimensions than the array has')
    sharding = NamedSharding(mesh, P(*axes))
    sharding.shard_shape(shape)
    return sharding
  except ValueError as e:
    raise ValueError(
      f"sharding rule ('{regex}', {tuple(axes)}) on {name} {tuple(shape)}: {e}"
    ) from e
