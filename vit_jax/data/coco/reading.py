"""Reads annotation files in COCO's JSON format into arrays.

The format (https://cocodataset.org/#format-data), in short:

  {"images": [{"id": 7, "file_name": "a.jpg", "width": 640, "height": 480}],
   "categories": [{"id": 3, "name": "cat"}],
   "annotations": [{"id": 1, "image_id": 7, "category_id": 3,
                    "bbox": [x, y, width, height], "area": 12.5, "iscrowd": 0}]}

Boxes are in pixels from the upper left; `area` (by default that of the box) and
`iscrowd` (by default 0) may be absent. In a panoptic file an annotation is an
image of segments: {"image_id": 7, "file_name": "a.png", "segments_info": [...]}
with `id`, `category_id`, `bbox`, `area` and `iscrowd` of each segment.

The ids of categories may have gaps; classes are numbered from 0 in their order.
msgspec skips what is not read, such as polygons, so that COCO's own file of
860,000 boxes takes seconds and less than twice its size in memory.
"""

import collections
from collections.abc import Sequence
import functools
import itertools
import os
from typing import Any
from typing import Generic
from typing import NamedTuple
from typing import TypeVar

import msgspec
import numpy as np

from vit_jax.data.images import index as index_lib
from vit_jax.data.images import reading

SHOWN = 5  # Number of faults that a message names.
# Number of files that stay in memory: of a training and of a test split.
_RECENT = 2
_NOT_COCO = (
  "give a file of boxes in COCO's format, an object with 'images', "
  "'annotations' and 'categories' (https://cocodataset.org/#format-data)"
)


# The format as types, by which msgspec parses it and skips the rest.
_Number = int | float
_T = TypeVar('_T')


class _Image(msgspec.Struct, gc=False):
  id: _Number
  file_name: str
  height: _Number
  width: _Number


class _Object(msgspec.Struct, gc=False):
  """An object of an image, or a segment."""

  id: _Number | None = None
  image_id: _Number | None = None
  category_id: _Number | None = None
  bbox: tuple[float, float, float, float] | None = None
  area: float | None = None
  iscrowd: int | bool | None = None


class _Outlined(_Object, gc=False):
  """An object, with its polygons or run lengths as they stand in the file."""

  segmentation: msgspec.Raw = msgspec.Raw(b'null')


class _Segments(msgspec.Struct, gc=False):
  """The segments of an image in a panoptic file."""

  image_id: _Number
  file_name: str
  segments_info: list[_Object]


class _Category(msgspec.Struct):
  id: _Number
  name: str
  supercategory: Any = None
  isthing: int | bool = True


class _File(msgspec.Struct, Generic[_T]):
  images: list[_Image] | None = None
  annotations: list[_T] | None = None
  categories: list[_Category] | None = None


# Kind of an annotation file -> its type.
_KINDS = {
  'instances': _File[_Object],
  'panoptic': _File[_Segments],
  'outlines': _File[_Outlined],
}


class Annotations(NamedTuple):
  """The content of a file of n images and m objects, ordered by image."""

  path: str
  image_ids: np.ndarray  # int64 [n].
  files: Sequence[str]  # n names of image files.
  sizes: np.ndarray  # int64 [n, 2], height and width in pixels.
  classes: tuple[str, ...]  # In the order of the categories' ids.
  ids: np.ndarray  # int64 [m], of the objects.
  image: np.ndarray  # int64 [m], number of each object's image, ascending.
  label: np.ndarray  # int64 [m], its class.
  boxes: np.ndarray  # float64 [m, 4], x, y, width, height in pixels.
  area: np.ndarray  # float32 [m], in pixels.
  crowd: np.ndarray  # bool [m].
  segments: Sequence[str] = ()  # n names of the PNGs of a panoptic file.
  stuff: tuple[str, ...] = ()  # Its classes that are no things.
  # `segmentation` of each object, JSON, bytes [m]; None unless it is asked for.
  outlines: np.ndarray | None = None

  @property
  def counts(self) -> np.ndarray:
    """Number of objects of each image, int64 [n]."""
    return np.bincount(self.image, minlength=len(self.files))

  def select(self, kept: np.ndarray) -> 'Annotations':
    """Returns the annotations without the objects whose `kept` [m] is False."""
    names = ('ids', 'image', 'label', 'boxes', 'area', 'crowd', 'outlines')
    columns = {name: getattr(self, name) for name in names}
    return self._replace(
      **{k: x[kept] for k, x in columns.items() if x is not None}
    )

  def digest(self) -> str:
    """Returns a hash of everything but the place of the file."""
    lists = self.files, self.classes, self.segments, self.stuff
    texts = [text for x in lists for text in (*x, '')]
    arrays = (x for x in self[:-1] if isinstance(x, np.ndarray))
    outlines = () if self.outlines is None else self.outlines
    return index_lib.digest(
      ['\0'.join(texts).encode(errors='surrogatepass'), *arrays, *outlines]
    )


def read(path: str, kind: str = 'instances') -> Annotations:
  """Reads an annotation file of a kind, see layout.find, until it changes."""
  return _read(path, kind, reading.stamp(os.fsencode(path)))


@functools.lru_cache(maxsize=_RECENT)
def _read(path, kind, stamp):
  del stamp  # Only to read a file anew that has changed.
  content, panoptic = _parse(path, kind), kind == 'panoptic'
  image_ids, files, sizes = _images(path, content.images)
  category_ids, classes = _classes(path, content.categories)
  objects, owners, segments = content.annotations, None, ()
  if panoptic:
    objects, owners, segments = _flat(path, content, image_ids)
  _check_complete(path, objects, panoptic)
  ids = _whole(path, 'annotations', 'id', objects)
  if not panoptic:  # A segment's id is its colour: others may have the same.
    _check_unique(path, 'annotations', ids)
    owners = _numbers(path, objects, ids, 'image_id', image_ids, 'image')
  label = _numbers(path, objects, ids, 'category_id', category_ids, 'category')
  boxes = np.array([x.bbox for x in objects], np.float64).reshape(-1, 4)
  area = np.array([x.area for x in objects], np.float64)  # None becomes NaN.
  area = np.where(np.isfinite(area), area, boxes[:, 2] * boxes[:, 3])
  outlines = _outlines(path, objects) if kind == 'outlines' else None
  order = np.argsort(owners, kind='stable')
  found = Annotations(
    path, image_ids, files, sizes, classes, ids, owners, label, boxes,
    area.astype(np.float32), np.array([bool(x.iscrowd) for x in objects], bool),
    segments, tuple(x.name for x in content.categories if not x.isthing),
    outlines,
  )  # fmt: skip
  return found.select(order)


def _parse(path, kind):
  """Parses a file; raises ValueError if it is not of its kind."""
  content = reading.read_file(path).removeprefix(b'\xef\xbb\xbf')
  if not content.strip():
    raise ValueError(f"'{path}' is empty: {_NOT_COCO}")
  try:
    found = msgspec.json.decode(content, type=_KINDS[kind])
  except msgspec.ValidationError as e:
    reason = str(e).replace('`', "'").replace('$.', '')
    raise ValueError(f"'{path}' is not COCO's: {reason}; {_NOT_COCO}") from e
  except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
    nan = ', which has no NaN' if b'NaN' in content else ''
    raise ValueError(
      f"'{path}' is no JSON{nan}: {e}; write or copy the file again"
    ) from e
  fields = ('images', 'annotations', 'categories')
  lacking = [name for name in fields if not getattr(found, name)]
  # A file without any object is of use: all of its images are background.
  if lacking and (lacking != ['annotations'] or found.annotations is None):
    raise ValueError(
      f"'{path}' has no {' and no '.join(map(repr, lacking))}: {_NOT_COCO}"
    )
  return found


def _images(path, images):
  """Returns ids, names and sizes of the images."""
  ids = _whole(path, 'images', 'id', images)
  files = [image.file_name for image in images]
  _check_unique(path, 'images', ids)
  _check_unique(path, 'images', np.array(files, object), 'file_name')
  sizes = np.stack(
    [_whole(path, 'images', name, images) for name in ('height', 'width')], 1
  )
  empty = np.flatnonzero((sizes <= 0).any(axis=1))
  if len(empty):
    height, width = sizes[empty[0]]
    raise ValueError(
      f"'{path}': image '{files[empty[0]]}' has the size {width} x {height}: "
      "write its 'width' and 'height' in pixels"
    )
  return ids, files, sizes


def _classes(path, categories):
  """Returns ids and names of the classes, in the order of the ids.

  Roboflow lists a group of classes, which no box has, as one more category of
  supercategory 'none'. It is left out if a class has the same name.
  """
  names = collections.Counter(x.name for x in categories)
  chosen = [
    x for x in categories if x.supercategory != 'none' or names[x.name] == 1
  ]
  ids = _whole(path, 'categories', 'id', chosen)
  _check_unique(path, 'categories', ids)
  order = np.argsort(ids)
  names = [chosen[i].name for i in order]
  _check_unique(path, 'categories', np.array(names, object), 'name')
  return ids[order], tuple(names)


def _flat(path, content, image_ids):
  """Returns the segments of all images, the image of each, and the PNGs."""
  rows = content.annotations
  ids = _whole(path, 'annotations', 'image_id', rows)
  _check_unique(path, 'annotations', ids, 'image_id')
  owners = _numbers(path, rows, ids, 'image_id', image_ids, 'image')
  segments = [''] * len(image_ids)
  for row, owner in zip(rows, owners.tolist()):
    segments[owner] = row.file_name
  if '' in segments:
    raise ValueError(
      f"'{path}': image {image_ids[segments.index('')]} has no annotation: add "
      'its segments, or remove the image'
    )
  objects = list(itertools.chain(*(row.segments_info for row in rows)))
  counts = [len(row.segments_info) for row in rows]
  return objects, np.repeat(owners, counts), segments


def _require(path, objects, values, name, remedy):
  """Raises ValueError if an object has no value, None, of a name."""
  missing = [i for i, x in enumerate(values) if x is None]
  if missing:
    raise ValueError(
      f"'{path}': {len(missing):,} of {len(objects):,} annotations have no "
      f"'{name}', the first is number {missing[0]} of the list{remedy}"
    )


def _check_complete(path, objects, panoptic):
  """Raises ValueError if an object lacks what every object must have."""
  for name in ('id', 'category_id', 'bbox', *(['image_id'] * (not panoptic))):
    _require(
      path, objects, [getattr(x, name) for x in objects], name,
      '. Files of captions, of keypoints alone and of panoptic segments have no '
      "boxes: give COCO's instances_*.json or a file like it",
    )  # fmt: skip


def _outlines(path, objects) -> np.ndarray:
  """Returns the `segmentation` of each object, JSON, bytes [m]."""
  texts = [bytes(x.segmentation) for x in objects]
  _require(
    path, objects, [None if x == b'null' else x for x in texts], 'segmentation',
    ': add polygons or run lengths, or train a detector of boxes (config.task)',
  )  # fmt: skip
  return np.array(texts, object)


def _whole(path, group, name, items) -> np.ndarray:
  """Returns the values of a key that must be whole numbers, int64 [n]."""
  values = np.array([getattr(item, name) for item in items])
  fine = values.dtype.kind == 'f' and (values == np.floor(values)).all()
  if values.dtype.kind != 'i' and not fine and len(values):
    raise ValueError(
      f"'{path}': '{name}' of the {group} must be whole numbers below 2**63"
    )
  return values.astype(np.int64)


def _check_unique(path, group, values, name='id'):
  """Raises ValueError if several items have the same value."""
  found, counts = np.unique(values, return_counts=True)
  if len(found) < len(values):
    twice = found[counts > 1]
    raise ValueError(
      f"'{path}': several {group} have the same '{name}': "
      f'{", ".join(map(repr, twice[:SHOWN].tolist()))}'
      f'{" ..." if len(twice) > SHOWN else ""}; give each its own'
    )


def _numbers(path, objects, ids, name, known, kind) -> np.ndarray:
  """Returns the place of each object's image or category among the known ids."""
  plural = {'image': 'images', 'category': 'categories'}[kind]
  values = _whole(path, 'annotations', name, objects)
  order = np.argsort(known)
  at = np.searchsorted(known, values, sorter=order)
  at = order[np.minimum(at, len(known) - 1)]
  unknown = np.flatnonzero(known[at] != values)
  if len(unknown):
    shown = ', '.join(
      f'annotation {ids[i]}: {name} {values[i]}' for i in unknown[:SHOWN]
    )
    raise ValueError(
      f"'{path}': {len(unknown):,} annotations are of no {kind} that "
      f"'{plural}' lists ({shown}{' ...' if len(unknown) > SHOWN else ''}): add "
      f'the {kind}, or remove the annotations'
    )
  return at
