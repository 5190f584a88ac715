"""Tests of the probe command, on the digits."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import conftest
from vit_jax import predict, train
from vit_jax.commands import probe as probe_command
from vit_jax.distributed import sharding
from vit_jax.evaluators import evaluation, features, probe, probes, solvers
from vit_jax.run import config as run_config, evaluators as run_evaluators

NAMES = [str(i) for i in range(10)]


@pytest.fixture
def mesh():
  return sharding.make_mesh({'data': 1}, jax.devices()[:1])


@functools.cache
def random_params():
  """Random parameters of the tiny model."""
  config = run_config.complete(conftest.make_tiny_config(None))
  task = run_config.get_task('classify')(config, {'class_names': NAMES})
  shapes, _ = jax.eval_shape(task.init, jax.random.key(0))
  rng = np.random.RandomState(0)
  return jax.tree.map(lambda x: rng.randn(*x.shape).astype('f') / 4, shapes)


@pytest.fixture
def model(tiny_config):
  """An untrained classifier of the digits."""
  config = run_config.complete(tiny_config)
  task = run_config.get_task('classify')(config, {'class_names': NAMES})
  return task.predictor(random_params(), {}, 7)


@pytest.fixture
def run(model, mesh, monkeypatch, tmp_path):
  """Calls the command on a run whose model is `model`.

  Returns the JSON that it writes and the features that it extracts.
  """
  model.workdir = '/tmp/run'
  monkeypatch.setattr(predict, 'load', lambda *_, compute_dtype: model)
  monkeypatch.setattr(evaluation, 'run_mesh', lambda _: mesh)
  extract, extracted = features.Extractor.run, []

  def record(*args, **kwargs):
    extracted.append(extract(*args, **kwargs))
    return extracted[-1]

  monkeypatch.setattr(features.Extractor, 'run', record)

  def call(flags):
    path = tmp_path / 'probe.json'
    args = f'--workdir=/tmp/run --test=test[:120] --squeeze=1 --linear --json={path}'
    probe_command.main([*args.split(), *flags.split()])
    return json.loads(path.read_text()), extracted

  return call


def test_the_command_matches_its_parts(model, run, monkeypatch, capsys):
  monkeypatch.setattr(solvers, 'L2', (1e-1, 1e-2))
  layer = 'Transformer/encoderblock_0'
  found, (train_set, test_set) = run(  # In one pass for all probes.
    f'--train=train[:120] --shots 1 4 --knn 5 --seeds 3 4 --layer={layer}'
  )
  assert (found['dataset'], found['num_test']) == ('digits', 120)
  assert (found['num_train'], found['num_features']) == (120, 16)
  tuned = solvers.tuned(train_set, test_set)
  assert found['linear']['accuracy'] == pytest.approx(tuned.accuracy)
  assert tuned.accuracy > 0.5  # Random features suffice.
  for row, shots in zip(found['fewshot'], (1, 4), strict=True):
    accuracies = []
    for seed in (3, 4):
      rows = probes.choose(train_set.labels, model.class_names, shots, seed)
      made = solvers.least_squares(train_set.take(rows.reshape(-1)), 10, 1024.0)
      accuracies.append(test_set.accuracy(made.predict(test_set.values)))
    assert row['accuracies'] == pytest.approx(accuracies)
    assert row['mean'] == pytest.approx(np.mean(accuracies))
    assert row['std'] == pytest.approx(np.std(accuracies, ddof=1))
  [near] = solvers.neighbours(train_set, test_set.values, [5])
  assert found['knn'] == [{'k': 5, 'accuracy': test_set.accuracy(near)}]
  output = capsys.readouterr().out
  assert f'5-NN       {100 * found["knn"][0]["accuracy"]:7.2f} %' in output
  assert f' 4-shot    {100 * found["fewshot"][1]["mean"]:7.2f} % ± ' in output
  assert 'linear' in output


def test_all_layers(model, run, tmp_path, monkeypatch, capsys):
  """Layer 0 is the sums of rows; layer 1 is the sums of rows and of columns."""
  monkeypatch.setattr(solvers, 'L2', (1e-1,))

  def intermediates(params, extra, batch, capture):
    rows, columns = (batch['image'][..., 0].sum(axis=i) for i in (2, 1))  # [B, 8]
    return {'layer_1': (jnp.concatenate([rows, columns], 1),), 'layer_0': (rows,)}

  model.task.intermediates = intermediates
  found, extracted = run('--train=train[:100] --layer=all')
  assert found['fewshot'] == []
  assert [row['layer'] for row in found['layers']] == ['layer_0', 'layer_1']
  train_set, test_set = extracted  # In one pass, layer_0 first.
  assert (train_set.values.shape, test_set.values.shape) == ((100, 24), (120, 24))
  for row, part in zip(found['layers'], (slice(0, 8), slice(8, 24)), strict=True):
    parts = (x._replace(values=x.values[:, part]) for x in (train_set, test_set))
    assert row['accuracy'] == solvers.tuned(*parts).accuracy
    assert row['accuracy'] > 0.3
  assert (tmp_path / 'probe.png').exists()
  assert 'best layer' in capsys.readouterr().out


def test_layers_by_number(model):
  names = {'last': 'layer_1', '0': 'layer_0', 'a/path': 'a/path'}
  for layer, name in names.items():
    assert probes.select(model.task, layer) == [name]


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'layer': 'all'}, "layer='all'.*--linear.*--shots"),
    ({'layer': 2}, 'layer=2 .* layer_0, layer_1'),
    ({'dataset': None}, '--dataset'),
    ({'shots': ()}, 'pass --shots, --linear or --knn'),
    ({'shots': (0,)}, r'fewshot.shots=\(0,\) must be'),
    ({'shots': (), 'knn': (31,), 'train': 'train[:30]'}, 'knn=31 .* 30 .*--knn'),
    ({'train': 'train[:30]', 'shots': (1, 25)}, r'shots=25 .* \d examples .*--shots'),
  ],
)
def test_wrong_arguments(model, mesh, options, message):
  with pytest.raises(ValueError, match=message):
    probe.probe(model, mesh, **{'dataset': 'digits', **options})


def test_default_shots_fit_the_smallest_class(model, mesh, monkeypatch, capsys):
  monkeypatch.setattr(solvers, 'L2', (1e-1,))
  splits = {'train': 'train[:60]', 'test': 'test[:30]'}
  result = probe.probe(model, mesh, linear=True, dataset='digits', **splits)
  [row] = result['fewshot']
  assert row['shots'] == 1
  assert result['linear'] is not None
  assert re.search(
    r'has only \d training images: no probes with 5, 10, 25', capsys.readouterr().out
  )


def test_a_missing_data_dir_is_named():
  with pytest.raises(ValueError, match="tfds_data_dir='/no/such'"):
    probe_command.main(['--workdir=/tmp/run', '--tfds_data_dir=/no/such'])


def test_a_run_probes_itself_in_its_first_evaluation(tiny_config, tmp_path):
  labels = tmp_path / 'real.json'
  labels.write_text('[[1]]')
  tiny_config.fewshot.update(shots=(2,), knn=(3,))
  tiny_config.evals = (('val', 'train[:20]'), ('test', 'test'))
  tiny_config.best_metric = 'fewshot_2_val'
  prepared = train.prepare(tiny_config)
  probes, test = prepared.evaluators['val'], prepared.evaluators['test']
  assert [type(x).__name__ for x in probes] == ['Pass', 'FewShot']
  assert [type(x).__name__ for x in test] == ['Pass']
  assert not run_evaluators.is_low(prepared.config)
  tiny_config.best_metric = 'fewshot_5_val'
  with pytest.raises(ValueError, match="use one of .*'fewshot_2_val', 'knn_3_val'"):
    train.prepare(tiny_config)
  tiny_config.best_metric = 'accuracy_real_val'
  tiny_config.real_labels = str(labels)
  with pytest.raises(ValueError, match="real='.* 1 images.*'train'.* 1,437"):  # fmt: skip
    train.prepare(tiny_config)
