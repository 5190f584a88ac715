"""Tests of masks in Pascal VOC's layout, in manifests, in Parquet files and on the hub."""

import csv
import io
import json

import datasets
import numpy as np
from PIL import Image
import pyarrow as pa
from pyarrow import parquet
import pytest

from tests import conftest
from vit_jax import input_pipeline
from vit_jax.data import masks, sources
from vit_jax.distributed import sharding
from vit_jax.run import config as run_config

NAMES = ('sky', 'sea', 'sand')
SIZES = ((4, 6), (5, 3), (8, 8))


def make_mask(number):
  """Returns numbers of classes, 255 for none, as an image with a palette."""
  rng = np.random.default_rng(number)
  numbers = rng.choice([0, 1, 2, 255], SIZES[number % 3]).astype(np.uint8)
  image = Image.fromarray(numbers, 'P')
  image.putpalette(rng.integers(0, 256, 768, np.uint8).tobytes())
  return image


def png(image):
  file = io.BytesIO()
  image.save(file, 'PNG')
  return file.getvalue()


def open_split(root, split='train', **options):
  config = conftest.make_tiny_config(None)
  config.update(task='segment_semantic', dataset=str(root), task_options=options)
  features = ('image', masks.FEATURE)
  return sources.open_split(run_config.complete(config), split, features)


def assert_masks(source, numbers, names=NAMES):
  """Checks all images, of which the number is the red value, and their masks."""
  assert source.names[masks.FEATURE] == names
  reader = masks.Reader(masks.classes_of(source), (255,))
  seen = []
  for i in range(source.num_examples):
    record = source.read(source.record(i))
    red = np.asarray(Image.open(io.BytesIO(record['image'].numpy())))[0, 0, 0]
    expected = np.asarray(make_mask(int(red))).astype(int)
    expected[expected == 255] = -1
    mask = reader.decode(record[masks.FEATURE].numpy())
    np.testing.assert_array_equal(mask, expected)
    seen.append(int(red))
  assert sorted(seen) == list(numbers)


def write_files(root, images, mask_folder, numbers):
  for folder in (images, mask_folder):
    (root / folder).mkdir(parents=True, exist_ok=True)
  for number in numbers:
    mask = make_mask(number)
    Image.new('RGB', mask.size, (number, 0, 0)).save(root / images / f'{number}.png')
    mask.save(root / mask_folder / f'{number}.png')


def test_pascal_voc(tmp_path):
  write_files(tmp_path, 'JPEGImages', 'SegmentationClass', range(6))
  Image.new('RGB', (3, 3)).save(tmp_path / 'JPEGImages/only_boxes.png')
  folder = tmp_path / 'ImageSets/Segmentation'
  folder.mkdir(parents=True)
  for split, names in (('train', '0\n2\n3\n'), ('val', '1\n4\n'), ('trainval', '0\n4')):
    (folder / f'{split}.txt').write_text(names)
  source = open_split(tmp_path)
  names = source.names[masks.FEATURE]
  assert (len(names), names[0], names[15], names[20]) == (
    21, 'background', 'person', 'tvmonitor'
  )  # fmt: skip
  assert_masks(source, [0, 2, 3], names)
  assert_masks(open_split(tmp_path, 'validation'), [1, 4], names)
  assert_masks(open_split(tmp_path, 'trainval'), [0, 4], names)
  assert open_split(tmp_path, 'train[:2]').num_examples == 2
  (tmp_path / 'classes.json').write_text(json.dumps(NAMES))
  assert_masks(open_split(tmp_path), [0, 2, 3])
  (folder / 'train.txt').write_text('0\n9\n')
  with pytest.raises(ValueError, match=r"train.txt' lists '9', which is not in .*JPEG"):
    open_split(tmp_path)


def test_manifests(tmp_path):
  write_files(tmp_path, 'photos', 'labels', range(4))
  (tmp_path / 'classes.json').write_text(json.dumps(NAMES))
  rows = []
  for i in range(4):
    rows.append({'image': f'photos/{i}.png', 'segmentation_mask': f'labels/{i}.png'})
  manifest = tmp_path / 'train.jsonl'
  manifest.write_text('\n'.join(map(json.dumps, rows)))
  source = open_split(tmp_path)
  assert_masks(source, range(4))
  assert open_split(tmp_path, 'train[fold!=0/2]').num_examples == 2
  (tmp_path / 'test').mkdir()
  with open(tmp_path / 'test/metadata.csv', 'w', newline='') as file:
    writer = csv.writer(file)
    writer.writerow(['file_name', 'mask'])
    writer.writerows([f'../photos/{i}.png', f'../labels/{i}.png'] for i in (1, 3))
  assert_masks(open_split(tmp_path, 'test'), [1, 3])

  rows[1]['segmentation_mask'] = 'labels/2.png'
  manifest.write_text('\n'.join(map(json.dumps, rows)))
  with pytest.raises(
    ValueError, match='2.png: it has 8 x 8 pixels, and its image 3 x 5'
  ):
    open_split(tmp_path)
  for value, error in (
    (None, "there is no 'segmentation_mask'"),
    (7, 'is 7: write the'),
  ):
    rows[1]['segmentation_mask'] = value
    manifest.write_text('\n'.join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=f'train.jsonl:2: .*{error}'):
      open_split(tmp_path)
  rows[1] |= {'segmentation_mask': 'labels/1.png', 'mask': 'labels/2.png'}
  manifest.write_text('\n'.join(map(json.dumps, rows)))
  with pytest.raises(ValueError, match="train.jsonl:2: .*'mask': keep one"):
    open_split(tmp_path)


def write_parquet(folder, split, column):
  """Writes a table with an image, a mask and a number in each row."""
  images = [Image.new('RGB', make_mask(i).size, (i, 0, 0)) for i in range(6)]
  table = {
    'image': [{'bytes': png(image), 'path': None} for image in images],
    column: [{'bytes': png(make_mask(i)), 'path': None} for i in range(6)],
    'group': list(range(6)),
  }
  kinds = {'image': datasets.Image(), column: datasets.Image()}
  features = datasets.Features(**kinds, group=datasets.Value('int64'))
  folder.mkdir(parents=True, exist_ok=True)
  data = datasets.Dataset.from_dict(table, features)
  data.to_parquet(folder / f'{split}-00000-of-00001.parquet')


@pytest.mark.parametrize('column', ['segmentation_mask', 'annotation', 'label'])
def test_parquet(tmp_path, column):
  write_parquet(tmp_path, 'train', column)
  with pytest.raises(FileNotFoundError, match="no 'classes.json' that names"):
    open_split(tmp_path)
  (tmp_path / 'classes.json').write_text(json.dumps(NAMES))
  assert_masks(open_split(tmp_path), range(6))
  fold = open_split(tmp_path, 'train[fold=0/3]')
  assert fold.num_examples == 2
  assert [x.name for x in masks.classes_of(fold)] == list(NAMES)


def test_data_sets_of_the_hub(tmp_path, monkeypatch):
  write_parquet(tmp_path / 'zoo/scenes', 'train', 'pixels')
  load = datasets.load_dataset_builder

  def load_local(path, name=None, revision=None):
    return load(str(tmp_path / path.removeprefix('hf://datasets/')), name)

  monkeypatch.setattr(datasets, 'load_dataset_builder', load_local)
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
  dataset = 'hf://zoo/scenes?segmentation_mask=pixels'
  with pytest.raises(ValueError, match=r'config.task_options.classes=FILE'):
    open_split(dataset)
  classes = tmp_path / 'names.json'
  classes.write_text(json.dumps([*NAMES, {'name': 'void', 'id': 9, 'ignore': True}]))
  source = open_split(dataset, classes=str(classes))
  assert_masks(source, range(6))
  assert len(source.mask_classes) == 4


def write_table(folder, images, masks_of_images):
  """Writes a table of images and masks, which pyarrow chooses the types of."""
  columns = {'image': list(map(png, images)), masks.FEATURE: masks_of_images}
  parquet.write_table(pa.table(columns), folder / 'train.parquet')
  (folder / 'classes.json').write_text(json.dumps(NAMES))


def test_masks_may_be_bytes_and_nothing_else(tmp_path):
  images = [Image.new('RGB', make_mask(i).size, (i, 0, 0)) for i in range(3)]
  write_table(tmp_path, images, [png(make_mask(i)) for i in range(3)])
  assert_masks(open_split(tmp_path), range(3))
  for values, kind in (([0, 1, 2], 'int64'), (['0.png'] * 3, 'string')):
    write_table(tmp_path, images, values)
    with pytest.raises(
      ValueError, match=f"train.parquet' has .* {kind} in 'segm.*: write"
    ):
      open_split(tmp_path)


@pytest.mark.parametrize('is_training', [True, False])
def test_the_row_of_a_wrong_mask_is_named(tmp_path, is_training):
  encoded_masks = [png(Image.new('L', (8, 8)))] * 5
  encoded_masks[3] = png(Image.new('L', (8, 4)))
  write_table(tmp_path, [Image.new('RGB', (8, 8))] * 5, encoded_masks)
  config = conftest.make_tiny_config(None)
  config.update(task='segment_semantic', dataset=str(tmp_path), batch=8, batch_eval=8)
  config.pp.update(crop=8, channels=3)
  config = run_config.complete(config)
  source = sources.open_split(config, 'train', ('image', masks.FEATURE))
  task_class = run_config.get_task(config.task)
  task = task_class(config, task_class.make_metadata(config, source))
  mesh = sharding.make_mesh({'data': -1})
  if is_training:
    batches = input_pipeline.train_batches(config, source, task.example, mesh)
  else:
    batches = input_pipeline.task_batches(task, source, mesh)
  with pytest.raises(ValueError, match=r'row 3 of train.parquet: .* has 8 x 4 pixels'):
    next(batches)
