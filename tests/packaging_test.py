"""Tests of what is installed, what is imported, and who may import whom."""

import ast
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# The floors of the house, from the ground up: a room, or a module that is in none,
# imports from its own floor or from below.
FLOORS = [
  ['cli'],
  ['scale'],
  ['layers'],
  [
    'models_vit',
    'models_resnet',
    'models_mixer',
    'models_bit',
    'models_detr',
    'models_igpt',
  ],
  ['models', 'files'],
  ['data', 'datasets', 'annotations'],
  ['augmentation'],
  ['preprocess'],
  ['learning'],
  ['run'],
  ['weights', 'layouts'],
  ['input_pipeline', 'checkpoint', 'convert', 'utils', 'test_utils'],
  ['evaluators', 'figures', 'detection', 'generation'],
  ['prediction'],
  ['tasks'],
  ['train', 'inference_time', 'manifest'],
  ['predict', 'plan', 'benchmarks'],
  ['benchmark'],
  ['jobs', 'visualize', 'compute', 'probe'],
  ['self_training'],
  ['main', 'sweep'],
]
ROOMS = (
  'annotations', 'augmentation', 'benchmarks', 'data', 'datasets', 'detection', 'evaluators',
  'figures', 'files', 'generation', 'jobs', 'layers', 'layouts', 'learning', 'prediction', 'run',
  'scale', 'self_training', 'tasks', 'weights',
)  # fmt: skip


def run(code, cwd='/'):
  """Runs Python elsewhere, with the checkout importable."""
  return subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    check=False,
    cwd=cwd,
    env={'PYTHONPATH': str(ROOT), 'PATH': '/usr/bin:/bin', 'HOME': '/tmp'},
  )


def test_models_load_neither_tensorflow_nor_the_trainer():
  done = run(
    'import sys, vit_jax.models, vit_jax.learning.losses, vit_jax.learning.optim\n'
    'for name in ("tensorflow", "tensorflow_datasets", "orbax", "clu",'
    ' "matplotlib"):\n'
    '  assert name not in sys.modules, name\n'
  )
  assert done.returncode == 0, done.stderr


def test_tensorflow_is_loaded_in_silence():
  done = run(
    'from vit_jax import cli\n'
    'cli.load_tensorflow()\n'
    'import tensorflow as tf\n'
    'assert int(tf.constant(2) + 1) == 3\n'
  )
  assert done.returncode == 0
  assert done.stderr == ''


def test_libtpu_is_left_alone_where_there_is_no_tpu():
  done = run(
    'from vit_jax import cli\n'
    'cli.avoid_libtpu()\n'
    'import jax\n'
    'assert jax.devices()[0].platform == "cpu"\n'
    'maps = open("/proc/self/maps").read()\n'
    'assert "libtpu.so" not in maps\n'
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr == ''


def imports_of(path):
  """Yields what a file imports of this package: (room or module, file in it)."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      first, *rest = node.module.split('.')
      if first == 'vit_jax' and rest:
        for alias in node.names:
          yield rest[0], alias.name
      elif first == 'vit_jax':
        for alias in node.names:
          yield alias.name, None


def test_imports_point_down_only():
  floor = {name: i for i, names in enumerate(FLOORS) for name in names}
  seen = set()
  for path in sorted((ROOT / 'vit_jax').rglob('*.py')):
    name = path.relative_to(ROOT / 'vit_jax').parts[0].removesuffix('.py')
    if name in ('__init__', 'configs'):
      continue
    seen.add(name)
    for imported, _ in imports_of(path):
      if imported != 'configs':
        assert floor[imported] <= floor[name], f'{path} imports {imported}'
  assert seen == set(floor)
  for path in (ROOT / 'configs').glob('*.py'):
    assert {room for room, _ in imports_of(path)} <= {'configs'}, path


def test_rooms_are_one_level_deep_and_small():
  top = [p.name for p in (ROOT / 'vit_jax').glob('*.py')]
  assert len(top) <= 27, top  # One of them is __init__.py.
  folders = {p.parent for p in (ROOT / 'vit_jax').rglob('*.py')}
  rooms = {f.name for f in folders} - {'vit_jax', 'configs'}
  assert rooms == set(ROOMS)
  for room in ROOMS:
    path = ROOT / 'vit_jax' / room
    files = [p for p in path.glob('*.py') if p.name != '__init__.py']
    assert 0 < len(files) <= 10, room
    assert not (path / '__init__.py').read_text() or room == 'datasets'


def test_tests_mirror_the_rooms():
  for folder in (ROOT / 'tests').iterdir():
    if folder.is_dir() and folder.name != '__pycache__':
      assert folder.name in ROOMS


def test_only_figures_import_matplotlib_and_nothing_imports_main():
  for path in (ROOT / 'vit_jax').rglob('*.py'):
    text = path.read_text()
    if path.parent.name != 'figures':
      assert 'import matplotlib' not in text, path
    assert 'main' not in {name for name, _ in imports_of(path)}, path


def test_the_names_of_the_original_can_be_imported():
  done = run(
    'from vit_jax import models, models_vit, models_resnet, models_mixer\n'
    'from vit_jax import checkpoint, input_pipeline, preprocess, train, utils\n'
    'from vit_jax import inference_time, test_utils\n'
    'from vit_jax.configs import common, models as m, vit, augreg\n'
    'from vit_jax.configs import inference_time as i\n'
    'model = models.get_model("ViT-B_16", num_classes=10)\n'
    'assert model.num_classes == 10 and model.hidden_size == 768\n'
    'models.VisionTransformer(num_classes=2, **m.get_b16_config())\n'
  )
  assert done.returncode == 0, done.stderr


def test_nobody_is_told_to_install_a_name_that_is_not_ours():
  """Whoever takes `vit_jax` on PyPI would run code on users' machines."""
  pattern = re.compile(r'pip3? install [^`\n]*\bvit[_-]jax\[')
  files = [*ROOT.glob('*.md'), ROOT / 'setup.py']
  files += (ROOT / 'colabs').glob('*.ipynb')
  for folder in ('vit_jax', 'configs', 'colabs', 'tests'):
    files += (ROOT / folder).rglob('*.py')
  for path in files:
    text = path.read_text().replace('"\n', '').replace("'\n", '')
    assert not pattern.search(text), path


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
  """The wheel, built from a copy of the checkout."""
  tmp = tmp_path_factory.mktemp('wheel')
  ignore = shutil.ignore_patterns('.*', '*.egg-info', 'build', '__pycache__')
  shutil.copytree(ROOT, tmp / 'source', ignore=ignore)
  subprocess.run(
    [sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '-w', tmp, tmp / 'source'],
    check=True,
  )  # fmt: skip
  [path] = tmp.glob('*.whl')
  return path


def test_a_wheel_has_the_configs_and_works_without_the_checkout(
  wheel, tmp_path
):
  with zipfile.ZipFile(wheel) as archive:
    names = set(archive.namelist())
    archive.extractall(tmp_path)
  for path in (ROOT / 'configs').glob('*.py'):
    assert f'vit_jax/configs/{path.name}' in names
  packaged = {
    n for n in names if n.startswith('vit_jax/') and n.endswith('.py')
  }
  in_tree = {
    str(p.relative_to(ROOT)) for p in (ROOT / 'vit_jax').rglob('*.py')
  } - {'vit_jax/configs/__init__.py'}
  assert in_tree <= packaged
  done = subprocess.run(
    [
      sys.executable, '-m', 'vit_jax.main', '--config=configs/pretrain.py:b17,x',
      '--workdir=/nowhere',
    ],
    capture_output=True, text=True, check=False, cwd='/',
    env={'PYTHONPATH': str(tmp_path), 'PATH': '/usr/bin:/bin', 'HOME': '/tmp'},
  )  # fmt: skip
  assert done.returncode == 1
  assert "Error: model 'b17' is unknown" in done.stderr
  assert 'Traceback' not in done.stderr
