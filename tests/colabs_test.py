"""Tests that the notebooks match their sources and run from top to bottom."""

import asyncio
import contextlib
import importlib.metadata
import pathlib
import re
import threading
import types
from typing import NamedTuple

import jupytext
import nbclient
import nbformat
import pytest

from tests import processes, tiny_models, tiny_towers
from vit_jax import checkpoint, models
from vit_jax.configs import augreg
from vit_jax.figures import gallery
from vit_jax.tasks import classify

ROOT = pathlib.Path(__file__).parents[1]
NAMES = ('vit_jax', 'vit_jax_augreg', 'inspect', 'plan', 'lit')
# A model that compiles and trains in seconds, without pictures for TensorBoard.
TINY = {
  'log_images': 0,
  'model.hidden_size': 24,
  'model.transformer.num_layers': 1,
  'model.transformer.mlp_dim': 48,
}


def read(name):
  return nbformat.read(ROOT / 'colabs' / f'{name}.ipynb', as_version=4)


def test_notebooks_are_up_to_date_with_their_sources():
  folder = ROOT / 'colabs'
  assert {p.stem for p in folder.glob('*.ipynb')} == set(NAMES)
  assert {p.stem for p in (folder / 'src').iterdir()} == set(NAMES)
  for name in NAMES:
    made, source = read(name), jupytext.read(folder / 'src' / f'{name}.py')
    assert [(c.cell_type, c.source, c.metadata) for c in made.cells] == [
      (c.cell_type, c.source, c.metadata) for c in source.cells
    ], f'make {name}.ipynb anew: see CONTRIBUTING.md'
    assert set(made.metadata) == {'kernelspec'}
    for cell in made.cells:
      if cell.cell_type == 'code':
        assert not cell.outputs
        assert cell.execution_count is None


def test_only_missing_packages_are_installed(monkeypatch):
  monkeypatch.syspath_prepend(ROOT / 'colabs')
  import colab_tools

  versions = {
    **{'Jax': '0.10.2', 'jaxlib': '0.10.2', 'jax-cuda12-plugin': '0.10.2'},
    **{'numpy': '2.1.0', 'tensorflow': '2.19.0', 'optax': '0.2.4'},
  }
  found = {colab_tools.utils.canonicalize_name(k): v for k, v in versions.items()}

  def version(name):
    if name not in found:
      raise importlib.metadata.PackageNotFoundError(name)
    return found[name]

  there = [types.SimpleNamespace(name=k, version=v) for k, v in versions.items()]
  monkeypatch.setattr(importlib.metadata, 'distributions', lambda: there)
  monkeypatch.setattr(importlib.metadata, 'version', version)
  wanted = [
    'jax>=0.10', 'numpy', 'clu', 'optax>=0.2.5',
    'tensorflow-cpu; platform_system == "Linux"',
    'tensorflow; platform_system != "Linux"', 'libtpu; extra == "plan"',
    'safetensors>=0.4; extra == "colab"',
  ]  # fmt: skip
  assert colab_tools.missing(wanted, ['colab']) == [
    'clu', 'optax>=0.2.5', 'safetensors>=0.4'
  ]  # fmt: skip
  assert colab_tools.constraints() == [
    'jax-cuda12-plugin==0.10.2', 'jax==0.10.2', 'jaxlib==0.10.2',
    'numpy==2.1.0', 'tensorflow==2.19.0',
  ]  # fmt: skip
  found['jax'] = '0.7.2'
  with pytest.raises(ImportError, match=r'needs jax>=0.10, .* 0.7.2'):
    colab_tools.missing(wanted)


def add_cell(client, source):
  """Runs an additional cell of a client's notebook; returns it."""
  cell = nbformat.v4.new_code_cell(source)
  client.nb.cells.append(cell)
  client.execute_cell(cell, len(client.nb.cells) - 1)
  return cell


class Notebook:
  """A running notebook, in the kernel that all notebooks share.

  Args:
    client: an nbclient.NotebookClient with a running kernel.
    name: name of the notebook.
    choices: values that replace the ones in its first cell.
  """

  def __init__(self, client, name, **choices):
    self.client = client
    self.notebook = client.nb = read(name)
    self.cells = [c for c in client.nb.cells if c.cell_type == 'code']
    first = self.cells[0]
    for key, value in choices.items():
      assert re.search(rf'^{key} = ', first.source, re.M), key
      first.source += f'\n{key} = {value!r}'
    # The reset collects garbage; freezing keeps imported modules out of it.
    self.add('import gc; gc.freeze()')
    self.add('%reset -f')

  def add(self, source):
    """Runs an additional cell; returns it."""
    return add_cell(self.client, source)

  def run(self, cell):
    """Runs a cell; fails if it writes to stderr."""
    self.client.execute_cell(cell, self.client.nb.cells.index(cell))
    for output in cell.outputs:
      assert output.get('name') != 'stderr', output.text

  def run_all(self):
    for cell in self.cells:
      self.run(cell)

  def cell(self, text):
    """Returns the only cell that contains a text."""
    [cell] = [c for c in self.cells if text in c.source]
    return cell


def printed(cell):
  return ''.join(o.text for o in cell.outputs if o.output_type == 'stream')


def pictures(cell):
  return sum('image/png' in o.get('data', {}) for o in cell.outputs)


def percent(cell, words):
  """Returns the percentage that a cell prints after some words."""
  return float(re.search(rf'{words} +([\d.]+)%', printed(cell))[1])


@pytest.fixture(scope='module')
def client(tmp_path_factory, data_dir):
  """A client in whose kernel the notebooks run, one after another.

  Each starts with an empty namespace, but modules stay loaded, TensorFlow in
  particular. Files go to a temporary folder.
  """
  folder = str(tmp_path_factory.mktemp('kernel'))
  env = {
    # One device, as on a runtime without an accelerator.
    **processes.environment(1),
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    'IPYTHONDIR': folder,
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    'TFDS_DATA_DIR': data_dir,
    'VIT_JAX_CACHE': folder,
  }
  client = nbclient.NotebookClient(
    nbformat.v4.new_notebook(),
    timeout=600,
    resources={'metadata': {'path': str(ROOT / 'colabs')}},
  )
  with client.setup_kernel(env=env):
    add_cell(client, 'import tests.without_keras')
    yield client


@contextlib.contextmanager
def stopping(file, client):
  """Presses the stop button as soon as a file has a line."""

  def press():
    while not over.wait(0.05):
      if file.exists() and file.read_text().count('\n'):
        asyncio.run(client.km.interrupt_kernel())
        return

  over = threading.Event()
  thread = threading.Thread(target=press)
  thread.start()
  yield
  over.set()
  thread.join()


class Walked(NamedTuple):
  """The walkthrough, after it has run.

  Attributes:
    notebook: the Notebook.
    workdir: folder of its training run.
    stopped: outputs of the training cell when it was stopped.
  """

  notebook: Notebook
  workdir: pathlib.Path
  stopped: list


@pytest.fixture(scope='module')
def walked(client, tmp_path_factory):
  """The walkthrough, stopped during training and resumed."""
  workdir = tmp_path_factory.mktemp('walk') / 'run'
  notebook = Notebook(
    client,
    'vit_jax',
    WORKDIR=str(workdir),
    CHANGES={
      **TINY, 'batch': 64, 'total_epochs': 4.0, 'warmup_epochs': 0.5, 'base_lr': 1e-2,
      'progress_every': 20, 'eval_every': 0, 'checkpoint_every': 0,
    },
    NEW_CHANGES={
      **TINY, 'total_steps': 40, 'warmup_steps': 4, 'progress_every': 10,
    },
    LOOP_STEPS=40,
  )  # fmt: skip
  stopped = []
  for cell in notebook.cells:
    if 'train_and_evaluate(config, WORKDIR)' in cell.source:
      with (
        stopping(workdir / 'metrics.jsonl', client),
        pytest.raises(nbclient.exceptions.CellExecutionError),
      ):
        notebook.run(cell)
      stopped += cell.outputs
    notebook.run(cell)
    if 'colab_tools.ready' in cell.source:
      # From here on figures are displayed, including those made without pyplot.
      drawn = notebook.add(
        'from matplotlib import figure\n'
        'drawn = figure.Figure()\n'
        'drawn.subplots()\n'
        'drawn'
      )
      assert pictures(drawn) == 1
  return Walked(notebook, workdir, stopped)


def test_walkthrough(walked):
  notebook = walked.notebook
  assert 'sees 1 device(s): cpu' in printed(notebook.cells[1])
  assert pictures(notebook.cell('get_datasets')) == 2
  assert pictures(notebook.cell('patch_grid')) == 1
  assert 'Transformer' in printed(notebook.cell('patch_grid'))
  training = notebook.cell('train_and_evaluate(config, WORKDIR)')
  assert percent(training, 'Test accuracy:') > 60
  assert pictures(notebook.cell('learning_curves')) == 1
  assert pictures(notebook.cell('predict.load(')) == 1
  assert printed(notebook.cell('example.png')).count('%') == 3
  last = notebook.cell('scratch.dataset')
  tuned = percent(last, 'fine-tuned:')
  assert tuned > 60
  assert tuned > percent(last, 'from scratch:')
  assert percent(notebook.cell('optax.chain'), 'own loop:') > 20  # A tenth by chance.


def test_interrupted_training_resumes(walked):
  [error] = [o for o in walked.stopped if o.output_type == 'error']
  assert error.ename == 'Interrupted'
  # One line, without the place in the code where the signal arrived.
  [line] = error.traceback
  step = re.match(r'Saved step (\d+) and stopped', line)[1]
  assert 20 <= int(step) < 90
  cell = walked.notebook.cell('train_and_evaluate(config, WORKDIR)')
  assert f'Resuming from step {step}.' in printed(cell)
  # One progress bar (more on a slow machine), and no progress lines.
  bars = [o.data for o in cell.outputs if o.output_type == 'display_data']
  assert {'application/vnd.jupyter.widget-view+json'} <= set(bars[0])
  assert ' img/s' not in printed(cell)


# Columns of the published index; the others are left out here.
INDEX = """name,ds,final_val,wd,aug,params,infer_samples_per_sec,adapt_ds,\
adapt_resolution,adapt_final_test,filename,adapt_filename
Ti/16,i1k,0.9,0.1,none,5.7,610,imagenet2012,32,0.69,Ti_16-i1k-a,Ti_16-i1k-a--x
Ti/16,i21k,0.3,0.1,none,5.7,610,imagenet2012,32,0.78,Ti_16-i21k-b,Ti_16-i21k-b--x
Ti/16,i21k,0.4,0.1,none,5.7,610,imagenet2012,32,0.77,Ti_16-i21k-c,Ti_16-i21k-c--x
Ti/16,i21k,0.4,0.1,none,5.7,610,cifar10,32,0.97,Ti_16-i21k-c,Ti_16-i21k-c--y
S/16,i21k,0.5,0.1,none,22.1,300,imagenet2012,32,0.83,S_16-i21k-d,S_16-i21k-d--x
"""


def make_published(folder):
  """Writes an index and the Ti/16 files that it lists as best."""
  folder.mkdir()
  (folder / 'index.csv').write_text(INDEX)
  config = augreg.get_config('Ti_16')
  config.model.transformer.num_layers = 1
  for name, classes in (('Ti_16-i21k-c', 9), ('Ti_16-i21k-b--x', 7)):
    model = models.make_model(config.model, num_classes=classes)
    params = tiny_models.numbers(model, size=32)
    checkpoint.save(params, str(folder / f'{name}.npz'))
  (folder / 'names.txt').write_text('\n'.join(f'sort {i}' for i in range(7)))
  return folder


def test_augreg(client, tmp_path):
  published = make_published(tmp_path / 'published')
  notebook = Notebook(
    client,
    'vit_jax_augreg',
    WORKDIR=str(tmp_path / 'run'),
    PUBLISHED=str(published),
    MODEL='Ti_16',
    IMAGENET_NAMES=str(published / 'names.txt'),
    CHANGES={
      'log_images': 0, 'pp.crop': 32, 'batch': 16, 'batch_eval': 60, 'total_steps': 8,
      'warmup_steps': 2, 'eval_every': 4, 'progress_every': 2,
      'model.transformer.num_layers': 1,
    },
  )  # fmt: skip
  notebook.run_all()
  index = notebook.cell('get_augreg_df')
  assert '5 fine-tuned checkpoints, of 4 pre-trained ones' in printed(index)
  assert pictures(notebook.cell('axes.scatter')) == 1
  choice = printed(notebook.cell('augreg_filename'))
  # Best by validation accuracy of pre-training; best on ImageNet.
  assert f'{published}/Ti_16-i21k-c.npz\n' in choice
  assert f'{published}/Ti_16-i21k-b--x.npz\n' in choice
  predictions = notebook.cell('load_sample_images')
  assert pictures(predictions) == 2
  assert len(re.findall(r'%  sort \d', printed(predictions))) == 10
  assert pictures(notebook.cell('plt.imread')) == 1
  training = notebook.cell('train_and_evaluate')
  assert 'Starting from pre-trained weights, with a new head.' in printed(training)
  # Even random filters tell a temple from a flower.
  assert percent(training, 'Test accuracy:') > 60
  assert pictures(notebook.cell('learning_curves')) == 1
  assert pictures(notebook.cell('confusion')) == 1
  assert printed(notebook.cell('path.name')).count('%') == 8
  saved = checkpoint.load(str(tmp_path / 'run' / 'tuned.npz'))
  assert saved['head']['bias'].shape == (2,)


def test_inspect(client, walked):
  notebook = Notebook(client, 'inspect', RUN=str(walked.workdir))
  notebook.run_all()
  assert 'ViT-digits, after 90 steps' in printed(notebook.cell('predict.load('))
  drawn = notebook.cell('visualize.figures')
  titles = [
    output.data['text/markdown'].splitlines()[0]
    for output in drawn.outputs
    if 'text/markdown' in output.data
  ]
  assert titles == [
    f'### {entry.title}'
    for entry in gallery.entries_of(classify.Task)
    if entry.name != 'register_attention'  # The model has no registers.
  ]
  assert pictures(drawn) == len(titles)
  arrays = printed(notebook.cell('internals.attention'))
  assert 'layers, heads: (1, 3)' in arrays
  assert 'attention weights of a layer: (8, 3, 17, 17)' in arrays
  assert 'rollout: (8, 4, 4)' in arrays
  assert pictures(notebook.cell('entropies')) == 1


def test_lit(client, tmp_path):
  tiny_towers.write(tmp_path / 'towers.npz', tmp_path / 'words.txt')
  notebook = Notebook(
    client,
    'lit',
    MODEL=str(tmp_path / 'towers.npz'),
    VOCABULARY=str(tmp_path / 'words.txt'),
    TEXTS=['a photo', 'the number 1'],
    DATA='digits',
    NUM_IMAGES=40,
  )
  notebook.run_all()
  assert 'text tower' in printed(notebook.cell('models.get_model'))
  embedded = printed(notebook.cell('get_image_preprocessing'))
  assert 'images: (2, 8, 8, 3) -> (2, 64)' in embedded
  assert 'texts: (2, 16) -> (2, 64)' in embedded
  matrix = notebook.cell('similarity_plots.matrix')
  assert pictures(matrix) == 1
  assert printed(matrix).count('%') == 2
  assert '10 classes, 8 sentences about each' in printed(
    notebook.cell('templates.fill')
  )
  assert 'on 40 images' in printed(notebook.cell('get_pp'))
  assert pictures(notebook.cell('colab_tools.show')) == 1


def test_plan(client):
  tiny = {
    'model.transformer.num_layers': 1, 'model.transformer.dropout_rate': 0.0,
    'batch': 64, 'pp.crop': 32, 'warmup_steps': 10,
  }  # fmt: skip
  notebook = Notebook(
    client,
    'plan',
    TRAINING='ti16,imagenet2012',
    CHANGES=tiny,
    ALTERNATIVES={'too much': {'batch': 8 * 10**6}},
    PRICE_PER_CHIP_HOUR=2.0,
  )
  notebook.run_all()
  assert re.search(
    r'memory a device +[\d.]+ MiB of 16.00 GiB: fits',
    printed(notebook.cell('planner.table')),
  )
  assert pictures(notebook.cell('axes.barh')) == 1
  cost = notebook.cell('chip-hours{price}')
  hours, price = re.search(
    r'as chosen +([\d,]+) chip-hours +([\d,]+)', printed(cost)
  ).groups()
  assert float(price) == pytest.approx(2 * float(hours), abs=1)
  assert 'does not fit' in printed(cost)
