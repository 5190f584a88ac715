"""Tests of the conversion to array_record, on the digits as tfrecord files."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from vit_jax.data import sources
from vit_jax.data.tfds import convert
from vit_jax.data.tfds import digits
from vit_jax.data.tfds import shards
from vit_jax.data.tfds import tfrecords


@pytest.fixture
def folder(tmp_path):
  """Where the digits lie as tfrecord files."""
  builder = digits.Digits(data_dir=str(tmp_path), file_format='tfrecord')
  builder.download_and_prepare()
  return tmp_path / 'digits' / 'all' / '1.0.0'


def everything(source):
  found = source.lookup(tf.range(source.num_examples, dtype=tf.int64))
  return {key: value.numpy() for key, value in found.items()}


def test_the_digits_are_converted_and_then_read_at_random(
  tiny_config, folder, tmp_path
):
  tiny_config.tfds_data_dir = str(tmp_path)
  before = {split: sources.open_split(tiny_config, split) for split in ('train', 'test')}  # fmt: skip
  assert {type(source) for source in before.values()} == {
    tfrecords.TfRecordSource
  }
  assert convert.convert('digits', str(tmp_path)) == folder
  for split, source in before.items():
    after = sources.open_split(tiny_config, split)
    assert type(after) is shards.ArrayRecordSource
    assert after.num_examples == source.num_examples
    got, want = everything(after), everything(source)
    for key in want:
      np.testing.assert_array_equal(got[key], want[key])
  # Other programs read the old files as before, and nothing is left behind.
  data = tfds.builder('digits', data_dir=str(tmp_path)).as_dataset(split='test')
  assert len(list(data)) == 360
  assert len(list(folder.glob('*.array_record-*'))) == 2
  assert not list(folder.glob('*incomplete*'))
  assert convert.convert('digits', str(tmp_path)) == folder  # Nothing to do.


def test_a_damaged_file_is_named_and_what_is_done_stays_done(folder, tmp_path):
  [bad] = folder.glob('*train.tfrecord*')
  whole = bad.read_bytes()
  with tf.io.TFRecordWriter(str(bad)) as writer:
    writer.write('x')
  message = (
    'digits-train.* has 1 records, but dataset_info.json says 1,437: copy'
  )
  with pytest.raises(ValueError, match=message):
    convert.convert('digits', str(tmp_path))
  assert not list(folder.glob('*incomplete*'))
  assert not list(folder.glob('*train.array_record*'))
  bad.write_bytes(whole)
  done = folder / 'digits-test.array_record-00000-of-00001'
  done.write_bytes(b'made before')
  convert.convert('digits', str(tmp_path))
  assert done.read_bytes() == b'made before'
  assert list(folder.glob('*train.array_record*'))


@pytest.mark.parametrize(
  'name, message',
  [('no_such_data', "TFDS knows no data set 'no_such_data'"),
   ('digits', 'holds no prepared data set')],
)  # fmt: skip
def test_what_is_not_there_is_named(tmp_path, name, message):
  with pytest.raises(ValueError, match=message):
    convert.convert(name, str(tmp_path))
