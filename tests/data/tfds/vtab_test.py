"""Tests of the VTAB tasks on synthetic examples with the features of TFDS."""

import itertools
import types

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tests import looked_up, vtab_data
from vit_jax.configs import vit
from vit_jax.data import slices, sources
from vit_jax.data.tfds import builders, splits, vtab, vtab_tasks
from vit_jax.planning import plan


def objects_of(info, *changes):
  """Random objects of an image, with these changes."""
  features = info.features['objects'].feature
  return [{**vtab_data.example(features, 0), **change} for change in changes]


def labelled(builder, task, split='train'):
  """{value of the first pixel: class index} for all examples of a split."""
  reader = vtab.Reader(builder.info, vtab_tasks.TASKS[task])
  source = splits.open_with(builder.info, task, split, reader)
  assert source.features == ('image', 'label')
  records = looked_up.features(source)
  found = {
    int(tf.io.decode_image(image)[0, 0, 0]): label
    for image, label in zip(records['image'], records['label'])
  }
  assert len(found) == source.num_examples
  assert all(
    label.dtype == np.int64 and label.shape == (1,) for label in found.values()
  )
  return {pixel: label.item() for pixel, label in found.items()}


def image(value, info):
  shape = [8 if size is None else size for size in info.features['image'].shape]
  return np.full(shape, value, np.uint8)


def write(name, data_dir, changes, **kwargs):
  """Writes constant images of value 0, 1, ..., with these changes."""
  info = tfds.builder(name, data_dir=str(data_dir)).info
  made = [{'image': image(i, info), **change(info)} for i, change in enumerate(changes)]
  return vtab_data.write(name, data_dir, {'train': made}, **kwargs)


# Types and depths (z) of the objects in an image, and the class.
KITTI_IMAGES = [
  ((), 3),
  ((('Pedestrian', 1.0),), 3),
  ((('Car', 7.9),), 0),
  ((('Car', 8.0), ('Cyclist', 3.0)), 0),
  ((('Van', 8.01), ('Car', 60.0)), 1),
  ((('Truck', 20.0), ('Tram', 3.0), ('Person_sitting', 2.0)), 1),
  ((('Truck', 20.5),), 2),
  ((('Car', 30.0), ('Car', -2.0)), 0),
]


def kitti_image(image):
  return lambda info: {
    'objects': objects_of(
      info,
      *({'type': kind, 'location': [5.0, 6.0, depth]} for kind, depth in image),
    )
  }


def test_distance_to_the_nearest_vehicle(tmp_path):
  builder = write('kitti', tmp_path, [kitti_image(image) for image, _ in KITTI_IMAGES])
  expected = {i: label for i, (_, label) in enumerate(KITTI_IMAGES)}
  assert labelled(builder, 'kitti_distance') == expected
  assert vtab_tasks.TASKS['kitti_distance'].label.class_names == (
    'up to 8 m', '8 to 20 m', 'over 20 m', 'no vehicle',
  )  # fmt: skip


def test_clevr_count_and_distance(tmp_path):
  # Depths of the objects. The class of clevr_count is the number of objects - 3.
  depths = [
    (9.0, 12.0, 9.1), (7.0, 8.0, 9.0, 10.0), (8.5,) * 5, (8.6,) * 6,
    (9.6, 20.0) * 4, (10.0,) * 9, (10.5,) * 10,
  ]  # fmt: skip
  builder = write('clevr', tmp_path, [
    lambda info, found=found: {
      'objects': objects_of(
        info, *({'pixel_coords': [1.0, 2.0, depth]} for depth in found)
      )
    }
    for found in depths
  ])  # fmt: skip
  assert labelled(builder, 'clevr_count') == dict(enumerate([0, 1, 2, 3, 5, 6, 7]))
  assert labelled(builder, 'clevr_distance') == dict(enumerate([2, 0, 1, 2, 4, 4, 5]))
  names = vtab_tasks.TASKS['clevr_distance'].label.class_names
  assert names[0] == 'up to 8'
  assert names[4:] == ('9.5 to 10', 'over 10')


def test_dsprites_labels_are_binned_and_images_scaled(tmp_path):
  labels = [(i % 32, i) for i in range(40)]
  builder = vtab_data.write('dsprites', tmp_path, {'train': [
    {'image': np.eye(64, dtype=np.uint8)[..., None],
     'label_x_position': x, 'label_orientation': angle}
    for x, angle in labels
  ]}, 'tfrecord')  # fmt: skip
  plain = tfds.as_numpy(builder.as_dataset(split='train'))
  plain = [(x['label_x_position'], x['label_orientation']) for x in plain]
  assert sorted(plain) == sorted(labels)
  for task, column, classes in (
    ('dsprites_x_position', 0, 32),
    ('dsprites_orientation', 1, 40),
  ):
    reader = vtab.Reader(builder.info, vtab_tasks.TASKS[task])
    source = splits.open_with(builder.info, task, 'train', reader)
    found = looked_up.features(source)
    want = [np.floor(pair[column] / (classes / 16)) for pair in plain]
    assert np.concatenate(found['label']).tolist() == want
    assert set(want) == set(range(16))
    pixels = tf.io.decode_png(found['image'][7]).numpy()[..., 0]
    np.testing.assert_array_equal(pixels, 255 * np.eye(64))
  names = vtab_tasks.TASKS['dsprites_orientation'].label.class_names
  assert names[0] == '0 to 18.5 degrees'
  assert names[-1] == '351 to 360 degrees'


def test_smallnorb_camera(tmp_path):
  """Uses the left of two images; the label is not the category."""
  builder = write('smallnorb', tmp_path, [
    lambda info, i=i: {
      'label_azimuth': 17 - i, 'label_elevation': i // 2, 'label_category': 1,
      'image2': image(99, info),
    }
    for i in range(18)
  ])  # fmt: skip
  assert labelled(builder, 'smallnorb_azimuth') == {i: 17 - i for i in range(18)}
  assert labelled(builder, 'smallnorb_elevation') == {i: i // 2 for i in range(18)}
  names = vtab_tasks.TASKS['smallnorb_elevation'].label.class_names
  assert (names[0], names[8]) == ('30 degrees', '70 degrees')


def test_sun397_uses_the_labels_of_the_data(tmp_path):
  changes = [lambda _, x=x: {'label': x} for x in (396, 6, 13)]
  builder = write('sun397', tmp_path, changes)
  assert labelled(builder, 'sun397') == {0: 396, 1: 6, 2: 13}


# Task: group, classes, split sizes of the data set, and val200 (a split, or its start
# within train) and test as in github.com/google-research/task_adaptation
# (TRAIN_SPLIT_PERCENT: 80 for Pets, 90 for the others whose validation images are the
# end of train).
ALL = {
  'caltech101': ('natural', 102, {'train': 3059, 'test': 6085}, 2753, 'test'),
  'cifar100': ('natural', 100, {'train': 50_000, 'test': 10_000}, 45_000, 'test'),
  'dtd': ('natural', 47, {'train': 1880, 'validation': 1880, 'test': 1880}, 'validation', 'test'),
  'oxford_flowers102': ('natural', 102, {'train': 1020, 'validation': 1020, 'test': 6149}, 'validation', 'test'),
  'oxford_iiit_pet': ('natural', 37, {'train': 3680, 'test': 3669}, 2944, 'test'),
  'sun397': ('natural', 397, {'train': 76_128, 'validation': 10_875, 'test': 21_750}, 'validation', 'test'),
  'svhn': ('natural', 10, {'train': 73_257, 'extra': 531_131, 'test': 26_032}, 65_931, 'test'),
  'patch_camelyon': ('specialised', 2, {'train': 262_144, 'validation': 32_768, 'test': 32_768}, 'validation', 'test'),
  'eurosat': ('specialised', 10, {'train': 27_000}, 16_200, 'train[80%:]'),
  'resisc45': ('specialised', 45, {'train': 31_500}, 18_900, 'train[80%:]'),
  'diabetic_retinopathy': ('specialised', 5, {'train': 35_126, 'validation': 10_906, 'test': 42_670}, 'validation', 'test'),
  'clevr_count': ('structured', 8, {'train': 70_000, 'validation': 15_000, 'test': 15_000}, 63_000, 'validation'),
  'clevr_distance': ('structured', 6, {'train': 70_000, 'validation': 15_000, 'test': 15_000}, 63_000, 'validation'),
  'dmlab': ('structured', 6, {'train': 65_550, 'validation': 22_628, 'test': 22_735}, 'validation', 'test'),
  'dsprites_x_position': ('structured', 16, {'train': 737_280}, 589_824, 'train[90%:]'),
  'dsprites_orientation': ('structured', 16, {'train': 737_280}, 589_824, 'train[90%:]'),
  'kitti_distance': ('structured', 4, {'train': 6347, 'validation': 423, 'test': 711}, 'validation', 'test'),
  'smallnorb_azimuth': ('structured', 18, {'train': 24_300, 'test': 24_300}, 'test', 'test[50%:]'),
  'smallnorb_elevation': ('structured', 9, {'train': 24_300, 'test': 24_300}, 'test', 'test[50%:]'),
}  # fmt: skip


def info_of(sizes):
  return types.SimpleNamespace(
    full_name='made_up/1.0.0',
    data_dir='/made_up',
    splits={
      name: tfds.core.SplitInfo(
        name=name, shard_lengths=[size], num_bytes=0, filename_template=None
      )
      for name, size in sizes.items()
    },
  )


def test_splits_match_vtab():
  assert list(vtab_tasks.TASKS) == list(ALL)
  for name, (group, _, sizes, val, test) in ALL.items():
    info, dataset = info_of(sizes), f'vtab/{name}'
    begin, base = (0, val) if isinstance(val, str) else (val, 'train')
    val200 = f'{base}[{begin}:{begin + 200}]'
    found = {
      split: vtab.tfds_split(info, dataset, split)
      for split in ('train800', 'val200', 'train800val200', 'test')
    }
    assert found == {
      'train800': 'train[0:800]', 'val200': val200,
      'train800val200': f'train[0:800]+{val200}', 'test': test,
    }  # fmt: skip
    assert vtab_tasks.TASKS[name].group == group
    spans = {}
    for split in ('train800', 'val200', 'test'):
      [(base, instruction)] = slices.parts(found[split])
      spans.setdefault(base, []).append(slices.bounds(info.splits[base], instruction))
    for inside in spans.values():  # Splits do not overlap.
      inside.sort()
      assert all(a[1] <= b[0] for a, b in itertools.pairwise(inside)), name
  groups = [task.group for task in vtab_tasks.TASKS.values()]
  assert [groups.count(group) for group in vtab_tasks.GROUPS] == [7, 4, 8]


def test_all_tasks_resolve_from_the_metadata_of_tfds(tiny_config, tmp_path):
  tiny_config.tfds_data_dir = str(tmp_path)
  for name, (_, classes, _, _, _) in ALL.items():
    task = vtab_tasks.TASKS[name]
    info = builders.find_builder(tiny_config, task.dataset).info
    reader = vtab.Reader(info, task)
    assert reader.features == ('image', 'label')
    assert len(set(reader.names['label'])) == classes, name
    run = vit.get_config(f'b16,vtab/{name}')
    assert plan.data_size(run) == (1000, classes)
    assert f'not in {tmp_path}/{info.full_name}' in vtab.missing(
      tiny_config, f'vtab/{name}'
    )
  assert not list(tmp_path.iterdir())


def test_missing_data_message_says_where_to_get_them(tiny_config, tmp_path):
  tiny_config.tfds_data_dir = str(tmp_path)
  # CLEVR_v1.0.zip has 19,021,600,724 bytes.
  assert vtab.missing(tiny_config, 'vtab/clevr_count').endswith(
    'TFDS can download it, 17.72 GiB.'
  )
  missing = vtab.missing(tiny_config, 'vtab/resisc45')
  tiny_config.dataset = 'vtab/resisc45'
  with pytest.raises(ValueError, match='must be downloaded|OneDrive') as error:
    sources.open_split(tiny_config, 'train800')
  for message in (missing, str(error.value)):
    assert 'OneDrive' in message
    assert f'{tmp_path}/downloads/manual' in message
    assert 'config.tfds_manual_dir' in message
  tiny_config.tfds_manual_dir = '/by/hand'
  missing = vtab.missing(tiny_config, 'vtab/resisc45')
  assert 'The manual_dir is /by/hand (' in missing


def test_missing_package_of_tfds_is_reported(tiny_config, tmp_path, monkeypatch):
  builder = tfds.builder('kitti', data_dir=str(tmp_path))

  def fail(self, **kwargs):
    raise ModuleNotFoundError('No module named cv2', name='cv2')

  monkeypatch.setattr(type(builder), 'download_and_prepare', fail)
  tiny_config.tfds_data_dir = str(tmp_path)
  with pytest.raises(ValueError, match='`pip install opencv-python-headless`'):
    builders.get_builder(tiny_config, 'kitti')


def test_wrong_names_are_reported(tiny_config):
  with pytest.raises(ValueError, match="'vtab/clevr_count'.*caltech101"):
    vtab_tasks.find_task('vtab/clevr')
  tiny_config.dataset = 'vtab/clevrcount'
  with pytest.raises(ValueError, match=r"mean 'vtab/clevr_count'\?"):
    sources.open_split(tiny_config, 'test')
  info = info_of({'train': 700, 'test': 9})
  for split in ('train', 'test[:50%]', 'train800+val'):
    with pytest.raises(ValueError, match='which cannot be sliced'):
      vtab.tfds_split(info, 'vtab/svhn', split)
  with pytest.raises(ValueError, match="'train' of 'made_up/1.0.0' has 700 .*800"):
    vtab.tfds_split(info, 'vtab/svhn', 'train800')
  with pytest.raises(ValueError, match="has no split 'validation': it has.*--split"):
    vtab.tfds_split(info, 'vtab/dtd', 'val200')
