"""Selects the example at each position of a run, for a data set or a mixture.

The example is a pure function of the position: nothing is buffered for
shuffling, and any position can be computed without the positions before it (for
streams see vit_jax/datasets/streams.py). In a mixture each data set has its own
epochs, with a permutation each.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from vit_jax.data import mixture
from vit_jax.data import records
from vit_jax.scale import sharding


def example_indices(positions, num_examples: int, seed: int):
  """Returns the number of the example at each position of the endless run.

  Args:
    positions: int64 [b], ascending, b > 0.
    num_examples: number of examples n of an epoch.
    seed: seed of the run.

  Returns:
    int64 [b]: position i gets element i mod n of the permutation drawn from
    (seed, i // n).
  """
  epochs = positions // num_examples
  inside = positions % num_examples

  def fill(epoch, indices):
    shuffled = tf.random.experimental.index_shuffle(
      inside, tf.stack([tf.cast(seed, tf.int64), epoch]), num_examples - 1
    )
    return epoch + 1, tf.where(epochs == epoch, shuffled, indices)

  _, indices = tf.while_loop(
    lambda epoch, _: epoch <= epochs[-1], fill, [epochs[0], inside]
  )
  return indices


def _seed(seed, part):
  """Returns the seed of a part's order; the first part has the run's seed."""
  return (seed + 1_000_003 * part) % 2**63


def training_indices(source, positions: np.ndarray, seed: int) -> np.ndarray:
  """Returns the numbers of the examples at some positions of the run.

  Args:
    source: the training split.
    positions: int64 [b], ascending.
    seed: seed of the run.

  Returns:
    int64 [b]; -1 for streams, where the number is unknown. A mixture numbers
    the examples of all its parts consecutively.
  """
  indices = np.full_like(positions, -1)
  if isinstance(source, mixture.MixtureSource):
    part, local = source.place(positions)
    for k, (inner, offset) in enumerate(zip(source.parts, source.offsets)):
      mine = part == k
      if mine.any() and inner.random_access:
        found = training_indices(inner, local[mine], _seed(seed, k))
        indices[mine] = found + offset
  elif source.random_access:
    indices = example_indices(
      tf.constant(positions), source.num_examples, seed
    ).numpy()
  return indices


def training_records(
  config, source, rows: np.ndarray, start_step: int, parts: int | None = None
) -> tf.data.Dataset:
  """Returns the records of a run from a step on, without end.

  Args:
    config: reads `batch`, `seed`, `shuffle_buffer`, `shuffle_buffer_bytes`.
    source: the training split.
    rows: rows of the global batch that this process reads, in order.
    start_step: number of the first batch.
    parts: see sharding.row_parts; by default as few as `rows` allow. Each part
      reads its own share of a stream.

  Returns:
    tf.data of (position, record): int64 scalar, and the features of one example
    (before `source.read`) with its number, `index`, int64 scalar.

  Raises:
    ValueError: if a stream has too few examples.
  """
  streams = sum(not part.random_access for part in leaves(source))
  if not streams:
    return _part_records(config, source, rows, start_step, _Share(1, 0, 0))
  blocks = blocks_of(rows, config.batch, parts)
  size = config.shuffle_buffer_bytes / (len(blocks) * streams)
  data = [
    _part_records(config, source, block, start_step, _Share(parts, part, size))
    for parts, part, block in blocks
  ]
  if len(data) == 1:
    return data[0]
  turns = np.repeat(np.arange(len(data)), len(blocks[0][2]))
  return tf.data.Dataset.choose_from_datasets(
    data, tf.data.Dataset.from_tensor_slices(turns).repeat()
  )


def leaves(source) -> tuple[records.Source, ...]:
  """Returns the parts of a mixture, or the source itself."""
  return (
    source.parts if isinstance(source, mixture.MixtureSource) else (source,)
  )


def blocks_of(rows: np.ndarray, batch: int, parts: int | None = None):
  """Returns the parts of a batch that hold some rows.

  Args:
    rows: rows of the global batch; all rows of each part.
    batch: size of the global batch.
    parts: number of parts; by default as few as `rows` allow.

  Returns:
    A list of (number of parts, number of the part, rows of the part).
  """
  if parts is None:
    parts = sharding.count_parts(np.isin(np.arange(batch), rows).tolist())
  owner = rows // (batch // parts)
  return [(parts, int(k), rows[owner == k]) for k in np.unique(owner)]


class _Share(NamedTuple):
  """The share of a stream that is read.

  Attributes:
    parts: number of shares.
    part: number of the share.
    size: bytes that the windows of the share may take.
  """

  parts: int
  part: int
  size: float


def _part_records(config, source, rows, start_step, share):
  """Returns the records of some rows of a run; see training_records."""
  mine = tf.constant(rows, tf.int64)
  steps = tf.data.Dataset.range(start_step, np.iinfo(np.int64).max)
  positions = steps.map(lambda step: step * config.batch + mine)
  if not isinstance(source, mixture.MixtureSource):
    both = positions.map(lambda position: (position, position))
    done = start_step * len(rows)
    return _records(config, source, both, config.seed, done, share)

  def data_set_records(k, part):
    def choose(position):
      number, local = source.place(position)
      chosen = tf.boolean_mask(position, number == k)
      return chosen, tf.boolean_mask(local, number == k)

    both = positions.map(choose).filter(lambda chosen, _: tf.size(chosen) > 0)
    done = 0
    if not part.random_access:
      done = _count(source, k, rows, config.batch, start_step)
    number = tf.constant(k, tf.int64)

    def finish(position, record):
      index = record['index'] + source.offsets[k]
      kept = source.select(record)
      return position, {'index': index, 'part': number, **kept}

    seed = _seed(config.seed, k)
    return _records(config, part, both, seed, done, share).map(finish)

  return tf.data.Dataset.choose_from_datasets(
    [data_set_records(k, part) for k, part in enumerate(source.parts)],
    positions.map(lambda position: source.place(position)[0]).unbatch(),
    stop_on_empty_dataset=False,
  )


def _records(config, source, positions, seed, done, share):
  """Returns tf.data of (position in the run, record) of one data set.

  Args:
    config: see training_records.
    source: the data set.
    positions: tf.data of (positions in the run [b], positions in the data set
      [b]).
    seed: seed of the data set's order.
    done: number of records to skip in a stream.
    share: share of a stream to read.
  """
  if source.random_access:

    def look_up(position, local):
      index = example_indices(local, source.num_examples, seed)
      return position, {'index': index, **source.lookup(index)}

    return at_a_time(source, positions, look_up)
  window = source.window(config.shuffle_buffer, share.size)
  return tf.data.Dataset.zip(
    positions.map(lambda position, _: position).unbatch(),
    source.forever(share.parts, share.part, done, window, seed),
  )


def at_a_time(source, batches, look_up) -> tf.data.Dataset:
  """Looks up records in chunks, with the parallelism that suits the source.

  Args:
    source: the source.
    batches: tf.data of tensors [b].
    look_up: function from such tensors [c] to records [c].

  Returns:
    tf.data of the records, one by one, in order.
  """
  if source.chunk is None:
    return batches.map(look_up).unbatch()
  return (
    batches.rebatch(source.chunk)
    .map(look_up, num_parallel_calls=records.CALLS, deterministic=True)
    .unbatch()
  )


def _count(source, k, rows, batch, steps):
  """Counts the positions of a part in some rows of the first batches."""
  total = 0
  for begin in range(0, steps, 1000):
    step = np.arange(begin, min(begin + 1000, steps))[:, None]
    total += int((source.place(step * batch + rows)[0] == k).sum())
  return total
