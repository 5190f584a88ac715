"""Checks the boxes and outlines of a file, and converts boxes to shares."""

import numpy as np

from vit_jax import console
from vit_jax.data.coco import annotation_files, segmentations

# Pixels by which a valid box may reach beyond its image, as in COCO's own files.
_ROUNDING = 1.0


def check(
  found: annotation_files.Annotations, broken: str = 'refuse'
) -> tuple[annotation_files.Annotations, np.ndarray]:
  """Checks boxes, and outlines if there are any.

  `broken` says how to treat wrong boxes: 'refuse'; 'skip' leaves the objects out;
  'clip' clips boxes at the border of the image, and leaves out those outside.
  Objects with a wrong outline are refused or left out.

  Returns the annotations without the objects left out; and their boxes, float32
  [m, 4], ymin, xmin, ymax, xmax as shares of the image, from 0 to 1.
  """
  numbers = found.boxes[np.isfinite(found.boxes)]
  if len(numbers) and numbers.max() <= 1:
    raise ValueError(
      f"'{found.path}': no bbox is larger than a pixel, so they look like shares of "
      'the image: a bbox is [x, y, width, height] in pixels, so multiply them by '
      'width and height of the image'
    )
  sizes = found.sizes[found.image].astype(np.float64)  # [m, 2]
  low = found.boxes[:, [1, 0]]
  high = low + found.boxes[:, [3, 2]]
  outside = ((low < -_ROUNDING) | (high > sizes + _ROUNDING)).any(axis=1)
  shares = np.concatenate([low / sizes, high / sizes], axis=1).clip(0, 1)
  shares = shares.astype(np.float32)
  drawn = segmentations.faults(found)
  kept = (shares[:, 2:] > shares[:, :2]).all(axis=1)
  kept[list(drawn)] = False
  wrong = ~kept | outside
  if wrong.any():
    if broken == 'refuse':
      raise ValueError(_describe(found, np.flatnonzero(wrong), drawn))
    if broken == 'skip':
      kept &= ~outside
    console.say(
      f"Boxes of '{found.path}': {np.sum(~kept):,} of {len(kept):,} left out, "
      f'{np.sum(kept & outside):,} clipped (broken_boxes={broken}).'
    )
  return found.select(kept), shares[kept]


def _describe(found, wrong, drawn) -> str:
  lines = []
  for i in wrong[: annotation_files.SHOWN]:
    height, width = found.sizes[found.image[i]]
    fault = drawn.get(i)
    if fault is None and np.isnan(found.boxes[i]).any():
      fault = 'it has no bbox of four numbers'
    if fault is None:
      box = ', '.join(f'{x:g}' for x in found.boxes[i])
      fault = f'bbox [{box}] is empty or outside the image of {width} x {height} pixels'
    file = found.files[found.image[i]]
    lines.append(f"\n  annotation {found.ids[i]} of image '{file}': {fault}")
  return (
    f"'{found.path}': {len(wrong):,} of {len(found.ids):,} objects are wrong; a bbox "
    f'is [x, y, width, height] in pixels.{"".join(lines)}\nCorrect the file, leave '
    'these objects out with --config.broken_boxes=skip, or clip the boxes at the '
    'border with --config.broken_boxes=clip'
  )
