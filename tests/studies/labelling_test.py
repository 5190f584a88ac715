"""Tests of which images get pseudo-labels, and how many of each class."""

import types

import jax
import numpy as np
import pytest
from scipy import special

from tests import tiny_models
from vit_jax.data import pseudo_labels, records
from vit_jax.data.images import images
from vit_jax.distributed import sharding
from vit_jax.run import config as run_config
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


def test_soft_labels_of_the_most_probable_classes(tiny_config, tmp_path, monkeypatch):
  """32 of 40."""
  tiny_config.pp.channels = 3
  tiny_config.batch_eval = 8
  config = run_config.complete(tiny_config)
  names = [str(i) for i in range(40)]
  task = run_config.get_task('classify')(config, {'class_names': names})
  params = tiny_models.numbers(task.model, 8)
  model = types.SimpleNamespace(config=config, task=task, params=params, extra={})
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  monkeypatch.setattr(labelling, 'load_teacher', lambda _: (model, mesh))
  pixels = np.random.RandomState(0).randint(0, 256, (5, 8, 8, 3), np.uint8)
  source = records.MemorySource({'image': [images.encode_png(x) for x in pixels]}, {})
  logits = task.model.apply(
    {'params': params}, pixels / np.float32(127.5) - 1, train=False
  )
  want = special.softmax(np.asarray(logits), axis=1)
  settings = labelling.Settings('/run', 'photos', 'train', 0.0, None, True, 0, 32)
  folder = tmp_path / 'labels'
  labelling.label(settings, source, str(folder), 8)
  with np.load(folder / pseudo_labels.ARRAYS) as arrays:
    classes, found = arrays['classes'], arrays['probabilities']
  assert classes.shape == (5, 32)
  np.testing.assert_allclose(np.take_along_axis(want, classes, 1), found, atol=1e-5)
  np.testing.assert_allclose(found, -np.sort(-want)[:, :32], atol=1e-5)
  with pytest.raises(ValueError, match='soft_classes: 32 there, None here'):
    labelling.label(settings._replace(soft_classes=None), source, str(folder), 8)


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
