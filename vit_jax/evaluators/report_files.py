"""Formats of reports: tables in Markdown and CSV, and a table of predictions."""

from collections.abc import Iterable, Mapping, Sequence
import csv
import io
import math
from typing import Any

from etils import epath
import numpy as np

from vit_jax import console
from vit_jax.distributed import files, processes
from vit_jax.inference import tables


def markdown(cells: Sequence[Sequence[str]]) -> list[str]:
  """Returns the lines of a table with columns of equal width; the first row is the header."""
  escaped = []
  for row in cells:
    escaped.append([cell.replace('|', '\\|') for cell in row])
  header, *rows = console.padded(escaped)
  rules = [len(header[0]) * '-']
  for cell in header[1:]:
    rules.append(f'{(len(cell) - 1) * "-"}:')  # Aligned to the right.
  return [_markdown_line(row) for row in (header, rules, *rows)]


def _markdown_line(cells: Sequence[str]) -> str:
  return f'| {" | ".join(cells)} |'


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
  """Returns rows as CSV; None is an empty field."""
  text = io.StringIO()
  csv.writer(text, lineterminator='\n').writerows(rows)
  return text.getvalue()


def defined(value: Any) -> Any:
  """Returns a number for JSON and CSV, or None for nan."""
  value = value.item() if isinstance(value, np.generic) else value
  return None if isinstance(value, float) and math.isnan(value) else value


def cell(value: float, template: str) -> str:
  """Formats a number for a printed table: '{:.4g}'; '-' for nan."""
  return '-' if math.isnan(value) else template.format(value)


def check_predictions(path: str) -> None:
  """Raises ValueError, OSError or ImportError unless a path can be written to.

  All processes must call it, and process 0, which writes, tries the path.
  """
  if not path.endswith(('.csv', '.jsonl', '.parquet')):
    raise ValueError(
      f"predictions='{path}' must end with .csv, .jsonl or .parquet (--predictions)"
    )
  tables.arrow()
  processes.from_first("checking '--predictions'", lambda: _check_writable(path))


def check_report(path: str) -> None:
  """Does what `check_predictions` does for the folder of a report."""

  def check() -> None:
    folder = epath.Path(path)
    if folder.is_dir():
      files.check_new_folder(folder / 'report', 'report')
    elif folder.exists():
      raise ValueError(f"report='{path}' is a file: pass a folder (--report)")
    else:
      files.check_new_folder(folder, 'report')

  processes.from_first("checking '--report'", check)


def _check_writable(path: str) -> None:
  """Raises ValueError or OSError unless a table can be written to a path."""
  folder = epath.Path(path).parent
  if not folder.is_dir():
    raise ValueError(
      f"predictions='{path}': the folder '{folder}' does not exist: create it, or pass "
      'another path (--predictions)'
    )
  if epath.Path(path).is_dir():
    raise ValueError(
      f"predictions='{path}' is a folder: pass a file path (--predictions)"
    )
  files.check_new_folder(path, 'predictions')


def _type_of_column(rows: Sequence[Mapping[str, Any]], name: str) -> type:
  """Returns the type of the first value that is not None; float without any."""
  for row in rows:
    if row[name] is not None:
      return type(row[name])
  return float


def write_predictions(path: epath.PathLike, rows: Sequence[Mapping[str, Any]]) -> None:
  """Writes a table with a row per image; the ending of the path is its format."""
  types = {name: _type_of_column(rows, name) for name in rows[0]}
  with files.naming_output(path, 'predictions'), files.replacing(path) as file:
    ending = epath.Path(path).suffix
    tables.encode(iter([tables.to_arrow(rows, types)]), file, ending)
