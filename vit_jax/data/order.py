"""Selects the example at each position of a run, for a data set or a mixture.

The example is a pure function of the position: nothing is buffered for
shuffling, and any position can be computed without the positions before it. In
a mixture each data set has its own epochs, with a permutation each.
"""

import numpy as np
import tensorflow as tf

from vit_jax.data import mixture, records

# AutoGraph would rewrite what these functions have tf.data call, which takes half a
# second at the start of a run, and for each evaluation.
_as_it_is = tf.autograph.experimental.do_not_convert


# Smaller data sets are sorted by random keys: the cipher permutes at least 2**16
# values and would have to be repeated until its value lies below their size.
_SORTED = 1024


@_as_it_is
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


def _seed(seed, part):
  """Returns the seed of the order of a mixture's part; the first has `seed`."""
  return (seed + 1_000_003 * part) % 2**63


def training_indices(source, positions: np.ndarray, seed: int) -> np.ndarray:
  """Returns the numbers of the examples at positions of the run, int64 [b].

  A mixture numbers the examples of all its parts consecutively. `positions`,
  int64 [b], ascend; `seed` is that of the run.
  """
  if not isinstance(source, mixture.MixtureSource):
    return example_indices(tf.constant(positions), source.num_examples, seed).numpy()
  indices = np.empty_like(positions)
  part, local = source.place(positions)
  for k, (inner, offset) in enumerate(zip(source.parts, source.offsets)):
    mine = part == k
    if mine.any():
      found = training_indices(inner, local[mine], _seed(seed, k))
      indices[mine] = found + offset
  return indices


@_as_it_is
def training_records(
  config, source, rows: np.ndarray, start_step: int
) -> tf.data.Dataset:
  """Returns the records of a run from a step on, without end.

  They are tf.data of (position, record): int64 scalar, and the record of one
  example (before `source.read`) with its number, `index`, int64 scalar. See
  input_pipeline.train_dataset for the arguments.
  """
  mine = tf.constant(rows, tf.int64)
  steps = tf.data.Dataset.range(start_step, np.iinfo(np.int64).max)
  positions = steps.map(lambda step: step * config.batch + mine)

  def records_of(part, both, seed):
    """Reads one data set at (positions in the run [b], in the data set [b])."""

    def look_up(position, local):
      index = example_indices(local, part.num_examples, seed)
      return position, {'index': index, **part.lookup(index)}

    return at_a_time(part, both, look_up)

  if not isinstance(source, mixture.MixtureSource):
    both = positions.map(lambda position: (position, position))
    return records_of(source, both, config.seed)

  def part_records(k, part):
    def choose(position):
      number, local = source.place(position)
      chosen = tf.boolean_mask(position, number == k)
      return chosen, tf.boolean_mask(local, number == k)

    both = positions.map(choose).filter(lambda chosen, _: tf.size(chosen) > 0)

    def read(position, record):
      index = record['index'] + source.offsets[k]
      return position, {'index': index, **source.select(part.read(record))}

    return records_of(part, both, _seed(config.seed, k)).map(
      read, num_parallel_calls=records.CALLS, deterministic=True
    )

  return tf.data.Dataset.choose_from_datasets(
    [part_records(k, part) for k, part in enumerate(source.parts)],
    positions.map(lambda position: source.place(position)[0]).unbatch(),
    stop_on_empty_dataset=False,
  )


@_as_it_is
def at_a_time(source, batches, look_up) -> tf.data.Dataset:
  """Looks up records in chunks, with the parallelism that suits the source.

  `look_up` is a function from tensors [c], as in `batches`, to records [c];
  returns tf.data of the records, one by one, in order.
  """
  if source.chunk is None:
    return batches.map(look_up).unbatch()
  return (
    batches.rebatch(source.chunk)
    .map(look_up, num_parallel_calls=records.CALLS, deterministic=True)
    .unbatch()
  )
