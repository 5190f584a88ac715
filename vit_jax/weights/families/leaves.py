"""What all families share: tables of layers, their layouts, and the walk over them.

A table is a list of groups: where their layers are here, where elsewhere, and the
layers as rows. A number in braces counts layers: {0} from 0, {01} from 1 with two
digits. A group has as many layers as the arrays that are converted.

  ('Transformer/encoderblock_{0}/', 'blocks.{0}.', (
    ('LayerNorm_0', 'norm', 'norm1'),
    ('MlpBlock_0/Dense_0', 'dense', 'mlp.fc1'),
  ))

The kind of a row is either a kind of layer, whose kernel has its own layout here,

  conv   [h, w, in, out]            here, [out, in, h, w] in PyTorch
  pixel  [in, out]                  here, [out, in, 1, 1] in PyTorch
  dense  [in, out]                  here, [out, in] in PyTorch
  heads  [in, heads, size]          here, [heads * size, in] in PyTorch
         [heads, size] its bias     here, [heads * size] in PyTorch
  out    [heads, size, out]         here, [out, heads * size] in PyTorch
  norm   scale and bias             here, weight and bias in PyTorch
  frozen the same, and its statistics

or the layout of a single array:

  table  [rows, width]              in both
  rows   [1, rows, width]           here, [rows, width] in PyTorch
  token  [1, 1, width]              here, [width] in PyTorch
  deconv [h, w, in, out]            here, [in, out, h, w] in PyTorch
  scalar [1]                        here, [] in PyTorch
  same   the same in both

Conversions only transpose and reshape: they are exact in both directions.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
import re
from typing import Any, NamedTuple

from absl import logging
import flax.traverse_util
import numpy as np

from vit_jax.weights import arrays

Row = tuple[str, ...]  # Path, kind, name elsewhere; or several such names.
Group = tuple[str, str, tuple[Row, ...]]  # Prefix here, prefix elsewhere, rows.
Leaf = tuple[str, str, str]  # Path, layout, name elsewhere.
Shapes = Mapping[str, tuple[int, ...]]  # The shape of each array, by path.


class _Layout(NamedTuple):
  """Converts an array.

  Attributes:
    ndim: number of dimensions in PyTorch; 0: any.
    from_torch: from PyTorch's array and the number of heads to the array here.
    to_torch: the inverse.
  """

  ndim: int
  from_torch: Callable[[np.ndarray, Any], np.ndarray]
  to_torch: Callable[[np.ndarray], np.ndarray]


_LAYOUTS = {
  'conv': _Layout(
    4, lambda x, n: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1)
  ),
  'pixel': _Layout(4, lambda x, n: x[:, :, 0, 0].T, lambda x: x.T[..., None, None]),
  'dense': _Layout(2, lambda x, n: x.T, lambda x: x.T),
  'heads': _Layout(
    2,
    lambda x, n: x.T.reshape(x.shape[1], n, -1),
    lambda x: x.reshape(len(x), -1).T,
  ),
  'bias': _Layout(1, lambda x, n: x.reshape(n, -1), lambda x: x.reshape(-1)),
  'out': _Layout(
    2,
    lambda x, n: x.T.reshape(n, -1, len(x)),
    lambda x: x.reshape(-1, x.shape[-1]).T,
  ),
  'table': _Layout(2, lambda x, n: x, lambda x: x),
  'rows': _Layout(2, lambda x, n: x[None], lambda x: x[0]),
  'token': _Layout(1, lambda x, n: x[None, None], lambda x: x[0, 0]),
  'deconv': _Layout(
    4, lambda x, n: x.transpose(2, 3, 0, 1), lambda x: x.transpose(2, 3, 0, 1)
  ),
  'scalar': _Layout(0, lambda x, n: x.reshape(-1), lambda x: x.reshape(())),
  'same': _Layout(0, lambda x, n: x, lambda x: x),
}
_SINGLE = ('table', 'rows', 'token', 'deconv', 'scalar', 'same')
# Kind of a layer -> end of a leaf's path, its layout, end of its name.
_NORM = ('scale', 'same', 'weight'), ('bias', 'same', 'bias')
_STATISTICS = ('mean', 'same', 'running_mean'), ('var', 'same', 'running_var')
_LEAVES = {
  'norm': _NORM,
  'frozen': _NORM + _STATISTICS,
  'heads': (('kernel', 'heads', 'weight'), ('bias', 'bias', 'bias')),
}


class Naming(NamedTuple):
  """How a program names the arrays of a model.

  Attributes:
    kind: the program: 'timm', 'hf', ...
    model_name: the model, in words.
    groups: the table.
    marks: names, any of which shows that a state dict has this naming.
    old_names: (regex, replacement) from names of other versions to the table's.
    joined: parts of names of joined projections -> the parts that replace each.
    ignored: regex of the beginnings of names that this package has no use for.
    program: the program, in words.
    features: parts of other names -> what they belong to, for errors.
  """

  kind: str
  model_name: str
  groups: tuple[Group, ...]
  marks: tuple[str, ...] = ()
  old_names: tuple[tuple[str, str], ...] = ()
  joined: Mapping[str, tuple[str, ...]] = {}
  ignored: str | None = None
  program: str = ''
  features: Mapping[str, str] = {}

  def fits(self, names: Iterable[str]) -> bool:
    """Returns whether a state dict with these names has this naming."""
    names = {renamed(name, self.old_names) for name in names}
    return not names.isdisjoint(self.marks)


def column(rows: Iterable[Row], number: int) -> tuple[Row, ...]:
  """Selects one of the names elsewhere, counted from 0, in each row."""
  return tuple((path, kind, names[number]) for path, kind, *names in rows)


def attention(
  path: str,
  *names: str,
  ends: tuple[str, ...] = ('q_proj', 'k_proj', 'v_proj', 'out_proj'),
) -> tuple[Row, ...]:
  """Returns the rows of an attention layer: its path, its names elsewhere.

  `ends` are the names below these of the layers of queries, keys, values and outputs.
  """
  layers = (('query', 'heads'), ('key', 'heads'), ('value', 'heads'), ('out', 'out'))
  rows = []
  for (layer, kind), end in zip(layers, ends):
    names_of_layer = [f'{name}.{end}' for name in names]
    rows.append((f'{path}/{layer}', kind, *names_of_layer))
  return tuple(rows)


def numbers(prefix: str, names: Iterable[str]) -> list[tuple[int, ...]]:
  """Returns the numbers, from 0, of the layers whose names begin with a prefix.

  ValueError if some are missing. A prefix 'block{1}/unit{1}/' gives pairs.
  """
  head, brace, tail = prefix.partition('{')
  if not brace:
    return [()]
  first, _, tail = tail.partition('}')
  pattern = re.escape(head) + r'(\d+)' + re.escape(tail.partition('{')[0])
  present = set()
  for name in names:
    if match := re.match(pattern, name):
      present.add(int(match[1]))
  start = int(first)
  if present and (min(present) != start or max(present) != start + len(present) - 1):
    raise ValueError(
      f"the names '{head}N{tail}' are numbered from {min(present)} to {max(present)}, "
      f'but there are only {len(present)} of them: some are missing'
    )
  tuples = []
  for i in range(len(present)):
    number = str(i + start).zfill(len(first))
    for inner in numbers(f'{head}{number}{tail}', names):
      tuples.append((i, *inner))
  return tuples


def count(names: Iterable[str], prefix: str) -> int:
  """Counts the layers whose names begin with a prefix, see `numbers`."""
  return len(numbers(prefix, names))


def units(names: Iterable[str], prefix: str) -> tuple[int, ...]:
  """Returns the number of units in each stage of a ResNet, see `numbers`."""
  return tuple(collections.Counter(i for i, _ in numbers(prefix, names)).values())


def walk(
  groups: Iterable[Group], names: Iterable[str], by_path: bool
) -> Iterator[Leaf]:
  """Yields the leaves of a model.

  There are as many layers as `names` have, which are paths in this package if
  `by_path`, else names elsewhere.
  """
  for path_prefix, name_prefix, rows in groups:
    for indices in numbers(path_prefix if by_path else name_prefix, names):
      path_start = _numbered(path_prefix, indices)
      name_start = _numbered(name_prefix, indices)
      for row_path, kind, row_name in rows:
        path, name = path_start + row_path, name_start + row_name
        if kind in _SINGLE:
          yield path, kind, name
          continue
        affine = ('kernel', kind, 'weight'), ('bias', 'same', 'bias')
        for path_end, layout, name_end in _LEAVES.get(kind, affine):
          yield f'{path}/{path_end}', layout, f'{name}.{name_end}'


def _numbered(prefix: str, indices: Iterable[int]) -> str:
  """Replaces the numbers in braces."""
  remaining = iter(indices)

  def number(match: re.Match) -> str:
    first = match[1]
    return str(int(first) + next(remaining)).zfill(len(first))

  return re.sub(r'\{(\d+)\}', number, prefix)


def prepare(flat: dict[str, np.ndarray], naming: Naming) -> list[Leaf]:
  """Renames and splits the arrays of a state dict as its table has them.

  Args:
    flat: arrays by name, which are changed in place.
    naming: the table.

  Returns:
    The leaves.

  Raises:
    ValueError: if `flat` has other leaves.
  """
  rename(flat, naming.old_names)
  if naming.ignored:
    if ignored := sorted(filter(re.compile(naming.ignored).match, flat)):
      logging.warning('Ignored parameters: %s', arrays.join_names(ignored))
    for name in ignored:
      del flat[name]
  for joined, replacements in naming.joined.items():
    _split(flat, joined, replacements)
  table = list(walk(naming.groups, flat, by_path=False))
  table_names = {name for _, _, name in table}
  unknown = sorted(flat.keys() - table_names)
  if unknown:
    raise ValueError(
      f'these are not the weights of a {naming.model_name}, which lacks '
      f'{arrays.join_names(unknown)}{_feature(unknown, naming.features)}'
    )
  return table


def _feature(names: Iterable[str], features: Mapping[str, str]) -> str:
  """Returns in parentheses to which feature unknown names belong, or ''."""
  for part, feature in features.items():
    if any(part in name for name in names):
      return f' ({feature})'
  return ''


def load(
  flat: dict[str, np.ndarray],
  naming: Naming,
  num_heads: int | Callable[[str], int | None] | None,
) -> dict[str, np.ndarray]:
  """Converts the arrays of a state dict, which it empties; see `prepare`.

  `num_heads` is the number of attention heads, or a function of a leaf's path.
  """
  params = {}
  for path, layout, name in prepare(flat, naming):
    if name in flat:
      heads = num_heads(path) if callable(num_heads) else num_heads
      params[path] = _from_torch(flat.pop(name), path, layout, heads)
  return params


def dump(flat: Mapping[str, np.ndarray], naming: Naming) -> dict[str, np.ndarray]:
  """Converts arrays by path to a state dict."""
  state = {}
  unknown = set(flat)
  for path, layout, name in walk(naming.groups, flat, by_path=True):
    if path in flat:
      array = _LAYOUTS[layout].to_torch(np.asarray(flat[path]))
      state[name] = np.array(array, order='C')
      unknown.discard(path)
  if unknown:
    raise ValueError(
      f'{sorted(unknown)[:10]} have no counterpart in {naming.program}: write this '
      'model as a run (--to=workdir)'
    )
  for joined, replacements in naming.joined.items():
    _join(state, joined, replacements)
  return state


def rename(flat: dict[str, Any], table: Iterable[tuple[str, str]]) -> None:
  """Applies (regex, replacement) in order to all names, in place."""
  for name in list(flat):
    flat[renamed(name, table)] = flat.pop(name)


def renamed(name: str, table: Iterable[tuple[str, str]]) -> str:
  """Applies (regex, replacement) in order."""
  for pattern, replacement in table:
    name = re.sub(pattern, replacement, name)
  return name


# Ends of the paths of the kernels that read images, the first of which counts.
INPUT_KERNELS = ('conv_root/kernel', 'stem/kernel', 'embedding/kernel')


def channels(params: Mapping[str, Any]) -> int:
  """Returns the number of channels of the images of a model, from nested parameters."""
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  for root in INPUT_KERNELS:
    for path, leaf in flat.items():
      if path.endswith(root):
        return leaf.shape[2]
  raise KeyError('embedding/kernel')


def _from_torch(
  value: np.ndarray, path: str, layout: str, num_heads: int | None
) -> np.ndarray:
  """Converts one array of PyTorch; errors name its path."""
  ndim, convert, _ = _LAYOUTS[layout]
  if ndim and value.ndim != ndim:
    raise ValueError(
      f"'{path}' has the shape {value.shape} in the state dict: it must have "
      f'{ndim} dimensions'
    )
  if layout in ('heads', 'bias', 'out'):
    width = value.shape[1] if layout == 'out' else value.shape[0]
    if num_heads is None:
      raise ValueError(
        f'it does not say how many attention heads its model of width {width} has: '
        'pass num_heads (--num_heads), or put a config.json with this number into the '
        "same folder (Hugging Face's num_attention_heads, or num_heads in timm's "
        'model_args)'
      )
    if width % num_heads:
      raise ValueError(
        f'num_heads={num_heads} does not divide the width {width} of '
        f"'{path}': pass the number of heads of the model"
      )
  return np.ascontiguousarray(convert(value, num_heads))


def _split(
  flat: dict[str, np.ndarray], joined: str, replacements: tuple[str, ...]
) -> None:
  """Splits arrays of several layers in place; `replacements` replace `joined`."""
  for name in [name for name in flat if joined in name]:
    pieces = np.split(flat.pop(name), len(replacements))
    for replacement, piece in zip(replacements, pieces):
      flat[name.replace(joined, replacement)] = piece


def _join(
  state: dict[str, np.ndarray], joined: str, replacements: tuple[str, ...]
) -> None:
  """Joins what `_split` splits, in place."""
  first = replacements[0]
  for name in [name for name in state if first in name]:
    pieces = []
    for replacement in replacements:
      pieces.append(state.pop(name.replace(first, replacement)))
    state[name.replace(first, joined)] = np.concatenate(pieces)
