"""Tests of plans: the TPU compiler's figures, without a TPU."""

import json
import re
import sys
import types

import jax
from jax.experimental import topologies
import pytest

from tests import processes
from tests.planning import flops_test
from vit_jax import models, train
from vit_jax.commands import plan as plan_command
from vit_jax.configs import detr, models as model_configs, pretrain
from vit_jax.layers import dtypes, layer_stack
from vit_jax.planning import estimate, plan, topology
from vit_jax.run import config as run_config, overrides


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
  """An empty cache, so that each test session makes its own plans."""
  return tmp_path_factory.mktemp('cache')


def arguments(cache, model, *flags):
  """Returns the command line of a plan and its output file."""
  file = cache / 'plan.json'
  return [
    f'--config=configs/pretrain.py:{model},imagenet2012',
    '--config.model.dtype=bfloat16', f'--json={file}',
    '--config.model.transformer.dropout_rate=0.0', *flags,
  ], file  # fmt: skip


# One layer and one patch: the compiler takes a minute for a whole model.
TI16 = (
  'ti16', '--config.batch=4096', '--config.mesh.data=1', '--config.mesh.fsdp=8',
  '--topology=v3:2x2', '--config.model.transformer.num_layers=1',
  '--config.pp.crop=16',
)  # fmt: skip
PLANS = {
  'ti16': TI16,
  'ti16 again': TI16,
  'does not fit': (
    'h14', '--topology=v2:2x2', '--config.batch=16384',
    '--config.model.transformer.num_layers=2',
  ),
}  # fmt: skip

# Flags that cannot be planned, and the messages.
REJECTED = (
  ('--config.mesh.data=3', 'does not fit 8 device'),
  ('--config.batch=12', 'batch=12 is not a multiple of 8'),
  ('--topology=v3:7x9', "topology='v3:7x9' is not available"),
  ("--config.sharding_rules=(('nothing', ('data',)),)", r"['nothing'] match nothing"),
)

# Runs the command for each list of arguments. Prints its output and JSON or its errors,
# all example topologies, the meshes and collectives of slices, and the output of a
# second process meanwhile.
_SCRIPT = """
import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import jax
from vit_jax.commands import plan
from vit_jax.distributed import sharding
from vit_jax.planning import estimate, topology
plans, errors = [], []
for args, file in json.loads(sys.argv[1]):
  with contextlib.redirect_stdout(io.StringIO()) as out:
    plan.main(args)
  plans.append([out.getvalue(), json.loads(pathlib.Path(file).read_text())])
for flag in json.loads(sys.argv[2]):
  try:
    plan.main(['--config=configs/pretrain.py:ti16,imagenet2012', flag])
  except ValueError as e:
    errors.append(str(e))
coordinates = {
  name: [list(d.coords) for d in topology.get_topology(chip.example)]
  for name, chip in topology.CHIPS.items() if not chip.is_gpu
}
devices = topology.get_topology('2xv5e:2x2')
mesh = sharding.make_mesh({'data': -1, 'fsdp': 4}, devices)
whole = sharding.make_mesh({'data': 1, 'fsdp': -1}, devices)
parts = sharding.make_mesh({'data': -1, 'fsdp': 8}, topology.get_topology('v5e:4x4'))
slices = [
  [[d.slice_index for d in row] for row in mesh.devices],
  [d.slice_index for d in whole.devices.flat],
]
rows = jax.ShapeDtypeStruct((8, 96), 'float32', sharding=sharding.batch_sharding(mesh))
with topology.quiet_compiler():
  total = jax.jit(lambda x: x.sum(0), out_shardings=sharding.replicated(mesh))
  hlo = total.lower(rows).compile().as_text()
slices.append(estimate.collectives(hlo))
slices.append([[len({d.coords[i] for d in part}) for i in (0, 1)] for part in parts.devices])
# This process holds libtpu now.
second = subprocess.run(
  [sys.executable, '-m', 'vit_jax', 'plan', '--config=configs/pretrain.py:ti16,imagenet2012'],
  capture_output=True, text=True,
  env={k: v for k, v in os.environ.items() if k != 'ALLOW_MULTIPLE_LIBTPU_LOAD'},
)
print(json.dumps([plans, errors, coordinates, slices, [second.returncode, second.stderr]]))
"""


@pytest.fixture(scope='module')
def results(cache):
  """The results of the script.

  It runs in a separate process: libtpu stays in the process that loads it, and JAX's
  profiler, which other tests use, crashes there.
  """
  commands = [arguments(cache, *flags) for flags in PLANS.values()]
  commands = [(args, str(file)) for args, file in commands]
  flags = [flag for flag, _ in REJECTED]
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('VIT_JAX_CACHE', str(cache))
    output = processes.run_code(_SCRIPT, *map(json.dumps, (commands, flags)))
  assert 'space hbm' not in output  # The compiler's own output is hidden.
  return json.loads(output.splitlines()[-1])


@pytest.fixture(scope='module')
def plans(results):
  """By name: the command's output and its JSON."""
  return dict(zip(PLANS, results[0], strict=True))


def config_of(arg, **fields):
  config = pretrain.get_config(arg)
  config.update_from_flattened_dict(fields)
  return config


def test_a_plan_of_ti16(plans):
  out, got = plans['ti16']
  got = dict(got)
  assert got['cores'] == 8
  assert got['fits']
  assert 'fits' in out
  assert '(estimate)' in out
  # Forward and backward, by hand, without the gradient of the images.
  model = model_configs.get_config('ti16')
  model.transformer.num_layers = 1
  count = flops_test.multiply_adds(model, (16, 16), 1000, as_run=True)
  embedding = (16 * 16 * 3) * 192
  want = (6 * count - 2 * embedding) * 512
  assert got['flops_per_step_per_core'] == pytest.approx(want, rel=1e-6)
  # Parameters and both moments of Adam, split over 8 cores except for small ones.
  # 5,717,416 less eleven of its twelve layers of width 192, with the position
  # embeddings of one patch instead of 14x14.
  parameters = 5_717_416 - 11 * (12 * 192**2 + 13 * 192)
  parameters -= (14 * 14 - 1) * 192
  assert got['parameters'] == parameters
  assert 4 * parameters / 8 < got['params_bytes'] < 4 * parameters / 8 * 1.5
  assert got['optimizer_bytes'] == pytest.approx(2 * got['params_bytes'], rel=0.01)
  # Images and labels, float32, and padding.
  images = 512 * (16 * 16 * 3 + 1000) * 4
  assert images < got['batch_bytes'] < 1.5 * images
  parts = ('params', 'optimizer', 'batch', 'activations')
  total = sum(got[f'{part}_bytes'] for part in parts)
  assert got['memory_per_core_bytes'] == pytest.approx(total, rel=0.01)
  assert got['memory_per_core_bytes'] < 16 * 2**30
  assert {'all-gather'} <= set(got['collectives'])
  rate = got['images_per_second_per_core']
  assert rate == pytest.approx(512 / got['step_seconds'])
  assert 0.1 < got['share_of_peak'] < 1
  steps = round(300 * 1_268_356 / 4096)
  assert got['total_steps'] == steps
  days = got['step_seconds'] * steps * 8 / 86400
  assert got['core_days'] == pytest.approx(days)
  assert got['chip_hours'] == pytest.approx(days * 24 / 2)
  assert not got['cached']
  # Again: cached, otherwise the same.
  again = dict(plans['ti16 again'][1])
  assert again.pop('cached')
  got.pop('cached')
  assert again == got
  # As if the axis spanned a 3D torus.
  sums = {k: v for k, v in got['collectives'].items() if k != 'all-gather'}
  assert 'all-reduce, which' not in out
  assert re.search(
    'NOTE +no all-gather.*all-reduce, which.*--config.mesh.fsdp=2',
    plan.table({**got, 'collectives': sums}),
  )
  # As if the model had kernels.
  assert 'kernels and loops' not in out
  assert re.search(
    'kernels and loops +2.00 T.*slower',
    plan.table({**got, 'flops_unseen_per_core': 2e12}),
  )
  assert '17.0 to 25.0 hours: published' in plan.table({**got, 'hours': 10.0})
  on_gpu = {**got, 'hours': 10.0, 'topology': 'h100:8', 'step_seconds': 0.05}
  assert '12.0 to 13.5 hours: measured updates' in plan.table(on_gpu)


def test_a_damaged_plan_in_the_cache_is_compiled_again(tmp_path, caplog):
  file, result = tmp_path / 'plans' / 'a.json', {'step_seconds': 0.125, 'fits': True}
  assert plan.read_cached(file) is None
  plan.write_cached(file, result)
  assert plan.read_cached(file) == result
  assert not caplog.messages
  content = file.read_text()
  damaged = content[:-9], content.replace('0.125', '0.126'), '', '[]', '{"digest": 1}'
  for text in damaged:
    file.write_text(text)
    assert plan.read_cached(file) is None
  assert ['is damaged: compiling again' in x for x in caplog.messages] == 5 * [True]


def test_a_model_that_does_not_fit(plans):
  out, got = plans['does not fit']
  assert not got['fits']
  assert 'DOES NOT FIT' in out
  assert re.search('what helps +--search tries', out)
  assert got['memory_per_core_bytes'] is None or (
    got['memory_per_core_bytes'] > 8 * 2**30
  )


def test_looped_layers_of_all_models():
  """Models with more than 12 layers; the depths are published."""
  configs = model_configs.MODEL_CONFIGS
  models_ = {k: model_configs.with_options(x) for k, x in configs.items()}
  found = {k: estimate.looped_layers(model) for k, model in models_.items()}
  depths = {
    'ViT-L': 24, 'R50+ViT-L': 24, 'ViT-H': 32, 'ViT-G': 48, 'ViT-22B': 48, 'LiT-L16L': 24, 'LiT-L16S': 24,
    'LiT-L16Ti': 24, 'iGPT-S': 24, 'iGPT-M': 36, 'iGPT-L': 48, 'iGPT-XL': 60,
    'DINOv2-L': 24, 'DINOv2-g': 40, 'DINOv3-L': 24, 'EoMT-L': 20, 'EoMT-g': 35,
    'EoMT-DINOv3-L': 20,
  }  # fmt: skip
  assert found == {k: depths.get(k.split('_')[0], 0) for k in configs}
  assert {models.kind_of(x) for x in configs.values()} == set(SMALL)


# A config of each kind of model, and fields that make it small.
_SMALL_DETR = {
  'batch': 8, 'task_options.max_objects': 2, 'pp.sides': (), 'pp.crop': 32,
  'model.units': (1, 1), 'model.num_encoder_layers': 1,
  'model.num_decoder_layers': 1,
}  # fmt: skip
SMALL = {
  'vit': ('pretrain.py:testing,imagenet2012', {'pp.crop': 16}),
  'mixer': (
    'pretrain.py:mixer_b32,imagenet2012',
    {'pp.crop': 32, 'model.num_blocks': 1},
  ),
  'bit': (
    'bit_pretrain.py:bit_r50x1,imagenet2012',
    {'pp.crop': 32, 'model.num_layers': (1, 1)},
  ),
  'detr': ('detr.py:r50,coco/2017', _SMALL_DETR),
  'igpt': (
    'igpt.py:s,imagenet2012,32',
    {'batch': 16, 'accum_steps': 2, 'pp.crop': 4, 'pp.resize': 4,
     'model.num_positions': 16,
     'model.num_layers': 3, 'model.scan': True},
  ),
  'eomt': (
    'segment_scenes_eomt.py',
    {'pp.crop': 16, 'model.transformer.num_layers': 1, 'model.num_query_layers': 1},
  ),
  'lit': (
    'lit_digits.py',
    {'model.image.transformer.num_layers': 1,
     'model.text.config.num_layers': 1},
  ),
}  # fmt: skip


def lower(file, fields):
  """The update of a config, lowered as in a plan, and the kind of model."""
  config, _ = overrides.load(file)
  config = run_config.complete(config)
  config.update_from_flattened_dict({'batch': 8, **fields})
  config = run_config.resolve_steps(config, 1_268_356)
  metadata = run_config.get_task(config.task).planned_metadata(config, 5)
  make = lambda part, mesh: train.make_program(part, metadata, mesh)
  lowered = estimate.lower(config, make, jax.devices('cpu'))
  return lowered, models.kind_of(config.model)


# The next test lowers a LiT model.
@pytest.mark.parametrize('kind', [kind for kind in SMALL if kind != 'lit'])
def test_every_kind_of_model_is_lowered(kind):
  file, fields = SMALL[kind]
  lowered, found = lower(f'configs/{file}', fields)
  assert found == kind
  assert lowered.flops > 0
  # Layers and micro-batches of an iGPT are in loops.
  assert [times for times, _ in lowered.loops] == ([1, 2, -2] if kind == 'igpt' else [])


def test_layers_of_a_locked_tower_are_not_looped(monkeypatch):
  monkeypatch.setattr(dtypes, 'platform', lambda: 'tpu')
  monkeypatch.setattr(layer_stack, 'DEEP', 2)
  fields = {**SMALL['lit'][1], 'model.image.transformer.num_layers': 3}
  fields['lr_multipliers'] = (('img/', 0.0),)  # Without it: [1, -1].
  lowered, kind = lower('configs/lit_digits.py', fields)
  assert kind == 'lit'
  assert lowered.flops > 0
  assert not lowered.loops


class Compiled:
  """A fake compiled program with the compiler's figures."""

  def __init__(self, seconds, count, opcode='negate'):
    self._cost = {'optimal_seconds': seconds, 'flops': count}
    self._text = f"""
ENTRY %main (y: f32[100]) -> f32[100] {{
  %y = f32[100]{{0}} parameter(0)
  ROOT %x = f32[100]{{0}} {opcode}(%y)
}}"""

  def compile(self, compiler_options=None):
    return self

  def cost_analysis(self):
    return self._cost

  def as_text(self):
    return self._text

  def memory_analysis(self):
    return types.SimpleNamespace(
      argument_size_in_bytes=5, output_size_in_bytes=4, alias_size_in_bytes=3,
      temp_size_in_bytes=20,
    )  # fmt: skip


def test_loop_bodies_count_once_per_iteration():
  """The compiler counts looped layers and micro-batches only once."""
  lowered = estimate.Lowered(
    abstract=types.SimpleNamespace(params=(), opt_state=()),
    update=Compiled(0.5, 1e12, 'all-reduce'),
    loops=[
      (1, Compiled(0.25, 5e11)),
      (4, Compiled(0.2, 4e11)),
      (-4, Compiled(0.1, 3e11)),
    ],
    flops=8 * 2e12,
  )
  chip = topology.CHIPS['v3']
  got = estimate.compile_plan(lowered, chip, 8)
  assert got['flops_unseen_per_core'] == pytest.approx(2e12 - 1.9e12)
  want = 0.5 + 0.25 + 4 * (0.2 - 0.1) + 0.1e12 / chip.peak
  assert got['step_seconds'] == pytest.approx(want)
  assert got['hbm_bytes_per_core'] == 2 * 800
  assert got['hbm_seconds'] == pytest.approx(1600 / 450e9)
  assert got['collectives']['all-reduce']['count'] == 1
  assert (got['memory_per_core_bytes'], got['activations_bytes']) == (26, 20)


def test_collectives_are_read_from_the_program():
  hlo = """
%all-reduce-scatter.1 (input: f32[40]) -> f32[5] {
  %sum = f32[40]{0} all-reduce(%input), channel_id=4, replica_groups={{0,1,2,3}}
}
ENTRY %main {
  %ar = (f32[2,3]{1,0:T(8,128)}, bf16[4]{0}) all-reduce(%a, %b), replica_groups={{0,1},{2,3}}
  %ag = (f32[8]{0}, f32[16]{0}) all-gather-start(%c), replica_groups=[2,4]<=[8]
  %done = f32[16]{0} all-gather-done(%ag)
  %rs = f32[10]{0} reduce-scatter(%d), replica_groups=mesh['a'=2,'b'=4] {'b'}, x={1}
  %cp = f32[3]{0} collective-permute(%d), source_target_pairs={{0,1},{1,0}}
  %other = f32[10]{0} fusion(%rs), calls=%all-reduce-like
  %sc = f32[5]{0} fusion(%d), kind=kCustom, calls=%all-reduce-scatter.1
}
  """
  # Bytes over the network: 3 of 4 parts of a gathered result; twice half of a sum
  # over 2 devices; 3 times each scattered sum, since 1 of 4 parts stays.
  assert estimate.collectives(hlo) == {
    'all-reduce': {'count': 1, 'bytes': 32, 'network_bytes': 32},
    'all-gather': {'count': 1, 'bytes': 48, 'network_bytes': 36},
    'reduce-scatter': {'count': 2, 'bytes': 60, 'network_bytes': 180},
    'collective-permute': {'count': 1, 'bytes': 12, 'network_bytes': 12},
  }


def test_topologies_and_configs_that_do_not_fit(results):
  _, errors, coordinates, slices, second = results
  for (_, message), error in zip(REJECTED, errors, strict=True):
    assert message in error
  for name, coords in coordinates.items():
    chips = len({tuple(c) for c in coords})
    assert len(coords) == chips * topology.CHIPS[name].per_chip, name
  # 'data' crosses the slices, or 'fsdp' if it is the only axis; each device sends
  # its sum of the 96 columns to the other slice.
  assert slices[:2] == [[4 * [0], 4 * [1]], 4 * [0] + 4 * [1]]
  between = slices[2][estimate.BETWEEN]
  assert between['count'] == 1
  assert 4 * 96 <= between['bytes'] <= 4 * 1024
  assert between['network_bytes'] == 0
  # A mesh axis may span part of a torus axis.
  assert [sorted(spans) for spans in slices[3]] == 2 * [[2, 4]]
  status, message = second
  assert status != 0
  assert 'libtpu is in use by another process: wait until that process ends' in message
  assert 'Traceback' not in message


@pytest.mark.parametrize(
  'args, message',
  [
    (['--topology=v9:2x2'], "topology='v9:2x2' is unknown.*v3:4x4"),
    (['--config.dataset=mine'], "dataset='mine' is neither a data set of known"),
    (['--config.dataset=/no/folder'], "dataset='/no/folder' does not exist"),
    (['--json=/no/folder/x.json'], "json='/no/folder/x.json'.*does not exist"),
    (['--topology=v5e:2x2x2'], "topology='v5e:2x2x2' is unknown.*v5e:4x4"),
    (['--topology=v5e:1000x1000'], '1,000,000 chips .* largest is v5e:16x16, 256 '),
    (['--topology=2xv4:32x32x32', '--search'], '32,768 chips .* v4:16x16x16, 4,096 '),
    (['--topology=h100:9'], 'only the GPUs of one host.*h100:8'),
    (['--topology=h100:2x2'], "topology='h100:2x2' is unknown.*h100:1"),
    (['--topology=2xh100:8'], 'only the GPUs of one host.*h100:8'),
    (['--config=configs/vtab.py:b16'], "trainer='vtab': a plan needs the conf"),
  ],
)
def test_wrong_arguments(args, message):
  config = '--config=configs/pretrain.py:ti16,imagenet2012'
  with pytest.raises(ValueError, match=message):
    plan_command.main([config, *args])


def test_largest_slices():
  largest = {
    name: topology.parse(chip.largest) for name, chip in topology.CHIPS.items()
  }
  assert {name: shape for name, (_, _, shape) in largest.items()} == {
    'v2': 'v2:16x16', 'v3': 'v3:32x32', 'v4': 'v4:16x16x16', 'v5e': 'v5e:16x16',
    'v5p': 'v5p:16x16x24', 'v6e': 'v6e:16x16', 'h100': 'h100:8', 'h200': 'h200:8',
  }  # fmt: skip
  assert topology.parse('9xv5e:1x256')[1:] == (9, 'v5e:1x256')


def test_counts_the_images_of_a_folder(image_folder):
  config = config_of(f'ti16,{image_folder}')
  assert plan.data_size(config) == (33, 3)
  assert plan.data_size(config, 500) == (500, 3)


def test_the_size_of_coco_is_known():
  config = detr.get_config('r50,coco/2017')
  assert plan.data_size(config) == (118_287, 80)


def test_missing_libtpu_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'libtpu', None)
  with pytest.raises(ImportError, match=r"pip install -e '\.\[plan\]'"):
    topology.get_topology('v3:2x2')


def test_missing_jax_for_cuda_is_named(monkeypatch):
  def missing(*args, **kwargs):
    raise NotImplementedError('topology not implemented for cuda')

  monkeypatch.setattr(topologies, 'get_topology_desc', missing)
  with pytest.raises(ImportError, match=r"h100:1.*pip install -e '\.\[cuda\]'"):
    topology.get_topology('h100:1')


def test_gpus_at_the_peak_and_the_bandwidth():
  """The compiler for GPUs estimates no time, and does not refuse large programs."""
  chip = topology.CHIPS['h100']
  lowered = estimate.Lowered(
    abstract=types.SimpleNamespace(params=(), opt_state=()),
    update=Compiled(None, None),
    loops=[],
    flops=8 * 2e12,
  )
  got = estimate.compile_plan(lowered, chip, 8)
  assert got['fits']
  assert got['step_seconds'] == pytest.approx(2e12 / 989e12 + 800 / 3352e9)
  small = chip._replace(memory=25)
  got = estimate.compile_plan(lowered, small, 8)
  assert (got['fits'], got['memory_per_core_bytes']) == (False, 26)


def test_plan_of_a_gpu(tmp_path, monkeypatch, capsys):
  """With the CPU in place of the GPU, which needs JAX for CUDA."""
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  requested = []

  def describe(name, platform, *, target_config, topology):
    requested.append((platform, topology, target_config))
    return types.SimpleNamespace(devices=jax.devices('cpu')[:2])

  monkeypatch.setattr(topologies, 'get_topology_desc', describe)
  status = plan_command.main(
    [
      '--config=configs/pretrain.py:ti16,imagenet2012', '--topology=h200:2',
      '--config.batch=8', '--config.model.transformer.num_layers=1',
      '--config.pp.crop=16',
    ]
  )  # fmt: skip
  out = capsys.readouterr().out
  assert status == 0
  [(platform, shape, text)] = set(requested)
  assert (platform, shape) == ('cuda', '1x1x2')
  assert 'NVIDIA H200' in text
  assert 'memory_bandwidth: 4800000000000\n' in text
  assert re.search(r'devices +2 of h200:2', out)
  assert 'of 141.00 GiB: fits' in out
  assert 'to be expected            longer: estimates of steps as short' in out
  assert 'kernels and loops' not in out
