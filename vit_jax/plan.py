r"""Plans a training run for TPUs without one: memory, speed, cost.

  pip install 'vit_jax[plan]'
  python -m vit_jax.plan --config=configs/pretrain.py:h14,imagenet21k \
    --topology=v3:4x4 --config.mesh.fsdp=32 --config.mesh.data=1

Compiles the very update that `vit_jax.main` would run, with the TPU's own
compiler, which runs on any x86 Linux machine, and says what it reports: the
memory of a core, FLOPs, its estimate of the time of a step, and what follows for
the whole run. The times are the compiler's estimates: good to compare two
programs, no measurements.

--search tries rematerialisation, accumulation and ways to split the parameters,
and prints the flags of the best. Plans are kept in $VIT_JAX_CACHE (by default
~/.cache/vit_jax), by the program that was compiled.

A topology is a TPU version and the chips along each axis: v2, v3 and v4 have two
cores a chip. The data need not be there: sizes of the paper's data sets are
known, --num_examples and --num_classes give others.
"""

from collections.abc import Iterator
import copy
import hashlib
import json
import math
import os
import pathlib
import re
import sys
import time
from typing import Any
from typing import NamedTuple

from absl import flags
import jax
import jax.numpy as jnp
from ml_collections import config_flags

from vit_jax import cli
from vit_jax import flops
from vit_jax import progress
from vit_jax import sharding

say = progress.say
GIB = 2**30


class Chip(NamedTuple):
  """A device as the compiler sees it: a core of v2 to v4, a chip of v5e and v6e.

  Attributes:
    memory: bytes.
    peak: bfloat16 FLOPs a second.
    per_chip: devices on a chip.
    example: a topology of it.
  """

  memory: int
  peak: float
  per_chip: int
  example: str


# Google Cloud's documentation of each version: a chip's memory and peak.
CHIPS = {
  'v2': Chip(8 * GIB, 45e12 / 2, 2, 'v2:2x2'),
  'v3': Chip(16 * GIB, 123e12 / 2, 2, 'v3:4x4'),
  'v4': Chip(16 * GIB, 275e12 / 2, 2, 'v4:2x2x1'),
  'v5e': Chip(16 * GIB, 197e12, 1, 'v5e:4x4'),
  'v6e': Chip(32 * GIB, 918e12, 1, 'v6e:4x4'),
}

# data set: training examples, classes.
DATASETS = {
  'imagenet2012': (1_268_356, 1_000),  # train[:99%]
  'imagenet21k': (14_094_797, 21_843),  # full[102400:]
  'jft300m': (303_000_000, 18_291),
  'cifar10': (49_000, 10),
  'cifar100': (49_000, 100),
  'oxford_iiit_pet': (3_312, 37),
  'oxford_flowers102': (918, 102),
  'digits': (1_437, 10),
}

# What the paper spent, TPU v3 core-days (arXiv 2010.11929, table 2).
PAPER_CORE_DAYS = {
  ('ViT-H_14', 'jft300m'): 2_500,
  ('ViT-L_16', 'jft300m'): 680,
  ('ViT-L_16', 'imagenet21k'): 230,
}

_COLLECTIVES = (
  'all-reduce',
  'all-gather',
  'reduce-scatter',
  'all-to-all',
  'collective-permute',
)
_SIZES = {'f32': 4, 's32': 4, 'u32': 4, 'bf16': 2, 'f16': 2, 'pred': 1}


def get_topology(name: str):
  """Returns the devices of a topology.

  Args:
    name: 'v3:4x4', say.

  Raises:
    ValueError: if there is no such topology.
    ImportError: if libtpu is missing.
    RuntimeError: if another process uses libtpu.
  """
  version = name.split(':')[0]
  if version not in CHIPS or not re.fullmatch(r'\w+:\d+(x\d+)*', name):
    raise ValueError(
      f"topology='{name}' is unknown: give a version and the chips along each "
      f'axis, for example {", ".join(c.example for c in CHIPS.values())} '
      '(--topology)'
    )
  try:
    import libtpu  # noqa: F401
  except ImportError as e:
    raise ImportError(
      "planning needs the TPU's compiler: pip install 'vit_jax[plan]'"
    ) from e
  from jax.experimental import topologies

  # It looks for a TPU's metadata server, and warns where there is none.
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v3-8')
  os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
  try:
    with cli.hidden_stderr():
      return topologies.get_topology_desc(name, 'tpu').devices
  except Exception as e:
    text = ' '.join(str(e).split())
    if 'already in use' in text or 'lockfile' in text:
      raise RuntimeError(
        'libtpu is in use by another process: wait for it, or set '
        'ALLOW_MULTIPLE_LIBTPU_LOAD=1'
      ) from e
    raise ValueError(
      f"topology='{name}' cannot be made: {text[:200]}; for example "
      f'{", ".join(c.example for c in CHIPS.values())} work (--topology)'
    ) from e


def abstract_batch(config, size: int, num_classes: int, mesh) -> dict:
  """Shapes and shardings of a training batch of a config."""
  from vit_jax import preprocess  # Late: brings TensorFlow.

  height, width = preprocess.crop_size(config.pp)
  split = sharding.batch_sharding(mesh)
  return {
    'image': jax.ShapeDtypeStruct(
      (size, height, width, config.pp.channels),
      jnp.float32,
      sharding=split,
    ),
    'label': jax.ShapeDtypeStruct(
      (size, num_classes), jnp.float32, sharding=split
    ),
  }


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


def lower(config, num_classes: int, devices) -> Lowered:
  """Lowers the update of a config for devices that need not be there.

  Args:
    config: with `total_steps` and `warmup_steps` as numbers.
    num_classes: width of the head.
    devices: of a topology.

  Raises:
    ValueError: if config and devices do not go together, as in training.
  """
  from vit_jax import resolve  # Late: they bring TensorFlow.
  from vit_jax import train

  mesh = sharding.make_mesh(config.mesh, devices)
  resolve.check_batch(config, sharding.batch_shards(mesh))
  names = [str(i) for i in range(num_classes)]

  def gradient(num_layers=None):
    """Lowers the gradient of a micro-batch, maybe of fewer layers in a row."""
    part = copy.deepcopy(config)
    if num_layers:
      part.model.transformer.update(num_layers=num_layers, scan=False)
    task, _, _, abstract = train.make_program(part, names, mesh)
    params = abstract.params
    function = jax.jit(
      lambda params, batch: jax.value_and_grad(task.loss)(
        params, batch, jax.random.key(0)
      ),
      out_shardings=(None, jax.tree.map(lambda x: x.sharding, params)),
    )
    size = config.batch // config.accum_steps
    batch = abstract_batch(config, size, num_classes, mesh)
    with jax.set_mesh(mesh):  # Where nothing can be computed, only lowered.
      return function.lower(params, batch)

  loops = []
  if config.accum_steps > 1:
    loops.append((config.accum_steps - 1, gradient()))
  encoder = config.model.get('transformer') or {}
  if encoder.get('scan'):
    # One more layer costs what two layers cost more than one.
    times = config.accum_steps * (encoder.num_layers - 1)
    loops += [(times, gradient(2)), (-times, gradient(1))]
  program = train.make_program(config, names, mesh)
  batch = abstract_batch(config, config.batch, num_classes, mesh)
  with jax.set_mesh(mesh):
    traced = train.jit_update(program).trace(program.abstract, batch)
    return Lowered(
      traced.lower(), loops, program.abstract, flops.count_flops(traced.jaxpr)
    )


def collectives(hlo: str) -> dict[str, dict]:
  """Counts the collectives of a compiled program, by kind.

  Args:
    hlo: its text.

  Returns:
    kind -> {'count', 'bytes'}: bytes of the results on one device. What stands
    in the body of a loop counts once.
  """
  found = {}
  call = re.compile(rf' ({"|".join(_COLLECTIVES)})(-start)?\(')
  for line in hlo.splitlines():
    match = call.search(line)
    if match is None or ' = ' not in line[: match.start()]:
      continue
    shape = line[: match.start()].partition(' = ')[2]
    size = sum(
      _SIZES.get(dtype, 4) * math.prod(int(n) for n in dims.split(',') if n)
      for dtype, dims in re.findall(r'(\w+)\[([\d,]*)\]', shape)
    )
    row = found.setdefault(match[1], {'count': 0, 'bytes': 0})
    row['count'] += 1
    # What only starts here names its operands too.
    row['bytes'] += size // 2 if match[2] else size
  return found


def _bytes(abstract):
  return sum(row['bytes_per_device'] for row in sharding.report(abstract))


def compile_plan(lowered: Lowered) -> dict:
  """Compiles, and returns what the compiler says.

  Returns:
    `fits`; where it does: `memory_per_core_bytes` and its parts,
    `bytes_accessed_per_core`, `step_seconds`, `collectives`; else
    `memory_per_core_bytes` as far as the compiler says it.
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
      costs = [(1, compiled)]
      costs += [(times, part.compile()) for times, part in lowered.loops]
    except jax.errors.JaxRuntimeError as e:
      failure = e
  if failure is not None:
    text = str(failure)
    if 'RESOURCE_EXHAUSTED' not in text:
      raise failure
    used = re.search(r'Used ([\d.]+)([GM]) of', text)
    unit = {'G': GIB, 'M': 2**20}
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
  for ours, theirs in (
    ('bytes_accessed_per_core', 'bytes accessed'),
    ('step_seconds', 'optimal_seconds'),
  ):
    result[ours] = sum(n * c.cost_analysis()[theirs] for n, c in costs)
  result['collectives'] = {}
  for times, part in costs:
    for kind, row in collectives(part.as_text()).items():
      total = result['collectives'].setdefault(kind, {'count': 0, 'bytes': 0})
      for key, value in row.items():
        total[key] += times * value
  result['compile_seconds'] = seconds
  return result


def _cache_file(lowered, topology):
  key = hashlib.sha256()
  for part in (
    lowered.update.as_text(),
    topology,
    jax.__version__,
    _libtpu_version(),
  ):
    key.update(part.encode())
  folder = os.environ.get('VIT_JAX_CACHE', '~/.cache/vit_jax')
  return (
    pathlib.Path(folder).expanduser() / 'plans' / f'{key.hexdigest()[:32]}.json'
  )


def _libtpu_version():
  import importlib.metadata

  return importlib.metadata.version('libtpu')


def make_plan(
  config, topology: str, num_examples: int, num_classes: int
) -> dict:
  """Plans a run.

  Args:
    config: of a training.
    topology: see the top of this module.
    num_examples: size of the training data.
    num_classes: width of the head.

  Returns:
    What the table shows and --json writes, times and rates as the compiler
    estimates them.

  Raises:
    ValueError, ImportError, RuntimeError: see get_topology and lower.
  """
  devices = get_topology(topology)
  cli.load_tensorflow()
  from vit_jax import resolve

  chip = CHIPS[topology.split(':')[0]]
  config = resolve.complete(config)
  resolve.check(config)
  config = resolve.resolve_steps(config, num_examples)
  lowered = lower(config, num_classes, devices)
  abstract = lowered.abstract
  file = _cache_file(lowered, topology)
  cached = file.exists()
  if cached:
    result = json.loads(file.read_text())
  else:
    result = compile_plan(lowered)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f'.{os.getpid()}.tmp')
    temporary.write_text(json.dumps(result))
    temporary.replace(file)
  cores = len(devices)
  result.update(
    model=config.model.get('model_name'),
    dataset=config.dataset,
    topology=topology,
    cores=cores,
    batch=config.batch,
    mesh={k: v for k, v in sharding.make_mesh(config.mesh, devices).shape.items()},
    memory_of_core_bytes=chip.memory,
    parameters=sum(x.size for x in jax.tree.leaves(abstract.params)),
    sharding=sharding.report(abstract.params),
    cached=cached,
  )  # fmt: skip
  if result['fits']:
    seconds = result['step_seconds']
    result['images_per_second_per_core'] = config.batch / cores / seconds
    result['flops_per_step_per_core'] = lowered.flops / cores
    result['share_of_peak'] = (
      result['flops_per_step_per_core'] / seconds / chip.peak
    )
    result['total_steps'] = config.total_steps
    result['hours'] = seconds * config.total_steps / 3600
    result['core_days'] = seconds * config.total_steps * cores / 86400
    result['chip_hours'] = result['hours'] * cores / chip.per_chip
    result['paper_core_days'] = PAPER_CORE_DAYS.get(
      (result['model'], config.dataset)
    )
  return result


def _gib(count):
  if count is None:
    return 'unknown'
  if count < GIB / 10:
    return f'{count / 2**20:.1f} MiB'
  return f'{count / GIB:.2f} GiB'


def table(plan: dict) -> str:
  """Formats a plan for people."""
  rows = [
    ('model', f'{plan["model"]}, {plan["parameters"]:,} parameters'),
    (
      'devices',
      f'{plan["cores"]} of {plan["topology"]}, mesh {plan["mesh"]}',
    ),
    ('batch', f'{plan["batch"]:,}, {plan["batch"] / plan["cores"]:g} a device'),
    (
      'memory a device',
      f'{_gib(plan["memory_per_core_bytes"])} of '
      f'{_gib(plan["memory_of_core_bytes"])}: '
      + ('fits' if plan['fits'] else 'DOES NOT FIT'),
    ),
    ('  parameters', _gib(plan['params_bytes'])),
    ('  optimiser', _gib(plan['optimizer_bytes'])),
  ]
  if plan['fits']:
    rows += [
      ('  activations and the rest', _gib(plan['activations_bytes'])),
      (
        'FLOPs a step, a device',
        f'{plan["flops_per_step_per_core"] / 1e12:,.2f} T',
      ),
      ('time of a step', f'{1000 * plan["step_seconds"]:,.1f} ms (estimate)'),
      (
        'images a second, a device',
        f'{plan["images_per_second_per_core"]:,.1f} (estimate), '
        f'{plan["share_of_peak"]:.0%} of peak',
      ),
      *(
        (
          f'  {kind}',
          f'{found["count"]}, together {_gib(found["bytes"])}',
        )
        for kind, found in plan['collectives'].items()
      ),
      (
        'the whole run',
        f'{plan["total_steps"]:,} steps, {plan["hours"]:,.1f} hours, '
        f'{plan["core_days"]:,.0f} core-days, {plan["chip_hours"]:,.0f} '
        'chip-hours (estimate)',
      ),
    ]
    if plan['paper_core_days']:
      rows.append(
        ('the paper spent', f'{plan["paper_core_days"]:,} TPU v3 core-days')
      )
  width = max(len(name) for name, _ in rows)
  return '\n'.join(f'{name:<{width}}  {value}' for name, value in rows)


def candidates(config, cores: int) -> Iterator[dict]:
  """Yields the settings that --search tries, as {flag: value}.

  Meshes: all copied, all split, and half of each; no rematerialisation, that of
  all but dense layers, and that of everything; one and more micro-batches.
  """
  for fsdp in sorted({1, min(8, cores), cores}):
    for remat in ('', 'dots', 'full'):
      for accum_steps in (1, 4, 16):
        if config.batch % (cores * accum_steps) == 0:
          yield {
            'mesh.data': cores // fsdp,
            'mesh.fsdp': fsdp,
            'mesh.model': 1,
            'model.transformer.remat': remat,
            'accum_steps': accum_steps,
          }


def search(config, topology, num_examples, num_classes, shown=5) -> list[dict]:
  """Plans all candidates; prints the best and the flags that select it.

  A micro-batch is halved, so to speak, only where the whole does not fit: when a
  setting fits with fewer micro-batches, more of them are not tried.
  """
  cores = len(get_topology(topology))
  plans, fitting = [], set()
  for settings in candidates(config, cores):
    key = (settings['mesh.fsdp'], settings['model.transformer.remat'])
    if key in fitting:
      continue
    trial = copy.deepcopy(config)
    trial.update_from_flattened_dict(settings)
    text = ' '.join(f'--config.{k}={v}' for k, v in settings.items())
    say(f'compiling {text} ...')
    plan = make_plan(trial, topology, num_examples, num_classes)
    plan['flags'] = text
    plans.append(plan)
    if plan['fits']:
      fitting.add(key)
      speed = f'{plan["images_per_second_per_core"]:,.1f} images/s a device, '
    else:
      speed = 'does not fit, '
    say(f'  {speed}{_gib(plan["memory_per_core_bytes"])}')
  best = sorted(
    (p for p in plans if p['fits']),
    key=lambda p: -p['images_per_second_per_core'],
  )
  if not best:
    say('None of them fits: take more devices, or a smaller batch.')
    return plans
  say('\nThe best (estimates):')
  for plan in best[:shown]:
    say(
      f'  {plan["images_per_second_per_core"]:8,.1f} images/s a device, '
      f'{_gib(plan["memory_per_core_bytes"])}  {plan["flags"]}'
    )
  return best


def _define_flags(argv):
  """Returns the flags of this command, apart from those of vit_jax.main."""
  values = flags.FlagValues()
  config_flags.DEFINE_config_file(
    'config',
    None,
    'Config file of a training, with its argument after a colon.',
    flag_values=values,
    sys_argv=argv,
  )
  flags.DEFINE_string(
    'topology', 'v3:2x2', 'TPU version and chips.', flag_values=values
  )
  flags.DEFINE_boolean(
    'search', False, 'Tries several settings.', flag_values=values
  )
  flags.DEFINE_string('json', None, 'File for the figures.', flag_values=values)
  flags.DEFINE_integer(
    'num_examples', None, 'Size of the training data.', flag_values=values
  )
  flags.DEFINE_integer(
    'num_classes', None, 'Width of the head.', flag_values=values
  )
  return values


def _data(config, num_examples, num_classes):
  """Returns the size of the data: (examples, classes)."""
  known = DATASETS.get(config.dataset, (None, None))
  sizes = (num_examples or known[0], num_classes or known[1])
  if None in sizes:
    raise ValueError(
      f"dataset='{config.dataset}' has a size that is not known here: give "
      '--num_examples and --num_classes'
    )
  return sizes


def main() -> None:
  """Plans what the command line says."""
  values = _define_flags(sys.argv)
  if {'-h', '--help', '--helpfull'} & set(sys.argv):
    print(__doc__ + '\n' + values.get_help())
    return
  rest = cli.parse_flags(sys.argv, values)[1:]
  if rest:
    raise ValueError(f'unknown arguments {rest}: flags begin with --')
  if values.config is None:
    raise ValueError('--config=FILE is needed (see --help)')
  cli.quiet()
  cli.avoid_libtpu()  # Its compiler is used, but no device of its.
  sizes = _data(values.config, values.num_examples, values.num_classes)
  get_topology(values.topology)  # Before anything that takes long.
  if values.search:
    result = search(values.config, values.topology, *sizes)
  else:
    say(f'Compiling for {values.topology} ...')
    result = make_plan(values.config, values.topology, *sizes)
    say(table(result))
  if values.json:
    path = pathlib.Path(values.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))


if __name__ == '__main__':
  cli.run(main)
