"""Position embeddings: what they are, and which layers add them (T8, D.4).

`config.model.transformer.position_embedding` selects one:

  learned_1d  a learned vector for each token of the sequence (section 3.1)
  learned_2d  learned tables X and Y of width D/2, one row for each column and
              each row of the grid of patches: a patch adds (X, Y)
  sincos2d    sines and cosines of column and row in place of learned tables
              (MoCo v3, arXiv 2104.02057; as in big_vision)
  relative    a learned vector r of width E for each offset between the
              positions p of a query q and a key k: the logits of attention are
              q (k + r[p_q - p_k]) / sqrt(E), with the same r in all heads
              (arXiv 1803.02155)
  rope        rotary embeddings of the grid (DINOv3, arXiv 2508.10104): queries and
              keys of patches are rotated, in pairs of channels, by angles
              proportional to the row (the first quarter) and the column of the
              patch, with centres from -1 to 1; other tokens are not
  axial_rope  the same with the numbers of row and column, from 0, as angles of the
              fastest channels (arXiv 2403.13298, section 3.2). With `rope_grid`, the
              numbers are scaled to that grid (EVA-02, arXiv 2303.11331)
  learned_axial_rope
              learned_1d and axial_rope
  relative_bias
              a learned number for each head and each offset between the rows and
              columns of query and key is added to the logits, one number for each
              of class token to patch, patch to class token and class token to itself
              (BEiT, arXiv 2106.08254)
  none        nothing

The slowest channels of rotary embeddings are almost `rope_temperature` times slower
than the fastest.

`config.model.transformer.position_layers` selects where:

  stem    added before the first layer
  every   added before every layer, each with its own table
  shared  added before every layer, all with the same table

Relative embeddings and biases enter the attention of each layer, so for them there is
`every` and `shared`, and no `stem`. Rotary ones do too, but have no parameters: for
them `stem` stays as it is. Dropout follows the addition before the
first layer only.

The positions of `learned_1d` and `relative` are those in the sequence: the class
token, if there is one, and then the patches, row by row. The embeddings on a
grid add nothing to the class token, which has no place on the grid and is
learned itself.

A learned table belongs to one grid of patches, and resizing it to another one
(section 3.2) is part of loading weights. With `position_grid`, the table has that
grid, and is resized to the grid of each batch of images in the model. A model
then takes images of any size.

Shapes: B images, N tokens, h x w patches, D width of a token, E of a head.
"""

from collections.abc import Callable, Container, Mapping
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float
import numpy as np

from vit_jax.layers import dtypes, position_kinds
from vit_jax.layers.dtypes import Array

_TEMPERATURE = 10_000.0


def by_layer(
  make: Callable[[str], Array], layers: str, num_layers: int
) -> list[Array | None]:
  """Returns the table of each layer, or None where a layer has none.

  `make` makes a table of a name. Without layers, the stem still has its table.
  """
  if layers == 'every' and num_layers:
    return [make(f'posembed_{i}') for i in range(num_layers)]
  table = make('posembed_input')
  later = table if layers == 'shared' else None
  return [table] + [later] * (num_layers - 1)


def resize(table: dtypes.ArrayT, size: int, axis: int = 0) -> dtypes.ArrayT:
  """Resizes a table along an axis, linearly; its first and last rows stay.

  Two axes, one after the other, give what `scipy.ndimage.zoom(order=1)` does. A
  table of NumPy becomes float64, one of JAX float32, if its size changes.
  """
  old = table.shape[axis]
  if old == size:
    return table
  places = np.linspace(0, old - 1, size)[:, None]
  weights = np.maximum(0, 1 - abs(places - np.arange(old)))  # [size, old]
  if isinstance(table, np.ndarray):
    resized = np.tensordot(table, weights, axes=(axis, 1))
    return np.moveaxis(resized, -1, axis)
  weights = weights.astype(np.float32)
  precision = jax.lax.Precision.HIGHEST
  resized = jnp.tensordot(table, weights, axes=(axis, 1), precision=precision)
  return jnp.moveaxis(resized, -1, axis)


def resize_grid(
  table: dtypes.ArrayT, grid: tuple[int, int], new_grid: tuple[int, int]
) -> dtypes.ArrayT:
  """Resizes the table of a grid of patches; the rows of other tokens stay.

  The table is an array [1, N, D] of NumPy or JAX, whose last rows belong to the
  grid; grids are (height, width) in patches.
  """
  num_other = table.shape[1] - grid[0] * grid[1]
  patches = table[0, num_other:].reshape(*grid, -1)
  for axis, size in enumerate(new_grid):
    patches = resize(patches, size, axis)
  patches = patches.reshape(1, -1, table.shape[2])
  xp = np if isinstance(table, np.ndarray) else jnp
  return xp.concatenate([table[:, :num_other], patches], axis=1)


def resize_bicubic(
  table: np.ndarray,
  grid: tuple[int, int],
  new_grid: tuple[int, int],
  antialias: bool,
) -> np.ndarray:
  """Resizes the table of a grid of patches as PyTorch's `interpolate` does.

  The mode is 'bicubic' without aligned corners. For the rest see `resize_grid`;
  returns float64.
  """
  num_other = table.shape[1] - grid[0] * grid[1]
  patches = table[0, num_other:].reshape(*grid, -1)
  down = _bicubic(grid[0], new_grid[0], antialias)
  across = _bicubic(grid[1], new_grid[1], antialias)
  patches = np.einsum('ih,jw,hwd->ijd', down, across, patches, optimize=True)
  patches = patches.reshape(1, -1, table.shape[2])
  return np.concatenate([table[:, :num_other], patches], axis=1)


def _bicubic(old: int, new: int, antialias: bool) -> np.ndarray:
  """Returns the matrix [new, old] that resizes an axis with cubic convolution."""
  scale = max(old / new, 1.0) if antialias else 1.0
  a = -0.5 if antialias else -0.75
  centres = (np.arange(new) + 0.5) * old / new - 0.5
  first = -3 * math.ceil(scale)
  last = old + 3 * math.ceil(scale)
  places = np.arange(first, last)
  x = abs(centres[:, None] - places) / scale
  near = ((a + 2) * x - (a + 3)) * x**2 + 1
  far = ((x - 5) * x + 8) * x * a - 4 * a
  weights = np.where(x <= 1, near, np.where(x < 2, far, 0.0))
  if antialias:  # Only pixels of the table count.
    weights = weights[:, -first : old - first]
    return weights / weights.sum(1, keepdims=True)
  repeated = np.zeros([new, old])  # The edge is repeated outside.
  np.add.at(repeated.T, places.clip(0, old - 1), weights.T)
  return repeated


def sincos(count: int, width: int) -> np.ndarray:
  """Returns sines and cosines of positions along one axis.

  The frequencies are a geometric sequence from 1 to 1/10000, both included.
  Returns float64 [count, width], of which half are sines and half cosines.
  """
  frequencies = _TEMPERATURE ** -np.linspace(0, 1, width // 2)
  angles = np.arange(count)[:, None] * frequencies  # [count, width / 2]
  return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


class AddPositionEmbs(nn.Module):
  """Adds position embeddings to tokens (section 3.1; T8).

  `kind` is a name of the list above. `grid`, (h, w), is the number of patches (down,
  across), for embeddings on a grid and tables that are resized; `table_grid` is the
  grid of a learned table that is resized to `grid`, or None if the table has the grid
  of the tokens.
  """

  posemb_init: Any = nn.initializers.normal(stddev=0.02)
  param_dtype: Any = jnp.float32
  dtype: Any = jnp.float32
  kind: str = 'learned_1d'
  grid: tuple[int, int] | None = None
  table_grid: tuple[int, int] | None = None

  def __call__(self, inputs: Float[Array, 'B N D']) -> Float[Array, 'B N D']:
    """Adds the embeddings to tokens; see `table`."""
    table = self.table(inputs)
    inputs, table = nn.dtypes.promote_dtype(inputs, table, dtype=self.dtype)
    return inputs + table  # [B, N, D]

  @nn.compact
  def table(self, inputs: Float[Array, 'B N D']) -> Float[Array, '1 N D']:
    """Returns the embeddings of tokens.

    Raises ValueError if number or width of the tokens do not suit.
    """
    _, tokens, width = inputs.shape

    def learned(name: str, *shape: int) -> Float[Array, '...']:
      return self.param(name, self.posemb_init, shape, self.param_dtype)

    if self.kind == 'learned_1d' and self.table_grid is None:
      return learned('pos_embedding', 1, tokens, width)
    field = f"position_embedding='{self.kind}'"
    field += ' with position_grid' if self.table_grid else ''
    grid = checked_grid(field, self.grid, tokens)
    position_kinds.check_width(self.kind, width)
    height, across = grid
    rows, columns = self.table_grid or grid
    num_other = tokens - height * across  # 1 with a class token.
    if self.kind == 'learned_1d':
      table = learned('pos_embedding', 1, num_other + rows * columns, width)
      return resize_grid(table, (rows, columns), grid)
    if self.kind == 'learned_2d':
      x = resize(learned('x_embedding', columns, width // 2), across)
      y = resize(learned('y_embedding', rows, width // 2), height)
    else:
      x = jnp.asarray(sincos(across, width // 2), jnp.float32)
      y = jnp.asarray(sincos(height, width // 2), jnp.float32)
    x = jnp.broadcast_to(x, (height, *x.shape))
    y = jnp.broadcast_to(y[:, None], x.shape)
    table = jnp.concatenate([x, y], axis=-1).reshape(-1, width)  # [h*w, D]
    return jnp.pad(table, ((num_other, 0), (0, 0)))[None]


def checked_grid(
  field: str, grid: tuple[int, int] | None, tokens: int
) -> tuple[int, int]:
  """Returns the grid that a field of an encoder needs.

  ValueError if there is none, or it has more patches than there are tokens.
  """
  if grid is None:
    raise ValueError(
      f'{field} needs the grid of the patches: pass encode() tokens [batch, height, '
      'width, D], from embed(..., flat=False) (config.model.transformer)'
    )
  if grid[0] * grid[1] > tokens:
    raise ValueError(
      f'{tokens} tokens are fewer than the {grid[0]} x {grid[1]} '
      'patches of the grid: pass the grid of these tokens'
    )
  return grid


def rope_angles(
  grid: tuple[int, int] | None,
  tokens: int,
  head_dim: int,
  kind: str = 'rope',
  temperature: float = 100.0,
  rope_grid: tuple[int, int] | None = None,
) -> np.ndarray:
  """Returns the angles by which `rotate` turns tokens, float32 [N, E/2].

  `kind` is one of position_kinds.ROPES. The last h*w of N tokens are patches; the angles
  of others are 0. ValueError for fewer tokens, or a width E of a head that is not a
  multiple of 4.
  """
  grid = checked_grid(f"position_embedding='{kind}'", grid, tokens)
  if head_dim % 4:
    raise ValueError(
      f"position_embedding='{kind}' needs heads whose width is a multiple of 4, not "
      f'{head_dim} (config.model.transformer.num_heads)'
    )
  rows, columns = np.indices(grid)  # [h, w]
  if kind == 'rope':
    unit = 2 * np.pi
    rows = 2 * (rows + 0.5) / grid[0] - 1
    columns = 2 * (columns + 0.5) / grid[1] - 1
  else:
    unit = 1.0
    height, width = rope_grid or grid
    rows = rows * height / grid[0]
    columns = columns * width / grid[1]
  places = np.stack([rows, columns], axis=-1)  # [h, w, 2]
  frequencies = unit * temperature ** -np.linspace(0, 1, head_dim // 4, endpoint=False)
  angles = (places[..., None] * frequencies).reshape(-1, head_dim // 2)
  return np.pad(angles, ((tokens - len(angles), 0), (0, 0))).astype(np.float32)


def rotate(
  x: Float[Array, 'B N K E'], angles: Float[Array, 'N half_E']
) -> Float[Array, 'B N K E']:
  """Turns channels i and i + E/2 of a token by its angle i."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  sin = jnp.sin(angles)[:, None]  # [N, 1, E/2]
  cos = jnp.cos(angles)[:, None]
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)


def class_tokens(paths: Container[str], tower: str = '') -> int:
  """Returns how many tokens with positions precede the patches, by '/'-joined paths."""
  return sum(f'{tower}{name}' in paths for name in ('cls', 'dist'))


def first_table(
  flat: Mapping[str, Any], transformer: Mapping[str, Any], grid: tuple[int, int]
) -> Float[Array, '1 N D'] | None:
  """Returns what a Vision Transformer adds to tokens before its first layer.

  Takes its parameters by '/'-joined path, the fields of its encoder, and the
  number of patches (down, across). Returns [1, N, D], or None if it adds
  nothing.
  """
  layers = transformer.get('position_layers', 'stem')
  table_grid = transformer.get('position_grid')
  kind = position_kinds.table_kind(position_kinds.kind_of(transformer))
  if kind in ('none', *position_kinds.RELATIVE):
    return None
  name = 'posembed_0' if layers == 'every' else 'posembed_input'
  prefix = f'Transformer/{name}/'
  tables = {}
  for path, leaf in flat.items():
    if path.startswith(prefix):
      tables[path.removeprefix(prefix)] = leaf
  if not tables and kind != 'sincos2d':
    return None
  tokens = grid[0] * grid[1] + class_tokens(flat)
  inputs = jnp.zeros((1, tokens, *flat['embedding/bias'].shape))
  module = AddPositionEmbs(kind=kind, grid=tuple(grid), table_grid=table_grid)
  return module.apply({'params': tables}, inputs, method='table')


class RelativeEmbedding(nn.Module):
  """Holds one learned vector for each offset between two tokens (T8)."""

  init: Any = nn.initializers.normal(stddev=0.02)
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, tokens: int, head_dim: int) -> Float[Array, '2*{tokens}-1 E']:
    """Returns the table of the offsets 1 - N to N - 1."""
    shape = (2 * tokens - 1, head_dim)
    return self.param('relative_embedding', self.init, shape, self.param_dtype)


class RelativeBias(nn.Module):
  """Holds a number for each head and each offset on the grid (BEiT)."""

  init: Any = nn.initializers.zeros
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, grid: tuple[int, int] | None, tokens: int, num_heads: int
  ) -> Float[Array, 'K N N']:
    """Returns the biases of logits of each query and key.

    The last h*w of N tokens are patches. The table, [(2h - 1) (2w - 1) + 3, K], has the
    offsets row by row, and then class token to patch, patch to class token, and class
    token to class token.
    """
    grid = checked_grid("position_embedding='relative_bias'", grid, tokens)
    height, width = grid
    patches = height * width
    offsets = (2 * height - 1) * (2 * width - 1)
    shape = (offsets + 3, num_heads)
    table = self.param('relative_bias', self.init, shape, self.param_dtype)
    rows, columns = np.divmod(np.arange(patches), width)
    down = rows[:, None] - rows + height - 1  # [h*w, h*w]
    across = columns[:, None] - columns + width - 1
    first = tokens - patches
    places = np.pad(
      down * (2 * width - 1) + across, ((first, 0), (first, 0)), constant_values=offsets
    )  # [N, N]
    places[first:, :first] += 1
    places[:first, :first] += 2
    return jnp.moveaxis(table[places], -1, 0)
