"""Reads config files, and sets their keys by flags of the command line.

  --config=FILE.py:ARG            the config of get_config(ARG) in FILE.py
  --config.a.b=VALUE              sets a key; also --config.a.b VALUE
  --config.flag, --noconfig.flag  set a key to True and False

VALUE is a Python literal or a string without quotes, whichever the type of the key
accepts (configs/common.py, configs/models.py, configs/task_options.py). These keys
can be set even if the config file lacks them. Any other key keeps the type of its
value in the config file, or can be None.
"""

from collections.abc import Iterable, Mapping
import difflib
import functools
import importlib.machinery
import importlib.util
import inspect
import os
import pathlib
import sys
from typing import Any

import ml_collections

from vit_jax import console
from vit_jax.configs import common, models as model_configs, schema

_MODULE = 'vit_jax_config_file'  # Name of a config file's module.
_MODEL_KIND = 'model.kind'

# --- Config files ---


def find(path: str) -> str:
  """Returns the path of a user's config file, or else of an installed one.

  Installed configs are NAME.py (also NAME), configs/NAME.py and
  .../vit_jax/configs/NAME.py, the path in the original.
  """
  if os.path.isfile(path):
    return path
  *folders, name = pathlib.PurePath(path).parts or ('',)
  name = name.removesuffix('.py')
  installed = {}
  for folder in importlib.import_module('vit_jax.configs').__path__:
    for file in sorted(pathlib.Path(folder).glob('[!_]*.py')):
      installed[file.stem] = str(file)
  is_installed = folders in ([], ['configs']) or folders[-2:] == ['vit_jax', 'configs']
  if is_installed and name in installed:
    return installed[name]
  near = difflib.get_close_matches(name, installed, n=1)
  if near:
    hint = f'did you mean the installed configs/{near[0]}.py?'
  else:
    hint = f'installed are {", ".join(f"{stem}.py" for stem in installed)}'
  raise FileNotFoundError(f"config='{path}' is not a file: {hint} (--config)")


def load(text: str) -> tuple[ml_collections.ConfigDict, str]:
  """Returns the config of FILE.py[:ARG], locked, and the path of the file.

  ValueError if the file has an error or the argument is wrong; see also `find`.
  """
  path, colon, argument = text.partition(':')
  path = find(path)
  if path.endswith(('.yaml', '.yml', '.json', '.toml')):
    raise ValueError(
      f"config='{path}' must be a Python file with a function get_config: copy one of "
      'configs/ and set its keys, or set them by flags, --config.KEY=VALUE (--config)'
    )
  loader = importlib.machinery.SourceFileLoader(_MODULE, path)
  spec = importlib.util.spec_from_loader(_MODULE, loader)
  assert spec is not None  # A loader of a file has a location.
  module = importlib.util.module_from_spec(spec)
  sys.modules[_MODULE] = module  # Dataclasses look up the module of their class.
  arguments = [argument] if colon else []
  try:
    loader.exec_module(module)
    if not hasattr(module, 'get_config'):
      raise ValueError('the file has no function get_config')
    try:
      inspect.signature(module.get_config).bind(*arguments)
    except TypeError as e:
      problem = 'get_config needs an argument: use FILE.py:ARGUMENT'
      if arguments:
        problem = f'get_config takes no argument: leave out :{argument}'
      raise ValueError(problem) from e
    config = module.get_config(*arguments)
    if not isinstance(config, Mapping | ml_collections.ConfigDict):
      raise ValueError(f'get_config returns {type(config).__name__}, not a ConfigDict')
  except (ValueError, OSError) as e:
    raise ValueError(f'{e} (--config={text})') from e
  except Exception as e:
    raise ValueError(
      f"config='{path}' cannot be read: {type(e).__name__} in line "
      f'{console.error_location(e, path).rpartition(":")[2]}: {e} (--config)'
    ) from e
  if type(config) is not ml_collections.ConfigDict:
    config = ml_collections.ConfigDict(config)
  return config.lock(), path


# --- Keys ---


def set_keys(
  config: ml_collections.ConfigDict, settings: Iterable[tuple[str, str | bool]]
) -> None:
  """Sets keys of a config in place.

  `settings` are pairs of a dotted key and its value as a string; True for
  --config.KEY without a value, False for --noconfig.KEY. Of equal keys the last one
  counts. A length in steps replaces one in epochs, and vice versa. ValueError names
  each wrong key, its value and the valid values; the other keys are set.
  """
  texts = dict(settings)
  if _MODEL_KIND in texts:
    _set_model_kind(config, str(texts.pop(_MODEL_KIND)))
  types = known_keys(config)

  def set_key(name: str, text: str | bool) -> None:
    _set(config, name, text, types)
    length = other_length(name)
    if length in types and length not in texts and text != 'None':
      _assign(config, length, None)

  schema.run_checks(functools.partial(set_key, *item) for item in texts.items())


def _set_model_kind(config: ml_collections.ConfigDict, kind: str) -> None:
  """Sets the kind of a model, which determines its other keys.

  ValueError unless the new kind has all fields of the old one.
  """
  model = config.get('model')
  old_kind = model_configs.kind_of(model) if schema.is_mapping(model) else None
  kinds = model_configs.kinds_with_fields_of(old_kind)
  if kind not in kinds:
    raise ValueError(
      f"model.kind='{kind}' has other fields than the model of this config: use one of "
      f'{kinds}, or a config of such a model (--config.{_MODEL_KIND})'
    )
  _assign(config, _MODEL_KIND, kind)


def other_length(name: str) -> str | None:
  """Returns the dotted key of the same length in other units, if there is one."""
  group, dot, key = name.rpartition('.')
  if schema.LENGTH not in schema.marks(common.Config).get(key, ()):
    return None
  length, _, unit = key.rpartition('_')
  other_unit = 'epochs' if unit == 'steps' else 'steps'
  return f'{group}{dot}{length}_{other_unit}'


def known_keys(
  config: ml_collections.ConfigDict, nested: bool = False
) -> dict[str, Any]:
  """Returns the types of all keys that can be set, by dotted key.

  The config is for a run, or for a program with groups (`nested`) for runs.
  """
  types = _types_of_values(config)
  for key, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      types |= _prefixed(key, known_keys(value, nested=True))
  if _is_run(config):
    for name, kind in _types_of_run(config).items():
      # The splits of a nested run may contain '{seed}'.
      types[name] = str if nested and kind == schema.Split else kind
  return types


def _is_run(config: ml_collections.ConfigDict) -> bool:
  return 'pp' in config or 'model' in config


def _prefixed(group: str, types: Mapping[str, Any]) -> dict[str, Any]:
  return {f'{group}.{name}': kind for name, kind in types.items()}


def _types_of_run(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns the types of the keys of a run, by dotted key."""
  types = {
    **_types_of_values(common.get_config()),
    **schema.flat(common.Config),
  }
  # `trainer` may name another program, and in the original accum_steps 0 and None
  # mean 1.
  types |= {'trainer': schema.Text, 'accum_steps': schema.Natural | None}
  for group in ('mesh', 'model', 'task_options'):
    del types[group]
  model = config.get('model')
  if isinstance(model, ml_collections.ConfigDict):
    options = _types_of_values(model_configs.with_options(model))
    kind = model_configs.kind_of(model)
    fields = model_configs.FIELDS.get(kind)
    if model_configs.is_of_weights(model):
      # The sizes of `pretrained` are nearly always of a Vision Transformer.
      options = schema.flat(fields or model_configs.Vit)
    elif fields:
      fields = schema.flat(fields)
      options = {name: fields.get(name, options[name]) for name in options}
    else:  # A user's own model may have the fields of any kind.
      for fields_of_kind in model_configs.FIELDS.values():
        options = dict.fromkeys(schema.flat(fields_of_kind), Any) | options
    types |= _prefixed('model', options)
  return types


def _types_of_values(group: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns the types of the values in a group, or None, by dotted key."""
  types: dict[str, Any] = {}
  for key, value in group.items():
    kind = group.get_type(key)
    if isinstance(value, ml_collections.ConfigDict):
      types |= _prefixed(key, _types_of_values(value))
    elif kind in (bool, int, float, str, tuple):
      types[key] = kind | None
    elif kind is list:
      types[key] = tuple | None
    else:
      types[key] = Any
  return types


def _set(
  config: ml_collections.ConfigDict,
  name: str,
  text: str | bool,
  types: Mapping[str, Any],
) -> None:
  """Sets a key to the first reading of a string that its type accepts."""
  if _is_task_option(config, name):
    _assign(config, name, str(text))  # The task parses it by its own types.
    return
  if name not in types:
    _raise_unknown(name, types)
  kind = types[name]
  if isinstance(text, bool):
    if not schema.accepts(text, kind):
      raise ValueError(f'--config.{name} needs a value: use --config.{name}=VALUE')
    _assign(config, name, text)
  else:
    _assign(config, name, schema.parse(name, text, kind))


def _is_task_option(config: ml_collections.ConfigDict, name: str) -> bool:
  """Returns whether a dotted key is an option of the task of a run."""
  groups = name.split('.')[:-1]
  if not groups or groups[-1] != 'task_options':
    return False
  for group in groups[:-1]:
    config = config.get(group)
    if not isinstance(config, ml_collections.ConfigDict):
      return False
  return _is_run(config)


def _assign(config: ml_collections.ConfigDict, name: str, value: Any) -> None:
  """Sets a key, and adds it and its groups where the config lacks them."""
  *groups, key = name.split('.')
  for group in groups:
    if config.get(group) is None:
      with config.unlocked(), config.ignore_type():
        config[group] = ml_collections.ConfigDict()
    config = config[group]
  kind = config.get_type(key) if key in config else None
  if kind is float and isinstance(value, int):
    value = float(value)
  if kind is tuple and isinstance(value, list):
    value = tuple(value)
  with config.unlocked(), config.ignore_type():
    config[key] = value


def _raise_unknown(name: str, keys: Mapping[str, Any]) -> None:
  """Raises ValueError for an unknown key, with the nearest known one."""
  inside = [key for key in keys if key.startswith(f'{name}.')]
  if inside:
    raise ValueError(
      f'config.{name} is a group of keys: set one of them, such as --config.{inside[0]}'
    )
  where = (
    'keys are listed in configs/common.py, keys of config.model in '
    'configs/models.py, keys of config.task_options in configs/task_options.py'
  )
  schema.raise_unknown(name, keys, where=where)
