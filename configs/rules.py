"""Rules of what a value may be, and how it is said.

A rule is a function from a value to what is wrong with it, 'must be a whole number
of at least 1', or None.
"""

from collections.abc import Callable
from collections.abc import Mapping
import difflib
import math
import numbers
import re
from typing import Any

import ml_collections

Rule = Callable[[Any], str | None]

_BOUND = r'(-?\d[\d_]*(\.\d+)?(%|shard)?)?'
_SPLIT = re.compile(rf'(\.|[\w-]+)(\[({_BOUND}:{_BOUND}|-?\d+shard)\])?')
_SHOWN = 200  # Characters of a value in a message.


def is_number(value) -> bool:
  """Tells a finite number."""
  is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  return is_real and math.isfinite(value)


def _range(low, high, below):
  if high is None:
    return f' of at least {low}'
  return f' from {low} to {"below " * below}{high}'


def whole(low: int, high: int | None = None) -> Rule:
  """A whole number from `low` to `high`, both included."""
  words = f'must be a whole number{_range(low, high, False)}'

  def rule(value):
    fits = (
      is_number(value) and isinstance(value, numbers.Integral) and value >= low
    )
    return None if fits and (high is None or value <= high) else words

  return rule


def number(low: float = 0, high: float | None = None, below=False) -> Rule:
  """A finite number from `low` to `high`, which is excluded where `below`."""
  words = f'must be a finite number{_range(low, high, below)}'

  def rule(value):
    fits = is_number(value) and value >= low
    if fits and high is not None:
      fits = value < high if below else value <= high
    return None if fits else words

  return rule


def positive(value) -> str | None:
  """A finite number above 0."""
  fits = is_number(value) and value > 0
  return None if fits else 'must be a finite number above 0'


def share(value) -> str | None:
  """A number above 0 and at most 1."""
  fits = not positive(value) and value <= 1
  return None if fits else 'must be a number above 0 and at most 1'


def finite(value) -> str | None:
  """A finite number of either sign."""
  return None if is_number(value) else 'must be a finite number'


def flag(value) -> str | None:
  """True or False."""
  return None if isinstance(value, bool) else 'must be True or False'


def text(value) -> str | None:
  """A text that is not empty."""
  fits = isinstance(value, str) and value
  return None if fits else 'must be a text that is not empty'


def one_of(*known: str | int) -> Rule:
  """One of some names or numbers."""
  words = f'is unknown: use one of {", ".join(map(repr, known))}'

  def rule(value):
    fits = any(type(value) is type(x) and value == x for x in known)
    return None if fits else words

  return rule


def optional(rule: Rule) -> Rule:
  """What the rule says, or None."""

  def check(value):
    wrong = None if value is None else rule(value)
    return wrong and f'{wrong}, or None'

  return check


def _is_sequence(value, *lengths) -> bool:
  fits = isinstance(value, tuple | list)
  return fits and (not lengths or len(value) in lengths)


def split(value) -> str | None:
  """The name of a split, or a slice, or a sum of such, as TFDS writes them."""
  fits = isinstance(value, str) and all(
    _SPLIT.fullmatch(part.strip()) for part in value.split('+')
  )
  return None if fits else (
    "must be a split as TFDS writes it: 'train', 'train[:90%]', "
    "'train[100:]+test'"
  )  # fmt: skip


def sequence(value) -> str | None:
  """A tuple or a list."""
  return None if _is_sequence(value) else 'must be a tuple'


def size(value) -> str | None:
  """Pixels or patches: a number for both sides, or (height, width)."""
  pair = value if _is_sequence(value, 2) else (value, value)
  fits = not any(map(whole(1), pair))
  return None if fits else 'must be a whole number of at least 1, or two'


def pair_of_sizes(value) -> str | None:
  """(height, width)."""
  fits = _is_sequence(value, 2) and not size(value)
  words = 'must be (height, width), two whole numbers of at least 1'
  return None if fits else words


def shares(high: float | None) -> Rule:
  """(smallest, largest), above 0 and at most `high`."""
  most = '' if high is None else f' and at most {high}'
  words = f'must be (smallest, largest), finite numbers above 0{most}'

  def rule(value):
    if not _is_sequence(value, 2) or any(map(positive, value)):
      return words
    fits = value[0] <= value[1] and (high is None or value[1] <= high)
    return None if fits else words

  return rule


def randaugment(value) -> str | None:
  """(layers, magnitude), or ()."""
  fits = _is_sequence(value, 0) or (
    _is_sequence(value, 2) and not whole(1)(value[0] or 0)
    and not whole(0, 30)(value[1])
  )  # fmt: skip
  return None if fits else (
    'must be (layers, magnitude), whole numbers, at least 1 layer and a magnitude '
    'from 0 to 30; or () for none'
  )  # fmt: skip


def width_factor(value) -> str | None:
  """The width of a ResNet."""
  # The norms take groups of 32 channels, of which the root has 64 times this.
  fits = not positive(value) and value % 0.5 == 0
  return None if fits else 'must be a multiple of 0.5 above 0'


def units(value) -> str | None:
  """Units of each stage of a ResNet."""
  fits = _is_sequence(value) and not any(map(whole(1), value))
  words = 'must be the units of each stage, whole numbers of at least 1'
  return None if fits else words


def names(value) -> str | None:
  """A list of texts, none of them twice."""
  fits = _is_sequence(value) and all(isinstance(x, str) for x in value)
  fits = fits and len(set(value)) == len(value)
  return None if fits else 'must be a list of names, each of them once'


def dataset(value) -> str | None:
  """A data set, or several with weights."""
  parts = value if _is_sequence(value) and value else ((value, 1.0),)
  fits = all(_is_sequence(p, 2) for p in parts) and not any(
    text(name) or positive(weight) for name, weight in parts
  )
  return None if fits else (
    'must be the name of a data set, a folder, or several with weights above 0, '
    "(('cifar10', 0.7), ('/data/photos', 0.3))"
  )  # fmt: skip


def pairs(is_second: Callable[[Any], bool], words: str, single=False) -> Rule:
  """Ordered (regular expression, something) pairs; or one where `single`."""

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
  """Tells a spec of sharding: names of axes, several or None, for each dimension."""
  return _is_sequence(value) and all(
    axis is None
    or isinstance(axis, str)
    or (_is_sequence(axis) and all(isinstance(a, str) for a in axis))
    for axis in value
  )


def group(value) -> str | None:
  """Keys within a key, or None."""
  fits = value is None or isinstance(value, ml_collections.ConfigDict)
  return None if fits else 'must be a group of keys'


def mesh(value) -> str | None:
  """Axes of a mesh and their sizes."""
  fits = isinstance(value, Mapping | ml_collections.ConfigDict) and all(
    size is None or size == -1 or not whole(1)(size) for size in value.values()
  )
  words = 'must be whole numbers of at least 1 by axis, or -1 for the rest'
  return None if fits else words


def check(name: str, value, rule: Rule):
  """Raises ValueError with the key's name, its value, and what is wrong."""
  wrong = rule(value)
  if wrong:
    plain = isinstance(value, ml_collections.ConfigDict)
    shown = repr(value.to_dict() if plain else value)
    shown = shown if len(shown) <= _SHOWN else f'{shown[:_SHOWN]} ...'
    raise ValueError(f'{name}={shown} {wrong} (config.{name})')


def no_nan(value) -> str | None:
  """Anything but NaN: the rule of keys of which nothing is known."""
  is_nan = isinstance(value, float) and math.isnan(value)
  return 'must be a number' if is_nan else None


def raise_unknown(key, known, prefix='', of='config'):
  """Raises ValueError: there is no such key."""
  near = difflib.get_close_matches(key, list(known), n=1)
  hint = (
    f"did you mean '{prefix}{near[0]}'?"
    if near
    else f'known are {", ".join(sorted(known)) or "none"}'
  )
  raise ValueError(f"{of} has no key '{prefix}{key}': {hint}")
