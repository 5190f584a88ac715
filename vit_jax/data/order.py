"""Selects the example at each position of a run, for a data set or a mixture.

The example is a pure function of the position: nothing is buffered for
shuffling, and any position can be computed without the positions before it. In
a mixture each data set has its own epochs and permutations.
"""

from collections.abc import Callable
from typing import Any

import ml_collections
import numpy as np

from vit_jax.data import mixture, records
from vit_jax.data.lazy import no_autograph, tf

# Smaller data sets are sorted by random keys: the cipher permutes at least 2**16
# values and would have to be repeated until its value is below their size.
_SORTED = 1024
_SMALLEST_BLOCK = 16  # Bits of the values that TensorFlow's cipher permutes.


@no_autograph
def example_indices(
  positions: 'tf.Tensor', num_examples: int, seed: int, stream: int = 0
) -> 'tf.Tensor':
  """Returns the example at each position of the endless run, int64 [b].

  Of n examples, position i gets element i mod n of the permutation drawn from
  (seed, stream, i // n). `positions`, int64 [b], ascend, b > 0. `stream` tells the
  parts of a mixture apart.
  """
  epochs = positions // num_examples
  places = positions % num_examples
  if num_examples < _SORTED:
    return _sorted_by_keys(places, epochs, num_examples, (seed + stream) % 2**63)
  return _encrypted(places, epochs, num_examples, seed, stream)


def _sorted_by_keys(
  places: 'tf.Tensor', epochs: 'tf.Tensor', num_examples: int, seed: int
) -> 'tf.Tensor':
  """Permutes places, int64 [b], by the order of random keys drawn for each epoch."""
  first_epoch = epochs[0]
  num_pairs = -(-num_examples // 2)
  keys = tf.raw_ops.StatelessRandomUniformFullIntV2(
    shape=[epochs[-1] - first_epoch + 1, 2 * num_pairs],
    key=tf.constant([seed], tf.uint64),
    # Philox draws 128 bits at a time.
    counter=tf.cast([first_epoch * num_pairs, 0], tf.uint64),
    alg=1,
    dtype=tf.uint64,
  )
  orders = tf.argsort(keys[:, :num_examples])
  indices = tf.gather_nd(orders, tf.stack([epochs - first_epoch, places], axis=-1))
  return tf.cast(indices, tf.int64)


def _encrypted(
  places: 'tf.Tensor', epochs: 'tf.Tensor', num_examples: int, seed: int, stream: int
) -> 'tf.Tensor':
  """Permutes places, int64 [b], with TensorFlow's cipher.

  Its key has three words of as many bits as half a block, and higher bits of what
  it is given are lost. A second pass, keyed by a hash of these bits, makes orders
  differ in them too.
  """
  last = num_examples - 1
  # For powers of 4, TensorFlow's block has no room for the last value.
  is_power_of_4 = last.bit_count() == 1 and last.bit_length() % 2 == 1
  lacks_room = is_power_of_4 and last >= 2**_SMALLEST_BLOCK
  max_index = last + 1 if lacks_room else last
  word_bits = (max((max_index - 1).bit_length(), _SMALLEST_BLOCK) + 1) // 2

  def encrypt(values: 'tf.Tensor', *key_words: Any) -> 'tf.Tensor':
    def cipher(values: 'tf.Tensor') -> 'tf.Tensor':
      return tf.raw_ops.RandomIndexShuffle(
        index=values,
        seed=tf.stack([word + 0 * epochs for word in key_words], axis=-1),
        max_index=tf.constant(max_index, tf.int64),
        rounds=8,  # 4 and 6 are not uniform for 1e9 examples.
      )

    encrypted = cipher(values)
    if max_index == last:
      return encrypted
    return tf.where(encrypted > last, cipher(encrypted), encrypted)

  seed_high, seed_low = divmod((seed + stream) % 2**63, 2**32)
  indices = encrypt(places, seed_high, seed_low, epochs)
  lost_seed = tf.constant(seed >> word_bits, tf.uint64)
  lost_epochs = _shifted(tf.cast(epochs, tf.uint64), word_bits)
  lost_bits = _hash(_hash(lost_seed) ^ lost_epochs)
  lost_words = [tf.cast(_shifted(lost_bits, i * word_bits), tf.int64) for i in range(3)]
  return tf.where(lost_bits == 0, indices, encrypt(indices, *lost_words))


def _hash(x: 'tf.Tensor') -> 'tf.Tensor':
  """Mixes uint64 as SplitMix64 does at its end (Steele et al., 2014); 0 stays 0."""
  x = (x ^ _shifted(x, 30)) * 0xBF58476D1CE4E5B9
  x = (x ^ _shifted(x, 27)) * 0x94D049BB133111EB
  return x ^ _shifted(x, 31)


def _shifted(x: 'tf.Tensor', bits: int) -> 'tf.Tensor':
  return tf.bitwise.right_shift(x, tf.constant(bits, tf.uint64))


def _stream(part: int) -> int:
  """Returns what distinguishes the order of a part of a mixture; 0 for the first."""
  return 1_000_003 * part


def training_indices(source: Any, positions: np.ndarray, seed: int) -> np.ndarray:
  """Returns the numbers of the examples at positions of the run, int64 [b].

  A mixture numbers the examples of all its parts consecutively. `positions`,
  int64 [b], ascend; `seed` is the seed of the run.
  """
  if not isinstance(source, mixture.MixtureSource):
    return _indices(source, tf.constant(positions), seed, 0).numpy()
  indices = np.empty_like(positions)
  part_numbers, local_positions = source.place(positions)
  for k, (part, offset) in enumerate(zip(source.parts, source.offsets)):
    mask = (part_numbers == k).numpy()
    if mask.any():
      local = _indices(part, local_positions[mask], seed, _stream(k))
      indices[mask] = local.numpy() + offset
  return indices


def _indices(
  source: Any, positions: 'tf.Tensor', seed: int, stream: int
) -> 'tf.Tensor':
  """Returns the example of one data set at each of its positions, int64 [b]."""
  if source.order is None:
    return example_indices(positions, source.num_examples, seed, stream)
  indices = tf.numpy_function(
    lambda x: source.order(x, seed), [positions], tf.int64, stateful=False
  )
  return tf.ensure_shape(indices, positions.shape)


@no_autograph
def training_records(
  config: ml_collections.ConfigDict, source: Any, rows: np.ndarray, start_step: int
) -> 'tf.data.Dataset':
  """Returns the records of a run from a step on, without end.

  They are tf.data of (position, record): int64 scalar, and the record of one
  example (before `source.read`) with its number, `index`, int64 scalar. See
  input_pipeline.train_dataset for the arguments.
  """
  rows = tf.constant(rows, tf.int64)
  steps = tf.data.Dataset.range(start_step, np.iinfo(np.int64).max)
  positions = steps.map(lambda step: step * config.batch + rows)
  if not isinstance(source, mixture.MixtureSource):
    return _records(source, positions.map(lambda x: (x, x)), config.seed)
  # Each part is read at its own positions, and the records are merged in order.
  placements = positions.map(lambda x: (x, *source.place(x)))
  return tf.data.Dataset.choose_from_datasets(
    [
      _part_records(source, k, placements, config.seed)
      for k in range(len(source.parts))
    ],
    placements.map(lambda position, part, local: part).unbatch(),
    stop_on_empty_dataset=False,
  )


def _records(
  source: Any, places: 'tf.data.Dataset', seed: int, stream: int = 0
) -> 'tf.data.Dataset':
  """Reads one data set at (positions in the run [b], in the data set [b])."""

  def look_up(
    position: 'tf.Tensor', local: 'tf.Tensor'
  ) -> tuple['tf.Tensor', records.Record]:
    index = _indices(source, local, seed, stream)
    return position, {'index': index, **source.lookup(index)}

  return map_batched(source, places, look_up)


def _part_records(
  source: mixture.MixtureSource, k: int, placements: 'tf.data.Dataset', seed: int
) -> 'tf.data.Dataset':
  """Reads part k at (positions in the run, parts, positions in the part), [b]."""

  def choose(
    position: 'tf.Tensor', part: 'tf.Tensor', local: 'tf.Tensor'
  ) -> tuple['tf.Tensor', 'tf.Tensor']:
    return tf.boolean_mask(position, part == k), tf.boolean_mask(local, part == k)

  def read(
    position: 'tf.Tensor', record: records.Record
  ) -> tuple['tf.Tensor', records.Record]:
    index = record['index'] + source.offsets[k]
    return position, {'index': index, **source.select(source.parts[k].read(record))}

  places = placements.map(choose).filter(lambda position, local: tf.size(position) > 0)
  part_records = _records(source.parts[k], places, seed, _stream(k))
  return part_records.map(read, num_parallel_calls=records.CALLS, deterministic=True)


@no_autograph
def map_batched(
  source: Any, batches: 'tf.data.Dataset', look_up: Callable
) -> 'tf.data.Dataset':
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
