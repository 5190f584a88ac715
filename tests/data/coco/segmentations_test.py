"""Tests of masks: decoding of outlines, and painting of panoptic images."""

import json
import re

import numpy as np
from pycocotools import mask as coco_mask
import pytest
import tensorflow as tf

from tests.data.coco import drawn, panoptic_test, source_test
from vit_jax.data.coco import segmentations
from vit_jax.data.images import images

# Columns 2 to 4 and rows 1 to 2 of an image with 4 x 6 pixels.
RECTANGLE = [[2, 1, 5, 1, 5, 3, 2, 3]]
EXPECTED = np.array(
  [
    [0, 0, 0, 0, 0, 0],
    [0, 0, 1, 1, 1, 0],
    [0, 0, 1, 1, 1, 0],
    [0, 0, 0, 0, 0, 0],
  ],
  np.uint8,
)
# Column-major: 9 pixels of background, 2 of the object, 2 of background...
RUNS = {'size': [4, 6], 'counts': [9, 2, 2, 2, 2, 2, 5]}


def test_polygons_and_run_lengths_give_the_same_mask():
  short = coco_mask.encode(np.asfortranarray(EXPECTED))
  short = {'size': [4, 6], 'counts': short['counts'].decode()}
  for outline in (RECTANGLE, RUNS, short):
    found = segmentations.decode(outline, 4, 6)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, EXPECTED)
  assert not segmentations.decode([], 4, 6).any()
  other = [0, 0, 1, 0, 1, 1, 0, 1]  # A second polygon of the object.
  found = segmentations.decode([*RECTANGLE, other], 4, 6)
  assert found.sum() == 7
  assert found[0, 0] == 1


@pytest.mark.parametrize(
  'segmentation',
  [
    [[1, 2, 3, 4]],
    [[1, 2, 3, 4, 5, 6, 7]],
    [1, 2, 3, 4, 5, 6],
    [[1, 2, 3, 4, 5, 1e300]],
    {'size': [6, 4], 'counts': [24]},
    {'size': [4, 6], 'counts': [23]},
    {'size': [4, 6], 'counts': [30, -6]},
    {'size': [4, 6], 'counts': 'no'},
  ],
)
def test_invalid_outlines(segmentation):
  words = f'{re.escape(str(segmentation)[:60])} .*6 x 4 '
  encoded = segmentations.encode_image(4, 6, [(77, json.dumps(segmentation).encode())])
  with pytest.raises(ValueError, match=f'annotation 77: .*{words}'):
    segmentations.paint(encoded)


def test_masks_of_huge_images_are_not_drawn():
  runs = {'size': [2**31, 2**31], 'counts': [2**62]}
  with pytest.raises(ValueError, match='at most 1,073,741,824 pixels'):
    segmentations.decode(runs, 2**31, 2**31)


def test_invalid_outlines_are_reported_or_skipped(tmp_path):
  """Before painting; the message names the file and the annotation."""
  right = [[10, 4, 20, 4, 20, 9, 10, 9]]
  things = [
    drawn.thing(1, 0, (10, 4, 10, 5), segmentation=right),
    drawn.thing(77, 1, (10, 4, 10, 5), segmentation=[[1, 2, 3, 4, 5, 1e300]]),
  ]
  root = drawn.make(tmp_path, 2, things)
  with pytest.raises(ValueError, match='annotation 77 of image ') as caught:
    source_test.open_split(root, features=panoptic_test.FEATURES)
  file = root / 'annotations' / 'instances_train2017.json'
  assert str(caught.value).startswith(f"'{file}': 1 of 2 ")
  for how in ('skip', 'clip'):
    source = source_test.open_split(
      root, features=panoptic_test.FEATURES, broken_boxes=how
    )
    assert sorted(source.lengths('panoptic_objects/label').tolist()) == [0, 1]
  # Box detection does not read outlines.
  assert source_test.open_split(root).num_examples == 2


def test_panoptic_images_are_painted_from_outlines(tmp_path):
  """A small object covers a large one that comes later in the file."""
  small = [[10, 4, 20, 4, 20, 9, 10, 9]]  # 10 x 5 pixels.
  large = [[0, 0, 30, 0, 30, 20, 0, 20]]
  things = [
    drawn.thing(900_100_000_001, 2, (10, 4, 10, 5), 90, segmentation=small),
    drawn.thing(8, 2, (0, 0, 30, 20), 7, segmentation=large, iscrowd=1),
  ]
  root = drawn.make(tmp_path / 'own', 3, things)
  source = source_test.open_split(root, features=panoptic_test.FEATURES)
  ids = source.lookup(tf.range(3, dtype=tf.int64))['image/id'].numpy().tolist()
  found = {}
  for number, name in enumerate(ids):
    found[name] = source.read(source.record(number))
  pixels = images.decode(found[102]['panoptic_image']).numpy()
  np.testing.assert_array_equal(found[102]['panoptic_objects/id'], [1, 2])
  np.testing.assert_array_equal(found[102]['panoptic_objects/label'], [2, 1])
  expected = np.zeros((40, 60, 3))
  expected[:20, :30, 0] = 2
  expected[4:9, 10:20, 0] = 1
  np.testing.assert_array_equal(pixels, expected)
  assert not images.decode(found[100]['panoptic_image']).numpy().any()

  source_test.change(root, lambda f: f['annotations'][1].update(segmentation=small))
  other = source_test.open_split(root, features=panoptic_test.FEATURES)
  assert other.fingerprint() != source.fingerprint()

  source_test.change(root, lambda f: f['annotations'][1].pop('segmentation'))
  with pytest.raises(ValueError, match=r'segmentation.*annotations\[1\]'):
    source_test.open_split(root, features=panoptic_test.FEATURES)
