"""Masks of objects: polygons, run lengths and panoptic PNGs as arrays.

COCO stores the outline of an object (`segmentation`) as polygons, [[x0, y0, x1,
y1, ...], ...] in pixels, or as run lengths, {"size": [height, width], "counts":
...}, columns first, compressed (a text) or not (a list). A panoptic PNG stores
the id of each pixel's segment as R + 256 G + 65536 B.
"""

from collections.abc import Sequence
import json
from typing import Any

import numpy as np

from vit_jax.files import images


def decode(segmentations: Sequence[Any], height: int, width: int) -> np.ndarray:
  """Draws the masks of the objects of an image.

  Args:
    segmentations: the `segmentation` of each object, see the top of this
      module.
    height: height of the image in pixels.
    width: width of the image in pixels.

  Returns:
    uint8 [n, height, width], 1 within the object.

  Raises:
    ValueError: if a segmentation has another form, or is of another size.
  """
  masks = np.zeros((len(segmentations), height, width), np.uint8)
  for mask, segmentation in zip(masks, segmentations):
    mask[:] = _decode(segmentation, height, width)
  return masks


def _decode(segmentation, height, width):
  from faster_coco_eval import mask as coco_mask

  if isinstance(segmentation, list):
    wrong = [x for x in segmentation if not _is_polygon(x)]
    if wrong:
      raise ValueError(
        f'{str(wrong[0])[:60]} is no polygon: a `segmentation` is a list of '
        'polygons [x0, y0, x1, y1, ...] of at least three points'
      )
    if not segmentation:
      return 0
    runs = coco_mask.frPyObjects(segmentation, height, width)
    return coco_mask.decode(coco_mask.merge(runs))
  size = segmentation.get('size') if isinstance(segmentation, dict) else None
  if size != [height, width] or 'counts' not in segmentation:
    raise ValueError(
      f'{str(segmentation)[:60]} is no segmentation of an image of {width} x '
      f'{height}: give polygons, or an object with `counts` and the `size` '
      f'[{height}, {width}]'
    )
  counts = segmentation['counts']
  if isinstance(counts, list):
    if sum(counts) != height * width:
      raise ValueError(
        f'the run lengths {str(counts)[:60]} add up to {sum(counts)}, and the '
        f'image has {height * width} pixels'
      )
    segmentation = coco_mask.frPyObjects(segmentation, height, width)
  return coco_mask.decode(segmentation)


def _is_polygon(x) -> bool:
  return (
    isinstance(x, list)
    and len(x) >= 6
    and len(x) % 2 == 0
    and all(isinstance(value, int | float) for value in x)
  )


def encode_image(
  height: int, width: int, outlines: Sequence[tuple[int, bytes]]
) -> list[bytes]:
  """Returns the objects of an image in the form that `paint` takes.

  Args:
    height: height of the image in pixels.
    width: width of the image in pixels.
    outlines: id and `segmentation`, JSON, of each object.
  """
  head = b'[%d,%d]' % (height, width)
  return [head, *(b'[%d,%s]' % outline for outline in outlines)]


def paint(encoded: Sequence[bytes]) -> bytes:
  """Paints the objects of an image as a panoptic PNG.

  Pixel values R + 256 G + 65536 B are the numbers of the objects in the order
  given, from 1, and 0 where there is none. Of objects that overlap, the
  smallest lies on top.

  Args:
    encoded: result of `encode_image`.

  Returns:
    The content of the file.

  Raises:
    ValueError: see `decode`; names the object.
  """
  (height, width), *objects = map(json.loads, encoded)
  masks = []
  for name, segmentation in objects:
    try:
      masks.append(decode([segmentation], height, width)[0])
    except ValueError as e:
      raise ValueError(f'annotation {name}: {e}') from e
  numbers = np.zeros((height, width), np.int64)
  for i in sorted(range(len(masks)), key=lambda i: -int(masks[i].sum())):
    numbers[masks[i] > 0] = i + 1
  colours = numbers[..., None] // np.array([1, 256, 65_536]) % 256
  return images.encode_png(colours.astype(np.uint8))
