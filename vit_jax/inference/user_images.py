"""Sources of images given by a user, and of sample images."""

from collections.abc import Sequence
import contextlib
import functools
import itertools
from typing import Any
import weakref

import ml_collections
import numpy as np

from vit_jax import preprocess
from vit_jax.data import folder as folder_lib, records, registry, sources
from vit_jax.data.images import image_files, images as images_lib, multichannel
from vit_jax.data.lazy import tf
from vit_jax.data.tfds import builders
from vit_jax.distributed import files
from vit_jax.weights import fetch

# TensorFlow never frees the callable of a `numpy_function`, so one serves all
# sources, which it finds by number.
_numbers = itertools.count()
_sources: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@image_files.traced
def _encoded(source: 'tf.Tensor', index: 'tf.Tensor') -> 'tf.Tensor':
  def encode(source: np.ndarray, index: np.ndarray) -> bytes:
    return _sources[int(source)].encoded(int(index))

  encoded = tf.numpy_function(encode, [source, index], tf.string)
  return tf.ensure_shape(encoded, [])


class UserImages(records.Source):
  """Images in any form accepted by vit_jax.preprocess.from_user, read lazily.

  Images at URLs are fetched each time that they are read, as they may change.
  Files with more than `max_pixels` are rejected before decoding; None: no limit. For
  `channels` see records.Source.
  """

  def __init__(
    self,
    images: Sequence[Any],
    max_pixels: int | None = None,
    channels: int | None = None,
  ) -> None:
    super().__init__(len(images), ('image',), {})
    self.channels = channels
    self._images = images
    self._max_pixels = max_pixels
    self._number = next(_numbers)
    _sources[self._number] = self

  def lookup(self, indices: Any) -> dict:
    """Returns the examples with these numbers, see vit_jax.data.records."""
    return {'image': indices}

  def read(self, record: dict[str, Any]) -> dict[str, Any]:
    """Reads an image as the content of a file."""
    if tf.executing_eagerly():  # Without `numpy_function`, whose threads may run out.
      image = tf.constant(self.encoded(int(record['image'])))
    else:
      image = _encoded(tf.constant(self._number, tf.int64), record['image'])
    return {**record, 'image': image}

  def encoded(self, index: int) -> bytes:
    """Returns an image as the content of an image file."""
    return preprocess.from_user(
      self._image(index), lambda content: content, self._max_pixels, self.channels
    )

  def _image(self, index: int) -> Any:
    """Returns an image, or the content of the file at a URL."""
    image = self._images[index]
    return fetch.read(image) if _is_url(image) else image

  def fingerprint(self) -> dict[str, Any]:
    """Returns the number of images and a hash of their names."""
    lines = (f'{self.name(i)}\n' for i in range(self.num_examples))
    content = (line.encode(errors='surrogateescape') for line in lines)
    return {**super().fingerprint(), 'images': files.digest(content)}

  def name(self, index: int) -> str:
    image = self._images[index]
    return image if isinstance(image, str) else f'image {index}'

  def stamp(self, index: int) -> int:
    image = self._images[index]
    is_file = isinstance(image, str) and not _is_url(image)
    return image_files.stamp(image) if is_file else 0

  def check(self, record: dict[str, Any], index: int) -> None:
    """Raises ValueError or OSError if an image cannot be read."""
    decode = images_lib.decode
    if self.channels is not None:
      decode = functools.partial(images_lib.decode_values, channels=self.channels)
    preprocess.from_user(self._image(index), decode, self._max_pixels, self.channels)


def for_model(images: Sequence[Any], config: ml_collections.ConfigDict) -> UserImages:
  """Returns images as a source for the model of a run's config."""
  channels = multichannel.stored_channels(config.pp)
  return UserImages(images, config.max_image_pixels, channels)


def _is_url(image: Any) -> bool:
  return isinstance(image, str) and image.startswith(('https://', 'http://'))


def examples(config: ml_collections.ConfigDict, count: int) -> records.Source:
  """Returns at most `count` images of the run's test split.

  If the split would have to be downloaded, photos from scikit-learn; their colours are
  repeated and scaled for a model that reads other channels or values.
  """
  source = None
  with contextlib.suppress(ValueError, OSError):
    source = _test_split(config)
  if source is None:
    from sklearn import datasets

    first, second = datasets.load_sample_images().images
    photos = [first, second, first[:213], first[213:], second[:, :320]]
    channels = multichannel.stored_channels(config.pp)
    if channels is not None:
      photos = [_with_values(photo, config.pp) for photo in photos]
    source = UserImages(photos, channels=channels)
  return records.Subset(source, np.arange(min(count, source.num_examples)))


def _with_values(photo: np.ndarray, pp: ml_collections.ConfigDict) -> np.ndarray:
  """Returns a photo uint8 [H, W, 3] with the channels and the range of `pp`."""
  low, high = (np.asarray(bound, np.float32) for bound in pp.range)
  colours = photo[..., np.arange(pp.channels) % 3].astype(np.float32)
  return low + colours / 255 * (high - low)


def _test_split(config: ml_collections.ConfigDict) -> records.Source | None:
  """Opens a run's test split; returns None if that needs a download."""
  dataset = config.dataset
  if not isinstance(dataset, str) or dataset.startswith(tuple(registry.SOURCES)):
    return None
  if not (folder_lib.is_folder(dataset) or registry.register(dataset)):
    if not builders.find_builder(config, dataset).info.splits:
      return None
  config = config.copy_and_resolve_references()
  config.broken_images = 'trust'
  return sources.open_split(config, config.pp.test, ('image',))
