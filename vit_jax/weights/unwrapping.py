"""Finds a model's arrays in a checkpoint of another training program.

Training programs wrap a state dict in two ways, which may be combined and nested:

  an entry   {'epoch': 3, 'state_dict': {'cls_token': ...}, 'args': Namespace(...)}
  a prefix   {'module.cls_token': ...}, {'backbone.cls_token': ..., 'head.mlp...': ...}

If a checkpoint has several models, averaged weights are read, as timm's loader does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import re
from typing import Any

from absl import logging

from vit_jax.weights import arrays

# Entries in order of preference, averaged weights first.
_ENTRIES = (
  'state_dict_ema',  # timm
  'model_ema',  # DeiT
  'ema',
  'ema_model',  # ema-pytorch
  'teacher',  # DINO, iBOT, DINOv2
  'target_encoder',  # I-JEPA
  'state_dict',  # timm, PyTorch Lightning, MoCo v3, open_clip
  'model',  # DeiT, MAE, DETR
  'module',  # EVA
  'net',
  'online_model',
  'student',
  'encoder',
)
# Modules around a model, by which names begin: wrappers of PyTorch, and attributes.
_MODULES = (*_ENTRIES, '_orig_mod', 'backbone', 'base_encoder')
# Beginnings of names next to these that no model of this package has: heads and
# decoders of pre-training, and losses.
_IGNORED = re.compile(
  r'(dino_head|ibot_head|decoder|predictor|momentum_encoder|criterion|loss_fn)\.'
  r'|head\.(mlp|last_layer)\b'
)
_MOST_ENTRIES, _MOST_MODULES = 3, 8  # Levels of nesting.


def unwrap(
  content: Any, is_known: Callable[[Iterable[str]], bool], entry: str | None = None
) -> dict[str, Any]:
  """Returns the arrays of a model by name.

  Args:
    content: a checkpoint: nested dicts of arrays and settings.
    is_known: whether names belong to a model of this package.
    entry: the entry or module to read if there are several; None: the averaged
      weights, see the top of this module.

  Raises:
    ValueError: if there are no arrays by name, or no such entry.
  """
  state = content
  options = []
  for _ in range(_MOST_ENTRIES):
    if names := _entries(state, entry):
      options += names
      state = state[_preferred(names)]
  if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
    raise ValueError("it is not a state dict: save the model's state_dict()")
  all_names = arrays.join_names(sorted(state))
  state = {name: x for name, x in state.items() if not arrays.is_buffer(name, x)}
  if not state:
    raise ValueError(f'it has no arrays by name, only {all_names}')
  modules = _modules(state, is_known, entry) or []
  for names in modules:
    options += names
  if entry is not None and entry not in options:
    remedy = f'choose one of {", ".join(options)}' if options else 'leave it out'
    raise ValueError(
      f"it has no entry '{entry}': {remedy} (--entry, config.pretrained_entry)"
    )
  return _below(state, ''.join(f'{_preferred(names)}.' for names in modules))


def _entries(content: Any, entry: str | None) -> list[str]:
  """Returns the entries of a checkpoint with a state dict, in order of preference."""
  if not isinstance(content, dict):
    return []
  preferred = dict.fromkeys([entry, *_ENTRIES] if entry else _ENTRIES)
  return [name for name in preferred if _contains_state(content.get(name))]


def _contains_state(value: Any) -> bool:
  """Returns whether an entry is a state dict, or a dict with such an entry."""
  if not isinstance(value, dict):
    return False
  return _is_state(value) or any(_is_state(value.get(name)) for name in _ENTRIES)


def _is_state(value: Any) -> bool:
  return isinstance(value, dict) and any(map(_is_array, value.values()))


def _modules(
  names: Iterable[str],
  is_known: Callable[[Iterable[str]], bool],
  entry: str | None,
  depth: int = 0,
) -> list[list[str]] | None:
  """Returns the modules around a known model, outermost first; None if there is none.

  Each level has the module to read, and then the others that could be read.
  """
  if is_known(names):
    return []
  first_parts = {name.partition('.')[0] for name in names}
  preferred = dict.fromkeys([entry, *_MODULES] if entry else _MODULES)
  options = [module for module in preferred if module in first_parts]
  other_names = [name for name in names if name.partition('.')[0] not in options]
  if depth == _MOST_MODULES or not all(map(_IGNORED.match, other_names)):
    return None
  for module in options:
    prefix = f'{module}.'
    inner = [x.removeprefix(prefix) for x in names if x.startswith(prefix)]
    levels = _modules(inner, is_known, entry, depth + 1)
    if levels is not None:
      other_options = [x for x in options if x != module]
      return [[module, *other_options], *levels]
  return None


def _preferred(names: Sequence[str]) -> str:
  """Returns the first of several names, and logs the choice."""
  if len(names) > 1:
    logging.warning(
      "The checkpoint has several models: reading '%s', not '%s' (choose with --entry, "
      'for a run with config.pretrained_entry)',
      names[0],
      "', '".join(names[1:]),
    )
  return names[0]


def _below(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
  """Returns the arrays whose names begin with a prefix, without it."""
  inner, ignored = {}, []
  for name, array in state.items():
    if name.startswith(prefix):
      inner[name.removeprefix(prefix)] = array
    else:
      ignored.append(name)
  if ignored:
    logging.warning('Ignored parameters: %s', arrays.join_names(sorted(ignored)))
  return inner


def _is_array(value: Any) -> bool:
  return hasattr(value, 'shape')
