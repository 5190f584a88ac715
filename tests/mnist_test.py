"""Tests of data sets read from files in MNIST's format, or derived from them."""

import gzip
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_datasets.image_classification import mnist as tfds_mnist

from benchmarks import fashion, mnist
from vit_jax.configs import detr_scenes, lit_digits, segment_scenes
from vit_jax.data import sources
from vit_jax.data.tfds import scenes


def _read(source):
  """Returns the records of a source."""
  rows = tf.data.Dataset.from_tensors(np.arange(source.num_examples))
  return [*rows.map(source.lookup).unbatch().map(source.read).as_numpy_iterator()]


@pytest.fixture
def files(tmp_path):
  """A folder with six and four images, and their contents."""
  rng, want = np.random.default_rng(0), {}
  for split, count in (('train', 6), ('t10k', 4)):
    images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = rng.integers(0, 10, count, dtype=np.uint8)
    head = lambda *sizes: b''.join(x.to_bytes(4, 'big') for x in sizes)
    path = tmp_path / f'{split}-images-idx3-ubyte.gz'
    path.write_bytes(gzip.compress(head(2051, count, 28, 28) + images.tobytes()))
    path = tmp_path / f'{split}-labels-idx1-ubyte'
    path.write_bytes(head(2049, count) + labels.tobytes())
    want['train' if split == 'train' else 'test'] = images, labels
  return tmp_path, want


@pytest.fixture
def data_dir(files, monkeypatch):
  """The same data as Fashion-MNIST in TFDS."""
  folder, _ = files
  monkeypatch.setattr(tfds_mnist, '_TRAIN_EXAMPLES', 6)
  monkeypatch.setattr(tfds_mnist, '_TEST_EXAMPLES', 4)
  mnist.main(['fashion_mnist', str(folder), f'--data_dir={folder}/tfds'])
  return f'{folder}/tfds'


def test_reads_the_published_files(files, data_dir, tiny_config):
  _, want = files
  tiny_config.update(dataset='fashion_mnist', tfds_data_dir=data_dir)
  for split, (images, labels) in want.items():
    source = sources.open_split(tiny_config, split)
    assert source.class_names[:2] == ('T-shirt/top', 'Trouser')
    assert source.num_examples == len(labels)
    got = [(tf.io.decode_png(x['image']).numpy(), x['label']) for x in _read(source)]
    as_pairs = lambda pairs: sorted(
      (x.tobytes(), np.ravel(y).tolist()) for x, y in pairs
    )
    assert as_pairs(got) == as_pairs(zip(images, labels))


def test_missing_and_damaged_files_are_named(files, monkeypatch):
  folder, _ = files
  monkeypatch.setattr(tfds_mnist, '_TRAIN_EXAMPLES', 6)
  labels = folder / 'train-labels-idx1-ubyte'
  content = labels.read_bytes()
  one_less = content[:7] + b'\5' + content[8:-1]
  for wrong in (one_less, content[:-1] + b'\x0a'):
    labels.write_bytes(wrong)
    with pytest.raises(ValueError, match='train-labels-idx1-ubyte.*6 labels'):
      mnist.main(['mnist', str(folder), f'--data_dir={folder}/tfds'])
  path = folder / 'train-images-idx3-ubyte.gz'
  content = path.read_bytes()
  for wrong in (content[:-9], gzip.compress(gzip.decompress(content)[:-1])):
    path.write_bytes(wrong)
    with pytest.raises(ValueError, match='train-images-idx3-ubyte.gz.*damaged'):
      mnist.main(['mnist', str(folder), f'--data_dir={folder}/tfds'])
  path.unlink()
  with pytest.raises(FileNotFoundError, match='train-images-idx3-ubyte.gz'):
    mnist.main(['mnist', str(folder), f'--data_dir={folder}/tfds'])


def test_captions_name_the_classes(files, data_dir):
  folder, want = files
  place = str(folder / 'captions')
  fashion.main(['captions', place, f'--data_dir={data_dir}'])
  config = lit_digits.get_config(f'{folder}/run,{place}')
  assert config.task_options.templates == fashion.TEST_TEMPLATE
  page = pathlib.Path(__file__).parents[1] / 'docs/benchmarks.md'
  assert f'classes={";".join(fashion.TEST_NAMES)}"' in page.read_text()
  for split, (images, labels) in want.items():
    source = sources.open_split(config, split, features=('image', 'label', 'texts'))
    assert source.class_names[7] == 'sneaker'
    got = {}
    for x in _read(source):
      got[tf.io.decode_png(x['image']).numpy().tobytes()] = x
    for image, label in zip(images, labels):
      record = got[image.tobytes()]
      assert record['label'] == [label]
      texts = [x.decode() for x in record['texts']]
      assert any(source.class_names[label] in x for x in texts)
      seen = {x for k in range(10) for x in fashion.captions(k)}
      assert seen.issuperset(texts) == (split == 'train')


def test_scenes_and_their_boxes(files, data_dir, monkeypatch):
  folder, want = files
  monkeypatch.setattr(scenes, 'SCENES', {'train': 6, 'test': 4})
  place = str(folder / 'scenes')
  fashion.main(['scenes', place, f'--data_dir={data_dir}'])
  config = detr_scenes.get_config(place)
  source = sources.open_split(
    config, 'train', features=('image', 'objects/bbox', 'objects/label')
  )
  records, count = _read(source), 0
  for record in records:
    grey = tf.io.decode_jpeg(record['image']).numpy().mean(axis=-1)
    inside = np.zeros(grey.shape, bool)
    for top, left, bottom, right in (record['objects/bbox'] * 128).round().astype(int):
      inside[top:bottom, left:right] = True
      count += 1
    assert set(record['objects/label']) <= set(want['train'][1])
    # The random images are brighter than the background.
    assert grey[inside].mean() > grey[~inside].mean() + 30
  found = json.loads((folder / 'scenes/annotations/instances_train.json').read_text())
  assert len(records) == 6
  assert count == len(found['annotations']) > 6
  with pytest.raises(FileExistsError, match='scenes'):
    fashion.main(['scenes', place, f'--data_dir={data_dir}'])


def test_scenes_and_their_masks(files, data_dir, monkeypatch):
  folder, want = files
  monkeypatch.setattr(scenes, 'SCENES', {'train': 6, 'test': 4})
  place = f'{folder}/masks'
  fashion.main(['segmentation_scenes', place, f'--data_dir={data_dir}'])
  config = segment_scenes.get_config()
  config.dataset = place
  for split, count in scenes.SCENES.items():
    source = sources.open_split(config, split, features=('image', 'segmentation_mask'))
    assert source.names['segmentation_mask'][7::3] == ('sneaker', 'stripes')
    records = _read(source)
    assert len(records) == count
    for record in records:
      grey = tf.io.decode_jpeg(record['image']).numpy().mean(axis=-1)
      mask = tf.io.decode_png(record['segmentation_mask']).numpy()[..., 0]
      is_ground = mask >= 10
      assert grey[~is_ground].mean() > grey[is_ground].mean() + 30
      assert set(mask[~is_ground]) <= set(want[split][1])
      assert 1 <= len(set(mask[is_ground])) <= 2
