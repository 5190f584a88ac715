"""Masks of objects: polygons and run lengths as arrays and panoptic images.

COCO stores the outline of an object (`segmentation`) as polygons, [[x0, y0, x1,
y1, ...], ...] in pixels, or as run lengths in column order, {"size": [height,
width], "counts": ...}, compressed (a string) or not (a list).
"""

from collections.abc import Iterable
import json
from typing import Annotated, Any

import msgspec
import numpy as np

from vit_jax.data.coco import annotation_files, panoptic
from vit_jax.data.images import images


class _Runs(msgspec.Struct):
  size: tuple[int, int]
  counts: str | list[int]


# Largest number of pixels of a mask, a byte each: an annotation may state any size.
_MOST_PIXELS = 2**30
_Polygons = list[Annotated[list[float], msgspec.Meta(min_length=6)]]


def decode(segmentation: Any, height: int, width: int) -> np.ndarray:
  """Draws the mask of an object, uint8 [height, width]; see `_check` for errors."""
  _check(segmentation, height, width)
  return _draw(segmentation, height, width)


def encode(mask: np.ndarray) -> str:
  """Returns the compressed run lengths (`counts`) of a mask, bool [height, width]."""
  from faster_coco_eval import mask as coco_mask

  runs = coco_mask.encode(np.asfortranarray(mask, np.uint8))
  return runs['counts'].decode()


def box(mask: np.ndarray) -> tuple[float, float, float, float]:
  """Returns x0, y0, x1, y1 of the pixels of a mask, bool [height, width]."""
  rows = np.flatnonzero(mask.any(axis=1))
  columns = np.flatnonzero(mask.any(axis=0))
  x0 = columns[0]
  y0 = rows[0]
  x1 = columns[-1] + 1
  y1 = rows[-1] + 1
  return float(x0), float(y0), float(x1), float(y1)


def _draw(segmentation: Any, height: int, width: int) -> np.ndarray:
  from faster_coco_eval import mask as coco_mask

  if not segmentation:  # No polygons.
    return np.zeros((height, width), np.uint8)
  if isinstance(segmentation, list):
    runs = coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width))
  elif isinstance(segmentation['counts'], list):
    runs = coco_mask.frPyObjects(segmentation, height, width)
  else:
    runs = segmentation
  return coco_mask.decode(runs)


def _check(segmentation: Any, height: int, width: int) -> None:
  """Raises ValueError for a segmentation that cannot be drawn."""
  try:
    if height * width > _MOST_PIXELS:
      raise ValueError(f'a mask may have at most {_MOST_PIXELS:,} pixels')
    parsed = msgspec.convert(segmentation, _Polygons | _Runs)
    if isinstance(parsed, list):
      # faster_coco_eval does not check polygons, and draws distant ones for hours.
      for polygon in parsed:
        # An odd number of coordinates fails here.
        points = np.reshape(polygon, (-1, 2)) / (width, height)
        if not ((points >= -1) & (points <= 2)).all():
          raise ValueError('it reaches beyond the image by more than its size')
    elif parsed.size != (height, width):
      raise ValueError(f'its size is {list(parsed.size)}')
    else:
      _draw(segmentation, height, width)
  except (ValueError, RuntimeError) as e:
    raise ValueError(
      f'segmentation {str(segmentation)[:60]} does not fit an image of {width} x '
      f'{height} pixels: {e}; use polygons [x0, y0, x1, y1, ...] of at least three '
      f'points, or run lengths with size [{height}, {width}]'
    ) from e


def faults(annotations: annotation_files.Annotations) -> dict[int, str]:
  """Returns what is wrong with the outlines, if any, by number of the object."""
  faults_by_object: dict[int, str] = {}
  if annotations.outlines is None:
    return faults_by_object
  sizes = annotations.sizes[annotations.image].tolist()
  for i, (outline, (height, width)) in enumerate(zip(annotations.outlines, sizes)):
    try:
      _check(msgspec.json.decode(outline), height, width)
    except ValueError as e:
      faults_by_object[i] = str(e)
  return faults_by_object


def encode_image(
  height: int, width: int, outlines: Iterable[tuple[int, bytes]]
) -> bytes:
  """Returns the objects, (id, `segmentation` as JSON) each, for `paint`."""
  objects = b','.join(b'[%d,%s]' % outline for outline in outlines)
  return b'[%d,%d,[%s]]' % (height, width, objects)


def paint(encoded: bytes) -> bytes:
  """Returns the content of a panoptic PNG from the result of `encode_image`.

  Objects are numbered from 1 in the order given; 0 is the background. Where objects
  overlap, the smallest is on top.
  """
  height, width, objects = json.loads(encoded)
  masks = []
  for name, segmentation in objects:
    try:
      masks.append(decode(segmentation, height, width))
    except ValueError as e:
      raise ValueError(f'annotation {name}: {e}') from e
  numbers = np.zeros((height, width), np.int64)
  for i in sorted(range(len(masks)), key=lambda i: -int(masks[i].sum())):
    numbers[masks[i] > 0] = i + 1
  return images.encode_png(panoptic.colours(numbers))
