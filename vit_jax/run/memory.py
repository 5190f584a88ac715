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
  'conv_general_dilated', 'cumsum', 'dot_general', 'scan', 'sort', 'while',
)  # fmt: skip


def check(config, program, mesh):
  """Raises ValueError if an update cannot fit the memory of the devices.

  Traces the update, which the run reuses, for the largest images; the limit is the
  smallest device of all processes.
  """
  rows = sharding.batch_sharding(mesh)
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows),
    program.task.batch_spec(config.batch),
  )
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
  sizes, born, last, inner = [], [], [], {}
  now = itertools.count(1)

  def new(size, time):
    sizes.append(size)
    born.append(time)
    last.append(time)
    return frozenset([len(sizes) - 1])

  def read(kept, atoms):  # Literals have no name.
    return [kept[v] if _named(v) else frozenset() for v in atoms]

  def use(values, time):
    for root in frozenset().union(*values):
      last[root] = time

  def follow(jaxpr, arguments):
    """Returns, for each result, the arrays that are kept for it."""
    kept = dict(zip(jaxpr.invars, arguments))
    kept.update((v, new(_size(v), 0)) for v in jaxpr.constvars)
    for eqn in jaxpr.eqns:
      name, values = eqn.primitive.name, read(kept, eqn.invars)
      called = _called(eqn)
      if called is not None:
        results = follow(called, values)
      else:
        time = next(now)
        use(values, time)
        bodies = () if name == 'pallas_call' else _jaxprs(eqn)
        inner[time] = max((least_bytes(x, False) for x in bodies), default=0)
        together = frozenset().union(*values)
        cost = sum(sizes[root] for root in together)
        fused = _is_fused(eqn)
        results = [
          together if fused and cost <= 1.25 * _size(v) else new(_size(v), time)
          for v in eqn.outvars
        ]
      kept.update(zip(eqn.outvars, results))
    return read(kept, jaxpr.outvars)

  given = [new(arguments * _size(v), 0) for v in jaxpr.invars]
  results = follow(jaxpr, given)
  end = next(now)
  use(results, end)
  change = [0] * (end + 2)
  for size, first, final in zip(sizes, born, last):
    change[first] += size
    change[final + 1] -= size
  alive = itertools.accumulate(change)
  return max(x + inner.get(time, 0) for time, x in enumerate(alive))


def _named(atom) -> bool:
  return not hasattr(atom, 'val')


def _size(v) -> int:
  """Returns the bytes of a variable; keys of random numbers do not count."""
  itemsize = getattr(v.aval.dtype, 'itemsize', 0)
  return math.prod(v.aval.shape) * itemsize


def _is_fused(eqn) -> bool:
  """Returns whether each element of the result depends on one of each operand."""
  name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
  if name in _VIEWS:
    return True
  # An axis of 1 is broadcast.
  alike = all(
    not v.aval.shape
    or (
      len(v.aval.shape) == len(shape)
      and all(n in (1, m) for n, m in zip(v.aval.shape, shape))
    )
    for v in eqn.invars
  )
  return alike and name not in _WHOLE and not _jaxprs(eqn)


def _jaxprs(eqn):
  found = []
  for value in eqn.params.values():
    for item in value if isinstance(value, tuple | list) else (value,):
      item = getattr(item, 'jaxpr', item)
      if hasattr(item, 'eqns'):
        found.append(item)
  return found


def _called(eqn):
  """Returns the Jaxpr that an operation only calls, or None."""
  found = _jaxprs(eqn)
  if len(found) != 1 or eqn.primitive.name in (*_WHOLE, 'pallas_call'):
    return None
  counts = (len(found[0].invars), len(found[0].outvars))
  return found[0] if counts == (len(eqn.invars), len(eqn.outvars)) else None
