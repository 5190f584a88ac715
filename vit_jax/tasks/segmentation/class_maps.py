"""The class of each pixel of an image of any size, from scores on a grid.

Scores are enlarged to the original height and width of an image, bilinearly, and the class
of a pixel is that of the greatest score. Images of several sizes share a canvas, whose
upper left each fills, so that a program is compiled for each canvas only.

Shapes: B images, scores on h x w cells, canvas of H x W pixels, C classes.
"""

import jax
import jax.numpy as jnp

_ROWS = 64  # Rows of pixels at a time: all scores of a large image may take gigabytes.


def class_maps(
  scores: jax.Array, size: jax.Array, canvas: tuple[int, int]
) -> jax.Array:
  """Returns the class of each pixel, int32 [B, H, W].

  Args:
    scores: float [B, h, w, C].
    size: height and width of each image on the canvas, int32 [B, 2]; pixels beyond them
      repeat its edge.
    canvas: (H, W).
  """
  return jax.vmap(lambda x, y: _class_map(x, y, canvas))(scores, size)


def _class_map(
  scores: jax.Array, size: jax.Array, canvas: tuple[int, int]
) -> jax.Array:
  height, width = canvas
  scores = scores.astype(jnp.float32)
  count = -(-height // _ROWS) * _ROWS
  low, share = _positions(count, size[0], scores.shape[0])
  columns = _positions(width, size[1], scores.shape[1])

  def classes_of_rows(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
    lines = _interpolated(scores, *rows)  # [_ROWS, w, C]
    pixels = _interpolated(lines.swapaxes(0, 1), *columns)  # [W, _ROWS, C]
    return pixels.argmax(axis=-1).astype(jnp.int32).T

  blocks = low.reshape(-1, _ROWS), share.reshape(-1, _ROWS)
  return jax.lax.map(classes_of_rows, blocks).reshape(count, width)[:height]


def _positions(
  count: int, length: jax.Array, cells: int
) -> tuple[jax.Array, jax.Array]:
  """Returns where the centres of `count` pixels lie among cells.

  The first `length` pixels cover all cells. Returns the number of the cell below, int32
  [count], and the share of the next cell, float32 [count].
  """
  position = (jnp.arange(count) + 0.5) * (cells / length) - 0.5
  position = position.clip(0, cells - 1)
  low = jnp.floor(position)
  return low.astype(jnp.int32), position - low


def _interpolated(x: jax.Array, low: jax.Array, share: jax.Array) -> jax.Array:
  """Interpolates linearly along the first axis of [cells, ...]: [count, ...]."""
  high = jnp.minimum(low + 1, x.shape[0] - 1)
  share = share.reshape(-1, *[1] * (x.ndim - 1))
  return x[low] * (1 - share) + x[high] * share


def confusion(true: jax.Array, predicted: jax.Array, num_classes: int) -> jax.Array:
  """Counts the pixels of each true and predicted class, int32 [B, C, C].

  Takes classes, int32 [B, H, W]; pixels whose true class is negative do not count.
  """

  def count(true: jax.Array, predicted: jax.Array) -> jax.Array:
    pairs = jnp.where(true >= 0, true * num_classes + predicted, num_classes**2)
    return jnp.bincount(pairs.ravel(), length=num_classes**2 + 1)[:-1]

  counts = jax.vmap(count)(true, predicted)
  return counts.reshape(-1, num_classes, num_classes)
