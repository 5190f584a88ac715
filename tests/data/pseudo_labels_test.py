"""Tests of pseudo-labels as a data set, with and without labelled images."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests import looked_up
from vit_jax import input_pipeline
from vit_jax.configs import common
from vit_jax.data import order, pseudo_labels, records, sources

NAMES = ('ant', 'bee', 'cow')
# Three labelled images; the second is repeated.
ARRAYS = {
  'images': np.array([2, 5, 7]),
  'classes': np.array([[1, 0, 2], [2, 1, 0], [0, 1, 2]], np.int32),
  'probabilities': np.float32([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25], [1, 0, 0]]),
  'rows': np.array([1, 0, 1, 2]),
}
SOFT = [[0.2, 0.7, 0.1], [0.25, 0.35, 0.4], [1, 0, 0]]


def write(root, config, **changes):
  """Writes the pseudo-labels above for the training images of a folder."""
  images = sources.open_split(
    config, 'train', ('image',), dataset=changes.get('dataset')
  )
  facts = {
    'dataset': config.dataset, 'split': 'train', 'images': images.fingerprint(),
    'class_names': list(NAMES), 'soft': True, 'exclusive': True, **changes,
  }  # fmt: skip
  pseudo_labels.write(root, ARRAYS, facts)
  return images


@pytest.fixture
def config(image_folder):
  config = common.set_dataset(common.get_config(), str(image_folder))
  config.pp.update(crop=8)
  config.batch = 8
  return config


def test_images_and_labels_match_the_rows(config, tmp_path):
  images = write(tmp_path, config)
  source = sources.open_split(
    config, 'train', ('image', 'label', 'soft_label?'), dataset=str(tmp_path)
  )
  assert source.num_examples == 4
  assert source.class_names == NAMES
  got = looked_up.features(source, [0, 3, 1, 2])
  assert got['image'] == looked_up.features(images, [5, 7, 2, 5])['image']
  np.testing.assert_array_equal(got['label'], [[2], [0], [1], [2]])
  np.testing.assert_allclose(got['soft_label'], [SOFT[1], SOFT[2], SOFT[0], SOFT[1]])
  assert source.name(3) == images.name(7)


def test_hard_labels_have_no_soft_label(config, tmp_path):
  write(tmp_path, config, soft=False)
  wanted = 'image', 'label', 'soft_label?'
  source = sources.open_split(config, 'train', wanted, dataset=str(tmp_path))
  assert source.features == ('image', 'label')


def test_remaining_probability_is_spread_over_the_other_classes():
  facts = {
    'class_names': list('abcde'), 'soft': True, 'exclusive': True, 'digest': '',
    'images': {},
  }  # fmt: skip
  images = records.MemorySource({'image': ['x', 'y']}, {})
  arrays = {
    'images': np.arange(2), 'rows': np.arange(2),
    'classes': np.int32([[3, 0], [1, 2]]),
    'probabilities': np.float32([[0.5, 0.2], [0.9, 0.1]]),
  }  # fmt: skip

  def soft(**changes):
    source = pseudo_labels.PseudoSource(
      images, arrays, {**facts, **changes}, ('soft_label',), 'x'
    )
    return source.lookup(tf.constant([0, 1], tf.int64))['soft_label']

  np.testing.assert_allclose(
    soft(), [[0.2, 0.1, 0.1, 0.5, 0.1], [0, 0.9, 0.1, 0, 0]], atol=1e-7
  )
  # For classes that are not exclusive, nothing remains.
  np.testing.assert_allclose(soft(exclusive=False)[0], [0.2, 0, 0, 0.5, 0])


def test_batches_mix_labelled_and_pseudo_labelled_images(config, tmp_path):
  """Each batch has the configured ratio, and each image its own label."""
  write(tmp_path, config)
  folder = config.dataset
  config.dataset = ((folder, 1.0), (str(tmp_path), 3.0))
  source = sources.open_split(config, 'train', ('image', 'label', 'soft_label?'))
  assert source.num_examples == 33 + 4
  example = input_pipeline.labelled_example(config, 3)
  data = input_pipeline.train_dataset(config, source, example, np.arange(8))
  batches = data.take(3).as_numpy_iterator()
  numbers = order.training_indices(source, np.arange(24), config.seed)
  labels = source.parts[0].lookup(tf.range(33, dtype=tf.int64))['label'].numpy()
  for batch, index in zip(batches, numbers.reshape(3, 8)):
    pseudo = index >= 33
    assert pseudo.sum() == 6  # Ratio 3: 2 of 8 images are labelled.
    rows = ARRAYS['rows'][index[pseudo] - 33]
    np.testing.assert_allclose(
      batch['label'][pseudo], np.float32(SOFT)[rows], rtol=1e-6
    )
    np.testing.assert_array_equal(
      batch['label'][~pseudo], np.eye(3)[labels[index[~pseudo], 0]]
    )
  # Evaluation reads the labelled images.
  assert sources.open_split(config, 'test').num_examples == 9


def test_pseudo_labels_for_other_classes_are_rejected(config, tmp_path):
  write(tmp_path, config, class_names=['ant', 'bee', 'dog'])
  folder = config.dataset
  config.dataset = ((folder, 1.0), (str(tmp_path), 3.0))
  with pytest.raises(ValueError, match="'bee', 'dog'.*config.dataset"):
    sources.open_split(config, 'train')
  with pytest.raises(ValueError, match=r"'bee', 'dog'.*3, \['ant', 'bee', 'cow'\]"):
    sources.open_split(config, 'train', class_names=NAMES, dataset=str(tmp_path))


def test_pseudo_labels_for_other_images_are_rejected(config, tmp_path):
  write(tmp_path, config)
  file = tmp_path / pseudo_labels.JSON
  facts = json.loads(file.read_text())
  with pytest.raises(ValueError, match="evaluate split 'test'"):
    sources.open_split(config, 'test', dataset=str(tmp_path))
  file.write_text(json.dumps({**facts, 'split': 'test'}))
  with pytest.raises(ValueError, match="split 'test', have changed"):
    sources.open_split(config, 'train', dataset=str(tmp_path))


def test_damaged_labels_are_rejected(config, tmp_path):
  write(tmp_path, config)
  changed = {**ARRAYS, 'rows': ARRAYS['rows'][::-1]}
  np.savez(tmp_path / pseudo_labels.ARRAYS, **changed)  # From a different labelling.
  with pytest.raises(ValueError, match="npz' or .* is damaged: .* label the images"):
    sources.open_split(config, 'train', dataset=str(tmp_path))
  write(tmp_path, config)
  file = tmp_path / pseudo_labels.JSON
  for text, changed in (('"cow"', '"cov"'), ('"soft": true', '"soft": false')):
    content = file.read_text()
    file.write_text(content.replace(text, changed))
    with pytest.raises(ValueError, match=f'{pseudo_labels.JSON} is damaged'):
      sources.open_split(config, 'train', dataset=str(tmp_path))
    file.write_text(content)
  file.write_bytes(b'{"dataset": "x", "sp')
  with pytest.raises(ValueError, match=f"{pseudo_labels.JSON}' is damaged"):
    sources.open_split(config, 'train', dataset=str(tmp_path))
