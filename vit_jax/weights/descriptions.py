"""Reads the JSON files that describe weights, and checks each field.

These are config.json of timm and of Hugging Face, and NAME.npz.json, which holds
what an .npz cannot.
"""

from collections.abc import Callable, Iterable, Mapping
import json
import re
from typing import Any, NamedTuple

from etils import epath

from vit_jax.weights import arrays, fetch


class Description(NamedTuple):
  """What a JSON file says about weights, see vit_jax.weights.reading.Weights.

  `num_heads` is the number of attention heads, or a pair for image and text tower;
  None if unknown.
  """

  model: dict
  class_names: tuple[str, ...] | None = None
  image_size: tuple[int, int] | None = None
  metadata: dict = {}  # noqa: RUF012
  num_heads: int | tuple[int | None, int | None] | None = None


def notes_file(npz) -> epath.Path:
  """Returns the path of the JSON file next to an .npz.

  It holds class names, and fields of the model that differ from the published.
  """
  return epath.Path(f'{npz}.json')


def read(path: epath.Path, describe: Callable[[dict], Description]):
  """Applies `describe` to the object in a JSON file, {} if there is no file.

  ValueError if the file is damaged or a field has a wrong value; names both.
  """
  with arrays.naming(path):
    content = {}
    if path.exists():
      with fetch.local_input(path) as here:
        content = json.loads(here.read_bytes())
    if not isinstance(content, dict):
      raise ValueError(f'it holds {content!r:.80} and must hold an object: {{...}}')
    return describe(content)


# A kind of field: a predicate of its values, and what they are in words.
Kind = tuple[Callable[[Any], bool], str]


def _is_count(x):
  return type(x) is int and x > 0


def _is_string(x):
  return isinstance(x, str)


def _is_list(fits):
  return lambda x: isinstance(x, list) and all(map(fits, x))


OBJECT: Kind = (lambda x: isinstance(x, dict), 'an object: {...}')
FLAG: Kind = (lambda x: isinstance(x, bool), 'true or false')
STRING: Kind = (_is_string, 'a string')
NAMES: Kind = (_is_list(_is_string), 'a list of names')
COUNT: Kind = (_is_count, 'a number of at least 1')
COUNTS: Kind = (_is_list(_is_count), 'a list of numbers of at least 1')
EPSILON: Kind = (
  lambda x: type(x) in (int, float) and 0 < x < 1,
  'a number between 0 and 1',
)
SIZE: Kind = (
  lambda x: _is_count(x) or (COUNTS[0](x) and len(x) == 2),
  'a number of pixels, or [height, width]',
)


def one_of(known: Iterable[str]) -> Kind:
  """Returns a kind: one of some strings."""
  return lambda x: _is_string(x) and x in known, f'one of {sorted(known)}'


def field(config: Mapping[str, Any], key: str, kind: Kind, default=None):
  """Returns a field, or `default` if it is missing or null; checks its kind."""
  is_right, what = kind
  value = config.get(key)
  if value is None:
    return default
  if not is_right(value):
    raise ValueError(f'{key} is {value!r:.80}, but must be {what}')
  return value


def names(config, key) -> tuple[str, ...] | None:
  """Returns a field that is a list of names; None if it is empty."""
  return tuple(field(config, key, NAMES, ())) or None


def only(config, models: str, **values):
  """Raises ValueError if fields have values that no model of this package has."""
  for key, value in values.items():
    if config.get(key, value) != value:
      raise ValueError(
        f'{key} is {config[key]!r:.80}, but this package has only {models} with '
        f'{value!r}'
      )


def from_notes(config) -> Description:
  """Returns what the JSON file next to an .npz says."""
  model = field(config, 'model', OBJECT, {})
  return Description(model, names(config, 'class_names'))


def shards(config) -> list[str]:
  """Returns the files that the index of a large model's .safetensors names."""
  found = field(config, 'weight_map', OBJECT)
  name = re.compile(r'[\w.-]+\.safetensors')  # Not in another folder.
  if not found or not all(name.fullmatch(str(x)) for x in found.values()):
    raise ValueError(
      'weight_map must name a .safetensors file in the same folder for each array'
    )
  return sorted(set(found.values()))


def labels(config, gap: str | None = None) -> tuple[str, ...] | None:
  """Returns the names in `id2label` by number; None if there are none.

  `gap` names the numbers that no class has; None: all must be there.
  """
  is_right = lambda x: (
    isinstance(x, dict)
    and all(number.isdecimal() and _is_string(x[number]) for number in x)
    and max(map(int, x), default=0) < 2**20
    and (gap is not None or set(x) == {str(i) for i in range(len(x))})
  )
  what = 'an object that names each class: {"0": ..., "1": ...}'
  found = field(config, 'id2label', (is_right, what), {})
  number = 1 + max(map(int, found), default=-1)
  return tuple(found.get(str(i), gap) for i in range(number)) or None


def label_fields(model) -> dict[str, dict]:
  """Returns Hugging Face's fields that name the classes of a model."""
  names = model.class_names or [f'LABEL_{i}' for i in range(model.num_classes)]
  return dict(
    id2label={str(i): name for i, name in enumerate(names)},
    label2id={name: i for i, name in enumerate(names)},
  )


def processor(kind: str, size, mean, std, **more) -> dict[str, Any]:
  """Returns preprocessor_config.json for Hugging Face's class `kind`."""
  return dict(
    image_processor_type=kind,
    do_resize=True,
    size=size,
    resample=2,
    do_rescale=True,
    rescale_factor=1 / 255,
    do_normalize=True,
    image_mean=mean,
    image_std=std,
    **more,
  )
