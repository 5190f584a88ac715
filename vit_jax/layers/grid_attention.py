"""Attention patterns: which patches of the grid a patch attends to.

`config.model.transformer.attention_pattern` selects one:

  global  all tokens
  local   the attention_window x attention_window patches around it, and the tokens
          before the patches, which attend to all tokens themselves; a mask
  axial   the patches of its row, then those of its column: a layer is a block along
          rows and a block along columns, each with an MLP (arXiv 2010.11929, D.6)

Shapes: B images, h x w patches, N tokens, the patches last, D width of a token, E of a
head.
"""

import jax.numpy as jnp

from vit_jax.layers import patches as patches_lib

PATTERNS = ('global', 'local', 'axial')
_PLACE = 'config.model.transformer'


def local_mask(grid: tuple[int, int], window: int, tokens: int):
  """Returns which token may attend to which in local attention, bool [N, N]."""
  places = jnp.arange(tokens) - (tokens - grid[0] * grid[1])  # Negative: no patch.
  near = (places < 0)[:, None] | (places < 0)
  far = [abs(x[:, None] - x) > window // 2 for x in jnp.divmod(places, grid[1])]
  return near | ~(far[0] | far[1])


def masked(pattern, window, grid, tokens, mask, *, relative, only_first):
  """Returns `mask`, of all layers or None, combined with the one of local attention.

  `relative` is whether there are relative position embeddings, and `only_first` whether
  the last layer computes one token. Raises ValueError for what a pattern lacks.
  """
  patches_lib.check_choice('attention_pattern', pattern, PATTERNS, _PLACE)
  if pattern == 'global':
    return mask
  problem, patches = None, tokens + 1 if grid is None else grid[0] * grid[1]
  if patches > tokens:
    problem = (
      'needs the grid of all patches: pass encode() tokens [batch, height, width, D], '
      'from embed(..., flat=False), and drop none'
    )
  elif pattern == 'local' and window % 2 == 0:
    problem = f'needs a centre, attention_window={window} has none: use an odd number'
  elif pattern == 'axial' and (patches < tokens or only_first):
    problem = (
      "has no row or column for other tokens: use classifier='gap', 'map' or "
      "'unpooled', registers=0 (config.model) and only_first=False"
    )
  elif pattern == 'axial' and (relative or mask is not None):
    name = 'a relative position_embedding' if relative else 'masks, as of canvases'
    problem = f"does not support {name}: use 'local' or 'global'"
  if problem:
    raise ValueError(
      f"attention_pattern='{pattern}' {problem} ({_PLACE}.attention_pattern)"
    )
  near = local_mask(grid, window, tokens) if pattern == 'local' else None
  return near if mask is None else mask & near


def along(axis: str | None, grid: tuple[int, int] | None, attend, x, angles=None):
  """Applies self-attention to each 'row' or 'column' of patches as an image of its own.

  `attend` maps tokens and the angles of rotary embeddings to tokens. Takes and returns
  patches [B, h*w, D]; `angles` are [h*w, E/2] or None. With `axis` None all tokens
  attend to each other.
  """
  if axis is None:
    return attend(x, angles=angles)
  turn = lambda x: x.swapaxes(1, 2) if axis == 'column' else x
  x = turn(x.reshape(-1, *grid, x.shape[-1]))  # [B, lines, length, D]
  if angles is not None:  # Angles that all tokens of a line share cancel out.
    angles = turn(angles.reshape(1, *grid, -1))[0, 0]  # [length, E/2]
  y = attend(x.reshape(-1, *x.shape[2:]), angles=angles)
  return turn(y.reshape(x.shape)).reshape(x.shape[0], -1, x.shape[-1])
