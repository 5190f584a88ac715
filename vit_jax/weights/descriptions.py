"""Reads the JSON files that describe weights, and checks each field.

These are config.json of timm and of Hugging Face, and NAME.npz.json, which
holds what an .npz cannot.
"""

from collections.abc import Callable
from collections.abc import Mapping
import json
from typing import Any
from typing import NamedTuple

from etils import epath
import flax.traverse_util

from vit_jax.weights import arrays

# Names of the epsilons of a ResNet.
_EPSILONS = ('published', 'timm')
_LONGEST = 2**24  # Bytes; the names of 21k classes take about one million.
_MOST_CLASSES = 2**20


class Description(NamedTuple):
  """What a JSON file tells about weights.

  Attributes:
    model: fields of the model, a nested dict.
    class_names: in the order of the logits, or None if unknown.
    image_size: (height, width) in pixels, or None if unknown.
    metadata: further metadata of a run by name, such as a palette.
    num_heads: number of attention heads, or None if there are none.
  """

  model: dict
  class_names: tuple[str, ...] | None = None
  image_size: tuple[int, int] | None = None
  metadata: dict = {}  # noqa: RUF012
  num_heads: int | None = None


def notes_file(npz) -> epath.Path:
  """Returns the path of the JSON file beside an .npz.

  It holds class names, and fields of the model that differ from the published.
  """
  return epath.Path(f'{npz}.json')


def read(path: epath.Path, describe: Callable[[dict], Description]):
  """Applies `describe` to the content of a JSON file, {} if there is none.

  Raises:
    ValueError: if the file is damaged or a field has a wrong value; names both.
  """
  with arrays.naming(path, 'cannot be used'):
    return describe(load(path))


def load(path: epath.Path) -> dict:
  """Reads an object from a JSON file; {} if there is no file."""
  if not path.exists():
    return {}
  if path.stat().length > _LONGEST:
    raise ValueError(f'it is longer than {_LONGEST:,} bytes')
  try:
    config = json.loads(path.read_text())
  except (ValueError, RecursionError) as e:
    raise ValueError(f'it is damaged: {e}') from e
  if not isinstance(config, dict):
    raise ValueError(
      f'it holds a {type(config).__name__} and must hold an object: {{...}}'
    )
  return config


def field(
  config: Mapping[str, Any],
  key: str,
  is_right: Callable[[Any], bool],
  what: str,
  default=None,
):
  """Returns a field, or the default if it is missing or null.

  Raises:
    ValueError: if `is_right` refuses its value; says `what` is valid.
  """
  value = config.get(key)
  if value is None:
    return default
  if not is_right(value):
    raise ValueError(f'{key} is {value!r:.80}, but must be {what}')
  return value


def fields(config, key):
  """Returns a field that is an object; {} if it is missing."""
  is_right = lambda x: isinstance(x, dict)
  return field(config, key, is_right, 'an object: {...}', {})


def choice(config, key, kinds, default=None):
  """Returns a field that is one of some texts."""
  is_right = lambda x: isinstance(x, str) and x in kinds
  return field(config, key, is_right, f'one of {sorted(kinds)}', default)


def only(config, models: str, **values):
  """Raises ValueError if fields have other values than this package's models."""
  for key, value in values.items():
    if config.get(key, value) != value:
      raise ValueError(
        f'{key} is {config[key]!r:.80}, but this package has only {models} with '
        f'{value!r}'
      )


def is_count(value) -> bool:
  """Returns whether a value is a number of at least 1."""
  return type(value) is int and 0 < value < 2**20


def count(config, key):
  """Returns a field that is a number of at least 1."""
  return field(config, key, is_count, 'a number of at least 1')


def epsilon(config, key, default=None):
  """Returns a field that is a number between 0 and 1."""
  is_right = lambda x: type(x) in (int, float) and 0 < x < 1
  return field(config, key, is_right, 'a number between 0 and 1', default)


def names(config, key) -> tuple[str, ...] | None:
  """Returns a field that is a list of names; None if it is empty."""
  is_right = lambda x: (
    isinstance(x, list) and all(isinstance(name, str) for name in x)
  )
  found = field(config, key, is_right, 'a list of names')
  return tuple(found) if found else None


def size(config, key):
  """Returns (height, width) from a field that holds one number or two."""
  is_right = lambda x: (
    is_count(x)
    or (isinstance(x, list) and len(x) == 2 and all(map(is_count, x)))
  )
  what = 'a number of pixels, or [height, width]'
  found = field(config, key, is_right, what)
  return (found, found) if isinstance(found, int) else found and tuple(found)


def from_notes(config) -> Description:
  """Returns what the JSON file beside an .npz tells."""
  model = fields(config, 'model')
  encoder, resnet = (fields(model, part) for part in ('transformer', 'resnet'))
  known = {
    'transformer': dict(
      gelu=choice(encoder, 'gelu', ('erf', 'tanh')),
      norm_eps=epsilon(encoder, 'norm_eps'),
    ),
    'resnet': dict(eps=choice(resnet, 'eps', _EPSILONS)),
    'eps': choice(model, 'eps', _EPSILONS),  # Of a BiT ResNet.
  }
  unknown = {*(model.keys() - known), *(encoder.keys() - known['transformer'])}
  unknown |= resnet.keys() - known['resnet']
  if unknown:
    raise ValueError(
      f'model has {sorted(unknown)}, which this version does not know'
    )
  flat = flax.traverse_util.flatten_dict(known)
  found = {path: value for path, value in flat.items() if value is not None}
  return Description(
    flax.traverse_util.unflatten_dict(found), names(config, 'class_names')
  )


def labels(config, gap: str | None = None) -> tuple[str, ...] | None:
  """Returns the names in `id2label` by number; None if there are none.

  `gap` names the numbers that no class has; None: all must be there.
  """

  def is_right(x):
    return (
      isinstance(x, dict)
      and all(isinstance(name, str) for name in x.values())
      and all(number.isdecimal() for number in x)
      and max(map(int, x), default=0) < _MOST_CLASSES
      and (gap is not None or set(x) == {str(i) for i in range(len(x))})
    )

  what = 'an object that names each class: {"0": ..., "1": ...}'
  found = field(config, 'id2label', is_right, what, {})
  number = 1 + max(map(int, found), default=-1)
  return tuple(found.get(str(i), gap) for i in range(number)) or None


def label_fields(model) -> dict[str, dict]:
  """Returns Hugging Face's fields that name the classes of a model."""
  names = model.class_names or [f'LABEL_{i}' for i in range(model.num_classes)]
  return dict(
    id2label={str(i): name for i, name in enumerate(names)},
    label2id={name: i for i, name in enumerate(names)},
  )
