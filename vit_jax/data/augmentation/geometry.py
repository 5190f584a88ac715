"""Geometric augmentation of images, boxes and masks.

A `Geometry` holds the part of an image to crop, whether to mirror it, the angle
to rotate it by, and the size of the result. The same `Geometry` applies to an
image, to the boxes of its objects and to their masks, in this order:

  crop -> mirror -> resize -> rotate

Positions are (y, x) from the upper left, as in TFDS: an image of height h extends
from 0 to h, and the centre of its first pixel is at 0.5.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from vit_jax.data.augmentation import resizing
from vit_jax.data.images import images
from vit_jax.data.lazy import tf

# Boxes with less visible height or width, in pixels, are dropped: rounding in float32
# leaves about as much of a box that ends where the crop begins.
_NOTHING = 0.01
_CROPS = 10  # Further crops that `sample_varied` draws.
_REDRAW = 1 << 16  # Folded into their seeds.


class Geometry(NamedTuple):
  """Parameters of a geometric augmentation, tensors."""

  shape: Any  # int32 [2], height and width of the original in pixels.
  window: Any  # (y, x, height, width) of the crop in the original, int32 [4].
  flip: Any  # bool, whether to mirror left and right.
  angle: Any  # Rotates the result counter-clockwise, radians, float32; or None.
  # (height, width) of the result: two ints; or int32 [2], and then no angle.
  size: Any


def crop_size(pp: ml_collections.ConfigDict) -> tuple[int, int]:
  """Returns `config.pp.crop` as (height, width) in pixels."""
  return (pp.crop,) * 2 if isinstance(pp.crop, int) else tuple(pp.crop)


def whole(shape: 'tf.Tensor', size: Any) -> Geometry:
  """Returns the geometry that resizes the whole image, of a shape [2] or [3]."""
  shape = tf.convert_to_tensor(shape, tf.int32)[:2]
  size = size if tf.is_tensor(size) else tuple(size)
  window = tf.concat([[0, 0], shape], axis=0)
  return Geometry(shape, window, tf.constant(False), None, size)


def sample(
  shape: 'tf.Tensor', seed: 'tf.Tensor', pp: ml_collections.ConfigDict
) -> Geometry:
  """Draws the geometry of a training image.

  The crop is an Inception crop (arXiv 1409.4842, section 6) of TensorFlow's sizes: the
  aspect ratio is uniform, and so is the height among those that keep the limits of the
  area, so that small areas are more frequent than large ones. If `pp.crop_ratio` is
  None, the crop has the aspect ratio of the image and a uniform area, as if the image
  were resized to a square and then cropped (arXiv 1912.11370, section 3.3). All
  positions within the image are equally likely.

  `shape` is int32 [2] or [3], and `seed` int64 [2].
  """
  seeds = tf.random.experimental.stateless_split(seed, 3)  # [3, 2]
  geometry = whole(shape, crop_size(pp))
  if pp.crop_area is not None and pp.crop_ratio is None:
    window = _similar(geometry.shape, seeds[0], pp.crop_area)
    geometry = geometry._replace(window=window)
  elif pp.crop_area is not None:
    _, size, _ = tf.image.stateless_sample_distorted_bounding_box(
      tf.concat([geometry.shape, [3]], axis=0),
      bounding_boxes=tf.zeros([1, 0, 4]),
      seed=seeds[0],
      area_range=tuple(pp.crop_area),
      aspect_ratio_range=tuple(pp.crop_ratio),
      min_object_covered=0.0,
      max_attempts=100,
      use_image_if_no_bounding_boxes=True,
    )
    # TensorFlow's crops never reach the last row and column, so draw the position here.
    fold = tf.random.experimental.stateless_fold_in(seeds[0], 1)
    window = _place(geometry.shape, size[:2], tf.random.stateless_uniform([2], fold))
    geometry = geometry._replace(window=window)
  if pp.flip:
    # The same draw as in tf.image.stateless_random_flip_left_right.
    flip = tf.random.stateless_uniform([], seeds[1]) < 0.5
    geometry = geometry._replace(flip=flip)
  if pp.rotate:
    limit = pp.rotate * np.pi / 180
    angle = tf.random.stateless_uniform([], seeds[2], -limit, limit)
    geometry = geometry._replace(angle=angle)
  return geometry


def sample_varied(
  shape: 'tf.Tensor',
  seed: 'tf.Tensor',
  pp: ml_collections.ConfigDict,
  classes: 'tf.Tensor',
  max_share: float,
) -> Geometry:
  """Draws a geometry whose crop has at most a share of pixels of one class.

  As in mmsegmentation (RandomCrop's cat_max_ratio), the crop is drawn up to ten times
  more, and the last one is taken. `classes` are those of the pixels, int32 [height, width],
  negative for pixels that do not count. For the rest see `sample`.
  """
  geometry = sample(shape, seed, pp)

  def is_uniform(number: 'tf.Tensor', window: 'tf.Tensor') -> 'tf.Tensor':
    begin, extent = tf.unstack(tf.reshape(window, [2, 2]))
    counts = tf.math.bincount(tf.reshape(tf.slice(classes, begin, extent), [-1]) + 1)
    counts = tf.cast(counts[1:], tf.float32)
    largest = tf.reduce_max(tf.concat([counts, [0.0]], axis=0))
    is_varied = (largest > 0) & (largest <= max_share * tf.reduce_sum(counts))
    return (number < _CROPS) & ~is_varied

  def draw(number: 'tf.Tensor', window: 'tf.Tensor') -> tuple['tf.Tensor', 'tf.Tensor']:
    del window
    number += 1
    fold = tf.random.experimental.stateless_fold_in(seed, _REDRAW + number)
    return number, sample(shape, fold, pp).window

  _, window = tf.while_loop(is_uniform, draw, [tf.constant(0), geometry.window])
  return geometry._replace(window=window)


def _similar(
  shape: 'tf.Tensor', seed: 'tf.Tensor', crop_area: Sequence[float]
) -> 'tf.Tensor':
  """Draws a crop with the aspect ratio of the image."""
  draws = tf.random.stateless_uniform([3], seed)
  least, greatest = crop_area
  side = tf.sqrt(least + draws[0] * (greatest - least))
  size = tf.maximum(1.0, tf.round(side * tf.cast(shape, tf.float32)))
  return _place(shape, size, draws[1:])


def _place(shape: 'tf.Tensor', size: Any, draws: 'tf.Tensor') -> 'tf.Tensor':
  """Returns the window of a size, at a position by draws from [0, 1)."""
  free = tf.cast(shape, tf.float32) - tf.cast(size, tf.float32)
  begin = tf.cast(draws * (free + 1), tf.int32)
  return tf.concat([begin, tf.cast(size, tf.int32)], axis=0)


def fit(
  image: 'tf.Tensor',
  geometry: Geometry,
  interpolation: str = 'bilinear',
  antialias: bool = False,
  levels: bool = True,
) -> 'tf.Tensor':
  """Mirrors, resizes and rotates a cropped image [crop height, crop width, C].

  Returns float32 [*geometry.size, C]; uint8 images are scaled to [-1, 1]. Pixels
  that rotation brings in from outside repeat the edge. For `interpolation`, `antialias`
  and `levels` see resizing.resize.
  """
  # TensorFlow resizes float32 twice as fast as uint8.
  image = _flip(image, geometry, axis=1)
  if image.dtype == tf.uint8:
    image = images.to_float(image)
  image = resizing.resize(image, geometry.size, interpolation, antialias, levels)
  if geometry.angle is not None:
    image = _turn(image[None], geometry, 'BILINEAR', 'NEAREST')[0]
  return image


def to_boxes(boxes: 'tf.Tensor', geometry: Geometry) -> tuple['tf.Tensor', 'tf.Tensor']:
  """Applies a geometry to boxes.

  Args:
    boxes: float32 [n, 4], normalised (ymin, xmin, ymax, xmax) as in TFDS.
    geometry: the geometry.

  Returns:
    The boxes, clipped to the new image, upright around rotated boxes; and bool [n],
    False for boxes outside the new image.
  """
  boxes = tf.convert_to_tensor(boxes, tf.float32)
  begin, extent = tf.unstack(tf.reshape(tf.cast(geometry.window, tf.float32), [2, 2]))
  corners = tf.reshape(boxes, [-1, 2, 2])  # [n, lower or upper corner, (y, x)]
  corners = corners * tf.cast(geometry.shape, tf.float32) - begin
  corners = tf.clip_by_value(corners / extent, 0.0, 1.0)
  y, x = corners[..., 0], corners[..., 1]  # [n, 2] each
  x = tf.where(geometry.flip, 1 - tf.reverse(x, [1]), x)
  size = tf.cast(geometry.size, tf.float32)
  is_visible = _visible(y, x, size)
  if geometry.angle is not None:
    # In pixels from the centre, where axes have the same unit.
    y = tf.gather((y - 0.5) * size[0], [0, 0, 1, 1], axis=1)  # [n, 4 corners]
    x = tf.gather((x - 0.5) * size[1], [0, 1, 0, 1], axis=1)
    cos, sin = tf.cos(geometry.angle), tf.sin(geometry.angle)
    y, x = cos * y - sin * x, sin * y + cos * x
    y = _range(y / size[0] + 0.5)
    x = _range(x / size[1] + 0.5)
    is_visible &= _visible(y, x, size)
  return tf.reshape(tf.stack([y, x], axis=-1), [-1, 4]), is_visible


def _range(values: 'tf.Tensor') -> 'tf.Tensor':
  """Returns minimum and maximum of values [n, 4], clipped to [0, 1]: [n, 2]."""
  ends = tf.reduce_min(values, axis=1), tf.reduce_max(values, axis=1)
  return tf.clip_by_value(tf.stack(ends, axis=1), 0.0, 1.0)


def _visible(y: 'tf.Tensor', x: 'tf.Tensor', size: Any) -> 'tf.Tensor':
  """Returns bool [n]: whether boxes from y[:, 0] to y[:, 1], and so in x, are visible."""
  height = (y[:, 1] - y[:, 0]) * size[0]
  width = (x[:, 1] - x[:, 0]) * size[1]
  return (height > _NOTHING) & (width > _NOTHING)


def to_masks(masks: 'tf.Tensor', geometry: Geometry) -> 'tf.Tensor':
  """Applies a geometry to masks, with nearest-neighbour interpolation.

  Masks are uint8, int32 or bool [n, *geometry.shape], and become [n, *geometry.size]; 0
  where rotation brings in pixels from outside.
  """
  masks = tf.convert_to_tensor(masks)
  begin, extent = tf.unstack(tf.reshape(geometry.window, [2, 2]))
  numbers = tf.cast(masks, tf.uint8) if masks.dtype == tf.bool else masks
  pixels = tf.slice(numbers, [0, *tf.unstack(begin)], [-1, *tf.unstack(extent)])
  pixels = _flip(pixels, geometry, axis=2)[..., None]
  pixels = tf.image.resize(pixels, geometry.size, method='nearest')
  if geometry.angle is not None:
    pixels = _turn(pixels, geometry, 'NEAREST', 'CONSTANT')
  return tf.cast(pixels[..., 0], masks.dtype)


def rotation(angle: 'tf.Tensor', height: int, width: int) -> 'tf.Tensor':
  """Returns the transform that rotates an image about its centre, float32 [8].

  It maps indices of a new pixel to those of the old one, as
  tf.raw_ops.ImageProjectiveTransformV3 takes it; `angle` is counter-clockwise.
  """
  cos, sin = tf.cos(angle), tf.sin(angle)
  h, w = height - 1, width - 1
  dx = (w - (cos * w - sin * h)) / 2
  dy = (h - (sin * w + cos * h)) / 2
  return tf.stack([cos, -sin, dx, sin, cos, dy, 0.0, 0.0])


def _flip(pixels: 'tf.Tensor', geometry: Geometry, axis: int) -> 'tf.Tensor':
  return tf.cond(geometry.flip, lambda: tf.reverse(pixels, [axis]), lambda: pixels)


def _turn(
  batch: 'tf.Tensor', geometry: Geometry, interpolation: str, fill_mode: str
) -> 'tf.Tensor':
  return tf.raw_ops.ImageProjectiveTransformV3(
    images=batch,  # [n, *geometry.size, C]
    transforms=rotation(geometry.angle, *geometry.size)[None],
    output_shape=geometry.size,
    interpolation=interpolation,
    fill_mode=fill_mode,
    fill_value=0.0,
  )
