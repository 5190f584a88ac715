"""Numbers of a run: `workdir/metrics.jsonl`, and TensorBoard events beside it."""

import json

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
    lines = [line for line in read(workdir) if line['step'] <= start_step]
    workdir_lib.write_atomically(
      self.path, ''.join(json.dumps(line) + '\n' for line in lines)
    )
    self._writer = metric_writers.AsyncMultiWriter(
      [metric_writers.SummaryWriter(str(workdir))]
    )

  def write(self, step: int, scalars: dict):
    """Writes the numbers of a step."""
    if self._writer is None:
      return
    scalars = {name: float(value) for name, value in scalars.items()}
    with self.path.open('a') as file:
      file.write(json.dumps({'step': step, **scalars}) + '\n')
    self._writer.write_scalars(step, scalars)

  def close(self):
    """Writes what is still held."""
    if self._writer is not None:
      self._writer.close()
      self._writer = None


def read(workdir) -> list[dict]:
  """Returns the lines of metrics.jsonl, the last one left out if half written."""
  path = epath.Path(workdir) / 'metrics.jsonl'
  lines = []
  for line in path.read_text().splitlines() if path.exists() else []:
    try:
      lines.append(json.loads(line))
    except ValueError:
      continue
  return lines


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
