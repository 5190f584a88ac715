"""Measures of semantic segmentation, from the confusion matrix of a whole split.

The IoU of a class is the number of its pixels that are predicted right, divided by those
that are true or predicted ("The PASCAL Visual Object Classes Challenge", 2015, section
4.3); mIoU is the mean over the classes that occur or are predicted. Boundary IoU counts
only pixels near boundaries, see boundaries.py. The pixels are those of the masks, at
their height and width.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data import records
from vit_jax.distributed import files
from vit_jax.evaluators import base, report_files
from vit_jax.inference import engine
from vit_jax.run import metrics as metrics_lib
from vit_jax.tasks.segmentation import boundaries, class_maps

METRICS = {
  'miou': metrics_lib.Metric('%'),
  'boundary_iou': metrics_lib.Metric('%'),
  'pixel_accuracy': metrics_lib.Metric('%'),
  'mean_accuracy': metrics_lib.Metric('%'),
  'loss': metrics_lib.LOSS,
}


def measure(counts: np.ndarray, boundary: np.ndarray) -> dict[str, Any]:
  """Returns the measures of numbers of pixels, shares from 0 to 1.

  Args:
    counts: by class, the pixels that are right, true and predicted, [3, C].
    boundary: the same in boundary regions, see boundaries.counts.

  Returns:
    `miou`, `boundary_iou`, `pixel_accuracy`, `mean_accuracy`, and by class, float64 [C],
    `iou` and `class_boundary_iou`, nan for classes that neither occur nor are predicted,
    and `accuracy`, nan for those that do not occur.
  """
  hits, true, predicted = np.asarray(counts, np.float64)
  iou = _iou(hits, true, predicted)
  boundary_iou = _iou(*np.asarray(boundary, np.float64))
  accuracy = np.where(true > 0, hits / np.maximum(true, 1), np.nan)
  return {
    'miou': _mean(iou),
    'boundary_iou': _mean(boundary_iou),
    'pixel_accuracy': _pixel_accuracy(hits, true),
    'mean_accuracy': _mean(accuracy),
    'iou': iou,
    'class_boundary_iou': boundary_iou,
    'accuracy': accuracy,
  }


def pixel_counts(confusion: jax.Array) -> jax.Array:
  """Returns the pixels of each class that are right, true and predicted.

  Maps numbers of pixels by true and predicted class, [B, C, C], to [B, 3, C].
  """
  hits = jnp.diagonal(confusion, axis1=1, axis2=2)
  return jnp.stack([hits, confusion.sum(axis=2), confusion.sum(axis=1)], axis=1)


def _pixel_accuracy(hits: np.ndarray, true: np.ndarray) -> float:
  """Returns the share of pixels that are right; nan without any."""
  return float(hits.sum() / true.sum()) if true.any() else np.nan


def _iou(hits: np.ndarray, true: np.ndarray, predicted: np.ndarray) -> np.ndarray:
  """Returns the IoU of each class from numbers of pixels; nan for none."""
  union = true + predicted - hits
  return np.where(union > 0, hits / np.maximum(union, 1), np.nan)


def _mean(values: np.ndarray) -> float:
  """Returns the mean of the values that are not nan; nan without any."""
  values = values[~np.isnan(values)]
  return float(values.mean()) if len(values) else np.nan


class Iou(base.BatchEvaluator):
  """Measures a segment_semantic.Task: its evaluator, and `vit_jax evaluate --report`."""

  metrics = METRICS

  def __init__(self, evaluation: base.Evaluation) -> None:
    super().__init__(evaluation)
    # Pixel counts of the last run, by image.
    self._by_image: dict[int, np.ndarray] = {}
    self.measures: dict[str, Any] = {}

  def compute(
    self, params: Any, extra: Any, batch: dict[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """Returns pixel counts and losses of each image of a batch."""
    task = self.evaluation.task
    truth = batch['truth']
    outputs = task.view_outputs(params, extra, batch)
    predicted, losses = class_maps.classes_and_losses(
      task.head, outputs, batch['size'], truth
    )
    num_classes = len(task.class_names)
    confusion = class_maps.confusion(truth, predicted, num_classes)
    return {
      'counts': pixel_counts(confusion),
      'boundary': boundaries.counts(truth, predicted, batch['size'], num_classes),
      'losses': losses,
      **engine.positions(batch),
    }

  def finish(self, results: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Returns METRICS, and keeps what the report needs."""
    columns = engine.in_order(results)
    counts = columns['counts'].astype(np.int64)  # [n, 3, C]
    self._by_image = dict(zip(columns['index'].tolist(), counts))
    boundary = columns['boundary'].sum(axis=0, dtype=np.int64)
    self.measures = measure(counts.sum(axis=0), boundary)
    values = {name: self.measures[name] for name in METRICS if name != 'loss'}
    loss, weight = columns['losses'].sum(axis=0, dtype=np.float64)
    values['loss'] = float(loss / weight) if weight else np.nan
    return values

  def lines(self) -> list[str]:
    """Returns the report of the last run as a table in Markdown, a row per class."""
    cells = [['class', 'IoU', 'boundary IoU', 'accuracy', 'pixels']]
    for name, *measures, pixels in self._rows():
      texts = [report_files.cell(100 * value, '{:.2f} %') for value in measures]
      cells.append([name, *texts, f'{pixels:,}'])
    return report_files.markdown(cells)

  def _rows(self) -> list[tuple]:
    """Returns name, IoU, boundary IoU, accuracy and true pixels of classes, then means."""
    names = self.evaluation.task.class_names
    pixels = sum(self._by_image.values())[1].tolist()
    measures = self.measures
    columns = [measures[x].tolist() for x in ('iou', 'class_boundary_iou', 'accuracy')]
    means = [measures[x] for x in ('miou', 'boundary_iou', 'mean_accuracy')]
    rows: list[tuple] = list(zip(names, *columns, pixels))
    rows.append(('mean', *means, sum(pixels)))
    return rows

  def write(self, folder: epath.PathLike, facts: Mapping[str, Any]) -> None:
    """Writes the report of the last run: JSON with `facts`, and CSV."""
    path = epath.Path(folder)
    fields = ['iou', 'boundary_iou', 'accuracy', 'pixels']
    rows: list[list[Any]] = [['class', *fields]]
    for name, *measures, pixels in self._rows():
      rows.append([name, *map(report_files.defined, measures), pixels])
    overall = {}
    for name in METRICS:
      if name != 'loss':
        overall[name] = report_files.defined(self.measures[name])
    classes = {}
    for name, *values in rows[1:-1]:
      classes[name] = dict(zip(fields, values))
    content = {
      **facts,
      'num_examples': len(self._by_image),
      'overall': overall,
      'classes': classes,
    }
    with files.naming_output(path, 'report'):
      path.mkdir(parents=True, exist_ok=True)
      text = json.dumps(content, indent=1, ensure_ascii=False)
      files.write(path / 'report.json', text + '\n')
      files.write(path / 'report.csv', report_files.csv_text(rows))

  def write_predictions(self, path: epath.PathLike, source: records.Source) -> None:
    """Writes a table with mIoU and pixel accuracy of each image of the last run."""
    rows = []
    for number in sorted(self._by_image):
      hits, true, predicted = self._by_image[number].astype(np.float64)
      miou = _mean(_iou(hits, true, predicted))
      row = {
        'image': source.evaluated.name(number),
        'miou': report_files.defined(miou),
        'pixel_accuracy': report_files.defined(_pixel_accuracy(hits, true)),
      }
      rows.append(row)
    report_files.write_predictions(path, rows)
