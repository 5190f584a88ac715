"""Tests of studies; nothing is compiled."""

import json

import ml_collections
import pytest

from tests.studies import fake_training
from vit_jax import console
from vit_jax.commands import train as train_command
from vit_jax.figures import studies
from vit_jax.studies import runs as runs_lib, study, summaries


@pytest.fixture
def config(tiny_config):
  config = ml_collections.ConfigDict()
  config.trainer = 'study'
  config.base = tiny_config
  config.base.pp.train = 'few_{seed}'
  config.variants = (
    ('small', {'model.hidden_size': 16}),
    ('large, wide', {'model.hidden_size': 32, 'pp.crop': 16}),
  )
  config.seeds = (0, 2)
  config.metric = 'accuracy_test'
  return config


def measure(config):
  return {
    'accuracy_test': config.model.hidden_size / 100 + config.seed / 1000,
    'loss_test': 1.0,
  }


def test_variants_are_compared_over_seeds(config, monkeypatch, tmp_path, capsys):
  fake = fake_training.Fake(monkeypatch, measure)
  found = study.study(config, str(tmp_path))
  assert fake.trained == [
    'small_0', 'small_2', 'large_wide_0', 'large_wide_2'
  ]  # fmt: skip
  wide = fake.configs['large_wide_2']
  assert (wide.model.hidden_size, wide.pp.crop, wide.seed) == (32, 16, 2)
  assert wide.pp.train == 'few_2'
  assert fake.configs['small_2'].pp.crop == 8
  # Over 0.16 and 0.162: mean 0.161, deviation 0.002 / sqrt(2).
  assert found[0] == {
    'variant': 'small', 'metric': 'accuracy_test', 'mean': pytest.approx(0.161),
    'std': pytest.approx(0.002 / 2**0.5), 'seed_0': 0.16, 'seed_2': 0.162,
  }  # fmt: skip
  assert json.loads((tmp_path / 'study.json').read_text()) == found
  out = capsys.readouterr().out
  assert 'small         16.10 ± 0.14  16.00 16.20\n' in out
  assert (tmp_path / 'study.png').read_bytes().startswith(b'\x89PNG')


def test_cross_validation_trains_on_all_but_one_fold(
  tiny_config, monkeypatch, tmp_path, capsys
):
  config = study.cross_validation(tiny_config, 3)

  def log_and_measure(config):
    console.log('Images of each class: ...', key='classes')
    console.log('Resuming')
    return measure(config)

  fake = fake_training.Fake(monkeypatch, log_and_measure)
  [row] = study.study(config, str(tmp_path))
  assert fake.trained == ['fold_0', 'fold_1', 'fold_2']
  for number, run in enumerate(fake.configs.values()):
    assert run.pp.train == f'train[fold!={number}/3]'
    assert run.pp.test == f'train[fold={number}/3]'
  assert row['std'] == pytest.approx(0.001)
  output = capsys.readouterr().out
  assert '1 variant x 3 folds = 3 runs' in output
  assert output.count('Images of each class') == 1
  assert 'Resuming' not in output
  assert 'standard deviation over the folds' in output


def test_folds_are_runs_of_a_command(image_folder, tmp_path, capsys):
  argv = [
    f'--config=configs/pretrain.py:testing,{image_folder}', f'--workdir={tmp_path}',
    '--folds=2', '--nodistributed',
  ]  # fmt: skip
  assert train_command.main([*argv, '--print']) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [line.rpartition(' ')[2] for line in lines] == ['--run=fold_0', '--run=fold_1']
  assert all('--folds=2' in line for line in lines)
  with pytest.raises(ValueError, match=r"trainer='study' does not support --folds=2"):
    train_command.main(['--config=configs/pooling.py', *argv[1:]])


@pytest.mark.parametrize('key, value, num_folds, message', [
  ('train', 'train[:90%]', 5, r"pp.train='train\[:90%\]' must be a whole split"),
  ('train', 'a+b', 5, 'must be a whole split'),
  ('train', 'train', 1, 'folds=1 must be at least 2'),
])  # fmt: skip
def test_impossible_cross_validation(tiny_config, key, value, num_folds, message):
  tiny_config.pp[key] = value
  with pytest.raises(ValueError, match=message):
    study.cross_validation(tiny_config, num_folds)
  tiny_config.pp[key] = 'train'
  tiny_config.evals = (('test', 'test'),)
  with pytest.raises(ValueError, match='leave out --config.evals'):
    study.cross_validation(tiny_config, 5)


def test_writes_the_table_before_raising_failures(config, monkeypatch, tmp_path):
  def fail(config):
    if config.model.hidden_size == 32 or config.seed == 0:
      raise FloatingPointError('loss nan')
    return measure(config)

  fake_training.Fake(monkeypatch, fail)
  monkeypatch.setattr(summaries.drawing, 'to_file', lambda *args, **kwargs: None)
  with pytest.raises(runs_lib.Failed, match='large_wide_0: loss nan'):
    study.study(config, str(tmp_path))
  small, large = json.loads((tmp_path / 'study.json').read_text())
  assert (small['seed_0'], small['mean']) == (None, 0.162)
  assert large['mean'] is None


def test_curves_have_a_point_per_variant(config, monkeypatch, tmp_path):
  fake_training.Fake(monkeypatch, measure)
  drawn = []
  monkeypatch.setattr(studies, 'curves', lambda *args, **_: drawn.append(args))
  config.variants = tuple(
    (f'{w} pixels', {'model.hidden_size': w}) for w in (16, 32, 64)
  )
  config.x = (('even', 16), ('other', 32), ('even', 64))
  config.x_label = 'width'
  study.study(config, str(tmp_path))
  [(lines, x_label, y_label, _)] = drawn
  assert list(lines) == ['even', 'other']
  assert lines['even'][0] == [16, 64]
  assert lines['even'][1][1] == pytest.approx([64.0, 64.2])
  assert (x_label, y_label) == ('width', 'accuracy_test (%)')


@pytest.mark.parametrize('key, value, message', [
  ('metric', 'accuracy', "'accuracy' is not among the metrics of variant 'sm"),
  ('seeds', (), r'seeds=\(\) .*one or more'),
  ('variants', (('a', 'b'),), r'variants=.* pairs'),
  ('variants', (('a', {'modl.dtype': 1}),), "variant 'a': config has no key 'm"),
  ('variants', (('a', {'seed': 1}),), "variant 'a' sets the key 'seed'"),
  ('variants', (('a', {}), ('a', {})), "variant 'a' occurs twice"),
  ('x', (('a', 1),), 'x has 1 entries for 2 variants'),
  ('metrics', 'loss', "no key 'metrics': did you mean 'metric'"),
])  # fmt: skip
def test_a_wrong_study_is_named(key, value, message, config, monkeypatch, tmp_path):
  fake = fake_training.Fake(monkeypatch, measure)
  config[key] = value
  with pytest.raises(ValueError, match=message):
    study.study(config, str(tmp_path))
  assert not fake.trained
  assert not list(tmp_path.iterdir())
