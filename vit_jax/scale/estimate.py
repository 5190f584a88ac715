"""What a training step costs on TPUs, by their compiler, without one.

The compiler's estimate of a program's time is a sum, over its operations, of the
longer of two times: that of the arithmetic and that of the memory. It counts no
network, and what is in a loop once. The first is given apart; the second is mended
where the loops are ours (micro-batches, layers), and where they are the
compiler's own, for the matrix products in them.
"""

from collections.abc import Callable
import copy
import math
import re
import time
from typing import Any
from typing import NamedTuple

import jax

from vit_jax import cli
from vit_jax.scale import flops
from vit_jax.scale import sharding
from vit_jax.scale import topology

_COLLECTIVES = (
  'all-reduce',
  'all-gather',
  'reduce-scatter',
  'all-to-all',
  'collective-permute',
)
# What it rearranges memory with on v5e and newer, and cannot estimate.
_UNKNOWN = 'custom_call_target="ConcatBitcast"'
_SIZES = {'f32': 4, 's32': 4, 'u32': 4, 'bf16': 2, 'f16': 2, 'pred': 1}


class Lowered(NamedTuple):
  """A program ready to be compiled.

  Attributes:
    update: jax.stages.Lowered of the whole update.
    loops: (times, jax.stages.Lowered) whose costs, so often, are to be added:
      the compiler counts what is in a loop once.
    abstract: the TrainState's shapes and shardings.
    flops: of the matrix products of an update, over all devices.
  """

  update: jax.stages.Lowered
  loops: list[tuple[int, jax.stages.Lowered]]
  abstract: Any
  flops: int


def lower(config, make_program: Callable, devices) -> Lowered:
  """Lowers the update of a config for devices that need not be there.

  Args:
    config: with `total_steps` and `warmup_steps` as numbers.
    make_program: (config, mesh) -> vit_jax.train.Program.
    devices: of a topology.

  Raises:
    ValueError: if config and devices do not go together, as in training.
  """
  mesh = sharding.make_mesh(config.mesh, devices)

  def batch_of(task, size):
    split = sharding.batch_sharding(mesh)
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split),
      task.batch_spec(size),
    )

  def gradient(num_layers=None):
    """Lowers the gradient of a micro-batch, maybe of fewer layers in a row."""
    part = copy.deepcopy(config)
    if num_layers:
      part.model.transformer.update(num_layers=num_layers, scan=False)
    task, _, _, abstract = make_program(part, mesh)
    params = abstract.params

    def total(params, extra, batch):
      (total, _), metrics = task.loss(params, extra, batch, jax.random.key(0))
      return total, metrics

    function = jax.jit(
      jax.value_and_grad(total, has_aux=True),
      out_shardings=(None, jax.tree.map(lambda x: x.sharding, params)),
    )
    batch = batch_of(task, config.batch // config.accum_steps)
    with jax.set_mesh(mesh):  # Where nothing can be computed, only lowered.
      return function.lower(params, abstract.extra, batch)

  loops = []
  if config.accum_steps > 1:
    loops.append((config.accum_steps - 1, gradient()))
  encoder = config.model.get('transformer') or {}
  if encoder.get('scan'):
    # One more layer costs what three layers cost more than two. The last layer
    # stands outside the loop, one inside is counted.
    times = config.accum_steps * (encoder.num_layers - 2)
    loops += [(times, gradient(3)), (-times, gradient(2))]
  program = make_program(config, mesh)
  batch = batch_of(program.task, config.batch)
  with jax.set_mesh(mesh):
    traced = program.jit_update().trace(program.abstract, batch)
    return Lowered(
      traced.lower(), loops, program.abstract, flops.count_flops(traced.jaxpr)
    )


def collectives(hlo: str) -> dict[str, dict]:
  """Counts the collectives of a compiled program, by kind.

  Args:
    hlo: its text.

  Returns:
    kind -> {'count', 'bytes', 'network_bytes'}: bytes of the results on one
    device, and the least that goes over the links of a chip for them, each way.
    What stands in the body of a loop counts once.
  """
  found = {}
  call = re.compile(rf' ({"|".join(_COLLECTIVES)})(-start)?\(')
  groups = {}  # Of the fusions that TPUs from v4 on make of a reduce-scatter.
  inside = None
  for line in hlo.splitlines():
    if line.startswith('%all-reduce-scatter'):
      inside = line.split(' ')[0]
    elif line.startswith('}'):
      inside = None
    elif inside:
      groups[inside] = groups.get(inside) or _group_size(line)
      continue
    scatter = re.search(r' fusion\(.*calls=(%all-reduce-scatter[\w.]*)', line)
    match = scatter or call.search(line)
    if match is None or ' = ' not in line[: match.start()]:
      continue
    kind = 'reduce-scatter' if scatter else match[1]
    shape = line[: match.start()].partition(' = ')[2]
    size = sum(
      _SIZES.get(dtype, 4) * math.prod(int(n) for n in dims.split(',') if n)
      for dtype, dims in re.findall(r'(\w+)\[([\d,]*)\]', shape)
    )
    if not scatter and match[2]:
      size //= 2  # What only starts here names its operands too.
    group = (groups.get(match[1]) if scatter else _group_size(line)) or 1
    row = found.setdefault(kind, {'count': 0, 'bytes': 0, 'network_bytes': 0})
    row['count'] += 1
    row['bytes'] += size
    row['network_bytes'] += size * _passes(kind, group)
  return found


def _group_size(line):
  """Number of devices that a collective joins; 0 where the line does not say.

  Written {{0,1},{2,3}}, [groups,size]<=[devices], or as the axes of a mesh,
  mesh['a'=4,'b'=8] {'b'}.
  """
  text = line.partition('replica_groups=')[2]
  if text.startswith('{{'):
    return text[2 : text.index('}')].count(',') + 1
  if text.startswith('mesh['):
    axes, _, joined = text.partition(']')
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes))
    names = re.findall(r"'(\w+)'", joined.partition('}')[0])
    return math.prod(int(sizes[name]) for name in names)
  match = re.match(r'\[\d+,(\d+)\]', text)
  return int(match[1]) if match else 0


def _passes(kind, group):
  """Bytes through the links of a chip for each byte of the result on a device."""
  if kind == 'collective-permute':
    return 1
  factor = {'all-reduce': 2, 'reduce-scatter': group}.get(kind, 1)
  return factor * (group - 1) / group


def _bytes(abstract):
  return sum(row['bytes_per_device'] for row in sharding.report(abstract))


def compile_plan(lowered: Lowered, chip: topology.Chip, devices: int) -> dict:
  """Compiles, and returns what the compiler says.

  Args:
    lowered: the program.
    chip: kind of the devices.
    devices: their number.

  Returns:
    `fits`; where it does: `memory_per_core_bytes` and its parts,
    `bytes_accessed_per_core`, `step_seconds`, `network_seconds`, `collectives`;
    else `memory_per_core_bytes` as far as the compiler says it.
  """
  start = time.perf_counter()
  result = {
    'params_bytes': _bytes(lowered.abstract.params),
    'optimizer_bytes': _bytes(lowered.abstract.opt_state),
  }
  failure = None
  with cli.hidden_stderr():  # It is noisy, most of all where it fails.
    try:
      compiled = lowered.update.compile()
      seconds = time.perf_counter() - start
      parts = [(1, compiled)]
      parts += [(times, part.compile()) for times, part in lowered.loops]
    except jax.errors.JaxRuntimeError as e:
      failure = e
  if failure is not None:
    text = str(failure)
    if 'RESOURCE_EXHAUSTED' not in text:
      raise failure
    used = re.search(r'Used ([\d.]+)([GM]) of', text) or re.search(
      r'memory required for HLO temporaries \(([\d.]+)([GM])\)', text
    )
    unit = {'G': topology.GIB, 'M': 2**20}
    memory = float(used[1]) * unit[used[2]] if used else None
    return {**result, 'fits': False, 'memory_per_core_bytes': memory}
  memory = compiled.memory_analysis()
  result['fits'] = True
  result['memory_per_core_bytes'] = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
  )
  result['activations_bytes'] = memory.temp_size_in_bytes
  result['batch_bytes'] = max(
    0,
    memory.argument_size_in_bytes
    - result['params_bytes']
    - result['optimizer_bytes'],
  )
  result['compile_seconds'] = seconds
  cost = dict.fromkeys(('optimal_seconds', 'bytes accessed', 'flops'), 0)
  found, unknown = {}, 0
  for times, part in parts:
    for key, value in part.cost_analysis().items():
      if key in cost:
        cost[key] += times * value
    hlo = part.as_text()
    unknown += times * hlo.count(_UNKNOWN)
    for kind, row in collectives(hlo).items():
      total = found.setdefault(kind, dict.fromkeys(row, 0))
      for key, value in row.items():
        total[key] += times * value
  # Operations that the compiler has no idea of count minus one second each.
  # Matrix products in loops that it made itself, or in kernels, are not seen in
  # full: what is missing is added at the device's peak.
  unseen = max(0, lowered.flops / devices - cost['flops'])
  result['step_seconds'] = (
    cost['optimal_seconds'] + unknown + unseen / chip.peak
  )
  result['flops_unseen_per_core'] = unseen
  result['bytes_accessed_per_core'] = cost['bytes accessed']
  result['collectives'] = found
  # At best: all links busy both ways, nothing waits.
  result['network_seconds'] = (
    sum(row['network_bytes'] for row in found.values()) / chip.network
  )
  return result
