"""Tests of sweeps; only the last test trains."""

import json
import math
import shutil

import pytest

from tests.studies import fake_training
from vit_jax import predict, train
from vit_jax.configs import common
from vit_jax.run import config as run_config, loop
from vit_jax.studies import runs as runs_lib, summaries, sweep

train_and_evaluate = train.train_and_evaluate
RATES = {'base_lr': (0.001, 0.01, 0.1)}


def measure(config):
  """Metrics that are best at a learning rate of 0.01."""
  [evaluation] = run_config.evaluations(config)
  name = evaluation.name
  away = abs(math.log10(config.base_lr) + 2) / 10
  return {f'accuracy_{name}': 0.9 - away + config.seed / 100, f'loss_{name}': 1 + away}


@pytest.fixture
def fake(monkeypatch):
  monkeypatch.setattr(summaries.drawing, 'to_file', lambda *args, **kwargs: None)
  return fake_training.Fake(monkeypatch, measure)


@pytest.fixture
def config(tiny_config):
  tiny_config.pp.train = 'train[:90%]'
  return tiny_config


def test_the_best_value_is_tested_over_seeds(config, fake, tmp_path, capsys):
  found = sweep.sweep(config, str(tmp_path), RATES)
  choice = ['base_lr=0.001', 'base_lr=0.01', 'base_lr=0.1']
  test = [f'base_lr=0.01,test_{seed}' for seed in (0, 1, 2)]
  assert fake.trained == choice + test
  for name in choice:  # The test split is not read.
    run = fake.configs[name]
    assert (run.pp.train, run.seed) == ('train[:90%]', 0)
    assert run.evals == (('held_out', 'train[90%:]'),)
  for seed, name in enumerate(test):
    run = fake.configs[name]
    assert (run.pp.train, run.seed, run.base_lr) == ('train', seed, 0.01)
    assert run_config.evaluations(run) == [('test', 'test', None)]
  assert found['best'] == {'base_lr': 0.01}
  # Over 0.9, 0.91 and 0.92.
  assert found['test'][0] == {
    'base_lr': 0.01, 'metric': 'accuracy_test', 'mean': pytest.approx(0.91),
    'std': pytest.approx(0.01), 'seed_0': pytest.approx(0.9),
    'seed_1': pytest.approx(0.91), 'seed_2': pytest.approx(0.92),
  }  # fmt: skip
  out = capsys.readouterr().out
  assert 'Chosen: base_lr=0.01.\n' in out
  assert 'accuracy_test (%)  91.00 ± 1.00  90.00 91.00 92.00' in out
  rows = json.loads((tmp_path / 'choice.json').read_text())
  assert [row['base_lr'] for row in rows] == [0.001, 0.01, 0.1]
  assert [row['accuracy_held_out'] for row in rows] == [0.8, 0.9, 0.8]
  assert json.loads((tmp_path / 'test.json').read_text()) == found['test']
  # Nothing is trained twice; a value and a seed are added.
  more = {'base_lr': (*RATES['base_lr'], 0.02)}
  sweep.sweep(config, str(tmp_path), more, seeds=4)
  assert fake.trained[6:] == ['base_lr=0.02', 'base_lr=0.01,test_3']


def test_choice_is_evaluated_only_on_the_held_out_part(config):
  config = runs_lib.changed(config, {'fewshot.shots': (1,)})
  plan = sweep.make(config, RATES)
  assert plan.choice_runs()[0].config.fewshot.shots == ()
  assert plan.test_runs({'base_lr': 0.1})[0].config.fewshot.shots == (1,)


def test_evaluators_of_the_config_can_choose(config):
  few = {'type': 'vit_jax.evaluators.probes:FewShot', 'shots': (1,)}
  other = {'type': 'vit_jax.evaluators.probes:FewShot', 'knn': (3,), 'evals': ('test',)}
  config.evaluators = {'few': few, 'other': other}
  plan = sweep.make(config, RATES, metric='fewshot_1')
  assert (plan.chosen_by, plan.kind.unit) == ('fewshot_1_held_out', '%')
  assert [*plan.choice_runs()[0].config.evaluators] == ['few']
  assert [*plan.test_runs({'base_lr': 0.1})[0].config.evaluators] == ['few', 'other']
  with pytest.raises(ValueError, match="metric='knn_3' must be one of"):
    sweep.make(config, RATES, metric='knn_3')


def test_the_best_value_can_be_retrained_on_the_same_part(config, fake, tmp_path):
  sweep.sweep(config, str(tmp_path), RATES, seeds=1, refit='part')
  assert fake.configs['base_lr=0.01,test_0'].pp.train == 'train[:90%]'


def test_the_values_of_the_paper_are_the_default(config, fake, tmp_path):
  config = common.with_dataset(config, 'cifar10')
  found = sweep.sweep(config, str(tmp_path), seeds=1)
  assert [row['base_lr'] for row in found['choice']] == [.001, .003, .01, .03]  # fmt: skip
  assert fake.configs['base_lr=0.03'].evals == (('held_out', 'train[98%:]'),)
  config.dataset = 'digits'
  with pytest.raises(ValueError, match="no learning rates for dataset='digits'"):
    sweep.sweep(config, str(tmp_path), seeds=1)


def test_several_keys_make_a_grid(config, fake, tmp_path, capsys):
  values = {'base_lr': (0.1, 0.01), 'model.classifier': ('token', 'gap')}
  found = sweep.sweep(config, str(tmp_path), values, seeds=1)
  assert fake.trained[:2] == [
    'base_lr=0.1,classifier=token', 'base_lr=0.1,classifier=gap',
  ]  # fmt: skip
  assert fake.configs['base_lr=0.1,classifier=gap'].model.classifier == 'gap'
  assert len(found['choice']) == 4
  # The first of the ties, at the edge of the rates.
  assert found['best'] == {'base_lr': 0.01, 'model.classifier': 'token'}
  out = capsys.readouterr().out
  assert 'Chosen: base_lr=0.01,classifier=token. Equally good: 1 more.' in out
  assert 'base_lr=0.01 is at the edge of the values tried' in out
  assert 'Mean and standard deviation over 1 seed:' in out


def test_chooses_the_lowest_loss(config, fake, tmp_path):
  fake.measure = lambda config: {
    **measure(config), 'loss_held_out': config.base_lr, 'loss_test': 0.0
  }  # fmt: skip
  found = sweep.sweep(config, str(tmp_path), RATES, seeds=1, metric='loss')
  assert found['best'] == {'base_lr': 0.001}


def test_one_run_of_a_sweep(config, fake, tmp_path):
  """The sweep skips runs already trained by a scheduler's jobs."""
  workdir, plan = str(tmp_path), sweep.make(config, RATES, seeds=2)

  def names():
    return [run.name for run in sweep.next_runs(plan, workdir)]

  choice = names()
  assert choice == ['base_lr=0.001', 'base_lr=0.01', 'base_lr=0.1']
  assert not list(tmp_path.iterdir())
  for name in choice:
    sweep.sweep(config, workdir, RATES, seeds=2, only=name)
  assert fake.trained == choice
  assert names() == ['base_lr=0.01,test_0', 'base_lr=0.01,test_1']
  sweep.sweep(config, workdir, RATES, seeds=2, only=names()[1])
  assert not (tmp_path / 'choice.json').exists()
  found = sweep.sweep(config, workdir, RATES, seeds=2)
  assert fake.trained[3:] == ['base_lr=0.01,test_1', 'base_lr=0.01,test_0']
  assert found['test'][0]['mean'] == pytest.approx(0.905)
  with pytest.raises(ValueError, match="run='base_lr=2' is not one of the runs ba"):
    sweep.sweep(config, workdir, RATES, seeds=2, only='base_lr=2')


def test_diverged_values_lose(config, fake, tmp_path, capsys):
  def diverge(config):
    if config.base_lr >= limit:
      raise FloatingPointError('loss nan')
    return measure(config)

  fake.measure, limit = diverge, 0.01
  found = sweep.sweep(config, str(tmp_path), RATES, seeds=1)
  assert found['best'] == {'base_lr': 0.001}
  assert [row['diverged'] for row in found['choice']] == [False, True, True]
  assert '0.1                   diverged' in capsys.readouterr().out
  limit = 0.0
  with pytest.raises(ValueError, match='all combinations diverged'):
    sweep.sweep(config, str(tmp_path / 'other'), RATES)


@pytest.mark.parametrize('changes, values, arguments, message', [
  ({}, {'base_lrr': (1,)}, {}, "no key 'base_lrr': did you mean 'base_lr'"),
  ({}, {'seed': (0, 1)}, {}, "'seed' cannot be .*--values"),
  ({}, {'base_lr': ()}, {}, "'base_lr' needs one or more distinct values"),
  ({'pretrained': '/no/such.npz'}, RATES, {}, 'no/such.npz'),
  ({}, RATES, {'refit': 'none'}, "refit='none' .*one of 'all'"),
  ({}, RATES, {'seeds': 0}, 'seeds=0 .*integer'),
  ({}, RATES, {'metric': 'bleu'}, "metric='bleu' .*one of 'acc"),
  ({'pp.train': 'train'}, RATES, {}, 'leaves no training data'),
  ({'trainer': 'study'}, RATES, {}, "trainer='study': a sweep needs the config"),
])  # fmt: skip
def test_a_wrong_sweep_is_named(
  changes, values, arguments, message, config, fake, tmp_path
):
  config.update_from_flattened_dict(changes)
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    sweep.sweep(config, str(tmp_path), values, **arguments)
  assert not fake.trained
  assert not list(tmp_path.iterdir())


def test_the_validation_split_is_not_held_out_if_it_is_tested_on(
  config, image_folder, tmp_path
):
  shutil.copytree(image_folder / 'train', tmp_path / 'train')
  shutil.copytree(image_folder / 'test', tmp_path / 'val')
  config.dataset = str(tmp_path)
  with pytest.raises(ValueError, match="'val', overlaps with pp.test='val'"):
    sweep.sweep(config, str(tmp_path / 'out'), RATES, held_out='val')


def test_a_failed_sweep_does_not_block_the_next(config, fake, tmp_path, monkeypatch):
  def fail(config, workdir, held):
    raise ValueError("data set 'digits' has no split 'nope'")

  with monkeypatch.context() as patch:
    patch.setattr(train, 'train_and_evaluate', fail)
    with pytest.raises(runs_lib.Failed, match="no split 'nope'"):
      sweep.sweep(config, str(tmp_path), RATES, held_out='10%')
  with pytest.raises(ValueError, match="no split 'nope'"):
    sweep.sweep(config, str(tmp_path), RATES, held_out='nope')
  sweep.sweep(config, str(tmp_path), RATES, seeds=1)
  assert fake.trained[-1] == 'base_lr=0.01,test_0'


def test_a_sweep_of_a_tiny_model(config, fake, tmp_path, monkeypatch):
  """The choice run is trained; the test run is fake."""

  def train_choice(config, workdir, held):
    really = fake if workdir.endswith('test_0') else train_and_evaluate
    return really(config, workdir, held)

  monkeypatch.setattr(train, 'train_and_evaluate', train_choice)
  config.update(total_steps=12, eval_every=0, checkpoint_every=0, log_images=0)
  arguments = dict(values={'base_lr': (0.003,)}, seeds=1, metric='loss')
  found = sweep.sweep(config, str(tmp_path), **arguments)
  [choice] = found['choice']
  assert choice['loss_held_out'] < math.log(10)  # The loss before training.
  assert choice['num_examples_held_out'] == 144  # A tenth of 1,437.
  folder = tmp_path / 'base_lr=0.003'
  model = predict.load(str(folder))
  assert (model.config.base_lr, model.config.pp.train) == (0.003, 'train[:90%]')
  # A finished run without result.json, as left by `vit_jax train`: its metrics are
  # read without any update.
  (folder / 'result.json').unlink()
  monkeypatch.setattr(loop.Run, 'update', None)
  assert sweep.sweep(config, str(tmp_path), **arguments) == found
  assert (folder / 'result.json').exists()
