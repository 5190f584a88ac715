"""Panoptic quality (arXiv 1801.00868), as COCO's evaluation computes it.

A predicted segment matches a true one of the same class if their overlap (IoU) is
above 1/2; at most one does. For each class,

  PQ = sum of the IoU of matches / (matches + unmatched, true and predicted, / 2),

which is the product of SQ, the mean IoU of matches, and RQ, the F1 score. The
metrics are means over classes. Pixels without a true segment are void: they do
not count in the IoU, and a predicted segment of which more than half is void, or lies
in a crowd of its class, is not counted as unmatched.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np

from vit_jax.distributed import processes, sharding
from vit_jax.evaluators import base
from vit_jax.run import metrics as metrics_lib
from vit_jax.tasks.detection import segments as segments_lib

NAMES = (
  'PQ',
  'SQ',
  'RQ',
  'PQ_things',
  'SQ_things',
  'RQ_things',
  'PQ_stuff',
  'SQ_stuff',
  'RQ_stuff',
)
# Arrays [B, ...] by name.
MasksAndTruth: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any]]


class PanopticQuality(base.BatchEvaluator):
  """Evaluates a vit_jax.tasks.detection.segment.Task with masks on a split."""

  # Tensors of the task's `example` that describe the true segments.
  TRUTH: ClassVar[tuple[str, ...]] = (
    'index',
    'mask',
    'label',
    'crowd',
    'truth_size',
    'truth_segments',
  )
  metrics = dict.fromkeys(NAMES, metrics_lib.Metric())
  per_process: ClassVar[bool] = True

  def compute(
    self, params: Any, extra: Any, batch: dict[str, jax.Array]
  ) -> MasksAndTruth:
    """Returns the masks of a batch, and the truth."""
    task = self.evaluation.task
    masks = task.masks(task.outputs(params, extra, batch), batch)
    return masks, {name: batch[name] for name in self.TRUTH}

  def reduce(self, results: MasksAndTruth) -> Any:
    """Returns the counts of each image of this process, by its number."""
    masks, truth = results
    task = self.evaluation.task
    counts = {}
    for i in np.flatnonzero(truth['mask']):
      height, width = truth['truth_size'][i]
      is_object = truth['label'][i] >= 0
      counts[int(truth['index'][i])] = compare(
        truth['truth_segments'][i][:height, :width],
        truth['label'][i][is_object],
        truth['crowd'][i][is_object],
        task.assemble(masks, i, (height, width)),
        len(task.class_names),
      )
    return counts

  def finish(self, results: Sequence[Any]) -> dict[str, float]:
    """Returns NAMES, see `panoptic_quality`."""
    counts: dict[int, np.ndarray] = {}
    for batch_counts in results:
      counts.update(batch_counts)
    is_thing = self.evaluation.task.is_thing
    return panoptic_quality(add_up(counts, len(is_thing)), is_thing)


def add_up(counts: Mapping[int, np.ndarray], num_classes: int) -> np.ndarray:
  """Adds up the counts of all processes, which all must call it.

  An image that several processes have counts once.

  Args:
    counts: results of `compare` by the number of the image.
    num_classes: C.

  Returns:
    The sum, float64 [4, C].
  """
  numbers = sharding.gather_bytes(np.array([*counts], np.int64).tobytes())
  earlier_numbers: set[int] = set()
  for content in numbers[: jax.process_index()]:
    earlier_numbers.update(np.frombuffer(content, np.int64).tolist())
  total = np.zeros((4, num_classes))
  for number in sorted(counts):
    if number not in earlier_numbers:
      total += counts[number]
  totals = processes.attempt('the panoptic quality', total.tolist)
  return np.sum(totals, axis=0)


def compare(
  numbers: np.ndarray,
  labels: np.ndarray,
  crowd: np.ndarray,
  predicted: segments_lib.Segments,
  num_classes: int,
) -> np.ndarray:
  """Compares the true segments of an image with the predicted ones.

  Args:
    numbers: number of the true segment of each pixel, int [H, W], from 1, 0 for void.
    labels: classes of the true segments 1, 2, ..., int [n].
    crowd: whether each is a crowd, which is not to be predicted, [n].
    predicted: the predicted segments.
    num_classes: C.

  Returns:
    float64 [4, C], by class the sum of the IoU of matches, and the numbers of matches
    and of unmatched predicted and true segments.
  """
  n = len(labels)
  m = len(predicted.labels)
  pairs = numbers.astype(np.int64) * (m + 1) + predicted.numbers
  pixels = np.bincount(pairs.ravel(), minlength=(n + 1) * (m + 1))
  pixels = pixels.reshape(n + 1, m + 1)  # Row and column 0 are void.
  true_area, predicted_area = pixels.sum(axis=1)[1:], pixels.sum(axis=0)[1:]
  void = pixels[0, 1:]
  intersection = pixels[1:, 1:]
  union = true_area[:, None] + (predicted_area - void)[None] - intersection
  iou = intersection / np.maximum(union, 1)
  same_class = labels[:, None] == predicted.labels[None]
  is_crowd = np.asarray(crowd, bool)
  matches = (iou > 0.5) & same_class & ~is_crowd[:, None]  # [n, m]

  in_crowd = (intersection * (same_class & is_crowd[:, None])).sum(axis=0)
  is_extra = ~matches.any(axis=0) & (2 * (void + in_crowd) <= predicted_area)
  is_missed = ~matches.any(axis=1) & ~is_crowd & (true_area > 0)

  rows, columns = np.nonzero(matches)
  counts = [
    np.bincount(labels[rows], iou[rows, columns], num_classes),
    np.bincount(labels[rows], minlength=num_classes),
    np.bincount(predicted.labels[is_extra], minlength=num_classes),
    np.bincount(labels[is_missed], minlength=num_classes),
  ]
  return np.array(counts, np.float64)


def panoptic_quality(total: np.ndarray, is_thing: Sequence[bool]) -> dict[str, float]:
  """Computes NAMES of a split, from 0 to 1.

  They are means over the classes that occur or are predicted; NaN where a group has
  none.

  Args:
    total: sum of the results of `compare`, [4, C].
    is_thing: whether each class is of things.
  """
  things = np.asarray(is_thing, bool)
  iou, matches, extra, missed = total
  weight = matches + (extra + missed) / 2
  qualities = {
    'PQ': iou / np.maximum(weight, 1e-9),
    'SQ': iou / np.maximum(matches, 1),
    'RQ': matches / np.maximum(weight, 1e-9),
  }
  groups = {'': things | True, '_things': things, '_stuff': ~things}
  metrics = {}
  for group, members in groups.items():
    occurs = (weight > 0) & members
    for name, values in qualities.items():
      metrics[name + group] = float(values[occurs].mean() if occurs.any() else np.nan)
  return metrics
