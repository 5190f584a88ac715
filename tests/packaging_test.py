"""Tests of packaging, lazy imports, and dependencies between modules."""

import ast
from collections.abc import Iterable
import functools
import graphlib
import importlib.machinery
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

from packaging import requirements as markers, utils
import pytest
import yaml

from tests import conftest
import vit_jax
from vit_jax import console

ROOT = pathlib.Path(__file__).parents[1]


def run(code, cwd='/'):
  """Runs Python in another folder, with the checkout importable."""
  return subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    check=False,
    cwd=cwd,
    env={'PYTHONPATH': str(ROOT), 'PATH': '/usr/bin:/bin', 'HOME': '/tmp'},
  )


def test_imports_stay_light():
  """Models import neither TensorFlow nor the trainer; old names load no tokenizer."""
  done = run(
    'import sys\n'
    'def assert_absent(*names):\n'
    '  assert not sys.modules.keys() & set(names), sys.modules.keys() & set(names)\n'
    'import vit_jax.models, vit_jax.learning.losses, vit_jax.learning.optim\n'
    'import vit_jax.predict, vit_jax.input_pipeline, vit_jax.tasks.detection.detect\n'
    'assert_absent("tensorflow", "tensorflow_datasets", "orbax", "clu",'
    ' "matplotlib", "sklearn")\n'
    'from vit_jax import models, models_vit, models_resnet, models_mixer\n'
    'from vit_jax import checkpoint, input_pipeline, preprocess, train, utils\n'
    'from vit_jax import inference_time, test_utils\n'
    'from vit_jax.configs import common, models as m, vit, augreg\n'
    'from vit_jax.configs import inference_time as i\n'
    'model = models.get_model("ViT-B_16", num_classes=10)\n'
    'assert model.num_classes == 10 and model.hidden_size == 768\n'
    'models.VisionTransformer(num_classes=2, **m.get_b16_config())\n'
    'from vit_jax.evaluators import calibration, evaluation\n'
    'assert_absent("tokenizers", "sentencepiece", "scipy.optimize")\n'
    'from vit_jax import console\n'
    'console.load_tensorflow()\n'
    'from clu import metric_writers, periodic_actions\n'
    'assert_absent("keras", "pandas")\n'
    'import tensorflow as tf\n'
    'assert int(tf.constant(2) + 1) == 3\n'
    # libtpu is not loaded without a TPU.
    'import jax\n'
    'assert jax.devices()[0].platform == "cpu"\n'
    'assert "libtpu.so" not in open("/proc/self/maps").read()\n'
  )
  assert done.returncode == 0, done.stderr
  # TensorFlow loads silently, and libtpu does not complain about a missing TPU.
  assert done.stderr == ''


@pytest.mark.parametrize(
  'driver, quiet, num_lines', [(True, False, 0), (False, False, 1), (False, True, 0)]
)
def test_falls_back_to_cpu_without_a_cuda_driver(
  tmp_path, driver, quiet, num_lines, monkeypatch, capsys
):
  def load(name):
    assert name == 'libcuda.so.1'
    if not driver:
      raise OSError(name)

  plugins = importlib.machinery.ModuleSpec('jax_plugins', None, is_package=True)
  plugins.submodule_search_locations.append(str(tmp_path))
  (tmp_path / 'xla_cuda13.py').touch()
  monkeypatch.setattr(console.importlib.util, 'find_spec', lambda name: plugins)
  monkeypatch.setattr(console.ctypes, 'CDLL', load)
  monkeypatch.setenv('JAX_PLATFORMS', '')  # Restored at the end of the test.
  monkeypatch.delenv('JAX_PLATFORMS')
  console.avoid_absent_gpus(quiet)
  assert os.environ.get('JAX_PLATFORMS') == (None if driver else 'cpu')
  output = capsys.readouterr().err
  assert output.count('\n') == output.count('libcuda.so.1') == num_lines


def test_commands_cache_compiled_programs(tmp_path):
  environment = {
    'JAX_PLATFORMS': 'cpu',
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'VIT_JAX_CACHE': str(tmp_path),
  }
  done = run(
    'import os\n'
    'os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)\n'
    f'os.environ.update({environment!r})\n'
    'from vit_jax import console\n'
    'console.keep_compiled()\n'
    'import jax\n'
    'jax.jit(lambda x: x + 1)(1.0)\n'
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr == ''
  assert len(list(tmp_path.glob('compiled/*/*-cache'))) == 1


@functools.cache
def modules():
  """Returns {dotted name below vit_jax: path} of all files."""
  found = {}
  for path in sorted((ROOT / 'vit_jax').rglob('*.py')):
    parts = path.relative_to(ROOT / 'vit_jax').with_suffix('').parts
    name = '.'.join(parts).removesuffix('__init__').rstrip('.')
    if parts[0] != 'configs':
      found[name] = path
  return found


@functools.cache
def imports_of(path):
  """Returns the dotted names of imports in a file, relative to vit_jax."""
  known, found = modules(), []
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      first, _, rest = node.module.partition('.')
      for alias in node.names if first == 'vit_jax' else ():
        name = f'{rest}.{alias.name}'.lstrip('.')
        found.append(name if name in known else rest or alias.name)
  return found


def assert_no_circle(edges):
  """Asserts that a graph of imports has no cycles."""
  graph = graphlib.TopologicalSorter()
  for node, other in edges:
    if node != other:
      graph.add(node, other)
  graph.prepare()  # Raises CycleError, which names them.


def test_no_circular_imports_between_packages_or_files():
  """Checks the folders and files at every level of vit_jax."""
  edges = [(n, o) for n, path in modules().items() for o in imports_of(path)]
  assert len(edges) > 500
  assert_no_circle(edges)
  for room in ('', *{name.rpartition('.')[0] for name, _ in edges}):
    inside = room.split('.') if room else []
    depth = len(inside)
    assert_no_circle(
      tuple('.'.join(name.split('.')[: depth + 1]) for name in edge)
      for edge in edges
      if all(name.split('.')[:depth] == inside for name in edge)
    )


def test_configs_import_only_each_other_from_the_package():
  for path in (ROOT / 'configs').glob('*.py'):
    assert {n.split('.')[0] for n in imports_of(path)} <= {'configs'}, path


def test_only_figures_import_matplotlib_and_nothing_imports_main():
  for path in (ROOT / 'vit_jax').rglob('*.py'):
    text = path.read_text()
    if path.parent.name != 'figures':
      assert 'import matplotlib' not in text, path
    assert 'main' not in imports_of(path), path


def test_never_recommends_installing_an_unowned_name():
  """Whoever registers `vit_jax` on PyPI could run code on users' machines.

  Only a missing extra of an installed wheel is installed by name: pip leaves vit_jax as
  it is.
  """
  pattern = re.compile(r'pip3? install [^`\n]*\bvit[_-]jax\[')
  files = [*ROOT.glob('*.md'), ROOT / 'setup.py', ROOT / 'pyproject.toml']
  files += (ROOT / 'colabs').glob('*.ipynb')
  files += (ROOT / 'docs').glob('*.md')
  for folder in ('vit_jax', 'benchmarks', 'configs', 'colabs'):
    files += (ROOT / folder).rglob('*.py')
  for path in files:
    text = path.read_text().replace('"\n', '').replace("'\n", '')
    assert not pattern.search(text), path


REPOSITORY = 'https://example.org/owner/name'


def build(kind: str, source: pathlib.Path) -> pathlib.Path:
  """Builds an 'sdist' or a 'wheel' as a release does; returns the file."""
  # With the installed setuptools: `python -m build` would download it.
  subprocess.run(
    [
      sys.executable, '-c',
      f'from setuptools import build_meta; build_meta.build_{kind}("dist")',
    ],
    check=True, capture_output=True, cwd=source,
    env={**os.environ, 'REPOSITORY_URL': REPOSITORY},
  )  # fmt: skip
  [path] = source.glob('dist/*')
  return path


@pytest.fixture(scope='module')
def sdist(tmp_path_factory) -> pathlib.Path:
  """The contents of an sdist built from a copy of the checkout."""
  tmp = tmp_path_factory.mktemp('sdist')
  ignore = shutil.ignore_patterns('.*', '*.egg-info', 'build', '__pycache__')
  shutil.copytree(ROOT, tmp / 'source', ignore=ignore)
  shutil.unpack_archive(build('sdist', tmp / 'source'), tmp, filter='data')
  return tmp / f'vit_jax-{vit_jax.__version__}'


@pytest.fixture(scope='module')
def wheel(sdist, tmp_path_factory) -> pathlib.Path:
  """The contents of the wheel built from the sdist."""
  folder = tmp_path_factory.mktemp('wheel')
  shutil.unpack_archive(build('wheel', sdist), folder, 'zip')
  return folder


@pytest.fixture(scope='module')
def metadata(wheel) -> importlib.metadata.PackageMetadata:
  [info] = wheel.glob('*.dist-info')
  return importlib.metadata.PathDistribution(info).metadata


def closure(requirements: Iterable[str]) -> set[str]:
  """Returns the names of all installed distributions that requirements bring."""
  queue = [(requirement, '') for requirement in requirements]
  visited = set()  # Pairs of a distribution and one of its extras, or ''.
  while queue:
    text, extra = queue.pop()
    requirement = markers.Requirement(text)
    if requirement.marker and not requirement.marker.evaluate({'extra': extra}):
      continue
    name = utils.canonicalize_name(requirement.name)
    for pair in ((name, extra) for extra in ('', *requirement.extras)):
      if pair not in visited:
        visited.add(pair)
        dependencies = importlib.metadata.requires(name) or ()
        queue += [(dependency, pair[1]) for dependency in dependencies]
  return {name for name, _ in visited}


@functools.cache
def distributions_of_modules():
  """Like packages_distributions, which reads the file lists of all distributions."""
  return importlib.metadata.packages_distributions()


@pytest.fixture(scope='module')
def without_extras(wheel, metadata, tmp_path_factory):
  """Runs Python with the wheel and only the packages that it requires."""
  folder = tmp_path_factory.mktemp('without_extras')
  required = {'vit-jax', *closure(metadata.get_all('Requires-Dist'))}
  absent = {
    module
    for module, names in distributions_of_modules().items()
    if required.isdisjoint(map(utils.canonicalize_name, names))
  }
  (folder / 'sitecustomize.py').write_text(
    'import importlib.machinery as machinery, sys\n'
    'class Finder(machinery.PathFinder):\n'
    '  @classmethod\n'
    '  def find_spec(cls, name, path=None, target=None):\n'
    f'    if name.partition(".")[0] not in {absent!r}:\n'
    '      return super().find_spec(name, path, target)\n'
    'place = sys.meta_path.index(machinery.PathFinder)\n'
    'sys.meta_path[place] = Finder\n'
  )
  environment = {
    'PYTHONPATH': f'{folder}:{wheel}', 'PATH': '/usr/bin:/bin', 'HOME': '/tmp',
    'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': os.environ['XLA_FLAGS'],
  }  # fmt: skip

  def run(*args):
    return subprocess.run(
      [sys.executable, *map(str, args)], capture_output=True, text=True,
      check=False, cwd='/', env=environment,
    )  # fmt: skip

  return run


def test_base_install_loads_and_converts_weights(without_extras):
  done = without_extras('-P', ROOT / 'tests/base_install.py')
  assert (done.returncode, done.stdout) == (0, 'ok\n'), done.stderr


def test_missing_extra_is_named_in_one_line(without_extras, tmp_path):
  done = without_extras(
    '-m', 'vit_jax', 'train', f'--config={ROOT}/configs/digits.py',
    f'--workdir={tmp_path}/run',
  )  # fmt: skip
  assert done.returncode == 1
  (line,) = done.stderr.splitlines()
  assert 'vit_jax train' in line
  assert "pip install 'vit_jax[train]'" in line
  assert not (tmp_path / 'run').exists()


def test_modules_of_the_extra_train_match_its_packages():
  requirements = map(markers.Requirement, importlib.metadata.requires('vit_jax'))
  wanted = {
    utils.canonicalize_name(need.name)
    for need in requirements
    if need.marker and need.marker.evaluate({'extra': 'train'})
  }
  packages = distributions_of_modules()
  found = {
    utils.canonicalize_name(name)
    for module in console.TRAIN_MODULES
    for name in packages[module]
  }
  assert wanted <= found


def test_sdist_has_the_tests_and_docs(sdist):
  names = ['CHANGELOG.md', 'CITATION.cff', 'LICENSE', 'mkdocs.yml', 'pyproject.toml']
  for folder in ('benchmarks', 'colabs', 'configs', 'docs', 'tests'):
    names += [
      path.relative_to(ROOT)
      for path in (ROOT / folder).rglob('*.*')
      if path.suffix != '.pyc'
    ]
  assert not [name for name in names if not (sdist / name).exists()]


def test_metadata_match_the_citation_and_the_version(metadata):
  citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
  assert metadata['Author'] == ', '.join(a['name'] for a in citation['authors'])
  assert metadata['License-Expression'] == citation['license']
  assert metadata['Keywords'].split(',') == citation['keywords']
  assert metadata['Version'] == vit_jax.__version__
  assert f'Source, {REPOSITORY}' in metadata.get_all('Project-URL')


def test_links_of_the_description_are_absolute(metadata):
  description = metadata.get_payload()
  links = re.findall(r'\]\((.*?)\)', description)
  assert len(links) > 40
  assert not [link for link in links if not link.startswith('https://')]
  assert f']({REPOSITORY}/raw/main/docs/pictures/digits.png)' in description
  assert f']({REPOSITORY}/blob/main/docs/runs.md#evaluate)' in description


def test_every_requirement_has_a_lower_bound():
  settings = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  texts = [*settings['dependencies']]
  for extra in settings['optional-dependencies'].values():
    texts += extra
  requirements = map(markers.Requirement, texts)
  unbounded = {need.name for need in requirements if not need.specifier}
  assert unbounded == {'jax', 'vit_jax'}  # Extras of what has a bound already.


def test_wheel_has_the_configs_and_works_without_the_checkout(wheel):
  assert (wheel / 'vit_jax/py.typed').exists()
  for path in (ROOT / 'configs').glob('*.py'):
    assert (wheel / 'vit_jax/configs' / path.name).exists(), path
  for path in (ROOT / 'vit_jax').rglob('*.py'):
    if path.parent.name != 'configs':
      assert (wheel / path.relative_to(ROOT)).exists(), path
  done = subprocess.run(
    [
      sys.executable, '-m', 'vit_jax.main', '--config=configs/pretrain.py:b17,x',
      '--workdir=/nowhere',
    ],
    capture_output=True, text=True, check=False, cwd='/',
    env={'PYTHONPATH': str(wheel), 'PATH': '/usr/bin:/bin', 'HOME': '/tmp'},
  )  # fmt: skip
  assert done.returncode == 1
  assert "Error: model 'b17' is unknown" in done.stderr
  assert 'Traceback' not in done.stderr


def test_listed_tests_exist():
  for name in (*conftest.FIRST, *conftest.QUICK, *conftest.NOT_QUICK):
    file, _, test = name.partition('::')
    assert f'def {test}' in (ROOT / 'tests' / file).read_text(), name
