"""Decodes images of any format as an image viewer shows them.

Palettes and CMYK become RGB, transparent pixels become white, an animation
yields its first frame, and images with an EXIF orientation are turned upright.
"""

from collections.abc import Callable, Sequence
import io
from typing import Any, NoReturn

import numpy as np
from PIL import Image

from vit_jax import console
from vit_jax.data.images import (
  formats,
  image_files,
  jpeg,
  multichannel,
  orientation,
  rgb,
)
from vit_jax.data.lazy import tf

_PNG = b'\x89PNG\r\n\x1a\n'


def decode_errors() -> tuple[type[Exception], ...]:
  """Returns the errors of `decode`; a ValueError comes from Pillow in eager calls."""
  tensorflow_errors = tf.errors.InvalidArgumentError, tf.errors.DataLossError
  return *tensorflow_errors, tf.errors.UnimplementedError, ValueError


@image_files.traced
def decode(
  encoded: 'tf.Tensor',
  channels: int = 3,
  size: 'Sequence[int] | tf.Tensor | None' = None,
  upright: bool = True,
  exact: bool = False,
) -> 'tf.Tensor':
  """Decodes one image of any format to uint8 [height, width, channels].

  Args:
    encoded: string scalar, the contents of a file in one of the formats of
      vit_jax/data/images/formats.py.
    channels: 3, or 1 for grey.
    size: (height, width) to which the caller will resize the image: a much larger JPEG
      is decoded at 1/2, 1/4 or 1/8, see `jpeg.ratio`.
    upright: False where annotations refer to the stored pixels.
    exact: see `jpeg.decode`.

  Raises decode_errors() if it is not an image, or a truncated one.
  """
  turned = orientation.read(encoded) if upright else None
  ratio = None
  if size is not None:
    ratio = jpeg.ratio(orientation.turn_shape(shape_of(encoded), turned), size)
  return decode_window(encoded, channels, turned, ratio, exact=exact)


def decode_window(
  encoded: 'tf.Tensor',
  channels: int,
  turned: 'tf.Tensor | None' = None,
  ratio: 'tf.Tensor | None' = None,
  window: 'tf.Tensor | None' = None,
  exact: bool = False,
) -> 'tf.Tensor':
  """Decodes a window of an image, see `decode`; only that part of a JPEG is decoded.

  `turned` is the orientation in which the stored pixels are turned upright, `ratio`
  the reduction of a JPEG, and `window`, int32 [4], is (y, x, height, width) in stored
  pixels at the reduced size; None: the whole image. For `exact` see `jpeg.decode`.
  """

  def decode_other() -> 'tf.Tensor':
    image = _decode_other(encoded)
    if window is None:
      return image
    y, x, height, width = tf.unstack(window, num=4)
    return image[y : y + height, x : x + width]

  is_jpeg = tf.io.is_jpeg(encoded)
  image = tf.cond(
    is_jpeg, lambda: jpeg.decode(encoded, ratio, window, exact), decode_other
  )
  image = orientation.turn(image, turned)
  return image if channels == 3 else to_grey(image)


@image_files.traced
def decode_values(
  encoded: 'tf.Tensor', channels: int, upright: bool = True
) -> 'tf.Tensor':
  """Decodes one image to the values in its file, float32 [height, width, channels].

  .npy and TIFF files are read by multichannel.read, and PNG of 16 bits as stored; the
  other formats have 8 bits, from 0 to 255, see `decode`.

  Args:
    encoded: string scalar, the contents of a file.
    channels: number of channels, from 1 to 64. Images of 8-bit colour become grey if it
      is 1.
    upright: False where annotations refer to the stored pixels.

  Raises decode_errors() if it is not an image, or has another number of channels.
  """

  def array() -> 'tf.Tensor':
    def call(encoded: bytes) -> np.ndarray:
      return _values(multichannel.read(encoded), channels)

    shape = [None, None, channels]
    return image_files.call_python(call, encoded, tf.float32, shape)

  def other() -> 'tf.Tensor':
    image = tf.cond(is_deep, deep_png, eight_bits)
    turned = orientation.read(encoded) if upright else None
    return tf.ensure_shape(orientation.turn(image, turned), [None, None, channels])

  def deep_png() -> 'tf.Tensor':
    image = tf.cast(tf.io.decode_png(encoded, dtype=tf.uint16), tf.float32)
    return with_channels(image)

  def eight_bits() -> 'tf.Tensor':
    image = decode(encoded, 1 if channels == 1 else 3, upright=False)
    return with_channels(tf.cast(image, tf.float32))

  def with_channels(image: 'tf.Tensor') -> 'tf.Tensor':
    if image.shape[-1] == channels:
      return image
    image = tf.numpy_function(
      lambda image: _values(image, channels), [image], tf.float32, stateful=False
    )
    return tf.ensure_shape(image, [None, None, channels])

  head = tf.strings.substr(encoded, 0, len(multichannel.NPY))
  is_array = head == multichannel.NPY
  for magic in multichannel.TIFF:
    is_array |= tf.strings.substr(encoded, 0, len(magic)) == magic
  is_deep = _is_png(encoded) & (_png_depth(encoded) == b'\x10')
  return tf.cond(is_array, array, other)


def count_channels(encoded: bytes) -> int:
  """Returns the number of channels that `decode_values` reads from a file."""
  if multichannel.is_array(encoded):
    return multichannel.shape(encoded)[2]
  bands = from_pillow(encoded, lambda image: image.getbands())
  if encoded.startswith(_PNG) and encoded[24] == 16:
    return len(bands)
  return 1 if bands in (('1',), ('L',)) else 3


def _values(values: np.ndarray, channels: int) -> np.ndarray:
  """Returns values [height, width, C] as float32; ValueError unless C is `channels`."""
  if values.shape[2] != channels:
    raise ValueError(
      f'it has {console.pluralize(values.shape[2], "channel")}, and '
      f'pp.channels={channels}: change the file or --config.pp.channels'
    )
  return values.astype(np.float32)


def _png_depth(encoded: 'tf.Tensor') -> 'tf.Tensor':
  """Returns byte 24 of a PNG, its bit depth."""
  head = tf.strings.join([tf.strings.substr(encoded, 0, 25), b'\0' * 25])
  return tf.strings.substr(head, 24, 1)


@image_files.traced
def _decode_other(encoded: 'tf.Tensor') -> 'tf.Tensor':
  """Decodes all formats but JPEG as stored: common png in TensorFlow, else Pillow."""
  depth = _png_depth(encoded)  # TensorFlow is wrong on less than 8.
  fast = _is_png(encoded) & ((depth == b'\x08') | (depth == b'\x10'))
  return tf.cond(
    fast,
    lambda: _on_white(tf.io.decode_png(encoded, channels=4)),
    lambda: _by_pillow(encoded, rgb.to_rgb, tf.uint8, [None, None, 3]),
  )


def _on_white(image: 'tf.Tensor') -> 'tf.Tensor':
  """Composites uint8 RGBA on white, with the rounding of rgb.to_rgb."""

  def composited() -> 'tf.Tensor':
    colour, alpha = tf.split(tf.cast(image, tf.uint16), [3, 1], axis=-1)
    colour = (colour * alpha + 255 * (255 - alpha) + 127) // 255
    return tf.cast(colour, tf.uint8)

  opaque = tf.reduce_all(image[..., 3] == 255)
  return tf.cond(opaque, lambda: image[..., :3], composited)


def to_grey(image: 'tf.Tensor') -> 'tf.Tensor':
  """Converts uint8 RGB to luma (ITU-R 601); grey values stay the same."""
  weights = tf.constant([19595, 38470, 7471])  # Sum: 2**16.
  luma = tf.reduce_sum(tf.cast(image, tf.int32) * weights, -1, keepdims=True)
  return tf.cast((luma + 2**15) // 2**16, tf.uint8)


def _is_png(encoded: 'tf.Tensor') -> 'tf.Tensor':
  return tf.strings.substr(encoded, 0, len(_PNG)) == _PNG


def _by_pillow(
  encoded: 'tf.Tensor',
  function: Callable[[Image.Image], Any],
  dtype: 'tf.DType',
  shape: Sequence[int | None],
) -> 'tf.Tensor':
  """Returns function(image), of a dtype and shape, for a lazily opened PIL image."""

  def call(encoded: bytes) -> np.ndarray:
    return np.asarray(from_pillow(encoded, function), dtype.as_numpy_dtype)

  return image_files.call_python(call, encoded, dtype, shape)


def from_pillow(encoded: bytes, function: Callable[[Image.Image], Any]) -> Any:
  """Returns function(image) for a lazily opened PIL image."""
  try:
    with Image.open(io.BytesIO(encoded), formats=formats.by_pillow(encoded)) as image:
      return function(image)
  except Image.DecompressionBombError as e:
    raise ValueError(f'Pillow refuses it: {e}') from e
  except rgb.ModeError:
    raise
  except Exception as e:  # Pillow does not document its readers' errors.
    raise ValueError(formats.why_unreadable(encoded)) from e


def _stored_shape(encoded: bytes) -> np.ndarray:
  """Returns height and width of an image that is neither JPEG nor PNG, int64 [2]."""
  if encoded.startswith(multichannel.NPY):
    return np.array(multichannel.shape(encoded)[:2])
  try:
    return np.array(from_pillow(encoded, lambda image: image.size[::-1]))
  except ValueError:
    if not encoded.startswith(multichannel.TIFF):
      raise
    return np.array(multichannel.shape(encoded)[:2])


@image_files.traced
def shape_of(encoded: 'tf.Tensor') -> 'tf.Tensor':
  """Returns height and width of the stored pixels, int64 [2], from the header.

  Raises decode_errors() if there is no image header.
  """

  def png_shape() -> 'tf.Tensor':
    sizes = tf.strings.join([tf.strings.substr(encoded, 16, 8), b'\0' * 8])
    sizes = tf.strings.substr(sizes, 0, 8)
    width_height = tf.io.decode_raw(sizes, tf.int32, little_endian=False)
    return tf.cast(width_height[::-1], tf.int64)

  def jpeg_shape() -> 'tf.Tensor':
    return tf.cast(tf.io.extract_jpeg_shape(encoded)[:2], tf.int64)

  has_header = _is_png(encoded) & (tf.strings.length(encoded) > 23)
  shape = tf.case(
    [(tf.io.is_jpeg(encoded), jpeg_shape), (has_header, png_shape)],
    lambda: image_files.call_python(_stored_shape, encoded, tf.int64, [2]),
  )
  return tf.ensure_shape(shape, [2])


def upright_shape_of(encoded: 'tf.Tensor') -> 'tf.Tensor':
  """Returns height and width of the upright image, int64 [2], see `shape_of`."""
  return orientation.turn_shape(shape_of(encoded), orientation.read(encoded))


@image_files.traced
def bounded(encoded: 'tf.Tensor', limit: int) -> 'tf.Tensor':
  """Returns an encoded image, a string scalar, unchanged.

  Raises decode_errors() if its header is missing or has more than `limit` pixels.
  """
  shape = shape_of(encoded)

  def refuse(shape: np.ndarray, limit: np.int64) -> NoReturn:
    height, width = shape.tolist()
    raise ValueError(
      f'it has {width} x {height} pixels, more than max_image_pixels={limit}'
    )

  limit = tf.cast(limit, tf.int64)
  return tf.cond(
    tf.reduce_prod(shape) > limit,
    lambda: tf.ensure_shape(
      tf.numpy_function(refuse, [shape, limit], tf.string, stateful=False), []
    ),
    lambda: tf.identity(encoded),
  )


def to_float(image: 'tf.Tensor') -> 'tf.Tensor':
  """Scales uint8 pixels from [0, 255] to [-1, 1], float32, in one operation."""
  return tf.quantization.dequantize(
    tf.bitcast(image, tf.quint8), -1.0, 1.0, mode='MIN_COMBINED'
  )


def encode_png(pixels: np.ndarray, level: int = -1) -> bytes:
  """Returns the contents of a PNG file of uint8 [height, width, 3].

  `level` is zlib's compression level: 0 is fastest, -1 the default.
  """
  buffer = io.BytesIO()
  Image.fromarray(pixels).save(buffer, 'PNG', compress_level=level)
  return buffer.getvalue()


def broken_reason(
  path: bytes,
  max_pixels: int,
  size: Sequence[int] | None = None,
  channels: int | None = None,
) -> str:
  """Decodes an image file; returns why that fails, '' if it does not.

  `size` is the height and width that the image must have, if any, and `channels` the
  number of channels of `decode_values`; None: 8-bit colour. Raises OSError if the file
  cannot be read.
  """
  try:
    encoded = image_files.read_file(path)
    if not encoded:
      return 'zero bytes'
    shape, _ = _try(tf.constant(encoded), tf.constant(max_pixels, tf.int64), channels)
  except FileNotFoundError as e:
    return image_files.first_line(e)
  except decode_errors() as e:
    return image_files.first_line(e)
  shape = shape.numpy().tolist()
  expected = shape if size is None else [int(x) for x in size]
  if shape == expected:
    return ''
  reason = (
    f'it has {shape[1]} x {shape[0]} pixels, and its annotations are of '
    f'{expected[1]} x {expected[0]}'
  )
  if shape[::-1] == expected:
    reason += ' (it may have been turned by its EXIF orientation)'
  return reason


@image_files.traced
def _try(
  encoded: 'tf.Tensor', max_pixels: 'tf.Tensor', channels: int | None
) -> tuple['tf.Tensor', 'tf.Tensor']:
  """Decodes an image, a JPEG at an eighth of its size; returns its shape."""
  encoded = bounded(encoded, max_pixels)
  if channels is not None:
    return shape_of(encoded), tf.reduce_max(decode_values(encoded, channels))
  return shape_of(encoded), tf.reduce_max(decode(encoded, size=(1, 1)))
