"""Numbers of a run: `workdir/metrics.jsonl`, and TensorBoard events beside it.

On a local disk a line is appended as it comes. A file of a bucket can only be
written as a whole: there lines and events are held on this machine, and uploaded
before each checkpoint and at the end. What a kill loses is what comes after the
checkpoint, and will be computed again.
"""

import json
import os
import tempfile

from absl import logging
from clu import metric_writers
from etils import epath
import jax

from vit_jax.data import images
from vit_jax.run import workdir as workdir_lib


class MetricsLog:
  """Writes numbers by step; only the first process does.

  Args:
    workdir: folder of the run.
    start_step: the step from which the run goes on: what the file has of later
      steps is taken out, since these steps will come again.
  """

  def __init__(self, workdir, start_step: int = 0):
    self.path = epath.Path(workdir) / 'metrics.jsonl'
    self._writer = None
    if jax.process_index():
      return
    self.path.parent.mkdir(parents=True, exist_ok=True)
    found, bad = _parse(self.path)
    if bad:
      logging.warning(
        "'%s' has %d lines that are no metrics, the first %s: left out",
        self.path,
        len(bad),
        bad[0][:80],
      )
    lines = [_line(line) for line in found if line['step'] <= start_step]
    workdir_lib.write_atomically(self.path, ''.join(lines))
    self._held = None  # Lines and a folder of events, to be uploaded.
    events = str(workdir)
    if is_remote(workdir):
      self._folder = tempfile.TemporaryDirectory()
      self._held, events = lines, self._folder.name
    self._writer = metric_writers.AsyncMultiWriter(
      [metric_writers.SummaryWriter(events)]
    )

  def write(self, step: int, scalars: dict):
    """Writes the numbers of a step."""
    if self._writer is None:
      return
    scalars = {name: float(value) for name, value in scalars.items()}
    line = _line({'step': step, **scalars})
    if self._held is None:
      with self.path.open('a') as file:
        file.write(line)
    else:
      self._held.append(line)
    self._writer.write_scalars(step, scalars)

  def flush(self):
    """Makes what was written outlive this machine; for before a checkpoint."""
    if self._writer is not None and self._held is not None:
      self._writer.flush()
      self._upload()

  def close(self):
    """Writes what is still held."""
    if self._writer is None:
      return
    self._writer.close()
    self._writer = None
    if self._held is not None:
      self._upload()
      self._folder.cleanup()

  def _upload(self):
    workdir_lib.write_atomically(self.path, ''.join(self._held))
    for file in epath.Path(self._folder.name).iterdir():
      file.copy(self.path.parent / file.name, overwrite=True)


def is_remote(path) -> bool:
  """Tells whether a path is that of a bucket, gs://... for one."""
  return '://' in os.fspath(path)


def _line(scalars) -> str:
  return json.dumps(scalars) + '\n'


def _parse(path) -> tuple[list[dict], list[bytes]]:
  """Returns what a metrics.jsonl holds, and the lines that are no metrics.

  The last line, where it was half written, belongs to neither.
  """
  *whole, last = path.read_bytes().split(b'\n') if path.exists() else [b'']
  found, bad = [], []
  for text in (*whole, last):
    try:
      line = json.loads(text)
    except ValueError:
      line = None
    if _is_metrics(line):
      found.append(line)
    elif text.strip() and text is not last:
      bad.append(text)
  return found, bad


def _is_metrics(line) -> bool:
  return (
    isinstance(line, dict)
    and type(line.get('step')) is int
    and all(type(value) in (int, float) for value in line.values())
  )


def read(workdir) -> list[dict]:
  """Returns the lines of metrics.jsonl, but for those that are no metrics."""
  return _parse(epath.Path(workdir) / 'metrics.jsonl')[0]


def find(workdir, step: int, name: str) -> dict | None:
  """Returns the line of a step that has a number of that name, or None."""
  for line in read(workdir):
    if line['step'] == step and name in line:
      return line
  return None


def format_metrics(metrics: dict) -> str:
  """Writes numbers for people: accuracies in percent, the rest short."""
  return ', '.join(
    f'{name} {100 * value:.2f} %'
    if 'accuracy' in name
    else f'{name} {value:,.4g}'
    for name, value in metrics.items()
  )


def write_pictures(workdir, step: int, pictures) -> list[epath.Path]:
  """Writes pictures, uint8 [height, width, 3] by name; returns their paths.

  The first process writes each as NAME.png into the workdir, and for TensorBoard.
  """
  if not pictures or jax.process_index():
    return []
  paths = []
  for name, pixels in pictures.items():
    paths.append(epath.Path(workdir) / f'{name}.png')
    paths[-1].write_bytes(images.encode_png(pixels))
  writer = metric_writers.SummaryWriter(str(workdir))
  writer.write_images(step, {k: v[None] for k, v in pictures.items()})
  writer.close()
  return paths
