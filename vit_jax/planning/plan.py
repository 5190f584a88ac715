"""Plans a training run for TPUs without a TPU: memory, speed, cost.

`vit_jax plan` (vit_jax/commands/plan.py) is the command.
"""

from collections.abc import Mapping
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import signal
from typing import Any

from absl import logging
import jax
import ml_collections

from vit_jax import console
from vit_jax.configs import models as model_configs
from vit_jax.data import registry
from vit_jax.distributed import files, sharding
from vit_jax.layers import dtypes
from vit_jax.planning import estimate, search, topology as topology_lib

# Part of the cache key; change it when the cached values change.
_FORMAT = '8'

# Data set -> (training examples, classes).
DATASETS = {
  'imagenet2012': (1_268_356, 1_000),  # train[:99%]
  'imagenet21k': (14_094_797, 21_843),  # full[102400:]
  'jft300m': (303_000_000, 18_291),
  'cifar10': (49_000, 10),
  'cifar100': (49_000, 100),
  'oxford_iiit_pet': (3_312, 37),
  'oxford_flowers102': (918, 102),
  'digits': (1_437, 10),
  'coco/2017': (118_287, 80),
}

# Table 2 of arXiv 2010.11929: (model, data set, epochs) -> TPU v3 core-days of the
# pre-training. The epochs are from table 3: of its 30 and 90 epochs on
# ImageNet-21k, 30 would leave 13 % of the peak. BiT-L is R152x4, trained for 40 epochs
# (arXiv 1912.11370).
PAPER_CORE_DAYS = {
  ('ViT-H_14', 'jft300m', 14): 2_500,
  ('ViT-L_16', 'jft300m', 14): 680,
  ('ViT-L_16', 'imagenet21k', 90): 230,
  ('BiT-R152x4', 'jft300m', 40): 9_900,
}
# Share of the FLOPs from which a plan says that the compiler has not counted them.
_UNSEEN = 0.01
# Seconds of the shortest step in the table of measurements on GPUs (docs/plan.md).
_SHORTEST_COMPARED = 0.04


def make_plan(
  config: ml_collections.ConfigDict,
  topology: str,
  num_examples: int,
  num_classes: int | None,
) -> dict:
  """Plans a run on a topology such as 'v3:4x4'; for its errors see get_topology.

  `num_examples` is the number of training examples, and `num_classes` the number of
  classes, for tasks that classify. Returns a dict with the values of the table and of
  --json. Times and rates are the compiler's estimates.
  """
  devices = topology_lib.get_topology(topology)
  from vit_jax import checkpoint, train
  from vit_jax.learning import optim, schedules
  from vit_jax.run import config as run_config, evaluators as run_evaluators

  chip, _, _ = topology_lib.parse(topology)
  if model_configs.is_of_weights(config.model):  # The weights exist.
    config = checkpoint.with_preparation(checkpoint.with_model(config))
  config = run_config.complete(config)
  run_evaluators.check(config)
  schedules.check(config)
  optim.check(config)
  config = run_config.resolve_steps(config, num_examples)
  mesh = sharding.make_mesh(config.mesh, devices)
  run_config.check_batch(config, sharding.batch_shards(mesh))
  run_config.check_sequence(config, sharding.sequence_shards(mesh))
  task = run_config.get_task(config.task)
  metadata = task.planned_metadata(config, num_classes)

  def make_program(
    config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh
  ) -> train.Program:
    return train.make_program(config, metadata, mesh)

  lowered = estimate.lower(config, make_program, devices)
  params = lowered.abstract.params
  result = _compile(lowered, topology, chip, len(devices))
  cores = len(devices)
  result.update(
    model=config.model.get('model_name'),
    dataset=config.dataset,
    topology=topology,
    cores=cores,
    batch=config.batch,
    dtype=dtypes.resolve(config.model.get('dtype', 'float32'), 'tpu'),
    mesh=dict(mesh.shape),
    batch_per_core=config.batch // sharding.batch_shards(mesh),
    memory_of_core_bytes=chip.memory,
    parameters=sum(x.size for x in jax.tree.leaves(params)),
    sharding=sharding.report(params),
    not_split=sharding.not_split(params, mesh),
  )
  if result['fits']:
    result |= _rates(result, config, lowered.flops / cores, chip, num_examples)
  return result


def _compile(
  lowered: estimate.Lowered, topology: str, chip: topology_lib.Chip, cores: int
) -> dict[str, Any]:
  """Compiles an update, or returns the result of an earlier compilation."""
  compiler = 'jaxlib' if chip.is_gpu else 'libtpu'
  versions = jax.__version__ + importlib.metadata.version(compiler)
  text = f'{_FORMAT}{topology}{versions}{lowered.update.as_text()}'
  key = hashlib.sha256(text.encode()).hexdigest()[:32]
  file = console.cache_folder() / 'plans' / f'{key}.json'
  cached = read_cached(file)
  if cached is not None:
    return {**cached, 'cached': True}
  with console.status(f'Compiling for {topology} (takes minutes)'):
    result = estimate.compile_plan(lowered, chip, cores)
  write_cached(file, result)
  return {**result, 'cached': False}


def _rates(
  plan: Mapping[str, Any],
  config: ml_collections.ConfigDict,
  flops: float,
  chip: topology_lib.Chip,
  num_examples: int,
) -> dict[str, Any]:
  """Returns speed, duration and cost of a run; `flops` are of a step and core."""
  seconds = plan['step_seconds']
  steps = config.total_steps
  cores = plan['cores']
  images = config.batch / cores
  hours = seconds * steps / 3600
  name = str(config.dataset)
  examples, _ = DATASETS.get(name, (num_examples, None))
  epochs = round(steps * config.batch / examples)
  return {
    'images_per_second_per_core': images / seconds,
    'images_per_second_per_core_with_network': images
    / (seconds + plan['network_seconds']),
    'flops_per_step_per_core': flops,
    'share_of_peak': flops / seconds / chip.peak,
    'total_steps': steps,
    'hours': hours,
    'core_days': hours * cores / 24,
    'chip_hours': hours * cores / chip.per_chip,
    'paper_core_days': PAPER_CORE_DAYS.get((plan['model'], name, epochs)),
  }


def write_cached(file: pathlib.Path, result: dict) -> None:
  """Writes the result of a compilation with its hash, see `read_cached`."""
  file.parent.mkdir(parents=True, exist_ok=True)
  text = json.dumps(result)
  digest = files.digest([text.encode()])
  files.write(file, json.dumps({'digest': digest, 'text': text}))


def read_cached(file: pathlib.Path) -> dict | None:
  """Returns the result of an earlier compilation; None if missing or damaged."""
  try:
    content = files.read_json(file)
    if content['digest'] == files.digest([content['text'].encode()]):
      return json.loads(content['text'])
  except FileNotFoundError:
    return None
  except (OSError, ValueError, KeyError, TypeError, AttributeError):
    pass
  logging.warning("'%s' is damaged: compiling again", file)
  return None


def table(plan: dict) -> str:
  """Formats a plan as a table."""
  chip, _, _ = topology_lib.parse(plan['topology'])
  needed, limit = plan['memory_per_core_bytes'], plan['memory_of_core_bytes']
  fits = 'fits' if plan['fits'] else 'DOES NOT FIT'
  sequence = plan['mesh'].get(sharding.SEQUENCE_AXIS, 1)
  devices = 'a device' if sequence == 1 else f'on every {sequence} devices'
  rows = {
    'model': f'{plan["model"]}, {plan["parameters"]:,} parameters',
    'devices': f'{plan["cores"]} of {plan["topology"]}, mesh {plan["mesh"]}',
    'batch': f'{plan["batch"]:,}, {plan["batch_per_core"]:,} {devices}',
    'memory a device': f'{console.size(needed)} of {console.size(limit)}: {fits}',
    '  parameters': console.size(plan['params_bytes']),
  }
  for row in plan['sharding']:
    rows[f'    {row["spec"]}'] = sharding.describe(row)
  if plan['not_split']:
    rows['    NOTE'] = plan['not_split']
  rows['  optimiser'] = console.size(plan['optimizer_bytes'])
  if plan['fits']:
    images_per_second = plan['images_per_second_per_core']
    with_network = plan['images_per_second_per_core_with_network']
    rows |= {
      '  images and labels': console.size(plan['batch_bytes']),
      '  activations and the rest': console.size(plan['activations_bytes']),
      'FLOPs a step, a device': (f'{plan["flops_per_step_per_core"] / 1e12:,.2f} T'),
    }
    unseen = plan['flops_unseen_per_core']
    if not chip.is_gpu and unseen > _UNSEEN * plan['flops_per_step_per_core']:
      rows['  kernels and loops'] = (
        f'{unseen / 1e12:,.2f} T, at the peak in the estimate: they are slower'
      )
    rows |= {
      'time of a step': f'{1000 * plan["step_seconds"]:,.1f} ms (estimate)',
      'images a second, a device': (
        f'{images_per_second:,.1f} (estimate), {plan["share_of_peak"]:.0%} of peak'
      ),
    }
    traffic = plan['hbm_bytes_per_core']
    milliseconds = 1000 * plan['hbm_seconds']
    rows['  main memory'] = (
      f'{traffic / 1e9:,.1f} GB read and written, at least {milliseconds:,.1f} ms'
    )
    for kind, row in plan['collectives'].items():
      text = f'{row["count"]}, together {console.size(row["bytes"])}'
      if kind == estimate.BETWEEN:
        text += ', not in the times'
      rows[f'  {kind}'] = text
    if note := _gathers_by_sums(plan):
      rows['    NOTE'] = note
    rows |= {
      'network, at best': (
        f'{1000 * plan["network_seconds"]:,.1f} ms, not in the estimate: '
        f'{with_network:,.1f} images a second if none of it is hidden'
      ),
      'the whole run': (
        f'{plan["total_steps"]:,} steps, {plan["hours"]:,.1f} hours, '
        f'{plan["core_days"]:,.0f} core-days, {plan["chip_hours"]:,.0f} '
        'chip-hours (estimate, without the network)'
      ),
    }
    rows['  to be expected'] = _expected_hours(plan, chip)
    if spent := plan['paper_core_days']:
      rows['the paper reports'] = f'{spent:,} TPU v3 core-days'
  else:
    helps = '--search tries meshes, micro-batches and recomputation'
    if plan['dtype'] == 'float32':
      helps += '; --config.model.dtype=bfloat16 halves the activations'
    rows['what helps'] = helps
  width = max(map(len, rows))
  return '\n'.join(f'{name:<{width}}  {text}' for name, text in rows.items())


def _expected_hours(plan: Mapping[str, Any], chip: topology_lib.Chip) -> str:
  """Returns how long a run takes by the slowdown of others."""
  if chip.is_gpu and plan['step_seconds'] < _SHORTEST_COMPARED:
    return (
      'longer: estimates of steps as short as this were not compared with measurements, '
      'and leave out the time between kernels'
    )
  lower, upper = chip.slowdown
  runs = 'measured updates' if chip.is_gpu else 'published runs'
  return (
    f'{lower * plan["hours"]:,.1f} to {upper * plan["hours"]:,.1f} hours: {runs} took '
    f'{lower:g} to {upper:g} times as long as such estimates'
  )


def _gathers_by_sums(plan: Mapping[str, Any]) -> str:
  """Says that the compiler gathers parameters by all-reduce; '' if it does not."""
  fsdp = plan['mesh'].get(sharding.FSDP_AXIS, 1)
  split = any(sharding.FSDP_AXIS in row['spec'] for row in plan['sharding'])
  if not split or 'all-gather' in plan['collectives']:
    return ''
  return (
    'no all-gather: parameters are gathered by all-reduce, which sends twice the '
    f'bytes; an axis fsdp={fsdp} that spans all axes of the torus does this, try '
    f'--config.mesh.data=-1 --config.mesh.fsdp={max(1, fsdp // 4)}'
  )


def data_size(
  config: ml_collections.ConfigDict,
  num_examples: int | None = None,
  num_classes: int | None = None,
) -> tuple[int, int | None]:
  """Returns the numbers of examples and classes of a config's training data.

  Folders are counted. The arguments override the sizes. ValueError if the number of
  examples is unknown; the number of classes may be None.
  """
  # The size of a mixture is unknown without flags.
  dataset = config.get('dataset')
  name = dataset if isinstance(dataset, str) else ''
  size: tuple[int | None, int | None] = DATASETS.get(name, (None, None))
  if name.startswith(registry.VTAB):
    from vit_jax.data.tfds import vtab

    size = vtab.planned_size(config, name)
  if size[0] is None and os.path.isdir(name):
    from vit_jax.data import sources
    from vit_jax.run import config as run_config

    config = run_config.complete(config)
    config.broken_images = 'trust'  # Images are counted, not read.
    task = run_config.get_task(config.task)
    source = sources.open_split(config, config.pp.train, task.record_features(config))
    size = (source.num_examples, len(task.class_names_of(source)) or None)
  num_examples = num_examples or size[0]
  is_path = os.sep in name and not name.startswith(registry.HUB)
  if num_examples is None and is_path:
    raise ValueError(f"dataset='{dataset}' does not exist (config.dataset)")
  if num_examples is None:
    raise ValueError(
      f"dataset='{dataset}' is neither a data set of known size nor a folder: pass "
      '--num_examples and --num_classes'
    )
  return num_examples, num_classes or size[1]


def run(
  config: ml_collections.ConfigDict,
  topology: str,
  *,
  num_examples: int | None = None,
  num_classes: int | None = None,
  search_mesh: bool = False,
  json_path: str | None = None,
) -> None:
  """Prints the plan of a run, and writes it as JSON.

  Args:
    config: the config of the run.
    topology: see topology.get_topology.
    num_examples: see data_size.
    num_classes: see data_size.
    search_mesh: whether to try meshes, micro-batches and rematerialisation.
    json_path: file to write; None for none.
  """
  trainer = config.get('trainer', 'train')
  if trainer != 'train':
    raise ValueError(
      f"trainer='{trainer}': a plan needs the config of a single run (config.trainer)"
    )
  num_examples, num_classes = data_size(config, num_examples, num_classes)
  # Before anything that takes long.
  devices = topology_lib.get_topology(topology)
  # Python handles no signals while the compiler runs, and libtpu prints its stack.
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
  if search_mesh:
    console.log(
      'Searching for the best mesh, accum_steps and remat, whatever the config says. '
      'Plans are cached: run the same command again to resume a stopped search.'
    )
    plan_trial = functools.partial(
      make_plan,
      topology=topology,
      num_examples=num_examples,
      num_classes=num_classes,
    )
    plans: Any = search.search(config, len(devices), plan_trial)
  else:
    plans = make_plan(config, topology, num_examples, num_classes)
    console.log(table(plans))
  if json_path:
    pathlib.Path(json_path).write_text(json.dumps(plans, indent=1))
    console.log(f'Wrote {json_path}')
