"""Tests of logging to Weights & Biases and MLflow, with mocks of both modules.

The real packages have too many dependencies for the tests.
"""

import json
import sys
from unittest import mock

import jax
import ml_collections
import numpy as np
import pytest

from vit_jax import train
from vit_jax.run import config as run_config, metrics as metrics_lib

NAMES = ('wandb', 'mlflow')


@pytest.fixture
def modules(monkeypatch):
  """Mocks of wandb and mlflow; MLflow already has the run's parameter `a.b`."""
  wandb, mlflow = mock.Mock(), mock.Mock()
  wandb.init.return_value.id = 'w1'
  mlflow.start_run.return_value.info.run_id = 'm1'
  client = mlflow.MlflowClient.return_value
  client.get_run.return_value.data.params = {'a.b': '1'}
  for name, module in zip(NAMES, (wandb, mlflow)):
    monkeypatch.setitem(sys.modules, name, module)
  return wandb, mlflow


def write(workdir, start):
  log = metrics_lib.MetricsLog(workdir, start, NAMES)
  log.write_config(start, ml_collections.ConfigDict({'a': {'b': 2}, 'batch': 16}))
  log.write(start + 1, {'loss': np.float32(0.5)})
  log.write_pictures(start + 1, {'some': np.ones((2, 3, 3), np.uint8)})
  log.close()


def test_resumed_run_continues_its_tracker_runs(modules, tmp_path):
  wandb, mlflow = modules
  workdir = tmp_path / 'some_run'
  write(workdir, 0)
  assert json.loads((workdir / 'trackers.json').read_text()) == {
    'wandb': 'w1', 'mlflow': 'm1'
  }  # fmt: skip
  write(workdir, 1)
  assert [call.kwargs['id'] for call in wandb.init.call_args_list] == [None, 'w1']
  assert wandb.init.call_args.kwargs['resume'] == 'allow'
  calls = mlflow.start_run.call_args_list
  assert [call.kwargs['run_id'] for call in calls] == [None, 'm1']
  run, client = wandb.init.return_value, mlflow.MlflowClient.return_value
  # The step is a metric, because W&B ignores rows with earlier steps.
  run.define_metric.assert_called_with('*', step_metric='step')
  pictures = [wandb.Image.return_value]
  assert run.log.call_args_list == [
    mock.call({'step': step, **row})
    for step in (1, 2)
    for row in ({'loss': 0.5}, {'some': pictures})
  ]
  run.config.update.assert_called_with({'a.b': 2, 'batch': 16}, allow_val_change=True)
  assert mlflow.log_metrics.call_args_list == [
    mock.call({'loss': 0.5}, step=step, run_id='m1') for step in (1, 2)
  ]
  assert client.log_image.call_args.args[1].shape == (2, 3, 3)
  # MLflow parameters cannot change.
  assert client.log_param.call_args_list == 2 * [mock.call('m1', 'batch', 16)]


def test_damaged_file_of_ids_is_reported(modules, tmp_path):
  (tmp_path / 'trackers.json').write_text('{"wandb"')
  with pytest.raises(ValueError, match='trackers.json.*damaged.*delete'):
    write(tmp_path, 0)


def test_only_the_first_process_writes(modules, tmp_path, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  write(tmp_path, 0)
  assert not [module.mock_calls for module in modules if module.mock_calls]
  assert not [*tmp_path.iterdir()]


def test_missing_package_is_reported(tiny_config, monkeypatch):
  monkeypatch.setitem(sys.modules, 'wandb', None)
  tiny_config.trackers = ('wandb',)
  with pytest.raises(ImportError, match=r"trackers=\('wandb',\).*\[wandb\]"):
    train.check(run_config.complete(tiny_config))
