"""Image operations in TensorFlow: decode, crop, augment, scale to [-1, 1].

Training takes an Inception crop (a random part of the image, of random shape),
evaluation the whole image squeezed to the square, as in the original, or the
middle of it. Every random choice is a function of a seed, so that example i of a
run is the same pixels whenever and wherever it is computed.
"""

import io
from typing import Any

import numpy as np
from PIL import Image
import tensorflow as tf

from vit_jax.data import images


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


def check(pp):
  """Checks the values of `config.pp` that are not tied to a data set.

  Raises:
    ValueError: names the key, its value and what is allowed.
  """
  height, width = crop_size(pp)
  if pp.channels not in (1, 3):
    raise ValueError(
      f'channels={pp.channels} must be 3 (colour) or 1 (grey) '
      '(config.pp.channels)'
    )
  if pp.resize is not None and pp.resize < max(height, width):
    raise ValueError(
      f'resize={pp.resize} is smaller than crop={pp.crop}: the middle of the '
      'image cannot be cut out of it; use at least '
      f'{max(height, width)} or None (config.pp.resize)'
    )
  for name, high in (('crop_area', 1.0), ('crop_ratio', float('inf'))):
    pair = pp[name]
    if pair is None and name == 'crop_area':
      continue
    if pair is None or len(pair) != 2 or not 0 < pair[0] <= pair[1] <= high:
      raise ValueError(
        f'{name}={pair} must be a pair (smallest, largest), above 0 and at most '
        f'{high} (config.pp.{name})'
      )


def decode_for_training(encoded, seed, pp):
  """Decodes and augments one image.

  Args:
    encoded: string scalar, the contents of an image file.
    seed: int64 [2]; all that is random follows from it.
    pp: `config.pp`; reads `crop`, `channels`, `crop_area`, `crop_ratio`,
      `flip`, `rotate`.

  Returns:
    float32 [crop height, crop width, channels] in [-1, 1].
  """
  size = crop_size(pp)
  seeds = tf.random.experimental.stateless_split(seed, 3)  # [3, 2]
  if pp.crop_area is None:
    image = images.decode(encoded, pp.channels)
  else:
    image = _decode_random_crop(encoded, seeds[0], pp)
  # In this order each step has the fewest bytes to touch. Resizing is done in
  # float32, where TensorFlow is twice as fast as on uint8.
  if pp.flip:
    image = tf.image.stateless_random_flip_left_right(image, seeds[1])
  image = tf.image.resize(images.to_float(image), size)
  if pp.rotate:
    image = _random_rotation(image, seeds[2], pp.rotate)
  return tf.ensure_shape(image, [*size, pp.channels])


def _decode_random_crop(encoded, seed, pp):
  """Decodes a random part of an image; of a JPEG that part alone."""

  def box(shape):
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
      shape,
      bounding_boxes=tf.zeros([1, 0, 4]),
      seed=seed,
      area_range=tuple(pp.crop_area),
      aspect_ratio_range=tuple(pp.crop_ratio),
      min_object_covered=0.0,
      max_attempts=100,
      use_image_if_no_bounding_boxes=True,
    )
    return begin[:2], size[:2]  # (y, x), (height, width)

  def jpeg():
    begin, size = box(tf.io.extract_jpeg_shape(encoded))
    return tf.io.decode_and_crop_jpeg(
      encoded,
      tf.concat([begin, size], axis=0),
      channels=3,
      dct_method='INTEGER_FAST',
    )

  def other():
    image = images.decode_other(encoded)
    begin, size = box(tf.shape(image))
    return tf.slice(image, [*tf.unstack(begin), 0], [*tf.unstack(size), -1])

  image = tf.cond(tf.io.is_jpeg(encoded), jpeg, other)
  return image if pp.channels == 3 else images.to_grey(image)


def _random_rotation(image, seed, degrees):
  """Turns [h, w, C] about its middle by up to `degrees`; edges are repeated."""
  limit = degrees * np.pi / 180
  angle = tf.random.stateless_uniform([], seed, -limit, limit)
  cos, sin = tf.cos(angle), tf.sin(angle)
  h, w = image.shape[0] - 1, image.shape[1] - 1
  dx = (w - (cos * w - sin * h)) / 2
  dy = (h - (sin * w + cos * h)) / 2
  return tf.raw_ops.ImageProjectiveTransformV3(
    images=image[None],
    transforms=tf.stack([cos, -sin, dx, sin, cos, dy, 0.0, 0.0])[None],
    output_shape=image.shape[:2],
    interpolation='BILINEAR',
    fill_mode='NEAREST',
    fill_value=0.0,
  )[0]


def for_evaluation(image, pp):
  """Brings one decoded image to the size of the model.

  Args:
    image: uint8 [height, width, channels].
    pp: `config.pp`; reads `crop`, `resize`, `channels`.

  Returns:
    float32 [crop height, crop width, channels] in [-1, 1].
  """
  size = crop_size(pp)
  image = images.to_float(image)
  if pp.resize is None:
    image = tf.image.resize(image, size)
  else:
    shape = tf.cast(tf.shape(image)[:2], tf.float32)
    scale = pp.resize / tf.reduce_min(shape)
    image = tf.image.resize(image, tf.cast(tf.round(shape * scale), tf.int32))
    image = tf.image.resize_with_crop_or_pad(image, *size)
  return tf.ensure_shape(image, [*size, pp.channels])


def load_image(image: Any, pp) -> np.ndarray:
  """Prepares one image of a user for the model, as evaluation does.

  Args:
    image: a path, the bytes of a file, a PIL image, or an array uint8 [height,
      width] or [height, width, 1, 3 or 4].
    pp: `config.pp`.

  Returns:
    float32 [crop height, crop width, channels] in [-1, 1].

  Raises:
    FileNotFoundError: if the path does not exist.
    ValueError: if it is no image, or an array of another shape or type.
  """
  name = 'image'
  if isinstance(image, np.ndarray):
    if image.ndim not in (2, 3) or image.dtype != np.uint8:
      raise ValueError(
        f'image is an array {image.dtype}{list(image.shape)}: give uint8 '
        '[height, width, channels] with values 0 to 255'
      )
    if image.ndim == 3 and image.shape[2] == 1:
      image = image[..., 0]
    elif image.ndim == 3 and image.shape[2] not in (3, 4):
      raise ValueError(
        f'image is an array of {image.shape[2]} channels: give 1 (grey), 3 '
        '(RGB) or 4 (RGBA)'
      )
    image = Image.fromarray(image)
  if isinstance(image, Image.Image):
    buffer = io.BytesIO()
    image.convert('RGBA').save(buffer, 'PNG', compress_level=0)
    image = buffer.getvalue()
  if not isinstance(image, bytes):
    name = str(image)
    if not tf.io.gfile.exists(name) or tf.io.gfile.isdir(name):
      raise FileNotFoundError(f"there is no image file '{name}'")
    image = tf.io.read_file(name).numpy()
  try:
    return for_evaluation(images.decode(image, pp.channels), pp).numpy()
  except images.DECODE_ERRORS as e:
    raise ValueError(
      f"'{name}' is not an image that can be read (jpeg, png, webp, bmp, gif): "
      f'{images.first_line(e)}'
    ) from None
