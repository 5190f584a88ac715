"""Tests of the Python in README.md and docs/, and of the examples.

The examples of docs/extend.md are trained together, in one small run, which the
Python of the other pages reads.
"""

import contextlib
import json
import runpy
import sys

import jax
import pytest

from tests import commands
from tests import conftest
from tests import markdown
from tests import tiny_models
from vit_jax import checkpoint
from vit_jax import predict
from vit_jax.configs import detr_scenes
from vit_jax.configs import igpt_digits
from vit_jax.data.tfds import registry
from vit_jax.run import config as run_config

DOCS = markdown.ROOT / 'docs'


@pytest.fixture(scope='module', autouse=True)
def where():
  """The folder in which the pages' commands are run."""
  with contextlib.chdir(markdown.ROOT):
    yield


@pytest.fixture(scope='module')
def examples(tmp_path_factory):
  """The folder of the modules of docs/extend.md, from which they are imported."""
  folder = tmp_path_factory.mktemp('examples')
  markdown.write_modules(DOCS / 'extend.md', folder, '/tmp/parity')
  sys.path.insert(0, str(folder))
  yield folder
  sys.path.remove(str(folder))
  sys.modules.pop('registers', None)


@pytest.fixture(scope='module')
def trained(examples):
  """A run of the examples' model on the examples' data, and what it returned.

  The Python of docs/notebooks.md trains it, on a smaller config.
  """
  runpy.run_path(str(examples / 'parity.py'))
  (args,) = (
    args
    for _, _, args in markdown.commands()
    if '--config.task=registers' in args
  )
  folder = str(examples / 'parity')
  args = [arg.replace('/path/to/folder', folder) for arg in args]
  config = commands.parse('train', args).config
  config.pp.update(crop=16, channels=1)
  config.model.update(hidden_size=24)
  config.model.transformer.update(num_layers=1, mlp_dim=24)
  config.update(warmup_epochs=0.5, batch_eval=304)
  config.update(progress_every=0, eval_every=0, checkpoint_every=0)
  (code,) = markdown.blocks(DOCS / 'notebooks.md', 'python')
  assert 'digits.get_config()' in code
  code = code.replace('digits.get_config()', 'small')
  names = {'small': config}
  exec(code.replace('/tmp/notebook', str(examples / 'run')), names)
  return examples / 'run', names['state'], names['metrics']


def test_the_examples_train_together(examples, trained):
  rows = (examples / 'parity' / 'train.jsonl').read_text().splitlines()
  assert len(rows) == 1500
  assert json.loads(rows[1]) == {'image': '1.png', 'label': 'odd'}
  workdir, state, metrics = trained
  assert int(state.step) == 23  # Two epochs of 1,500 images in batches of 128.
  assert state.params['registers'].shape == (1, 4, 24)
  assert metrics['num_examples_test'] == 297
  model = predict.load(str(workdir))
  assert model.class_names == ('even', 'odd')
  assert type(model.task.model).__name__ == 'RegisterViT'


def untrained(config, workdir, **metadata):
  """Writes a run of one step with random parameters; returns its folder."""
  config = run_config.complete(config)
  task = run_config.get_task(config.task)(config, metadata)
  params, extra = jax.jit(task.init)(jax.random.key(0))
  return str(conftest.write_run(workdir, config, metadata, params, extra))


def detector(workdir):
  """A run of a narrow detector, as `untrained` writes one."""
  config = detr_scenes.get_config()
  config.total_steps = 1
  config.model.update(backbone_width=8, hidden_size=16, mlp_dim=8)
  return untrained(config, workdir, class_names=['ant', 'bee'])


def igpt(workdir):
  """A run of a narrow iGPT of 16 positions."""
  config = igpt_digits.get_config()
  config.total_steps = 1
  config.pp.crop = 4
  config.model.update(num_positions=16, hidden_size=16, num_layers=1)
  palette = [[-1.0], [-0.5], [0.5], [1.0]]
  return untrained(config, workdir, palette=palette)


@pytest.fixture(scope='module')
def stand_ins(examples, trained, tmp_path_factory):
  """What the pages name, and what stands for it."""
  folder = tmp_path_factory.mktemp('pages')
  registry.register('digits')
  params = tiny_models.numbers(tiny_models.tiny(), 16)
  checkpoint.save(params, str(folder / 'ViT.npz'))
  photo = str(examples / 'parity' / '0.png')
  return {
    '/tmp/street': detector(folder / 'street'),
    '/tmp/igpt32': igpt(folder / 'igpt32'),
    'street.jpg': photo,
    'half.png': photo,
    'photo.png': photo,
    'rows=16': 'rows=2',
    'image_size=800': 'image_size=48',
    '/tmp/digits/example.png': str(examples / 'parity' / '0.png'),
    '/tmp/digits': str(trained[0]),
    'ViT-B_16.npz': str(folder / 'ViT.npz'),
    '/tmp/copy.npz': str(folder / 'copy.npz'),
    "get_model('ViT-B_16'": "get_model('testing'",
    '224, 224': '32, 32',
    "'imagenet2012'": "'digits'",
    '/data/tfds': str(folder / 'tfds'),
    '/data/tars': str(folder),
  }


@pytest.mark.parametrize(
  'page',
  [
    page
    for page in markdown.PAGES
    if markdown.blocks(page, 'python')
    and page.name not in ('extend.md', 'notebooks.md')
  ],
  ids=lambda page: page.name,
)
def test_python_runs(page, stand_ins):
  names = {}  # The blocks of a page follow each other.
  for code in markdown.blocks(page, 'python'):
    for name, stand_in in stand_ins.items():
      code = code.replace(name, stand_in)
    exec(code, names)


def test_the_task_that_is_shown_is_the_one_that_is_tested():
  """In tests/tasks/toy_test.py; the page leaves out what plans and people need."""
  source = (markdown.ROOT / 'tests' / 'toy_task.py').read_text().splitlines()
  lines = iter([line.partition('  #')[0].rstrip() for line in source])
  (code,) = [
    code
    for code in markdown.blocks(DOCS / 'extend.md', 'python')
    if code.startswith('class Task')
  ]
  for line in code.splitlines():
    line = line.partition('  #')[0].rstrip()
    if line:
      assert line in lines, line  # In this order.
