"""Selects the example at each position of a run, for a data set or a mixture.

The example is a pure function of the position: nothing is buffered for
shuffling, and any position can be computed without the positions before it. In
a mixture each data set has its own epochs and permutations.
"""

import numpy as np

from vit_jax.data import mixture, records
from vit_jax.data.lazy import as_it_is, tf

# Smaller data sets are sorted by random keys: the cipher permutes at least 2**16
# values and would have to be repeated until its value is below their size.
_SORTED = 1024


@as_it_is
def example_indices(positions, num_examples: int, seed: int):
  """Returns the example at each position of the endless run, int64 [b].

  Of n examples, position i gets element i mod n of the permutation drawn from
  (seed, i // n). `positions`, int64 [b], ascend, b > 0.
  """
  epochs = positions // num_examples
  inside = positions % num_examples
  if num_examples >= _SORTED:
    high, low = divmod(seed, 2**32)
    seeds = tf.stack([high + 0 * epochs, low + 0 * epochs, epochs], axis=-1)
    return tf.raw_ops.RandomIndexShuffle(
      index=inside,
      seed=seeds,
      max_index=tf.constant(num_examples - 1, tf.int64),
      rounds=8,  # 4 and 6 are not uniform for 1e9 examples.
    )
  epoch, pairs = epochs[0], -(-num_examples // 2)
  keys = tf.raw_ops.StatelessRandomUniformFullIntV2(
    shape=[epochs[-1] - epoch + 1, 2 * pairs],
    key=tf.constant([seed], tf.uint64),
    counter=tf.cast([epoch * pairs, 0], tf.uint64),  # Philox draws 128 bits.
    alg=1,
    dtype=tf.uint64,
  )
  orders = tf.argsort(keys[:, :num_examples])
  places = tf.stack([epochs - epoch, inside], axis=-1)
  return tf.cast(tf.gather_nd(orders, places), tf.int64)


def _part_seed(seed, k):
  """Returns the seed of the order of part k of a mixture; `seed` for the first."""
  return (seed + 1_000_003 * k) % 2**63


def training_indices(source, positions: np.ndarray, seed: int) -> np.ndarray:
  """Returns the numbers of the examples at positions of the run, int64 [b].

  A mixture numbers the examples of all its parts consecutively. `positions`,
  int64 [b], ascend; `seed` is the seed of the run.
  """
  if not isinstance(source, mixture.MixtureSource):
    return example_indices(tf.constant(positions), source.num_examples, seed).numpy()
  indices = np.empty_like(positions)
  number, local = (x.numpy() for x in source.place(positions))
  for k, (part, offset) in enumerate(zip(source.parts, source.offsets)):
    mine = number == k
    if mine.any():
      found = training_indices(part, local[mine], _part_seed(seed, k))
      indices[mine] = found + offset
  return indices


@as_it_is
def training_records(
  config, source, rows: np.ndarray, start_step: int
) -> 'tf.data.Dataset':
  """Returns the records of a run from a step on, without end.

  They are tf.data of (position, record): int64 scalar, and the record of one
  example (before `source.read`) with its number, `index`, int64 scalar. See
  input_pipeline.train_dataset for the arguments.
  """
  mine = tf.constant(rows, tf.int64)
  steps = tf.data.Dataset.range(start_step, np.iinfo(np.int64).max)
  positions = steps.map(lambda step: step * config.batch + mine)
  if not isinstance(source, mixture.MixtureSource):
    return _records(source, positions.map(lambda x: (x, x)), config.seed)
  # Each part is read at its own positions, and the records are merged in order.
  placed = positions.map(lambda x: (x, *source.place(x)))
  return tf.data.Dataset.choose_from_datasets(
    [_part_records(source, k, placed, config.seed) for k in range(len(source.parts))],
    placed.map(lambda position, part, local: part).unbatch(),
    stop_on_empty_dataset=False,
  )


def _records(source, places, seed):
  """Reads one data set at (positions in the run [b], in the data set [b])."""

  def look_up(position, local):
    index = example_indices(local, source.num_examples, seed)
    return position, {'index': index, **source.lookup(index)}

  return at_a_time(source, places, look_up)


def _part_records(source, k, placed, seed):
  """Reads part k at `placed`: (positions in the run, parts, positions there), [b]."""

  def choose(position, part, local):
    return tf.boolean_mask(position, part == k), tf.boolean_mask(local, part == k)

  def read(position, record):
    index = record['index'] + source.offsets[k]
    return position, {'index': index, **source.select(source.parts[k].read(record))}

  places = placed.map(choose).filter(lambda position, local: tf.size(position) > 0)
  found = _records(source.parts[k], places, _part_seed(seed, k))
  return found.map(read, num_parallel_calls=records.CALLS, deterministic=True)


@as_it_is
def at_a_time(source, batches, look_up) -> 'tf.data.Dataset':
  """Looks up records in chunks, in parallel if the source is slow.

  `look_up` maps tensors [c], as in `batches`, to records [c]. Returns tf.data of
  the single records, in order.
  """
  if source.chunk is None:
    return batches.map(look_up).unbatch()
  return (
    batches.rebatch(source.chunk)
    .map(look_up, num_parallel_calls=records.CALLS, deterministic=True)
    .unbatch()
  )
