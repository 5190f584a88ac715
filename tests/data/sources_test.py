"""Tests of records: the same named features from every kind of source."""

import json
import shutil

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tests import looked_up
from vit_jax import input_pipeline
from vit_jax.data import sources

SIZE = 7


class Boxes(tfds.core.GeneratorBasedBuilder):
  """All pixels of image i are i, and it has i mod 3 objects."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self):
    features = tfds.features
    return tfds.core.DatasetInfo(
      builder=self,
      features=features.FeaturesDict(
        {
          'picture': features.Image(shape=(None, None, 1)),
          'mask': features.Image(shape=(None, None, 1)),
          'kind': features.ClassLabel(names=['even', 'odd']),
          'text': features.Text(),
          'picture/id': np.int64,
          'vector': features.Tensor(shape=(3,), dtype=np.float32),
          'points': features.Tensor(shape=(None, 2), dtype=np.float32),
          'camera': {'id': np.int64, 'flash': np.bool_},
          'objects': features.Sequence(
            {
              'bbox': features.BBoxFeature(),
              'label': features.ClassLabel(names=['cat', 'dog']),
              'is_crowd': np.bool_,
              'outline': features.Sequence(np.float32),
              'crop': features.Image(shape=(None, None, 1)),
            }
          ),
        }
      ),
    )

  def _split_generators(self, dl_manager):
    return {'train': self._generate_examples()}

  def _generate_examples(self):
    for i in range(SIZE):
      objects = [
        {
          'bbox': tfds.features.BBox(0.0, 0.125 * j, 0.5, 1.0),
          'label': j % 2,
          'is_crowd': False,
          'outline': np.arange(i + j, dtype=np.float32),
          'crop': np.full((2, 2, 1), 200 + j, np.uint8),
        }
        for j in range(i % 3)
      ]
      record = {
        'picture': np.full((5, 6, 1), i, np.uint8),
        'mask': np.full((5, 6, 1), 100 + i, np.uint8),
        'kind': i % 2,
        'text': f'number {i}',
        'picture/id': 50 + i,
        'vector': np.full(3, i, np.float32),
        'points': np.full((i, 2), i, np.float32),
        'camera': {'id': i, 'flash': i % 2 == 0},
        'objects': objects,
      }
      yield i, record


ALL = (
  'image', 'label', 'mask', 'text', 'vector', 'points', 'camera', 'objects',
  'picture/id',
)  # fmt: skip
KINDS = ('array_record', 'tfrecord')


@pytest.fixture(scope='module')
def boxes_dirs(tmp_path_factory):
  """Folders of the data set, by file format."""
  folders = {}
  for file_format in KINDS:
    folders[file_format] = str(tmp_path_factory.mktemp(file_format))
    builder = Boxes(data_dir=folders[file_format], file_format=file_format)
    builder.download_and_prepare()
  return folders


@pytest.fixture
def open_boxes(boxes_dirs, tiny_config):
  """Opens the data set: (kind, features) -> config, source."""

  def open_split(kind, features, split='train'):
    tiny_config.dataset = 'boxes'
    tiny_config.tfds_data_dir = boxes_dirs[kind]
    tiny_config.update(batch=4, batch_eval=4)
    return tiny_config, sources.open_split(tiny_config, split, features)

  return open_split


def pixel(encoded):
  return int(tf.io.decode_png(encoded).numpy().ravel()[0])


def check_record(record):
  """Compares a record with what the builder wrote."""
  i = pixel(record['image'])
  n = i % 3
  assert pixel(record['mask']) == 100 + i
  assert record['label'].numpy().tolist() == [i % 2]
  assert record['label'].dtype == tf.int64
  assert record['picture/id'].numpy() == 50 + i
  assert record['text'].numpy() == f'number {i}'.encode()
  np.testing.assert_array_equal(record['vector'], np.full(3, i, np.float32))
  np.testing.assert_array_equal(record['points'], np.full((i, 2), i))
  assert record['camera/id'].numpy() == i
  assert record['camera/flash'].numpy() == (i % 2 == 0)
  boxes = [[0.0, 0.125 * j, 0.5, 1.0] for j in range(n)]
  np.testing.assert_array_equal(
    record['objects/bbox'], np.reshape(boxes, (n, 4)).astype(np.float32)
  )
  assert record['objects/bbox'].dtype == tf.float32
  np.testing.assert_array_equal(record['objects/label'], np.arange(n) % 2)
  assert record['objects/label'].dtype == tf.int64
  assert record['objects/is_crowd'].dtype == tf.bool
  outline = record['objects/outline']
  assert outline.to_list() == [list(range(i + j)) for j in range(n)]
  crops = record['objects/crop'].numpy()
  assert [pixel(crop) for crop in crops] == [200 + j for j in range(n)]
  return i


@pytest.mark.parametrize('kind', KINDS)
def test_nested_ragged_and_encoded_features(open_boxes, kind):
  config, source = open_boxes(kind, ALL)
  assert source.names == {'label': ('even', 'odd'), 'objects/label': ('cat', 'dog')}
  assert source.class_names == ('even', 'odd')
  seen = []  # Records passed to the task.

  def example(record, seed):
    seen.append(record)
    return {'x': tf.zeros([])}

  input_pipeline.eval_dataset(config, source, example, np.arange(4))
  assert seen[0].keys() == {
    'image', 'label', 'mask', 'text', 'vector', 'points', 'camera/id',
    'camera/flash', 'objects/bbox', 'objects/label', 'objects/is_crowd',
    'objects/outline', 'objects/crop', 'picture/id', 'index',
  }  # fmt: skip
  assert seen[0]['objects/bbox'].shape.as_list() == [None, 4]
  assert seen[0]['vector'].shape.as_list() == [3]
  assert seen[0]['image'].shape.as_list() == seen[0]['index'].shape.as_list() == []
  data = tf.data.Dataset.range(SIZE).batch(3).map(source.lookup).unbatch()
  found = [check_record(source.read(record)) for record in data]
  assert sorted(found) == list(range(SIZE))


def test_only_requested_features_are_read_and_some_are_optional(open_boxes):
  _, source = open_boxes('tfrecord', ('objects/label',))
  assert source.names == {'objects/label': ('cat', 'dog')}
  assert looked_up.features(source, range(3)).keys() == {'objects/label'}
  _, source = open_boxes('array_record', ('image', 'depth?', 'camera/id?', 'index'))
  assert source.features == ('image', 'camera/id')
  with pytest.raises(
    ValueError, match=r"'boxes' has no feature 'depth'.*\['camera/flash'"
  ):
    open_boxes('array_record', ('image', 'depth'))


def test_example_file(tiny_config, image_folder, tmp_path):
  source = sources.open_split(tiny_config, 'test', ('image',))
  path = sources.example_file(source, tmp_path)
  assert tf.io.decode_png(tf.io.read_file(path)).shape == (8, 8, 1)
  tiny_config.dataset = str(image_folder)
  source = sources.open_split(tiny_config, 'test')
  assert sources.example_file(source, tmp_path) == source.name(0)


# --- Fingerprints of the data ---


def fingerprint(config, split='train', **kwargs):
  """Returns a fingerprint as read back from JSON."""
  source = sources.open_split(config, split, **kwargs)
  return json.loads(json.dumps(source.fingerprint()))


def test_fingerprint_of_a_folder_covers_names_and_labels(
  tiny_config, image_folder, tmp_path
):
  shutil.copytree(image_folder, tmp_path, dirs_exist_ok=True)
  tiny_config.dataset = str(image_folder)
  first = fingerprint(tiny_config)
  assert (first['num_examples'], first['num_classes']) == (33, 3)
  tiny_config.dataset = str(tmp_path)
  assert fingerprint(tiny_config) == first  # The location does not matter.
  assert fingerprint(tiny_config, 'train[:30]') != first
  ants = tmp_path / 'train' / 'ant'
  (ants / 'ant0.jpg').rename(ants / 'ant99.jpg')
  renamed = fingerprint(tiny_config)
  assert {k for k in first if first[k] != renamed[k]} >= {'images'}
  (ants / 'ant99.jpg').rename(ants / 'ant0.jpg')
  ants.rename(tmp_path / 'train' / 'wasp')
  moved = fingerprint(tiny_config)
  assert {k for k in first if first[k] != moved[k]} >= {'class_names', 'images'}


def test_fingerprint_of_a_manifest_covers_all_features(
  tiny_config, image_folder, tmp_path
):
  paths = sorted(str(p) for p in (image_folder / 'test').rglob('*.*'))
  tiny_config.dataset = str(tmp_path)

  def write(**columns):
    lines = []
    for i, path in enumerate(paths):
      values = {name: column[i] for name, column in columns.items()}
      lines.append(json.dumps({'image': path, **values}))
    (tmp_path / 'train.jsonl').write_text('\n'.join(lines))
    return fingerprint(tiny_config, features=('image', *columns))

  columns = {
    'label': [0, 1, 2] * 3,
    'caption': [f'number {i}' for i in range(9)],
    'age': [0.5 * i for i in range(9)],
    'captions': [['a'] * (i % 3 + 1) for i in range(9)],
  }
  first = write(**columns)
  assert write(**columns) == first
  for name, column in columns.items():
    changed = write(**{**columns, name: column[::-1]})
    different = {key for key in first if first[key] != changed[key]}
    assert different == {'labels' if name == 'label' else name}


def test_fingerprint_of_tfds_and_of_a_mixture(tiny_config):
  first = fingerprint(tiny_config)
  assert (first['dataset'], first['split']) == ('digits/all/1.0.0', 'train')
  assert fingerprint(tiny_config, 'train[:9]') != first
  mixed = fingerprint(tiny_config, dataset=(('digits', 0.5), ('digits', 0.5)))
  assert mixed['parts'] == [first, first]


# --- Folders ---


def test_images_without_labels_may_be_anywhere(
  tiny_config, image_folder, tmp_path, caplog
):
  flat = tmp_path / 'train'
  (flat / 'a' / 'b').mkdir(parents=True)
  for i, path in enumerate(sorted((image_folder / 'test').glob('*/*'))):
    shutil.copy(path, (flat, flat / 'a' / 'b')[i % 2])
  (flat / 'a' / 'notes.txt').write_text('x')
  tiny_config.dataset = str(tmp_path)
  source = sources.open_split(tiny_config, 'train', ('image', 'label?'))
  assert source.features == ('image',)
  assert "Left out 1 of 10 files in '" in caplog.text
  paths = [source.name(i) for i in range(source.num_examples)]
  assert set(paths) == {str(p) for p in flat.rglob('*.*') if p.suffix != '.txt'}
  record = source.read({'image': tf.constant(paths[0])})
  assert tf.io.read_file(paths[0]) == record['image']
  half = sources.open_split(tiny_config, 'train[:5]', ('image',))
  assert [half.name(i) for i in range(half.num_examples)] == paths[:5]
  with pytest.raises(ValueError, match="not in class folders: .*'train/<class>/'"):
    sources.open_split(tiny_config, 'train')
  with pytest.raises(FileNotFoundError, match="has no split 'test'"):
    sources.open_split(tiny_config, 'test', ('image',))
  (flat / 'broken.jpg').write_text('x')
  with pytest.raises(ValueError, match='1 of 10 images cannot be'):
    sources.open_split(tiny_config, 'train', ('image',))


@pytest.mark.parametrize('name', ['val', 'valid', 'validation'])
@pytest.mark.parametrize('form', ['folder', 'manifest'])
def test_a_missing_test_split_is_the_validation_split(
  tiny_config, image_folder, tmp_path, capsys, name, form
):
  shutil.copytree(image_folder / 'train', tmp_path / 'train')
  shutil.copytree(image_folder / 'test', tmp_path / name)
  if form == 'manifest':
    for split in ('train', name):
      paths = sorted((tmp_path / split).glob('*/*'))
      lines = [json.dumps({'image': str(x), 'label': x.parent.name}) for x in paths]
      (tmp_path / f'{split}.jsonl').write_text('\n'.join(lines))
  tiny_config.dataset = str(tmp_path)
  source = sources.open_split(tiny_config, 'test')
  assert source.num_examples == 9
  assert f"Split 'test' of '{tmp_path}' is '{name}'." in capsys.readouterr().out
  assert sources.open_split(tiny_config, 'test[:5]').num_examples == 5
  assert sources.open_split(tiny_config, 'val').num_examples == 9
  assert sources.has_split(tiny_config, 'test')
  assert not sources.has_split(tiny_config, 'tset')
  tiny_config.pp.train = f'train+{name}[:50%]'  # The same images would count twice.
  assert not sources.has_split(tiny_config, 'test')
  with pytest.raises(FileNotFoundError, match="has no split 'test'"):
    sources.open_split(tiny_config, 'test')


def test_folders_without_images(tiny_config, tmp_path):
  (tmp_path / 'train' / 'ant').mkdir(parents=True)
  tiny_config.dataset = str(tmp_path)
  with pytest.raises(FileNotFoundError, match='no images in .*train/<class>/'):
    sources.open_split(tiny_config, 'train')
  with pytest.raises(FileNotFoundError, match='no images in .*train.: the known'):
    sources.open_split(tiny_config, 'train', ('image',))
