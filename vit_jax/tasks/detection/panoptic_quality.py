"""Panoptic quality (arXiv 1801.00868), as COCO's evaluation computes it.

A found segment matches a true one of the same class if their overlap (IoU) is
above 1/2; at most one does. For each class,

  PQ = sum of the IoU of matches / (matches + unmatched, true and found, / 2),

which is the product of SQ, the mean IoU of matches, and RQ, the F1 score. The
metrics are means over classes. Pixels without a true segment are void: they do
not count in the IoU, and a found segment of which more than half is void, or lies
in a crowd of its class, is not counted as unmatched.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import ClassVar

import jax
import numpy as np

from vit_jax.distributed import processes, sharding
from vit_jax.evaluators import base
from vit_jax.inference import engine
from vit_jax.run import metrics as metrics_lib
from vit_jax.tasks.detection import segments as segments_lib

NAMES = tuple(
  figure + group for group in ('', '_things', '_stuff') for figure in ('PQ', 'SQ', 'RQ')
)
_TRUTH = ('index', 'mask', 'label', 'crowd', 'truth_size', 'truth_segments')


class PanopticQuality:
  """Evaluates a vit_jax.tasks.detection.segment.Task with masks on a split."""

  metrics: ClassVar = dict.fromkeys(NAMES, metrics_lib.Metric())

  def __init__(self, evaluation: base.Evaluation):
    self._evaluation, self._task = evaluation, evaluation.task
    task = evaluation.task

    def compute(params, extra, batch):
      found = task.masks(task.outputs(params, extra, batch), batch)
      return found, {name: batch[name] for name in _TRUTH}

    # Masks are large: each process gets only the masks of its own images.
    shardings = sharding.batch_sharding(evaluation.mesh)
    self._find = jax.jit(compute, out_shardings=shardings)

  def run(self, params, extra, stop=engine.never) -> dict[str, float]:
    """Returns NAMES, see `panoptic_quality`, and `num_examples`."""
    counts = {}
    find = functools.partial(self._find, params, extra)
    for results in self._evaluation.compute(find, stop):
      counts.update(self._compare(*results))
    total, count = add_up(counts, len(self._task.is_thing))
    metrics = panoptic_quality(total, self._task.is_thing)
    return {**metrics, 'num_examples': count}

  def _compare(self, found, truth):
    """Yields number and counts of the images of this process in a batch."""
    for i in np.flatnonzero(truth['mask']):
      row = {name: x[i] for name, x in truth.items()}
      height, width = row['truth_size']
      exists = row['label'] >= 0
      yield (
        int(row['index']),
        compare(
          row['truth_segments'][:height, :width],
          row['label'][exists],
          row['crowd'][exists],
          self._task.assemble(found, i, (height, width)),
          len(self._task.class_names),
        ),
      )


def add_up(
  counts: Mapping[int, np.ndarray], num_classes: int
) -> tuple[np.ndarray, int]:
  """Adds up the counts of all processes, which all must call it.

  Takes the results of `compare` by number of the image; an image that several
  processes have counts once. Returns the sum, float64 [4, C], and their number.
  """
  everywhere = processes.attempt('the images compared', lambda: sorted(counts))
  earlier = set().union(*everywhere[: jax.process_index()])
  mine = [counts[i] for i in sorted(counts) if i not in earlier]
  total = sum(mine, np.zeros((4, num_classes)))
  totals = processes.attempt('the panoptic quality', total.tolist)
  return np.sum(totals, axis=0), len(set().union(*everywhere))


def compare(
  numbers: np.ndarray,
  labels: np.ndarray,
  crowd: np.ndarray,
  found: segments_lib.Segments,
  num_classes: int,
) -> np.ndarray:
  """Compares the true segments of an image with those found.

  Takes the number of the true segment of each pixel, int [H, W], from 1, 0 for
  void; the classes of the segments 1, 2, ..., int [n]; whether each is a crowd, not
  to be found; and the segments found. Returns float64 [4, C]: by class the sum of the
  IoU of matches, and the numbers of matches and of unmatched found and true segments.
  """
  n, m = len(labels), len(found.labels)
  both = numbers.astype(np.int64) * (m + 1) + found.numbers
  shared = np.bincount(both.ravel(), minlength=(n + 1) * (m + 1))
  shared = shared.reshape(n + 1, m + 1)  # Pixels; row and column 0 are void.
  true_area, found_area = shared.sum(axis=1)[1:], shared.sum(axis=0)[1:]
  void, inside = shared[0, 1:], shared[1:, 1:]
  union = true_area[:, None] + (found_area - void)[None] - inside
  overlap = inside / np.maximum(union, 1)
  same = labels[:, None] == found.labels[None]
  is_crowd = np.asarray(crowd, bool)
  matches = (overlap > 0.5) & same & ~is_crowd[:, None]  # [n, m]

  hidden = void + (inside * (same & is_crowd[:, None])).sum(axis=0)
  extra = ~matches.any(axis=0) & (2 * hidden <= found_area)
  missed = ~matches.any(axis=1) & ~is_crowd & (true_area > 0)

  rows, columns = np.nonzero(matches)
  by_class = (
    (labels[rows], overlap[rows, columns]), (labels[rows], None),
    (found.labels[extra], None), (labels[missed], None),
  )  # fmt: skip
  return np.array([np.bincount(*x, num_classes) for x in by_class], np.float64)


def panoptic_quality(total: np.ndarray, is_thing: Sequence[bool]) -> dict[str, float]:
  """Computes NAMES of a split from the sum of the results of `compare`.

  `is_thing` tells which classes are of things. The figures, from 0 to 1, are
  means over the classes that occur or are found; NaN where a group has none.
  """
  is_thing = np.asarray(is_thing, bool)
  overlap, matches, extra, missed = total
  weight = matches + (extra + missed) / 2
  figures = {
    'PQ': overlap / np.maximum(weight, 1e-9),
    'SQ': overlap / np.maximum(matches, 1),
    'RQ': matches / np.maximum(weight, 1e-9),
  }
  groups = {'': is_thing | True, '_things': is_thing, '_stuff': ~is_thing}
  found = {}
  for group, members in groups.items():
    occur = (weight > 0) & members
    for name, values in figures.items():
      found[name + group] = float(values[occur].mean() if occur.any() else np.nan)
  return found
