"""What all families share: tables of leaves, their layouts, their names.

A row of a table is a layer: its path here, its kind, its name elsewhere. Its
kernel's layout there differs from that here:

  conv   [h, w, in, out]            here, [out, in, h, w] in PyTorch
  pixel  [in, out]                  here, [out, in, 1, 1] in PyTorch
  dense  [in, out]                  here, [out, in] in PyTorch
  heads  [in, heads, size]          here, [heads * size, in] in PyTorch
  bias   [heads, size]              here, [heads * size] in PyTorch
  out    [heads, size, out]         here, [out, heads * size] in PyTorch
  table  [rows, width]              in both
  rows   [1, rows, width]           here, [rows, width] in PyTorch
  token  [1, 1, width]              here, [width] in PyTorch
  scalar [1]                        here, [] in PyTorch
  same   the same in both

Conversions only transpose and reshape: they are exact in both directions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import re
import types
from typing import Any

import numpy as np

Leaf = tuple[str, str, str]  # Path, layout, name elsewhere.

# Layout -> dimensions in PyTorch (0: any), from there with so many heads, to there.
_LAYOUTS = {
  'conv': (
    4,
    lambda x, heads: x.transpose(2, 3, 1, 0),
    lambda x: x.transpose(3, 2, 0, 1),
  ),
  'pixel': (
    4,
    lambda x, heads: x[:, :, 0, 0].T,
    lambda x: x.T[..., None, None],
  ),
  'dense': (2, lambda x, heads: x.T, lambda x: x.T),
  'heads': (
    2,
    lambda x, heads: x.T.reshape(x.shape[1], heads, -1),
    lambda x: x.reshape(x.shape[0], -1).T,
  ),
  'bias': (1, lambda x, heads: x.reshape(heads, -1), lambda x: x.reshape(-1)),
  'out': (
    2,
    lambda x, heads: x.T.reshape(heads, -1, x.shape[0]),
    lambda x: x.reshape(-1, x.shape[-1]).T,
  ),
  'table': (2, lambda x, heads: x, lambda x: x),
  'rows': (2, lambda x, heads: x[None], lambda x: x[0]),
  'token': (1, lambda x, heads: x[None, None], lambda x: x[0, 0]),
  'scalar': (0, lambda x, heads: x.reshape(-1), lambda x: x.reshape(())),
  'same': (0, lambda x, heads: x, lambda x: x),
}
# Kind of a layer -> end of a leaf's path, its layout, end of its name.
_LEAVES = {
  'norm': (('scale', 'same', 'weight'), ('bias', 'same', 'bias')),
  'frozen': (
    ('scale', 'same', 'weight'),
    ('bias', 'same', 'bias'),
    ('mean', 'same', 'running_mean'),
    ('var', 'same', 'running_var'),
  ),
  'heads': (('kernel', 'heads', 'weight'), ('bias', 'bias', 'bias')),
}


def attention(path: str, *names: str) -> list[tuple[str, ...]]:
  """Returns the rows of an attention layer: its path, its names elsewhere."""
  ends = ('query', 'q_proj'), ('key', 'k_proj'), ('value', 'v_proj')
  return [
    *((f'{path}/{x}', 'heads', *(f'{n}.{y}' for n in names)) for x, y in ends),
    (f'{path}/out', 'out', *(f'{name}.out_proj' for name in names)),
  ]


def layers(
  table: Iterable[tuple[str, ...]], column: int = 2, here='', there=''
) -> Iterator[Leaf]:
  """Yields the leaves of a table's layers; their kind 'leaf' is a leaf alone.

  `column` is that of the names elsewhere; `here` and `there` begin the paths
  and the names.
  """
  for path, kind, *names in table:
    path, name = here + path, there + names[column - 2]
    if kind == 'leaf':
      yield path, 'same', name
      continue
    affine = ('kernel', kind, 'weight'), ('bias', 'same', 'bias')
    for end, layout, their_end in _LEAVES.get(kind, affine):
      yield f'{path}/{end}', layout, f'{name}.{their_end}'


def check(
  names: Iterable[str],
  table: Iterable[Leaf],
  what: str,
  features: Mapping[str, str] = types.MappingProxyType({}),
):
  """Raises ValueError if a state dict has arrays that a table does not name.

  Args:
    names: names of the arrays.
    table: the leaves of a model.
    what: the model, in words.
    features: parts of other names -> what they belong to, for the error.
  """
  others = sorted(set(names) - {name for _, _, name in table})
  if others:
    more = f' and {len(others) - 10} more' if len(others) > 10 else ''
    hints = (
      f' ({feature})'
      for part, feature in features.items()
      if any(part in name for name in others)
    )
    raise ValueError(
      f'these weights are not those of a {what}, which lacks '
      f'{", ".join(others[:10])}{more}{next(hints, "")}'
    )


def load(
  flat: dict[str, np.ndarray],
  table: Iterable[Leaf],
  num_heads: int | tuple[int | None, ...] | Callable[[str], int | None] | None,
  what: str,
  features: Mapping[str, str] = types.MappingProxyType({}),
) -> dict[str, np.ndarray]:
  """Converts the arrays of a state dict; for the errors see `check`.

  It takes them out of `flat`, so that no array is in memory twice. `num_heads`
  is the number of attention heads, of which the first counts, or a function of
  a leaf's path.
  """
  if isinstance(num_heads, tuple):
    num_heads = num_heads[0]
  table = [*table]
  check(flat, table, what, features)
  heads_of = num_heads if callable(num_heads) else lambda path: num_heads
  return {
    path: _from_torch(flat.pop(name), path, layout, heads_of(path))
    for path, layout, name in table
    if name in flat
  }


def dump(
  flat: Mapping[str, np.ndarray], table: Iterable[Leaf], where: str
) -> dict[str, np.ndarray]:
  """Converts arrays by path to a state dict of the program `where`."""
  flat, state = dict(flat), {}
  for path, layout, name in table:
    if path in flat:
      to_torch = _LAYOUTS[layout][2]
      state[name] = np.array(to_torch(np.asarray(flat.pop(path))), order='C')
  if flat:
    raise ValueError(
      f'{sorted(flat)[:10]} have no counterpart in {where}: write this model as '
      'a run (--to=workdir)'
    )
  return state


def rename(flat: dict[str, Any], table: Iterable[tuple[str, str]]):
  """Applies (regex, replacement) one after another to all names, in place."""
  for name in list(flat):
    flat[renamed(name, table)] = flat.pop(name)


def renamed(name: str, table: Iterable[tuple[str, str]]) -> str:
  """Applies (regex, replacement) one after another."""
  for pattern, replacement in table:
    name = re.sub(pattern, replacement, name)
  return name


def count(names: Iterable[str], pattern: str, first: int = 0) -> int:
  """Counts the layers, units or blocks in a list of names.

  The first group of `pattern`, matched at the beginning of each name, is the
  number of a layer; they count from `first`, and none may be missing.
  """
  found = {int(m[1]) for m in (re.match(pattern, name) for name in names) if m}
  if found and (min(found) != first or max(found) != first + len(found) - 1):
    shown = pattern.replace(r'(\d+)', 'N').replace('\\', '')
    raise ValueError(
      f"the names '{shown}' are numbered from {min(found)} to {max(found)}, but "
      f'there are only {len(found)} of them: some are missing'
    )
  return len(found)


def units(
  names: Iterable[str], pattern: str, first: int = 1, first_unit: int = 1
) -> tuple[int, ...]:
  """Returns the number of units in each stage of a ResNet.

  `pattern` has a group for the number of a stage and one for that of a unit,
  which count from `first` and `first_unit`; see `count`.
  """
  stages = range(first, first + count(names, pattern, first))
  of_stage = (pattern.replace(r'(\d+)', str(i), 1) for i in stages)
  return tuple(count(names, one, first_unit) for one in of_stage)


def channels(flat: Mapping[str, Any]) -> int:
  """Returns the number of channels of the images of a model with these leaves."""
  for root in ('conv_root/kernel', 'stem/kernel', 'embedding/kernel'):
    for path, leaf in flat.items():
      if path.endswith(root):
        return leaf.shape[2]
  raise KeyError('embedding/kernel')


def _from_torch(value, path, layout, num_heads) -> np.ndarray:
  """Converts one array of PyTorch; errors name its path."""
  dimensions, convert, _ = _LAYOUTS[layout]
  if dimensions and value.ndim != dimensions:
    raise ValueError(
      f"'{path}' has the shape {value.shape} in the state dict: it must have "
      f'{dimensions} dimensions'
    )
  if layout in ('heads', 'bias', 'out'):
    width = value.shape[1] if layout == 'out' else value.shape[0]
    if num_heads is None:
      raise ValueError(
        f'it does not say how many attention heads its model of width {width} '
        'has: put its config.json beside it, or give num_heads '
        '(--num_heads)'
      )
    if width % num_heads:
      raise ValueError(
        f'num_heads={num_heads} does not divide the width {width} of '
        f"'{path}': give the number of heads of the model"
      )
  return np.ascontiguousarray(convert(value, num_heads))


def split(flat: dict[str, np.ndarray], joined: str, parts: tuple[str, ...]):
  """Splits arrays that hold several layers along their first axis, in place.

  In the names of the layers, `parts` in order take the place of `joined`.
  """
  for name in [name for name in flat if joined in name]:
    value = flat.pop(name)
    if not value.ndim or len(value) % len(parts):
      raise ValueError(
        f"'{name}' of shape {value.shape} cannot be split into query, key and value"
      )
    for part, piece in zip(parts, np.split(value, len(parts))):
      flat[name.replace(joined, part)] = piece


def join(
  flat: Mapping[str, np.ndarray], joined: str, parts: tuple[str, ...]
) -> dict[str, np.ndarray]:
  """Joins what `split` splits."""
  first, *others = parts
  result = dict(flat)
  for name in flat:
    if first in name:
      pieces = [result.pop(name)]
      pieces += [result.pop(name.replace(first, part)) for part in others]
      result[name.replace(first, joined)] = np.concatenate(pieces)
  return result
