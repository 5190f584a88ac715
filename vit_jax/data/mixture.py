"""Mixtures: several data sets to train on together.

In a mixture, `config.dataset = (('cifar10', 0.7), ('/data/photos', 0.3))`, each
data set has its share of the positions, evenly spread, and its own epochs, each
with its own permutation. Evaluation reads the first data set.
"""

from collections.abc import Sequence
import fractions
from typing import Any

import numpy as np

from vit_jax.data import records
from vit_jax.data.lazy import tf

# Greatest denominator of a share: int64 arithmetic is exact at all positions.
_DENOMINATOR = 10**9
_SOFT = 'soft_label'


def describe(dataset: str | Sequence[tuple[str, float]]) -> str:
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
    self, sources: Sequence[records.Source], pairs: Sequence[tuple[str, float]]
  ) -> None:
    common = set(sources[0].features) - {_SOFT}
    for source in sources[1:]:
      common &= set(source.features)
    features = [name for name in sources[0].features if name in common]
    names = {k: v for k, v in sources[0].names.items() if k in common}
    counts = [source.num_examples for source in sources]
    ends = np.cumsum(counts)
    self.offsets = (ends - counts).tolist()  # Number of each part's first example.
    super().__init__(int(ends[-1]), features, names)
    self._has_soft = any(_SOFT in source.features for source in sources)
    self.parts = tuple(sources)
    self._shares = _shares([weight for _, weight in pairs])
    self._check([name for name, _ in pairs])

  def _check(self, titles: Sequence[str]) -> None:
    """Compares the classes and types of the features of all parts."""
    specs = [_element_spec(part) for part in self.parts]
    for name in self.features:
      for title, part, spec in zip(titles, self.parts, specs):
        where = f"in '{title}', and in '{titles[0]}'"
        part_names = part.names.get(name, ())
        first_names = self.names.get(name, ())
        if part_names != first_names:
          raise ValueError(
            f"the classes of '{name}' are {len(part_names)}, {list(part_names[:5])}, "
            f'{where} {len(first_names)}, {list(first_names[:5])}: the data sets of a '
            'mixture must have the same (config.dataset)'
          )
        kind = _describe(spec[name])
        first_kind = _describe(specs[0][name])
        if kind != first_kind:
          raise ValueError(
            f"'{name}' is {kind} {where} {first_kind}: the data sets of a mixture "
            'must agree (config.dataset)'
          )

  @property
  def evaluated(self) -> records.Source:
    return self.parts[0]

  def fingerprint(self) -> dict:
    fingerprints = [part.fingerprint() for part in self.parts]
    return {**super().fingerprint(), 'parts': fingerprints}

  def lengths(self, feature: str) -> np.ndarray | None:
    lengths = [part.lengths(feature) for part in self.parts]
    if any(x is None for x in lengths):
      return None
    return np.concatenate(lengths)

  def labels(self) -> np.ndarray | None:
    labels = [part.labels() for part in self.parts]
    if any(x is None for x in labels):
      return None
    return records.stack_labels(labels)

  def name(self, index: int) -> str:
    part, number = self.locate(index)
    return part.name(number)

  def store(self, workdir: str | None) -> None:
    for part in self.parts:
      part.store(workdir)

  def place(self, positions: 'tf.Tensor') -> tuple['tf.Tensor', 'tf.Tensor']:
    """Returns the part at each position of the run, and the position in the part.

    All are int64 [b]; `positions` are an array or a tensor.
    """
    # Each part takes its share of the positions that the parts before it leave.
    placements = []
    remaining = tf.convert_to_tensor(positions)
    for part, share in self._shares:
      # Positions of this part before each position.
      before = _rounded(remaining, share)
      placements.append((part, before, _rounded(remaining + 1, share) > before))
      remaining -= before
    number = local = tf.zeros_like(remaining)
    for part, before, is_part in reversed(placements):
      number = tf.where(is_part, tf.constant(part, tf.int64), number)
      local = tf.where(is_part, before, local)
    return number, local

  def select(self, record: records.Record) -> dict:
    """Returns the features of the mixture in a record that a part has read."""
    features = {name: record[name] for name in self.features}
    if self._has_soft:
      features[_SOFT] = record.get(_SOFT, tf.zeros([len(self.class_names)]))
    return features

  def locate(self, index: int) -> tuple[records.Source, int]:
    """Returns the part that holds an example, and its number there."""
    part = np.searchsorted(self.offsets, index, side='right') - 1
    return self.parts[part], index - self.offsets[part]


def _element_spec(source: records.Source) -> dict[str, Any]:
  """Returns the TypeSpecs of a record's features."""
  data = tf.data.Dataset.range(1).batch(1)
  return data.map(source.lookup).unbatch().map(source.read).element_spec


def _shares(weights: Sequence[float]) -> list[tuple[int, fractions.Fraction]]:
  """Returns (part, its share of what the parts before it leave), heaviest first."""
  exact = [fractions.Fraction(weight) for weight in weights]
  shares = []
  remaining = sum(exact)
  # This order keeps rounding errors small.
  for part in sorted(range(len(exact)), key=lambda k: -exact[k]):
    share = exact[part] / remaining
    shares.append((part, share.limit_denominator(_DENOMINATOR)))
    remaining -= exact[part]
  return shares


def _rounded(count: 'tf.Tensor', share: fractions.Fraction) -> 'tf.Tensor':
  """Returns count * share, rounded half up, int64 [b], without overflow."""
  a, b = share.numerator, share.denominator
  quotient, remainder = count // b, count % b
  return quotient * a + (2 * remainder * a + b) // (2 * b)


def _describe(spec: Any) -> str:
  """Describes what all parts must have in common."""
  ragged = ', ragged' if getattr(spec, 'ragged_rank', 0) else ''
  return f'{spec.dtype.name} of {spec.shape.rank} axes{ragged}'
