"""Measures of semantic segmentation, from the confusion matrix of a whole split.

The IoU of a class is the number of its pixels that are found, divided by those that are
true or predicted ("The PASCAL Visual Object Classes Challenge", 2015, section 4.3); mIoU
is the mean over the classes that occur or are predicted. The pixels are those of the
masks, at their height and width.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np

from vit_jax.evaluators import base
from vit_jax.inference import engine
from vit_jax.run import metrics as metrics_lib
from vit_jax.tasks.segmentation import class_maps

METRICS = {
  'miou': metrics_lib.Metric('%'),
  'pixel_accuracy': metrics_lib.Metric('%'),
  'mean_accuracy': metrics_lib.Metric('%'),
  'loss': metrics_lib.LOSS,
}


def measure(confusion: np.ndarray) -> dict[str, Any]:
  """Returns the measures of a confusion matrix, shares from 0 to 1.

  Args:
    confusion: numbers of pixels by true and predicted class, [C, C].

  Returns:
    `miou`, `pixel_accuracy`, `mean_accuracy`, and by class, float64 [C], `iou`, nan for
    classes that neither occur nor are predicted, and `accuracy`, nan for those that do not
    occur.
  """
  confusion = np.asarray(confusion, np.float64)
  hits, true = np.diag(confusion), confusion.sum(axis=1)
  union = true + confusion.sum(axis=0) - hits
  iou = np.where(union > 0, hits / np.maximum(union, 1), np.nan)
  accuracy = np.where(true > 0, hits / np.maximum(true, 1), np.nan)
  return {
    'miou': _mean(iou),
    'pixel_accuracy': float(hits.sum() / true.sum()) if true.sum() else np.nan,
    'mean_accuracy': _mean(accuracy),
    'iou': iou,
    'accuracy': accuracy,
  }


def _mean(values: np.ndarray) -> float:
  """Returns the mean of the values that are not nan; nan without any."""
  values = values[~np.isnan(values)]
  return float(values.mean()) if len(values) else np.nan


class Iou:
  """Measures a segment_semantic.Task: its evaluator, and `vit_jax evaluate --report`."""

  metrics: ClassVar = METRICS

  def __init__(self, evaluation: base.Evaluation) -> None:
    self._evaluation = evaluation
    task = evaluation.task

    def compute(
      params: Any, extra: Any, batch: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
      scores = task.outputs(params, extra, batch)
      canvas = batch['truth'].shape[1:]
      predicted = task.class_maps(scores, batch['size'], canvas)
      counts = class_maps.confusion(batch['truth'], predicted, len(task.class_names))
      return {'counts': counts, 'losses': task.pixel_losses(scores, batch)}

    # Every process gets the counts of all images, which are small.
    self._compute = engine.on_all_hosts(evaluation.mesh, compute)
    self._by_image: dict[int, np.ndarray] = {}  # Of the last run.
    self.measures: dict[str, Any] = {}

  def run(
    self, params: Any, extra: Any, stop: Callable[[], bool] = engine.never
  ) -> dict[str, float]:
    """Returns METRICS and `num_examples`."""
    self._by_image = {}
    confusion = 0
    losses = np.zeros(2)
    for results in self._evaluation.compute(
      lambda batch: self._compute(params, extra, batch), stop
    ):
      for number, row in engine.rows(results):
        counts = row['counts'].astype(np.int64)
        confusion = confusion + counts
        losses += row['losses']
        self._by_image[number] = np.stack(
          [np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)]
        )
    self.measures = measure(confusion)
    values = {name: self.measures[name] for name in METRICS if name != 'loss'}
    loss = float(losses[0] / losses[1]) if losses[1] else np.nan
    return {**values, 'loss': loss, 'num_examples': len(self._by_image)}
