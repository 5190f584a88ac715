"""Maps of segments, as COCO's panoptic annotations store them.

A panoptic image has the height and width of its image. The colour of a pixel is
the number of its segment, R + 256 G + 256 * 256 B, which the annotation lists
with a class.
"""

import numpy as np

from vit_jax.data.images import images
from vit_jax.data.lazy import tf

# Data set -> number of its classes of things, which come before those of stuff.
THINGS = {'coco/2017_panoptic': 80, 'scenes/panoptic': 10}
_UNITS = (1, 256, 65_536)  # Factors of red, green and blue.
_NONE = 2**24  # Greater than the number of any colour.


def colours(numbers: np.ndarray) -> np.ndarray:
  """Returns the colours of segment numbers [...] below 2^24, uint8 [..., 3]."""
  return (numbers[..., None] // np.array(_UNITS) % 256).astype(np.uint8)


def read(encoded: 'tf.Tensor', ids: 'tf.Tensor', shape: 'tf.Tensor') -> 'tf.Tensor':
  """Reads which of some segments each pixel belongs to, in a TensorFlow graph.

  Args:
    encoded: content of a panoptic image, a string scalar.
    ids: numbers of at most 255 segments, int [n].
    shape: height and width of the image, int [2].

  Returns:
    uint8 [*shape], i + 1 for pixels of segment `ids[i]`, 0 for all others.

  Raises:
    InvalidArgumentError: if the panoptic image has another shape.
  """
  pixels = tf.cast(images.decode(encoded, upright=False), tf.int64)
  tf.debugging.assert_equal(
    tf.shape(pixels)[:2],
    shape,
    'a panoptic image has another height or width than its image',
  )
  pixels = tf.reduce_sum(pixels * _UNITS, axis=-1)
  flat = tf.reshape(pixels, [-1])
  ids = tf.cast(ids, tf.int64)
  order = tf.argsort(ids)
  sorted_ids = tf.concat([tf.gather(ids, order), [_NONE]], axis=0)
  position = tf.searchsorted(sorted_ids, flat)
  number = tf.gather(tf.concat([order + 1, [0]], axis=0), position)
  number = tf.where(tf.gather(sorted_ids, position) == flat, number, 0)
  return tf.cast(tf.reshape(number, tf.shape(pixels)), tf.uint8)


def resize(numbers: 'tf.Tensor', size: 'tf.Tensor') -> 'tf.Tensor':
  """Resizes a map [h, w] to (height, width), with the nearest numbers."""
  return tf.image.resize(numbers[..., None], size, method='nearest')[..., 0]
