"""Resizes and crops images as TensorFlow, Pillow or torchvision do."""

from typing import Any

from vit_jax.data.lazy import tf

# Names of `config.pp.interpolation` -> those of tf.image.resize.
_METHODS = {'bilinear': 'bilinear', 'bicubic': 'bicubic', 'lanczos': 'lanczos3'}


def resize(
  image: 'tf.Tensor',
  size: Any,
  interpolation: str = 'bilinear',
  antialias: bool = False,
  levels: bool = True,
) -> 'tf.Tensor':
  """Resizes a float32 image [height, width, C], with values from -1 to 1.

  Args:
    image: the image, in eager mode or in a graph.
    size: new height and width, int32 [2].
    interpolation: see `config.pp.interpolation`.
    antialias: resizes as Pillow does: filters are as wide as the pixels of the result
      when an image shrinks, and values are rounded to 256 levels.
    levels: False for images that are not 8-bit colour, whose values are not rounded.
  """
  image = tf.image.resize(image, size, _METHODS[interpolation], antialias=antialias)
  if not (antialias and levels):
    return image
  levels = tf.round((image + 1) * 127.5)
  return tf.clip_by_value(levels, 0, 255) / 127.5 - 1


def by_short_side(shape: 'tf.Tensor', side: int, truncate: bool = False) -> 'tf.Tensor':
  """Returns the size, int32 [2], of an image whose shorter side is resized to `side`.

  `shape` is height and width, int [2]. The longer side is rounded as in the original,
  or truncated as in torchvision and transformers.
  """
  if truncate:
    shape = tf.cast(shape, tf.float64)
    return tf.cast(side * shape / tf.reduce_min(shape), tf.int32)
  shape = tf.cast(shape, tf.float32)
  return tf.cast(tf.round(shape * (side / tf.reduce_min(shape))), tf.int32)


def covering(shape: 'tf.Tensor', size: Any) -> 'tf.Tensor':
  """Returns the size, int32 [..., 2], of images resized to cover `size`, int32 [2].

  `shape` is height and width, int [..., 2]; their ratio is kept.
  """
  shape, size = tf.cast(shape, tf.float64), tf.cast(size, tf.float64)
  least = tf.reduce_min(shape / size, axis=-1, keepdims=True)
  return tf.cast(tf.round(shape / least), tf.int32)


def crop_centre(
  image: 'tf.Tensor', size: tuple[int, int], rounding: str = 'down'
) -> 'tf.Tensor':
  """Crops the centre of an image [height, width, C]; pads what is smaller with zeros.

  `size` is height and width, and `rounding` as in `config.pp.crop_rounding`.
  """
  if rounding == 'even':
    margins = tf.cast(tf.shape(image)[:2] - size, tf.float64)
    # tf.round rounds halves to even numbers.
    top, left = tf.unstack(tf.cast(tf.round(tf.maximum(margins, 0) / 2), tf.int32))
    image = image[top : top + size[0], left : left + size[1]]
  return tf.image.resize_with_crop_or_pad(image, *size)
