"""Image operations in TensorFlow: decode, crop, augment, scale to [-1, 1].

Training takes an Inception crop (a random part of the image, of random shape),
evaluation the whole image squeezed to the square, as in the original, or the
middle of it. Every random choice is a function of a seed, so that example i of a
run is the same pixels whenever and wherever it is computed.
"""

from collections.abc import Callable
import io
from typing import Any

import numpy as np
from PIL import Image
import tensorflow as tf

from vit_jax.augmentation import geometry
from vit_jax.augmentation import pixels
from vit_jax.data import images

crop_size = geometry.crop_size  # What it means is said where it is used.


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
  if not _is_randaugment(pp.randaugment):
    raise ValueError(
      f'randaugment={pp.randaugment} must be a pair (layers, magnitude) of '
      'whole numbers, at least 1 layer and a magnitude from 0 to 30, or () for '
      'none (config.pp.randaugment)'
    )
  for name in ('color_jitter', 'random_erasing'):
    if not (isinstance(pp[name], int | float) and 0 <= pp[name] <= 1):
      raise ValueError(
        f'{name}={pp[name]} must be a number from 0 (none) to 1 '
        f'(config.pp.{name})'
      )


def _is_randaugment(value) -> bool:
  if not isinstance(value, tuple | list) or len(value) not in (0, 2):
    return False
  if any(isinstance(v, bool) or not isinstance(v, int) for v in value):
    return False
  return not value or (value[0] >= 1 and 0 <= value[1] <= 30)


def decode_for_training(encoded, seed, pp):
  """Decodes and augments one image.

  Args:
    encoded: string scalar, the contents of an image file.
    seed: int64 [2]; all that is random follows from it.
    pp: `config.pp`; reads `crop`, `channels`, `crop_area`, `crop_ratio`,
      `flip`, `rotate`, `randaugment`, `color_jitter`, `random_erasing`.

  Returns:
    float32 [crop height, crop width, channels] in [-1, 1].
  """
  return decode_with_geometry(encoded, seed, pp)[0]


def decode_with_geometry(encoded, seed, pp):
  """Does the same, and says where the pixels come from.

  Args:
    encoded: see `decode_for_training`.
    seed: see `decode_for_training`.
    pp: see `decode_for_training`.

  Returns:
    (image, geometry): what `decode_for_training` returns, and the
    `geometry.Geometry` that boxes and masks of the image are to follow (what
    RandAugment moves is not part of it).
  """
  image, drawn = _decode_crop(encoded, seed, pp)
  image = geometry.fit(image, drawn)
  image = tf.ensure_shape(image, [*drawn.size, pp.channels])
  return _change_pixels(image, seed, pp), drawn


def _change_pixels(image, seed, pp):
  """Applies what `pp` asks for beyond the geometry, in float32 [h, w, C]."""
  # Each has a seed of its own, so that none changes what the others draw.
  fold = tf.random.experimental.stateless_fold_in
  if pp.randaugment:
    layers, magnitude = pp.randaugment
    values = tf.cast(image * 127.5 + 128, tf.uint8)  # Rounded.
    values = pixels.randaugment(values, fold(seed, 1), layers, magnitude)
    image = images.to_float(values)
  if pp.color_jitter:
    strengths = (pp.color_jitter,) * 3
    image = pixels.color_jitter(image, fold(seed, 2), *strengths)
  if pp.random_erasing:
    image = pixels.random_erasing(image, fold(seed, 3), pp.random_erasing)
  return image


def _decode_crop(encoded, seed, pp):
  """Decodes the part of an image that is drawn; of a JPEG that part alone."""
  if pp.crop_area is None:
    image = images.decode(encoded, pp.channels)
    return image, geometry.sample(tf.shape(image), seed, pp)

  def other():
    image = images.decode_other(encoded)
    return tf.shape(image), image

  is_jpeg = tf.io.is_jpeg(encoded)
  shape, decoded = tf.cond(
    is_jpeg,
    lambda: (tf.io.extract_jpeg_shape(encoded), tf.zeros([0, 0, 3], tf.uint8)),
    other,
  )
  drawn = geometry.sample(shape, seed, pp)
  image = tf.cond(
    is_jpeg,
    lambda: tf.io.decode_and_crop_jpeg(
      encoded,
      tf.stack([drawn.y, drawn.x, drawn.height, drawn.width]),
      channels=3,
      dct_method='INTEGER_FAST',
    ),
    lambda: geometry.crop(decoded, drawn),
  )
  return image if pp.channels == 3 else images.to_grey(image), drawn


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


def prepare(encoded, seed, pp):
  """Decodes one image, and augments it for training or brings it to size.

  Args:
    encoded: string scalar, the contents of an image file.
    seed: int64 [2] in training; None in evaluation.
    pp: `config.pp`.

  Returns:
    float32 [crop height, crop width, channels] in [-1, 1].
  """
  if seed is None:
    return for_evaluation(images.decode(encoded, pp.channels), pp)
  return decode_for_training(encoded, seed, pp)


def from_user(image: Any, function: Callable[[bytes], Any]):
  """Applies a function to the file of an image that a user gives.

  Args:
    image: a path, the bytes of a file, a PIL image, or an array uint8 [height,
      width] or [height, width, 1, 3 or 4].
    function: from the contents of an image file; it may raise what `decode` does.

  Returns:
    What the function returns.

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
    return function(image)
  except images.DECODE_ERRORS as e:
    raise ValueError(
      f"'{name}' is not an image that can be read (jpeg, png, webp, bmp, gif): "
      f'{images.first_line(e)}'
    ) from None
