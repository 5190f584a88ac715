"""Compiles a training step for TPUs or GPUs and estimates its time and memory.

No such device is needed, only its compiler. The compiler for GPUs estimates no times:
here, a program takes as long as its matrix products at the peak of the device, and then
its reads and writes at the bandwidth of the memory.

The compiler for TPUs estimates for each operation the times of arithmetic and of memory
traffic, and takes the longer one; the time of a program is the sum over its operations.
It leaves out the network, which is estimated separately here, and counts the body of a
loop once. Loops over micro-batches and layers are therefore added here in full, but
only the matrix products of loops that the compiler creates.
"""

from collections.abc import Callable, Sequence
import copy
import math
import operator
import re
import time
from typing import Any, NamedTuple

import jax
import ml_collections

from vit_jax.configs import models as model_configs
from vit_jax.distributed import sharding
from vit_jax.layers import layer_stack
from vit_jax.learning import state as state_lib
from vit_jax.planning import flops as flops_lib, gpus, hbm, topology

# A collective in the text of a program, and a fusion that holds a reduce-scatter.
_CALL = re.compile(
  ' = (?P<shape>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|'
  r'collective-permute)(?P<start>-start)?\('
)
_FUSED = re.compile(
  r' = (?P<shape>.*?) fusion\(.*calls=(?P<fusion>%all-reduce-scatter[\w.]*)'
)
# Rearranges memory on v5e and newer, or sends to another slice; the compiler does not
# estimate the time.
_UNKNOWN = re.compile(r'custom_call_target="ConcatBitcast"| send\(')
# The send of an operand to another slice: ' = (bf16[48,8]{...}, u32[], token[]) send('.
_SEND = re.compile(r' = \((?P<shape>\w+\[[\d,]*\]).*? send\(')
BETWEEN = 'between slices'  # Kind of `collectives`: transfers to other slices.


class Lowered(NamedTuple):
  """A program ready to be compiled."""

  update: jax.stages.Lowered  # The whole update.
  # (times, program): costs to add to the costs of `update`.
  loops: list[tuple[int, jax.stages.Lowered]]
  abstract: Any  # TrainState of shapes and shardings.
  flops: int  # FLOPs of the matrix products of an update, over all devices.


def looped_layers(model: ml_collections.ConfigDict) -> int:
  """Returns how many layers TPUs loop over if they are trained; 0 if none.

  `model` is a complete config. Kinds without the option `scan` have no loop, nor the
  layers of EoMT that read queries.
  """
  layers = model_configs.layers_of(model)
  if 'scan' not in layers:
    return 0
  num_layers = layers.num_layers - model.get('num_query_layers', 0)
  looped = layer_stack.is_looped(layers.scan, num_layers, True, 'tpu')
  return num_layers if looped else 0


def lower(
  config: ml_collections.ConfigDict, make_program: Callable, devices: Sequence[Any]
) -> Lowered:
  """Lowers the training update for the devices of a topology.

  `config` has numbers of steps. `make_program` is a function (config, mesh) ->
  vit_jax.train.Program.
  """
  mesh = sharding.make_mesh(config.mesh, devices)

  def gradient(num_layers: int | None = None) -> jax.stages.Lowered:
    """Lowers the gradient of a micro-batch; `num_layers` replaces the looped ones."""
    part = copy.deepcopy(config)
    if num_layers:
      layers = model_configs.layers_of(part.model)
      num_others = part.model.get('num_query_layers', 0)
      layers.update(num_layers=num_layers + num_others, scan=False)
    program = make_program(part, mesh)
    task, abstract = program.task, program.abstract
    params = abstract.params

    def total(params: Any, extra: Any, batch: Any) -> tuple[jax.Array, Any]:
      loss = state_lib.with_step(program.task.loss)
      (total, _), metrics = loss(params, extra, batch, jax.random.key(0), step=0)
      return total, metrics

    def augment(batch: Any) -> Any:
      return task.augment(batch, jax.random.key(0))

    shardings = jax.tree.map(operator.attrgetter('sharding'), params)
    function = jax.jit(
      jax.value_and_grad(total, has_aux=True), out_shardings=(None, shardings)
    )
    batch = task.batch_spec(config.batch // config.accum_steps)
    with jax.set_mesh(mesh):
      batch = jax.eval_shape(augment, batch)
      return function.lower(
        params, abstract.extra, sharding.abstract_batch(batch, mesh)
      )

  program = make_program(config, mesh)
  batch = sharding.abstract_batch(program.task.batch_spec(config.batch), mesh)
  with jax.set_mesh(mesh):
    traced = program.jit_update().trace(program.abstract, batch)
    update = traced.lower()
  loops = []
  if config.accum_steps > 1:
    loops.append((config.accum_steps - 1, gradient()))
  # Three layers minus two are the cost of one. The last layer is outside the loop,
  # and the compiler counts one layer inside it. A locked tower has no loop.
  layers = looped_layers(config.model)
  times = config.accum_steps * (layers - 2)
  if times > 0 and layers - 1 in flops_lib.loop_lengths(traced.jaxpr):
    loops += [(times, gradient(3)), (-times, gradient(2))]
  return Lowered(update, loops, program.abstract, flops_lib.count_flops(traced.jaxpr))


def collectives(hlo: str) -> dict[str, dict]:
  """Counts the collectives in the text of a compiled program, by kind.

  Returns kind -> {'count', 'bytes', 'network_bytes'}: how often the collective
  occurs, bytes of its results on one device, and the least number of bytes that
  it sends over the links of a chip. The body of a loop counts once.
  """
  rows: dict[str, dict[str, float]] = {}
  groups: dict[str, int] = {}
  fusion = None
  for line in hlo.splitlines():
    if line.startswith('%all-reduce-scatter'):  # A fusion that scatters (v4 on).
      fusion = line.split(' ')[0]
    elif line.startswith('}'):
      fusion = None
    elif fusion:
      groups[fusion] = groups.get(fusion) or _group_size(line)
      continue
    if match := _SEND.search(line):
      kind, group = BETWEEN, 0
    elif match := _FUSED.search(line):
      kind = 'reduce-scatter'
      group = groups.get(match['fusion'], 0)
    elif match := _CALL.search(line):
      kind = match['kind']
      group = _group_size(line)
    else:
      continue
    size = sum(array.size for array in hbm.arrays(match['shape']))
    if match.groupdict().get('start'):
      size //= 2  # The shape of a '-start' holds the operands too.
    row = rows.setdefault(kind, {'count': 0, 'bytes': 0, 'network_bytes': 0})
    row['count'] += 1
    row['bytes'] += size
    sent: float = size
    if kind == BETWEEN:  # Not over the links of a chip.
      sent = 0
    elif kind != 'collective-permute':  # It sends its result once.
      # Bytes over a chip's links per byte of a device's result.
      group = group or 1
      passes = {'all-reduce': 2, 'reduce-scatter': group}.get(kind, 1)
      sent = size * (passes * (group - 1) / group)
    row['network_bytes'] += sent
  return rows


def _group_size(line: str) -> int:
  """Returns the number of devices in a collective's group, 0 if unknown.

  The group is written as {{0,1},{2,3}}, as [groups,size]<=[devices], or by the
  axes of a mesh: mesh['a'=4,'b'=8] {'b'}.
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


def _memory_needed(failure: Exception) -> float | None:
  """Returns how many bytes an oversized program needs; None if unknown.

  Raises `failure` itself if it has another cause.
  """
  text = str(failure)
  if 'RESOURCE_EXHAUSTED' not in text:
    raise failure
  used = re.search(r'Used ([\d.]+)([GM]) of', text) or re.search(
    r'memory required for HLO temporaries \(([\d.]+)([GM])\)', text
  )
  unit = {'G': topology.GIB, 'M': 2**20}
  return float(used[1]) * unit[used[2]] if used else None


class _Costs(NamedTuple):
  """Costs of one execution of a compiled program on one device."""

  flops: float
  seconds: float  # The compiler's estimate.
  num_unknown: int  # Operations that it counts as minus one second each.
  hbm_bytes: int
  collectives: dict[str, dict[str, float]]


def _compile(program: jax.stages.Lowered, chip: topology.Chip) -> jax.stages.Compiled:
  return program.compile(gpus.COMPILER_OPTIONS if chip.is_gpu else None)


def _costs(compiled: jax.stages.Compiled, chip: topology.Chip) -> _Costs:
  hlo = compiled.as_text()
  hbm_bytes = hbm.num_bytes(hlo)
  if chip.is_gpu:  # The compiler estimates nothing; all FLOPs count as missing.
    costs = {'flops': 0.0, 'optimal_seconds': hbm_bytes / chip.bandwidth}
  else:
    costs = compiled.cost_analysis()
  return _Costs(
    costs['flops'],
    costs['optimal_seconds'],
    len(_UNKNOWN.findall(hlo)),
    hbm_bytes,
    collectives(hlo),
  )


def compile_plan(lowered: Lowered, chip: topology.Chip, devices: int) -> dict:
  """Compiles a program; returns the compiler's memory and time estimates.

  Returns a dict with `fits`, whether the program fits into the device's memory. If
  so: `memory_per_core_bytes` and its parts, `step_seconds`, `hbm_bytes_per_core` and
  `hbm_seconds`, `network_seconds` and `collectives`. If not:
  `memory_per_core_bytes`, None where the compiler does not report it.
  """
  start_time = time.perf_counter()
  result: dict[str, Any] = {
    'params_bytes': _bytes_per_device(lowered.abstract.params),
    'optimizer_bytes': _bytes_per_device(lowered.abstract.opt_state),
  }
  try:
    # The compiler logs a lot, especially on failure.
    with topology.quiet_compiler():
      compiled = _compile(lowered.update, chip)
      compile_seconds = time.perf_counter() - start_time
      memory = compiled.memory_analysis()
      programs = [(1, _costs(compiled, chip))]
      del compiled  # Before the next one is compiled.
      for times, loop in lowered.loops:
        programs.append((times, _costs(_compile(loop, chip), chip)))
  except jax.errors.JaxRuntimeError as e:
    return {**result, 'fits': False, 'memory_per_core_bytes': _memory_needed(e)}
  arguments = memory.argument_size_in_bytes
  batch = arguments - result['params_bytes'] - result['optimizer_bytes']
  needed = arguments + memory.output_size_in_bytes - memory.alias_size_in_bytes
  needed += memory.temp_size_in_bytes
  if needed > chip.memory:  # The compiler for GPUs does not refuse it.
    return {**result, 'fits': False, 'memory_per_core_bytes': needed}
  result.update(
    fits=True,
    memory_per_core_bytes=needed,
    activations_bytes=memory.temp_size_in_bytes,
    batch_bytes=max(0, batch),
    compile_seconds=compile_seconds,
  )
  flops = sum(times * costs.flops for times, costs in programs)
  hbm_bytes = sum(times * costs.hbm_bytes for times, costs in programs)
  # The compiler counts an operation that it cannot estimate as minus one second.
  seconds = sum(times * (x.seconds + x.num_unknown) for times, x in programs)
  total_collectives: dict[str, dict[str, float]] = {}
  for times, costs in programs:
    for kind, row in costs.collectives.items():
      total_row = total_collectives.setdefault(kind, dict.fromkeys(row, 0))
      for key, value in row.items():
        total_row[key] += times * value
  network_bytes = sum(row['network_bytes'] for row in total_collectives.values())
  # The compiler counts only a part of the matrix products in kernels and in its own
  # loops: the missing FLOPs are added at the peak of the device.
  missing = max(0, lowered.flops / devices - flops)
  result.update(
    step_seconds=seconds + missing / chip.peak,
    flops_unseen_per_core=missing,
    hbm_bytes_per_core=hbm_bytes,
    hbm_seconds=hbm_bytes / chip.bandwidth,
    collectives=total_collectives,
    # A lower bound: all links are busy in both directions and nothing waits.
    network_seconds=network_bytes / chip.network,
  )
  return result


def _bytes_per_device(tree: Any) -> int:
  """Returns the size of the arrays of a tree on one device."""
  return sum(row['bytes_per_device'] for row in sharding.report(tree))
