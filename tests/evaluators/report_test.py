"""Tests of the report of a classifier that is not trained, on a folder of three classes."""

import csv
import json
import pickle

import jax
import numpy as np
import pandas as pd
import pytest
from sklearn import metrics

from tests import conftest
from vit_jax import predict
from vit_jax.commands import evaluate as command
from vit_jax.distributed import sharding
from vit_jax.evaluators import calibration, evaluation, report_files
from vit_jax.run import config as run_config, evaluators as run_evaluators

NAMES = ['ant', 'bee', 'cow']
REPORT = {'type': 'vit_jax.evaluators.report:Report'}


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """A run whose test split has 10 images of each class but 'cow', which has 3."""
  folder = tmp_path_factory.mktemp('report')
  data = conftest.make_folder(folder / 'data', (10, 10))
  for path in sorted((data / 'test' / 'cow').iterdir())[3:]:
    path.unlink()
  config = conftest.make_tiny_config(None)
  config.dataset = str(data)
  config.pp.train = 'train[:50%]'
  config.batch_eval = 16  # The last batch is padded.
  return conftest.write_classifier(folder / 'run', config, NAMES)


def read_csv(path):
  with open(path) as file:
    return list(csv.reader(file))


def test_report_and_predictions_agree_with_scikit_learn(workdir, tmp_path, capsys):
  mesh = sharding.make_mesh({'data': 8})
  model = predict.load(str(workdir), mesh=mesh)
  table = tmp_path / 'rows.csv'
  evaluation.evaluate(
    model, 'test', report=str(tmp_path / 'report'), predictions=str(table)
  )
  printed = capsys.readouterr().out
  header, *rows = read_csv(table)
  assert header == [
    'image',
    'label',
    'predicted',
    *(f'probability of {x}' for x in NAMES),
  ]
  assert len({row[0] for row in rows}) == len(rows) == 23  # Each image once.
  assert all(row[0].split('/')[-2] == row[1] for row in rows)
  true, best = [row[1] for row in rows], [row[2] for row in rows]
  probabilities = np.array([row[3:] for row in rows], float)  # Of 7 digits.
  probabilities /= probabilities.sum(axis=1, keepdims=True)
  report = json.loads((tmp_path / 'report' / 'report.json').read_text())
  overall = report['overall']
  want = {
    'balanced_accuracy': metrics.recall_score(true, best, average='macro'),
    'macro_f1': metrics.f1_score(true, best, average='macro'),
    'weighted_f1': metrics.f1_score(true, best, average='weighted'),
    'kappa': metrics.cohen_kappa_score(true, best),
    'log_loss': metrics.log_loss(true, probabilities),
    'auroc': metrics.roc_auc_score(true, probabilities, multi_class='ovr'),
  }
  for name, value in want.items():
    np.testing.assert_allclose(overall[name], value, atol=1e-6, err_msg=name)
  assert report['num_examples'] == 23
  assert report['split'] == 'test'
  lines = read_csv(tmp_path / 'report' / 'report.csv')
  assert [line[-1] for line in lines] == ['support', '10', '10', '3']
  confusion = np.array(read_csv(tmp_path / 'report' / 'confusion.csv'))
  want = metrics.confusion_matrix(true, best, labels=NAMES)
  assert confusion[1:, 1:].astype(int).tolist() == want.tolist()
  for name in ('confusion.png', 'reliability.png'):
    assert (tmp_path / 'report' / name).read_bytes().startswith(b'\x89PNG')
  assert '| cow ' in printed
  assert '| macro mean ' in printed
  assert 'kappa' in printed


def test_a_class_without_test_images_is_reported_in_words(workdir, tmp_path, capsys):
  (tmp_path / 'test.jsonl').write_text('')
  data = workdir.parent / 'data'
  lines = []
  for name in NAMES[:2]:
    path = str(next((data / 'test' / name).iterdir()))
    lines.append(json.dumps({'image': path, 'label': name}))
  (tmp_path / 'classes.json').write_text(json.dumps(NAMES))
  (tmp_path / 'test.jsonl').write_text('\n'.join(lines))
  evaluation.evaluate(
    predict.load(str(workdir)), 'test', str(tmp_path), report=str(tmp_path / 'report')
  )
  printed = capsys.readouterr().out
  assert 'No test images of 1 class: cow.' in printed
  assert 'nan' not in printed
  report = json.loads((tmp_path / 'report' / 'report.json').read_text())
  assert report['classes']['cow']['recall'] is None


def test_calibration_is_stored_and_used(workdir, monkeypatch, capsys):
  monkeypatch.setattr(calibration, 'fit', lambda *args: 1.75)
  before = predict.load(str(workdir))
  path = str(next((workdir.parent / 'data' / 'test' / 'ant').iterdir()))
  argv = [f'--workdir={workdir}', '--split=test', '--calibrate=train[50%:]']
  command.main([*argv, '--nodistributed'])
  assert 'temperature' in capsys.readouterr().out
  after = predict.load(str(workdir))
  assert 'Probabilities are calibrated: temperature' in capsys.readouterr().err
  logits = before.logits([path])
  np.testing.assert_array_equal(after.logits([path]), logits)
  assert after.task.temperature == 1.75
  want = jax.nn.softmax(logits / 1.75)
  for model in (after, pickle.loads(pickle.dumps(after))):
    np.testing.assert_allclose(model.probabilities([path]), want, rtol=1e-5)
  (workdir / 'calibration.json').unlink()
  for split in ('train[:50%]', 'test+train[40%:60%]'):
    with pytest.raises(ValueError, match=r'calibrate=.* overlaps with pp\.train='):
      evaluation.calibrated(before, split)


def test_metrics_of_a_report_can_be_the_best(tiny_config):
  config = run_config.complete(tiny_config)
  config.evaluators = {'report': {**REPORT, 'classes': ('3', '7')}}
  kinds = run_evaluators.metrics_of(config)
  for name in kinds:
    config.best_metric = name
    run_evaluators.check(config)
    is_low = name in ('loss_test', 'log_loss_test', 'ece_test')
    assert run_evaluators.is_low(config) == is_low
  assert kinds['recall_7_test'].unit == '%'
  config.loss = 'sigmoid'
  names = [*run_evaluators.metrics_of(config)]
  assert 'macro_recall_test' in names
  assert 'kappa_test' not in names


def test_wrong_uses_are_named_before_anything_is_computed(
  workdir, tiny_config, tmp_path
):
  model = predict.load(str(workdir))
  file = tmp_path / 'file.csv'
  file.touch()
  for flag, path, error in (
    (
      'predictions',
      tmp_path / 'none/rows.csv',
      "folder '.*none' does not exist: create",
    ),
    ('predictions', file / 'rows.csv', "folder '.*file.csv' does not exist: create"),
    ('report', file, 'is a file: pass a folder'),
    ('report', file / 'report', 'cannot be written: Not a directory; pass'),
  ):
    with pytest.raises((ValueError, OSError), match=f"{flag}='{path}'.*{error}"):
      evaluation.evaluate(model, 'test', **{flag: str(path)})
  assert [*tmp_path.iterdir()] == [file]
  with pytest.raises(ValueError, match="predictions='rows.txt' must end with .csv"):
    evaluation.evaluate(model, 'test', predictions='rows.txt')
  with pytest.raises(ValueError, match="'dog' is not one of the classes"):
    evaluation.evaluate(
      model, 'test', evaluators={'r': {**REPORT, 'classes': ('dog',)}}
    )
  config = run_config.complete(tiny_config)
  config.task = 'masked_patches'
  with pytest.raises(ValueError, match="'masked_patches' has no report"):
    run_evaluators.report(config)


def test_a_first_image_without_a_value_leaves_the_type_to_others(tmp_path):
  rows = [{'image': 'a', 'miou': None}, {'image': 'b', 'miou': 0.25}]
  report_files.write_predictions(tmp_path / 'table.parquet', rows)
  assert pd.read_parquet(tmp_path / 'table.parquet').miou.tolist()[1:] == [0.25]
