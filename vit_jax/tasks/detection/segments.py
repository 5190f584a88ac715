"""Makes one map of segments out of the overlapping masks of a detector.

As in "End-to-End Object Detection with Transformers" (arXiv 2005.12872, section
4.4): each pixel gets the mask with the greatest logit.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

THRESHOLD = 0.85  # Minimum score of a query whose mask counts.
_SMALL = 4  # Segments of at most this many pixels are dropped.


class Segments(NamedTuple):
  """The segments of an image."""

  # int32 [H, W], number of the segment of each pixel, from 1; 0 for none.
  numbers: np.ndarray
  labels: np.ndarray  # int [m], classes of the segments 1, 2, ...
  scores: np.ndarray  # float [m], scores of the segments.


def assemble(
  masks: np.ndarray,
  labels: np.ndarray,
  scores: np.ndarray,
  is_thing: Sequence[bool],
  size: tuple[int, int],
  extent: Sequence[float] = (1.0, 1.0),
  threshold: float = THRESHOLD,
  merge_stuff: bool = True,
) -> Segments:
  """Gives each pixel to one query, and merges the stuff of a class.

  Queries are dropped if their score is below the threshold, or if at most 4
  pixels are left to their segment; the other queries then share these pixels.

  Args:
    masks: float [Q, h, w], logits.
    labels: int [Q], classes.
    scores: float [Q], from 0 to 1.
    is_thing: whether each class is a class of things.
    size: (height, width) of the map in pixels.
    extent: shares of the height and width of `masks` that show the image; the
      rest is padding.
    threshold: minimum score.
    merge_stuff: whether all pixels of the queries that found one class of stuff
      are its segment. False, as in the released code: the first of these
      queries keeps only its own pixels, and the pixels of the others go to the
      next best mask of any class.

  Returns:
    The segments, the one with the best score first.
  """
  queries = np.argsort(-scores, kind='stable')
  queries = queries[scores[queries] >= threshold]
  while True:
    # By class of stuff, the query that represents its segment.
    representative: dict[int, int] = {}
    for k in queries if merge_stuff else sorted(queries):
      if not is_thing[labels[k]]:
        representative.setdefault(labels[k], k)
    segment = np.array([representative.get(labels[k], k) for k in queries], int)
    owner = _owners(masks[queries], size, extent)
    pixels = np.append(segment, -1)[owner]  # [H, W]; -1 for no query.
    area = np.bincount(pixels[pixels >= 0], minlength=len(scores))
    # The other queries of a class of stuff have no pixels of their own left.
    is_small = area[segment if merge_stuff else queries] <= _SMALL
    if not is_small.any():
      break
    queries = queries[~is_small]
  segments = np.array(list(dict.fromkeys(segment)), int)
  number = np.zeros(len(scores) + 1, np.int32)  # The last one is for pixels of none.
  number[segments] = 1 + np.arange(len(segments))
  return Segments(number[pixels], labels[segments], scores[segments])


def _owners(
  masks: np.ndarray, size: tuple[int, int], extent: Sequence[float]
) -> np.ndarray:
  """Returns the mask with the greatest logit at each pixel; -1 without masks."""
  best = np.full(size, -np.inf, np.float32)
  owners = np.full(size, -1, np.int32)
  for i, large in enumerate(enlarged(masks, size, extent)):
    is_better = large > best
    best[is_better] = large[is_better]
    owners[is_better] = i
  return owners


def enlarged(
  masks: np.ndarray, size: tuple[int, int], extent: Sequence[float] = (1.0, 1.0)
) -> Iterator[np.ndarray]:
  """Yields masks at the size of an image, bilinearly, float32 [H, W] each.

  One after the other: all masks of a photograph may take gigabytes. For the arguments see
  `assemble`.
  """
  bottom, right = np.multiply(masks.shape[1:], extent)
  for mask in masks:
    image = Image.fromarray(np.asarray(mask, np.float32))
    yield np.asarray(
      image.resize(size[::-1], Image.Resampling.BILINEAR, box=(0, 0, right, bottom))
    )
