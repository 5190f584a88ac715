"""The EXIF orientation of images: how to turn stored pixels upright.

A camera held sideways stores the pixels as its sensor lies, and a number from 1
to 8 that says how to turn and mirror them:

  1: not at all                  5: swap rows and columns
  2: mirror left and right       6: by 90 degrees clockwise
  3: by 180 degrees              7: swap rows and columns, then by 180 degrees
  4: mirror up and down          8: by 90 degrees counter-clockwise

In place of a number, None leaves all as it is stored, and adds no operation to a
pipeline.
"""

import io

import numpy as np
from PIL import ExifTags, Image, JpegImagePlugin
import tensorflow as tf

from vit_jax.data.images import image_files

# Orientation - 1 -> which axes (y, x) to reverse. Rows and columns of 5 to 8 are
# swapped first.
_REVERSED = (
  (False, False), (False, True), (True, True), (True, False),
) * 2  # fmt: skip


@image_files.traced
def read(encoded):
  """Returns the orientation in a file of any format, int32 scalar; or 1."""

  def look():
    found = tf.numpy_function(_read, [encoded], tf.int32, stateful=False)
    return tf.ensure_shape(found, [])

  # Most files have no EXIF data, and need no Python.
  rest = _renamed(encoded, '')
  may_have = tf.strings.length(rest) < tf.strings.length(encoded)
  return tf.cond(may_have, look, lambda: tf.constant(1))


@image_files.traced
def as_stored(encoded):
  """Hides the EXIF data of a file, whose pixels then stay as they are stored."""
  return _renamed(encoded, 'noNe')  # Of a chunk that PNG's readers skip.


def _renamed(encoded, name):
  """Gives the EXIF data of a file another name."""
  patterns = r'Exif(\x00\x00)', 'eXIf|EXIF'  # In JPEG; in PNG and in WebP.
  names = rf'{name}\1', name
  in_jpeg, elsewhere = (
    lambda pair=pair: tf.strings.regex_replace(encoded, *pair, False)
    for pair in zip(patterns, names)
  )
  return tf.cond(tf.io.is_jpeg(encoded), in_jpeg, elsewhere)


def _read(encoded) -> np.int32:
  if isinstance(encoded, np.ndarray):  # In eager calls.
    encoded = encoded.item()

  def exif():
    file = io.BytesIO(encoded)
    if encoded.startswith(b'\xff\xd8'):
      # Not by Image.open, which refuses many pixels.
      return JpegImagePlugin.JpegImageFile(file).getexif()
    with Image.open(file, formats=('PNG', 'WEBP')) as image:
      return image.getexif()

  return np.int32(_number(exif))


def of_pillow(image: Image.Image) -> int:
  """Returns the orientation of an image of Pillow, 1 if it has none."""
  return _number(image.getexif)


def _number(exif) -> int:
  try:
    number = exif().get(ExifTags.Base.Orientation)
  except Exception:  # Damaged EXIF data; Pillow's readers raise all sorts.
    return 1
  return int(number) if number in range(1, 9) else 1


def turn(pixels, orientation):
  """Turns stored pixels [height, width, C] upright."""
  if orientation is None:
    return pixels

  def turned():
    order = tf.where(orientation > 4, [1, 0, 2], [0, 1, 2])
    axes = tf.boolean_mask([0, 1], tf.gather(_REVERSED, orientation - 1))
    return tf.reverse(tf.transpose(pixels, order), axes)

  return tf.cond(orientation > 1, turned, lambda: pixels)


def turn_shape(shape, orientation):
  """Returns height and width of stored pixels turned upright, int32 [2]."""
  if orientation is None:
    return shape[:2]
  return tf.where(orientation > 4, shape[1::-1], shape[:2])


def turn_window(window, shape, orientation):
  """Returns the place in the upright image of a window of stored pixels.

  Windows are (y, x, height, width), int32 [4]; `shape` is the height and width
  of the stored pixels, int32 [2].
  """
  if orientation is None:
    return window
  pairs = tf.reshape(tf.concat([window, shape[:2]], axis=0), [3, 2])
  pairs = tf.where(orientation > 4, pairs[:, ::-1], pairs)
  begin, extent, shape = tf.unstack(pairs)
  is_reversed = tf.gather(_REVERSED, orientation - 1)
  begin = tf.where(is_reversed, shape - begin - extent, begin)
  return tf.concat([begin, extent], axis=0)


def inverse(orientation):
  """Returns the orientation that turns an upright image to stored pixels."""
  if orientation is None:
    return None
  return tf.gather([1, 2, 3, 4, 5, 8, 7, 6], orientation - 1)
