"""Tests of folders of annotated images as data sources."""

import json
import shutil

import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from tests.data.coco import drawn
from vit_jax.configs import common
from vit_jax.data import checking, indexing, mixture, sources
from vit_jax.data.coco import layout
from vit_jax.tasks.detection import detect

FEATURES = (*detect.Task.FEATURES, 'objects/id', 'image/id')
THINGS = [
  drawn.thing(1, 0, (6, 4, 30, 20), 3, area=333),
  drawn.thing(2, 2, (0, 0, 60, 40), 90, iscrowd=1),
  drawn.thing(3, 2, (30, 20, 30, 20), 7),
]


def open_split(root, split='train', features=FEATURES, workdir=None, **keys):
  config = common.get_config()
  config.dataset = str(root)
  names = keys.pop('class_names', None)
  config.update(keys)
  return sources.open_split(config, split, features, names, workdir=workdir)


def by_id(source):
  """All records of a source, by image id."""
  found = source.lookup(tf.range(source.num_examples, dtype=tf.int64))
  rows = range(source.num_examples)
  records = [{name: x[i].numpy() for name, x in found.items()} for i in rows]
  return {int(record['image/id']): record for record in records}


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A read-only folder with ten images and three objects."""
  return drawn.make(tmp_path_factory.mktemp('own'), 10, THINGS)


@pytest.fixture
def root(tmp_path):
  """A folder with three images and three objects, for tests that modify it."""
  return drawn.make(tmp_path / 'own', 3, THINGS)


def change(root, change, split='train'):
  """Changes the annotation file of a split."""
  change_file(root / 'annotations' / f'instances_{split}2017.json', change)


def change_file(path, change):
  """Changes the content of an annotation file."""
  found = json.loads(path.read_text())
  change(found)
  path.write_text(json.dumps(found))


def test_features_match_tfds(whole):
  source = open_split(whole)
  assert source.names == {'objects/label': ('cat', 'dog', 'cup')}
  assert source.num_examples == 10  # Including images without objects.
  found = by_id(source)
  assert found[101]['objects/bbox'].shape == (0, 4)
  two = {
    'bbox': [[0, 0, 1, 1], [0.5, 0.5, 1, 1]], 'label': [2, 1],
    'is_crowd': [True, False], 'id': [2, 3], 'area': [2400, 600],
  }  # fmt: skip
  for name, want in two.items():
    np.testing.assert_array_equal(found[102][f'objects/{name}'], want)
  np.testing.assert_array_equal(found[100]['objects/area'], [333])
  assert found[100]['image'] == f'{whole}/train2017/0.jpg'.encode()
  counts = source.lengths('objects/label')
  np.testing.assert_array_equal(np.sort(counts), 8 * [0] + [1, 2])
  mixed = mixture.MixtureSource([source, source], (('a', 0.5), ('b', 0.5)))
  np.testing.assert_array_equal(mixed.lengths('objects/label'), np.tile(counts, 2))


def test_slices_partition_the_images(whole):
  parts = 'train[:70%]', 'train[70%:]', 'train[:70%]+train[70%:]'
  first, second, both = (by_id(open_split(whole, part)) for part in parts)
  assert len(first) == 7
  assert sorted([*first, *second]) == sorted(both) == list(range(100, 110))
  for i, record in {**first, **second}.items():
    np.testing.assert_array_equal(record['image'], both[i]['image'])
    np.testing.assert_array_equal(record['objects/bbox'], both[i]['objects/bbox'])


# Annotation file, image folder and split.
LAYOUTS = {
  'coco': ('annotations/instances_train2017.json', 'train2017', 'train'),
  'no year': ('annotations/instances_train2017.json', 'train', 'train'),
  'images': ('annotations/instances_train.json', 'images/train', 'train'),
  'together': ('annotations/instances_train.json', 'images', 'train'),
  'roboflow': ('train/_annotations.coco.json', 'train', 'train'),
  'valid': ('valid/_annotations.coco.json', 'valid', 'validation'),
  'val for test': ('annotations/instances_val2017.json', 'val2017', 'test'),
}


@pytest.mark.parametrize('name', LAYOUTS)
def test_supported_layouts(tmp_path, name):
  path, folder, split = LAYOUTS[name]
  found = drawn.content(2, THINGS[:1])
  drawn.write(tmp_path / path, found)
  drawn.draw(tmp_path / folder, found)
  assert sorted(by_id(open_split(tmp_path, split))) == [100, 101]


def test_split_used_for_test_is_reported(root, capsys):
  open_split(root, 'test')
  message = f"is '{root / 'annotations' / 'instances_val2017.json'}"
  assert message in capsys.readouterr().out
  open_split(root)
  assert 'Split' not in capsys.readouterr().out


def test_file_names_may_include_the_image_folder(tmp_path, monkeypatch):
  found = drawn.content(2)
  drawn.draw(tmp_path / 'photos', found)
  for entry in found['images']:
    entry['file_name'] = f'photos/{entry["file_name"]}'
  drawn.write(tmp_path / 'annotations' / 'instances_train.json', found)
  monkeypatch.chdir(tmp_path.parent)  # The root may be relative too.
  assert open_split(f'./{tmp_path.name}').num_examples == 2


def test_missing_annotations_and_ambiguous_years(root):
  with pytest.raises(
    FileNotFoundError, match=r"no annotations of split 'dev'.*instances_train2"
  ):
    open_split(root, 'dev')
  path = root / 'annotations' / 'instances_train2017.json'
  shutil.copy(path, path.with_name('instances_train2014.json'))
  with pytest.raises(ValueError, match="split 'train'.*train2014.*train2017"):
    open_split(root)
  assert open_split(root, 'train2017').num_examples == 3


def test_missing_images(root):
  (root / 'train2017' / '0.jpg').unlink()
  with pytest.raises(ValueError, match='1 of 3 images cannot') as error:
    open_split(root)
  assert f"there is no image file '{root}/train2017/0.jpg'" in str(error.value)
  found = by_id(open_split(root, broken_images='skip'))
  assert sorted(found) == [101, 102]
  assert len(found[102]['objects/label']) == 2
  (root / 'train2017').rename(root / 'photos')
  with pytest.raises(
    FileNotFoundError, match="0.jpg', which are in none of .*train2017', '.*images'"
  ):
    open_split(root)


def test_annotated_size_must_match_the_image(root):
  def turn(found):
    found['images'][0].update(width=40, height=60)
    found['images'][1].update(width=62)

  change(root, turn)
  words = r'(?s)2 of 3 images cannot be.*60 x 40 pixels, and its annotations are of 40 '
  with pytest.raises(ValueError, match=words + r'x 60 \(it may have.*are of 62 x 40\n'):
    open_split(root)
  assert sorted(by_id(open_split(root, broken_images='skip'))) == [102]


def test_images_are_checked_once_if_sizes_do_not_change(root, tmp_path, monkeypatch):
  workdir = tmp_path / 'run'
  open_split(root, workdir=workdir).store(workdir)
  with monkeypatch.context() as patch:
    patch.setattr(checking.images, 'broken_reason', None)
    assert open_split(root, 'train[:2]', workdir=workdir).num_examples == 2
  change(root, lambda found: found['images'][0].update(width=61))
  with pytest.raises(ValueError, match='annotations are of 61 x 40'):
    open_split(root, workdir=workdir)


def test_index_of_an_annotated_folder(root, monkeypatch):
  assert layout.splits(str(root)) == ['train2017', 'val2017']
  path, count, broken = indexing.make(str(root), 'train')
  assert (count, broken) == (3, [])
  assert path == f'{root}/train.coco.index.npz'
  monkeypatch.setattr(checking.images, 'broken_reason', lambda *args: 'looked at again')
  assert open_split(root).num_examples == 3


def test_other_splits_match_training_classes_by_name(root):
  def other_ids(found):
    names = enumerate(('cup', 'dog', 'cat'), 1)
    found['categories'] = [{'id': i, 'name': name} for i, name in names]
    for thing, category in zip(found['annotations'], (3, 1, 2)):
      thing['category_id'] = category

  change(root, other_ids, 'val')
  names = open_split(root).names['objects/label']
  ours = by_id(open_split(root))
  theirs = by_id(open_split(root, 'validation', class_names=names))
  for i in ours:
    np.testing.assert_array_equal(ours[i]['objects/label'], theirs[i]['objects/label'])
  assert open_split(root, 'train+validation').names['objects/label'] == names
  change(root, lambda found: found['categories'][0].update(name='bowl'), 'val')
  with pytest.raises(
    ValueError, match=r"it has \['bowl'\] and it lacks \['cup'\]; give both"
  ):
    open_split(root, 'test', class_names=names)


def test_fingerprint_covers_images_and_annotations(root, tmp_path):
  first = open_split(root).fingerprint()
  assert json.loads(json.dumps(first)) == first
  moved = shutil.copytree(root, tmp_path / 'moved')
  assert open_split(moved).fingerprint() == first
  seen = [first, open_split(root, 'train[:2]').fingerprint()]
  changes = {'bbox': [6, 4, 30, 21], 'category_id': 7, 'area': 5, 'iscrowd': 1}
  for key, value in changes.items():
    change(root, lambda f, k=key, v=value: f['annotations'][0].update({k: v}))
    seen.append(open_split(root).fingerprint())
    assert seen[-1] not in seen[:-1], key


def test_annotations_of_the_upright_exif_image(root):
  """The annotation tool applied the EXIF orientation."""
  path = root / 'train2017' / '0.jpg'
  exif = Image.Exif()
  exif[0x0112] = 6  # A rotation by 90 degrees.
  with Image.open(path) as image:
    image.load()
  image.save(path, exif=exif)
  assert open_split(root).num_examples == 3  # Annotated as stored.
  change(root, lambda f: f['images'][0].update(width=40, height=60))
  with pytest.raises(ValueError, match='turned by its EXIF orientation'):
    open_split(root)
