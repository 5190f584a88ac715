"""Mixtures: several data sets to train on together.

In a mixture, `config.dataset = (('cifar10', 0.7), ('/data/photos', 0.3))`, each
data set has its share of the positions, evenly spread, and its own epochs, each
with its own permutation. Evaluation reads the first data set.
"""

from collections.abc import Sequence
import fractions

import numpy as np

from vit_jax.data import records
from vit_jax.data.lazy import tf

# Greatest denominator of a share: int64 arithmetic is exact at all positions.
_DENOMINATOR = 10**9
_SOFT = 'soft_label'


def describe(dataset) -> str:
  """Describes `config.dataset`, with the shares of a mixture."""
  if isinstance(dataset, str):
    return dataset
  total = sum(weight for _, weight in dataset)
  return ' and '.join(f'{name} ({w / total:.0%})' for name, w in dataset)


class MixtureSource(records.Source):
  """Several data sets to train on together.

  In any prefix of the run, the number of examples of a part is exact to within
  one for up to three parts, and to little more for many.

  `parts` have the same classes, and `pairs` are their names and weights of any sum.
  Only common features are used, and 'soft_label' if any part has it, which is all 0
  in the other parts.
  """

  def __init__(
    self, parts: Sequence[records.Source], pairs: Sequence[tuple[str, float]]
  ):
    common = set.intersection(*(set(part.features) for part in parts)) - {_SOFT}
    features = [name for name in parts[0].features if name in common]
    names = {k: v for k, v in parts[0].names.items() if k in common}
    *self.offsets, size = np.cumsum([0, *(p.num_examples for p in parts)]).tolist()
    super().__init__(size, features, names)
    self._has_soft = any(_SOFT in part.features for part in parts)
    self.parts = tuple(parts)
    self._shares = _shares([weight for _, weight in pairs])
    self._check([name for name, _ in pairs])

  def _check(self, titles):
    """Compares the classes and types of the features of all parts."""
    one = tf.data.Dataset.range(1).batch(1)
    specs = [one.map(p.lookup).unbatch().map(p.read).element_spec for p in self.parts]
    for name in self.features:
      for title, part, spec in zip(titles, self.parts, specs):
        where = f"in '{title}', and in '{titles[0]}'"
        ours, first = part.names.get(name, ()), self.names.get(name, ())
        if ours != first:
          raise ValueError(
            f"the classes of '{name}' are {len(ours)}, {list(ours[:5])}, {where} "
            f'{len(first)}, {list(first[:5])}: the data sets of a mixture must have '
            'the same (config.dataset)'
          )
        kinds = [_describe(s[name]) for s in (spec, specs[0])]
        if kinds[0] != kinds[1]:
          raise ValueError(
            f"'{name}' is {kinds[0]} {where} {kinds[1]}: the data sets of a mixture "
            'must agree (config.dataset)'
          )

  @property
  def evaluated(self) -> records.Source:
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
    """Returns the part at each position of the run, and the position in the part.

    All are int64 [b]; `positions` are an array or a tensor.
    """
    # Each part takes its share of the positions that the parts before it leave.
    taken, rest = [], tf.convert_to_tensor(positions)
    for part, share in self._shares:
      before = _rounded(rest, share)  # Positions of this part before each position.
      taken.append((part, before, _rounded(rest + 1, share) > before))
      rest -= before
    number = local = tf.zeros_like(rest)
    for part, before, mine in reversed(taken):
      number = tf.where(mine, tf.constant(part, tf.int64), number)
      local = tf.where(mine, before, local)
    return number, local

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
  """Returns (part, its share of what the parts before it leave), heaviest first."""
  exact = [fractions.Fraction(weight) for weight in weights]
  shares, left = [], sum(exact)
  # This order keeps rounding errors small.
  for part in sorted(range(len(exact)), key=lambda k: -exact[k]):
    shares.append((part, (exact[part] / left).limit_denominator(_DENOMINATOR)))
    left -= exact[part]
  return shares


def _rounded(count, share):
  """Returns count * share, rounded half up, int64 [b], without overflow."""
  a, b = share.numerator, share.denominator
  whole, inside = count // b, count % b
  return whole * a + (2 * inside * a + b) // (2 * b)


def _describe(spec) -> str:
  """Describes what all parts must have in common."""
  ragged = ', ragged' if getattr(spec, 'ragged_rank', 0) else ''
  return f'{spec.dtype.name} of {spec.shape.rank} axes{ragged}'
