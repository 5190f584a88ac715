"""Tests of record files: TFDS's order, stored offsets, damage, storage errors."""

import errno
import gzip
import itertools
import json
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.core.utils import shard_utils

from tests import input_pipeline_test, looked_up
from vit_jax import input_pipeline
from vit_jax.data import sources
from vit_jax.data.images import image_files
from vit_jax.data.tfds import shards, tfrecords
from vit_jax.distributed import sharding

FORMATS = ('tfrecord', 'array_record')


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """Folders with 40 images in three files, by file format."""
  folders = {name: tmp_path_factory.mktemp(name) for name in FORMATS}
  for name, folder in folders.items():
    input_pipeline_test.prepare(
      input_pipeline_test.Shapes, str(folder), name, num_shards=3
    )
  return folders


@pytest.fixture
def opened(written, tiny_config, tmp_path, monkeypatch):
  """Opens a copy of the data: (format, split) -> config, source."""
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
  monkeypatch.setattr(image_files, '_DELAYS', (0.0, 0.0))

  def open_split(file_format='tfrecord', split='train'):
    folder = tmp_path / file_format
    if not folder.exists():
      shutil.copytree(written[file_format], folder)
    input_pipeline_test.grey_config(tiny_config, 'shapes', str(folder))
    return tiny_config, sources.open_split(tiny_config, split)

  return open_split


def files(tmp_path, file_format='tfrecord'):
  return sorted((tmp_path / file_format).glob(f'shapes/*/*.{file_format}-*'))


def everything(source):
  return looked_up.features(source)['image']


def batches(config, source, start=0, count=12):
  example = input_pipeline.labelled_example(config, 4)
  mesh = sharding.make_mesh({'data': -1})
  found = input_pipeline.train_batches(config, source, example, mesh, start)
  return [
    {key: np.asarray(value) for key, value in batch.items()}
    for batch in itertools.islice(found, count)
  ]


@pytest.mark.parametrize('file_format', FORMATS)
@pytest.mark.parametrize('split', ['train', 'train[35%:80%]+train[:5]', 'train[-1:]'])
def test_records_have_the_same_order_as_tfds(opened, written, file_format, split):
  _, source = opened(file_format, split)
  builder = tfds.builder('shapes', data_dir=str(written['tfrecord']))
  data = builder.as_dataset(
    split=split,
    decoders={'image': tfds.decode.SkipDecoding()},
    read_config=tfds.ReadConfig(interleave_cycle_length=1),
  )
  want = [record['image'].numpy() for record in data]
  assert source.num_examples == len(want)
  assert everything(source) == want


def test_batches_match_array_record_and_a_resumed_run(opened):
  whole = batches(*opened(), count=5)
  found = batches(*opened('array_record'), 1, 3)
  for got, want in zip(found, whole[1:4], strict=True):
    input_pipeline_test.assert_same(got, want)
  images = np.concatenate([batch['image'][:, 0, 0, 0] for batch in whole])
  assert len(set(images)) == 40  # An epoch covers all images of all files.


# --- The stored offsets ---


@pytest.fixture
def scanned(monkeypatch):
  """Names of the files whose headers were read."""
  names, scan = [], tfrecords._scan

  def note(path, *args):
    names.append(os.path.basename(path)[-14:-9])
    return scan(path, *args)

  monkeypatch.setattr(tfrecords, '_scan', note)
  return names


def test_headers_are_reread_only_for_changed_files(opened, scanned, tmp_path):
  want = everything(opened(split='train[:50%]')[1])
  assert sorted(scanned) == ['00000', '00001']
  for _ in range(2):
    opened()
  assert sorted(scanned) == ['00000', '00001', '00002']
  assert not (tmp_path / 'cache').exists()
  first = files(tmp_path)[0]
  records = [x.numpy() for x in tf.data.TFRecordDataset(str(first))]
  with tf.io.TFRecordWriter(str(first)) as writer:
    for record in (records[1], records[0], *records[2:]):
      writer.write(record)
  os.utime(first, ns=(0, 12345))
  got = everything(opened(split='train[:50%]')[1])
  assert scanned[3:] == ['00000']
  assert got == [want[1], want[0], *want[2:]]
  stored = first.parent / '.tfrecord_offsets.npz'
  stored.write_bytes(stored.read_bytes()[:-30])
  assert everything(opened(split='train[:50%]')[1]) == got
  assert sorted(scanned[4:]) == ['00000', '00001']


@pytest.mark.parametrize(
  'change',
  [
    lambda row: row.astype(float),
    lambda row: row[0],
    lambda row: np.append(row[:-1], 2**60),
  ],
)
def test_impossible_stored_offsets_are_read_again(opened, scanned, tmp_path, change):
  want = everything(opened()[1])
  first = files(tmp_path)[0]
  stored = first.parent / '.tfrecord_offsets.npz'
  rows = dict(np.load(stored))
  np.savez(stored, **{**rows, first.name: change(rows[first.name])})
  del scanned[:]
  assert everything(opened()[1]) == want
  assert scanned == ['00000']


def test_offsets_of_read_only_data_are_kept_in_the_cache(
  opened, scanned, tmp_path, caplog
):
  opened()
  [stored] = (tmp_path / 'tfrecord').glob('shapes/*/.tfrecord_offsets.npz')
  stored.unlink()
  stored.mkdir()
  del scanned[:]
  for _ in range(2):
    assert len(everything(opened()[1])) == 40
    assert len(scanned) == 3
  shutil.rmtree(tmp_path / 'cache')
  (tmp_path / 'cache').write_text('no folder')
  assert len(everything(opened()[1])) == 40
  assert 'cannot be stored' in caplog.text


def test_processes_on_a_host_share_large_offsets(opened, tmp_path, monkeypatch):
  want = everything(opened()[1])
  monkeypatch.setattr(tfrecords, '_LARGE', 0)
  _, source = opened()
  assert all(isinstance(x.base, np.memmap) for x in source._offsets)
  [mapped] = (tmp_path / 'cache' / 'tfrecords').glob('*.npy')
  content = mapped.read_bytes()
  for damaged in (content[:-8], content[:200] + b'x' + content[201:]):
    mapped.unlink()  # Other processes may still map the old one.
    mapped.write_bytes(damaged)
    assert everything(opened()[1]) == want
    assert mapped.read_bytes() == content


def test_files_in_a_bucket(opened, tmp_path):
  _, source = opened()
  want = everything(source)
  folder = f'ram://records/shapes/{files(tmp_path)[0].parent.name}'
  tf.io.gfile.makedirs(folder)
  paths = [f'{folder}/{path.name}' for path in files(tmp_path)]
  for path, target in zip(files(tmp_path), paths):
    tf.io.gfile.copy(str(path), target, overwrite=True)
  infos = [
    shard_utils.FileInstruction(path, 0, count, count)
    for path, count in zip(paths, [13, 14, 13])
  ]
  remote = tfrecords.TfRecordSource(infos, 100.0, source._reader)
  assert tf.io.gfile.exists(f'{folder}/.tfrecord_offsets.npz')
  assert everything(remote) == want
  numbers = np.array([20, 3, 4, 3, 39, 5, 19, 0])  # Some are adjacent.
  np.testing.assert_array_equal(remote.stored(numbers), source.stored(numbers))


# --- Damaged files ---


def test_record_of_other_bytes_than_utf8_is_named(opened, tmp_path):
  opened()
  with tf.io.TFRecordWriter(str(files(tmp_path)[0])) as writer:
    for _ in range(13):
      writer.write(50 * b'\xff')
  with pytest.raises(ValueError, match='record .* of .*-00000-of-00003'):
    batches(*opened())


def flipped(place):
  def change(content):
    content = bytearray(content)
    content[place] ^= 4
    return bytes(content)

  return change


MISSING = 'missing, .*dataset_info.json'
DAMAGE = [
  ('tfrecord', lambda x: None, MISSING),
  ('tfrecord', lambda x: b'', 'has 0 records, but dataset_info.json says'),
  ('tfrecord', lambda x: x[:-3], 'is cut off within record'),
  ('tfrecord', flipped(9), 'the header of record 0, at byte 0, has a wrong'),
  ('tfrecord', gzip.compress, 'GZIP.*decompress'),
  ('tfrecord', flipped(40), 'record 0 of .* is damaged, or the file has chan'),
  ('array_record', lambda x: None, MISSING),
  ('array_record', lambda x: x[:-1000], 'is damaged: Corrupted'),
  ('array_record', flipped(200), 'is damaged: Corrupted'),
]  # fmt: skip


@pytest.mark.parametrize('file_format, change, message', DAMAGE)
def test_damaged_file_is_reported(opened, tmp_path, file_format, change, message):
  opened(file_format)
  path = files(tmp_path, file_format)[1]
  content = change(path.read_bytes())
  path.unlink()
  if content is not None:
    path.write_bytes(content)
  with pytest.raises((ValueError, FileNotFoundError)) as error:
    opened(file_format)[1].stored(np.arange(40))
  assert error.match(message)
  assert str(path) in str(error.value)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('file_format', FORMATS)
def test_temporary_and_permanent_storage_errors(
  opened, tmp_path, file_format, monkeypatch
):
  config, source = opened(file_format)
  want = source.stored(np.arange(40)).tolist()
  read, calls = type(source).read_file, itertools.count(1)
  failing = lambda call: call % 3 != 0  # Two of three attempts fail.

  def flaky(self, *args):
    if failing(next(calls)):
      raise OSError(errno.EIO, 'Input/output error')
    return read(self, *args)

  monkeypatch.setattr(type(source), 'read_file', flaky)
  assert source.stored(np.arange(40)).tolist() == want
  failing = lambda call: True
  message = 'shapes-train.*cannot be read: Input/output error'
  with pytest.raises(OSError, match=message) as error:
    batches(config, source, count=1)
  assert '\n' not in str(error.value)


def test_wrong_dataset_info(opened, tmp_path):
  opened()
  [path] = (tmp_path / 'tfrecord').glob('shapes/*/dataset_info.json')
  info = json.loads(path.read_text())
  [split] = info['splits']

  def lengths(*found):
    return json.dumps({**info, 'splits': [{**split, 'shardLengths': found}]})

  for text, message in (
    (lengths('13', '12', '13'), 'has 14 records, but .* says 12'),
    (lengths('13', '14', '13', '5'), MISSING),
    (json.dumps({**info, 'fileFormat': 'riegeli'}), 'as riegeli files.*conve'),
    ('{"x": ', 'cannot be opened: .*Failed to load JSON'),
  ):
    path.write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
      opened()
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('file_format', FORMATS)
def test_number_of_open_files_is_limited(opened, file_format, monkeypatch):
  _, source = opened(file_format)
  want = source.stored(np.arange(40)).tolist()
  monkeypatch.setattr(shards, '_OPEN_FILES', 2)
  _, source = opened(file_format)
  assert not source._files
  for numbers in ([39, 0, 20], [20, 19, 39, 3]):
    found = source.stored(np.array(numbers)).tolist()
    assert found == [want[i] for i in numbers]
    assert len(source._files) == 2
