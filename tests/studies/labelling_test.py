"""Tests of which images get pseudo-labels, and how many of each class."""

import types

import numpy as np
import pytest

from vit_jax.data import pseudo_labels, records
from vit_jax.studies import labelling


def test_confident_labels_are_kept():
  found = labelling.confident(
    {
      'classes': np.array([[1, 0], [0, 1], [2, 1], [1, 2]]),
      'probabilities': np.array([[0.9, 0.1], [0.3, 0.3], [0.29, 0.2], [0.31, 0.3]]),
    },
    begin=100,
    confidence=0.3,
  )  # fmt: skip
  assert found['images'].tolist() == [100, 101, 103]
  assert found['classes'].tolist() == [[1, 0], [0, 1], [1, 2]]
  assert found['probabilities'].tolist() == [
    [0.9, 0.1],
    [0.3, 0.3],
    [0.31, 0.3],
  ]
  assert found['highest'] == 0.9


def test_every_class_has_as_many_images():
  """Class 0 has too many, 1 enough, 2 too few, 3 none, 4 one."""
  classes = np.array([0, 2, 0, 1, 0, 1, 2, 0, 1, 4, 0])
  confidence = np.array([0.5, 0.9, 0.8, 0.7, 0.6, 0.7, 0.4, 0.9, 0.3, 0.5, 0.6])
  rows = labelling.balance(classes, confidence, 3, seed=0)
  assert rows[:3].tolist() == [
    7,
    2,
    4,
  ]  # The most confident ones; the first of equal ones.
  assert rows[3:6].tolist() == [3, 5, 8]
  # Each once, and a random one of them once more.
  assert rows[6:8].tolist() == [1, 6]
  assert rows[8] in (1, 6)
  assert rows[9:].tolist() == [9, 9, 9]
  np.testing.assert_array_equal(rows, labelling.balance(classes, confidence, 3, seed=0))
  lots = {
    tuple(labelling.balance(classes, confidence, 3, seed=seed)[6:9])
    for seed in range(20)
  }
  assert len(lots) == 2


def test_without_a_number_every_image_is_used_once():
  rows = labelling.balance(np.array([1, 0, 1]), np.ones(3), None, seed=0)
  assert rows.tolist() == [0, 1, 2]


def test_damage_of_an_interrupted_labelling_is_named(tmp_path):
  source = records.MemorySource({'image': [b'x']}, {})
  for content in (b'{"teach', b'[1]', b'\xff'):
    (tmp_path / 'settings.json').write_bytes(content)
    with pytest.raises(ValueError, match="settings.json' is damaged: .* delete"):
      labelling._begin(tmp_path, {}, source)
  block = labelling._block(tmp_path, 0)
  pseudo_labels.write_arrays(block, {'images': np.arange(9), 'classes': [1]})
  whole = block.read_bytes()
  for content in (whole, whole[:99], b'', whole.replace(b'images', b'imagfs')):
    block.write_bytes(content)
    with pytest.raises(ValueError, match="0.npz' is damaged: .*label these"):
      labelling._finish(tmp_path, {}, None)


def test_no_confident_label_at_all(tmp_path):
  for begin, highest in ((0, 0.7), (500, 0.8)):
    found = {
      'classes': np.int32([[0], [1]]), 'probabilities': np.array([[0.1], [highest]]),
    }  # fmt: skip
    empty = labelling.confident(found, begin, 0.9)
    pseudo_labels.write_arrays(labelling._block(tmp_path, begin), empty)
  task = types.SimpleNamespace(class_names=('a', 'b'))
  asked = {'teacher': '/run', 'confidence': 0.9}
  with pytest.raises(ValueError, match=r'confidence=0\.9.* 0\.800'):
    labelling._finish(tmp_path, asked, task)
  assert not pseudo_labels.exists(tmp_path)
