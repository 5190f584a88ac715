"""Checks boxes and outlines of a file, and turns the boxes into shares.

A box reaches up to a pixel beyond its image in many files, COCO's own among
them, by rounding: it is cut off at the border and counts as right.
"""

import numpy as np

from vit_jax import cli
from vit_jax.data.coco import masks
from vit_jax.data.coco import reading

_ROUNDING = 1.0  # Pixels by which a right box may reach beyond its image.


def check(
  found: reading.Annotations, broken: str = 'refuse'
) -> tuple[reading.Annotations, np.ndarray]:
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
  wrong = ~kept | outside
  if wrong.any() and broken == 'refuse':
    raise ValueError(_describe(found, np.flatnonzero(wrong)))
  drawn = masks.faults(found)
  if drawn and broken == 'refuse':
    raise ValueError(
      f"'{found.path}': {len(drawn):,} of {len(found.ids):,} outlines are wrong."
      f'{_listed(found, drawn)}'
    )
  kept[list(drawn)] = False
  wrong |= ~kept
  if broken == 'skip':
    kept &= ~outside
  if wrong.any():
    cli.say(
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
  shares = np.concatenate(
    [np.clip(low / sizes, 0, 1), np.clip(high / sizes, 0, 1)], 1
  )
  # In float32, in which the boxes are used.
  size = np.diff(shares.astype(np.float32).reshape(-1, 2, 2), axis=1)
  return shares, (size > 0).all(axis=(1, 2)), outside.any(axis=1)


def _describe(found, wrong) -> str:
  """Describes wrong boxes, and what may have happened to them."""
  faults = {}
  for i in wrong[: reading.SHOWN]:
    height, width = found.sizes[found.image[i]]
    box = found.boxes[i]
    if (box[2:] < 0).any():
      fault = 'has a negative size'
    elif (box[2:] == 0).any():
      fault = 'has no area'
    else:
      fault = f'is not inside of the image of {width} x {height}'
    faults[i] = f'[{", ".join(f"{x:g}" for x in box)}] {fault}'
  return (
    f"'{found.path}': {len(wrong):,} of {len(found.ids):,} boxes are wrong; a box "
    f'is [x, y, width, height] in pixels.{_guess(found)}{_listed(found, faults)}, '
    'or cut the boxes off at the border with --config.broken_boxes=clip'
  )


def _listed(found, faults) -> str:
  """Lists faults by number of the object, and says what to do about them."""
  lines = [
    f"\n  annotation {found.ids[i]} of image '{found.files[found.image[i]]}': {x}"
    for i, x in list(faults.items())[: reading.SHOWN]
  ]
  return (
    f'{"".join(lines)}\nCorrect the file, or leave these objects out with '
    '--config.broken_boxes=skip'
  )


def _guess(found) -> str:
  """Returns a remark if all boxes would be right in another notation."""
  sizes = found.sizes[found.image]
  low, high = found.boxes[:, :2], found.boxes[:, 2:]
  ends = sizes[:, ::-1] + _ROUNDING
  if ((low >= -_ROUNDING) & (high > low) & (high <= ends)).all():
    return ' These look like corners [x0, y0, x1, y1].'
  return ''
