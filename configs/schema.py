"""Types of config keys: what a value may be, and the words for it in errors.

A type is a Python type hint: `int`, `float | None`, `Literal['adam', 'sgd']`,
`tuple[int, ...]`, or one of these with conditions, `Annotated[int, Range(ge=1)]`.
A group of keys is a dataclass with a type and a default for each key; a key without
a default may be absent. A mark on the type, `Annotated[int, FREE]`, says what may
change when a run resumes.
"""

import ast
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import difflib
import enum
import functools
import math
import numbers
import re
import types
import typing
from typing import Annotated, Any, Literal, NoReturn

import ml_collections

from vit_jax.configs import synonyms

# Name of a number that no class has, as in the 91 ids of COCO.
NO_CLASS = 'N/A'
_SHOWN = 200  # Characters of a value in a message.


@dataclasses.dataclass(frozen=True)
class Range:
  """Bounds of a number: at least, above, at most, below."""

  ge: float | None = None
  gt: float | None = None
  le: float | None = None
  lt: float | None = None

  def holds(self, value: Any) -> bool:
    """Returns whether a number is within the bounds; NaN is not."""
    if self.ge is not None and not value >= self.ge:
      return False
    if self.gt is not None and not value > self.gt:
      return False
    if self.le is not None and not value <= self.le:
      return False
    return self.lt is None or value < self.lt

  def __str__(self) -> str:
    bounds = {
      'of at least': self.ge,
      'above': self.gt,
      'at most': self.le,
      'below': self.lt,
    }
    return ' and '.join(f'{k} {v}' for k, v in bounds.items() if v is not None)


@dataclasses.dataclass(frozen=True)
class Fits:
  """A condition, and words for the values that meet it and have the type."""

  words: str
  holds: Callable[[Any], bool] = lambda value: True


class Mark(enum.Enum):
  """What may change after a run has started; a key without a mark is fixed.

  A key has at most one mark besides SWEPT. docs/config.md explains and lists them.
  """

  FREE = 'free'  # Changes where, how or in which order a run computes, not what.
  MEASURED = 'measured'  # Changes only what is measured.
  MOVABLE = 'movable'  # May be another path of the same data.
  LENGTH = 'length'  # A length in steps or epochs: the number of steps is fixed.
  SWEPT = 'swept'  # Set by sweeps for each of their runs.


FREE, MEASURED, MOVABLE, LENGTH, SWEPT = Mark


def accepts(value: Any, kind: Any) -> bool:
  """Returns whether a value has a type."""
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin is Annotated:
    return accepts(value, args[0]) and all(x.holds(value) for x in kind.__metadata__)
  if origin in (typing.Union, types.UnionType):
    return any(accepts(value, arg) for arg in args)
  if origin is Literal:
    return any(type(value) is type(arg) and value == arg for arg in args)
  if origin is tuple:
    if not isinstance(value, tuple | list):
      return False
    if args[-1] is ...:
      args = len(value) * args[:1]
    return len(value) == len(args) and all(map(accepts, value, args))
  if origin is dict:
    if not is_mapping(value):
      return False
    key_type, value_type = args
    for key, item in value.items():
      if not (accepts(key, key_type) and accepts(item, value_type)):
        return False
    return True
  if dataclasses.is_dataclass(kind):
    return isinstance(value, ml_collections.ConfigDict)
  if kind is Any:
    return not (isinstance(value, float) and math.isnan(value))
  if kind is dict:
    return is_mapping(value)
  if kind is tuple:
    return isinstance(value, tuple | list)
  if kind in (int, float):
    return is_number(value) and (kind is float or isinstance(value, numbers.Integral))
  return isinstance(value, kind)


def describe(kind: Any) -> str:
  """Describes the values of a type: 'an integer of at least 1'."""
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin is Annotated:
    descriptions = [x.words for x in kind.__metadata__ if isinstance(x, Fits)]
    if descriptions:
      return descriptions[-1]
    return ' '.join(map(str, [describe(args[0]), *kind.__metadata__]))
  if origin in (typing.Union, types.UnionType):
    return ' or '.join(map(describe, args))
  if origin is Literal:
    return f'one of {", ".join(map(repr, args))}'
  if origin is dict:
    return f'a dict of {describe(args[0])} to {describe(args[1])}'
  if origin is tuple:
    if args[-1] is ...:
      return f'a tuple of ({describe(args[0])}, ...)'
    return f'a tuple of ({", ".join(map(describe, args))})'
  if dataclasses.is_dataclass(kind):
    return 'a group of keys'
  return _WORDS[kind]


_LARGEST = (2 - 2**-23) * 2.0**127  # In float32.
_WORDS = {
  int: 'an integer',
  float: 'a finite float32 number',
  bool: 'True or False',
  str: 'a string',
  types.NoneType: 'None',
  Any: 'a number, not nan',
  tuple: 'a tuple',
  dict: 'a group of keys',
  ml_collections.ConfigDict: 'a group of keys',
}


def is_kind(annotation: Any) -> bool:
  """Returns whether an annotation is a type that `check` knows."""
  try:
    describe(annotation)
  except KeyError:
    return False
  return True


def check(name: str, value: Any, kind: Any, place: str = 'config.') -> None:
  """Raises ValueError with the key and its value if a value does not have a type.

  `place` is '--' for an argument that a flag of a command sets.
  """
  if not accepts(value, kind):
    plain = isinstance(value, ml_collections.ConfigDict)
    text = repr(value.to_dict() if plain else value)
    text = text if len(text) <= _SHOWN else f'{text[:_SHOWN]} ...'
    raise ValueError(f'{name}={text} must be {describe(kind)} ({place}{name})')


def is_number(value: Any) -> bool:
  """Returns whether a value is a number, finite in float32, and not a bool."""
  is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
  return is_real and abs(value) <= _LARGEST


def is_mapping(value: Any) -> bool:
  """Returns whether a value is a dict, a ConfigDict or another mapping."""
  return isinstance(value, Mapping | ml_collections.ConfigDict)


# --- Several checks ---


class Errors(ValueError):
  """Several independent errors, one per line of the message."""

  def __init__(self, errors: Sequence[Exception]) -> None:
    self.errors = errors
    super().__init__('\n  '.join([f'{len(errors)} errors:', *map(str, errors)]))


def run_checks(checks: Iterable[Callable[[], None]]) -> None:
  """Runs independent checks, and raises the ValueErrors and OSErrors of all of them.

  One error is raised as it is, several as `Errors`.
  """
  errors: list[Exception] = []
  for check_one in checks:
    try:
      check_one()
    except Errors as e:
      errors += e.errors
    except (ValueError, OSError) as e:
      errors.append(e)
  if len(errors) == 1:
    raise errors[0]
  if errors:
    raise Errors(errors)


# --- Groups of keys ---


@functools.cache
def fields(group: type) -> dict[str, Any]:
  """Returns the types of the keys of a dataclass, with groups inside, by key."""
  return {key: _without_marks(kind) for key, kind in _hints(group).items()}


def marks(group: type, prefix: str = '') -> dict[str, frozenset[Mark]]:
  """Returns the marks of the keys of a dataclass, by dotted key.

  Keys of groups inside follow their group, and have its marks, too.
  """
  marks_by_key = {}
  for key, kind in _hints(group).items():
    name = f'{prefix}{key}'
    marks_by_key[name] = _marks_of(kind)
    inside = group_of(kind)
    if inside:
      for inner_name, inner_marks in marks(inside, f'{name}.').items():
        marks_by_key[inner_name] = inner_marks | marks_by_key[name]
  return marks_by_key


def _hints(group: type) -> dict[str, Any]:
  return typing.get_type_hints(group, include_extras=True)


def _marks_of(kind: Any) -> frozenset[Mark]:
  metadata = getattr(kind, '__metadata__', ())
  return frozenset(x for x in metadata if isinstance(x, Mark))


def _without_marks(kind: Any) -> Any:
  if not _marks_of(kind):
    return kind
  conditions = [x for x in kind.__metadata__ if not isinstance(x, Mark)]
  return Annotated[kind.__origin__, *conditions] if conditions else kind.__origin__


def flat(group: type, prefix: str = '') -> dict[str, Any]:
  """Returns the types of all keys of a dataclass by dotted key."""
  kinds: dict[str, Any] = {}
  for key, kind in fields(group).items():
    inside = group_of(kind)
    kinds |= flat(inside, f'{prefix}{key}.') if inside else {f'{prefix}{key}': kind}
  return kinds


def group_of(kind: Any) -> type | None:
  """Returns the dataclass of a type such as `Group` or `Group | None`."""
  for alternative in typing.get_args(kind) or (kind,):
    if isinstance(alternative, type) and dataclasses.is_dataclass(alternative):
      return alternative
  return None


def defaults(group: type) -> Iterator[tuple[str, Any]]:
  """Yields the keys of a dataclass that have a default, and the default."""
  for field in dataclasses.fields(group):
    if field.default is not dataclasses.MISSING:
      yield field.name, field.default
    elif field.default_factory is not dataclasses.MISSING:
      yield field.name, field.default_factory()


def make(group: type) -> ml_collections.ConfigDict:
  """Returns a config with the defaults of a dataclass.

  A key whose type has alternatives, such as `int | None`, can be assigned a value of
  any type; other keys keep the type of their default.
  """
  config = ml_collections.ConfigDict()
  kinds = fields(group)
  for key, value in defaults(group):
    if dataclasses.is_dataclass(value):
      config[key] = make(type(value))
    elif isinstance(value, dict):
      config[key] = ml_collections.ConfigDict(value)
    elif group_of(kinds[key]) or kinds[key] is ml_collections.ConfigDict | None:
      config[key] = ml_collections.config_dict.placeholder(ml_collections.ConfigDict)
    elif type(value) in (bool, int, float, str, tuple) and not _is_union(kinds[key]):
      config[key] = value
    else:
      config[key] = ml_collections.FieldReference(value, field_type=object)
  return config


def _is_union(kind: Any) -> bool:
  if typing.get_origin(kind) is Annotated:
    kind = typing.get_args(kind)[0]
  return typing.get_origin(kind) in (typing.Union, types.UnionType)


def fill(config: ml_collections.ConfigDict, group: type) -> None:
  """Adds the keys that a config lacks, in place, with the defaults of a dataclass."""
  with config.unlocked():
    for key, value in make(group).items():
      if key not in config:
        config[key] = value
    for key, kind in fields(group).items():
      inside = group_of(kind)
      if inside and isinstance(config.get(key), ml_collections.ConfigDict):
        fill(config[key], inside)


def check_group(
  config: ml_collections.ConfigDict,
  group: type | None,
  prefix: str = '',
  closed: bool = True,
) -> None:
  """Checks all keys of a config, and of the groups inside.

  Raises ValueError for values of a wrong type and, if the group is `closed`, for
  unknown keys. Without a group only nan is rejected.
  """
  kinds = fields(group) if group else {}

  def check_key(key: str, value: Any) -> None:
    if closed and key not in kinds:
      raise_unknown(key, kinds, prefix)
    kind = kinds.get(key, Any)
    check(prefix + key, value, kind)
    if isinstance(value, ml_collections.ConfigDict) and (kind is Any or group_of(kind)):
      is_closed = closed and kind is not Any
      check_group(value, group_of(kind), f'{prefix}{key}.', is_closed)

  run_checks(functools.partial(check_key, *item) for item in config.items())


def rules(
  config: ml_collections.ConfigDict, group: type
) -> Iterator[Callable[[], None]]:
  """Yields the checks of keys against each other, for `run_checks`.

  They are the functions in RULES, an attribute of a dataclass, and of the groups inside;
  each takes the config of its group, and raises ValueError.
  """
  for rule in getattr(group, 'RULES', ()):
    yield functools.partial(rule, config)
  for key, kind in fields(group).items():
    inside = group_of(kind)
    if inside and isinstance(config.get(key), ml_collections.ConfigDict):
      yield from rules(config[key], inside)


def raise_unknown(
  key: str,
  known_keys: Iterable[str],
  prefix: str = '',
  of: str = 'config',
  where: str | None = None,
) -> NoReturn:
  """Raises ValueError for an unknown key, with the nearest known one.

  Keys may be dotted. `where` says where keys are listed, and replaces their names.
  """
  last = key.rpartition('.')[2]
  by_last = {name.rpartition('.')[2]: name for name in reversed([*known_keys])}
  near = [name for name in known_keys if name.endswith(f'.{key}')]
  near += difflib.get_close_matches(key, known_keys, n=1)
  near += [by_last[name] for name in difflib.get_close_matches(last, by_last, n=1)]
  if len(last) > 1:  # Keys that contain it, such as base_lr for lr.
    near += [name for name in known_keys if last in name]
  known_text = ', '.join(sorted(known_keys)) or 'none'
  hint = where or f'known keys are {known_text}'
  if key in synonyms.SYNONYMS and not prefix:
    hint = synonyms.hint(key)
  elif near:
    hint = f"did you mean '{prefix}{near[0]}'?"
  raise ValueError(f"{of} has no key '{prefix}{key}': {hint}")


# --- Values on the command line ---


def literal(text: str) -> Any:
  """Returns the value of a Python literal, or else the string itself."""
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    return float(text) if text.lower() in ('nan', 'inf', '-inf') else text


def parse(name: str, text: str, kind: Any) -> Any:
  """Returns the first reading of a string that has a type; ValueError if none has.

  Readings are a Python literal, a bool ('true', '0'), a tuple without parentheses,
  and the string itself.
  """
  value = literal(text)
  readings = [value]
  if text.lower() in ('true', '1', 'false', '0'):
    readings.append(text.lower() in ('true', '1'))
  if isinstance(value, str) and not set(value) & set('()[]{}\'"'):
    readings.append(tuple(literal(word.strip()) for word in value.split(',')))
  for reading in (*readings, (value,), text):
    if accepts(reading, kind):
      return reading
  check(name, value, kind)


# --- Types ---

Count = Annotated[int, Range(ge=1)]
Natural = Annotated[int, Range(ge=0)]
Positive = Annotated[float, Range(gt=0)]
NonNegative = Annotated[float, Range(ge=0)]
Probability = Annotated[float, Range(ge=0, le=1)]
Rate = Annotated[float, Range(ge=0, lt=1)]
Share = Annotated[float, Range(gt=0, le=1)]
Epsilon = Annotated[float, Range(gt=0, lt=1)]
Text = Annotated[str, Fits('a non-empty string', bool)]
# Which checkpoints of a finished run of a study are kept.
Kept = Literal['all', 'newest', 'none']

# A size in pixels or patches: one number for a square, or (height, width).
HeightWidth = Annotated[
  tuple[Count, Count], Fits('(height, width), integers of at least 1')
]
Size = Count | HeightWidth


def _differ(values: Sequence[Any]) -> bool:
  return len(set(values)) == len(values)


Counts = Annotated[
  tuple[Count, ...],
  Fits('a tuple of different integers of at least 1', _differ),
]
Seeds = Annotated[
  tuple[Natural, ...],
  Fits(
    'a tuple of one or more different integers of at least 0',
    lambda x: len(x) > 0 and _differ(x),
  ),
]
# Units in each stage of a ResNet.
Units = tuple[Count, ...]
# GroupNorm has groups of 32 channels, and the root block 64 times the factor.
WidthFactor = Annotated[
  float, Fits('a multiple of 0.5 above 0', lambda x: x > 0 and x % 0.5 == 0)
]

_BOUND = r'(-?\d[\d_]*(\.\d+)?(%|shard)?)?'
# See vit_jax/data/folds.py.
FOLD = re.compile(
  r'\[fold(?P<relation>!?=)(?P<number>\d+)/(?P<num_folds>\d+)(,\s*seed=(?P<seed>\d+))?\]'
)
_UNNAMED_FOLD = re.sub(r'\?P<\w+>', '', FOLD.pattern)
_SPLIT = re.compile(
  rf'(\.|[\w-]+)(\[({_BOUND}:{_BOUND}|-?\d+shard)\]|{_UNNAMED_FOLD})?'
)
Split = Annotated[
  str,
  Fits(
    "a split in the notation of TFDS, such as 'train[:90%]' or 'train[100:]+test', or "
    "folds, such as 'train[fold!=0/5]'",
    lambda x: all(_SPLIT.fullmatch(part.strip()) for part in x.split('+')),
  ),
]
# Names of classes; NO_CLASS may be repeated.
Names = Annotated[
  tuple[str, ...],
  Fits(
    'a list of different names',
    lambda x: all(n == 1 or k == NO_CLASS for k, n in collections.Counter(x).items()),
  ),
]


def is_regex(text: str) -> bool:
  """Returns whether a string is a regular expression."""
  try:
    re.compile(text)
  except re.error:
    return False
  return True


Regex = Annotated[str, Fits('a regular expression', is_regex)]
