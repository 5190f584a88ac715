"""Reads the JSON files that describe weights, and checks each field.

These are config.json of timm and of Hugging Face, and NAME.npz.json, which holds
what an .npz cannot.
"""

from collections.abc import Callable, Mapping
import re
from typing import Annotated, Any, NamedTuple

from etils import epath

from vit_jax.configs import schema
from vit_jax.distributed import files
from vit_jax.weights import arrays, fetch

# Absolute values of the numbers that models compute with, apart from 0.
_RANGE = 1e-30, 2**31 - 1


class Description(NamedTuple):
  """What a JSON file says about weights, see vit_jax.weights.reading.Weights.

  `preparation` are attributes of a vit_jax.weights.preparation.Preparation, or None.
  `num_heads` is the number of attention heads, or a pair for image and text tower;
  None if unknown.
  """

  model: dict
  class_names: tuple[str, ...] | None = None
  image_size: tuple[int, int] | None = None
  metadata: dict = {}  # noqa: RUF012
  num_heads: int | tuple[int | None, int | None] | None = None
  preparation: dict | None = None


def notes_file(npz: epath.PathLike) -> epath.Path:
  """Returns the path of the JSON file next to an .npz.

  It holds class names, and fields of the model that differ from the published.
  """
  return epath.Path(f'{npz}.json')


def _without_null(fields: dict[str, Any]) -> dict[str, Any]:
  return {name: value for name, value in fields.items() if value is not None}


def read(path: epath.Path, describe: Callable[[dict], Any] = dict) -> Any:
  """Applies `describe` to the object in a JSON file, {} if there is no file.

  Fields that are null are left out. ValueError if the file is damaged or a field has a
  wrong value; names both.
  """
  with arrays.file_errors(path):
    content = {}
    if path.exists():
      with fetch.local_input(path) as local_path:
        content = files.read_json(local_path, object_hook=_without_null)
    if not isinstance(content, dict):
      raise ValueError(f'it holds {content!r:.80} and must hold an object: {{...}}')
    return describe(content)


def field(
  config: Mapping[str, Any], key: str, kind: Any, default: Any = None, prefix: str = ''
) -> Any:
  """Returns a field, or `default`.

  ValueError, which names the field with a `prefix`, unless it has a type, see schema,
  and its numbers fit into float32 and int32.
  """
  value = config.get(key, default)
  if key in config and not schema.accepts(value, kind):
    expected = schema.describe(kind)
    raise ValueError(f'{prefix}{key} is {value!r:.80}, but must be {expected}')
  if not _fits(value):
    raise ValueError(
      f'{prefix}{key} is {value!r:.80}, which is beyond the range of float32 or int32'
    )
  return value


def _fits(value: Any) -> bool:
  """Returns whether each number in a value or list is 0 or of a size in _RANGE."""
  if isinstance(value, list | tuple):
    return all(map(_fits, value))
  if isinstance(value, int | float):
    smallest, largest = _RANGE
    return value == 0 or smallest <= abs(value) <= largest
  return True


def as_tuple(value: Any) -> Any:
  """Returns lists of a JSON file, also nested ones, as tuples; other values unchanged."""
  return tuple(map(as_tuple, value)) if isinstance(value, list | tuple) else value


def check_fields(
  fields: Mapping[str, Any], kinds: Mapping[str, Any], prefix: str = ''
) -> None:
  """Raises ValueError unless the fields of a model have their types.

  `kinds` are the types by dotted key. None is a field that no file states.
  """
  for key, value in fields.items():
    name = f'{prefix}{key}'
    if name in kinds:
      if value is not None:
        field(fields, key, kinds[name], prefix=prefix)
    elif isinstance(value, dict) and any(x.startswith(f'{name}.') for x in kinds):
      check_fields(value, kinds, f'{name}.')
    else:
      schema.raise_unknown(name, kinds, of='model')


def check_supported(config: Mapping[str, Any], **values: Any) -> None:
  """Raises ValueError if fields have other values than all models of this package."""
  for key, value in values.items():
    if config.get(key, value) != value:
      raise ValueError(
        f'{key} is {config[key]!r:.80}, but this package has only models with {value!r}'
      )


def from_notes(config: Mapping[str, Any]) -> Description:
  """Returns what the JSON file next to an .npz says."""
  names = field(config, 'class_names', tuple[str, ...])
  names = None if names is None else tuple(names)
  return Description(
    field(config, 'model', dict, {}),
    names,
    preparation=field(config, 'preparation', dict),
  )


def shards(config: Mapping[str, Any]) -> list[str]:
  """Returns the files that the index of a large model names."""
  weight_map = config.get('weight_map')
  names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
  pattern = re.compile(r'[\w.-]+\.(safetensors|bin)')  # Not in another folder.
  if not names or not all(pattern.fullmatch(str(name)) for name in names):
    raise ValueError(
      'weight_map must name a .safetensors or .bin file in the same folder for each array'
    )
  return sorted(names)


def labels(config: Mapping[str, Any], gap: str | None = None) -> tuple[str, ...] | None:
  """Returns the names in `id2label` by number; None if there are none.

  `gap` is the name of the numbers without a class; None: there must be no such number.
  """

  def is_label_table(names: dict[str, Any]) -> bool:
    for number, name in names.items():
      if not number.isdecimal() or str(int(number)) != number:
        return False
      if int(number) >= 2**20 or not isinstance(name, str):
        return False
    if gap is not None:
      return True
    return set(names) == set(map(str, range(len(names))))

  form = 'an object that names each class: {"0": ..., "1": ...}'
  kind = Annotated[dict, schema.Fits(form, is_label_table)]
  names = field(config, 'id2label', kind, {})
  if not names:
    return None
  num_classes = 1 + max(map(int, names))
  return tuple(names.get(str(i), gap) for i in range(num_classes))


def label_fields(model: Any) -> dict[str, dict]:
  """Returns Hugging Face's fields that name the classes of a model."""
  names = model.class_names or [f'LABEL_{i}' for i in range(model.num_classes)]
  return dict(
    id2label={str(i): name for i, name in enumerate(names)},
    label2id={name: i for i, name in enumerate(names)},
  )
