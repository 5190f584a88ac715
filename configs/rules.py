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


def _range(low, high, below):
  if high is None:
    return f' of at least {low}'
  return f' from {low} to {"below " * below}{high}'


def whole(low: int, high: int | None = None) -> Rule:
  """Returns a rule: a whole number from `low` to `high`, both included."""
  words = f'must be a whole number{_range(low, high, False)}'

  def rule(value):
    fits = (
      is_number(value) and isinstance(value, numbers.Integral) and value >= low
    )
    return None if fits and (high is None or value <= high) else words

  return rule


def number(low: float = 0, high: float | None = None, below=False) -> Rule:
  """Returns a rule: a finite number from `low` to (`below`: under) `high`."""
  words = f'must be a finite number{_range(low, high, below)}'

  def rule(value):
    fits = is_number(value) and value >= low
    if fits and high is not None:
      fits = value < high if below else value <= high
    return None if fits else words

  return rule


def positive(value) -> str | None:
  """Checks for a finite number above 0."""
  fits = is_number(value) and value > 0
  return None if fits else 'must be a finite number above 0'


def share(value) -> str | None:
  """Checks for a number above 0 and at most 1."""
  fits = not positive(value) and value <= 1
  return None if fits else 'must be a number above 0 and at most 1'


def finite(value) -> str | None:
  """Checks for a finite number of either sign."""
  return None if is_number(value) else 'must be a finite number'


def flag(value) -> str | None:
  """Checks for True or False."""
  return None if isinstance(value, bool) else 'must be True or False'


def text(value) -> str | None:
  """Checks for a text that is not empty."""
  fits = isinstance(value, str) and value
  return None if fits else 'must be a text that is not empty'


def weights(value) -> str | None:
  """Checks for a path of weights, or for a table of such paths by prefix."""
  table = (
    value if isinstance(value, Mapping | ml_collections.ConfigDict) else {}
  )
  fits = table and not any(map(text, [*table.keys(), *table.values()]))
  return (
    None
    if fits
    else text(value)
    and (
      'must be a path, or a table of paths by the first name of parameters, such '
      "as {'backbone': 'ViT-B_16.npz'}"
    )
  )


def one_of(*known: str | int) -> Rule:
  """Returns a rule: one of some names or numbers."""
  words = f'is unknown: use one of {", ".join(map(repr, known))}'

  def rule(value):
    fits = any(type(value) is type(x) and value == x for x in known)
    return None if fits else words

  return rule


def optional(rule: Rule) -> Rule:
  """Returns a rule: None, or a value that another rule accepts."""

  def check(value):
    wrong = None if value is None else rule(value)
    return wrong and f'{wrong}, or None'

  return check


def _is_sequence(value, *lengths) -> bool:
  fits = isinstance(value, tuple | list)
  return fits and (not lengths or len(value) in lengths)


def split(value) -> str | None:
  """Checks for a split, a slice or a sum of them in the notation of TFDS."""
  fits = isinstance(value, str) and all(
    _SPLIT.fullmatch(part.strip()) for part in value.split('+')
  )
  return None if fits else (
    "must be a split in the notation of TFDS: 'train', 'train[:90%]', "
    "'train[100:]+test'"
  )  # fmt: skip


def sequence(value) -> str | None:
  """Checks for a tuple or a list."""
  return None if _is_sequence(value) else 'must be a tuple'


def several(rule: Rule) -> Rule:
  """Returns a rule: a tuple of one or more values that another rule accepts."""

  def check(value):
    if not _is_sequence(value) or not value:
      return 'must be a tuple of one value or more, as in (0, 1)'
    wrong = next(filter(None, map(rule, value)), None)
    return wrong and f'must be a tuple, each value of which {wrong}'

  return check


def size(value) -> str | None:
  """Checks for a number of pixels or patches, or (height, width)."""
  pair = value if _is_sequence(value, 2) else (value, value)
  fits = not any(map(whole(1), pair))
  return None if fits else 'must be a whole number of at least 1, or two'


def range_of_sizes(value) -> str | None:
  """Checks for (smallest, largest) in pixels."""
  fits = _is_sequence(value, 2) and not size(value) and value[0] <= value[1]
  words = 'must be (smallest, largest), two whole numbers of at least 1'
  return None if fits else words


def pair_of_sizes(value) -> str | None:
  """Checks for (height, width)."""
  fits = _is_sequence(value, 2) and not size(value)
  words = 'must be (height, width), two whole numbers of at least 1'
  return None if fits else words


def shares(high: float | None) -> Rule:
  """Returns a rule: (smallest, largest), above 0 and at most `high`."""
  most = '' if high is None else f' and at most {high}'
  words = f'must be (smallest, largest), finite numbers above 0{most}'

  def rule(value):
    if not _is_sequence(value, 2) or any(map(positive, value)):
      return words
    fits = value[0] <= value[1] and (high is None or value[1] <= high)
    return None if fits else words

  return rule


def moments(value) -> str | None:
  """Checks for increasing shares of a run, between 0 and 1."""
  fits = _is_sequence(value) and all(is_number(x) and 0 < x < 1 for x in value)
  fits = fits and list(value) == sorted(set(value))
  words = 'must be increasing shares of the run, between 0 and 1'
  return None if fits else words


def randaugment(value) -> str | None:
  """Checks for (layers, magnitude), or ()."""
  fits = _is_sequence(value, 0) or (
    _is_sequence(value, 2) and not whole(1)(value[0] or 0)
    and not whole(0, 30)(value[1])
  )  # fmt: skip
  return None if fits else (
    'must be (layers, magnitude), whole numbers, at least 1 layer and a magnitude '
    'from 0 to 30; or () for none'
  )  # fmt: skip


def width_factor(value) -> str | None:
  """Checks for the width factor of a ResNet."""
  # GroupNorm has groups of 32 channels, and the root 64 times the factor.
  fits = not positive(value) and value % 0.5 == 0
  return None if fits else 'must be a multiple of 0.5 above 0'


def units(value) -> str | None:
  """Checks for the numbers of units in the stages of a ResNet."""
  fits = _is_sequence(value) and not any(map(whole(1), value))
  words = 'must be the units of each stage, whole numbers of at least 1'
  return None if fits else words


def seeds(value) -> str | None:
  """Checks for one or more different whole numbers."""
  words = 'must be one or more whole numbers, each of them once'
  return words if wholes(0)(value) or not value else None


def wholes(low: int) -> Rule:
  """Returns a rule: different whole numbers of at least `low`."""
  words = f'must be a tuple of different whole numbers of at least {low}'

  def rule(value):
    fits = _is_sequence(value) and not any(map(whole(low), value))
    return None if fits and len(set(value)) == len(value) else words

  return rule


def names(value) -> str | None:
  """Checks for a list of different texts; NO_CLASS may be there repeatedly."""
  fits = _is_sequence(value) and all(isinstance(x, str) for x in value)
  fits = fits and all(
    count == 1 or name == NO_CLASS
    for name, count in collections.Counter(value).items()
  )
  return None if fits else 'must be a list of names, each of them once'


def dataset(value) -> str | None:
  """Checks for a data set, or several with weights."""
  parts = value if _is_sequence(value) and value else ((value, 1.0),)
  fits = all(_is_sequence(p, 2) for p in parts) and not any(
    text(name) or positive(weight) for name, weight in parts
  )
  return None if fits else (
    'must be the name of a data set, a folder, or several with weights above '
    "0 as in (('cifar10', 0.7), ('/data/photos', 0.3))"
  )  # fmt: skip


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


def group(value) -> str | None:
  """Checks for a group of keys, or None."""
  fits = value is None or isinstance(value, ml_collections.ConfigDict)
  return None if fits else 'must be a group of keys'


def mesh(value) -> str | None:
  """Checks for the axes of a mesh and their sizes."""
  fits = isinstance(value, Mapping | ml_collections.ConfigDict) and all(
    size is None or size == -1 or not whole(1)(size) for size in value.values()
  )
  words = 'must be whole numbers of at least 1 by axis, or -1 for the rest'
  return None if fits else words


def check(name: str, value, rule: Rule):
  """Raises ValueError with the key, its value and the rule that it breaks."""
  wrong = rule(value)
  if wrong:
    plain = isinstance(value, ml_collections.ConfigDict)
    shown = repr(value.to_dict() if plain else value)
    shown = shown if len(shown) <= _SHOWN else f'{shown[:_SHOWN]} ...'
    raise ValueError(f'{name}={shown} {wrong} (config.{name})')


def no_nan(value) -> str | None:
  """Checks for anything but NaN: the rule of keys without a rule."""
  is_nan = isinstance(value, float) and math.isnan(value)
  return 'must be a number' if is_nan else None


def raise_unknown(key, known, prefix='', of='config'):
  """Raises ValueError for an unknown key, with the nearest known one."""
  # Without a close match: keys that contain it, such as base_lr for lr.
  near = difflib.get_close_matches(key, list(known), n=1) or [
    other for other in known if key in other
  ]
  hint = (
    f"did you mean '{prefix}{near[0]}'?"
    if near
    else f'known keys are {", ".join(sorted(known)) or "none"}'
  )
  raise ValueError(f"{of} has no key '{prefix}{key}': {hint}")
