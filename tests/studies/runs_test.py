"""Tests of many runs in one workdir; nothing is compiled."""

import json
import re

import numpy as np
import pytest

from tests.studies import fake_training
from vit_jax import train
from vit_jax.run import lock, metrics
from vit_jax.studies import runs as runs_lib, summaries


def metrics_of(config):
  return {'accuracy_test': config.base_lr, 'loss_test': 1.0}


@pytest.fixture
def fake(monkeypatch):
  return fake_training.Fake(monkeypatch, metrics_of)


def make(config, **rates):
  """Runs that differ in the learning rate; `rates` by name."""
  return [
    runs_lib.Run(name, runs_lib.changed(config, {'base_lr': rate}))
    for name, rate in rates.items()
  ]


def test_each_run_is_trained_once(tiny_config, fake, tmp_path, capsys):
  runs = make(tiny_config, a=0.1, b=0.2)
  found = runs_lib.train_all(runs, tmp_path)
  assert found.results == {
    'a': {'accuracy_test': 0.1, 'loss_test': 1.0},
    'b': {'accuracy_test': 0.2, 'loss_test': 1.0},
  }
  assert fake.trained == ['a', 'b']
  first, _ = capsys.readouterr().out.splitlines()
  assert first.startswith('  1/2  a  accuracy_test 10.00 %, loss_test 1, ')
  again = runs_lib.train_all([*runs, *make(tiny_config, c=0.3)], tmp_path)
  assert list(again.results) == ['a', 'b', 'c']
  assert fake.trained == ['a', 'b', 'c']
  assert capsys.readouterr().out.splitlines()[1] == (
    '  2/3  b  accuracy_test 20.00 %, loss_test 1, already done'
  )


def test_a_run_that_another_process_trains_is_left_to_it(
  tiny_config, fake, tmp_path, capsys
):
  runs = make(tiny_config, a=0.1, b=0.2)
  with lock.Holder(tmp_path / 'a'):
    outcome = runs_lib.train_all(runs, tmp_path)
  assert fake.trained == ['b']
  assert list(outcome.results) == ['b']
  line, _ = capsys.readouterr().out.splitlines()
  assert re.match(r"  1/2  a  failed: workdir='.*/a' is held by process \d+ on", line)
  with pytest.raises(runs_lib.Failed, match='Run the same command again'):
    outcome.finish()
  assert list(runs_lib.train_all(runs, tmp_path).results) == ['a', 'b']


def test_a_run_that_another_process_has_just_finished_is_not_trained(
  tiny_config, fake, tmp_path, monkeypatch
):
  runs = make(tiny_config, a=0.1)
  enter = lock.Holder.__enter__

  def finish_first(self):
    (tmp_path / 'a').mkdir()
    (tmp_path / 'a' / 'result.json').write_text(result({'accuracy_test': 0.7}))
    return enter(self)

  monkeypatch.setattr(lock.Holder, '__enter__', finish_first)
  outcome = runs_lib.train_all(runs, tmp_path)
  assert outcome.results == {'a': {'accuracy_test': 0.7}}
  assert fake.trained == []


def test_the_other_runs_are_trained_if_one_fails(tiny_config, fake, tmp_path):
  def measure(config):
    if config.base_lr == 0.1:
      raise FloatingPointError('loss nan at step 3: not finite. Lower it')
    if config.base_lr == 0.2:
      raise OSError('the disk is full')
    return metrics_of(config)

  fake.measure = measure
  runs = make(tiny_config, a=0.1, b=0.2, c=0.3)
  found = runs_lib.train_all(runs, tmp_path)
  assert list(found.results) == ['c']
  assert list(found.diverged) == ['a']
  assert found.failed == {'b': 'the disk is full'}
  with pytest.raises(runs_lib.Failed, match='b: the disk is full\n  a: loss nan'):
    found.finish()
  with pytest.raises(runs_lib.Failed, match='b: the disk is full\nAll other'):
    found.finish(allow_diverged=True)
  # Diverged runs would diverge again; other failures are retried.
  fake.measure = metrics_of
  found = runs_lib.train_all(runs, tmp_path)
  with pytest.raises(runs_lib.Failed, match='delete its folder'):
    found.finish()
  found.finish(allow_diverged=True)
  assert fake.trained == ['a', 'b', 'c', 'b']
  assert list(found.results) == ['b', 'c']


def test_an_interrupted_run_resumes(tiny_config, fake, tmp_path):
  def stop(config):
    raise train.Interrupted(3, 15)

  runs = make(tiny_config, a=0.1, b=0.2)
  fake.measure = stop
  with pytest.raises(train.Interrupted):
    runs_lib.train_all(runs, tmp_path)
  assert fake.trained == ['a']
  fake.measure = metrics_of
  assert list(runs_lib.train_all(runs, tmp_path).results) == ['a', 'b']
  assert fake.trained == ['a', 'a', 'b']


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'base_lr': -1.0}, "run 'b': base_lr=-1.0 .*finite float32 number"),
    ({'pretrained': '/no/such.npz'}, "run 'b': .*/no/such.npz"),
  ],
)
def test_a_wrong_config_is_rejected_before_any_training(
  changes, message, tiny_config, fake, tmp_path
):
  wrong = runs_lib.Run('b', runs_lib.changed(tiny_config, changes))
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    runs_lib.train_all([*make(tiny_config, a=0.1), wrong], tmp_path)
  assert not fake.trained
  assert not list(tmp_path.iterdir())


def test_names_must_be_unique_folder_names(tiny_config, fake, tmp_path):
  a = make(tiny_config, a=0.1)
  with pytest.raises(ValueError, match="'a' occurs 2 times"):
    runs_lib.train_all(a + a, tmp_path)
  with pytest.raises(ValueError, match="run 'a/b': the name of a run "):
    runs_lib.train_all([a[0]._replace(name='a/b')], tmp_path)


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'base_lr': 0.2}, 'base_lr: 0.1 there, 0.2 here'),
    ({'evals': (('x', 'test'),), 'best_metric': 'loss_x'}, 'evals: '),
  ],
)
def test_a_folder_of_another_config_is_rejected(
  changes, message, tiny_config, fake, tmp_path
):
  runs = make(tiny_config, a=0.1)
  runs_lib.train_all(runs, tmp_path)
  other = runs_lib.changed(runs[0].config, changes)
  with pytest.raises(ValueError, match=message):
    runs_lib.train_all([runs_lib.Run('a', other)], tmp_path)
  # Keys that do not change the result may differ.
  free = runs_lib.changed(runs[0].config, {'progress_every': 1, 'prefetch': 1})
  runs_lib.train_all([runs_lib.Run('a', free)], tmp_path)
  assert fake.trained == ['a']


@pytest.mark.parametrize(
  'kept, steps', [('all', ['10', '20']), ('newest', ['20']), ('none', [])]
)
def test_checkpoints_of_finished_runs(kept, steps, tiny_config, fake, tmp_path):
  runs_lib.train_all(make(tiny_config, a=0.1), tmp_path, checkpoints=kept)
  left = [path.name for path in (tmp_path / 'a' / 'checkpoints').iterdir()]
  assert sorted(left) == steps
  with pytest.raises(ValueError, match="checkpoints='one' must be one of 'all'"):
    runs_lib.train_all([], tmp_path, checkpoints='one')


def result(metrics):
  return json.dumps({'metrics': metrics, 'config': {}})


@pytest.mark.parametrize(
  'content, message',
  [
    ('{"metr', 'is damaged: .*delete'),
    ('{"config": {}}', 'is damaged: .*metrics.*delete'),
    (result({'loss_test': 1.0}), 'has no accuracy_test'),
  ],
)
def test_a_damaged_result_is_named(content, message, tiny_config, fake, tmp_path):
  runs = make(tiny_config, a=0.1)
  runs_lib.train_all(runs, tmp_path)
  (tmp_path / 'a' / 'result.json').write_text(content)
  with pytest.raises(ValueError, match=f"a/result.json' {message}"):
    runs_lib.train_all(runs, tmp_path)


def test_changes_values_by_dotted_keys(tiny_config):
  changes = {
    'pp.crop': (8, 16),
    'model.transformer.norm_eps': 1e-5,
    'task_options.mixup': 0.5,
    'total_epochs': 2,
  }
  found = runs_lib.changed(tiny_config, changes)
  assert found.pp.crop == (8, 16)
  assert found.model.transformer.norm_eps == 1e-5  # Named models lack it.
  assert found.task_options.mixup == 0.5
  assert (found.total_epochs, found.total_steps) == (2, None)
  assert tiny_config.total_steps == 6
  other = tiny_config.model.copy_and_resolve_references()
  other.hidden_size = 24
  found = runs_lib.changed(tiny_config, {'model': other, 'model.classifier': 'gap'})
  assert (found.model.hidden_size, found.model.classifier) == (24, 'gap')


@pytest.mark.parametrize(
  'key, message',
  [
    ('model.transformer.remta', "did you mean 'model.transformer.remat'"),
    ('batch.size', "'batch' is not a group"),
  ],
)
def test_unknown_keys_are_named(key, message, tiny_config):
  with pytest.raises(ValueError, match=message):
    runs_lib.changed(tiny_config, {key: 1})


def test_mean_and_sample_standard_deviation():
  values = [0.9915, 0.9912, 0.9918]
  found = summaries.row({'name': 'a'}, {**dict(enumerate(values)), 7: None})
  assert found['mean'] == pytest.approx(np.mean(values))
  assert found['std'] == pytest.approx(np.std(values, ddof=1))
  assert (found['name'], found['seed_1'], found['seed_7']) == ('a', values[1], None)
  assert summaries.format_values(metrics.SHARE, values) == '99.15 ± 0.03'
  assert summaries.format_values(metrics.LOSS, [1.0, 2.0]) == '1.5 ± 0.71'
  assert summaries.format_values(metrics.LOSS, []) == '-'


def test_margin_is_computed_per_seed(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(summaries.drawing, 'to_file', lambda *args, **kwargs: None)
  found = {'base': {0: 0.5, 1: 0.6, 2: 0.7}, 'better': {0: 0.6, 1: 0.8, 2: None}}
  base, better = summaries.report(
    tmp_path, 'found', 'accuracy_test', metrics.SHARE, found, '', baseline='base'
  )
  assert (base['margin'], base['margin_std']) == (0, 0)
  assert better['margin'] == pytest.approx(0.15)
  assert better['margin_std'] == pytest.approx(np.std([0.1, 0.2], ddof=1))
  assert better['mean'] == pytest.approx(0.7)
  assert '15.00 ± 7.07' in capsys.readouterr().out
