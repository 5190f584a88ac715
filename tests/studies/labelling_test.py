"""Tests of which images get pseudo-labels, and how many per class."""

import types

from etils import epath
import numpy as np
import pytest

from vit_jax.data import pseudo_labels
from vit_jax.studies import labelling

TASK = types.SimpleNamespace(class_names=('a', 'b', 'c'), exclusive=True)


def write(path, confidence):
  found = {
    'classes': np.array([[1, 0], [0, 1], [2, 1], [1, 2]]),
    'probabilities': np.array([[0.9, 0.1], [0.3, 0.3], [0.29, 0.2], [0.31, 0.3]]),
  }
  settings = {
    'teacher': '/run', 'dataset': 'd', 'split': 's', 'soft': True,
    'images': {'num_examples': 4}, 'confidence': confidence, 'per_class': None,
    'seed': 0,
  }  # fmt: skip
  labelling.write_labels(epath.Path(path), settings, TASK, found)


def test_confident_labels_are_kept(tmp_path):
  write(tmp_path, 0.3)
  with np.load(tmp_path / pseudo_labels.ARRAYS) as found:
    assert found['images'].tolist() == [0, 1, 3]
    assert found['classes'].tolist() == [[1, 0], [0, 1], [1, 2]]
    assert found['probabilities'].tolist() == [[0.9, 0.1], [0.3, 0.3], [0.31, 0.3]]
  counts = pseudo_labels.read_facts(tmp_path)['counts']
  assert counts == {'images': 4, 'by_class': [1, 2, 0], 'examples': 3}


def test_no_confident_labels(tmp_path):
  with pytest.raises(ValueError, match=r'confidence=0\.95.* 0\.900'):
    write(tmp_path, 0.95)
  assert not pseudo_labels.exists(tmp_path)


def test_balances_the_number_of_images_per_class():
  """Class 0 has too many, 1 enough, 2 too few, 3 none, 4 one."""
  classes = np.array([0, 2, 0, 1, 0, 1, 2, 0, 1, 4, 0])
  confidence = np.array([0.5, 0.9, 0.8, 0.7, 0.6, 0.7, 0.4, 0.9, 0.3, 0.5, 0.6])
  rows = labelling.balance(classes, confidence, 3, seed=0)
  # The most confident images; among equals, the first.
  assert rows[:3].tolist() == [7, 2, 4]
  assert rows[3:6].tolist() == [3, 5, 8]
  # Each once, and a random one again.
  assert rows[6:8].tolist() == [1, 6]
  assert rows[8] in (1, 6)
  assert rows[9:].tolist() == [9, 9, 9]
  balanced = [labelling.balance(classes, confidence, 3, seed) for seed in range(20)]
  np.testing.assert_array_equal(rows, balanced[0])
  assert len({tuple(rows[6:9]) for rows in balanced}) == 2
  # Without a number per class, every image is used once.
  rows = labelling.balance(np.array([1, 0, 1]), np.ones(3), None, seed=0)
  assert rows.tolist() == [0, 1, 2]
