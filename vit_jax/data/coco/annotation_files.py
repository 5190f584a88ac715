"""Reads annotation files in COCO's JSON format into arrays.

The format (https://cocodataset.org/#format-data), in short:

  {"images": [{"id": 7, "file_name": "a.jpg", "width": 640, "height": 480}],
   "categories": [{"id": 3, "name": "cat"}],
   "annotations": [{"id": 1, "image_id": 7, "category_id": 3,
                    "bbox": [x, y, width, height], "area": 12.5, "iscrowd": 0}]}

Boxes are in pixels from the upper left; `area` (by default the area of the box) and
`iscrowd` (by default 0) may be absent. A box that is absent, empty or not a number is
reported, or its object left out, by box_checks.py. In a panoptic file an annotation is an
image of segments: {"image_id": 7, "file_name": "a.png", "segments_info": [...]}
with `id`, `category_id`, `bbox`, `area` and `iscrowd` of each segment.

The ids of categories may have gaps; classes are numbered from 0 in their order.
"""

import collections
from collections.abc import Sequence
import functools
import itertools
import json
import os
import re
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from vit_jax import console
from vit_jax.data import records, typed_json
from vit_jax.data.images import image_files
from vit_jax.distributed import files, text_files

SHOWN = 5  # Number of faults in a message.
_NOT_A_NUMBER = re.compile(rb'NaN|-?Infinity')
_STRING_OR_NAN = re.compile(rb'"(?:[^"\\]|\\.)*"|' + _NOT_A_NUMBER.pattern)

_T = TypeVar('_T')
_Id = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Pixels = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
_Area = Annotated[float, msgspec.Meta(ge=0, le=2**62)]
_FileName = Annotated[str, msgspec.Meta(pattern=r'^[^\0]+$')]


class Image(msgspec.Struct, gc=False):
  """An image without its size."""

  id: _Id
  file_name: _FileName


class _SizedImage(Image, gc=False):
  height: _Pixels
  width: _Pixels


class _Segment(msgspec.Struct, gc=False):
  id: _Id
  category_id: _Id
  bbox: list[float | None] | None = None
  area: _Area | None = None
  iscrowd: bool | None = None


class _Object(_Segment, gc=False, kw_only=True):
  image_id: _Id


class _Outlined(_Object, gc=False, kw_only=True):
  segmentation: msgspec.Raw


class _Segments(msgspec.Struct, gc=False):
  image_id: _Id
  file_name: _FileName
  segments_info: list[_Segment]


class _Category(msgspec.Struct):
  id: _Id
  name: str
  supercategory: Any = None
  isthing: bool = True


class _File(msgspec.Struct, Generic[_T]):
  images: Annotated[list[_SizedImage], msgspec.Meta(min_length=1)]
  annotations: list[_T]
  categories: Annotated[list[_Category], msgspec.Meta(min_length=1)]


_FILE_KEYS = (b'images', b'annotations', b'categories')
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
  boxes: np.ndarray  # float64 [m, 4], x, y, width, height in pixels; NaN: no box.
  area: np.ndarray  # float32 [m], in pixels.
  crowd: np.ndarray  # bool [m].
  segments: Sequence[str] = ()  # n names of the PNGs of a panoptic file.
  stuff: tuple[int, ...] = ()  # Numbers of its classes that are not things.
  # `segmentation` of each object, JSON, bytes [m]; only of the kind 'outlines'.
  outlines: np.ndarray | None = None

  @property
  def counts(self) -> np.ndarray:
    """Number of objects of each image, int64 [n]."""
    return np.bincount(self.image, minlength=len(self.files))

  def select(self, kept: np.ndarray) -> 'Annotations':
    """Returns the annotations of the objects with these numbers, or where bool [m]."""
    names = ('ids', 'image', 'label', 'boxes', 'area', 'crowd', 'outlines')
    columns = {name: getattr(self, name) for name in names}
    return self._replace(**{k: x[kept] for k, x in columns.items() if x is not None})

  def digest(self) -> str:
    """Returns a hash of everything but the path of the file."""
    lists = self.files, self.classes, self.segments, map(str, self.stuff)
    names = '\0'.join(name for x in lists for name in (*x, ''))
    arrays = (x for x in self[:-1] if isinstance(x, np.ndarray))
    outlines = () if self.outlines is None else self.outlines
    return files.digest([names.encode(), *arrays, *outlines])


def read(path: str, kind: str = 'instances') -> Annotations:
  """Reads a file of the kind 'instances', 'outlines' or 'panoptic'.

  The content is cached until the file changes. ValueError if the file is not of
  its kind.
  """
  return _read(path, kind, image_files.stamp(os.fsencode(path)))


@functools.lru_cache(maxsize=2)  # Files of a training and a test split.
def _read(path, kind, stamp):
  del stamp  # A key of the cache.
  name = 'panoptic' if kind == 'panoptic' else 'instances'
  needed = " and the 'segmentation' of each object" * (kind == 'outlines')
  content = parse(path, _KINDS[kind], name, needed)
  image_ids = _unique(path, 'images', content.images, 'id')
  files = _unique(path, 'images', content.images, 'file_name').tolist()
  categories = _classes(path, content.categories)
  category_ids = np.array([category.id for category in categories], np.int64)
  classes = tuple(category.name for category in categories)
  objects, segments, outlines = content.annotations, (), None
  if kind == 'panoptic':
    objects, owners, segments = _flat(path, content, image_ids)
    # The id of a segment is its colour, which segments of other images may share.
    ids = np.array([x.id for x in objects], np.int64)
  else:
    ids = _unique(path, 'annotations', objects, 'id')
    owners = _numbers(path, objects, ids, 'image_id', image_ids, 'images')
  label = _numbers(path, objects, ids, 'category_id', category_ids, 'categories')
  boxes = [x.bbox if x.bbox and len(x.bbox) == 4 else 4 * [np.nan] for x in objects]
  boxes = np.array(boxes, np.float64).reshape(-1, 4)  # None becomes NaN.
  area = np.array([x.area for x in objects], np.float64)  # None becomes NaN.
  area = np.where(np.isfinite(area), area, boxes[:, 2] * boxes[:, 3])
  if kind == 'outlines':
    outlines = np.array([bytes(x.segmentation) for x in objects], object)
  sizes = np.array([(x.height, x.width) for x in content.images])
  crowd = np.array([bool(x.iscrowd) for x in objects], bool)
  stuff = tuple(i for i, category in enumerate(categories) if not category.isthing)
  images = path, image_ids, files, sizes, classes
  columns = ids, owners, label, boxes, area.astype(np.float32), crowd
  found = Annotations(*images, *columns, segments, stuff, outlines)
  return found.select(np.argsort(owners, kind='stable'))


def parse(path: str, kind: type[_T], name: str, needed: str = '') -> _T:
  """Returns the content of a file like COCO's files of a name, a msgspec.Struct."""
  content = image_files.read_file(path)
  try:
    content = text_files.as_utf8(content)
    parsed = _decode(content, kind)
    # Only then, since this takes 15 s for COCO's largest file.
    if any(content.count(b'"%s"' % key) > 1 for key in _FILE_KEYS):
      json.loads(content, object_pairs_hook=files.check_unique)
    return parsed
  except ValueError as e:
    raise ValueError(
      f"'{path}' is not a COCO annotation file: {str(e).replace('`$.', '`')}; use a "
      f"JSON file like COCO's {name}_*.json, with 'images' and 'annotations'{needed} "
      '(https://cocodataset.org/#format-data)'
    ) from e


def _decode(content: bytes, kind: type[_T]) -> _T:
  """Decodes JSON, in which Python may have written NaN and Infinity; they become null."""
  # Not strictly: some tools write ids as 7.0.
  try:
    return typed_json.decode(content, kind, strict=False)
  except ValueError:
    if not _NOT_A_NUMBER.search(content):
      raise
  cleaned = _STRING_OR_NAN.sub(
    lambda match: match[0] if match[0].startswith(b'"') else b'null', content
  )
  return typed_json.decode(cleaned, kind, strict=False)


def _classes(path: str, categories: Sequence[_Category]) -> list[_Category]:
  """Returns the categories that are classes, in the order of their ids."""
  # Roboflow adds a category of supercategory 'none' for the group of all classes. It
  # is left out if a class has the same name.
  counts = collections.Counter(x.name for x in categories)
  classes = [x for x in categories if x.supercategory != 'none' or counts[x.name] == 1]
  classes.sort(key=lambda category: category.id)
  _unique(path, 'categories', classes, 'id')
  if repeated := records.repeated_names(x.name for x in classes):
    ids = [x.id for x in classes if x.name == repeated[0]]
    console.say(
      f"'{path}' has several categories named '{repeated[0]}', of the ids {ids}: they "
      'are separate classes.'
    )
  return classes


def _flat(path, content, image_ids):
  """Returns the segments of all images, the image of each, and the PNGs."""
  rows = content.annotations
  ids = _unique(path, 'annotations', rows, 'image_id')
  owners = _numbers(path, rows, ids, 'image_id', image_ids, 'images')
  segments = [''] * len(image_ids)
  for row, owner in zip(rows, owners.tolist()):
    segments[owner] = row.file_name
  if '' in segments:
    raise ValueError(
      f"'{path}': image {image_ids[segments.index('')]} has no annotation: add "
      'its segments, or remove the image'
    )
  objects = list(itertools.chain(*(row.segments_info for row in rows)))
  return objects, np.repeat(owners, [len(row.segments_info) for row in rows]), segments


def _unique(path, group, items, name) -> np.ndarray:
  """Returns the values of a key, [n], which must differ."""
  values = [getattr(item, name) for item in items]
  twice = [value for value, n in collections.Counter(values).items() if n > 1]
  if twice:
    raise ValueError(
      f"'{path}': several {group} have the same '{name}': {twice[:SHOWN]}; make "
      'them unique'
    )
  return np.array(values, object if 'name' in name else np.int64)


def _numbers(path, objects, ids, name, known, group) -> np.ndarray:
  """Returns the place of each object's image or category among the known ids."""
  places = {number: i for i, number in enumerate(known.tolist())}
  values = [getattr(x, name) for x in objects]
  unknown = [i for i, value in enumerate(values) if value not in places]
  if unknown:
    shown = [f'annotation {ids[i]}: {name} {values[i]}' for i in unknown[:SHOWN]]
    raise ValueError(
      f"'{path}': {len(unknown):,} annotations have an {name} that '{group}' does "
      f'not list ({", ".join(shown)}): add it, or remove the annotations'
    )
  return np.array([places[value] for value in values], np.int64)
