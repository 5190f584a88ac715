"""Tests of flag values that several commands share."""

import argparse

import pytest

from tests import toy_task
from vit_jax.commands import convert, evaluate, flags, predict, train
from vit_jax.run import config as run_config
from vit_jax.tasks import predict_flags
from vit_jax.weights import fetch


def test_size_is_a_side_or_height_and_width():
  assert flags.pixels('384') == 384
  assert flags.pixels('384,512') == flags.pixels('384x512') == (384, 512)
  assert flags.height_width('384') == (384, 384)
  assert flags.height_width('384,512') == (384, 512)
  for wrong in ('', '0', '-1', '1,2,3', '384,', '3e2', 'large'):
    for parse in (flags.pixels, flags.height_width):
      with pytest.raises(argparse.ArgumentTypeError, match='must be'):
        parse(wrong)


def test_home_folder_is_expanded_in_every_path(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'mine.py').write_text(
    'from vit_jax.configs import pretrain\nget_config = pretrain.get_config\n'
  )
  args = train.parse(
    [
      '--config=~/mine.py:ti16,~/data',
      '--workdir=~/run',
      "--config.pretrained={'backbone': '~/b.npz', 'head': 'hf://a/b'}",
      "--config.evals=(('val', 'train[90%:]', '~/val'), ('test', 'test'))",
      '--config.tfds_data_dir=~/tfds',
      '--config.fewshot.dataset=~/probe',
    ]
  )
  config = args.config
  assert (args.workdir, config.dataset) == (f'{tmp_path}/run', f'{tmp_path}/data')
  assert dict(config.pretrained) == {
    'backbone': f'{tmp_path}/b.npz',
    'head': 'hf://a/b',
  }
  assert config.evals == (('val', 'train[90%:]', f'{tmp_path}/val'), ('test', 'test'))
  assert config.tfds_data_dir == f'{tmp_path}/tfds'
  assert config.fewshot.dataset == f'{tmp_path}/probe'
  args = predict.parse(
    ['--weights=~/w.npz', '--classes=~/names.txt', '~/a.png', 'b.png']
  )
  assert args.weights == f'{tmp_path}/w.npz'
  assert args.options == {'classes': f'{tmp_path}/names.txt'}
  assert args.images == [f'{tmp_path}/a.png', 'b.png']
  assert convert.parse(['~/a.npz', '~/b']).dst == f'{tmp_path}/b'


@pytest.mark.parametrize(
  'words',
  [
    ['--config=a.py', '--workdir=/b\udcff'],
    ['--config=a.py:ti16,/b\udcff', '--workdir=/w'],
    ['--config=a.py', '--config.dataset=/b\udcff', '--workdir=/w'],
  ],
)
def test_names_that_are_not_utf8_are_rejected(words):
  with pytest.raises(ValueError, match='/b\udcff.* is not UTF-8: rename'):
    train.parse(words)
  args = predict.parse(['--workdir=/w', '/b\udcff.png'])
  assert args.images == ['/b\udcff.png']
  with pytest.raises(ValueError, match='classes=.* is not UTF-8'):
    predict.parse(['--weights=w.npz', '--classes=\udcff', 'a.png'])


def test_a_user_s_task_may_add_flags_to_predict(monkeypatch):
  flag = {'--digits': dict(type=int, help='number of digits')}
  monkeypatch.setattr(toy_task.Task, 'FLAGS', flag)
  argv = ['--workdir=/w', '--digits=3', 'a.png']
  with pytest.raises(ValueError, match='there is no flag --digits'):
    predict.parse(argv)
  args = predict.parse(['--task=tests.toy_task', *argv])
  assert args.options == {'digits': 3}


def test_home_folder_is_expanded_in_python(tmp_path, monkeypatch, tiny_config):
  monkeypatch.setenv('HOME', str(tmp_path))
  tiny_config.update(pretrained='~/w.npz', dataset=(('~/data', 0.5), ('digits', 0.5)))
  config = run_config.complete(tiny_config)
  assert config.pretrained == f'{tmp_path}/w.npz'
  assert config.dataset == ((f'{tmp_path}/data', 0.5), ('digits', 0.5))
  assert str(fetch.local('~/w.npz')) == f'{tmp_path}/w.npz'


def test_tasks_have_the_flags_that_predict_lists():
  """The parser does not import the tasks, which import JAX."""
  for name in run_config.TASKS:
    task = run_config.get_task(name)
    listed = predict_flags.BY_TASK.get(name, predict_flags.PredictFlags({}))
    assert (task.FLAGS, task.IMAGELESS, task.NEEDS) == tuple(listed)
    for flag, needs in task.NEEDS.items():
      assert f'--{flag}' in task.FLAGS
      assert all(f'--{name}' in task.FLAGS or name == 'images' for name in needs)


@pytest.mark.parametrize('value', ['brier:Brier', "{'b': 'brier:Brier'}"])
def test_wrong_evaluators_are_named_with_an_example(value):
  with pytest.raises(ValueError, match="--evaluators.*'type': 'my_module:Calibration'"):
    evaluate.main(['--workdir=w', '--split=test', f'--evaluators={value}'])
