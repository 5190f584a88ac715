"""Tests of the description of classes at the start of a run."""

import copy
import re

import numpy as np
import pytest
from sklearn import datasets as sklearn_datasets

from tests import conftest
from vit_jax import console, train
from vit_jax.data import class_counts

NAMES = ('ant', 'bee', 'cow')
TRAIN = np.array([[0, -1], [1, 2], [2, -1], [-1, -1]])


def test_counts_by_class():
  assert class_counts.count(TRAIN, 3).tolist() == [1, 1, 2]
  [text] = class_counts.describe(TRAIN, {'test': TRAIN[:1]}, NAMES)
  assert 'ant 1 + 1, bee 1 + 0, cow 2 + 0' in text
  many = np.arange(100)[:, None]
  [text] = class_counts.describe(
    many, {'val': np.repeat(many[:50], 7, axis=0)}, [*map(str, range(100))]
  )
  assert "100 classes: 1 to 1 (train), 0 to 7 (evaluation 'val')" in text
  [text] = class_counts.describe(None, {'test': TRAIN}, NAMES)
  assert "class, evaluation 'test': ant 1, bee 1, cow 2" in text
  assert not [*class_counts.describe(None, {}, NAMES)]


def test_warnings():
  enough = np.repeat(np.arange(3), 10)[:, None]
  warnings = class_counts.warnings
  assert not [*warnings(enough, {'test': enough}, NAMES, 'softmax')]
  [line] = warnings(enough, {'test': enough[:-1]}, NAMES, 'softmax')
  assert '1 of 3 classes (cow 9)' in line
  assert '--folds' in line
  [line] = warnings(TRAIN, {}, NAMES, 'softmax')
  assert '1 of 4 training images have several labels' in line
  assert '--config.loss=sigmoid' in line
  assert not [*warnings(TRAIN, {}, NAMES, 'sigmoid')]
  [line] = warnings(None, {'test': enough[:-1]}, NAMES, 'softmax')
  assert '1 of 3 classes (cow 9)' in line


@pytest.fixture
def config(tmp_path):
  config = conftest.make_tiny_config(None)
  config.dataset = str(conftest.make_folder(tmp_path / 'images', (12, 3)))
  config.pp.update(channels=3)
  config.update(batch=8, batch_eval=8)
  return config


def test_start_of_a_run_says_the_counts(config, capsys):
  train._describe(train.prepare(config))
  output = capsys.readouterr().out
  assert 'ant 12 + 3, bee 12 + 3, cow 12 + 3' in output
  assert "Evaluation 'test' has fewer than 10 images of 3 of 3 classes" in output


def test_runs_of_a_study_say_the_counts_once(config, capsys):
  prepared, logged = train.prepare(config), set()
  for _ in range(2):
    with console.muted(logged):
      train._describe(prepared)
  first, second = capsys.readouterr().out.splitlines()
  assert 'ant 12 + 3' in first
  assert 'fewer than 10 images' in second


def test_classes_of_mixtures_and_tfds_are_counted(config, tiny_config, capsys):
  config.dataset = ((config.dataset, 0.9), (config.dataset, 0.1))
  train._describe(train.prepare(config))
  assert 'ant 24 + 3, bee 24 + 3' in capsys.readouterr().out
  train._describe(train.prepare(tiny_config))
  target = sklearn_datasets.load_digits().target
  output = capsys.readouterr().out
  counts = re.search(r"evaluation 'test': (.*)\.\n", output)[1]
  totals = [sum(map(int, re.findall(r'\d+', text)[1:])) for text in counts.split(', ')]
  assert totals == np.bincount(target).tolist()


def test_one_class_is_rejected(config, tmp_path):
  for name in ('bee', 'cow'):
    for path in (tmp_path / 'images').glob(f'*/{name}'):
      path.rename(tmp_path / f'{path.parent.name}_{name}')
  with pytest.raises(ValueError, match="only the class 'ant'.*--config.loss=sigmoid"):
    train.prepare(copy.deepcopy(config))
  config.loss = 'sigmoid'
  train.prepare(config)
