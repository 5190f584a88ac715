"""Tests that public files of MNIST's format become data sets of TFDS."""

import gzip

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_datasets.image_classification import mnist as tfds_mnist

from benchmarks import mnist
from vit_jax.data import sources


@pytest.fixture
def files(tmp_path):
  """A folder with six and four images, and what they are."""
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


def test_published_files_become_a_data_set(files, monkeypatch, tiny_config):
  folder, want = files
  monkeypatch.setattr(tfds_mnist, '_TRAIN_EXAMPLES', 6)
  monkeypatch.setattr(tfds_mnist, '_TEST_EXAMPLES', 4)
  data_dir = str(folder / 'tfds')
  mnist.main(['fashion_mnist', str(folder), f'--data_dir={data_dir}'])
  tiny_config.update(dataset='fashion_mnist', tfds_data_dir=data_dir)
  for split, (images, labels) in want.items():
    source = sources.open_split(tiny_config, split)
    assert source.class_names[:2] == ('T-shirt/top', 'Trouser')
    assert source.num_examples == len(labels)
    records = tf.data.Dataset.from_tensors(np.arange(len(labels))).map(source.lookup)
    got = [
      (tf.io.decode_png(x['image']).numpy(), x['label'].numpy())
      for x in records.unbatch().map(source.read)
    ]
    as_pairs = lambda pairs: sorted(
      (x.tobytes(), np.ravel(y).tolist()) for x, y in pairs
    )
    assert as_pairs(got) == as_pairs(zip(images, labels))


def test_missing_and_damaged_files_are_named(files):
  folder, _ = files
  path = folder / 'train-images-idx3-ubyte.gz'
  content = path.read_bytes()
  damaged = (
    content[:-9],
    content[:40] + bytes(40) + content[80:],
    gzip.compress(gzip.decompress(content)[:-1]),
  )
  for wrong in damaged:
    path.write_bytes(wrong)
    with pytest.raises(ValueError, match='train-images-idx3-ubyte.gz.*damaged'):
      mnist.main(['mnist', str(folder), f'--data_dir={folder}/tfds'])
  path.unlink()
  with pytest.raises(FileNotFoundError, match='train-images-idx3-ubyte.gz'):
    mnist.main(['mnist', str(folder), f'--data_dir={folder}/tfds'])
