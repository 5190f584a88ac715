"""Images that a user gives, as a source of the input pipeline."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from vit_jax import preprocess
from vit_jax.data import records
from vit_jax.data.images import images as images_lib
from vit_jax.data.images import index as index_lib


class Given(records.Source):
  """Images in any form, see vit_jax.preprocess.from_user, read when needed.

  Files of more than `max_pixels` are refused before decoding; None: no limit.
  """

  def __init__(self, images: Sequence[Any], max_pixels: int | None = None):
    super().__init__(len(images), ('image',), {})
    self._images = images
    self._max_pixels = max_pixels

  def lookup(self, indices) -> dict:
    """Returns the examples with these numbers, see vit_jax.data.records."""
    return {'image': tf.as_string(indices)}  # What `read` needs.

  def read(self, record):
    encoded = tf.numpy_function(self._encoded, [record['image']], tf.string)
    return {**record, 'image': tf.ensure_shape(encoded, [])}

  def _encoded(self, number: bytes) -> bytes:
    image = self._images[int(number)]
    return preprocess.from_user(image, lambda x: x, self._max_pixels)

  def fingerprint(self) -> dict[str, Any]:
    """Returns the number and a hash of the names of the images."""
    names = (f'{self.name(i)}\n'.encode() for i in range(self.num_examples))
    return {**super().fingerprint(), 'images': index_lib.digest(names)}

  def name(self, index: int) -> str:
    image = self._images[index]
    return image if isinstance(image, str) else f'image {index}'

  def check(self, record, index: int):
    del record
    image = self._images[index]
    preprocess.from_user(image, images_lib.decode, self._max_pixels)
