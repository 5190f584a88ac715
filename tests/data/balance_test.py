"""Tests of balanced sampling: counts of classes, permutations, labels of all sources."""

import json

import numpy as np
import pytest

from tests import looked_up
from vit_jax import input_pipeline, train
from vit_jax.data import balance, order as order_lib, records, sources
from vit_jax.data.images import images as images_lib
from vit_jax.data.tfds import shards
from vit_jax.run import config as run_config

COUNTS = np.array([500, 30, 7, 1])
CLASSES = np.random.default_rng(0).permutation(np.repeat(np.arange(4), COUNTS))


@pytest.fixture
def order():
  return balance.Order(CLASSES, COUNTS)


def test_each_round_has_every_class_once(order):
  numbers = order(np.arange(4 * 1000), 3)
  rounds = CLASSES[numbers].reshape(-1, 4)
  assert (np.sort(rounds) == np.arange(4)).all()
  # All orders of four classes occur equally often: 1000 / 24 each.
  _, counts = np.unique(rounds, axis=0, return_counts=True)
  assert len(counts) == 24
  assert (
    (counts - 1000 / 24) ** 2 / (1000 / 24)
  ).sum() < 50  # p = .001 of chi-squared.


def test_every_example_of_a_class_is_seen_before_any_repeats(order):
  numbers = order(np.arange(4 * 1000), 3)
  for i, count in enumerate(COUNTS):
    epochs = numbers[CLASSES[numbers] == i][: 1000 // count * count].reshape(-1, count)
    assert (np.sort(epochs) == np.flatnonzero(CLASSES == i)).all()
    if count > 1:
      assert len(set(map(tuple, epochs))) == len(epochs) if count > 7 else 2


def test_the_order_is_a_function_of_position_and_seed(order):
  numbers = order(np.arange(4000), 3)
  for rows in (range(2000, 4000), range(0, 4000, 7), [3999]):
    np.testing.assert_array_equal(order(np.array(rows), 3), numbers[list(rows)])
  far = order(np.arange(2**60, 2**60 + 64), 3)
  assert np.bincount(CLASSES[far]).tolist() == [16, 16, 16, 16]
  for seed in (4, 3 + 2**32, 2**63 - 1):
    assert (order(np.arange(4000), seed) != numbers).mean() > 0.5


@pytest.mark.parametrize('size', [1, 2, 3, 5])
def test_small_permutations_are_uniform(size):
  keys = np.arange(24_000, dtype=np.uint64)
  columns = [
    balance.permuted(np.full(24_000, i), np.full(24_000, size), keys)
    for i in range(size)
  ]
  orders, counts = np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)
  assert (np.sort(orders) == np.arange(size)).all()
  expected = 24_000 / len(counts)
  chi2 = ((counts - expected) ** 2 / expected).sum()
  assert len(counts) == [1, 1, 2, 6, 24, 120][size]
  assert chi2 < len(counts) + 4 * np.sqrt(2 * len(counts))


def test_large_permutation_is_uniform():
  n = 14_100_000
  places = np.arange(40_000)
  numbers = balance.permuted(places, np.full(40_000, n), np.full(40_000, 7, np.uint64))
  assert len(set(numbers.tolist())) == 40_000
  counts = np.bincount(numbers * 1000 // n, minlength=1000)
  assert ((counts - 40) ** 2 / 40).sum() < 1200  # p = 2e-5 of chi-squared.
  assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02


def folder(path, counts):
  """Writes a folder of classes of grey 8x8 images; returns its path."""
  png = images_lib.encode_png(np.zeros((8, 8, 3), np.uint8))
  for name, count in counts.items():
    (path / 'train' / name).mkdir(parents=True)
    for i in range(count):
      (path / 'train' / name / f'{i}.png').write_bytes(png)
  return str(path)


@pytest.fixture
def config(tiny_config, tmp_path):
  """A complete config of a folder with 12 ants and 4 bees."""
  config = run_config.complete(tiny_config)
  config.dataset = folder(tmp_path / 'data', {'ant': 12, 'bee': 4})
  config.update(sampling='balanced', batch=8)
  config.pp.test = 'train'
  return config


def labels_of(config, source, count, rows=None, start=0):
  """Returns the labels of balanced batches."""
  source = balance.balanced(source, balance.labels(config, source))
  rows = np.arange(config.batch) if rows is None else rows
  example = input_pipeline.labelled_example(config, len(source.class_names))
  data = input_pipeline.train_dataset(config, source, example, rows, start)
  return [batch['label'].argmax(1) for batch in data.take(count).as_numpy_iterator()]


def test_batches_are_balanced_and_independent_of_hosts(config):
  source = sources.open_split(config, 'train')
  batches = labels_of(config, source, 6)
  assert [labels.sum() for labels in batches] == 6 * [4]
  for rows in (np.arange(4), np.arange(4, 8)):
    resumed = labels_of(config, source, 3, rows, 3)
    np.testing.assert_array_equal(resumed, [batch[rows] for batch in batches[3:]])
  data, _ = input_pipeline.get_datasets(config.copy_and_resolve_references())
  public = [x['label'].argmax(1) for x in data.take(6).as_numpy_iterator()]
  np.testing.assert_array_equal(public, batches)


def test_errors_name_the_example_that_was_drawn(config):
  source = sources.open_split(config, 'train')
  source = balance.balanced(source, balance.labels(config, source))
  numbers = order_lib.training_indices(source, np.arange(16), config.seed)
  np.testing.assert_array_equal(numbers, source.order(np.arange(16), config.seed))


def test_uniform_sampling_is_the_default(config):
  assert run_config.complete(config).sampling == 'balanced'
  assert sources.open_split(config, 'train').order is None


@pytest.fixture
def large(monkeypatch):
  """Treats all data sets of TFDS as large."""
  monkeypatch.setattr(shards, 'LABELLED_BYTES', 0)


def test_labels_of_a_small_data_set_are_known(tiny_config):
  source = sources.open_split(tiny_config, 'train[10:60]+test')
  labels = looked_up.features(source)['label']
  assert source.labels().tolist() == [label.tolist() for label in labels]


def test_labels_of_a_data_set_are_read_once(tiny_config, tmp_path, large):
  config = run_config.complete(tiny_config)
  source = sources.open_split(config, 'train')
  assert source.labels() is None
  numbers = balance.labels(config, source, tmp_path)
  want = [label.tolist() for label in looked_up.features(source)['label']]
  assert numbers.tolist() == want
  balance.store(source, numbers, tmp_path)
  config.pp.train = 'nothing'  # The data are not opened again.
  assert balance.labels(config, source, tmp_path).tolist() == want
  config.pp.train = 'train'
  path = tmp_path / 'labels.npz'
  digest = np.load(path)['digest']
  np.savez(path, labels=numbers[::-1], digest=digest)
  assert balance.labels(config, source, tmp_path).tolist() == want
  path.write_bytes(b'\x93NUMPY damaged')
  assert balance.labels(config, source, tmp_path).tolist() == want


def test_labels_of_other_data_are_replaced(tiny_config, tmp_path, large):
  """A workdir without a checkpoint may belong to a run on other data."""
  config = run_config.complete(tiny_config)
  first = sources.open_split(config, 'train[:50]')
  balance.store(first, balance.labels(config, first), tmp_path)
  config.pp.train = 'train[50:100]'
  source = sources.open_split(config, config.pp.train)
  numbers = balance.labels(config, source, tmp_path)
  want = [label.tolist() for label in looked_up.features(source)['label']]
  assert numbers.tolist() == want
  balance.store(source, numbers, tmp_path)
  assert np.load(tmp_path / 'labels.npz')['labels'].tolist() == want


def test_labels_of_parquet(config, tmp_path):
  pa = pytest.importorskip('pyarrow')
  parquet = pytest.importorskip('pyarrow.parquet')
  png = images_lib.encode_png(np.zeros((8, 8, 3), np.uint8))
  columns = {'image': 5 * [{'bytes': png}], 'label': ['b', 'a', None, 'b', 'b']}
  (tmp_path / 'tables').mkdir()
  parquet.write_table(pa.table(columns), tmp_path / 'tables' / 'train.parquet')
  config.dataset = str(tmp_path / 'tables')
  source = sources.open_split(config, 'train')
  numbers = balance.labels(config, source)
  assert sorted(numbers[:, 0].tolist()) == [-1, 0, 1, 1, 1]
  drawn = balance.balanced(source, numbers).order(np.arange(8), 0)
  assert np.bincount(numbers[drawn, 0]).tolist() == [4, 4]


def memory(labels, names):
  return records.MemorySource({'label': np.array(labels)}, {'label': names})


def test_what_cannot_be_balanced(config):
  numbers = np.array([[0, -1], [0, 1]])
  with pytest.raises(ValueError, match="'example 1' has 2.*class_weights=balanced"):
    balance.balanced(memory(numbers, 'ab'), numbers)
  with pytest.raises(ValueError, match="no example of class 'c' .1 of 3"):
    balance.balanced(memory(numbers[:1], 'abc'), np.array([[0], [1]]))
  images = records.MemorySource({'image': [b'']}, {})
  with pytest.raises(ValueError, match='no class labels.*config.sampling'):
    balance.labels(config, images)
  config.dataset = ((config.dataset, 0.5), (config.dataset, 0.5))
  mixture = sources.open_split(config, config.pp.train)
  with pytest.raises(ValueError, match='mixture.*one data set'):
    balance.labels(config, mixture)


def test_labels_of_a_manifest_with_several_per_image(config, tmp_path):
  path = tmp_path / 'data' / 'train.jsonl'
  image = 'train/ant/0.png'
  lines = [{'image': image, 'label': label} for label in (['a', 'b'], ['b'], [])]
  path.write_text('\n'.join(map(json.dumps, lines)))
  source = sources.open_split(config, 'train')
  numbers = balance.labels(config, source)
  assert balance.counts(numbers, source.class_names).tolist() == [1, 2]


def test_a_run_counts_its_classes(config):
  config.update(sampling='uniform', class_weights='balanced')
  prepared = train.prepare(config)
  assert prepared.train.order is None
  assert prepared.program.task.metadata['class_counts'] == [12, 4]
  assert 'class_counts' not in prepared.metadata  # Trained models do not need it.
  config.update(sampling='balanced', class_weights=None)
  prepared = train.prepare(config)
  assert isinstance(prepared.train.order, balance.Order)
  assert 'class_counts' not in prepared.program.task.metadata
