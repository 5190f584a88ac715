"""The targets of regression: numbers in columns of the data, standardised for training."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from vit_jax.data import feeding, mixture, order, records, sources
from vit_jax.data.lazy import no_autograph, tf
from vit_jax.distributed import processes

_BATCH = 1024  # Examples read at a time.


class Target(NamedTuple):
  """A number to predict, with its mean and standard deviation over training examples."""

  name: str  # The column, 'age', or for a column of lists 'corners[0]', ...
  column: str
  mean: float
  std: float


def measure(
  config: ml_collections.ConfigDict, source: records.Source, names: Sequence[str]
) -> list[dict[str, Any]]:
  """Returns the fields of the Target of each value in some columns, for JSON.

  All processes must call it; process 0 reads the columns, without images. ValueError
  if a value is not a finite number, if the lists in a column differ in length, or if a
  target is the same in all training examples.
  """
  columns = {name: _open(config, source, name) for name in names}

  @processes.by_first('reading the targets')
  def read() -> list[dict[str, Any]]:
    targets = []
    for name, column_sources in columns.items():
      for target in _targets(name, _read(source, column_sources, name)):
        targets.append(target._asdict())
    return targets

  return read()


def numbers(record: Mapping[str, 'tf.Tensor'], name: str) -> 'tf.Tensor':
  """Returns the numbers of an example, or of all, in a column as float64.

  ValueError if it has texts.
  """
  if record[name].dtype == tf.string:
    raise ValueError(
      f"the target '{name}' is text, not numbers: correct the values that are not "
      'numbers, or name other columns (config.task_options.targets)'
    )
  return tf.cast(record[name], tf.float64)


def _open(
  config: ml_collections.ConfigDict, source: records.Source, name: str
) -> list[records.Source]:
  """Opens a column of the training data, which may be a mixture, without images."""
  datasets = [config.dataset]
  if isinstance(source, mixture.MixtureSource):
    datasets = [dataset for dataset, _ in config.dataset]
  column_sources: list[records.Source] = []
  for part, dataset in zip(_parts(source), datasets):
    values = part.values(name)
    if values is None:
      column_source = sources.open_split(
        config, config.pp.train, (name,), dataset=dataset
      )
    else:
      column_source = records.MemorySource({name: values}, {})
    column_sources.append(column_source)
  return column_sources


def _parts(source: records.Source) -> Sequence[records.Source]:
  return source.parts if isinstance(source, mixture.MixtureSource) else [source]


def _read(
  source: records.Source, column_sources: Sequence[records.Source], name: str
) -> np.ndarray:
  """Returns the values in a column of the training data, float64 [n, k]."""
  rows: list[np.ndarray] = []
  for part, column_source in zip(_parts(source), column_sources):
    for number, row in enumerate(_rows(column_source, name)):
      size = len(rows[0]) if rows else max(1, len(row))
      if len(row) != size:
        raise ValueError(
          f"{part.name(number)}: the target '{name}' has {len(row)} values, not {size}: "
          'use lists of the same length (config.task_options.targets)'
        )
      if not np.isfinite(row).all():
        raise ValueError(
          f"{part.name(number)}: the target '{name}' is {row.tolist()}, which is not "
          'finite: correct it, or leave out the example (config.task_options.targets)'
        )
      rows.append(row)
  return np.stack(rows)


def _rows(source: records.Source, name: str) -> Iterator[np.ndarray]:
  """Yields the values of each example in a column, float64 [k]."""
  values = source.values(name)
  if isinstance(values, tf.Tensor):
    yield from numbers({name: values}, name).numpy().reshape(source.num_examples, -1)
    return
  num_examples = source.num_examples
  indices = tf.data.Dataset.range(num_examples).batch(_BATCH)
  read = no_autograph(source.read)
  data = order.map_batched(source, indices, source.lookup)

  def flat_numbers(record: records.Record) -> 'tf.Tensor':
    return tf.reshape(numbers(read(record), name), [-1])

  def batch_indices(number: int) -> range:
    start = number * _BATCH
    return range(start, min(start + _BATCH, num_examples))

  data = data.map(flat_numbers).ragged_batch(_BATCH)
  batches: Iterator[Any] = feeding.read(data, source, batch_indices)
  for batch in batches:
    if isinstance(batch, np.ndarray):  # One number per row.
      yield from batch
    else:
      yield from np.split(batch.values, batch.row_splits[1:-1])


def _targets(column: str, values: np.ndarray) -> Iterator[Target]:
  """Yields the targets in a column with values [n, k]."""
  count = values.shape[1]
  for i in range(count):
    name = f'{column}[{i}]' if count > 1 else column
    mean = float(values[:, i].mean())
    std = float(values[:, i].std())
    if not std:
      raise ValueError(
        f"the target '{name}' is {mean:g} in all training examples, so there is nothing "
        'to learn: name other columns (config.task_options.targets)'
      )
    yield Target(name, column, mean, std)
