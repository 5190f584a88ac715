"""COCO's JSON format as types, by which msgspec parses it and skips the rest."""

from typing import Any

import msgspec

Number = int | float


class Image(msgspec.Struct, gc=False):
  """An image."""

  id: Number
  file_name: str
  height: Number
  width: Number


class Object(msgspec.Struct, gc=False):
  """An object of an image, or a segment."""

  id: Number | None = None
  image_id: Number | None = None
  category_id: Number | None = None
  bbox: tuple[float, float, float, float] | None = None
  area: float | None = None
  iscrowd: int | bool | None = None


class Segments(msgspec.Struct, gc=False):
  """The segments of an image in a panoptic file."""

  image_id: Number
  file_name: str
  segments_info: list[Object]


class Category(msgspec.Struct):
  """A class."""

  id: Number
  name: str
  supercategory: Any = None
  isthing: int | bool = True


class Objects(msgspec.Struct):
  """A file of objects."""

  images: list[Image] | None = None
  annotations: list[Object] | None = None
  categories: list[Category] | None = None


class Panoptic(msgspec.Struct):
  """A panoptic file."""

  images: list[Image] | None = None
  annotations: list[Segments] | None = None
  categories: list[Category] | None = None


class Outlined(Object, gc=False):
  """An object, with its polygons or run lengths as they stand in the file."""

  segmentation: msgspec.Raw = msgspec.Raw(b'null')


class Outlines(msgspec.Struct):
  """A file of objects with their outlines."""

  images: list[Image] | None = None
  annotations: list[Outlined] | None = None
  categories: list[Category] | None = None


# Kind of an annotation file -> its type.
KINDS = {'instances': Objects, 'panoptic': Panoptic, 'outlines': Outlines}
