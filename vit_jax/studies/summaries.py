"""Tables and plots of many runs: means, standard deviations, files.

What a job writes into its workdir, one process writes for all, and atomically:
machines that share the workdir may write the same file at once.
"""

from collections.abc import Iterable, Mapping, Sequence
import csv
import io
import json
from typing import Any

from etils import epath

from vit_jax import console
from vit_jax.distributed import files, processes
from vit_jax.figures import drawing, studies
from vit_jax.run import metrics as metrics_lib

say = console.say
mean_std = metrics_lib.mean_std
draw = drawing.to_file


def format_values(metric: str, values: Sequence[float]) -> str:
  """Formats the values of runs as the paper does: '99.15 ± 0.03', '-' for none.

  Shares are in percent. There is no ± with a single value.
  """
  if not values:
    return '-'
  mean, std = mean_std(values)
  if metrics_lib.is_share(metric):
    texts = f'{100 * mean:.2f}', f'{100 * std:.2f}'
  else:
    texts = f'{mean:.4g}', f'{std:.2g}'
  return ' ± '.join(texts[: min(2, len(values))])


def row(
  names: Mapping[str, Any], by_seed: Mapping[int, float | None], **more
) -> dict[str, Any]:
  """Returns a row: names, `mean` and `std` over the seeds, more, `seed_0`, ...

  Values that are missing are None; `mean` and `std` are None if all are.
  """
  there = [value for value in by_seed.values() if value is not None]
  mean, std = mean_std(there) if there else (None, None)
  seeds = {f'seed_{seed}': value for seed, value in by_seed.items()}
  return {**names, 'mean': mean, 'std': std, **more, **seeds}


def values(row: Mapping[str, Any]) -> list[float]:
  """Returns the values of a row's seeds, without those that are missing."""
  return [
    value
    for column, value in row.items()
    if column.startswith('seed_') and value is not None
  ]


def cells(metric: str, row: Mapping[str, Any]) -> tuple[str, str]:
  """Returns the mean of a row, and the values of its seeds, as texts."""
  found = values(row)
  each = ' '.join(format_values(metric, [value]) for value in found)
  return format_values(metric, found), each


def publish(
  workdir,
  name: str,
  rows: Sequence[Mapping[str, Any]],
  heading: str,
  header: Sequence[str],
  lines: Sequence[Sequence[str]],
):
  """Prints a table, `heading` above it, and writes its rows with `write_table`.

  `header` and `lines` are the names of the columns and the cells as printed.
  """
  say(f'\n{heading}\n{console.table(header, lines)}')
  write_table(workdir, name, rows)
  say(f'  table  {workdir}/{name}.csv, {workdir}/{name}.json')


def write_table(workdir, name: str, rows: Sequence[Mapping[str, Any]]):
  """Writes NAME.json, a list of objects, and NAME.csv.

  A column that a row lacks stays empty in the CSV.
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
    files.write(path, text)

  processes.from_first(f'writing {name}', do)


def with_unit(metric: str) -> str:
  """Returns a metric's name with its unit: 'accuracy_test (%)'."""
  return f'{metric} (%)' if metrics_lib.is_share(metric) else metric


def plot(
  metric: str,
  title: str,
  points: Iterable[tuple[str, float | None, Sequence[float]]],
  path,
  x_label: str | None = None,
  log_x: bool = False,
):
  """Draws a metric of many runs: as curves over x, or without x_label as bars.

  `points` are (name of the curve or bar, x, values of one or several runs).
  """
  scale = 100 if metrics_lib.is_share(metric) else 1
  lines = {}
  for name, x, found in points:
    places, heights = lines.setdefault(name, ([], []))
    places.append(x)
    heights.append([scale * value for value in found])
  if not any(any(heights) for _, heights in lines.values()):
    return
  label = with_unit(metric)
  if x_label is None:
    bars = {name: heights[0] for name, (_, heights) in lines.items()}
    draw(studies.bars, {'': bars}, label, title, path=path)
  else:
    draw(studies.curves, lines, x_label, label, title, log_x=log_x, path=path)
