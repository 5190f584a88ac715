"""Images of any shape on canvases of a few sizes, for detectors.

An image keeps its aspect ratio and is placed at the upper left of a canvas; the
rest of the canvas is padding. Accelerators compile a program for each size of
canvas, so there are few: the lengths of `config.pp.sides` form groups, each group
has a canvas, and all images of a step are of one group. A group is drawn with a
probability proportional to its number of lengths, and each image draws one of
them, so that all lengths are equally frequent.

The augmentation follows "End-to-End Object Detection with Transformers"
(arXiv 2005.12872, appendix A.4).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from vit_jax.data.augmentation import geometry
from vit_jax.data.lazy import tf

_GROUP, _IMAGE = 1, 2  # Folded into the seeds of different draws.


class Group(NamedTuple):
  """Lengths of the shorter side that share a canvas, in pixels."""

  sides: tuple[int, ...]  # Ascending.
  longest: int  # Greatest length of the longer side.
  canvas: tuple[int, int]  # Height and width.


def groups(pp: ml_collections.ConfigDict) -> tuple[Group, ...]:
  """Returns the groups of `config.pp.sides`, the smallest first.

  `pp.longest_side` limits the longer side in the group of the greatest lengths, and
  in proportion in the others. Canvases are squares, for images of both orientations.
  """
  sides = sorted(pp.sides)
  sides_of_groups = np.array_split(sides, min(pp.canvases, len(sides)))
  return tuple(_group(x.tolist(), max(sides), pp) for x in sides_of_groups)


def evaluation(pp: ml_collections.ConfigDict, side: int | None = None) -> Group:
  """Returns the group of the length used in evaluation, `pp.eval_side` or `side`."""
  return _group([side or pp.eval_side], pp.eval_side, pp)


def _group(sides: Sequence[int], greatest: int, pp: ml_collections.ConfigDict) -> Group:
  longest = max(1, pp.longest_side * sides[-1] // greatest)
  side = round_up(longest, pp.canvas_multiple)
  return Group(tuple(sides), longest, (side, side))


def round_up(length: Any, multiple: int) -> Any:
  """Rounds a length, or an array of them, up to a multiple."""
  return -(-length // multiple) * multiple


def group_at(
  step: 'tf.Tensor', seed: int, pp: ml_collections.ConfigDict
) -> 'tf.Tensor':
  """Returns the number of the group of a step, int32 scalar, by the arguments only."""
  key = tf.stack([tf.cast(seed, tf.int64), tf.cast(step, tf.int64)])
  key = tf.random.experimental.stateless_fold_in(key, _GROUP)
  side = _index(key, len(pp.sides))
  counts = [len(group.sides) for group in groups(pp)]
  group_of_side = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
  return tf.gather(group_of_side, side)


def _index(seed: 'tf.Tensor', count: Any) -> 'tf.Tensor':
  """Draws one of the numbers from 0 to count - 1."""
  return tf.random.stateless_uniform([], seed, 0, count, tf.int32)


def fitted(shape: 'tf.Tensor', side: Any, longest: Any) -> 'tf.Tensor':
  """Returns the size of images after resizing, int32 [..., 2], at least 1 x 1.

  The shorter side of `shape`, int [..., 2] or [..., 3], becomes `side`, unless the
  longer one would exceed `longest`. As in the released code of DETR
  (datasets/transforms.py), the shorter side is rounded and the longer one truncated,
  so that a very long image may exceed `longest` by a few pixels. If `side` and `longest`
  are equal, the longer side becomes `longest`, as in the released code of EoMT.
  """
  shape = tf.cast(tf.convert_to_tensor(shape)[..., :2], tf.float64)
  side, longest = tf.cast(side, tf.float64), tf.cast(longest, tf.float64)
  least = tf.reduce_min(shape, axis=-1, keepdims=True)
  most = tf.reduce_max(shape, axis=-1, keepdims=True)
  fills_square = side == longest
  side = tf.where(most / least * side > longest, tf.round(longest * least / most), side)
  side = tf.maximum(side, 1.0)
  size = tf.where(shape == least, side, tf.floor(side * shape / least))
  size = tf.where(fills_square & (shape == most), longest, size)
  return tf.cast(size, tf.int32)


def smallest(shapes: Any, group: Group, step: int) -> np.ndarray:
  """Returns the smallest canvases that hold images, int64 [..., 2].

  `shapes` is int [..., 2], heights and widths of the originals, and `group` the
  result of `evaluation`. The sides of a canvas are multiples of `step`.
  """
  sizes = fitted(shapes, group.sides[0], group.longest).numpy()
  sizes = sizes.clip(max=group.canvas)
  return round_up(sizes.astype(np.int64), step)


def sample(
  shape: 'tf.Tensor',
  seed: 'tf.Tensor',
  number: 'tf.Tensor',
  pp: ml_collections.ConfigDict,
) -> geometry.Geometry:
  """Draws the geometry of a training image (appendix A.4).

  The image is mirrored with probability 1/2. With probability 1/2 it is resized to
  a length of the group. Otherwise it is first resized to one of `pp.crop_sides`,
  then a part whose height and width are uniform in `pp.crop_range` (and within the
  image) is cropped and resized to a length of the group, both in one resizing.

  See geometry.sample; `number` is the number of the group, see `group_at`.
  """
  seed = tf.random.experimental.stateless_fold_in(seed, _IMAGE)
  seeds = tf.random.experimental.stateless_split(seed, 4)  # [4, 2]
  uncropped = geometry.whole(shape, (1, 1))
  window, extent = uncropped.window, uncropped.shape
  if pp.crop_sides:
    window, extent = tf.cond(
      _coin(seeds[0]),
      lambda: (window, extent),
      lambda: _crop(uncropped.shape, seeds[1], pp),
    )
  all_groups = groups(pp)
  counts = [len(group.sides) for group in all_groups]
  # Number of the first length of each group.
  first_sides = np.cumsum([0, *counts[:-1]]).astype(np.int32)
  side = tf.gather(first_sides, number) + _index(seeds[2], tf.gather(counts, number))
  longest = tf.gather([group.longest for group in all_groups], number)
  size = fitted(extent, tf.gather(sorted(pp.sides), side), longest)
  size = tf.minimum(size, tf.gather([group.canvas for group in all_groups], number))
  flip = _coin(seeds[3]) if pp.flip else uncropped.flip
  return uncropped._replace(window=window, flip=flip, size=size)


def _coin(seed: 'tf.Tensor') -> 'tf.Tensor':
  return tf.random.stateless_uniform([], seed) < 0.5


def _crop(
  shape: 'tf.Tensor', seed: 'tf.Tensor', pp: ml_collections.ConfigDict
) -> tuple['tf.Tensor', 'tf.Tensor']:
  """Draws a window of the original, and its size in the image resized first."""
  seeds = tf.random.experimental.stateless_split(seed, 3)
  side = tf.gather(sorted(pp.crop_sides), _index(seeds[0], len(pp.crop_sides)))
  resized = tf.cast(fitted(shape, side, np.inf), tf.float32)  # [2]
  low, high = (tf.minimum(float(x), resized) for x in pp.crop_range)
  draws = tf.random.stateless_uniform([2], seeds[1])
  size = tf.floor(low + draws * (high - low + 1))
  draws = tf.random.stateless_uniform([2], seeds[2])
  begin = tf.floor(draws * (resized - size + 1))
  ratio = tf.cast(shape, tf.float32) / resized
  corner = tf.round(begin * ratio)
  extent = tf.maximum(tf.round((begin + size) * ratio) - corner, 1.0)
  corner = tf.minimum(corner, tf.cast(shape, tf.float32) - extent)
  window = tf.concat([corner, extent], axis=0)
  return tf.cast(window, tf.int32), tf.cast(size, tf.int32)


def by_size(sizes: np.ndarray) -> list[tuple[tuple[int, int], np.ndarray]]:
  """Groups images by the size [n, 2] of their canvas.

  Returns each (height, width), the largest first, with the numbers of its images.
  """
  different_sizes, size_of_image = np.unique(sizes, axis=0, return_inverse=True)
  groups = []
  for i, (height, width) in enumerate(different_sizes.tolist()):
    groups.append(((height, width), np.flatnonzero(size_of_image.reshape(-1) == i)))
  return groups[::-1]


def place(image: 'tf.Tensor', canvas: tuple[int, int]) -> dict[str, 'tf.Tensor']:
  """Puts an image [h, w, C] on a canvas.

  Returns a dict of `image`, [height, width, C], and `real`, bool [height, width],
  False for padding.
  """
  real = tf.ones(tf.shape(image)[:2], tf.bool)
  return {'image': pad(image, canvas), 'real': pad(real, canvas)}


def pad(x: 'tf.Tensor', canvas: tuple[int, int], axis: int = 0) -> 'tf.Tensor':
  """Puts images or masks at the upper left of a canvas of zeros.

  The axes `axis` and `axis + 1` of `x` are height and width.
  """
  padding = [[0, 0]] * x.shape.rank
  for i, side in enumerate(canvas, axis):
    padding[i] = [0, side - tf.shape(x)[i]]
  tf.debugging.assert_non_negative(
    padding,
    'an image has another size than in its annotations: correct them, or have the '
    'images checked (config.broken_images)',
  )
  return tf.pad(x, padding)
