"""Which example stands at each position of a run: of one data set, or several.

In the endless run of a training that is a pure function of the position: nothing
is buffered to shuffle, and any position can be computed without those before it.
A mixture, `config.dataset = (('cifar10', 0.7), ('/data/photos', 0.3))`, gives
each of its data sets its share of the positions, evenly spread, and each goes
through epochs of its own, in a permutation each. Evaluation reads the first.
"""

from collections.abc import Sequence
import fractions
import math

import jax
import numpy as np
import tensorflow as tf

from vit_jax.data import records

# Shares are fractions with denominators up to this, so that positions up to
# 2**63 are counted in int64 without error.
_DENOMINATOR = 10**9


def parse(dataset) -> str | tuple[tuple[str, float], ...]:
  """Returns `config.dataset` as a name, or as ((name, weight), ...).

  Raises:
    ValueError: if it is neither.
  """
  if isinstance(dataset, str):
    return dataset
  if (
    not isinstance(dataset, list | tuple)
    or not dataset
    or not all(map(_is_pair, dataset))
  ):
    raise ValueError(
      f'dataset={dataset!r} must be the name of a data set, a folder, or several '
      "with weights above 0, (('cifar10', 0.7), ('/data/photos', 0.3)) "
      '(config.dataset)'
    )
  return tuple((name, weight) for name, weight in dataset)


def describe(dataset) -> str:
  """Says which data `config.dataset` is, with the shares of a mixture."""
  if isinstance(dataset, str):
    return dataset
  total = sum(weight for _, weight in dataset)
  return ' and '.join(f'{name} ({w / total:.0%})' for name, w in dataset)


def _is_pair(pair) -> bool:
  """Tells whether something is a data set with its weight."""
  if not isinstance(pair, list | tuple) or len(pair) != 2:
    return False
  name, weight = pair
  is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
  return isinstance(name, str) and is_number and 0 < weight < math.inf


class MixtureSource(records.Source):
  """Data sets to train on together; its parts are sources.

  The share of a part is kept in any prefix of the run: to within one example for
  up to three parts, hardly more for many.

  Args:
    parts: sources of the same classes. What only some of them have is left out.
    pairs: their names, and weights of any sum.

  Raises:
    ValueError: if their classes or the types of their features differ.
  """

  random_access = False

  def __init__(
    self,
    parts: Sequence[records.Source],
    pairs: Sequence[tuple[str, float]],
  ):
    features = [
      name
      for name in parts[0].features
      if all(name in part.features for part in parts)
    ]
    names = {k: v for k, v in parts[0].names.items() if k in features}
    super().__init__(sum(part.num_examples for part in parts), features, names)
    self.parts = tuple(parts)
    self.offsets = np.cumsum([0, *(p.num_examples for p in parts)]).tolist()
    self._shares = _shares([weight for _, weight in pairs])
    self._check([name for name, _ in pairs])

  def _check(self, titles):
    specs = [records.element_spec(part) for part in self.parts]
    for name in self.features:
      for title, part, spec in zip(titles, self.parts, specs):
        where = f"in '{title}', and in '{titles[0]}'"
        ours, first = part.names.get(name, ()), self.names.get(name, ())
        if ours != first:
          raise ValueError(
            f"the classes of '{name}' are {len(ours)}, {list(ours[:5])}, {where} "
            f'{len(first)}, {list(first[:5])}: data sets that are mixed must have '
            'the same (config.dataset)'
          )
        kinds = [_describe(s[name]) for s in (spec, specs[0])]
        if kinds[0] != kinds[1]:
          raise ValueError(
            f"'{name}' is {kinds[0]} {where} {kinds[1]}: data sets that are mixed "
            'must agree (config.dataset)'
          )

  @property
  def evaluated(self) -> records.Source:
    """What evaluation reads: the first part."""
    return self.parts[0]

  def place(self, positions):
    """Says what stands at some positions of the run.

    Args:
      positions: int64 [b], of NumPy or TensorFlow.

    Returns:
      The numbers of the parts, int64 [b], and of the positions among all that
      the part has, int64 [b].
    """
    part = local = positions * 0
    free = part + 1  # 0 once it is known whose position it is.
    rest = positions  # The position among those of this part and the next ones.
    for k, share in self._shares:
      before = _rounded(rest, share)
      mine = free * (_rounded(rest + 1, share) - before)
      part = part + mine * k
      local = local + mine * before
      free = free - mine
      rest = rest - before
    return part, local

  def read(self, record):
    """Returns the record of one example with contents in place of paths."""
    record = dict(record)
    part = tf.cast(record.pop('part'), tf.int32)
    return tf.switch_case(
      part, [lambda p=p: p.read(record) for p in self.parts]
    )

  def locate(self, index: int) -> tuple[records.Source, int]:
    """Returns the source that an example comes from, and its number there."""
    part = np.searchsorted(self.offsets, index, side='right') - 1
    return self.parts[part], index - self.offsets[part]


def _shares(weights) -> list[tuple[int, fractions.Fraction]]:
  """Returns (number of a part, its share of what those before it leave)."""
  exact = [fractions.Fraction(weight) for weight in weights]
  # From the heaviest on: so errors of rounding stay small.
  order = sorted(range(len(exact)), key=lambda k: -exact[k])
  shares = []
  for i, k in enumerate(order):
    left = sum(exact[j] for j in order[i:])
    share = (exact[k] / left).limit_denominator(_DENOMINATOR)
    shares.append((k, share))
  return shares


def _rounded(count, share):
  """Returns round(count * share), halves up, of int64 [b], without overflow."""
  numerator, denominator = share.numerator, share.denominator
  inside = count % denominator
  return count // denominator * numerator + (
    2 * inside * numerator + denominator
  ) // (2 * denominator)


def _describe(spec) -> str:
  """Describes the type of a feature, with what may not differ."""
  rank = getattr(spec, 'ragged_rank', 0)
  return f'{spec.dtype.name} of {spec.shape.rank} axes' + ', ragged' * (
    rank > 0
  )


def example_indices(positions, num_examples: int, seed: int):
  """Returns which example stands at each position of the endless run.

  Args:
    positions: int64 [b], ascending, b > 0.
    num_examples: size n of an epoch.
    seed: seed of the run.

  Returns:
    int64 [b]: position i gets element i mod n of the permutation that (seed,
    i // n) draws.
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
  """Returns the seed of a part's order; that of a data set alone for the first."""
  return seed + 1_000_003 * part


def training_indices(source, positions: np.ndarray, seed: int) -> np.ndarray:
  """Returns the numbers of the examples at some positions of the run.

  Args:
    source: the training split.
    positions: int64 [b], ascending.
    seed: seed of the run.

  Returns:
    int64 [b]: -1 where a stream does not tell. In a mixture the examples are
    counted through all its parts.
  """
  indices = np.full_like(positions, -1)
  if isinstance(source, MixtureSource):
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
  config, source, rows: np.ndarray, start_step: int
) -> tf.data.Dataset:
  """Returns the records of a run from a step on, without end.

  Args:
    config: reads `batch`, `seed`, `shuffle_buffer`.
    source: the training split.
    rows: the rows of the global batch that this process reads.
    start_step: number of the first batch.

  Returns:
    tf.data of (position, record): int64 scalar, and the features of one example
    (before `source.read`) with its number, `index`, int64 scalar; -1 from a
    stream, which does not tell.
  """
  mine = tf.constant(rows, tf.int64)
  steps = tf.data.Dataset.range(start_step, np.iinfo(np.int64).max)
  positions = steps.map(lambda step: step * config.batch + mine)
  if not isinstance(source, MixtureSource):
    both = positions.map(lambda position: (position, position))
    skip = start_step * len(rows)
    return _records(config, source, both, config.seed, skip)

  def part_records(k, part):
    def choose(position):
      number, local = source.place(position)
      chosen = tf.boolean_mask(position, number == k)
      return chosen, tf.boolean_mask(local, number == k)

    both = positions.map(choose).filter(lambda chosen, _: tf.size(chosen) > 0)
    skip = 0
    if not part.random_access:
      skip = _count(source, k, rows, config.batch, start_step)
    number = tf.constant(k, tf.int64)

    def finish(position, record):
      index = record['index']
      if part.random_access:
        index += source.offsets[k]
      kept = {name: record[name] for name in source.features}
      return position, {'index': index, 'part': number, **kept}

    data = _records(config, part, both, _seed(config.seed, k), skip)
    return data.map(finish)

  return tf.data.Dataset.choose_from_datasets(
    [part_records(k, part) for k, part in enumerate(source.parts)],
    positions.map(lambda position: source.place(position)[0]).unbatch(),
    stop_on_empty_dataset=False,
  )


def _records(config, source, positions, seed, skip):
  """Returns tf.data of (position in the run, record) of one data set.

  Args:
    config: see training_records.
    source: the data set.
    positions: tf.data of (positions in the run [b], among its own [b]).
    seed: seed of its order.
    skip: number of records of a stream that came before.
  """
  if source.random_access:

    def look_up(position, local):
      index = example_indices(local, source.num_examples, seed)
      return position, {'index': index, **source.lookup(index)}

    return positions.map(look_up).unbatch()
  stream = source.stream(
    jax.process_count(), jax.process_index(), config.shuffle_buffer, seed
  ).skip(skip)
  unknown = tf.constant(-1, tf.int64)
  return tf.data.Dataset.zip(
    positions.map(lambda position, _: position).unbatch(), stream
  ).map(lambda position, record: (position, {'index': unknown, **record}))


def _count(source, k, rows, batch, steps):
  """Counts the positions of a part in these rows of the first batches."""
  total = 0
  for begin in range(0, steps, 1000):
    step = np.arange(begin, min(begin + 1000, steps))[:, None]
    total += int((source.place(step * batch + rows)[0] == k).sum())
  return total
