"""Reads transfer accuracies and the compute of their pre-trainings from files."""

from collections.abc import Callable
import csv
import json
from typing import NamedTuple

from etils import epath

from vit_jax.configs import rules


class Point(NamedTuple):
  """A pre-training and what came of it."""

  family: str  # Models that belong together, such as 'ViT'.
  name: str
  exaflops: float
  accuracy: float  # Of the transfer in percent.


def read(
  path: str, metric: str, count: Callable[[str, float], float]
) -> list[Point]:
  """Reads results from a CSV file with a header, or a JSON list of objects.

  A row has `metric`, the accuracy in percent, or a share of at most 1 in all rows;
  and `exaflops`, or `model` and `epochs`, of which `count` returns the exaFLOPs.
  `family` and `name` are optional. A study's `x`, `line` and `variant` take the
  place of `exaflops`, `family` and `name`. Rows without a value of `metric` are
  left out. Raises FileNotFoundError, or ValueError if something is wrong.
  """
  points = []
  for index, row in enumerate(_rows(epath.Path(path)), 1):

    def number(key, row=row, index=index):
      where = f"row {index} of results='{path}'"
      if key not in row:
        raise ValueError(
          f"{where} has no column '{key}', only {', '.join(row)}: it needs the "
          'accuracy (--metric), and exaflops or model and epochs'
        )
      try:
        value = float(row[key])
      except (TypeError, ValueError):
        value = row[key]
      if wrong := rules.positive(value):
        raise ValueError(f'{where}: {key}={row[key]!r} {wrong}')
      return value

    if metric in row and row[metric] in (None, ''):  # A run that is not done.
      continue
    accuracy = number(metric)
    if row.get('model') and row.get('epochs'):
      work = count(row['model'], number('epochs'))
    else:
      work = number('x' if 'x' in row else 'exaflops')
    family = row.get('family') or row.get('line') or epath.Path(path).stem
    name = row.get('name') or row.get('variant') or row.get('model') or ''
    points.append(Point(family, name, work, accuracy))
  if points and max(point.accuracy for point in points) <= 1:
    points = [p._replace(accuracy=100 * p.accuracy) for p in points]
  return points


def _rows(path) -> list[dict]:
  if not path.is_file():
    raise FileNotFoundError(
      f"results='{path}' is no file: give a CSV or JSON file (--results)"
    )
  text = path.read_text()
  try:
    if path.suffix != '.json':
      return list(csv.DictReader(text.splitlines()))
    rows = json.loads(text)
  except ValueError as e:
    raise ValueError(f"results='{path}' is no JSON: {e} (--results)") from e
  if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
    raise ValueError(
      f"results='{path}' must be a JSON list of objects (--results)"
    )
  return rows
