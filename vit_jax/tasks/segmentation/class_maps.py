"""The class of each pixel of an image of any size, from scores on a grid.

Scores of windows are enlarged to their pixels, averaged where windows overlap, and
resized to the original height and width of the image, all bilinearly. So the scores of
pixels are products of matrices: those of the cells, with the weights of rows and of
columns, see `_weights`. The class of a pixel is that of the greatest score, or of the
greatest mean probability over several views. Images of several sizes share a canvas,
whose upper left corner each fills, so that one program is compiled per canvas.

Shapes: B images, Y x X windows with scores on h x w cells, canvas of H x W pixels, C
classes.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.distributed import sharding
from vit_jax.tasks.segmentation import views

# Scores of pixels computed at a time: those of a large image take gigabytes.
_BLOCK_SCORES = 2**24


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
    head: the head of the model, a heads.Head.
    view_outputs: what the model returned for each view.
    size: height and width of each image on the canvas, int32 [B, 2]; pixels beyond them
      repeat its edge.
    canvas: (H, W).
  """

  def classes(pixels: list[jax.Array]) -> jax.Array:
    return _combined(head, pixels).argmax(axis=-1).astype(jnp.int32)

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
    scores = _combined(head, pixels)
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


def _combined(head: Any, pixels: list[jax.Array]) -> jax.Array:
  """Returns the scores of one view, or logarithms of mean probabilities of several."""
  if len(pixels) == 1:
    return pixels[0]
  log_probabilities = [jax.nn.log_softmax(head.logits(scores)) for scores in pixels]
  total = functools.reduce(jnp.logaddexp, log_probabilities)
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
    grids = []
    for (outputs, extent), (view, flip) in zip(arrays, kinds):
      x = ViewOutputs(outputs, extent, view, flip)
      grids.append(_grid(head, x, size, canvas))
    return _by_rows(function, grids, maps)

  def of_images(*images: Any) -> Any:
    return jax.lax.map(of_image, images)

  return sharding.shard_map_rows(of_images, size, arrays, *maps)


class _Grid(NamedTuple):
  """Scores of all windows of an image, and their weights for each pixel."""

  scores: jax.Array  # float32 [Y*h, X*w, C]
  rows: jax.Array  # float32 [H, Y*h]
  columns: jax.Array  # float32 [W, X*w]


def _by_rows(
  function: Callable[..., Any], grids: Sequence[_Grid], maps: Sequence[jax.Array]
) -> Any:
  """Applies the function of `_reduce` to an image; maps are [H, W]."""
  height, width = len(grids[0].rows), len(grids[0].columns)
  num_rows = _BLOCK_SCORES // (width * grids[0].scores.shape[-1])
  num_rows = max(1, min(height, num_rows))
  num_blocks = -(-height // num_rows)

  def blocks(x: jax.Array) -> jax.Array:
    padding = ((0, num_blocks * num_rows - height), (0, 0))
    return jnp.pad(x, padding).reshape(num_blocks, num_rows, -1)

  def of_block(block: tuple[Any, ...]) -> Any:
    rows, maps = block
    pixels = []
    for weights, grid in zip(rows, grids):
      lines = jnp.einsum('ri,ijc->rjc', weights, grid.scores, precision='highest')
      pixels.append(jnp.einsum('xj,rjc->rxc', grid.columns, lines, precision='highest'))
    return function(pixels, *maps)

  operands = [blocks(grid.rows) for grid in grids], [blocks(x) for x in maps]
  results = jax.lax.map(of_block, operands)
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:height], results)


def _grid(head: Any, x: ViewOutputs, size: jax.Array, canvas: tuple[int, int]) -> _Grid:
  """Returns the scores and weights of one view of an image."""
  counts = jax.tree.leaves(x.outputs)[0].shape[:2]
  windows = jax.tree.map(lambda leaf: leaf.reshape(-1, 1, *leaf.shape[2:]), x.outputs)
  # One window after the other, which saves memory.
  scores = jax.lax.map(lambda outputs: head.scores(outputs, x.view.window)[0], windows)
  scores = scores[:, :, ::-1] if x.flip else scores  # [Y*X, h, w, C]
  cells = scores.shape[1:3]
  weights = []
  for axis in (0, 1):
    starts, is_used = x.view.starts(
      axis, x.extent[axis], counts[axis], x.flip and axis == 1
    )
    windows_of_axis = _Windows(starts, is_used, x.view.window[axis], cells[axis])
    weights.append(_weights(canvas[axis], size[axis], x.extent[axis], windows_of_axis))
  scores = scores.astype(jnp.float32).reshape(*counts, *scores.shape[1:])
  down, across = weights
  scores = scores.swapaxes(1, 2).reshape(down.shape[1], across.shape[1], -1)
  return _Grid(scores, down, across)


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
  # The two pixels of the resized image around each pixel, and their weights.
  neighbours = jnp.stack([low, jnp.minimum(low + 1, extent - 1)])  # [2, count]
  neighbour_weights = jnp.stack([1 - (position - low), position - low])
  offset = neighbours[..., None] - windows.starts  # [2, count, windows]
  covers = windows.is_used & (offset >= 0) & (offset < windows.length)
  window_weights = neighbour_weights[..., None] * covers
  window_weights /= covers.sum(axis=-1, keepdims=True)
  cells = windows.cells
  cell = ((offset + 0.5) * (cells / windows.length) - 0.5).clip(0, cells - 1)
  cell_weights = jnp.maximum(0, 1 - abs(cell[..., None] - jnp.arange(cells)))
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
