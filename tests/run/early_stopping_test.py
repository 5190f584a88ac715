"""Tests of runs that stop early, and of finished runs that are trained for longer."""

import contextlib
import copy
import io
import json
import shutil
from typing import ClassVar

import numpy as np
import pytest

from tests import conftest, trees
from vit_jax import train
from vit_jax.run import early_stopping, metrics as metrics_lib


@pytest.fixture(scope='module')
def config(data_dir):
  config = conftest.make_tiny_config(data_dir)
  config.pp.test = 'test[:8]'
  config.update(eval_every=1, checkpoint_every=0, warmup_steps=0)
  config.decay_type = 'constant'
  return config


def fit(config, workdir, **changes):
  config = copy.deepcopy(config)
  config.update(**changes)
  return train.train_and_evaluate(config, str(workdir))


def _stops_in_keras(values, patience, min_delta, mode):
  """Returns the number of evaluations that Keras makes of some values."""
  import keras

  class Model:
    stop_training = False

  callback = keras.callbacks.EarlyStopping(
    'metric', min_delta=min_delta, patience=patience, mode=mode
  )
  callback.set_model(model := Model())
  callback.on_train_begin()
  for i, value in enumerate(values):
    callback.on_epoch_end(i, {'metric': value})
    if model.stop_training:
      return i + 1
  return len(values)


@pytest.mark.parametrize('mode', ['min', 'max'])
@pytest.mark.parametrize('patience, min_delta', [(1, 0.0), (3, 0.0), (2, 0.1)])
def test_runs_stop_where_keras_does(patience, min_delta, mode):
  rng = np.random.default_rng(0)
  lengths = set()
  for _ in range(20):
    values = rng.random(12).round(1).tolist()  # With ties.
    state = early_stopping.EarlyStopping(patience, min_delta, mode == 'min')
    count = 0
    while count < len(values) and not state.stops:
      state.add(values[count])
      best = (min if mode == 'min' else max)(values[: count + 1])
      is_first = values.index(best) == count
      assert state.has_improved == is_first
      count += 1
    assert count == _stops_in_keras(values, patience, min_delta, mode)
    # The decision is the same when the run resumes.
    resumed = early_stopping.EarlyStopping(
      patience, min_delta, mode == 'min', values[:count]
    )
    assert resumed.stops == state.stops
    lengths.add(count)
  assert len(lengths) > 2


def test_values_that_are_not_numbers_make_no_progress():
  state = early_stopping.EarlyStopping(2, 0.0, False, [np.nan, 0.5, np.nan])
  assert not state.stops
  state.add(np.nan)
  assert state.stops


class Scripted:
  """An evaluator whose values the test has written."""

  metrics: ClassVar = {'value': metrics_lib.SHARE}
  values: ClassVar[list[float]] = []

  def __init__(self, evaluation):
    del evaluation

  def run(self, params, extra, stop):
    return {'value': self.values.pop(0)}


class Last:
  """An evaluator that runs only after the last update."""

  final = True
  metrics: ClassVar = {'last': metrics_lib.Metric()}

  def __init__(self, evaluation):
    del evaluation

  def run(self, params, extra, stop):
    return {'last': 1.0}


@pytest.fixture(scope='module')
def stopped(config, tmp_path_factory):
  """A run that stops early: its config, workdir, last state, metrics and output."""
  config, workdir = copy.deepcopy(config), tmp_path_factory.mktemp('stopped')
  config.evaluators = {
    name: {'type': f'tests.run.early_stopping_test:{name}'}
    for name in ('Scripted', 'Last')
  }
  config.update(best_metric='value_test', keep_checkpoints=1)
  config.early_stopping.update(patience=2, min_delta=0.05)
  Scripted.values[:] = [0.5, 0.6, 0.61, 0.4]
  with contextlib.redirect_stdout(io.StringIO()) as output:
    state, metrics = fit(config, workdir)
  return config, workdir, state, metrics, output.getvalue()


def test_run_stops_early_and_keeps_its_best_checkpoint(stopped, tmp_path, capsys):
  config, workdir, state, metrics, output = stopped
  config = copy.deepcopy(config)
  shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
  folder = tmp_path / 'checkpoints'
  assert sorted(path.name for path in folder.iterdir()) == ['3', '4']
  assert metrics['last_test'] == 1
  assert 'Stopped early at step 4 of 6: value_test has not improved by' in output
  assert f'vit_jax predict --workdir={workdir} --step=3' in output
  # As if killed before the last checkpoint was complete.
  shutil.rmtree(folder / '4')
  Scripted.values[:] = [0.4]
  resumed_state, _ = fit(config, tmp_path)
  trees.assert_same(resumed_state.params, state.params)
  config.early_stopping.patience = 3
  Scripted.values[:] = [0.4]
  state, _ = fit(config, tmp_path)
  assert int(state.step) == 5
  assert 'last_test' in metrics_lib.read(tmp_path)[-1]
  capsys.readouterr()
  fit(config, tmp_path)
  assert 'This run is finished' in capsys.readouterr().out


def test_early_stopping_needs_evaluations(config):
  config = copy.deepcopy(config)
  config.early_stopping.patience = 3
  config.eval_every = 0
  with pytest.raises(ValueError, match='patience=3 .*--config.eval_every'):
    train.prepare(config)


def test_finished_run_can_be_trained_for_longer(config, stopped, tmp_path, capsys):
  """With a constant learning rate, like a run that comes to that step at once."""
  changes = dict(eval_every=0)
  fit(config, tmp_path / 'run', total_steps=2, **changes)
  with pytest.raises(ValueError, match='total_steps: 2 there, 1 here'):
    fit(config, tmp_path / 'run', total_steps=1, **changes)
  with pytest.raises(ValueError, match='seed: 0 there, 1 here'):
    fit(config, tmp_path / 'run', total_steps=4, seed=1, **changes)
  state, _ = fit(config, tmp_path / 'run', total_steps=4, **changes)
  assert 'finished run of 2 steps on to step 4' in capsys.readouterr().out
  assert int(state.step) == int(stopped[2].step) == 4
  trees.assert_same(state.params, stopped[2].params)
  assert json.loads((tmp_path / 'run/config.json').read_text())['total_steps'] == 4
