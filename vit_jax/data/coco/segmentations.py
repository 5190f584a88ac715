"""Masks of objects: polygons, run lengths and panoptic PNGs as arrays.

COCO stores the outline of an object (`segmentation`) as polygons, [[x0, y0, x1,
y1, ...], ...] in pixels, or as run lengths, {"size": [height, width], "counts":
...}, columns first, compressed (a text) or not (a list). A panoptic PNG stores
the id of each pixel's segment as R + 256 G + 65536 B.
"""

from collections.abc import Sequence
import json
from typing import Annotated, Any

import msgspec
import numpy as np

from vit_jax.data.coco import annotation_files
from vit_jax.data.images import images


def decode(segmentation: Any, height: int, width: int) -> np.ndarray:
  """Draws the mask of an object by its `segmentation`, uint8 [height, width]."""
  outline = check(segmentation, height, width)
  if not isinstance(segmentation, list):
    inside = np.arange(len(outline), dtype=np.uint8) % 2
    return np.repeat(inside, outline).reshape(width, height).T
  if not outline:
    return np.zeros((height, width), np.uint8)
  from faster_coco_eval import mask as coco_mask

  runs = coco_mask.frPyObjects(outline, height, width)
  return coco_mask.decode(coco_mask.merge(runs))


class _Runs(msgspec.Struct):
  size: tuple[int, int]
  counts: str | list[Annotated[int, msgspec.Meta(ge=0)]]


_Polygons = list[Annotated[list[float], msgspec.Meta(min_length=6)]]


def check(segmentation: Any, height: int, width: int) -> list:
  """Returns the polygons or the run lengths of a segmentation.

  What passes is safe to draw: the library that draws trusts its input.
  """
  try:
    found = msgspec.convert(segmentation, _Polygons | _Runs)
    if isinstance(found, list):
      if any(len(polygon) % 2 for polygon in found):
        raise ValueError('a polygon lacks its last y')
    elif found.size != (height, width):
      raise ValueError('it has another size')
    elif isinstance(found.counts, str):
      found.counts = _expand(found.counts)
  except ValueError as e:  # That of msgspec is one, too.
    raise ValueError(
      f'{str(segmentation)[:60]} is no segmentation of an image of {width} x '
      f'{height} ({e}): give polygons [x0, y0, x1, y1, ...] of at least three '
      f'points, or an object with the `size` [{height}, {width}] and `counts`, a '
      'list of whole numbers from 0 on or its compressed text'
    ) from e
  if isinstance(found, list):
    for polygon in found:
      points = np.reshape(polygon, (-1, 2)) / (width, height)
      if not ((points >= -1) & (points <= 2)).all():
        raise ValueError(
          f'the polygon {str(polygon)[:60]} reaches beyond the image of {width} x '
          f'{height} by more than its size'
        )
    return found
  counts = found.counts
  if sum(counts) != height * width:
    raise ValueError(
      f'the run lengths {str(counts)[:60]} add up to {sum(counts)}, and the image '
      f'has {height * width} pixels'
    )
  return counts


def _expand(text: str) -> list[int]:
  """Returns the run lengths of COCO's compressed text, or raises ValueError.

  A number has 5 bits a character, the lowest first, as the character of 48 plus
  these bits, plus 32 if more follow; the last character's bit 16 is the sign.
  From the fourth on it is the difference to the number two places before.
  """
  counts, value, shift = [], 0, 0
  for letter in text:
    bits = ord(letter) - 48
    if not 0 <= bits < 64 or shift > 30:
      raise ValueError(f'{letter!r} cannot stand in such a text')
    value |= (bits & 31) << shift
    shift += 5
    if bits & 32:
      continue
    if bits & 16:
      value -= 1 << shift
    counts.append(value + (counts[-2] if len(counts) > 2 else 0))
    value = shift = 0
  if shift or min(counts, default=0) < 0:
    raise ValueError('the text is cut off, or a length is negative')
  return counts


def faults(found: annotation_files.Annotations) -> dict[int, str]:
  """Returns what is wrong with the outlines, if any, by number of the object."""
  if found.outlines is None:
    return {}
  wrong = {}
  sizes = found.sizes[found.image].tolist()
  for i, (outline, size) in enumerate(zip(found.outlines, sizes)):
    try:
      check(msgspec.json.decode(outline), *size)
    except (msgspec.DecodeError, RecursionError) as e:
      wrong[i] = f'{outline[:60]!r} cannot be read: {e}'
    except ValueError as e:
      wrong[i] = str(e)
  return wrong


def encode_image(
  height: int, width: int, outlines: Sequence[tuple[int, bytes]]
) -> list[bytes]:
  """Returns the objects, (id, `segmentation` as JSON) each, for `paint`."""
  head = b'[%d,%d]' % (height, width)
  return [head, *(b'[%d,%s]' % outline for outline in outlines)]


def paint(encoded: Sequence[bytes]) -> bytes:
  """Returns the content of a panoptic PNG of the result of `encode_image`.

  Pixel values R + 256 G + 65536 B are the numbers of the objects in the order
  given, from 1, and 0 where there is none. Of objects that overlap, the
  smallest lies on top.
  """
  (height, width), *objects = map(json.loads, encoded)
  masks = []
  for name, segmentation in objects:
    try:
      masks.append(decode(segmentation, height, width))
    except ValueError as e:
      raise ValueError(f'annotation {name}: {e}') from e
  numbers = np.zeros((height, width), np.int64)
  for i in sorted(range(len(masks)), key=lambda i: -int(masks[i].sum())):
    numbers[masks[i] > 0] = i + 1
  colours = numbers[..., None] // np.array([1, 256, 65_536]) % 256
  return images.encode_png(colours.astype(np.uint8))
