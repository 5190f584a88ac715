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

from vit_jax.configs import models as model_configs
from vit_jax.weights import arrays

_GELUS = {
  'gelu': 'erf',
  'gelu_new': 'tanh',
  'gelu_pytorch_tanh': 'tanh',
  'gelu_fast': 'tanh',
  'gelu_tanh': 'tanh',
}
_TIMM_SIZES = {
  'tiny': 'Ti',
  'small': 'S',
  'base': 'B',
  'large': 'L',
  'huge': 'H',
}
# Names of the epsilons of a ResNet.
_EPSILONS = ('published', 'timm')
_LONGEST = 2**24  # Bytes; the names of 21k classes take about one million.


class Description(NamedTuple):
  """What a JSON file tells about weights.

  Attributes:
    model: fields of the model, a nested dict.
    class_names: in the order of the logits, or None if unknown.
    image_size: (height, width) in pixels, or None if unknown.
  """

  model: dict
  class_names: tuple[str, ...] | None = None
  image_size: tuple[int, int] | None = None


def notes_file(npz) -> epath.Path:
  """Returns the path of the JSON file beside an .npz.

  It holds class names, and fields of the model that differ from the published.
  """
  npz = epath.Path(npz)
  return npz.with_name(f'{npz.name}.json')


def read(path: epath.Path, kind: str) -> Description:
  """Reads a JSON file; returns defaults if it does not exist.

  Args:
    path: the file.
    kind: format of the file: 'npz', 'timm' or 'hf'.

  Raises:
    ValueError: if the file is damaged or a field has a wrong value; names both.
  """
  with arrays.naming(path, 'cannot be used'):
    config = _load(path) if path.exists() else {}
    return {'npz': _from_notes, 'timm': _from_timm, 'hf': _from_hf}[kind](
      config
    )


def _load(path):
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


def _field(
  config: Mapping[str, Any],
  key: str,
  is_right: Callable[[Any], bool],
  what: str,
  default=None,
):
  """Returns a field, or the default if it is missing or null.

  Args:
    config: the fields.
    key: name of the field.
    is_right: function that returns whether a value is valid.
    what: description of valid values.
    default: value of a missing field.
  """
  value = config.get(key)
  if value is None:
    return default
  if not is_right(value):
    raise ValueError(f'{key} is {value!r:.80}, but must be {what}')
  return value


def _fields(config, key):
  return _field(
    config, key, lambda x: isinstance(x, dict), 'an object: {...}', {}
  )


def _choice(config, key, kinds, default=None):
  return _field(
    config,
    key,
    lambda x: isinstance(x, str) and x in kinds,
    f'one of {sorted(kinds)}',
    default,
  )


def _is_count(value):
  return type(value) is int and 0 < value < 2**20


def _count(config, key):
  return _field(config, key, _is_count, 'a number of at least 1')


def _epsilon(config, key, default=None):
  return _field(
    config,
    key,
    lambda x: type(x) in (int, float) and 0 < x < 1,
    'a number between 0 and 1',
    default,
  )


def _names(config, key):
  names = _field(
    config,
    key,
    lambda x: isinstance(x, list) and all(isinstance(n, str) for n in x),
    'a list of names',
  )
  return tuple(names) if names else None


def _size(config, key):
  """Returns (height, width) from a field that holds one number or two."""
  size = _field(
    config,
    key,
    lambda x: (
      _is_count(x)
      or (isinstance(x, list) and len(x) == 2 and all(map(_is_count, x)))
    ),
    'a number of pixels, or [height, width]',
  )
  return (size, size) if isinstance(size, int) else size and tuple(size)


def _from_notes(config):
  model = _fields(config, 'model')
  encoder, resnet = (_fields(model, part) for part in ('transformer', 'resnet'))
  known = {
    'transformer': dict(
      gelu=_choice(encoder, 'gelu', ('erf', 'tanh')),
      norm_eps=_epsilon(encoder, 'norm_eps'),
    ),
    'resnet': dict(eps=_choice(resnet, 'eps', _EPSILONS)),
    'eps': _choice(model, 'eps', _EPSILONS),  # Of a BiT ResNet.
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
    flax.traverse_util.unflatten_dict(found), _names(config, 'class_names')
  )


def _from_hf(config):
  transformer = dict(
    gelu=_GELUS[_choice(config, 'hidden_act', _GELUS, 'gelu')],
    norm_eps=float(_epsilon(config, 'layer_norm_eps', 1e-12)),
  )
  heads = _count(config, 'num_attention_heads')
  if heads:
    transformer['num_heads'] = heads
  labels = _field(
    config,
    'id2label',
    lambda x: (
      isinstance(x, dict)
      and set(x) == {str(i) for i in range(len(x))}
      and all(isinstance(name, str) for name in x.values())
    ),
    'an object that names each class: {"0": ..., "1": ...}',
    {},
  )
  names = tuple(labels[str(i)] for i in range(len(labels)))
  return Description(
    dict(transformer=transformer), names or None, _size(config, 'image_size')
  )


def _from_timm(config):
  args = _fields(config, 'model_args')
  pretrained = _fields(config, 'pretrained_cfg')
  transformer = dict(
    gelu=_GELUS[_choice(args, 'act_layer', _GELUS, 'gelu')], norm_eps=1e-6
  )
  architecture = _field(
    config, 'architecture', lambda x: isinstance(x, str), 'a name', ''
  )
  for part, size in _TIMM_SIZES.items():
    if f'_{part}_' in architecture:
      transformer['num_heads'] = model_configs.SIZES[size][3]
  heads = _count(args, 'num_heads')
  if heads:
    transformer['num_heads'] = heads
  shape = _field(
    pretrained,
    'input_size',
    lambda x: isinstance(x, list) and len(x) == 3 and all(map(_is_count, x)),
    '[channels, height, width]',
  )
  size = _size(args, 'img_size') or (shape and tuple(shape[1:]))
  names = _names(config, 'label_names') or _names(pretrained, 'label_names')
  return Description(dict(transformer=transformer), names, size)
