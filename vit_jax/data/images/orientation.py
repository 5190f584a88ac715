"""The EXIF orientation of images: how to turn stored pixels upright.

A camera held sideways stores the pixels in the order of its sensor, and a number
from 1 to 8 that says how to turn and mirror them:

  1: not at all                  5: swap rows and columns
  2: mirror left and right       6: by 90 degrees clockwise
  3: by 180 degrees              7: swap rows and columns, then by 180 degrees
  4: mirror up and down          8: by 90 degrees counter-clockwise

None in place of a number leaves pixels as stored. TIFF and HEIC files are turned upright
where they are decoded.
"""

import io

import numpy as np
from PIL import ExifTags, Image, JpegImagePlugin

from vit_jax.data.images import formats, image_files, multichannel
from vit_jax.data.lazy import tf

# Orientation - 1 -> which axes (y, x) to reverse, after swapping those of 5 to 8.
_REVERSED = 2 * ((False, False), (False, True), (True, True), (True, False))

# How EXIF data begin, as regular expressions.
_IN_JPEG = r'Exif(\x00\x00)'
_IN_OTHERS = 'eXIf|EXIF'  # In PNG and in WebP.
# EXIF data come first in a JPEG (CIPA DC-008, 4.5.4); a search of all of a large file
# takes a tenth of the time of decoding it.
_JPEG_HEAD = 1 << 19  # Bytes.


@image_files.traced
def read(encoded: 'tf.Tensor') -> 'tf.Tensor':
  """Returns the orientation in an encoded image, int32 scalar; 1 by default."""
  # Files without EXIF data, the most common ones, need no Python.
  has_exif = tf.cond(
    tf.io.is_jpeg(encoded),
    lambda: _contains(tf.strings.substr(encoded, 0, _JPEG_HEAD), _IN_JPEG),
    lambda: _contains(encoded, _IN_OTHERS),
  )
  # AVIF may have an orientation without EXIF data.
  head = tf.strings.join([tf.strings.substr(encoded, 0, 8), b'\0' * 8])
  may_be_avif = tf.strings.substr(head, 4, 4) == b'ftyp'
  return tf.cond(
    has_exif | may_be_avif,
    lambda: image_files.call_python(_read, encoded, tf.int32, []),
    lambda: tf.constant(1),
  )


def _contains(content: 'tf.Tensor', pattern: str) -> 'tf.Tensor':
  """Returns whether a string scalar contains a match of a pattern, bool scalar."""
  without = tf.strings.regex_replace(content, pattern, '', False)
  return tf.strings.length(without) < tf.strings.length(content)


@image_files.traced
def as_stored(encoded: 'tf.Tensor') -> 'tf.Tensor':
  """Renames the EXIF data in an encoded image, so that it is decoded as stored."""
  replace = tf.strings.regex_replace
  return tf.cond(
    tf.io.is_jpeg(encoded),
    lambda: replace(encoded, _IN_JPEG, r'noNe\1', False),
    # The name of a chunk that PNG readers skip.
    lambda: replace(encoded, _IN_OTHERS, 'noNe', False),
  )


def _read(encoded: bytes) -> np.int32:
  if encoded.startswith(multichannel.TIFF):
    return np.int32(1)  # Its pixels are turned where they are decoded.
  file = io.BytesIO(encoded)
  try:
    if encoded.startswith(b'\xff\xd8'):
      # Image.open would refuse an image of many pixels.
      exif = JpegImagePlugin.JpegImageFile(file).getexif()
    else:
      with Image.open(file, formats=formats.by_pillow(encoded)) as image:
        exif = image.getexif()
    number = exif.get(ExifTags.Base.Orientation)
  except Exception:  # Pillow documents no errors for damaged EXIF data.
    number = None
  return np.int32(number if number in range(1, 9) else 1)


def turn(pixels: 'tf.Tensor', orientation: 'tf.Tensor | None') -> 'tf.Tensor':
  """Turns stored pixels [height, width, C] upright."""
  if orientation is None:
    return pixels

  def turned() -> 'tf.Tensor':
    order = tf.where(orientation > 4, [1, 0, 2], [0, 1, 2])
    axes = tf.boolean_mask([0, 1], tf.gather(_REVERSED, orientation - 1))
    return tf.reverse(tf.transpose(pixels, order), axes)

  return tf.cond(orientation > 1, turned, lambda: pixels)


def turn_shape(shape: 'tf.Tensor', orientation: 'tf.Tensor | None') -> 'tf.Tensor':
  """Returns height and width of stored pixels turned upright, int32 [2]."""
  if orientation is None:
    return shape[:2]
  return tf.where(orientation > 4, shape[1::-1], shape[:2])


def stored_window(
  window: 'tf.Tensor', shape: 'tf.Tensor', orientation: 'tf.Tensor | None'
) -> 'tf.Tensor':
  """Returns where a window of the upright image lies in the stored pixels.

  Windows are (y, x, height, width), int32 [4]; `shape` is the height and width
  of the upright image, int32 [2].
  """
  if orientation is None:
    return window
  begin, extent = window[:2], window[2:]
  is_reversed = tf.gather(_REVERSED, orientation - 1)
  begin = tf.where(is_reversed, shape - begin - extent, begin)
  swapped = tf.concat([begin[::-1], extent[::-1]], axis=0)
  return tf.where(orientation > 4, swapped, tf.concat([begin, extent], axis=0))
