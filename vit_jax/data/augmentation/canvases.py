"""Images of any shape on canvases of a few sizes, for detectors.

An image keeps its ratio of height to width and lies at the upper left of a
canvas; the rest of the canvas is padding. Accelerators compile a program for
each size of canvas, so there are few: the lengths of `config.pp.sides` form
groups, each group has a canvas, and all images of a step are of one group. The
step is of a group with the group's share of the lengths, and an image draws a
length of the group, so that each image has each length equally often.

The augmentation is that of "End-to-End Object Detection with Transformers"
(arXiv 2005.12872, appendix A.4).
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from vit_jax.data.augmentation import geometry

# Numbers that make the seed of each draw its own.
_GROUP, _IMAGE = 1, 2


class Group(NamedTuple):
  """Lengths of the shorter side that share a canvas, in pixels."""

  sides: tuple[int, ...]  # Ascending.
  longest: int  # Greatest length of the longer side.
  canvas: tuple[int, int]  # Height and width.


def groups(pp) -> tuple[Group, ...]:
  """Returns the groups of `config.pp.sides`, the smallest first.

  The greatest lengths may have a longer side of `pp.longest_side`; smaller
  groups have a limit that is smaller in proportion. A canvas is a square that
  holds images of both orientations.
  """
  sides = sorted(pp.sides)
  parts = np.array_split(sides, min(pp.canvases, len(sides)))
  return tuple(_group(part.tolist(), max(sides), pp) for part in parts)


def evaluation(pp, side: int | None = None) -> Group:
  """Returns the only length of evaluation and its canvas.

  With a `side` other than `pp.eval_side` the greatest length of the longer side
  changes in proportion.
  """
  return _group([side or pp.eval_side], pp.eval_side, pp)


def _group(sides, greatest, pp) -> Group:
  longest = max(1, pp.longest_side * sides[-1] // greatest)
  side = round_up(longest, pp.canvas_multiple)
  return Group(tuple(sides), longest, (side, side))


def round_up(length, multiple: int):
  """Returns the least multiple that is not below a length, or each length."""
  return -(-length // multiple) * multiple


def group_at(step, seed: int, pp):
  """Returns the number of the group of a step, int32 scalar.

  All processes compute the same number, also after a restart.
  """
  key = tf.stack([tf.cast(seed, tf.int64), tf.cast(step, tf.int64)])
  key = tf.random.experimental.stateless_fold_in(key, _GROUP)
  drawn = _index(key, len(pp.sides))
  counts = [len(group.sides) for group in groups(pp)]
  return tf.gather(np.repeat(np.arange(len(counts), dtype=np.int32), counts), drawn)


def _index(seed, count):
  """Draws one of the numbers from 0 to count - 1."""
  return tf.random.stateless_uniform([], seed, 0, count, tf.int32)


def fitted(shape, side, longest):
  """Returns the size of images after resizing, int32 [..., 2], at least 1 x 1.

  As in the released code of DETR (datasets/transforms.py) the shorter side is
  rounded and the longer one is cut off to whole pixels, so that the longer side
  of a very long image may pass `longest` by some pixels.

  `shape` is int [..., 2] or [..., 3], height and width (and channels) of images,
  and the shorter side becomes `side` unless the longer one passes `longest`.
  """
  shape = tf.cast(tf.convert_to_tensor(shape)[..., :2], tf.float64)
  side, longest = tf.cast(side, tf.float64), tf.cast(longest, tf.float64)
  least = tf.reduce_min(shape, axis=-1, keepdims=True)
  most = tf.reduce_max(shape, axis=-1, keepdims=True)
  side = tf.where(most / least * side > longest, tf.round(longest * least / most), side)
  side = tf.maximum(side, 1.0)
  size = tf.where(shape == least, side, tf.floor(side * shape / least))
  return tf.cast(size, tf.int32)


def smallest(shapes, group: Group, step: int):
  """Returns the smallest canvases that hold images, int64 [..., 2].

  `shapes` is int [..., 2], heights and widths of the originals, and `group` the
  result of `evaluation`, whose canvas is the largest. The sides of a canvas are
  multiples of `step`.
  """
  sizes = fitted(shapes, group.sides[0], group.longest).numpy()
  sizes = sizes.clip(max=group.canvas)
  return round_up(sizes.astype(np.int64), step)


def sample(shape, seed, number, pp) -> geometry.Geometry:
  """Draws the geometry of a training image (appendix A.4).

  The image is mirrored with probability 1/2. With probability 1/2 the image is
  resized to a length of the group. Otherwise the image is first resized to one
  of `pp.crop_sides`, a part whose height and width are uniform in
  `pp.crop_range` (and within the image) is taken, and the part is resized to a
  length of the group. Here the image is resized only once.

  See geometry.sample; `number` is the number of the group, see `group_at`.
  """
  seed = tf.random.experimental.stateless_fold_in(seed, _IMAGE)
  seeds = tf.random.experimental.stateless_split(seed, 4)  # [4, 2]
  drawn = geometry.whole(shape, (1, 1))
  window, extent = drawn.window, drawn.shape
  if pp.crop_sides:
    window, extent = tf.cond(
      _coin(seeds[0]),
      lambda: (window, extent),
      lambda: _crop(drawn.shape, seeds[1], pp),
    )
  known = groups(pp)
  counts = [len(group.sides) for group in known]
  first = tf.gather(np.cumsum([0, *counts[:-1]]).astype(np.int32), number)
  place = first + _index(seeds[2], tf.gather(counts, number))
  longest = tf.gather([group.longest for group in known], number)
  size = fitted(extent, tf.gather(sorted(pp.sides), place), longest)
  size = tf.minimum(size, tf.gather([g.canvas for g in known], number))
  flip = _coin(seeds[3]) if pp.flip else drawn.flip
  return drawn._replace(window=window, flip=flip, size=size)


def _coin(seed):
  return tf.random.stateless_uniform([], seed) < 0.5


def _crop(shape, seed, pp):
  """Draws a part of an image.

  Returns (y, x, height, width) in pixels of the original, int32 [4]; and height
  and width of the part in the image that was resized first, int32 [2].
  """
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


def place(image, canvas: tuple[int, int]) -> dict:
  """Puts an image [h, w, C] on a canvas.

  Returns `image`, [height, width, C], and `real`, bool [height, width], False
  for padding, by name.
  """
  real = tf.ones(tf.shape(image)[:2], tf.bool)
  return {'image': pad(image, canvas), 'real': pad(real, canvas)}


def pad(x, canvas: tuple[int, int], axis: int = 0):
  """Puts images or masks at the upper left of a canvas of zeros.

  The axes `axis` and `axis + 1` of `x` are height and width.
  """
  missing = [[0, side - tf.shape(x)[axis + i]] for i, side in enumerate(canvas)]
  tf.debugging.assert_non_negative(
    missing,
    'an image has another size than its annotations: correct them, or let the '
    'images be checked (config.broken_images)',
  )
  rest = x.shape.rank - axis - 2
  return tf.pad(x, [[0, 0]] * axis + missing + [[0, 0]] * rest)
