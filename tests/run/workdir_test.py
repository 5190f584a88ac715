"""Tests of the files in a workdir, except checkpoints."""

import contextlib
import dataclasses
import json
import os
import sys
from typing import Annotated

from absl import logging
import pytest

from tests import conftest, processes, stored_runs, tiny_models, toy_task
from vit_jax import console, train
from vit_jax.configs import schema
from vit_jax.inference import export
from vit_jax.run import config as run_config, workdir
from vit_jax.weights import convert, reading

NAMES = {'class_names': [str(i) for i in range(10)]}
DATA = {
  'train': {'origin': 'a', 'num_examples': 9, 'images': 'x'},
  'evaluation test': {'origin': 'a', 'num_examples': 3, 'images': 'y'},
}


@pytest.fixture
def config(tiny_config):
  return run_config.complete(tiny_config)


@pytest.fixture
def run(config, tmp_path):
  """The workdir of a run that has saved a checkpoint."""
  workdir.create(tmp_path, config, NAMES, DATA)
  (tmp_path / 'checkpoints' / '2').mkdir(parents=True)
  return tmp_path


def test_run_resumes_with_its_own_files(run, config):
  workdir.check(run, config, NAMES, DATA)
  loaded, metadata = workdir.load(run)
  assert metadata == NAMES
  assert workdir.to_plain(loaded) == workdir.to_plain(config)


def test_run_without_a_checkpoint_may_have_another_config(run, config, capsys):
  """After Ctrl-C or too little memory while compiling."""
  (run / 'checkpoints' / '2').rename(run / 'checkpoints' / '2.orbax-checkpoint-tmp')
  config.update(base_lr=0.5, dataset='mnist')
  names = {'class_names': ['a', 'b']}
  assert workdir.stored_config(run) == workdir.stored(run, ['class_names']) == {}
  workdir.check_config(run, config)
  workdir.check(run, config, names, {'train': {'num_examples': 1}})
  assert 'no checkpoint: starting anew' in capsys.readouterr().out
  with pytest.raises(ValueError, match='another config'):
    workdir.check_config(run, config, finished=True)  # Its checkpoints were deleted.
  workdir.create(run, config, names, DATA)
  assert workdir.load(run)[0].base_lr == 0.5
  workdir.check(run, config, names, DATA)
  assert 'starting anew' not in capsys.readouterr().out


def test_other_classes_are_rejected(run, config):
  names = {'class_names': ['b', *NAMES['class_names'][1:]]}
  message = "number 0: '0' there, 'b' here"
  with pytest.raises(ValueError, match=message) as error:
    workdir.check(run, config, names, DATA)
  assert f'--config.pretrained={run}' in str(error.value)


def test_other_training_data_are_rejected(run, config):
  data = {**DATA, 'train': {**DATA['train'], 'num_examples': 8}}
  with pytest.raises(
    ValueError, match=r'other training data:\s+num_examples: 9 there, 8 here\n'
  ):
    workdir.check(run, config, NAMES, data)


def test_other_test_data_are_reported(run, config, caplog):
  data = {**DATA, 'evaluation test': {**DATA['evaluation test'], 'images': 'z'}}
  data['evaluation new'] = {'num_examples': 1}
  with caplog.at_level(logging.WARNING):
    workdir.check(run, config, NAMES, data)
  [line] = caplog.messages
  assert 'evaluation test uses other data than before: images: y there' in line


def test_changed_class_names_are_rejected(run):
  (run / 'class_names.json').write_text(json.dumps(['a'] * 5))
  with pytest.raises(ValueError, match=r"\['class_names.json'\] in .* differ"):
    workdir.load(run)


def test_changed_config_is_rejected_until_the_change_is_accepted(run, config):
  """A change that would be silent: no array has another shape."""
  change = lambda plain: plain['pp'].update(resize=9)
  stored_runs.change_json(run / 'config.json', change)
  for read in (
    lambda: workdir.load(run),
    lambda: workdir.stored_config(run),
    lambda: workdir.check(run, config, NAMES, DATA),
    lambda: workdir.check_config(run, config),
    lambda: reading.read(str(run)),
  ):
    with pytest.raises(ValueError, match=r"config\.json' differs .*'config' from"):
      read()
  stored_runs.change_json(run / 'data.json', lambda data: data.update(config=5))
  with pytest.raises(ValueError, match=r"config\.json' differs"):
    workdir.load(run)
  stored_runs.change_json(run / 'data.json', lambda data: data.pop('config'))
  assert workdir.load(run)[0].pp.resize == 9
  config.pp.resize = 9
  workdir.check(run, config, NAMES, DATA)
  workdir.create(run, config, NAMES, DATA)  # Resumes.
  stored_runs.change_json(run / 'config.json', lambda plain: plain.update(seed=7))
  with pytest.raises(ValueError, match=r"config\.json' differs"):
    workdir.load(run)


def test_config_of_another_run_is_rejected(run, config, tmp_path):
  other = tmp_path / 'other'
  config.seed = 7
  workdir.create(other, config, NAMES, DATA)
  (run / 'config.json').write_bytes((other / 'config.json').read_bytes())
  with pytest.raises(ValueError, match=r"config\.json' differs"):
    workdir.load(run)


@pytest.mark.parametrize('number', range(4))
def test_kill_while_a_resumed_run_writes_its_files(run, config, monkeypatch, number):
  """Free keys, such as the mesh, may differ when a run resumes."""
  original, paths = workdir.files.write, []

  def write(path, content):
    if len(paths) == number:
      raise KeyboardInterrupt  # Stands for kill -9.
    paths.append(path)
    original(path, content)

  before = workdir.load(run)[0]
  config.update(eval_every=7, prefetch=5)
  with monkeypatch.context() as patch:
    patch.setattr(workdir.files, 'write', write)
    with pytest.raises(KeyboardInterrupt):
      workdir.create(run, config, NAMES, DATA)
  assert workdir.load(run)[0] == before
  workdir.check(run, config, NAMES, DATA)
  workdir.create(run, config, NAMES, DATA)
  assert workdir.load(run)[0].eval_every == 7


def test_damaged_data_file_is_reported(run, config):
  (run / 'data.json').write_text('{')
  with pytest.raises(ValueError, match="'.*data.json' is damaged"):
    workdir.check(run, config, NAMES, DATA)


@pytest.mark.parametrize('name', ['config.json', 'data.json'])
def test_named_pipe_is_not_read(run, name):
  (run / name).unlink()
  os.mkfifo(run / name)
  with pytest.raises(ValueError, match=f"{name}' is a named pipe, not a regular"):
    workdir.load(run)


def test_all_keys_that_differ_are_listed(run, config):
  """Also the lengths and the place of the data, which alone need not be reported."""
  config.update(base_lr=0.5, dataset='mnist', total_steps=9, eval_every=7)
  for check in (
    lambda: workdir.check_config(run, config),
    lambda: workdir.check(run, config, NAMES, DATA),
  ):
    with pytest.raises(ValueError, match='another config') as error:
      check()
    _, *lines, _ = str(error.value).splitlines()
    assert lines == [
      '  base_lr: 0.001 there, 0.5 here',
      '  dataset: digits there, mnist here',
      '  total_steps: 6 there, 9 here',
    ]
  config.update(total_steps=None, total_epochs=3)  # Steps that are not known yet.
  with pytest.raises(ValueError, match='base_lr') as error:
    workdir.check_config(run, config)
  assert 'total_' not in str(error.value)


@pytest.mark.parametrize('key', ['architecture', 'model_type'])
def test_folder_of_weights_is_no_workdir(tmp_path, config, key):
  """timm and Hugging Face have a config.json too."""
  (tmp_path / 'config.json').write_text(json.dumps({key: 'vit'}))
  for read in (
    lambda: workdir.load(tmp_path),
    lambda: workdir.check_config(tmp_path, config),
  ):
    with pytest.raises(
      ValueError, match=f'not a run: pass --weights={tmp_path} .*convert'
    ):
      read()


# Two processes, of which only the first looks.
GONE = """
import json, sys
from vit_jax.distributed import processes
from vit_jax.run import workdir
address, index, path = sys.argv[1:]
processes.initialize(address, 2, int(index))
workdir.check_present(path)
processes.gather('waiting', 0)
if index == '0':
  (workdir.folder(path) / 'config.json').unlink()
try:
  workdir.check_present(path)
except OSError as e:
  print('SAID', json.dumps(str(e)), flush=True)
"""


def test_all_processes_stop_if_the_workdir_was_deleted(run):
  _, outputs = processes.run_two(GONE, run)
  for text in processes.said(outputs):
    assert f"workdir='{run}' was moved or deleted during training" in text


def test_invalid_workdir_is_reported():
  with pytest.raises(ValueError, match="workdir='https://x/y.* must be a folder"):
    workdir.load('https://x/y')


@pytest.mark.parametrize('name', ['a[1]', 'a*', 'a?', 'a\\b'])
def test_paths_that_orbax_reads_as_patterns_are_rejected(config, tmp_path, name):
  """Orbax would write checkpoints there that it cannot read."""
  folder = tmp_path / name / 'run'
  with pytest.raises(ValueError, match='workdir=.* use a path without'):
    workdir.check_config(folder, config)
  with pytest.raises(ValueError, match='DST=.* use a path without'):
    convert.convert('a.npz', str(folder), 'workdir')
  with pytest.raises(ValueError, match='out=.* use a path without'):
    export.check(str(folder), 'saved_model', None, None)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  'key, value, may_change',
  [
    ('model.transformer.remat', 'full', True),
    ('mesh.data', 1, True),
    ('fewshot.shots', (1,), True),
    ('model.transformer.gelu', 'erf', False),
    ('task_options.mixup', 0.5, False),
    ('pp.flip', True, False),
  ],
)
def test_keys_are_fixed_unless_they_are_marked(run, config, key, value, may_change):
  tiny_models.put(config, key, value)
  expected = contextlib.nullcontext()
  if not may_change:
    expected = pytest.raises(ValueError, match=f'{key}: .* there, {value} here')
  with expected:
    workdir.check_config(run, config)


def test_options_of_a_user_s_task_may_be_marked(config, monkeypatch):
  @dataclasses.dataclass
  class Options:
    size: int = 1
    threads: Annotated[int, schema.FREE] = 1

  monkeypatch.setattr(toy_task.Task, 'Options', Options)
  config.task = 'tests.toy_task'
  keys = run_config.marked_keys(config, schema.FREE)
  assert [key for key in keys if 'task_options' in key] == ['task_options.threads']


def test_data_may_move_but_not_change(run, config):
  """Data are identified by their fingerprint."""
  config.dataset = '/moved/there'
  workdir.check_config(run, config)
  workdir.check(run, config, NAMES, DATA)
  with pytest.raises(ValueError, match=r'images: x there, y here'):
    workdir.check(run, config, NAMES, {'train': {**DATA['train'], 'images': 'y'}})
  with pytest.raises(ValueError, match='dataset: digits there, /moved/there'):
    workdir.check_config(run, config, finished=True)


def test_renamed_class_folder_stops_the_run(tmp_path):
  """The new name would change the order of the classes."""
  conftest.make_folder(tmp_path / 'images', (6, 2))
  config = conftest.make_tiny_config(None)
  config.dataset = str(tmp_path / 'images')
  config.pp.update(crop=16, channels=3)
  config.update(batch=8, batch_eval=8)
  prepared = train.prepare(config)
  workdir.create(
    tmp_path / 'run', prepared.config, prepared.metadata, train.fingerprints(prepared)
  )
  (tmp_path / 'run' / 'checkpoints' / '1').mkdir(parents=True)
  train.check_start(prepared, tmp_path / 'run')
  for split in ('train', 'test'):
    (tmp_path / 'images' / split / 'ant').rename(tmp_path / 'images' / split / 'zebra')
  with pytest.raises(ValueError, match="number 0: 'ant' there, 'bee' here"):
    train.check_start(train.prepare(config), tmp_path / 'run')
  for split in ('train', 'test'):
    (tmp_path / 'images' / split / 'zebra').rename(tmp_path / 'images' / split / 'ant')
  next((tmp_path / 'images/train/bee').iterdir()).unlink()
  with pytest.raises(ValueError, match='num_examples: 18 there, 17 here'):
    train.check_start(train.prepare(config), tmp_path / 'run')


@pytest.fixture
def foreign(run, tmp_path, monkeypatch):
  """A run whose task is a module in its workdir that writes a file if imported."""
  payload = "open('ran', 'w')\nfrom vit_jax.tasks.classify import Task\n"
  (run / 'payload.py').write_text(payload)
  stored_runs.change_config(run, task='payload')
  monkeypatch.chdir(run)
  monkeypatch.syspath_prepend(run)
  yield run
  sys.modules.pop('payload', None)


def test_run_imports_only_modules_that_the_user_named(foreign, config, monkeypatch):
  for use in (
    lambda: workdir.load(foreign),
    lambda: workdir.check(foreign, config, NAMES, DATA),
    lambda: workdir.check_config(foreign, config),
    lambda: reading.read(str(foreign)),
  ):
    with pytest.raises(
      ValueError, match="the module 'payload', which .* with --task=payload"
    ) as error:
      use()
    assert str(foreign) in str(error.value)
  assert not (foreign / 'ran').exists()
  monkeypatch.setattr(console, 'named_tasks', {'payload'})
  assert workdir.load(foreign)[0].task == 'payload'
  assert (foreign / 'ran').exists()


def test_module_that_was_already_imported_is_accepted(foreign):
  run_config.get_task('payload')  # As train.train_and_evaluate does.
  assert workdir.load(foreign)[0].task == 'payload'
