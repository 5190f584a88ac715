"""Average precision and recall of the masks of instances, as COCO defines them.

The overlap (IoU) is that of pixels, at the height and width of the original image, or at
those of `truth_size`; everything else is as for boxes, see average_precision.py. Objects
are the things of panoptic annotations, which do not overlap.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from vit_jax.distributed import sharding
from vit_jax.run import metrics as metrics_lib
from vit_jax.tasks.detection import average_precision as ap, panoptic_quality as pq

_PREFIX = 'mask_'  # Begins the names of the metrics.


METRICS = {
  **pq.PanopticQuality.metrics,
  **{_PREFIX + name: metrics_lib.Metric() for name in ap.NAMES},
}


class PanopticQualityAndPrecision(pq.PanopticQuality):
  """Also evaluates the `candidates` of a vit_jax.tasks.detection.segment.Task."""

  TRUTH: ClassVar[tuple[str, ...]] = (
    *pq.PanopticQuality.TRUTH,
    'image_id',
    'area',
    'size',
  )
  metrics = METRICS

  def reduce(self, results: pq.MasksAndTruth) -> tuple[Any, dict[int, Any]]:
    """Returns the counts and the comparison of each image of this process."""
    masks, truth = results
    task = self.evaluation.task
    rows = {}
    for i in np.flatnonzero(truth['mask']):
      row = {name: x[i] for name, x in truth.items()}
      size = tuple(row['truth_size'].tolist())
      candidates = task.candidates(masks, i, size)
      rows[int(row['index'])] = compare(row, task.is_thing, candidates)
    return super().reduce(results), rows

  def finish(self, results: Sequence[tuple[Any, dict[int, Any]]]) -> dict[str, float]:
    """Returns the metrics, those of average_precision.NAMES for masks."""
    quality = super().finish([counts for counts, _ in results])
    rows: dict[int, Any] = {}
    for _, batch_rows in results:
      rows.update(batch_rows)
    content = msgspec.msgpack.encode(rows)
    merged: dict[int, Any] = {}  # An image that several processes have counts once.
    for part in sharding.gather_bytes(content):
      merged.update(msgspec.msgpack.decode(part, type=dict[int, Any]))
    order = sorted(merged, key=lambda i: (merged[i]['image_id'], i))
    images = [merged[i] for i in order]
    precision = ap.average_precision(
      [image['truth'] for image in images],
      [image['detections'] for image in images],
      len(self.evaluation.task.class_names),
      [image['overlaps'] for image in images],
    )
    return {**quality, **{_PREFIX + name: value for name, value in precision.items()}}


def compare(
  row: Mapping[str, np.ndarray],
  is_thing: Sequence[bool],
  candidates: Iterable[tuple[np.ndarray, int, float]],
) -> dict[str, Any]:
  """Compares the candidates of an image with its things.

  Args:
    row: an evaluation example of vit_jax.tasks.detection.segment.Task.
    is_thing: whether each class is a class of things.
    candidates: (mask bool [H, W], class, score); those without pixels do not count.

  Returns:
    `image_id`; and `truth`, `detections` and `overlaps` for average_precision, lists.
  """
  height, width = row['truth_size']
  numbers = row['truth_segments'][:height, :width]
  is_object = row['label'] >= 0
  labels = row['label'][is_object]
  crowd = row['crowd'][is_object] > 0
  pixels = np.bincount(numbers.ravel(), minlength=len(labels) + 1)[1:]
  is_visible_thing = np.array(is_thing, bool)[labels] & (pixels > 0)
  # Pixels of the original per pixel compared.
  scale = float(np.prod(row['size'].astype(np.float64)) / (int(height) * int(width)))
  detections: dict[str, list] = {'labels': [], 'scores': [], 'areas': []}
  overlaps = []
  for mask, label, score in candidates:
    area = int(mask.sum())
    if not area:
      continue
    shared = np.bincount(numbers[mask], minlength=len(labels) + 1)[1:]
    # The union with a crowd is only the candidate.
    union = np.where(crowd, area, area + pixels - shared)
    overlaps.append((shared / union)[is_visible_thing].tolist())
    for name, value in zip(detections, (label, score, area * scale)):
      detections[name].append(value)
  return {
    'image_id': ap.image_id(row),
    'truth': {
      'labels': labels[is_visible_thing].tolist(),
      'areas': row['area'][is_object][is_visible_thing].tolist(),
      'crowd': crowd[is_visible_thing].tolist(),
    },
    'detections': detections,
    'overlaps': overlaps,
  }
