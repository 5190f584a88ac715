"""Estimates the memory of an update from its program, before it is compiled.

Compilers fuse elementwise operations with the operations that read them, and do
not keep their results. Such a result is therefore counted as itself or as its
operands, whichever is smaller. The estimate tends to be too low: it rejects only
what cannot fit.
"""

import itertools
import math

import jax

from vit_jax import console
from vit_jax.configs import models as model_configs
from vit_jax.distributed import processes, sharding

# Operations that only rearrange one array, and take no memory of their own.
_VIEWS = (
  'broadcast_in_dim', 'convert_element_type', 'copy', 'expand_dims', 'reshape',
  'sharding_constraint', 'slice', 'squeeze', 'transpose',
)  # fmt: skip
# Operations whose elements depend on more than one element of each operand.
_WHOLE = (
  'conv_general_dilated', 'cumsum', 'dot_general', 'pallas_call', 'scan', 'sort',
  'while',
)  # fmt: skip


def check(config, program, mesh):
  """Raises ValueError if an update cannot fit the memory of the devices.

  Traces the update, which the run reuses, for the largest images; the limit is the
  smallest device of all processes.
  """
  batch = sharding.abstract_batch(program.task.batch_spec(config.batch), mesh)
  try:
    with jax.set_mesh(mesh):
      jaxpr = program.jit_update().trace(program.abstract, batch).jaxpr
  except KeyError as e:
    if e.args[0] in batch:
      raise
    raise ValueError(
      f"task='{config.task}' reads {e} of a batch, which its method batch_spec "
      'does not have: add its shape and type there (config.task)'
    ) from e
  state = jax.tree.leaves(program.abstract)
  whole = sum(x.size * x.dtype.itemsize for x in state)
  mine = sum(x['bytes_per_device'] for x in sharding.report(program.abstract))
  needed = (least_bytes(jaxpr) - whole) / mesh.size + mine
  devices = jax.local_devices()
  limit = (devices[0].memory_stats() or {}).get('bytes_limit')
  limit = limit or console.machine_memory() / len(devices)
  limit = min(processes.gather('comparing memory', limit))
  if needed > limit:
    raise ValueError(
      f'batch={config.batch}: an update takes at least {console.size(needed)} of memory '
      f'on a device, which has {console.size(limit)}: '
      + remedy(config, program.task.image_size)
    )


def remedy(config, image_size: tuple[int, int]) -> str:
  """Returns which keys reduce the memory of an update, for a message."""
  crop = 'pp.sides and --config.pp.longest_side' if config.pp.sides else 'pp.crop'
  words = (
    f'lower --config.batch, raise --config.accum_steps, or '
    f'lower --config.{crop} (images of {image_size[0]}x{image_size[1]} pixels)'
  )
  if not model_configs.layers_of(config.model).get('remat', 'full'):
    place = model_configs.place_of_layers(config.model)
    words += f', or set --config.{place}.remat=full'
  return words


def least_bytes(jaxpr, arguments: bool = True) -> int:
  """Returns a lower bound of the peak memory of a program, in bytes.

  Takes a Jaxpr or ClosedJaxpr, such as `jax.jit(f).trace(...).jaxpr`; sizes are
  over all devices. With `arguments`, they count until their last use, as donated
  arguments do.
  """
  jaxpr = getattr(jaxpr, 'jaxpr', jaxpr)
  sizes, born, last = [], [], []  # By array; times are numbers of operations.
  inner = [0]  # By time: bytes of arrays inside of the operation, such as a loop.

  def new(size):
    sizes.append(size)
    born.append(len(inner) - 1)
    last.append(len(inner) - 1)
    return {len(sizes) - 1}

  def follow(jaxpr, kept):
    """Returns, for each result, the arrays that are kept for it."""
    kept = dict(zip(jaxpr.invars, kept))
    kept.update((v, new(_size(v))) for v in jaxpr.constvars)
    # Literals, which have a value, take no memory.
    read = lambda atoms: [set() if hasattr(v, 'val') else kept[v] for v in atoms]
    for eqn in jaxpr.eqns:
      bodies, operands = _bodies(eqn), read(eqn.invars)
      if _is_call(eqn, bodies):
        results = follow(bodies[0], operands)
      else:
        inner.append(max((least_bytes(body, False) for body in bodies), default=0))
        arrays = set().union(*operands)
        use(arrays)
        cost = sum(sizes[array] for array in arrays)
        fused = not bodies and _is_fused(eqn)
        results = [
          arrays if fused and cost <= 1.25 * _size(v) else new(_size(v))
          for v in eqn.outvars
        ]
      kept.update(zip(eqn.outvars, results))
    return read(jaxpr.outvars)

  def use(arrays):
    for array in arrays:
      last[array] = len(inner) - 1

  results = follow(jaxpr, [new(arguments * _size(v)) for v in jaxpr.invars])
  inner.append(0)
  use(set().union(*results))
  change = [0] * (len(inner) + 1)
  for size, first, final in zip(sizes, born, last):
    change[first] += size
    change[final + 1] -= size
  return max(map(sum, zip(itertools.accumulate(change), inner)))


def _size(v) -> int:
  """Returns the bytes of a variable; keys of random numbers do not count."""
  return math.prod(v.aval.shape) * getattr(v.aval.dtype, 'itemsize', 0)


def _is_fused(eqn) -> bool:
  """Returns whether each element of the result depends on one of each operand."""
  name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
  if name in _VIEWS:
    return True
  shapes = [v.aval.shape for v in eqn.invars if v.aval.shape]
  return name not in _WHOLE and all(
    len(x) == len(shape) and all(n in (1, m) for n, m in zip(x, shape)) for x in shapes
  )


def _is_call(eqn, bodies) -> bool:
  """Returns whether an operation only calls a program."""
  return (
    len(bodies) == 1
    and eqn.primitive.name not in _WHOLE
    and len(bodies[0].invars) == len(eqn.invars)
    and len(bodies[0].outvars) == len(eqn.outvars)
  )


def _bodies(eqn) -> list:
  """Returns the programs inside of an operation; kernels count as one operation."""
  if eqn.primitive.name == 'pallas_call':
    return []
  return [
    getattr(item, 'jaxpr', item)
    for value in eqn.params.values()
    for item in (value if isinstance(value, tuple | list) else (value,))
    if hasattr(getattr(item, 'jaxpr', item), 'eqns')
  ]
