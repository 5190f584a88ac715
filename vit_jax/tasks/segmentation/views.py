"""What a model sees of an image at test time: sizes, windows and mirror images.

By default the model sees the whole image once, resized to its input. With
`config.task_options.window`, an image keeps its aspect ratio and its shorter side gets the
length of a window; windows slide over it by `stride` pixels, and the last one ends at the
edge of the image, as in mmsegmentation (slide_inference) and the evaluations of DINOv2 (arXiv
2304.07193) and DINOv3. Without a stride as few windows as possible lie evenly over the
longer side, as in the released evaluation of EoMT (arXiv 2503.19108). Mirror images
(`flips`) have windows at mirrored positions.

Shapes: B images on canvases, Y x X windows.
"""

from collections.abc import Callable, Sequence
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax.data.augmentation import resizing
from vit_jax.data.lazy import tf

_MOST_TIMES = 8  # A window may be as many times as large as training images.


class View(NamedTuple):
  """One size of an image, and the windows through which the model sees it.

  Sizes are (height, width).
  """

  side: tuple[int, int]  # Size of whole images; images with windows cover it.
  window: tuple[int, int]
  stride: tuple[int, int] | None  # None: as few windows as possible, evenly.
  is_whole: bool  # There is one window, the image squeezed to `side`.

  def extent(self, shape: Any) -> Any:
    """Returns the size of a resized image of a shape, int32 [2], as a tensor."""
    if self.is_whole:
      return tf.constant(self.side)
    return resizing.covering(shape, self.side)

  def counts(self, shapes: np.ndarray) -> tuple[int, int]:
    """Returns how many windows down and across suffice for images of shapes [n, 2]."""
    if self.is_whole:
      return 1, 1
    height, width = resizing.covering(shapes, self.side).numpy().max(axis=0).tolist()
    return self.num_windows(0, height), self.num_windows(1, width)

  def num_windows(self, axis: int, length: Any) -> Any:
    """Returns how many windows an image of a length needs along an axis."""
    window = self.window[axis]
    if self.stride is None:
      return -(-length // window)  # ceil(length / window)
    # 1 + ceil((length - window) / stride)
    return 1 - (window - length) // self.stride[axis]

  def canvas(self, counts: tuple[int, int]) -> tuple[int, int]:
    """Returns the size of the largest images for which `counts` windows suffice."""
    if self.stride is None:
      return counts[0] * self.window[0], counts[1] * self.window[1]
    height = self.window[0] + (counts[0] - 1) * self.stride[0]
    width = self.window[1] + (counts[1] - 1) * self.stride[1]
    return height, width

  def starts(
    self, axis: int, extent: jax.Array, count: int, flip: Any = False
  ) -> tuple[jax.Array, jax.Array]:
    """Returns where windows start along an axis, and which of them are in use.

    Args:
      axis: 0 or 1.
      extent: length of the image in pixels, int32 scalar.
      count: number of windows, at least as many as the image needs.
      flip: whether positions are mirrored, bool scalar.

    Returns:
      int32 [count] and bool [count].
    """
    number = jnp.arange(count)
    last = extent - self.window[axis]  # Start of the last window.
    num_used = self.num_windows(axis, extent)
    if self.stride is None:
      starts = number * last // jnp.maximum(num_used - 1, 1)
    else:
      starts = number * self.stride[axis]
    starts = jnp.minimum(starts, last)
    return jnp.where(flip, last - starts, starts), number < num_used


def make(
  options: ml_collections.ConfigDict,
  image_size: tuple[int, int],
  patch: tuple[int, int],
) -> tuple[View, ...]:
  """Returns the views of a run, one per scale.

  Args:
    options: `config.task_options`.
    image_size: size of training images in pixels.
    patch: size of a patch in pixels.

  Raises:
    ValueError: if windows leave gaps, are huge, or are not whole patches.
  """
  if options.window is None and options.stride is not None:
    raise ValueError(
      f'stride={options.stride} needs windows: set --config.task_options.window, such as '
      f'to {image_size[0]}'
    )
  window = _pair(options.window) or image_size
  stride = _pair(options.stride)
  if stride and (stride[0] > window[0] or stride[1] > window[1]):
    raise ValueError(
      f'stride={options.stride} leaves gaps between windows of {window}: use at most '
      f'{window} (--config.task_options.stride)'
    )
  largest = _MOST_TIMES * image_size[0], _MOST_TIMES * image_size[1]
  if window[0] > largest[0] or window[1] > largest[1]:
    raise ValueError(
      f'window={options.window} is more than {_MOST_TIMES} times the {image_size} pixels of '
      f'training images: use at most {largest} (--config.task_options.window)'
    )
  if window[0] % patch[0] or window[1] % patch[1]:
    raise ValueError(
      f'window={options.window} must be a multiple of the patch size, {patch} '
      '(--config.task_options.window)'
    )
  is_whole = options.window is None
  return tuple(_view(x, window, stride, patch, is_whole) for x in options.scales)


def _view(
  scale: float,
  window: tuple[int, int],
  stride: tuple[int, int] | None,
  patch: tuple[int, int],
  is_whole: bool,
) -> View:
  """Returns the view of one scale, of whole patches."""

  def scaled_side(axis: int) -> int:
    num_patches = max(1, round(scale * window[axis] / patch[axis]))
    return num_patches * patch[axis]

  side = scaled_side(0), scaled_side(1)
  if is_whole:
    return View(side, side, None, is_whole)
  height, width = min(side[0], window[0]), min(side[1], window[1])
  if stride is not None:
    down = max(1, stride[0] * height // window[0])
    across = max(1, stride[1] * width // window[1])
    stride = down, across
  return View(side, (height, width), stride, is_whole)


def _pair(size: int | Sequence[int] | None) -> tuple[int, int] | None:
  """Returns a size of the options as (height, width)."""
  if size is None:
    return None
  if isinstance(size, int):
    return size, size
  height, width = size
  return height, width


def outputs(
  model: Callable[[jax.Array], Any],
  images: jax.Array,
  extent: jax.Array,
  view: View,
  flips: bool,
) -> list[Any]:
  """Applies a model to all windows of images, one window of each image at a time.

  Args:
    model: maps images [B, *view.window, channels] to a tree of arrays [B, ...].
    images: on a canvas, float [B, H, W, channels].
    extent: height and width of each image on the canvas, int32 [B, 2].
    view: the view.
    flips: whether mirror images are computed too.

  Returns:
    The results, arrays [B, Y, X, ...]; with `flips` also those of the mirror images,
    which are mirror images themselves.
  """
  counts = view.num_windows(0, images.shape[1]), view.num_windows(1, images.shape[2])
  if counts == (1, 1) and not flips:
    return [jax.tree.map(lambda x: x[:, None, None], model(images))]

  def crop(image: jax.Array, size: jax.Array, index: jax.Array) -> jax.Array:
    corner = []
    for axis, is_mirrored in enumerate((False, index[2])):
      starts, _ = view.starts(axis, size[axis], counts[axis], is_mirrored)
      corner.append(starts[index[axis]])
    shape = (*view.window, image.shape[-1])
    window = jax.lax.dynamic_slice(image, (*corner, 0), shape)
    return jnp.where(index[2], window[:, ::-1], window)

  def compute(index: jax.Array) -> Any:
    return model(jax.vmap(crop, (0, 0, None))(images, extent, index))

  shape = (1 + flips, *counts)
  flip, row, column = jnp.indices(shape).reshape(3, -1)
  results = jax.lax.map(compute, jnp.stack([row, column, flip], axis=-1))

  def by_flip(x: jax.Array) -> jax.Array:
    x = x.reshape(*shape, *x.shape[1:])  # [flips, Y, X, B, ...]
    return jnp.moveaxis(x, 3, 1)  # [flips, B, Y, X, ...]

  results = jax.tree.map(by_flip, results)
  return [jax.tree.map(operator.itemgetter(i), results) for i in range(1 + flips)]
