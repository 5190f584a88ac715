"""Tests of many runs in one workdir; nothing is compiled."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.studies import fake_training
from vit_jax import train
from vit_jax.run import metrics
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


# Another machine that has locked a folder.
HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1], 'w')
fcntl.flock(file, fcntl.LOCK_EX)
file.write('{"host": "far", "process": 7, "since": "noon", "id": "x"}')
file.flush()
print('held', flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize('is_done', [True, False])
def test_a_run_that_another_machine_has_locked_comes_last(
  is_done, tiny_config, fake, tmp_path, monkeypatch, capsys
):
  """It finishes there, or is resumed here once that machine is killed."""
  runs = make(tiny_config, a=0.1, b=0.2, c=0.3)
  (tmp_path / 'a').mkdir()
  other = subprocess.Popen(
    [sys.executable, '-c', HOLDS, str(tmp_path / 'a' / 'holder.json')],
    stdout=subprocess.PIPE,
  )
  assert other.stdout.readline() == b'held\n'
  pauses = []

  def pause(seconds):
    pauses.append(seconds)
    if len(pauses) < 2:
      return
    if is_done:
      content = result({'accuracy_test': 0.7, 'loss_test': 2.0})
      (tmp_path / 'a' / 'result.json').write_text(content)
    other.kill()
    other.wait()

  monkeypatch.setattr(runs_lib.time, 'sleep', pause)
  found = runs_lib.train_all(runs, tmp_path)
  assert list(found.results) == ['a', 'b', 'c']
  assert found.results['a']['accuracy_test'] == (0.7 if is_done else 0.1)
  assert fake.trained == ['b', 'c'] + ([] if is_done else ['a'])
  assert len(pauses) == 2
  *_, waiting, _, last = capsys.readouterr().out.splitlines()
  assert waiting == '  a: process 7 on far since noon'
  assert last.startswith('  1/3  a  accuracy_test ')
  assert last.endswith('already done') == is_done


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
