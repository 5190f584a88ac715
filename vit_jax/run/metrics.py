"""Writes the metrics of a run to `workdir/metrics.jsonl`, TensorBoard and trackers.

TensorBoard and trackers also show pictures and the config. On a local disk each line is
appended at once. In a bucket files can only be written as a whole: lines are
collected, and written before each checkpoint and at the end. A kill loses only
metrics after the last checkpoint, which the resumed run computes again.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import math
import re
import statistics
from typing import Any, NamedTuple

from absl import logging
from etils import epath
import jax
import ml_collections
import numpy as np

from vit_jax.distributed import files
from vit_jax.run import workdir as workdir_lib


class MetricsLog:
  """Writes metrics by step, from process 0 only.

  Lines of steps after `start_step` are removed from the file, because the run
  repeats these steps. `trackers` are names, see vit_jax/run/trackers.py.
  """

  def __init__(
    self,
    workdir: str | epath.Path,
    start_step: int = 0,
    trackers: Sequence[str] = (),
  ):
    self.path = epath.Path(workdir) / 'metrics.jsonl'
    self._writer = None
    if jax.process_index():
      return
    self.path.parent.mkdir(parents=True, exist_ok=True)
    rows, invalid_lines = _parse(self.path)
    for text in invalid_lines:
      logging.warning("'%s': removing %.80r, which is not metrics", self.path, text)
    lines = [_line(row) for row in rows if row['step'] <= start_step]
    with workdir_lib.writing(self.path):
      files.write(self.path, ''.join(lines))
    self._buffer = lines if files.is_remote(workdir) else None
    from clu import metric_writers  # Not needed to read metrics.

    self._trackers = []
    if trackers:
      from vit_jax.run import trackers as trackers_lib

      self._trackers = trackers_lib.start(trackers, workdir)
    self._writer = metric_writers.AsyncMultiWriter(
      [metric_writers.SummaryWriter(str(workdir)), *self._trackers]
    )

  def write(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes the metrics of a step."""
    if self._writer is None:
      return
    scalars = {name: float(value) for name, value in scalars.items()}
    line = _line({'step': step, **scalars})
    with self._writing():
      if self._buffer is None:
        with self.path.open('a') as file:
          file.write(line)
      else:
        self._buffer.append(line)
      self._writer.write_scalars(step, scalars)

  def write_config(self, step: int, config: ml_collections.ConfigDict) -> None:
    """Writes the config of a run that starts or resumes at a step."""
    if self._writer is None:
      return
    rows = workdir_lib.flatten(workdir_lib.to_plain(config))
    lines = [f'| {key} | {_cell(value)} |' for key, value in rows.items()]
    table = '\n'.join(['| key | value |', '|---|---|', *sorted(lines)])
    with self._writing():
      self._writer.write_texts(step, {'config': table})
    for tracker in self._trackers:
      tracker.write_hparams(rows)

  def write_pictures(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
    """Writes pictures, uint8 [height, width, 3] by name."""
    if self._writer is None or not pictures:
      return
    batches = {name: pixels[None] for name, pixels in pictures.items()}
    with self._writing():
      self._writer.write_images(step, batches)

  def flush(self) -> None:
    """Writes what is collected; called before each checkpoint."""
    if self._writer is None:
      return
    with self._writing():
      self._writer.flush()
      if self._buffer is not None:
        files.write(self.path, ''.join(self._buffer))

  def close(self) -> None:
    """Writes what remains."""
    if self._writer is None:
      return
    self.flush()
    with self._writing():
      self._writer.close()
    self._writer = None

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    """Raises OSError if a file cannot be written; nothing is written afterwards."""
    try:
      with workdir_lib.writing(self.path):
        yield
    except Exception as e:
      self._writer = None
      fault = _event_file_fault(e)
      if fault is None:
        raise
      path, reason = fault
      with workdir_lib.writing(path):
        raise OSError(reason) from e


def _event_file_fault(error: BaseException) -> tuple[str, str] | None:
  """Returns the file that TensorFlow could not write, and why; None for other errors."""
  while error.__cause__ is not None:  # clu raises errors of its thread later.
    error = error.__cause__
  match = re.search(r'}} ([^;]*tfevents[^;]*); ([^\n\[]*)', str(error))
  return (match[1], match[2].strip()) if match else None


def _cell(value: Any) -> str:
  """Formats a value for a Markdown table."""
  text = json.dumps(value, ensure_ascii=False)
  return '`' + text.replace('|', '\\|').replace('`', "'") + '`'


def _line(scalars: Mapping[str, Any]) -> str:
  return json.dumps(scalars) + '\n'


def _parse(path: epath.Path) -> tuple[list[dict[str, Any]], list[bytes]]:
  """Returns the metrics in a metrics.jsonl, and the lines that are not metrics.

  A kill may leave an incomplete last line, which is in neither.
  """
  try:
    texts = files.read(path).split(b'\n')
  except FileNotFoundError:
    return [], []
  except IsADirectoryError as e:
    raise ValueError(
      f"'{path}' is a folder, not the metrics of a run: move it away"
    ) from e
  rows, invalid_lines = [], []
  for text in texts:
    try:
      row = json.loads(text)
    except ValueError:
      row = None
    if isinstance(row, dict) and 'step' in row:
      rows.append(row)
    elif text and text is not texts[-1]:
      invalid_lines.append(text)
  return rows, invalid_lines


def read(workdir: str | epath.Path) -> list[dict[str, Any]]:
  """Returns the metrics in the metrics.jsonl of a run."""
  return _parse(epath.Path(workdir) / 'metrics.jsonl')[0]


def find(workdir: str | epath.Path, step: int, name: str) -> dict[str, Any] | None:
  """Returns the metrics of a step if a metric is among them, else None."""
  for row in read(workdir):
    if row['step'] == step and name in row:
      return row
  return None


def mean_std(values: Sequence[float]) -> tuple[float, float]:
  """Returns the mean and the sample standard deviation (0.0 of one value)."""
  std = statistics.stdev(values) if len(values) > 1 else 0.0
  return statistics.mean(values), std


class Metric(NamedTuple):
  """How a metric is printed, and which of its values is the best."""

  unit: str = ''  # '%' for a share from 0 to 1, which is printed in percent.
  low: bool = False  # Whether the lowest value is the best.

  @property
  def factor(self) -> float:
    """Factor between the metric's values and the printed ones."""
    return 100.0 if self.unit == '%' else 1.0

  def title(self, name: str) -> str:
    """Returns the name of the metric with its unit: 'accuracy_test (%)'."""
    return f'{name} ({self.unit})' if self.unit else name


SHARE = Metric('%')
LOSS = Metric(low=True)


def format_metrics(
  values: Mapping[str, float], metrics: Mapping[str, Metric] | None = None
) -> str:
  """Formats values by name, each in the unit of its metric.

  Shares are in percent, counts and large values are integers, and other values have 4
  digits.
  """
  metrics = metrics or {}
  texts = [
    f'{name} {_format_value(value, metrics.get(name, Metric()))}'
    for name, value in values.items()
  ]
  return ', '.join(texts)


def _format_value(value: float, metric: Metric) -> str:
  if math.isnan(value):
    return 'not defined'
  if metric.unit == '%':
    return f'{100 * value:.2f} %'
  is_large = isinstance(value, int) or 1e3 <= abs(value) < 1e9
  text = f'{value:,.0f}' if is_large else f'{value:,.4g}'
  return f'{text} {metric.unit}'.rstrip()
