"""Decodes JPEG files, in part or at reduced size."""

from collections.abc import Sequence
import functools

from vit_jax.data.images import image_files
from vit_jax.data.lazy import tf

# Decoding at 1 / each of these sizes is cheaper than decoding in full.
RATIOS = (1, 2, 4, 8)


def ratio(shape: 'tf.Tensor', size: 'Sequence[int] | tf.Tensor') -> 'tf.Tensor':
  """Returns the largest of RATIOS at which no crop is enlarged, int32.

  `shape` is height and width of the crop, and `size` what it is resized to.
  """
  shape = tf.cast(shape[:2], tf.int32)
  times = tf.reduce_min(shape // tf.convert_to_tensor(size, tf.int32))
  return tf.reduce_max([tf.where(times >= r, r, 1) for r in RATIOS])


@image_files.traced
def decode(
  encoded: 'tf.Tensor',
  ratio: 'tf.Tensor | None' = None,
  window: 'tf.Tensor | None' = None,
  exact: bool = False,
) -> 'tf.Tensor':
  """Decodes a JPEG to uint8 [height, width, 3]; may raise images.decode_errors().

  `ratio`, int32 scalar, is one of RATIOS, to decode at 1 / ratio of the size; `window`,
  int32 [4], is (y, x, height, width) of the crop in pixels of the image at that size.
  `exact` decodes to the same pixels as Pillow, and is a little slower.
  """

  def decode_at(ratio: int) -> 'tf.Tensor':
    method = 'INTEGER_ACCURATE' if exact else 'INTEGER_FAST'
    kwargs = {'channels': 3, 'ratio': ratio, 'dct_method': method}
    if window is None:
      return tf.io.decode_jpeg(encoded, **kwargs)
    return tf.io.decode_and_crop_jpeg(encoded, window, **kwargs)

  if ratio is None:
    return decode_at(1)
  branch = tf.reduce_sum(tf.cast(ratio > tf.constant(RATIOS), tf.int32))
  return tf.switch_case(branch, [functools.partial(decode_at, r) for r in RATIOS])
