"""Boundary IoU: the IoU of pixels near the boundaries of classes (arXiv 2103.16562).

The boundary region of a class consists of the pixels that an erosion of the class by d
pixels, in squares, removes; d is 2 % of the diagonal of the image, rounded, and at least
1. So a pixel is in the region of its class unless the square of 2 d + 1 pixels around it
lies in the image and has that class only. Such a square has no edges between pixels of
different classes, and edges are counted for all classes at once.

Shapes: B images on canvases of H x W pixels, C classes.
"""

import jax
import jax.numpy as jnp

# The diagonal divided by this number is d (section 4.1).
_DIVISOR = 50


def boundaries(classes: jax.Array, size: jax.Array) -> jax.Array:
  """Returns which pixels are in the boundary regions of their classes, bool [H, W].

  Args:
    classes: int32 [H, W].
    size: height and width of the image on the canvas, int32 [2].
  """
  diagonal = jnp.sqrt((size.astype(jnp.float32) ** 2).sum())
  distance = jnp.maximum(1, jnp.round(diagonal / _DIVISOR)).astype(jnp.int32)
  is_edge_down = jnp.pad(classes[1:] != classes[:-1], ((0, 1), (0, 0)))
  is_edge_right = jnp.pad(classes[:, 1:] != classes[:, :-1], ((0, 0), (0, 1)))
  first, last, reaches_outside = [], [], []
  for axis in (0, 1):
    position = jnp.arange(classes.shape[axis])
    first.append(position - distance)
    last.append(position + distance)
    reaches_outside.append((first[axis] < 0) | (last[axis] >= size[axis]))
  # The last pixel of a square has no edge with a later one of the same square.
  num_edges = _sums(is_edge_down, (first[0], last[0]), (first[1], last[1] + 1))
  num_edges += _sums(is_edge_right, (first[0], last[0] + 1), (first[1], last[1]))
  return (num_edges > 0) | reaches_outside[0][:, None] | reaches_outside[1]


def _sums(
  values: jax.Array,
  rows: tuple[jax.Array, jax.Array],
  columns: tuple[jax.Array, jax.Array],
) -> jax.Array:
  """Sums values [H, W] over a rectangle per pixel, from first to before last: [H, W]."""
  sums = jnp.pad(values.astype(jnp.int32).cumsum(axis=0), ((1, 0), (0, 0)))
  first, last = (x.clip(0, len(values)) for x in rows)
  sums = jnp.pad((sums[last] - sums[first]).cumsum(axis=1), ((0, 0), (1, 0)))
  first, last = (x.clip(0, values.shape[1]) for x in columns)
  return sums[:, last] - sums[:, first]


def counts(
  true: jax.Array, predicted: jax.Array, size: jax.Array, num_classes: int
) -> jax.Array:
  """Counts the pixels in boundary regions of each class, int32 [B, 3, C].

  These are the pixels in the true and the predicted region, in the true one, and in the
  predicted one. Takes classes, int32 [B, H, W]; pixels whose true class is negative, as
  beyond the image, do not count and are of no class in the prediction either.
  """

  def of_image(true: jax.Array, predicted: jax.Array, size: jax.Array) -> jax.Array:
    is_counted = true >= 0
    predicted = jnp.where(is_counted, predicted, -1)
    is_true = boundaries(true, size) & is_counted
    is_predicted = boundaries(predicted, size) & is_counted
    is_shared = is_true & is_predicted & (true == predicted)

    def count(classes: jax.Array, mask: jax.Array) -> jax.Array:
      numbers = jnp.where(mask, classes, num_classes)
      return jnp.bincount(numbers.ravel(), length=num_classes + 1)[:-1]

    return jnp.stack(
      [count(true, is_shared), count(true, is_true), count(predicted, is_predicted)]
    )

  return jax.vmap(of_image)(true, predicted, size)
