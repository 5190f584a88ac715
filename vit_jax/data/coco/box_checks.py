"""Checks the boxes and outlines of a file, and scales boxes to fractions of the image."""

from collections.abc import Mapping

import numpy as np

from vit_jax import console
from vit_jax.data.coco import annotation_files, segmentations

# Pixels by which a valid box may reach beyond its image, as in COCO's own files.
_ROUNDING = 1.0


def check(
  annotations: annotation_files.Annotations, broken: str = 'refuse'
) -> tuple[annotation_files.Annotations, np.ndarray]:
  """Checks boxes, and outlines if there are any.

  Args:
    annotations: the annotations of a file.
    broken: how to treat wrong boxes: 'refuse'; 'skip' leaves the objects out; 'clip'
      clips boxes at the border of the image, and leaves out those outside. Objects
      with a wrong outline are refused or left out.

  Returns:
    The annotations without the objects left out; and their boxes, float32 [m, 4], ymin,
    xmin, ymax, xmax as fractions of the image, from 0 to 1.
  """
  numbers = annotations.boxes[np.isfinite(annotations.boxes)]
  if len(numbers) and numbers.max() <= 1:
    raise ValueError(
      f"'{annotations.path}': no bbox is larger than a pixel, so they look like shares "
      'of the image: a bbox is [x, y, width, height] in pixels, so multiply them by '
      'width and height of the image'
    )
  sizes = annotations.sizes[annotations.image].astype(np.float64)  # [m, 2]
  low = annotations.boxes[:, [1, 0]]
  high = low + annotations.boxes[:, [3, 2]]
  is_outside = ((low < -_ROUNDING) | (high > sizes + _ROUNDING)).any(axis=1)
  boxes = np.concatenate([low / sizes, high / sizes], axis=1).clip(0, 1)
  boxes = boxes.astype(np.float32)
  outline_faults = segmentations.faults(annotations)
  mask = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
  mask[list(outline_faults)] = False
  is_wrong = ~mask | is_outside
  if is_wrong.any():
    if broken == 'refuse':
      wrong = np.flatnonzero(is_wrong)
      raise ValueError(_describe(annotations, wrong, outline_faults))
    if broken == 'skip':
      mask &= ~is_outside
    console.log(
      f"Boxes of '{annotations.path}': {np.sum(~mask):,} of {len(mask):,} left out, "
      f'{np.sum(mask & is_outside):,} clipped (broken_boxes={broken}).'
    )
  return annotations.select(mask), boxes[mask]


def _describe(
  annotations: annotation_files.Annotations,
  wrong: np.ndarray,
  outline_faults: Mapping[int, str],
) -> str:
  """Returns the error for the objects with these numbers."""
  lines = []
  for i in wrong[: annotation_files.SHOWN]:
    height, width = annotations.sizes[annotations.image[i]]
    fault = outline_faults.get(i)
    if fault is None and np.isnan(annotations.boxes[i]).any():
      fault = 'it has no bbox of four numbers'
    if fault is None:
      box = ', '.join(f'{x:g}' for x in annotations.boxes[i])
      fault = f'bbox [{box}] is empty or outside the image of {width} x {height} pixels'
    file = annotations.files[annotations.image[i]]
    lines.append(f"\n  annotation {annotations.ids[i]} of image '{file}': {fault}")
  return (
    f"'{annotations.path}': {len(wrong):,} of {len(annotations.ids):,} objects are "
    f'wrong; a bbox is [x, y, width, height] in pixels.{"".join(lines)}\nCorrect the '
    'file, leave these objects out with --config.broken_boxes=skip, or clip the boxes at '
    'the border with --config.broken_boxes=clip'
  )
