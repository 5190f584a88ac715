"""Mixtures: several data sets to train on together.

In a mixture, `config.dataset = (('cifar10', 0.7), ('/data/photos', 0.3))`, each
data set has its share of the positions, evenly spread, and its own epochs with
a permutation each. Evaluation reads the first data set.
"""

from collections.abc import Sequence
import fractions

import numpy as np
import tensorflow as tf

from vit_jax.data import records

# Greatest denominator of a share, so that int64 holds all positions up to 2**63
# without error.
_DENOMINATOR = 10**9
_SOFT = 'soft_label'


def describe(dataset) -> str:
  """Describes `config.dataset` in words, with the shares of a mixture."""
  if isinstance(dataset, str):
    return dataset
  total = sum(weight for _, weight in dataset)
  return ' and '.join(f'{name} ({w / total:.0%})' for name, w in dataset)


class MixtureSource(records.Source):
  """Several data sets to train on together.

  In any prefix of the run, the share of a part is exact to within one example
  for up to three parts, and to hardly more for many.

  Args:
    parts: sources with the same classes. Only their common features are used;
      and 'soft_label' if some part has it, which is all 0 in the other parts.
    pairs: their names, and weights of any sum.
  """

  def __init__(
    self,
    parts: Sequence[records.Source],
    pairs: Sequence[tuple[str, float]],
  ):
    features = [
      name
      for name in parts[0].features
      if name != _SOFT and all(name in part.features for part in parts)
    ]
    self._has_soft = any(_SOFT in part.features for part in parts)
    names = {k: v for k, v in parts[0].names.items() if k in features}
    super().__init__(sum(part.num_examples for part in parts), features, names)
    self.parts = tuple(parts)
    self.offsets = np.cumsum([0, *(p.num_examples for p in parts)]).tolist()
    self._shares = _shares([weight for _, weight in pairs])
    self._check([name for name, _ in pairs])

  def _check(self, titles):
    one = tf.data.Dataset.range(1).batch(1)
    specs = [one.map(p.lookup).unbatch().map(p.read).element_spec for p in self.parts]
    for name in self.features:
      for title, part, spec in zip(titles, self.parts, specs):
        where = f"in '{title}', and in '{titles[0]}'"
        ours, first = part.names.get(name, ()), self.names.get(name, ())
        if ours != first:
          raise ValueError(
            f"the classes of '{name}' are {len(ours)}, {list(ours[:5])}, {where} "
            f'{len(first)}, {list(first[:5])}: mixed data must have the same '
            '(config.dataset)'
          )
        kinds = [_describe(s[name]) for s in (spec, specs[0])]
        if kinds[0] != kinds[1]:
          raise ValueError(
            f"'{name}' is {kinds[0]} {where} {kinds[1]}: mixed data must agree "
            '(config.dataset)'
          )

  @property
  def evaluated(self) -> records.Source:  # The first part alone.
    return self.parts[0]

  def fingerprint(self) -> dict:
    parts = [part.fingerprint() for part in self.parts]
    return {**super().fingerprint(), 'parts': parts}

  def lengths(self, feature: str) -> np.ndarray | None:
    found = [part.lengths(feature) for part in self.parts]
    return None if any(x is None for x in found) else np.concatenate(found)

  def name(self, index: int) -> str:
    part, number = self.locate(index)
    return part.name(number)

  def store(self, workdir):
    for part in self.parts:
      part.store(workdir)

  def place(self, positions):
    """Returns the part at each position of the run, and the position in it.

    Both are int64 [b], of NumPy or TensorFlow like `positions`.
    """
    part = local = positions * 0
    free = part + 1  # 0 once the part of the position is known.
    rest = positions  # The position among those of this and the later parts.
    for k, share in self._shares:
      before = _rounded(rest, share)
      mine = free * (_rounded(rest + 1, share) - before)
      part = part + mine * k
      local = local + mine * before
      free = free - mine
      rest = rest - before
    return part, local

  def select(self, record) -> dict:
    """Returns the features of the mixture in a record that a part has read."""
    found = {name: record[name] for name in self.features}
    if self._has_soft:
      found[_SOFT] = record.get(_SOFT, tf.zeros([len(self.class_names)]))
    return found

  def locate(self, index: int) -> tuple[records.Source, int]:
    part = np.searchsorted(self.offsets, index, side='right') - 1
    return self.parts[part], index - self.offsets[part]


def _shares(weights) -> list[tuple[int, fractions.Fraction]]:
  """Returns (number of a part, its share of what the earlier parts leave)."""
  exact = [fractions.Fraction(weight) for weight in weights]
  # The heaviest part comes first, which keeps rounding errors small.
  order = sorted(range(len(exact)), key=lambda k: -exact[k])
  shares = []
  for i, k in enumerate(order):
    left = sum(exact[j] for j in order[i:])
    share = (exact[k] / left).limit_denominator(_DENOMINATOR)
    shares.append((k, share))
  return shares


def _rounded(count, share):
  """Returns round(count * share), halves up, int64 [b], without overflow."""
  numerator, denominator = share.numerator, share.denominator
  inside = count % denominator
  return count // denominator * numerator + (2 * inside * numerator + denominator) // (
    2 * denominator
  )


def _describe(spec) -> str:
  """Describes the properties of a feature that all parts must share."""
  ragged = ', ragged' if getattr(spec, 'ragged_rank', 0) else ''
  return f'{spec.dtype.name} of {spec.shape.rank} axes{ragged}'
