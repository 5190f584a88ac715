"""Attention patterns: which patches of the grid a patch attends to.

`config.model.transformer.attention_pattern` selects one:

  global  all tokens
  local   the attention_window x attention_window patches around it, and the tokens
          before the patches, which attend to all tokens themselves; a mask
  axial   the patches of its row, then of its column: a layer is a block along
          rows and a block along columns, each with an MLP (arXiv 2010.11929, D.6)

Shapes: B images, h x w patches, N tokens, the patches last, D width of a token, E of a
head.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from vit_jax.layers.dtypes import Array


def local_mask(grid: tuple[int, int], window: int, tokens: int) -> Bool[Array, 'N N']:
  """Returns which token may attend to which in local attention."""
  rows, columns = grid
  patches = jnp.arange(tokens) - (tokens - rows * columns)  # Negative: another token.
  row, column = jnp.divmod(patches, columns)
  is_far = _distance(row) > window // 2
  is_far |= _distance(column) > window // 2
  is_other = patches < 0
  return is_other[:, None] | is_other | ~is_far


def _distance(places: Int[Array, ' N']) -> Int[Array, 'N N']:
  """Returns the distance of each two places."""
  return abs(places[:, None] - places)


def along(
  axis: str | None,
  grid: tuple[int, int] | None,
  attend: Callable[..., Array],
  x: Float[Array, 'B N D'],
  angles: Float[Array, 'N half_E'] | None = None,
) -> Float[Array, 'B _ D']:
  """Applies self-attention to each 'row' or 'column' of patches as an image of its own.

  `attend` maps tokens and the angles of rotary embeddings to tokens. Takes and returns
  patches [B, h*w, D]; `angles` are [h*w, E/2] or None. With `axis` None all tokens
  attend to each other.
  """
  if axis is None or grid is None:
    return attend(x, angles=angles)

  def turn(x: Float[Array, 'B _ _ F']) -> Float[Array, 'B _ _ F']:
    return x.swapaxes(1, 2) if axis == 'column' else x

  lines = turn(x.reshape(x.shape[0], *grid, x.shape[-1]))  # [B, lines, length, D]
  if angles is not None:  # Angles that all tokens of a line share cancel out.
    angles = turn(angles.reshape(1, *grid, -1))[0, 0]  # [length, E/2]
  y = attend(lines.reshape(-1, *lines.shape[2:]), angles=angles)
  return turn(y.reshape(lines.shape)).reshape(x.shape)
