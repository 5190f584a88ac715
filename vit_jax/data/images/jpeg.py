"""Decodes JPEG files, in part or at reduced size, and refuses truncated files.

If a file is truncated but has an end marker, libjpeg fills the missing part
with grey, and TensorFlow accepts the image. Therefore an image whose last pixel
has that grey is checked again: bytes appended to complete data change nothing,
but are decoded as pixels if data are missing.
"""

import io
import re

import numpy as np
from PIL import Image
import tensorflow as tf

from vit_jax.data.images import reading

# Decoding at 1 / each of these sizes is cheaper than decoding in full.
RATIOS = (1, 2, 4, 8)
_CUT = 'only part of a JPEG: its data end before the picture does'
_PROGRESSIVE = b'\xff\xc2'
_END = b'\xff\xd9'
_NOISE = bytes(range(3, 250, 5)) * 2
# Entropy-coded data end at a marker other than a restart or a stuffed 0xff.
_MARKER = re.compile(rb'\xff+[^\x00\xff\xd0-\xd7]')


def ratio(shape, size):
  """Returns the largest of RATIOS at which no crop is enlarged, int32.

  `shape` is height and width of the crop, and `size` what it is resized to.
  """
  shape = tf.cast(shape[:2], tf.int32)
  times = tf.reduce_min(shape // tf.convert_to_tensor(size, tf.int32))
  return tf.reduce_max([tf.where(times >= r, r, 1) for r in RATIOS])


@reading.traced
def decode(encoded, ratio=None, window=None):
  """Decodes a JPEG to uint8 [height, width, 3]; DECODE_ERRORS, see images.py.

  Args:
    encoded: string scalar, the content of a file.
    ratio: int32 scalar, one of RATIOS, to decode at 1 / ratio of the size.
    window: int32 [4], (y, x, height, width) of the crop to decode, in pixels of
      the image at that size.
  """

  def at(ratio):
    kwargs = {'channels': 3, 'ratio': ratio, 'dct_method': 'INTEGER_FAST'}
    if window is None:
      return tf.io.decode_jpeg(encoded, **kwargs)
    return tf.io.decode_and_crop_jpeg(encoded, window, **kwargs)

  if ratio is None:
    image = at(1)
  else:
    which = tf.reduce_sum(tf.cast(ratio > tf.constant(RATIOS), tf.int32))
    image = tf.switch_case(which, [lambda r=r: at(r) for r in RATIOS])

  def look_again():
    # The sum makes the result depend on the check, which would not run
    # otherwise.
    nothing = tf.numpy_function(_check, [encoded], tf.uint8, stateful=False)
    return image + tf.ensure_shape(nothing, [])

  return tf.cond(_may_be_cut(encoded, image), look_again, lambda: image)


def _may_be_cut(encoded, image):
  """Returns whether an image looks truncated; few complete ones do."""
  weights = tf.constant([0.299, 0.587, 0.114])
  luma = tf.reduce_sum(tf.cast(image[-1, -1], tf.float32) * weights)
  # The grey that libjpeg fills with, and its value in CMYK. Neighbouring pixels
  # may change its colour but not its luma.
  grey = tf.reduce_any(tf.abs(luma - [128.0, 64.0]) < 2.5)
  # A progressive JPEG has many scans, each over the whole picture.
  halves = tf.strings.split(encoded[None], _PROGRESSIVE, maxsplit=1)
  return tf.logical_or(grey, tf.size(halves.values) > 1)


def _check(encoded) -> np.uint8:
  if isinstance(encoded, np.ndarray):  # In eager calls.
    encoded = encoded.item()
  check_whole(encoded, thorough=False)
  return np.uint8(0)


def check_whole(data: bytes, thorough: bool = True):
  """Raises ValueError if the data of a JPEG end before its picture does.

  `thorough`: whether to detect that only the last of many scans is truncated,
  which takes two more full decodings.
  """
  is_covered, scans, end = _read_structure(data)
  if not is_covered:
    raise ValueError(_CUT)
  many = scans > 1
  if many and not thorough:
    return
  more = data[:end] + _NOISE + _END
  if _pixels(data, many) != _pixels(more, many):
    raise ValueError(_CUT)


def has_many_scans(data: bytes) -> bool:
  """Returns whether a JPEG is progressive."""
  # A thumbnail adds a scan, so the markers must be read.
  return data.count(b'\xff\xda') > 1 and _read_structure(data)[1] > 1


def _segments(data):
  """Yields start, marker and content of each segment up to the end marker."""
  position = 2
  while match := _MARKER.search(data, position):
    marker, position = data[match.end() - 1], match.end()
    length = int.from_bytes(data[position : position + 2], 'big')
    yield match.start(), marker, data[position + 2 : position + length]
    if marker == _END[1]:
      break
    position += max(2, length)


def _read_structure(data) -> tuple[bool, int, int]:
  """Reads the markers of a JPEG up to its end marker.

  Returns whether the scans hold all coefficients to the last bit, their number,
  and the end of the last one.
  """
  # Component -> lowest bit that is known of each coefficient.
  left, scans, progressive, end = {}, 0, False, len(data)
  for start, marker, content in _segments(data):
    if marker == _END[1]:
      end = start
    elif marker in (0xC0, 0xC1, 0xC2) and len(content) > 5:
      left = {c: np.full(64, 99) for c in content[6::3][: content[5]]}
      progressive = marker == _PROGRESSIVE[1]
    elif marker == 0xDA and content and len(content) >= 4 + 2 * content[0]:
      scans, count = scans + 1, content[0]
      first, last, bits = (
        content[1 + 2 * count :][:3] if progressive else (0, 63, 0)
      )
      for c in content[1 : 1 + 2 * count : 2]:
        if c in left:
          left[c][first : last + 1] = bits & 15
  return not any(x.any() for x in left.values()), scans, end


def _pixels(data, full: bool) -> bytes:
  """Returns the pixels of a JPEG, at 1/8 of its size or in full."""
  try:
    with Image.open(io.BytesIO(data), formats=['JPEG']) as image:
      if not full:
        image.draft(None, (image.width // 8, image.height // 8))
      return image.tobytes()
  except Image.DecompressionBombError:  # The limit is the user's, not Pillow's.
    return b''
  except Exception as e:  # Pillow's readers raise all sorts.
    raise ValueError(f'a damaged JPEG: {e}') from e
