"""Tests of reading annotation files, and of rejecting invalid ones."""

import json

import numpy as np
from pycocotools import coco
import pytest

from tests.data.coco import drawn
from vit_jax.data.coco import annotation_files


@pytest.fixture
def read(tmp_path):
  """Writes a file and reads it."""

  def call(found):
    return annotation_files.read(drawn.write(tmp_path / 'a.json', found))

  return call


def test_ids_with_gaps_become_classes_from_0(read):
  things = [
    drawn.thing(5, 2, (1, 2, 3, 4), 90, area=7.5, iscrowd=1),
    drawn.thing(9, 0, (5, 6, 7, 8), 7),
    drawn.thing(2, 2, (9, 8, 7, 6), 3, iscrowd=0, segmentation=[[1, 2, 3]]),
  ]
  found = read(drawn.content(3, things))
  assert found.classes == ('cat', 'dog', 'cup')  # Ids 3, 7, 90.
  np.testing.assert_array_equal(found.image, [0, 2, 2])
  np.testing.assert_array_equal(found.ids, [9, 5, 2])
  np.testing.assert_array_equal(found.label, [1, 2, 0])
  np.testing.assert_array_equal(found.boxes[1], [1, 2, 3, 4])
  np.testing.assert_array_equal(found.area, [56, 7.5, 42])  # 7 * 8, ., 7 * 6.
  np.testing.assert_array_equal(found.crowd, [False, True, False])
  np.testing.assert_array_equal(found.counts, [1, 0, 2])
  np.testing.assert_array_equal(found.sizes, 3 * [[40, 60]])


def test_objects_match_pycocotools(tmp_path):
  rng = np.random.RandomState(0)
  things = [
    drawn.thing(
      int(i), rng.randint(5), rng.randint(1, 20, 4).tolist(),
      int(rng.choice([3, 7, 90])), iscrowd=int(rng.rand() < 0.2), area=3.0,
    )
    for i in rng.permutation(40) + 1
  ]  # fmt: skip
  path = drawn.write(tmp_path / 'a.json', drawn.content(5, things))
  found, theirs = annotation_files.read(path), coco.COCO(path)
  names = {x['id']: x['name'] for x in theirs.loadCats(theirs.getCatIds())}
  for i, image in enumerate(found.image_ids):
    mine = found.image == i
    rows = theirs.loadAnns(theirs.getAnnIds(imgIds=[int(image)]))
    assert [x['id'] for x in rows] == found.ids[mine].tolist()
    assert [x['bbox'] for x in rows] == found.boxes[mine].tolist()
    assert [x['iscrowd'] for x in rows] == found.crowd[mine].tolist()
    assert [names[x['category_id']] for x in rows] == [
      found.classes[k] for k in found.label[mine]
    ]


def test_integers_may_be_written_as_floats(read):
  found = drawn.content(1, [drawn.thing(1, 0, image_id=100.0)])
  assert read(found).image.tolist() == [0]
  with pytest.raises(ValueError, match=r'annotations\[0\].image_id'):
    read(drawn.content(1, [drawn.thing(1, 0, image_id=100.5)]))


def test_supercategory_is_not_a_class(read):
  classes = [
    {'id': 0, 'name': 'fish', 'supercategory': 'none'},
    {'id': 1, 'name': 'fish', 'supercategory': 'fish'},
    {'id': 2, 'name': 'crab', 'supercategory': 'none'},
  ]
  assert read(drawn.content(1, categories=classes)).classes == ('fish', 'crab')


def test_categories_of_the_same_name_are_separate_classes(read, capsys):
  classes = [{'id': 7, 'name': 'crane'}, {'id': 3, 'name': 'crane'}]
  classes[0]['isthing'] = 0
  objects = [drawn.thing(1, 0, category=7), drawn.thing(2, 0, category=3)]
  annotations = read(drawn.content(1, objects, classes))
  assert annotations.classes == ('crane', 'crane')
  assert annotations.label.tolist() == [1, 0]
  assert annotations.stuff == (1,)
  assert (
    "several categories named 'crane', of the ids [3, 7]" in capsys.readouterr().out
  )


def with_(name, value):
  return {**drawn.content(2, [drawn.thing(1, 0)]), name: value}


CAPTION = {'id': 1, 'image_id': 100, 'caption': 'a cat'}

# Content of a file, and a pattern that the message matches.
WRONG = [
  ('{"images": [', 'truncated'),
  (with_('categories', []), 'length >= 1 .*categories'),
  (with_('annotations', [CAPTION]), r'category_id.*instances_\*.json'),
  (with_('annotations', [drawn.thing(1, 0, 'x')]), r'float.*annotations\[0\].bbox'),
  (with_('annotations', [drawn.thing(1, 0), drawn.thing(1, 1)]), r"'id'.*\[1\]"),
  (
    with_('annotations', [drawn.thing(1, 0), drawn.thing(2, 5)]),
    '1 annotations .*annotation 2: image_id 105',
  ),
  (
    with_('annotations', [drawn.thing(4, 0, category=8)]),
    'annotation 4: category_id 8',
  ),
  (
    with_('images', [drawn.image(0), drawn.image(1, file_name='0.jpg')]),
    "images .*'file_name'.*'0.jpg'",
  ),
  (with_('images', [{'id': 1, 'file_name': 'a'}]), 'height'),
  (with_('images', [drawn.image(0, file_name='')]), r'images\[0\].file_name'),
  (with_('images', [drawn.image(0, file_name='a\0b')]), r'images\[0\].file_name'),
  (with_('annotations', [drawn.thing(1, 0, area=-1)]), r'>= 0.*annotations\[0\].area'),
  (with_('annotations', [drawn.thing(1, 0, area=1e300)]), r'annotations\[0\].area'),
  (
    json.dumps(drawn.content(1, []))[:-1] + ', "annotations": []}',
    "key 'annotations' is repeated",
  ),
  ('{"info": ' + 9999 * '[', 'nested too deeply'),
  (
    with_('categories', [{'id': 3, 'name': 'a'}, {'id': 3, 'name': 'b'}]),
    r"categories .*'id'.*\[3\]",
  ),
]


@pytest.mark.parametrize(('found', 'words'), WRONG)
def test_invalid_files_are_rejected(read, found, words):
  with pytest.raises(ValueError, match=words) as error:
    read(found)
  assert 'a.json' in str(error.value)
