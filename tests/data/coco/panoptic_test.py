"""Tests of folders of images with panoptic annotations."""

import numpy as np
from PIL import Image
import pytest

from tests.data.coco import drawn, source_test
from vit_jax.configs import common
from vit_jax.data import sources
from vit_jax.data.images import images

FEATURES = (
  'image', 'image/id', 'panoptic_image', 'panoptic_objects/id',
  'panoptic_objects/bbox', 'panoptic_objects/label', 'panoptic_objects/area?',
  'panoptic_objects/is_crowd?',
)  # fmt: skip
CATEGORIES = [
  {'id': 5, 'name': 'sky', 'isthing': 0},
  {'id': 1, 'name': 'cat', 'isthing': 1},
]
SKY, CAT = 70_000, 300  # Segment ids above 65536 and 256.


@pytest.fixture
def root(tmp_path):
  """Two images of a sky with a cat in the corner, 10 x 20 pixels."""
  segments = np.full((40, 60), SKY)
  segments[:10, :20] = CAT
  colours = segments[..., None] // np.array([1, 256, 65_536]) % 256
  found = drawn.content(2, categories=CATEGORIES)
  drawn.draw(tmp_path / 'train2017', found)
  place = tmp_path / 'annotations' / 'panoptic_train2017'
  place.mkdir(parents=True)
  for i in range(2):
    Image.fromarray(colours.astype(np.uint8)).save(place / f'{i}.png')
    found['annotations'].append(
      {
        'image_id': 100 + i,
        'file_name': f'{i}.png',
        'segments_info': [
          {'id': SKY, 'category_id': 5, 'bbox': [0, 0, 60, 40], 'area': 2200},
          {'id': CAT, 'category_id': 1, 'bbox': [0, 0, 20, 10], 'area': 200},
        ],
      }
    )
  drawn.write(place.with_suffix('.json'), found)
  return tmp_path


def test_features_match_tfds(root):
  source = source_test.open_split(root, features=FEATURES)
  assert source.names == {'panoptic_objects/label': ('cat', 'sky')}
  assert source.stuff == [1]
  record = source.read(source.record(0))
  pixels = images.decode(record['panoptic_image']).numpy().astype(int)
  ids = pixels[..., 0] + 256 * pixels[..., 1] + 65_536 * pixels[..., 2]
  for name, area, box in zip(
    record['panoptic_objects/id'],
    record['panoptic_objects/area'],
    record['panoptic_objects/bbox'],
  ):
    assert (ids == name.numpy()).sum() == area
    y, x = np.nonzero(ids == name.numpy())
    corners = np.array([y.min(), x.min(), y.max() + 1, x.max() + 1])
    np.testing.assert_allclose(box, corners / (40, 60, 40, 60))
  np.testing.assert_array_equal(record['panoptic_objects/label'], [1, 0])
  assert not record['panoptic_objects/is_crowd'].numpy().any()


def test_missing_png_or_wrong_size(root):
  place = root / 'annotations' / 'panoptic_train2017'
  Image.new('RGB', (60, 41)).save(place / '0.png')
  with pytest.raises(ValueError, match='0.png: it has 60 x 41 pixels, and'):
    source_test.open_split(root, features=FEATURES)
  found = source_test.open_split(root, features=FEATURES, broken_images='skip')
  assert list(source_test.by_id(found)) == [101]
  (place / '1.png').unlink()
  with pytest.raises(ValueError, match="no image file '.*1.png'"):
    source_test.open_split(root, features=FEATURES)


def test_image_or_folder_without_segments(root):
  def forget(found):
    found['annotations'].pop()

  path = root / 'annotations' / 'panoptic_train2017.json'
  source_test.change_file(path, forget)
  with pytest.raises(ValueError, match='image 101 has no annotation: add its'):
    source_test.open_split(root, features=FEATURES)
  path.unlink()
  config = common.get_config()
  config.dataset = str(root)
  with pytest.raises(FileNotFoundError, match='annotations/panoptic_<split>'):
    sources.open_split(config, 'train', FEATURES)
