"""Folds of a split: 'train[fold=0/5]' and all others, 'train[fold!=0/5]'.

Each example is in one of the k folds. Folds are stratified: the numbers of examples of a
class in two folds differ by at most one. If the data have a column `group`, such as the
patient, a group is in one fold as a whole, and classes are spread as evenly as that
allows. 'train[fold=0/5,seed=1]' divides the examples anew.

The fold of an example is a pure function of the list of examples and of the seed, and
does not depend on the seed of the run.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple
import warnings

import numpy as np

from vit_jax import console
from vit_jax.configs import schema


class Fold(NamedTuple):
  """A fold of a split, or all others."""

  number: int  # From 0.
  num_folds: int
  seed: int
  is_excluded: bool  # Whether all examples outside of the fold are meant.

  @property
  def complement(self) -> str:
    """The slice with all other examples, '[fold!=0/5]' for '[fold=0/5]'."""
    relation = '=' if self.is_excluded else '!='
    seed = f',seed={self.seed}' if self.seed else ''
    return f'[fold{relation}{self.number}/{self.num_folds}{seed}]'

  def overlaps(self, other: 'Fold') -> bool:
    """Returns whether two folds of a large split have examples in common."""
    if (self.num_folds, self.seed) != (other.num_folds, other.seed):
      return True
    numbers = np.arange(self.num_folds)
    return bool((self.contains(numbers) & other.contains(numbers)).any())

  def contains(self, numbers: np.ndarray) -> np.ndarray:
    """Returns whether examples in folds `numbers` [n] are meant, bool [n]."""
    return (numbers == self.number) != self.is_excluded


def parse(instruction: str) -> Fold | None:
  """Parses '[fold=0/5]'; returns None for a slice such as '[:90%]'."""
  match = schema.FOLD.fullmatch(instruction)
  if match is None and 'fold' in instruction:
    raise ValueError(
      f"'{instruction}' is not a fold: write '[fold=0/5]', '[fold!=0/5]' or, to divide the "
      "examples anew, '[fold=0/5,seed=1]'; a fold cannot be sliced (config.pp, config.evals)"
    )
  if match is None:
    return None
  number, num_folds = int(match['number']), int(match['num_folds'])
  if not 0 <= number < num_folds or num_folds < 2:
    raise ValueError(
      f"'{instruction}' must be one of at least 2 folds, numbered from 0, such as "
      "'[fold=0/5]' to '[fold=4/5]' (config.pp, config.evals)"
    )
  return Fold(number, num_folds, int(match['seed'] or 0), match['relation'] == '!=')


def take(
  items: np.ndarray,
  name: str,
  fold: Fold,
  strata: Sequence[Hashable],
  groups: Sequence[Hashable] | None = None,
) -> np.ndarray:
  """Returns the items [m] of a fold, in their order.

  Args:
    items: numbers of all examples of the split, [n].
    name: names the split in errors.
    fold: the fold.
    strata: class of each item, or its labels, [n].
    groups: group of each item, [n].

  Raises:
    ValueError: if there are fewer examples or groups than folds.
  """
  is_inside = fold.contains(assign(name, fold, strata, groups))
  return np.asarray(items)[is_inside]


def assign(
  name: str,
  fold: Fold,
  strata: Sequence[Hashable],
  groups: Sequence[Hashable] | None = None,
) -> np.ndarray:
  """Returns the number of the fold of each example, int64 [n], see `take`."""
  count = len(strata)
  unit = 'example'
  if groups is not None:
    count = len(set(groups))
    unit = 'group'
  if count < fold.num_folds:
    raise ValueError(
      f"'{name}' has {console.pluralize(count, unit)}, too few for {fold.num_folds} "
      'folds: use fewer folds, or add data (config.pp, config.evals)'
    )
  # Raw numbers of PCG64 are the same in all versions of NumPy.
  ranks = np.random.PCG64(fold.seed).random_raw(len(strata))
  order = np.argsort(ranks, kind='stable')
  numbers = np.empty(len(strata), np.int64)
  strata_codes = _codes(strata)[order]
  if groups is None:
    by_stratum = np.argsort(strata_codes, kind='stable')
    numbers[order[by_stratum]] = np.arange(len(strata)) % fold.num_folds
  else:
    # Groups of equal counts are assigned in the order of their codes.
    group_codes = _codes(_codes(groups)[order].tolist())
    numbers[order] = _assign_groups(strata_codes, group_codes, fold.num_folds)
  return numbers


def _assign_groups(
  strata: np.ndarray, groups: np.ndarray, num_folds: int
) -> np.ndarray:
  """Returns the folds of examples whose groups are kept together, int64 [n]."""
  from sklearn import model_selection  # Late: an extra.

  if np.bincount(strata).max() < num_folds:
    strata = np.zeros_like(strata)  # No class has an example for each fold.
  splitter = model_selection.StratifiedGroupKFold(num_folds)
  numbers = np.empty(len(strata), np.int64)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # A class may have fewer examples than folds.
    for number, (_, rows) in enumerate(splitter.split(strata, strata, groups)):
      numbers[rows] = number
  return numbers


def _codes(values: Sequence[Hashable]) -> np.ndarray:
  """Returns int64 [n]: the same number for equal values, by first occurrence."""
  if isinstance(values, np.ndarray):
    return values.astype(np.int64)
  codes: dict[Hashable, int] = {}
  return np.array([codes.setdefault(value, len(codes)) for value in values], np.int64)
