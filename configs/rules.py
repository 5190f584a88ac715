"""Rules for the values of config keys.

A rule is a function from a value to a description of what is wrong with it, for
example 'must be a whole number of at least 1', or to None if the value is
valid.
"""

import collections
from collections.abc import Callable
from collections.abc import Mapping
import difflib
import math
import numbers
import re
from typing import Any

import ml_collections

Rule = Callable[[Any], str | None]

# Name of a number that no class has, as in the 91 ids of COCO.
NO_CLASS = 'N/A'

_BOUND = r'(-?\d[\d_]*(\.\d+)?(%|shard)?)?'
_SPLIT = re.compile(rf'(\.|[\w-]+)(\[({_BOUND}:{_BOUND}|-?\d+shard)\])?')
_SHOWN = 200  # Characters of a value in a message.


def is_number(value) -> bool:
  """Returns whether a value is a number within the range of floats."""
  is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  try:
    return is_real and math.isfinite(value)
  except OverflowError:  # An int may be larger than any float.
    return False


def _is_sequence(value, *lengths) -> bool:
  fits = isinstance(value, tuple | list)
  return fits and (not lengths or len(value) in lengths)


def _is_mapping(value) -> bool:
  return isinstance(value, Mapping | ml_collections.ConfigDict)


def _rule(fits: Callable[[Any], bool], words: str) -> Rule:
  """Returns a rule: values that fit; `words` describe them."""
  return lambda value: None if fits(value) else words


# --- Single values ---


def _range(low, high, below=False):
  if high is None:
    return f' of at least {low}'
  return f' from {low} to {"below " * below}{high}'


def whole(low: int, high: int | None = None) -> Rule:
  """Returns a rule: a whole number from `low` to `high`, both included."""
  return _rule(
    lambda x: (
      is_number(x)
      and isinstance(x, numbers.Integral)
      and low <= x
      and (high is None or x <= high)
    ),
    f'must be a whole number{_range(low, high)}',
  )


def number(low: float = 0, high: float | None = None, below=False) -> Rule:
  """Returns a rule: a finite number from `low` to (`below`: under) `high`."""
  return _rule(
    lambda x: (
      is_number(x)
      and low <= x
      and (high is None or x < high or (x == high and not below))
    ),
    f'must be a finite number{_range(low, high, below)}',
  )


positive = _rule(
  lambda x: is_number(x) and x > 0, 'must be a finite number above 0'
)
share = _rule(
  lambda x: is_number(x) and 0 < x <= 1,
  'must be a number above 0 and at most 1',
)
finite = _rule(is_number, 'must be a finite number')
flag = _rule(lambda x: isinstance(x, bool), 'must be True or False')
text = _rule(
  lambda x: isinstance(x, str) and x != '', 'must be a text that is not empty'
)
# The rule of keys without a rule.
no_nan = _rule(
  lambda x: not (isinstance(x, float) and math.isnan(x)), 'must be a number'
)
# Slices and sums in the notation of TFDS.
split = _rule(
  lambda x: (
    isinstance(x, str)
    and all(_SPLIT.fullmatch(part.strip()) for part in x.split('+'))
  ),
  "must be a split in the notation of TFDS: 'train', 'train[:90%]', "
  "'train[100:]+test'",
)
# Of a ResNet: GroupNorm has groups of 32 channels, and the root 64 times the
# factor.
width_factor = _rule(
  lambda x: not positive(x) and x % 0.5 == 0,
  'must be a multiple of 0.5 above 0',
)


def one_of(*known: str | int) -> Rule:
  """Returns a rule: one of some names or numbers."""
  return _rule(
    lambda value: any(type(value) is type(x) and value == x for x in known),
    f'is unknown: use one of {", ".join(map(repr, known))}',
  )


def optional(rule: Rule) -> Rule:
  """Returns a rule: None, or a value that another rule accepts."""

  def check(value):
    wrong = None if value is None else rule(value)
    return wrong and f'{wrong}, or None'

  return check


# --- Several values ---

sequence = _rule(_is_sequence, 'must be a tuple')
# A number of pixels or patches, or (height, width).
size = _rule(
  lambda x: not any(map(whole(1), x if _is_sequence(x, 2) else (x,))),
  'must be a whole number of at least 1, or two',
)
range_of_sizes = _rule(
  lambda x: _is_sequence(x, 2) and not size(x) and x[0] <= x[1],
  'must be (smallest, largest), two whole numbers of at least 1',
)
pair_of_sizes = _rule(
  lambda x: _is_sequence(x, 2) and not size(x),
  'must be (height, width), two whole numbers of at least 1',
)
# Increasing shares of a run.
moments = _rule(
  lambda x: (
    _is_sequence(x)
    and all(is_number(share) and 0 < share < 1 for share in x)
    and list(x) == sorted(set(x))
  ),
  'must be increasing shares of the run, between 0 and 1',
)
randaugment = _rule(
  lambda x: (
    _is_sequence(x, 0)
    or (_is_sequence(x, 2) and not whole(1)(x[0]) and not whole(0, 30)(x[1]))
  ),
  'must be (layers, magnitude), whole numbers, at least 1 layer and a magnitude '
  'from 0 to 30; or () for none',
)
# Of the stages of a ResNet.
units = _rule(
  lambda x: _is_sequence(x) and not any(map(whole(1), x)),
  'must be the units of each stage, whole numbers of at least 1',
)
seeds = _rule(
  lambda x: not wholes(0)(x) and len(x) > 0,
  'must be one or more whole numbers, each of them once',
)
# NO_CLASS may be there repeatedly.
names = _rule(
  lambda x: (
    _is_sequence(x)
    and all(isinstance(name, str) for name in x)
    and all(n == 1 or k == NO_CLASS for k, n in collections.Counter(x).items())
  ),
  'must be a list of names, each of them once',
)


def several(rule: Rule) -> Rule:
  """Returns a rule: a tuple of one or more values that another rule accepts."""

  def check(value):
    if not _is_sequence(value) or not value:
      return 'must be a tuple of one value or more, as in (0, 1)'
    wrong = next(filter(None, map(rule, value)), None)
    return wrong and f'must be a tuple, each value of which {wrong}'

  return check


def shares(high: float | None) -> Rule:
  """Returns a rule: (smallest, largest), above 0 and at most `high`."""
  most = '' if high is None else f' and at most {high}'
  return _rule(
    lambda x: (
      _is_sequence(x, 2)
      and not any(map(positive, x))
      and x[0] <= x[1]
      and (high is None or x[1] <= high)
    ),
    f'must be (smallest, largest), finite numbers above 0{most}',
  )


def wholes(low: int) -> Rule:
  """Returns a rule: different whole numbers of at least `low`."""
  return _rule(
    lambda x: (
      _is_sequence(x) and not any(map(whole(low), x)) and len(set(x)) == len(x)
    ),
    f'must be a tuple of different whole numbers of at least {low}',
  )


# --- Keys with a form of their own ---

# A path of weights, or several by the first name of parameters.
weights = _rule(
  lambda x: (
    not text(x)
    or (
      _is_mapping(x)
      and len(x) > 0
      and not any(map(text, [*x.keys(), *x.values()]))
    )
  ),
  'must be a path, or a table of paths by the first name of parameters, such as '
  "{'backbone': 'ViT-B_16.npz'}",
)
dataset = _rule(
  lambda x: all(
    _is_sequence(pair, 2) and not text(pair[0]) and not positive(pair[1])
    for pair in (x if _is_sequence(x) and x else ((x, 1.0),))
  ),
  'must be the name of a data set, a folder, or several with weights above 0 as '
  "in (('cifar10', 0.7), ('/data/photos', 0.3))",
)
group = _rule(
  lambda x: x is None or isinstance(x, ml_collections.ConfigDict),
  'must be a group of keys',
)
mesh = _rule(
  lambda x: (
    _is_mapping(x)
    and all(n is None or n == -1 or not whole(1)(n) for n in x.values())
  ),
  'must be whole numbers of at least 1 by axis, or -1 for the rest',
)


def pairs(is_second: Callable[[Any], bool], words: str, single=False) -> Rule:
  """Returns a rule: ordered (regular expression, value) pairs.

  Args:
    is_second: whether a second element is valid.
    words: description of valid values.
    single: whether one pair without the outer tuple is valid too.
  """

  def rule(value):
    if not _is_sequence(value):
      return words
    alone = single and len(value) == 2 and isinstance(value[0], str)
    for pair in (value,) if alone else value:
      if not _is_sequence(pair, 2) or not isinstance(pair[0], str):
        return words
      try:
        re.compile(pair[0])
      except re.error as e:
        return f'holds {pair[0]!r}, which is no regular expression: {e}'
      if not is_second(pair[1]):
        return f'holds {pair!r}: {words}'
    return None

  return rule


def is_spec(value) -> bool:
  """Returns whether a value is a sharding spec: mesh axes per dimension."""
  return _is_sequence(value) and all(
    axis is None
    or isinstance(axis, str)
    or (_is_sequence(axis) and all(isinstance(a, str) for a in axis))
    for axis in value
  )


def check(name: str, value, rule: Rule, place: str = 'config.'):
  """Raises ValueError with the key, its value and the rule that it breaks.

  `place` is '--' for an argument that a flag of a command sets.
  """
  wrong = rule(value)
  if wrong:
    plain = isinstance(value, ml_collections.ConfigDict)
    shown = repr(value.to_dict() if plain else value)
    shown = shown if len(shown) <= _SHOWN else f'{shown[:_SHOWN]} ...'
    raise ValueError(f'{name}={shown} {wrong} ({place}{name})')


def raise_unknown(key, known, prefix='', of='config', where=None):
  """Raises ValueError for an unknown key, with the nearest known one.

  Keys may be dotted. `where` says where all keys are, in place of their names.
  """
  last = key.rpartition('.')[2]
  by_last = {other.rpartition('.')[2]: other for other in reversed([*known])}
  close = difflib.get_close_matches(last, by_last, n=1)
  near = [
    *(other for other in known if other.endswith(f'.{key}')),
    *difflib.get_close_matches(key, known, n=1),
    *(by_last[other] for other in close),
    # Keys that contain it, such as base_lr for lr.
    *(other for other in known if len(last) > 1 and last in other),
  ]
  hint = where or f'known keys are {", ".join(sorted(known)) or "none"}'
  if near:
    hint = f"did you mean '{prefix}{near[0]}'?"
  raise ValueError(f"{of} has no key '{prefix}{key}': {hint}")
