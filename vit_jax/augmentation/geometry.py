"""Where the pixels of a training image come from, apart from the pixels.

A `Geometry` says which part of an image is taken, whether it is mirrored, by
how much it is turned, and to what size it is brought. The same one applies to
an image, to the boxes of its objects and to their masks, so that these stay on
what they mark:

  crop -> mirror -> resize -> turn

Positions are those of TFDS: (y, x) from the upper left, the edges of an image
of h pixels being at 0 and h, the middle of its first pixel at 0.5.
"""

from typing import Any
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from vit_jax.data import images

# A box of which less than this is left, in pixels of the new image, is gone:
# what two roundings of float32 leave of one that ends where the image begins.
_NOTHING = 0.01


class Geometry(NamedTuple):
  """What is done to an image, of whatever content.

  Attributes:
    shape: int32 [2], height and width of the original in pixels.
    y: int32 scalar, first row of the part that is taken, in the original.
    x: int32 scalar, first column of it.
    height: int32 scalar, rows that it has.
    width: int32 scalar, columns that it has.
    flip: bool scalar, whether left and right change places.
    angle: float32 scalar, radians by which the picture is turned, after it was
      resized, about its middle and to the left (x towards -y); None if it never
      is.
    size: (height, width) of the result in pixels, two ints.
  """

  shape: Any
  y: Any
  x: Any
  height: Any
  width: Any
  flip: Any
  angle: Any
  size: tuple[int, int]


def crop_size(pp) -> tuple[int, int]:
  """Returns `config.pp.crop` as (height, width) in pixels.

  Raises:
    ValueError: if it is neither a positive int nor a pair of them.
  """
  crop = pp.crop
  pair = (crop, crop) if isinstance(crop, int) else tuple(crop)
  if len(pair) != 2 or not all(isinstance(x, int) and x > 0 for x in pair):
    raise ValueError(
      f'crop={crop} must be a number of pixels or a pair (height, width) of '
      'them (config.pp.crop)'
    )
  return pair


def whole(shape, size: tuple[int, int]) -> Geometry:
  """Returns the geometry of evaluation: all of the image, squeezed to a size.

  Args:
    shape: int32 [2] or [3], height and width (and channels) of the original.
    size: (height, width) of the result in pixels.
  """
  shape = tf.convert_to_tensor(shape, tf.int32)[:2]
  zero = tf.constant(0)
  return Geometry(
    shape=shape,
    y=zero,
    x=zero,
    height=shape[0],
    width=shape[1],
    flip=tf.constant(False),
    angle=None,
    size=tuple(size),
  )


def sample(shape, seed, pp) -> Geometry:
  """Draws the geometry of a training image.

  The part is an Inception crop (arXiv 1409.4842, section 6): its share of the
  area and its shape are uniform between the limits of `pp`.

  Args:
    shape: int32 [2] or [3], height and width (and channels) of the original.
    seed: int64 [2]; all that is random follows from it.
    pp: `config.pp`; reads `crop`, `crop_area`, `crop_ratio`, `flip`, `rotate`.

  Raises:
    ValueError: if `pp.crop` is no size.
  """
  seeds = tf.random.experimental.stateless_split(seed, 3)  # [3, 2]
  geometry = whole(shape, crop_size(pp))
  if pp.crop_area is not None:
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
      tf.concat([geometry.shape, [3]], axis=0),
      bounding_boxes=tf.zeros([1, 0, 4]),
      seed=seeds[0],
      area_range=tuple(pp.crop_area),
      aspect_ratio_range=tuple(pp.crop_ratio),
      min_object_covered=0.0,
      max_attempts=100,
      use_image_if_no_bounding_boxes=True,
    )
    geometry = geometry._replace(
      y=begin[0], x=begin[1], height=size[0], width=size[1]
    )
  if pp.flip:
    # What tf.image.stateless_random_flip_left_right draws.
    flip = tf.random.stateless_uniform([], seeds[1]) < 0.5
    geometry = geometry._replace(flip=flip)
  if pp.rotate:
    limit = pp.rotate * np.pi / 180
    angle = tf.random.stateless_uniform([], seeds[2], -limit, limit)
    geometry = geometry._replace(angle=angle)
  return geometry


def snap(geometry: Geometry, ratio) -> Geometry:
  """Returns the geometry whose part begins and ends at multiples of a ratio.

  Args:
    geometry: of a part that is much larger.
    ratio: int32 scalar.
  """
  return geometry._replace(
    **{
      name: getattr(geometry, name) // ratio * ratio
      for name in ('y', 'x', 'height', 'width')
    }
  )


def window(geometry: Geometry, ratio=None):
  """Returns (y, x, height, width) of the part, int32 [4], as decoders take it.

  Args:
    geometry: of the original; of multiples of the ratio.
    ratio: int32 scalar, by which the decoded image is smaller; None: it is not.
  """
  found = [geometry.y, geometry.x, geometry.height, geometry.width]
  found = tf.stack(found)
  return found if ratio is None else found // ratio


def crop(image, geometry: Geometry):
  """Cuts the part that a geometry takes out of [height, width, C]."""
  return tf.slice(
    image,
    [geometry.y, geometry.x, 0],
    [geometry.height, geometry.width, -1],
  )


def fit(image, geometry: Geometry):
  """Does what follows the crop: mirrors, resizes and turns.

  Args:
    image: uint8 [geometry.height, geometry.width, C], what `crop` returns or a
      decoder that crops; or float32.
    geometry: what to do.

  Returns:
    float32 [*geometry.size, C]. uint8 is scaled to [-1, 1], float32 keeps its
    scale. What a turn brings into the picture repeats the pixels of its edge.
  """
  # In this order each step has the fewest bytes to touch. Resizing is done in
  # float32, where TensorFlow is twice as fast as on uint8.
  image = _flip(image, geometry, axis=1)
  if image.dtype == tf.uint8:
    image = images.to_float(image)
  image = tf.image.resize(image, geometry.size)
  if geometry.angle is not None:
    image = _turn(image[None], geometry, 'BILINEAR', 'NEAREST')[0]
  return image


def to_image(image, geometry: Geometry):
  """Applies a geometry to an image; see `fit` for what comes out.

  Args:
    image: uint8 or float32 [*geometry.shape, C].
    geometry: what to do.
  """
  return fit(crop(tf.convert_to_tensor(image), geometry), geometry)


def to_boxes(boxes, geometry: Geometry):
  """Applies a geometry to boxes.

  Of a box that is turned, the smallest upright one around it is taken.

  Args:
    boxes: float32 [n, 4], normalised (ymin, xmin, ymax, xmax) as TFDS has them:
      shares of the original's height and width.
    geometry: what to do.

  Returns:
    (boxes, kept): float32 [n, 4], normalised to the new image and clipped to
    it, and bool [n], False for those of which nothing is left in it.

  Raises:
    ValueError: if there are not four numbers a box.
  """
  boxes = tf.convert_to_tensor(boxes, tf.float32)
  if boxes.shape.rank != 2 or boxes.shape[-1] not in (4, None):
    raise ValueError(
      f'boxes have the shape {boxes.shape}: give [n, 4], (ymin, xmin, ymax, '
      'xmax) of each'
    )
  begin = tf.cast([geometry.y, geometry.x], tf.float32)
  extent = tf.cast([geometry.height, geometry.width], tf.float32)
  corners = tf.reshape(boxes, [-1, 2, 2])  # [n, lower or upper corner, (y, x)]
  corners = corners * tf.cast(geometry.shape, tf.float32) - begin
  corners = tf.clip_by_value(corners / extent, 0.0, 1.0)
  y, x = corners[..., 0], corners[..., 1]  # [n, 2] each
  x = tf.where(geometry.flip, 1 - tf.reverse(x, [1]), x)
  size = tf.constant(geometry.size, tf.float32)
  kept = _visible(y, x, size)
  if geometry.angle is not None:
    # From the middle, in pixels: in them angles are right angles.
    y, x = (y - 0.5) * size[0], (x - 0.5) * size[1]
    y, x = (
      tf.gather(y, [0, 0, 1, 1], axis=1),
      tf.gather(x, [0, 1, 0, 1], axis=1),
    )
    cos, sin = tf.cos(geometry.angle), tf.sin(geometry.angle)
    y, x = cos * y - sin * x, sin * y + cos * x  # [n, 4 corners] each
    y, x = y / size[0] + 0.5, x / size[1] + 0.5
    y, x = (
      tf.clip_by_value(
        tf.stack([tf.reduce_min(v, axis=1), tf.reduce_max(v, axis=1)], axis=1),
        0.0,
        1.0,
      )
      for v in (y, x)
    )
    kept = tf.logical_and(kept, _visible(y, x, size))
  return tf.reshape(tf.stack([y, x], axis=-1), [-1, 4]), kept


def _visible(y, x, size):
  """Says for boxes [n, 2], [n, 2] whether they are more than a line."""
  return tf.logical_and(
    (y[:, 1] - y[:, 0]) * size[0] > _NOTHING,
    (x[:, 1] - x[:, 0]) * size[1] > _NOTHING,
  )


def to_masks(masks, geometry: Geometry):
  """Applies a geometry to masks; the nearest pixel is taken, none is mixed.

  Args:
    masks: uint8 or bool [n, *geometry.shape].
    geometry: what to do.

  Returns:
    [n, *geometry.size], of the type of `masks`. What a turn brings into the
    picture is 0: it belongs to no object.

  Raises:
    ValueError: on another type or number of dimensions.
  """
  masks = tf.convert_to_tensor(masks)
  if masks.dtype not in (tf.uint8, tf.bool) or masks.shape.rank != 3:
    raise ValueError(
      f'masks are {masks.dtype.name}{masks.shape}: give uint8 or bool [n, '
      'height, width]'
    )
  pixels = tf.slice(
    tf.cast(masks, tf.uint8),
    [0, geometry.y, geometry.x],
    [-1, geometry.height, geometry.width],
  )
  pixels = _flip(pixels, geometry, axis=2)[..., None]
  pixels = tf.image.resize(pixels, geometry.size, method='nearest')
  if geometry.angle is not None:
    pixels = _turn(pixels, geometry, 'NEAREST', 'CONSTANT')
  return tf.cast(pixels[..., 0], masks.dtype)


def rotation(angle, height, width):
  """Returns the map that turns a picture about its middle.

  Args:
    angle: float32 scalar, radians, to the left.
    height: of the picture, in pixels.
    width: of the picture, in pixels.

  Returns:
    float32 [8], as tf.raw_ops.ImageProjectiveTransformV3 takes it: from the
    indices of a new pixel to those of the old one.
  """
  cos, sin = tf.cos(angle), tf.sin(angle)
  h, w = height - 1, width - 1
  dx = (w - (cos * w - sin * h)) / 2
  dy = (h - (sin * w + cos * h)) / 2
  return tf.stack([cos, -sin, dx, sin, cos, dy, 0.0, 0.0])


def _flip(pixels, geometry, axis):
  return tf.cond(
    geometry.flip, lambda: tf.reverse(pixels, [axis]), lambda: pixels
  )


def _turn(batch, geometry, interpolation, fill_mode):
  return tf.raw_ops.ImageProjectiveTransformV3(
    images=batch,  # [n, *geometry.size, C]
    transforms=rotation(geometry.angle, *geometry.size)[None],
    output_shape=geometry.size,
    interpolation=interpolation,
    fill_mode=fill_mode,
    fill_value=0.0,
  )
