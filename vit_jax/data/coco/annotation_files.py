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

  def select(self, selection: np.ndarray) -> 'Annotations':
    """Returns the annotations of some objects: their numbers, or a mask bool [m]."""
    columns = {}
    for name in ('ids', 'image', 'label', 'boxes', 'area', 'crowd', 'outlines'):
      column = getattr(self, name)
      if column is not None:
        columns[name] = column[selection]
    return self._replace(**columns)

  def digest(self) -> str:
    """Returns a hash of everything but the path of the file."""
    names = []
    for values in (self.files, self.classes, self.segments, map(str, self.stuff)):
      names += [*values, '']
    arrays = [x for x in self[:-1] if isinstance(x, np.ndarray)]
    outlines = () if self.outlines is None else self.outlines
    return files.digest(['\0'.join(names).encode(), *arrays, *outlines])


def read(path: str, kind: str = 'instances') -> Annotations:
  """Reads a file of the kind 'instances', 'outlines' or 'panoptic'.

  The content is cached until the file changes. ValueError if the file is not of
  its kind.
  """
  return _read(path, kind, image_files.stamp(os.fsencode(path)))


@functools.lru_cache(maxsize=2)  # Files of a training and a test split.
def _read(path: str, kind: str, stamp: Any) -> Annotations:
  del stamp  # A key of the cache.
  name = 'panoptic' if kind == 'panoptic' else 'instances'
  requirement = " and the 'segmentation' of each object" if kind == 'outlines' else ''
  content: Any = parse(path, _KINDS[kind], name, requirement)
  image_ids = _unique_ids(path, 'images', content.images)
  categories = _classes(path, content.categories)
  category_ids = np.array([category.id for category in categories], np.int64)
  objects: Sequence[Any] = content.annotations
  segments: Sequence[str] = ()
  if kind == 'panoptic':
    objects, image, segments = _flat(path, content, image_ids)
    # The id of a segment is its colour, which segments of other images may share.
    ids = np.array([x.id for x in objects], np.int64)
  else:
    ids = _unique_ids(path, 'annotations', objects)
    image = _numbers(path, objects, ids, 'image_id', image_ids, 'images')
  # None becomes NaN.
  boxes = np.array([_box(x) for x in objects], np.float64).reshape(-1, 4)
  area = np.array([x.area for x in objects], np.float64)
  area = np.where(np.isfinite(area), area, boxes[:, 2] * boxes[:, 3])
  outlines = None
  if kind == 'outlines':
    outlines = np.array([bytes(x.segmentation) for x in objects], object)
  annotations = Annotations(
    path=path,
    image_ids=image_ids,
    files=_unique(path, 'images', content.images, 'file_name'),
    sizes=np.array([(x.height, x.width) for x in content.images]),
    classes=tuple(category.name for category in categories),
    ids=ids,
    image=image,
    label=_numbers(path, objects, ids, 'category_id', category_ids, 'categories'),
    boxes=boxes,
    area=area.astype(np.float32),
    crowd=np.array([bool(x.iscrowd) for x in objects], bool),
    segments=segments,
    stuff=tuple(i for i, category in enumerate(categories) if not category.isthing),
    outlines=outlines,
  )
  return annotations.select(np.argsort(image, kind='stable'))


def _box(item: _Segment) -> list[float | None]:
  """Returns the box of an object, [4]; NaN without one."""
  if item.bbox and len(item.bbox) == 4:
    return item.bbox
  return 4 * [np.nan]


def parse(path: str, kind: type[_T], name: str, requirement: str = '') -> _T:
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
      f"JSON file like COCO's {name}_*.json, with 'images' and 'annotations'{requirement} "
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
  _unique_ids(path, 'categories', classes)
  if repeated := records.repeated_names(x.name for x in classes):
    ids = [x.id for x in classes if x.name == repeated[0]]
    console.log(
      f"'{path}' has several categories named '{repeated[0]}', of the ids {ids}: they "
      'are separate classes.'
    )
  return classes


def _flat(
  path: str, content: Any, image_ids: np.ndarray
) -> tuple[list[_Segment], np.ndarray, list[str]]:
  """Returns the segments of all images, the image of each, and the PNGs."""
  rows = content.annotations
  ids = _unique_ids(path, 'annotations', rows, 'image_id')
  image_of_row = _numbers(path, rows, ids, 'image_id', image_ids, 'images')
  pngs = [''] * len(image_ids)
  for row, image in zip(rows, image_of_row.tolist()):
    pngs[image] = row.file_name
  if '' in pngs:
    raise ValueError(
      f"'{path}': image {image_ids[pngs.index('')]} has no annotation: add "
      'its segments, or remove the image'
    )
  segments: list[_Segment] = []
  counts = []
  for row in rows:
    segments += row.segments_info
    counts.append(len(row.segments_info))
  return segments, np.repeat(image_of_row, counts), pngs


def _unique_ids(
  path: str, group: str, items: Sequence[Any], name: str = 'id'
) -> np.ndarray:
  """Returns the numbers of a key, int64 [n], which must differ."""
  return np.array(_unique(path, group, items, name), np.int64)


def _unique(path: str, group: str, items: Sequence[Any], name: str) -> list[Any]:
  """Returns the values of a key, which must differ."""
  values = [getattr(item, name) for item in items]
  repeated = [value for value, n in collections.Counter(values).items() if n > 1]
  if repeated:
    raise ValueError(
      f"'{path}': several {group} have the same '{name}': {repeated[:SHOWN]}; make "
      'them unique'
    )
  return values


def _numbers(
  path: str,
  objects: Sequence[Any],
  ids: np.ndarray,
  name: str,
  known_ids: np.ndarray,
  group: str,
) -> np.ndarray:
  """Returns the position of each object's image or category among the known ids."""
  positions = {number: i for i, number in enumerate(known_ids.tolist())}
  values = [getattr(x, name) for x in objects]
  unknown = [i for i, value in enumerate(values) if value not in positions]
  if unknown:
    examples = [f'annotation {ids[i]}: {name} {values[i]}' for i in unknown[:SHOWN]]
    raise ValueError(
      f"'{path}': {len(unknown):,} annotations have '{name}' values that '{group}' does "
      f'not list ({", ".join(examples)}): add it, or remove the annotations'
    )
  return np.array([positions[value] for value in values], np.int64)
