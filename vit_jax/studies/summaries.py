"""Tables and plots of many runs: means and standard deviations over seeds.

Process 0 writes the files, atomically: several commands may write the same file at
once.
"""

from collections.abc import Iterable, Mapping, Sequence
import json
from typing import Any

from etils import epath

from vit_jax import console
from vit_jax.distributed import files, processes
from vit_jax.figures import drawing, studies
from vit_jax.run import metrics as metrics_lib


def format_values(kind: metrics_lib.Metric, values: Sequence[float]) -> str:
  """Formats values as the paper does, fractions in percent: '99.15 ± 0.03'.

  '-' stands for no values; a single value has no ±.
  """
  if not values:
    return '-'
  mean, std = metrics_lib.mean_std(values)
  if kind.unit == '%':
    mean_text, std_text = f'{100 * mean:.2f}', f'{100 * std:.2f}'
  else:
    mean_text, std_text = f'{mean:.4g}', f'{std:.2g}'
  return mean_text if len(values) == 1 else f'{mean_text} ± {std_text}'


def row(names: Mapping[str, Any], by_seed: Mapping[int, float | None]) -> dict:
  """Returns a row: names, `mean` and `std` over the seeds, `seed_0`, ...; or None."""
  values = [value for value in by_seed.values() if value is not None]
  mean, std = metrics_lib.mean_std(values) if values else (None, None)
  seeds = {f'seed_{seed}': value for seed, value in by_seed.items()}
  return {**names, 'mean': mean, 'std': std, **seeds}


def values(row: Mapping[str, Any]) -> list[float]:
  """Returns the values of a row's seeds, without missing ones."""
  return [x for k, x in row.items() if k.startswith('seed_') and x is not None]


def cells(kind: metrics_lib.Metric, row: Mapping[str, Any]) -> tuple[str, str]:
  """Formats the mean of a row, and the values of its seeds."""
  by_seed = values(row)
  texts = [format_values(kind, [value]) for value in by_seed]
  return format_values(kind, by_seed), ' '.join(texts)


def write(workdir: epath.PathLike, name: str, text: str) -> None:
  """Writes a file of a workdir."""
  path = epath.Path(workdir) / name

  def write_file() -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, text)

  processes.from_first(f'writing {name}', write_file)


def publish(
  workdir: epath.PathLike,
  name: str,
  rows: Sequence[Mapping[str, Any]],
  heading: str,
  header: Sequence[str],
  lines: Sequence[Sequence[str]],
) -> None:
  """Prints a table with a heading, and writes `rows` to NAME.json."""
  console.log(f'\n{heading}\n{console.table(header, lines)}')
  write(workdir, f'{name}.json', json.dumps(list(rows), indent=1) + '\n')
  console.log(f'  table  {workdir}/{name}.json')


def plot(
  metric: str,
  kind: metrics_lib.Metric,
  title: str,
  points: Iterable[tuple[str, float | None, Sequence[float]]],
  path: epath.PathLike,
  x_label: str | None = None,
  log_x: bool = False,
) -> None:
  """Plots a metric of many runs as curves over x, or without x_label as bars.

  `points` are (name of the curve or bar, x, values of one or several runs).
  """
  lines: dict[str, tuple[list, list]] = {}
  for name, x, values_at_x in points:
    places, heights = lines.setdefault(name, ([], []))
    places.append(x)
    heights.append([kind.factor * value for value in values_at_x])
  if not any(any(heights) for _, heights in lines.values()):
    return
  label = kind.title(metric)
  if x_label is None:
    bars = {name: heights[0] for name, (_, heights) in lines.items()}
    drawing.to_file(studies.bars, bars, label, title, path=path)
  else:
    drawing.to_file(
      studies.curves, lines, x_label, label, title, log_x=log_x, path=path
    )


def report(
  workdir: epath.PathLike,
  name: str,
  metric: str,
  kind: metrics_lib.Metric,
  by_variant: Mapping[str, Mapping[int, float | None]],
  title: str,
  *,
  baseline: str | None = None,
  places: Sequence[tuple[str, float | None]] = (),
  x_label: str = '',
  log_x: bool = False,
  unit: str = 'seed',
) -> list[dict]:
  """Compares a metric of variants: prints a table, writes NAME.json and NAME.png.

  `by_variant` has the value of each seed, or None; `baseline` is the variant to
  compare the others with, seed by seed. `places` are (name of the line, x) of each
  variant, for curves instead of bars. `unit` is what the seeds stand for, 'seed' or
  'fold'.

  Returns the rows of NAME.json: `variant`, `metric`, `mean` and `std` over the seeds,
  and `seed_0`, ...; with a baseline `margin` and `margin_std`, and for curves `line`
  and `x`.
  """
  rows, lines, points = [], [], []
  places = places or [(variant, None) for variant in by_variant]
  for (variant, by_seed), (line, x) in zip(by_variant.items(), places, strict=True):
    fields = row({'variant': variant, 'metric': metric}, by_seed)
    mean, seeds = cells(kind, fields)
    columns = {'variant': variant}
    if x is not None:
      fields.update(line=line, x=x)
      columns[x_label] = f'{x:.4g}'
    columns[metric] = mean
    if baseline is not None:
      margins = []
      for seed, base_value in by_variant[baseline].items():
        value = by_seed[seed]
        if value is not None and base_value is not None:
          margins.append(value - base_value)
      if margins:
        fields['margin'], fields['margin_std'] = metrics_lib.mean_std(margins)
      columns['margin'] = format_values(kind, margins)
    rows.append(fields)
    lines.append([*columns.values(), seeds])
    points.append((line, x, values(fields)))
  heading = f'{kind.title(metric)}, mean and standard deviation over the {unit}s'
  if baseline is not None:
    heading += f", and margin over '{baseline}' with the same seed"
  publish(workdir, name, rows, f'{heading}:', [*columns, f'{unit}s'], lines)
  axis = None if points[0][1] is None else x_label
  plot(metric, kind, title, points, f'{workdir}/{name}.png', axis, log_x)
  return rows
