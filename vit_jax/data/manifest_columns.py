"""Values of the lines of a manifest as tensors.

vit_jax/data/manifest.py describes the values of each feature.
"""

from collections.abc import Sequence
import itertools
from typing import Any

import numpy as np

from vit_jax.data import manifest_files, records
from vit_jax.data.lazy import tf

# A greater class number is taken for an id: each class has a row of the head.
_MOST_CLASSES = 10**6
_MOST_LEVELS = 8  # Nesting depth of lists.
_DTYPES = {bool: 'bool', int: 'int64', float: 'float32', str: 'string'}


def list_features(lines: Sequence[manifest_files.Line]) -> list[str]:
  """Returns the names of all features of a manifest."""
  names: dict[str, None] = {}  # In the order of the lines.
  for line in lines:
    names.update(dict.fromkeys(line.values))
  # An empty list of dicts has the name of the dicts, which is not a feature.
  dicts: set[str] = set()
  for name in names:
    dicts.update(manifest_files.parents(name))
  return [name for name in names if name not in dicts]


def label_names(
  lines: Sequence[manifest_files.Line], names: tuple[str, ...] | None
) -> tuple[str, ...]:
  """Checks all labels; returns the class names."""
  limit = _MOST_CLASSES if names is None else np.inf
  first = first_line = None
  labels = set()
  for line in lines:
    for label in line.labels():
      if first_line is None:
        first = label
        first_line = line.where
      fault = ''
      if type(label) not in (int, str):
        fault = 'use the name or the number of a class, or a list of them'
      elif type(label) is not type(first):
        fault = f'names and numbers cannot be mixed, see {first_line}'
      elif type(label) is int and not 0 <= label < limit:
        fault = (
          f'class numbers are 0 to {_MOST_CLASSES - 1:,}, and null means no label; '
          'renumber the classes, or use their names (strings)'
        )
      if fault:
        raise ValueError(
          f'{line.where}: `label` is {manifest_files.short(label)}: {fault}'
        )
      labels.add(label)
  if names is not None:
    return names
  if first_line is None:
    raise ValueError(f'{lines[0].where}: neither this line nor any other has a `label`')
  if isinstance(first, int):
    return tuple(str(i) for i in range(max(labels) + 1))
  return tuple(sorted(labels))


def _class_numbers(
  values: Sequence[Any], lines: Sequence[manifest_files.Line], names: Sequence[str]
) -> list:
  """Converts class names, also in nested lists, to numbers; checks numbers."""
  numbers = {name: i for i, name in enumerate(names)}
  repeated = set(records.repeated_names(names))

  def convert(value: Any, where: str) -> Any:
    if isinstance(value, list):
      return [convert(x, where) for x in value]
    if type(value) is int and 0 <= value < len(names):
      return value
    if isinstance(value, str) and value in repeated:
      raise ValueError(
        f'{where}: several classes are named {manifest_files.short(value)}: write the '
        'number of the class'
      )
    if isinstance(value, str) and value in numbers:
      return numbers[value]
    ellipsis = ' ...' if len(names) > 5 else ''
    raise ValueError(
      f'{where}: {manifest_files.short(value)} is not one of the {len(names)} classes '
      f'{list(names[:5])}{ellipsis} of the training data or classes.json'
    )

  return [convert(value, line.where) for value, line in zip(values, lines)]


def label_tensor(
  lines: Sequence[manifest_files.Line], numbers: Sequence[int], names: Sequence[str]
) -> 'tf.Tensor':
  """Returns class numbers of lines by their `numbers`, int64 [n, L], padded with -1."""
  rows = _class_numbers([line.labels() for line in lines], lines, names)
  selected = [rows[i] for i in numbers]
  lengths = np.array([len(row) for row in selected])
  padded = np.full([len(selected), max(1, *lengths)], -1, np.int64)
  is_label = np.arange(padded.shape[1]) < lengths[:, None]
  padded[is_label] = list(itertools.chain.from_iterable(selected))
  return tf.constant(padded)


def feature_tensor(
  name: str, lines: Sequence[manifest_files.Line], names: Sequence[str] | None
) -> 'tf.Tensor | tf.RaggedTensor':
  """Returns a feature of all lines, as a tensor or RaggedTensor [n, ...]."""
  values = [line.get(name) for line in lines]
  for line, value in zip(lines, values):
    if value is None:
      raise ValueError(f"{line.where}: there is no '{name}', which other lines have")
  if names is not None:
    values = _class_numbers(values, lines, names)
  values, lengths = _flatten(name, values, lines)
  # Ragged up to the last dimension of varying size. A size that is 0 everywhere counts
  # as varying, since tf.data cannot unbatch a tensor without elements.
  shape: list[int] = []
  while lengths and len(set(lengths[-1])) == 1 and lengths[-1][0]:
    shape.insert(0, lengths.pop()[0])
  types = set(map(type, values))
  [kind] = types if len(types) == 1 else [float]
  flat = tf.reshape(tf.constant(values, _DTYPES[kind]), [-1, *shape])
  return tf.RaggedTensor.from_nested_row_lengths(flat, lengths) if lengths else flat


def _flatten(
  name: str, values: list, lines: Sequence[manifest_files.Line]
) -> tuple[list, list[list[int]]]:
  """Returns the innermost values of nested lists, and the lengths of each level."""
  owners = list(lines)  # The line of each value.
  lengths: list[list[int]] = []
  while values:
    kind = _value_type(values[0])
    for value, line in zip(values, owners):
      if _value_type(value) is not kind or kind not in (*_DTYPES, list):
        raise ValueError(
          f"{line.where}: '{name}' is {manifest_files.short(line.get(name))}, and "
          f'{manifest_files.short(lines[0].get(name))} on the first line: use strings, '
          'booleans or numbers, or lists of one of these, equally nested on all lines'
        )
    if kind is not list:
      break
    if len(lengths) == _MOST_LEVELS:
      raise ValueError(
        f"{owners[0].where}: '{name}' has lists in more than {_MOST_LEVELS} levels"
      )
    lengths.append([len(value) for value in values])
    inner_owners = []
    for value, line in zip(values, owners):
      inner_owners += [line] * len(value)
    owners = inner_owners
    values = list(itertools.chain.from_iterable(values))
  if values and kind is float:
    _check_range(name, values, owners)
  return values, lengths


def _value_type(value: Any) -> type:
  """Returns the type of a value; float for all numbers."""
  return float if type(value) is int else type(value)


def _check_range(
  name: str, values: Sequence[float], lines: Sequence[manifest_files.Line]
) -> None:
  """Raises ValueError if a number is too large for the dtype of all."""
  dtype = 'int64'
  low: float = -(2**63)
  high: float = 2**63 - 1
  if any(type(value) is float for value in values):
    dtype = 'float32'
    high = float(np.finfo(np.float32).max)
    low = -high
  for value, line in zip(values, lines):
    if not low <= value <= high:
      raise ValueError(
        f"{line.where}: '{name}' is {value}, too large for {dtype}: scale its values"
      )
