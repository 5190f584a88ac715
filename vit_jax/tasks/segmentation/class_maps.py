"""The class of each pixel of an image of any size, from scores on a grid.

Scores of windows are enlarged to their pixels, averaged where windows overlap, and
resized to the original height and width of the image, all bilinearly. So a score is a sum
of products with the weights of rows and of columns, see `_weights`. The class of a pixel
is that of the greatest score, or of the greatest mean probability over several views.
Images of several sizes share a canvas, whose upper left each fills, so that a program is
compiled for each canvas only.

Shapes: B images, Y x X windows with scores on h x w cells, canvas of H x W pixels, C
classes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.distributed import sharding
from vit_jax.tasks.segmentation import views

_SCORES = 2**24  # Scores of pixels at a time: those of a large image take gigabytes.


class ViewOutputs(NamedTuple):
  """What a model returned for the windows of a view."""

  outputs: Any  # Tree of arrays [B, Y, X, ...].
  extent: jax.Array  # Height and width of the resized images, int32 [B, 2].
  view: views.View
  flip: bool  # Whether the windows are mirrored.


def class_maps(
  head: Any,
  view_outputs: Sequence[ViewOutputs],
  size: jax.Array,
  canvas: tuple[int, int],
) -> jax.Array:
  """Returns the class of each pixel, int32 [B, H, W].

  Args:
    head: the head of the model, a segment_semantic.Head.
    view_outputs: what the model returned for each view.
    size: height and width of each image on the canvas, int32 [B, 2]; pixels beyond them
      repeat its edge.
    canvas: (H, W).
  """

  def classes(pixels: list[jax.Array]) -> jax.Array:
    return _best(head, pixels).argmax(axis=-1).astype(jnp.int32)

  return _reduce(classes, head, view_outputs, size, canvas)


def classes_and_losses(
  head: Any,
  view_outputs: Sequence[ViewOutputs],
  size: jax.Array,
  truth: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns `class_maps`, and sum and weight of the cross-entropy, float32 [B, 2].

  `truth` are the classes of the pixels, int32 [B, H, W], negative where they do not count.
  """

  def classes_and_loss(
    pixels: list[jax.Array], truth: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    scores = _best(head, pixels)
    logits = head.logits(scores) if len(pixels) == 1 else scores
    log_probabilities = jax.nn.log_softmax(logits)
    labels = jnp.maximum(truth, 0)[..., None]
    losses = -jnp.take_along_axis(log_probabilities, labels, axis=-1)[..., 0]
    is_counted = truth >= 0
    sums = jnp.stack([jnp.where(is_counted, losses, 0.0), is_counted], axis=-1)
    return scores.argmax(axis=-1).astype(jnp.int32), sums.sum(axis=1)  # [R, 2]

  maps, sums = _reduce(
    classes_and_loss, head, view_outputs, size, truth.shape[1:], truth
  )
  return maps, sums.sum(axis=1)


def _best(head: Any, pixels: list[jax.Array]) -> jax.Array:
  """Returns the scores of one view, or logarithms of mean probabilities of several."""
  if len(pixels) == 1:
    return pixels[0]
  logarithms = [jax.nn.log_softmax(head.logits(x)) for x in pixels]
  total = logarithms[0]
  for x in logarithms[1:]:
    total = jnp.logaddexp(total, x)
  return total - jnp.log(len(pixels))


def _reduce(
  function: Callable[..., Any],
  head: Any,
  view_outputs: Sequence[ViewOutputs],
  size: jax.Array,
  canvas: tuple[int, int],
  *maps: jax.Array,
) -> Any:
  """Applies a function to the scores of pixels, image by image and some rows at a time.

  It maps scores [R, W, C] of each view, and rows [R, W] of each map [B, H, W], to a tree
  of arrays [R, ...]. Returns arrays [B, H, ...].
  """
  kinds = [(x.view, x.flip) for x in view_outputs]
  arrays = [(x.outputs, x.extent) for x in view_outputs]

  def of_image(image: tuple[Any, ...]) -> Any:
    size, arrays, *maps = image
    grids: list[jax.Array] = []
    rows: list[jax.Array] = []
    columns: list[jax.Array] = []
    for (outputs, extent), (view, flip) in zip(arrays, kinds):
      scores = _window_scores(head, outputs, view)  # [Y, X, h, w, C]
      scores = scores[:, :, :, ::-1] if flip else scores
      y, x, h, w, _ = scores.shape
      grids.append(scores.swapaxes(1, 2).reshape(y * h, x * w, -1))
      for axis, weights, shape in ((0, rows, (y, h)), (1, columns, (x, w))):
        first, is_used = view.starts(axis, extent[axis], shape[0], flip and axis == 1)
        windows = _Windows(first, is_used, view.window[axis], shape[1])
        weights.append(_weights(canvas[axis], size[axis], extent[axis], windows))
    num_classes = grids[0].shape[-1]
    count = max(1, min(canvas[0], _SCORES // (canvas[1] * num_classes)))
    num_blocks = -(-canvas[0] // count)

    def blocks(x: jax.Array) -> jax.Array:
      padding = ((0, num_blocks * count - canvas[0]), (0, 0))
      return jnp.pad(x, padding).reshape(num_blocks, count, -1)

    def of_block(block: tuple[Any, ...]) -> Any:
      rows, maps = block
      pixels = []
      for grid, row_weights, column_weights in zip(grids, rows, columns):
        lines = jnp.einsum('ri,ijc->rjc', row_weights, grid, precision='highest')
        pixels.append(
          jnp.einsum('xj,rjc->rxc', column_weights, lines, precision='highest')
        )
      return function(pixels, *maps)

    operands = [blocks(x) for x in rows], [blocks(x) for x in maps]
    results = jax.lax.map(of_block, operands)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: canvas[0]], results)

  def of_rows(*rows: Any) -> Any:
    return jax.lax.map(of_image, rows)

  return sharding.shard_map_rows(of_rows, size, arrays, *maps)


def _window_scores(head: Any, outputs: Any, view: views.View) -> jax.Array:
  """Returns scores [Y, X, h, w, C] of the windows of an image, one after the other."""
  counts = jax.tree.leaves(outputs)[0].shape[:2]
  flat = jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[2:]), outputs)
  scores = jax.lax.map(lambda x: head.scores(x, view.window)[0], flat)
  return scores.astype(jnp.float32).reshape(*counts, *scores.shape[1:])


class _Windows(NamedTuple):
  """Windows along an axis."""

  starts: jax.Array  # In pixels of the resized image, int32 [windows].
  is_used: jax.Array  # bool [windows]
  length: int  # In pixels.
  cells: int


def _weights(
  count: int, length: jax.Array, extent: jax.Array, windows: _Windows
) -> jax.Array:
  """Returns the weights of the cells of all windows for each pixel along an axis.

  The first `length` of `count` pixels are those of the image, which the windows cover
  after it is resized to `extent` pixels. Returns float32 [count, windows * cells].
  """
  position = (jnp.arange(count) + 0.5) * (extent / length) - 0.5
  position = position.clip(0, extent - 1)
  low = jnp.floor(position)
  # Two pixels of the resized image for each pixel.
  resized = jnp.stack([low, jnp.minimum(low + 1, extent - 1)])  # [2, count]
  shares = jnp.stack([1 - (position - low), position - low])
  offset = resized[..., None] - windows.starts  # [2, count, windows]
  covers = windows.is_used & (offset >= 0) & (offset < windows.length)
  window_weights = shares[..., None] * covers / covers.sum(axis=-1, keepdims=True)
  cells = windows.cells
  place = ((offset + 0.5) * (cells / windows.length) - 0.5).clip(0, cells - 1)
  cell_weights = jnp.maximum(0, 1 - abs(place[..., None] - jnp.arange(cells)))
  weights = (window_weights[..., None] * cell_weights).sum(axis=0)
  return weights.reshape(count, -1)


def confusion(true: jax.Array, predicted: jax.Array, num_classes: int) -> jax.Array:
  """Counts the pixels of each true and predicted class, int32 [B, C, C].

  Takes classes, int32 [B, H, W]; pixels whose true class is negative do not count.
  """

  def count(true: jax.Array, predicted: jax.Array) -> jax.Array:
    pairs = jnp.where(true >= 0, true * num_classes + predicted, num_classes**2)
    return jnp.bincount(pairs.ravel(), length=num_classes**2 + 1)[:-1]

  counts = jax.vmap(count)(true, predicted)
  return counts.reshape(-1, num_classes, num_classes)
