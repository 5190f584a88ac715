"""Converts iGPT's weights between this package and Hugging Face's ImageGPT.

The state dicts are those of `ImageGPTForCausalImageModeling` and of
`ImageGPTModel`, which has no head. Their layers have biases, which the released
code has not: they must be zero here, and are zeros there. The last row of their
table of colours is the start token.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import re
from typing import Any
from typing import NamedTuple

from absl import logging
import numpy as np

from vit_jax.weights.families import leaves

_PARTS = ('query', 'key', 'value')
# Leaf of a block -> name there, and kind of layout. Hugging Face's layers of
# blocks are not transposed.
_BLOCK = {
  'norm_1/scale': ('ln_1', 'same'),
  'norm_2/scale': ('ln_2', 'same'),
  'attention/out/kernel': ('attn.c_proj', 'rows'),
  'mlp/hidden/kernel': ('mlp.c_fc', 'same'),
  'mlp/output/kernel': ('mlp.c_proj', 'same'),
}
_COLORS = 'transformer.wte.weight'
_CLASSES = (
  " (Hugging Face's classifier reads the tokens of the pixels without the start "
  'token; that of this package reads others)'
)
# Other leaf -> name there, and kind of layout.
_OTHERS = {
  'position_embedding': ('transformer.wpe.weight', 'same'),
  'norm/scale': ('transformer.ln_f.weight', 'same'),
  'color_head/kernel': ('lm_head.weight', 'dense'),
}


class Layout(NamedTuple):
  """The only naming of arrays."""

  names: str = 'hf'


def detect(names: Iterable[str]) -> Layout | None:
  """Returns the layout of a state dict's names, or None."""
  return Layout() if _COLORS in map(_plain_name, names) else None


def _plain_name(name):
  """Returns the name that ImageGPTForCausalImageModeling has."""
  return re.sub(r'^(wte|wpe|h|ln_f)\.', r'transformer.\1.', name)


def load(
  flat: Mapping[str, np.ndarray], layout: Layout, num_heads: int | None
) -> dict[str, np.ndarray]:
  """Converts a state dict.

  Args:
    flat: arrays by name.
    layout: result of `detect`.
    num_heads: number of attention heads, which the shapes do not tell.

  Returns:
    Parameters by path. The colour head is zero if there is none.

  Raises:
    ValueError: if there are arrays that an iGPT does not have (the message
      lists them), if biases are not zero, or if `num_heads` does not divide the
      width or is missing.
  """
  del layout
  if num_heads is None:
    raise ValueError(
      'it does not say how many attention heads its model has: put its '
      'config.json beside it, or give num_heads'
    )
  flat = _without_biases({_plain_name(k): v for k, v in flat.items()})
  num_layers = leaves.count(flat, r'transformer\.h\.(\d+)\.')
  colors = flat.pop(_COLORS)
  _check_matrix(_COLORS, colors)
  found = {'color_embedding': colors[:-1], 'start_token': colors[-1]}
  for i in range(num_layers):
    found |= _load_block(flat, i, num_heads)
  for path, (name, kind) in _OTHERS.items():
    if name in flat:
      found[path] = leaves.from_torch(flat.pop(name), path, kind, None)
  leaves.fail_for_unknown(
    flat, 'iGPT', _CLASSES if 'score.weight' in flat else ''
  )
  if 'color_head/kernel' not in found:
    logging.warning('These weights have no head of colours: it is zero.')
    found['color_head/kernel'] = np.zeros_like(found['color_embedding'].T)
  return found


def _without_biases(flat):
  """Leaves out biases of zero."""
  biases = {k for k in flat if re.search(r'\.(attn|mlp)\.c_\w+\.bias$', k)}
  wrong = sorted(name for name in biases if flat[name].any())
  if wrong:
    raise ValueError(
      f'the biases {wrong[:3]} are not zero, and iGPT has none: these weights '
      'were trained further by Hugging Face, whose model has biases'
    )
  return {name: value for name, value in flat.items() if name not in biases}


def _check_matrix(name, value):
  if value.ndim != 2:
    raise ValueError(f"'{name}' of shape {value.shape} must have 2 dimensions")


def _load_block(flat, i, num_heads):
  """Takes the leaves of a block out of `flat`; returns them by path."""
  here, there, found = f'block_{i}/', f'transformer.h.{i}.', {}
  joined = flat.pop(f'{there}attn.c_attn.weight', None)
  if joined is not None:
    _check_matrix(f'{there}attn.c_attn.weight', joined)
    state = leaves.split({'.qkv.': joined.T}, '.qkv.', _PARTS)
    for part in _PARTS:
      path = f'{here}attention/{part}/kernel'
      found[path] = leaves.from_torch(state[part], path, 'heads', num_heads)
  for leaf, (name, kind) in _BLOCK.items():
    value = flat.pop(f'{there}{name}.weight', None)
    if value is None:
      continue
    if kind == 'rows':
      _check_matrix(f'{there}{name}.weight', value)
      value, kind = value.T, 'out'
    path = here + leaf
    found[path] = leaves.from_torch(value, path, kind, num_heads)
  return found


def dump(
  flat: Mapping[str, np.ndarray], layout: Layout
) -> dict[str, np.ndarray]:
  """Converts parameters by path to a state dict.

  Raises:
    ValueError: if Hugging Face's model lacks some of them, or needs others.
  """
  del layout
  flat, state = dict(flat), {}
  if 'start_token' not in flat:
    raise ValueError(
      "Hugging Face's ImageGPT has no masked pixels (the objective 'bert'): "
      'write this model as a run (--to=workdir)'
    )
  start = flat.pop('start_token')
  state[_COLORS] = np.concatenate([flat.pop('color_embedding'), start[None]])
  width = len(start)
  for i in range(leaves.count(flat, r'block_(\d+)/')):
    here, there = f'block_{i}/', f'transformer.h.{i}.'
    kernels = [flat.pop(f'{here}attention/{part}/kernel') for part in _PARTS]
    rows = [leaves.to_torch(kernel, 'heads') for kernel in kernels]
    state[f'{there}attn.c_attn.weight'] = np.concatenate(rows).T
    state[f'{there}attn.c_attn.bias'] = np.zeros(3 * width, start.dtype)
    for leaf, (name, kind) in _BLOCK.items():
      value = flat.pop(here + leaf)
      if kind == 'rows':
        value = leaves.to_torch(value, 'out').T
      state[f'{there}{name}.weight'] = value
      if value.ndim == 2:
        state[f'{there}{name}.bias'] = np.zeros(value.shape[1], start.dtype)
  for path, (name, kind) in _OTHERS.items():
    if path in flat:
      state[name] = leaves.to_torch(flat.pop(path), kind)
  if flat:
    raise ValueError(
      f"{sorted(flat)[:10]} have no counterpart in Hugging Face's ImageGPT"
      + _CLASSES * ('class_head/kernel' in flat)
      + ': write this model as a run (--to=workdir)'
    )
  return {name: np.ascontiguousarray(value) for name, value in state.items()}


def sizes(
  flat: Mapping[str, Any], told: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Returns the fields of the model that has these leaves.

  Args:
    flat: arrays or shapes by path.
    told: further fields of the model, which shapes do not tell.

  Raises:
    KeyError, ValueError: if leaves are missing.
  """
  shapes = {k: tuple(getattr(x, 'shape', x)) for k, x in flat.items()}
  num_colors, width = shapes['color_embedding']
  fields = dict(
    kind='igpt',
    num_colors=num_colors,
    num_positions=shapes['position_embedding'][0],
    hidden_size=width,
    num_layers=leaves.count(shapes, r'block_(\d+)/'),
    num_heads=shapes['block_0/attention/query/kernel'][1],
    **({} if 'start_token' in shapes else {'causal': False}),
  )
  return {**fields, **(told or {})}


def defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Returns further fields of a model that is in no table of sizes."""
  del fields
  return {}


def describe(fields: Mapping[str, Any]) -> str:
  """Names a model by its fields, see `sizes`."""
  return (
    f'iGPT of {fields["num_layers"]} layers, width {fields["hidden_size"]}, '
    f'{fields["num_positions"]} pixels of {fields["num_colors"]} colours'
  )
