"""Checks boxes and outlines of a file, and turns the boxes into shares.

A box reaches up to a pixel beyond its image in many files, COCO's own among
them, by rounding: it is cut off at the border and counts as right.
"""

import numpy as np

from vit_jax import console
from vit_jax.data.coco import annotation_files, segmentations

_ROUNDING = 1.0  # Pixels by which a right box may reach beyond its image.


def check(
  found: annotation_files.Annotations, broken: str = 'refuse'
) -> tuple[annotation_files.Annotations, np.ndarray]:
  """Checks boxes, and outlines if there are any.

  `broken` says how to treat wrong boxes: 'refuse', 'skip' leaves the objects out,
  'clip' cuts boxes off at the border of the image and leaves out those of which
  nothing remains. Objects with a wrong outline are refused or left out.

  Returns the annotations without the objects left out; and their boxes, float32
  [m, 4], ymin, xmin, ymax, xmax as shares of the image, from 0 to 1.
  """
  if len(found.boxes) and found.boxes.max() <= 1:
    raise ValueError(
      f"'{found.path}': no box is larger than a pixel. A box is [x, y, width, "
      'height] in pixels, and these look like shares of the image: multiply them '
      'by its width and height'
    )
  corners, kept, outside = _clip(found)
  drawn = segmentations.faults(found)
  kept[list(drawn)] = False
  wrong = ~kept | outside
  if wrong.any() and broken == 'refuse':
    raise ValueError(_describe(found, np.flatnonzero(wrong), drawn))
  if broken == 'skip':
    kept &= ~outside
  if wrong.any():
    console.say(
      f"Boxes of '{found.path}': {np.sum(~kept):,} of {len(kept):,} left out, "
      f'{np.sum(kept & outside):,} clipped (broken_boxes={broken}).'
    )
  return found.select(kept), corners[kept].astype(np.float32)


def _clip(found):
  """Cuts boxes off at the border of their images.

  Returns ymin, xmin, ymax, xmax as shares, float64 [m, 4]; whether something
  remains, bool [m]; and whether the box reaches beyond the image, bool [m].
  """
  sizes = found.sizes[found.image].astype(np.float64)  # [m, 2]
  low = found.boxes[:, [1, 0]]
  high = low + found.boxes[:, [3, 2]]
  outside = (low < -_ROUNDING) | (high > sizes + _ROUNDING)
  shares = np.concatenate([np.clip(low / sizes, 0, 1), np.clip(high / sizes, 0, 1)], 1)
  # In float32, in which the boxes are used.
  size = np.diff(shares.astype(np.float32).reshape(-1, 2, 2), axis=1)
  return shares, (size > 0).all(axis=(1, 2)), outside.any(axis=1)


def _describe(found, wrong, drawn) -> str:
  """Describes wrong boxes and outlines, and what may have happened to them."""
  lines = []
  for i in wrong[: annotation_files.SHOWN]:
    height, width = found.sizes[found.image[i]]
    box = found.boxes[i]
    shown = f'[{", ".join(f"{x:g}" for x in box)}]'
    if i in drawn:
      fault = drawn[i]
    elif (box[2:] < 0).any():
      fault = f'{shown} has a negative size'
    elif (box[2:] == 0).any():
      fault = f'{shown} has no area'
    else:
      fault = f'{shown} is not inside of the image of {width} x {height}'
    file = found.files[found.image[i]]
    lines.append(f"\n  annotation {found.ids[i]} of image '{file}': {fault}")
  what = 'boxes or outlines' if drawn else 'boxes'
  return (
    f"'{found.path}': {len(wrong):,} of {len(found.ids):,} {what} are wrong; a box "
    f'is [x, y, width, height] in pixels.{"" if drawn else _guess(found)}'
    f'{"".join(lines)}\nCorrect the file, leave these objects out with '
    '--config.broken_boxes=skip, or cut the boxes off at the border with '
    '--config.broken_boxes=clip'
  )


def _guess(found) -> str:
  """Returns a remark if all boxes would be right in another notation."""
  sizes = found.sizes[found.image]
  low, high = found.boxes[:, :2], found.boxes[:, 2:]
  ends = sizes[:, ::-1] + _ROUNDING
  if ((low >= -_ROUNDING) & (high > low) & (high <= ends)).all():
    return ' These look like corners [x0, y0, x1, y1].'
  return ''
