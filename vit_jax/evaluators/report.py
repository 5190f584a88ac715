"""The report of a classifier: precision, recall, F1, AUROC, calibration, by class.

  vit_jax evaluate --workdir=/tmp/digits --split=test --report

prints a table, and writes report.json, report.csv, confusion.csv and pictures. As an entry
of `config.evaluators`, {'report': {'type': 'vit_jax.evaluators.report:Report'}}, it adds its
metrics to each evaluation of a run.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any, NamedTuple

from etils import epath
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax import console
from vit_jax.configs import schema
from vit_jax.data import records
from vit_jax.distributed import files
from vit_jax.evaluators import base, measures, report_files
from vit_jax.inference import engine
from vit_jax.run import config as run_config, metrics as metrics_lib

_MOST_ROWS = 100  # Maximum number of classes in a printed table.
_MEANS = ('macro', 'weighted')  # Over classes: plain, and weighted by their images.
_SHARES = ('precision', 'recall', 'f1')
_TITLES = {
  'precision': 'precision',
  'recall': 'recall',
  'f1': 'F1',
  'auroc': 'AUROC',
  'average_precision': 'AP',
}


class Outputs(NamedTuple):
  """What a classifier computes for a split, in the order of the split."""

  numbers: np.ndarray  # Numbers of the images, int32 [n].
  logits: np.ndarray  # float32 [n, C].
  labels: np.ndarray  # bool [n, C].


class Scores(NamedTuple):
  """The measures of a report."""

  overall: dict[str, float]  # The metrics by name; nan if not defined.
  classes: dict[str, np.ndarray]  # [C] by name, see measures.of_classes.
  num_examples: int
  num_left_out: int  # Images without a label, or with several of exclusive classes.
  confusion: np.ndarray | None = None  # int64 [C, C], of exclusive classes.
  bins: Any = None  # vit_jax.evaluators.measures.Bins, of exclusive classes.


def score(outputs: Outputs, task: Any, num_bins: int = 15) -> Scores:
  """Measures the outputs of a classification task."""
  labels = outputs.labels
  probabilities = probabilities_of(outputs, task)
  if task.exclusive:
    mask = labels.sum(axis=1) == 1
    labels, probabilities = labels[mask], probabilities[mask]
  predicted = measures.predictions(probabilities, task.exclusive)
  classes = measures.of_classes(probabilities, labels, predicted)
  overall = {}
  for name in _SHARES:
    overall[f'macro_{name}'] = measures.mean(classes[name])
    overall[f'weighted_{name}'] = measures.mean(classes[name], classes['support'])
  overall['auroc'] = measures.mean(classes['auroc'])
  overall['average_precision'] = measures.mean(classes['average_precision'])
  num_left_out = len(outputs.labels) - len(labels)
  if not task.exclusive:
    return Scores(overall, classes, len(labels), num_left_out)
  bins = measures.reliability(probabilities, labels, num_bins)
  overall['balanced_accuracy'] = overall.pop('macro_recall')
  overall['ece'] = measures.calibration_error(bins)
  overall['kappa'] = measures.kappa(labels, predicted)
  overall['log_loss'] = measures.log_loss(probabilities, labels)
  confusion = measures.confusion(labels, predicted)
  return Scores(overall, classes, len(labels), num_left_out, confusion, bins)


def probabilities_of(outputs: Outputs, task: Any) -> np.ndarray:
  """Returns the probabilities, float64 [n, C], at the temperature of the task."""
  return measures.probabilities(outputs.logits, task.exclusive, task.temperature)


NO_METRICS: dict[str, metrics_lib.Metric] = {}


class Collector(base.BatchEvaluator):
  """Keeps the outputs of a classifier for a split, and measures nothing."""

  metrics: Any = NO_METRICS

  def __init__(self, evaluation: base.Evaluation) -> None:
    super().__init__(evaluation)
    self.outputs: Outputs | None = None  # From the last run.

  def compute(
    self, params: Any, extra: Any, batch: dict[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """Returns logits and labels of a batch."""
    logits = self.evaluation.task.outputs(params, extra, batch)
    return {
      'logits': logits.astype(jnp.float32),
      'label': batch['label'] > 0,
      **engine.positions(batch),
    }

  def finish(self, results: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Keeps `outputs`."""
    columns = engine.in_order(results)
    self.outputs = Outputs(columns['index'], columns['logits'], columns['label'])
    return {}


class Report(Collector):
  """Measures a classifier: means over classes, ranking, agreement, calibration.

  `bins` is the number of bins of the calibration error. `classes` are names of classes
  whose precision, recall and F1 become metrics too, such as 'recall_rocket'.
  """

  @classmethod
  def metrics(
    cls,
    config: ml_collections.ConfigDict,
    bins: schema.Count = 15,
    classes: schema.Names = (),
  ) -> Mapping[str, metrics_lib.Metric]:
    """Returns the metrics of the loss; ValueError if the task does not classify."""
    task_class = run_config.get_task(config.task)
    if not hasattr(task_class, 'exclusive'):
      raise ValueError(
        f"a report is about classifiers, and this run has the task '{config.task}': leave "
        'out the evaluator, or --calibrate'
      )
    share = metrics_lib.SHARE
    names = []
    for name in _SHARES:
      names += [f'{kind}_{name}' for kind in _MEANS]
    metrics = dict.fromkeys([*names, 'auroc', 'average_precision'], share)
    if config.loss != 'sigmoid':
      metrics['balanced_accuracy'] = metrics.pop('macro_recall')
      metrics['ece'] = metrics_lib.Metric('%', low=True)
      metrics['kappa'] = metrics_lib.Metric()
      metrics['log_loss'] = metrics_lib.LOSS
    for class_name in classes:
      for name in _SHARES:
        metrics[f'{name}_{class_name}'] = share
    return metrics

  def __init__(
    self,
    evaluation: base.Evaluation,
    bins: schema.Count = 15,
    classes: schema.Names = (),
  ):
    console.require('sklearn', 'train', 'a report')
    task = evaluation.task
    if unknown := sorted({*classes} - {*task.class_names}):
      raise ValueError(
        f'classes={classes}: {unknown[0]!r} is not one of the classes '
        f'{list(task.class_names[:5])} of the model (config.evaluators)'
      )
    super().__init__(evaluation)
    self._bins = bins
    self._classes = classes
    self.scores: Scores | None = None

  def finish(self, results: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Returns the metrics, and keeps `outputs` and `scores` for the report."""
    super().finish(results)
    task = self.evaluation.task
    self.scores = score(self.outputs, task, self._bins)
    values = dict(self.scores.overall)
    for class_name in self._classes:
      i = task.class_names.index(class_name)
      for name in _SHARES:
        values[f'{name}_{class_name}'] = float(self.scores.classes[name][i])
    return values

  def lines(self) -> list[str]:
    """Returns the report of the last run as a table in Markdown."""
    assert self.scores is not None
    return _lines(self.scores, self.evaluation.task.class_names)

  def write(self, folder: epath.PathLike, facts: Mapping[str, Any]) -> None:
    """Writes the report of the last run: JSON with `facts`, CSV and pictures."""
    assert self.scores is not None
    path = epath.Path(folder)
    names = self.evaluation.task.class_names
    facts = {**facts, 'temperature': self.evaluation.task.temperature}
    with files.naming_output(path, 'report'):
      path.mkdir(parents=True, exist_ok=True)
      files.write(path / 'report.json', _json(self.scores, names, facts))
      files.write(path / 'report.csv', report_files.csv_text(_rows(self.scores, names)))
      if self.scores.confusion is not None:
        rows = []
        for name, row in zip(names, self.scores.confusion.tolist(), strict=True):
          rows.append([name, *row])
        header = ['true class', *names]
        files.write(path / 'confusion.csv', report_files.csv_text([header, *rows]))
        _draw(self.scores, names, self.evaluation.split, path)

  def write_predictions(self, path: epath.PathLike, source: records.Source) -> None:
    """Writes a table with a row per image of the last run; the ending is its format."""
    assert self.outputs is not None
    rows = _predictions(self.outputs, self.evaluation.task, source.evaluated)
    report_files.write_predictions(path, rows)


def _predictions(
  outputs: Outputs, task: Any, source: records.Source
) -> list[dict[str, Any]]:
  """Returns the rows of a table; several names of classes are joined by ';'."""
  probabilities = probabilities_of(outputs, task)
  predicted = measures.predictions(probabilities, task.exclusive)
  names = np.array(task.class_names, object)
  rows = []
  for i, number in enumerate(outputs.numbers.tolist()):
    row: dict[str, Any] = {
      'image': source.name(number),
      'label': ';'.join(names[outputs.labels[i]]),
      'predicted': ';'.join(names[predicted[i]]),
    }
    for name, value in zip(task.class_names, probabilities[i].tolist()):
      row[f'probability of {name}'] = value
    rows.append(row)
  return rows


# --- Formats of a report ---


def _rows(scores: Scores, names: Sequence[str]) -> list[list[Any]]:
  """Returns the rows of a table by class, with its header; None for no value."""
  columns = [*_TITLES, 'support']
  rows: list[list[Any]] = [['class', *columns]]
  for i, class_name in enumerate(names):
    row: list[Any] = [class_name]
    for column in columns:
      row.append(report_files.defined(scores.classes[column][i]))
    rows.append(row)
  return rows


def _means(scores: Scores) -> list[list[Any]]:
  """Returns the rows of the means over classes."""
  support = scores.classes['support']
  rows: list[list[Any]] = []
  for kind, weights in zip(_MEANS, (None, support)):
    means = [measures.mean(scores.classes[name], weights) for name in _TITLES]
    rows.append([f'{kind} mean', *map(report_files.defined, means), int(support.sum())])
  return rows


def _lines(scores: Scores, names: Sequence[str]) -> list[str]:
  rows = _rows(scores, names)[1:]
  missing = [row[0] for row in rows if not row[-1]]
  if len(rows) > _MOST_ROWS:
    rows = []
  header = ['class', *_TITLES.values(), 'images']
  cells = [_cells(row) for row in rows + _means(scores)]
  lines = report_files.markdown([header, *cells])
  units = {'ece': metrics_lib.SHARE, 'balanced_accuracy': metrics_lib.SHARE}
  overall = {}
  for name in ('balanced_accuracy', 'kappa', 'ece', 'log_loss'):
    if name in scores.overall:
      overall[name] = scores.overall[name]
  if overall:
    lines += ['', metrics_lib.format_metrics(overall, units)]
  if missing:
    classes = ', '.join(missing[:10])
    if len(missing) > 10:
      classes += ', ...'
    lines.append(
      f'No test images of {console.pluralize(len(missing), "class")}: {classes}. They '
      'do not count in means.'
    )
  if scores.num_left_out:
    lines.append(
      f'Left out {console.pluralize(scores.num_left_out, "image")} without exactly one '
      'label.'
    )
  return lines


def _cells(row: Sequence[Any]) -> list[str]:
  """Returns a row of the printed table: measures in percent, '-' for no value."""
  name, *measures, count = row
  cells = [name]
  for value in measures:
    cells.append('-' if value is None else f'{100 * value:.2f}')
  return [*cells, f'{count:,}']


def _json(scores: Scores, names: Sequence[str], facts: Mapping[str, Any]) -> str:
  header, *rows = _rows(scores, names)
  content = {
    **facts,
    'num_examples': scores.num_examples,
    'num_left_out': scores.num_left_out,
    'overall': {
      name: report_files.defined(value) for name, value in scores.overall.items()
    },
    'classes': {},
  }
  for class_name, *values in rows:
    content['classes'][class_name] = dict(zip(header[1:], values))
  if scores.bins is not None:
    content['reliability'] = {}
    for name, values in scores.bins._asdict().items():
      content['reliability'][name] = list(map(report_files.defined, values))
  return json.dumps(content, indent=1, ensure_ascii=False) + '\n'


def _draw(scores: Scores, names: Sequence[str], split: str, folder: epath.Path) -> None:
  """Writes the confusion matrix and the reliability diagram as pictures."""
  from vit_jax.figures import charts, drawing, results

  confusion = results.Results(scores.confusion, ())
  drawing.to_file(
    charts.confusion, confusion, names, split, path=folder / 'confusion.png'
  )
  drawing.to_file(
    charts.reliability,
    scores.bins.accuracy,
    scores.bins.counts,
    scores.overall['ece'],
    path=folder / 'reliability.png',
  )
