"""Measures predicted numbers: MAE, RMSE, R2, Pearson's and Spearman's correlations.

scikit-learn and SciPy compute them from all predictions of a split, in the units of the
data. A measure that is not defined, such as the correlation with a constant, is nan.
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
from vit_jax.data import records
from vit_jax.distributed import files
from vit_jax.evaluators import base, report_files
from vit_jax.inference import engine
from vit_jax.run import metrics as metrics_lib

# By name: the title in a report, and how the metric is printed.
MEASURES = {
  'mae': ('MAE', metrics_lib.LOSS),
  'rmse': ('RMSE', metrics_lib.LOSS),
  'r2': ('R2', metrics_lib.Metric()),
  'pearson': ('Pearson', metrics_lib.Metric()),
  'spearman': ('Spearman', metrics_lib.Metric()),
}


class Outputs(NamedTuple):
  """Predictions for n images and K targets, in the order of the split."""

  numbers: np.ndarray  # Numbers of the images, int64 [n].
  predicted: np.ndarray  # In the units of the data, float64 [n, K].
  true: np.ndarray  # float64 [n, K].
  losses: np.ndarray  # float32 [n].


def measure(true: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
  """Returns the MEASURES of a target by name, from float arrays [n]."""
  from scipy import stats
  from sklearn import metrics  # Late: an extra.

  values = {
    'mae': metrics.mean_absolute_error(true, predicted),
    'rmse': metrics.root_mean_squared_error(true, predicted),
    'r2': np.nan,
    'pearson': np.nan,
    'spearman': np.nan,
  }
  if np.ptp(true):
    values['r2'] = metrics.r2_score(true, predicted)
    if np.ptp(predicted):
      values['pearson'] = stats.pearsonr(true, predicted).statistic
      values['spearman'] = stats.spearmanr(true, predicted).statistic
  return {name: float(value) for name, value in values.items()}


class Report(base.BatchEvaluator):
  """Measures a regression: means over its targets, and the MAE of each column.

  It is the evaluator of the task, and the report of `vit_jax evaluate --report`.
  """

  @classmethod
  def metrics(
    cls, config: ml_collections.ConfigDict
  ) -> Mapping[str, metrics_lib.Metric]:
    """Returns the loss, MEASURES and, with several columns, the MAE of each."""
    metrics = {'loss': metrics_lib.LOSS}
    for name, (_, kind) in MEASURES.items():
      metrics[name] = kind
    columns = config.task_options.targets
    if len(columns) > 1:
      metrics |= {f'mae_{column}': metrics_lib.LOSS for column in columns}
    return metrics

  def __init__(self, evaluation: base.Evaluation) -> None:
    console.require('sklearn', 'train', 'the metrics of regression')
    super().__init__(evaluation)
    self.outputs: Outputs | None = None  # From the last run.
    self.scores: dict[str, dict[str, float]] = {}  # By target.

  def compute(
    self, params: Any, extra: Any, batch: dict[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """Returns outputs, targets and losses of a batch."""
    task = self.evaluation.task
    outputs = task.outputs(params, extra, batch).astype(jnp.float32)
    target = batch['target']
    losses = task.losses(outputs, target)
    positions = engine.positions(batch)
    return {'outputs': outputs, 'target': target, 'losses': losses, **positions}

  def finish(self, results: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Returns the metrics, and keeps `outputs` and `scores` for the report."""
    self.outputs = self._in_order(results)
    self.scores = {}
    for i, target in enumerate(self.evaluation.task.targets):
      self.scores[target.name] = measure(
        self.outputs.true[:, i], self.outputs.predicted[:, i]
      )
    values = {'loss': float(self.outputs.losses.mean()), **self._means()}
    columns = self.evaluation.task.options.targets
    if len(columns) > 1:
      for column in columns:
        values[f'mae_{column}'] = self._means(column)['mae']
    return values

  def _in_order(self, results: Sequence[Mapping[str, np.ndarray]]) -> Outputs:
    """Returns the predictions of all batches in the order of the images."""
    columns = engine.in_order(results)
    is_finite = np.isfinite(columns['target']).all(axis=1)
    if not is_finite.all():
      number = int(columns['index'][is_finite.argmin()])
      name = self.evaluation.source.evaluated.name(number)
      raise ValueError(
        f"a target of '{name}' is not finite: correct it, or leave it out"
      )
    task = self.evaluation.task
    return Outputs(
      columns['index'],
      task.values(columns['outputs']),
      task.values(columns['target']),
      columns['losses'],
    )

  def _means(self, column: str | None = None) -> dict[str, float]:
    """Returns the means of the scores over all targets, or over those in a column."""
    names = []
    for target in self.evaluation.task.targets:
      if column in (None, target.column):
        names.append(target.name)
    means = {}
    for measure_name in MEASURES:
      values = [self.scores[name][measure_name] for name in names]
      means[measure_name] = float(np.mean(values))
    return means

  def lines(self) -> list[str]:
    """Returns the report of the last run as a table in Markdown."""
    titles = [title for title, _ in MEASURES.values()]
    cells = [['target', *titles]]
    for name, values in self._rows():
      texts = [report_files.cell(value, '{:.4g}') for value in values.values()]
      cells.append([name, *texts])
    return report_files.markdown(cells)

  def _rows(self) -> list[tuple[str, dict[str, float]]]:
    """Returns the measures of each target, and of several their means."""
    rows = list(self.scores.items())
    if len(rows) > 1:
      rows.append(('mean', self._means()))
    return rows

  def write(self, folder: epath.PathLike, facts: Mapping[str, Any]) -> None:
    """Writes the report of the last run: JSON with `facts`, CSV and a picture."""
    assert self.outputs is not None
    from vit_jax.figures import charts, drawing

    path = epath.Path(folder)
    content: dict[str, Any] = {**facts, 'num_examples': len(self.outputs.numbers)}
    content['overall'] = _defined(self._means())
    content['targets'] = {name: _defined(x) for name, x in self.scores.items()}
    rows: list[Sequence[Any]] = [['target', *MEASURES]]
    for name, values in self._rows():
      rows.append([name, *_defined(values).values()])
    with files.naming_output(path, 'report'):
      path.mkdir(parents=True, exist_ok=True)
      text = json.dumps(content, indent=1, ensure_ascii=False)
      files.write(path / 'report.json', text + '\n')
      files.write(path / 'report.csv', report_files.csv_text(rows))
      drawing.to_file(
        charts.regression,
        self.outputs.true,
        self.outputs.predicted,
        list(self.scores),
        self.evaluation.split,
        path=path / 'predictions.png',
      )

  def write_predictions(self, path: epath.PathLike, source: records.Source) -> None:
    """Writes a table with a row per image of the last run; the ending is its format."""
    assert self.outputs is not None
    rows = []
    for number, true, predicted in zip(
      self.outputs.numbers.tolist(),
      self.outputs.true.tolist(),
      self.outputs.predicted.tolist(),
    ):
      row: dict[str, Any] = {'image': source.evaluated.name(number)}
      for name, true_value, value in zip(self.scores, true, predicted):
        row[name] = true_value
        row[f'predicted {name}'] = value
      rows.append(row)
    report_files.write_predictions(path, rows)


def _defined(values: Mapping[str, float]) -> dict[str, float | None]:
  """Returns measures for JSON and CSV, None where they are not defined."""
  return {name: report_files.defined(value) for name, value in values.items()}
