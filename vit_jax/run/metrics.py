"""Writes the metrics of a run to `workdir/metrics.jsonl`, TensorBoard and trackers.

TensorBoard and trackers also show pictures and the config. On a local disk each line is
appended at once. In a bucket files can only be written as a whole: lines are
collected, and written before each checkpoint and at the end. A kill loses only
metrics after the last checkpoint, which the resumed run computes again.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import re
import statistics

from absl import logging
from etils import epath
import jax
import numpy as np

from vit_jax.distributed import files
from vit_jax.run import workdir as workdir_lib


class MetricsLog:
  """Writes metrics by step, from process 0 only.

  Lines of steps after `start_step` are removed from the file, because the run
  repeats these steps. `trackers` are names, see vit_jax/run/trackers.py.
  """

  def __init__(self, workdir, start_step: int = 0, trackers: Sequence[str] = ()):
    self.path = epath.Path(workdir) / 'metrics.jsonl'
    self._writer = None
    if jax.process_index():
      return
    self.path.parent.mkdir(parents=True, exist_ok=True)
    found, bad = _parse(self.path)
    for text in bad:
      logging.warning("'%s': removing %.80r, which is not metrics", self.path, text)
    lines = [_line(line) for line in found if line['step'] <= start_step]
    with workdir_lib.writing(self.path):
      files.write(self.path, ''.join(lines))
    self._held = lines if files.is_remote(workdir) else None
    from clu import metric_writers  # Not needed to read metrics.

    self._trackers = []
    if trackers:
      from vit_jax.run import trackers as trackers_lib

      self._trackers = trackers_lib.start(trackers, workdir)
    self._writer = metric_writers.AsyncMultiWriter(
      [metric_writers.SummaryWriter(str(workdir)), *self._trackers]
    )

  def write(self, step: int, scalars: dict):
    """Writes the metrics of a step."""
    if self._writer is None:
      return
    scalars = {name: float(value) for name, value in scalars.items()}
    line = _line({'step': step, **scalars})
    with self._writing():
      if self._held is None:
        with self.path.open('a') as file:
          file.write(line)
      else:
        self._held.append(line)
      self._writer.write_scalars(step, scalars)

  def write_config(self, step: int, config):
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

  def write_pictures(self, step: int, pictures: Mapping[str, np.ndarray]):
    """Writes pictures, uint8 [height, width, 3] by name."""
    if self._writer is not None and pictures:
      with self._writing():
        self._writer.write_images(step, {k: v[None] for k, v in pictures.items()})

  def flush(self):
    """Writes what is collected; called before each checkpoint."""
    if self._writer is None:
      return
    with self._writing():
      self._writer.flush()
      if self._held is not None:
        files.write(self.path, ''.join(self._held))

  def close(self):
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
      if not (fault := _fault_of_event_file(e)):
        raise
      path, why = fault
      with workdir_lib.writing(path):
        raise OSError(why) from e


def _fault_of_event_file(error: Exception) -> tuple[str, str] | None:
  """Returns the file that TensorFlow could not write, and why; None for other errors."""
  while error.__cause__ is not None:  # clu raises errors of its thread later.
    error = error.__cause__
  match = re.search(r'}} ([^;]*tfevents[^;]*); ([^\n\[]*)', str(error))
  return (match[1], match[2].strip()) if match else None


def _cell(value) -> str:
  """Formats a value for a Markdown table."""
  text = json.dumps(value, ensure_ascii=False)
  return '`' + text.replace('|', '\\|').replace('`', "'") + '`'


def _line(scalars) -> str:
  return json.dumps(scalars) + '\n'


def _parse(path) -> tuple[list[dict], list[bytes]]:
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
  found, bad = [], []
  for text in texts:
    try:
      line = json.loads(text)
    except ValueError:
      line = None
    if isinstance(line, dict) and 'step' in line:
      found.append(line)
    elif text and text is not texts[-1]:
      bad.append(text)
  return found, bad


def read(workdir) -> list[dict]:
  """Returns the metrics in the metrics.jsonl of a run."""
  return _parse(epath.Path(workdir) / 'metrics.jsonl')[0]


def find(workdir, step: int, name: str) -> dict | None:
  """Returns the line of a step that contains a metric, or None."""
  for line in read(workdir):
    if line['step'] == step and name in line:
      return line
  return None


def mean_std(values: Sequence[float]) -> tuple[float, float]:
  """Returns the mean and the sample standard deviation (0.0 of one value)."""
  several = len(values) > 1
  return statistics.mean(values), statistics.stdev(values) if several else 0.0


def is_share(name: str) -> bool:
  """Returns whether a metric is a fraction, from 0 to 1, by its name."""
  recall = name.startswith(('image_to_text_', 'text_to_image_'))
  return 'accuracy' in name or name.startswith(('fewshot_', 'knn_')) or recall


def format_metrics(metrics: dict) -> str:
  """Formats accuracies in percent, counts and large values as integers.

  Other values get 4 digits.
  """

  def words(name, value):
    if is_share(name):
      return f'{100 * value:.2f} %'
    large = isinstance(value, int) or 1e3 <= abs(value) < 1e9
    return f'{value:,.0f}' if large else f'{value:,.4g}'

  return ', '.join(f'{name} {words(name, x)}' for name, x in metrics.items())
