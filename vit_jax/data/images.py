"""Decodes images of any format, the way people see them.

Palettes and CMYK become RGB, what is transparent becomes white, of an animation
the first frame is taken. What cannot be decoded is found before training.
"""

from collections.abc import Callable
from collections.abc import Sequence
import concurrent.futures
import io
import os
import re

from absl import logging
import numpy as np
from PIL import Image
import tensorflow as tf
import tqdm

# TensorFlow reads images; the accelerators are for JAX alone.
try:
  tf.config.set_visible_devices([], 'GPU')
except RuntimeError:  # A program around this one has initialised it already.
  pass

# What `decode` raises: a ValueError comes from Pillow, when run eagerly.
DECODE_ERRORS = (tf.errors.OpError, ValueError)

# What to do about images that cannot be decoded.
BROKEN_IMAGES = ('error', 'skip', 'trust')

_PNG = b'\x89PNG\r\n\x1a\n'


def decode(encoded, channels: int = 3):
  """Decodes one image of any format.

  Args:
    encoded: string scalar, the contents of a jpeg, png, webp, bmp or gif file.
    channels: 3, or 1 for grey.

  Returns:
    uint8 [height, width, channels].

  Raises:
    DECODE_ERRORS: if it is no image, or only part of one.
  """
  image = tf.cond(
    tf.io.is_jpeg(encoded),
    lambda: tf.io.decode_jpeg(encoded, channels=3, dct_method='INTEGER_FAST'),
    lambda: decode_other(encoded),
  )
  return image if channels == 3 else to_grey(image)


def decode_other(encoded):
  """Decodes anything but JPEG: common png in TensorFlow, the rest in Pillow."""
  # Byte 24 of a png is its bit depth; TensorFlow is wrong on less than 8.
  head = tf.strings.join([tf.strings.substr(encoded, 0, 25), b'\0' * 25])
  depth = tf.strings.substr(head, 24, 1)
  fast = tf.logical_and(
    tf.strings.substr(head, 0, len(_PNG)) == _PNG,
    tf.logical_or(depth == b'\x08', depth == b'\x10'),
  )
  image = tf.cond(
    fast,
    lambda: tf.io.decode_png(encoded, channels=4),
    lambda: tf.ensure_shape(
      tf.numpy_function(_pillow_rgba, [encoded], tf.uint8, stateful=False),
      [None, None, 4],
    ),
  )
  alpha = tf.cast(image[..., 3:], tf.int32)
  colour = tf.cast(image[..., :3], tf.int32)
  colour = (colour * alpha + 255 * (255 - alpha) + 127) // 255
  return tf.cast(colour, tf.uint8)


def to_grey(image):
  """Turns uint8 RGB into luma (ITU-R 601), grey values into themselves."""
  weights = tf.constant([19595, 38470, 7471])  # Sum: 2**16.
  luma = tf.reduce_sum(tf.cast(image, tf.int32) * weights, -1, keepdims=True)
  return tf.cast((luma + 2**15) // 2**16, tf.uint8)


def _pillow_rgba(encoded) -> np.ndarray:
  if isinstance(encoded, np.ndarray):  # What an eager call gets.
    encoded = encoded.item()
  try:
    with Image.open(io.BytesIO(encoded)) as image:
      return np.asarray(image.convert('RGBA'))
  except Exception as e:  # Pillow's readers raise all sorts.
    raise ValueError('no image of a known format, or only part of one') from e


def to_float(image):
  """Scales uint8 pixels from [0, 255] to [-1, 1], float32, in one operation."""
  return tf.quantization.dequantize(
    tf.bitcast(image, tf.quint8), -1.0, 1.0, mode='MIN_COMBINED'
  )


def first_line(error: Exception) -> str:
  """Returns what an error of `decode` says, without TensorFlow's wrapping."""
  line = getattr(error, 'message', str(error)).strip().splitlines()[0]
  line = re.sub(r'^\{\{function_node .*?\}\} ', '', line)
  line = re.sub(
    r'^Error in user-defined function .*? iterator: \S+: ', '', line
  )
  return re.sub(r' \[Op:.*', '', line)[:200]


def usable(
  paths: Sequence[str],
  where: str,
  broken: str,
  named: Callable[[int], str] | None = None,
) -> list[int]:
  """Checks that images can be read.

  Args:
    paths: of all images of a split.
    where: the split, for messages.
    broken: what to do about images that cannot be decoded: 'error', 'skip', or
      'trust' (do not look).
    named: names an image of the list in a message; by default by its path.

  Returns:
    Numbers of the images to take: all of them, unless some are skipped.

  Raises:
    ValueError: on broken images, if none is left, or if `broken` is unknown.
  """
  if broken not in BROKEN_IMAGES:
    raise ValueError(
      f"broken_images='{broken}' is unknown: use one of {BROKEN_IMAGES} "
      '(config.broken_images)'
    )
  if not paths:
    raise ValueError(f"split '{where}' is empty")
  if broken == 'trust':
    return list(range(len(paths)))
  whys = _check_all(paths, deep=broken == 'skip')
  bad = [
    f'{named(i) if named else paths[i]}: {why}'
    for i, why in enumerate(whys)
    if why
  ]
  if bad and broken == 'error':
    shown = '\n  '.join(bad[:10])
    raise ValueError(
      f'{len(bad)} of {len(paths)} images cannot be read:\n  {shown}\n'
      'Mend or delete them, or leave them out with '
      '--config.broken_images=skip'
    )
  if bad:
    logging.warning(
      'Skipped %d of %d images of %s that cannot be read, the first: %s',
      len(bad),
      len(paths),
      where,
      bad[0],
    )
  if len(bad) == len(paths):
    raise ValueError(f"no image of '{where}' can be read")
  return [i for i, why in enumerate(whys) if not why]


def _check_all(paths, deep):
  """Returns why each image cannot be decoded, '' where it can.

  Looks at both ends of each file, and decodes those that do not begin and end
  as they should; all of them if `deep`.
  """
  with concurrent.futures.ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
    whys = pool.map(lambda path: _why_broken(path, deep), paths)
    return list(
      tqdm.tqdm(
        whys,
        'Checking images',
        len(paths),
        delay=3,
        leave=False,
        unit=' images',
      )
    )


# Format: how a file begins, how it ends.
_MAGIC = (
  (b'\xff\xd8\xff', b'\xff\xd9'),
  (b'\x89PNG\r\n\x1a\n', b'IEND\xaeB`\x82'),
)


def _why_broken(path, deep):
  """Returns why a file cannot be decoded, or '' if it can."""
  try:
    with tf.io.gfile.GFile(path, 'rb') as file:
      size = file.size()
      if not size:
        return 'zero bytes'
      begin = file.read(16)
      file.seek(max(0, size - 64))
      end = file.read(64).rstrip(b'\0')
      whole = any(begin.startswith(b) and end.endswith(e) for b, e in _MAGIC)
      if whole and not deep:
        return ''
      file.seek(0)
      decode(tf.constant(file.read()))
  except DECODE_ERRORS as e:
    return first_line(e)
  return ''


def encode_png(pixels: np.ndarray) -> bytes:
  """Returns the contents of a PNG file of uint8 [height, width, 3]."""
  buffer = io.BytesIO()
  Image.fromarray(pixels).save(buffer, 'PNG')
  return buffer.getvalue()
