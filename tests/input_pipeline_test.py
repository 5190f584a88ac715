"""Tests of the contract "batches are a pure function of (config, step)"."""

import collections
import itertools
import shutil

import jax
import numpy as np
import pytest
from sklearn import datasets
import tensorflow as tf
import tensorflow_datasets as tfds

from tests import looked_up
from vit_jax import input_pipeline
from vit_jax.data import order, records, sources
from vit_jax.distributed import sharding


def example(config, source):
  return input_pipeline.labelled_example(config, len(source.class_names))


def train_batches(config, source, rows=None, start=0, count=3):
  rows = np.arange(config.batch) if rows is None else rows
  data = input_pipeline.train_dataset(
    config, source, example(config, source), rows, start
  )
  return list(data.take(count).as_numpy_iterator())


def eval_batches(config, source, rows):
  data = input_pipeline.eval_dataset(config, source, example(config, source), rows)
  return list(data.as_numpy_iterator())


def assert_same(a, b):
  assert a.keys() == b.keys()
  for key in a:
    np.testing.assert_array_equal(a[key], b[key])


def test_digits_match_scikit_learn(tiny_config):
  seen = collections.Counter()
  for split, count in (('train', 1437), ('test', 360)):
    source = sources.open_split(tiny_config, split)
    assert source.num_examples == count
    record = looked_up.features(source)
    for image, label in zip(record['image'], record['label']):
      pixels = tf.io.decode_png(image).numpy()
      seen[pixels.tobytes(), int(label[0])] += 1
  raw = datasets.load_digits()
  images = (raw.images * (255 / 16)).round().astype(np.uint8)
  want = collections.Counter(
    (image.tobytes(), int(label)) for image, label in zip(images, raw.target)
  )
  assert seen == want


def test_batches_are_a_function_of_config_and_step(tiny_config):
  """Resumed runs and processes that read only some rows see the same batches."""
  source = sources.open_split(tiny_config, 'train[:160]')
  whole = train_batches(tiny_config, source, count=14)  # Four of the second epoch.
  rows = np.array([1, 6, 15])
  for part, batch in zip(train_batches(tiny_config, source, rows, 9), whole[9:]):
    assert_same(part, {key: value[rows] for key, value in batch.items()})
  tiny_config.seed = 1
  [other] = train_batches(tiny_config, source, count=1)
  assert (other['image'] != whole[0]['image']).any()
  assert (other['label'] != whole[0]['label']).any()


def test_batches_do_not_depend_on_the_devices(tiny_config):
  source = sources.open_split(tiny_config, 'train')
  mesh = sharding.make_mesh({'data': 2, 'model': 4})
  batches = input_pipeline.train_batches(
    tiny_config, source, example(tiny_config, source), mesh, 2
  )
  for want in train_batches(tiny_config, source, start=2):
    got = next(batches)
    assert got['image'].sharding.is_equivalent_to(sharding.batch_sharding(mesh), 4)
    assert_same(jax.device_get(got), want)


@pytest.mark.parametrize('n, batch', [(40, 16), (9, 16)])
def test_evaluation_sees_every_example_once(tiny_config, n, batch):
  tiny_config.batch_eval = batch
  source = sources.open_split(tiny_config, f'test[:{n}]')
  everything = eval_batches(tiny_config, source, np.arange(batch))
  assert len(everything) == -(-n // batch)
  whole = {k: np.concatenate([b[k] for b in everything]) for k in everything[0]}
  padding = len(whole['mask']) - n
  assert whole['mask'].tolist() == [1.0] * n + [0.0] * padding
  assert whole['index'].dtype == np.int32
  assert whole['index'].tolist() == [*range(n)] + [-1] * padding
  raw = looked_up.features(source, range(n))['image']
  for got, encoded in zip(whole['image'], raw):
    want = tf.io.decode_png(encoded).numpy() / 127.5 - 1
    np.testing.assert_allclose(got, want, atol=1e-6)
  # The second of two processes reads the second half of each batch.
  half = np.arange(batch // 2, batch)
  for whole, part in zip(
    everything, eval_batches(tiny_config, source, half), strict=True
  ):
    assert_same(part, {key: value[half] for key, value in whole.items()})


def enlarged(data):
  """Changes the size in the header of a JPEG file to 13,000 x 13,000 pixels."""
  place = data.index(b'\xff\xc0') + 5
  return data[:place] + b'\x32\xc8' * 2 + data[place + 4 :]


@pytest.mark.parametrize(
  'change, error, message',
  [
    (lambda data: data[:400], ValueError, 'cannot be decoded'),
    (enlarged, ValueError, '.*has 13000 x 13000 pixels, more than max_image_pixels='),
    (None, OSError, 'cannot be read: .*No such file'),
  ],
)
def test_images_that_break_during_the_run_are_named(
  tiny_config, image_folder, tmp_path, change, error, message
):
  root = shutil.copytree(image_folder, tmp_path / 'images')
  tiny_config.dataset = str(root)
  tiny_config.broken_images = 'trust'
  source = sources.open_split(tiny_config, 'train')
  bad = root / 'train' / 'bee' / 'bee5.jpg'
  if change:
    bad.write_bytes(change(bad.read_bytes()))
  else:
    bad.unlink()
  mesh = sharding.make_mesh({'data': -1})
  batches = input_pipeline.train_batches(
    tiny_config, source, example(tiny_config, source), mesh
  )
  with pytest.raises(error, match=f'bee5.jpg. {message}'):
    list(itertools.islice(batches, 9))


# --- Other TFDS data sets ---


class Shapes(tfds.core.GeneratorBasedBuilder):
  """40 grey images; all pixels of image i are i. Subclasses set the labels."""

  VERSION = tfds.core.Version('1.0.0')
  LABEL = tfds.features.ClassLabel(num_classes=4)

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict(
        {'image': tfds.features.Image(shape=(None, None, 1)), 'label': self.LABEL}
      ),
    )

  def _split_generators(self, dl_manager):
    return {'train': self._generate_examples()}

  def label(self, i):
    return i % 4

  def _generate_examples(self):
    for i in range(40):
      image = np.full((5, 6, 1), i, np.uint8)
      yield i, {'image': image, 'label': self.label(i)}


class ManyLabels(Shapes):
  """Image i has labels i mod 4 and, if even, 3; every tenth has none."""

  LABEL = tfds.features.Sequence(tfds.features.ClassLabel(num_classes=4))

  def label(self, i):
    if i % 10 == 0:
      return []
    return sorted({i % 4, 3}) if i % 2 == 0 else [i % 4]


class Unlabelled(Shapes):
  """Has a number that is not a class."""

  LABEL = np.int64


def prepare(cls, data_dir, file_format, num_shards=1):
  builder = cls(data_dir=data_dir, file_format=file_format)
  builder.download_and_prepare(
    download_config=tfds.download.DownloadConfig(num_shards=num_shards)
  )
  return cls.name


def grey_config(config, name, data_dir):
  config.dataset = name
  config.tfds_data_dir = data_dir
  config.pp.update(crop=4, crop_area=None)
  config.update(batch=8, batch_eval=8)
  return config


def values(batch):
  """Returns the i of each image, read from its pixels."""
  return np.round(batch['image'][:, 0, 0, 0] * 127.5 + 127.5).astype(int)


def test_epoch_of_tfds_data(tiny_config, tmp_path):
  name = prepare(Shapes, str(tmp_path), 'array_record')
  config = grey_config(tiny_config, name, str(tmp_path))
  source = sources.open_split(config, 'train')
  epoch = train_batches(config, source, count=5)
  seen = np.concatenate([values(b) for b in epoch])
  assert sorted(seen) == list(range(40))
  labels = np.concatenate([b['label'].argmax(axis=1) for b in epoch])
  np.testing.assert_array_equal(labels, seen % 4)
  with pytest.raises(ValueError, match=r"no split 'test': it has \['train'\]"):
    sources.open_split(config, 'test')


def test_images_may_have_several_labels_or_none(tiny_config, tmp_path):
  name = prepare(ManyLabels, str(tmp_path), 'tfrecord')
  config = grey_config(tiny_config, name, str(tmp_path))
  source = sources.open_split(config, 'train')
  batches = eval_batches(config, source, np.arange(8))
  assert sum(b['mask'].sum() for b in batches) == 40
  for batch in batches:
    for i, label in zip(values(batch), batch['label']):
      want = ManyLabels.label(None, i)
      np.testing.assert_array_equal(label, np.isin(np.arange(4), want))


def test_data_sets_without_classes_are_named(tiny_config, tmp_path):
  name = prepare(Unlabelled, str(tmp_path), 'array_record')
  config = grey_config(tiny_config, name, str(tmp_path))
  with pytest.raises(ValueError, match="'unlabelled' has no feature 'label'"):
    sources.open_split(config, 'train')


def test_unknown_data_sets_are_named(tiny_config):
  tiny_config.dataset = 'no_such_data'
  with pytest.raises(ValueError, match="dataset='no_such_data' is neither a fol"):
    sources.open_split(tiny_config, 'train')
  with tiny_config.unlocked():
    tiny_config.dataset = None
  with pytest.raises(ValueError, match='dataset is not set'):
    sources.open_split(tiny_config, 'train')


def test_labels_out_of_range_are_named(tiny_config):
  encoded = tf.io.encode_png(np.zeros((8, 8, 1), np.uint8)).numpy()
  mesh = sharding.make_mesh({'data': -1})
  for label, batches in (
    (10, input_pipeline.train_batches), (-2, input_pipeline.eval_batches)
  ):  # fmt: skip
    source = records.MemorySource(
      {'image': [encoded] * 4, 'label': np.array([[0], [label], [1], [2]])},
      {'label': map(str, range(10))},
    )
    make = example(tiny_config, source)
    with pytest.raises(ValueError, match='a label is out of range.* 0 to 9'):
      next(batches(tiny_config, source, make, mesh))


def test_task_defines_the_examples(tiny_config):
  source = sources.open_split(tiny_config, 'test', features=('label',))
  seeds = []

  def make(record, seed):
    assert record.keys() == {'label', 'index'}
    seeds.append(seed)
    place = tf.zeros([2], tf.int64) if seed is None else seed
    return {'place': place, 'number': record['index'], 'one': record['label']}

  mesh = sharding.make_mesh({'data': -1})
  rows = np.arange(16)
  data = input_pipeline.train_dataset(tiny_config, source, make, rows, 2)
  batch = next(data.as_numpy_iterator())
  np.testing.assert_array_equal(batch['place'][:, 0], tiny_config.seed)
  np.testing.assert_array_equal(batch['place'][:, 1], np.arange(32, 48))
  labels = looked_up.features(source, batch['number'])['label']
  np.testing.assert_array_equal(batch['one'], labels)
  indices = order.training_indices(source, np.arange(32, 48), 0)
  np.testing.assert_array_equal(batch['number'], indices)
  first = next(input_pipeline.eval_batches(tiny_config, source, make, mesh))
  assert seeds[-1] is None
  np.testing.assert_array_equal(first['index'], np.arange(104))
  np.testing.assert_array_equal(first['number'], np.arange(104))
