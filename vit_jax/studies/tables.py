"""Tables and plots of many runs: means, standard deviations, files.

What a job writes into its workdir, one process writes for all, and atomically:
machines that share the workdir may write the same file at once.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import csv
import io
import json
import os
import socket
from typing import Any

from etils import epath
import jax

from vit_jax import cli
from vit_jax.distributed import processes
from vit_jax.run import metrics as metrics_lib
from vit_jax.run import workdir as workdir_lib

say = cli.say
mean_std = metrics_lib.mean_std


def format_values(metric: str, values: Sequence[float]) -> str:
  """Formats the values of a metric as the paper does: '99.15 ± 0.03'.

  Args:
    metric: name of the metric; shares are formatted in percent.
    values: values of one or several runs, of one without ±; '-' for none.
  """
  if not values:
    return '-'
  mean, std = mean_std(values)
  if metrics_lib.is_share(metric):
    texts = f'{100 * mean:.2f}', f'{100 * std:.2f}'
  else:
    texts = f'{mean:.4g}', f'{std:.2g}'
  return ' ± '.join(texts[: min(2, len(values))])


def write_table(workdir, name: str, rows: Sequence[Mapping[str, Any]]):
  """Writes NAME.json, a list of objects, and NAME.csv; process 0 does so.

  Args:
    workdir: the folder; created if it does not exist.
    name: name of the files without their endings.
    rows: rows of the table: values for JSON by column. A column that a row
      lacks stays empty in the CSV.
  """
  columns = list(dict.fromkeys(key for row in rows for key in row))
  text = io.StringIO()
  writer = csv.DictWriter(text, columns, lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  write(workdir, f'{name}.json', json.dumps(list(rows), indent=1) + '\n')
  write(workdir, f'{name}.csv', text.getvalue())


def write(workdir, name: str, text: str):
  """Writes a file of a workdir atomically; process 0 does so for all."""

  def do():
    path = epath.Path(workdir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    # Machines that share the workdir may write the same file at once.
    owner = f'-{socket.gethostname()}-{os.getpid()}'
    workdir_lib.write_atomically(path, text, owner)

  processes.from_first(f'writing {name}', do)


def draw(make: Callable, *args, path, **kwargs):
  """Draws a plot into a file, or says which package is missing.

  Args:
    make: function of vit_jax/figures/studies.py.
    *args: its arguments.
    path: path of the PNG.
    **kwargs: its further arguments.
  """
  if jax.process_index():
    return
  try:
    make(*args, path=path, **kwargs)
    say(f'  plot   {path}')
  except ImportError as e:
    say(f'No plot was drawn: {e}')
