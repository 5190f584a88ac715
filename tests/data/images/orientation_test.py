"""Tests of EXIF orientations against Pillow's exif_transpose."""

import functools
import io

import numpy as np
from PIL import ExifTags, Image, ImageOps
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tests import preprocess_test
from tests.data.images import jpeg_test
from vit_jax import preprocess
from vit_jax.data import sources
from vit_jax.data.augmentation import geometry
from vit_jax.data.images import images, jpeg, orientation

PICTURE = jpeg_test.textured(201, 298)
FORMATS = {
  'JPEG': {'quality': 95, 'subsampling': 0},
  'PNG': {},
  'WEBP': {'lossless': True},
  'AVIF': {'quality': 100, 'subsampling': '4:4:4'},
}
# All orientations of JPEG; a rotated and a mirrored image in other formats.
CASES = [*(('JPEG', n) for n in range(1, 9)), ('PNG', 6), ('PNG', 7), ('WEBP', 8)]
CASES += [('AVIF', 6), ('AVIF', 7)]
pp = preprocess_test.pp
decode = tf.function(images.decode, reduce_retracing=True)


@functools.cache
def pipelines(**kwargs):
  """Returns the preprocessing for training (image, seed) and evaluation (image)."""
  config = pp(crop=(40, 56), **kwargs)
  image, seed = tf.TensorSpec([], tf.string), tf.TensorSpec([2], tf.int64)
  return (
    tf.function(lambda x, key: preprocess.prepare(x, key, config), [image, seed]),
    tf.function(lambda x: preprocess.prepare(x, None, config), [image]),
  )


def encode(number, fmt='JPEG', picture=PICTURE, **kwargs):
  exif = Image.Exif()
  exif[0x010F] = 'A camera'
  if number is not None:
    exif[0x0112] = number
  kwargs = {**FORMATS[fmt], **kwargs}
  return preprocess_test.encode(picture, fmt, exif=exif, **kwargs)


def without_exif(encoded):
  """Returns a PNG of the upright image."""
  with Image.open(io.BytesIO(encoded)) as image:
    image = ImageOps.exif_transpose(image).convert('RGB')
  return preprocess_test.encode(image, 'PNG')


def pixels(encoded):
  return np.asarray(Image.open(io.BytesIO(encoded)).convert('RGB')).astype(int)


def test_a_tiff_that_mentions_exif_is_turned_once():
  """Its pixels are turned where they are decoded, by Pillow."""
  exif = Image.Exif()
  exif[0x010F], exif[0x0112] = 'EXIF camera', 6
  encoded = preprocess_test.encode(PICTURE, 'TIFF', exif=exif)
  np.testing.assert_array_equal(images.decode(encoded), pixels(encoded))


def test_exif_data_after_large_segments_are_found():
  """Some programs write three segments of other metadata, of 64 KB each, before them."""
  encoded = encode(6)
  segment = (
    b'\xff\xed\xff\xff' + b'8BIM' + bytes(2**16 - 7)
  )  # Its length counts itself.
  encoded = encoded[:2] + 3 * segment + encoded[2:]
  assert pixels(encoded).shape[:2] == (201, 298)  # Pillow parses the segments.
  assert int(orientation.read(encoded)) == 6


@pytest.mark.parametrize(('fmt', 'number'), CASES)
def test_decoded_images_are_upright(fmt, number):
  encoded = encode(number, fmt)
  want = pixels(without_exif(encoded))
  assert want.shape[:2] == ((201, 298) if number < 5 else (298, 201))
  assert int(orientation.read(encoded)) == number
  got = decode(tf.constant(encoded)).numpy().astype(int)
  assert got.shape == want.shape
  # Pillow does not decode JPEGs with INTEGER_FAST.
  assert np.abs(got - want).max() <= (8 if fmt == 'JPEG' else 0)
  stored = images.decode(encoded, upright=False).numpy().astype(int)
  assert stored.shape == (201, 298, 3)
  with Image.open(io.BytesIO(encoded)) as image:
    by_pillow = preprocess.from_user(image, images.decode).numpy()
  np.testing.assert_array_equal(by_pillow, want)
  by_path = preprocess.from_user(encoded, images.decode).numpy()
  np.testing.assert_array_equal(by_path, got)


@pytest.mark.parametrize('fmt', ['TIFF', 'HEIF', 'JPEG2000'])
def test_other_formats_are_turned_by_their_decoders(fmt):
  """HEIC has a rotation of its own, and JPEG 2000 none."""
  exif = Image.Exif()
  exif[ExifTags.Base.Orientation] = 6
  encoded = preprocess_test.encode(PICTURE, fmt, exif=exif)
  upright = without_exif(encoded)
  assert int(orientation.read(encoded)) == 1
  np.testing.assert_array_equal(decode(tf.constant(encoded)), pixels(upright))
  assert images.shape_of(encoded).numpy().tolist() == [*pixels(upright).shape[:2]]
  train, evaluate = pipelines(crop_area=(0.2, 0.5), jpeg_shrink=False)
  np.testing.assert_array_equal(evaluate(encoded), evaluate(upright))
  np.testing.assert_array_equal(train(encoded, (0, 1)), train(upright, (0, 1)))


@pytest.mark.parametrize(
  ('fmt', 'number'), [('JPEG', 6), ('PNG', 7), ('WEBP', 8), ('AVIF', 5)]
)
def test_crops_are_taken_from_the_upright_image(fmt, number):
  encoded = encode(number, fmt)
  upright = without_exif(encoded)
  train, evaluate = pipelines(crop_area=(0.2, 0.5), jpeg_shrink=False)
  atol = 8 / 127.5 if fmt == 'JPEG' else 1e-6
  np.testing.assert_allclose(evaluate(encoded), evaluate(upright), atol=atol)
  for seed in (0, 0), (0, 1), (0, 2):
    np.testing.assert_allclose(train(encoded, seed), train(upright, seed), atol=atol)


def shrunk(pixels):
  image = Image.fromarray(pixels.astype(np.uint8)).resize((56, 40), Image.BOX)
  return np.asarray(image) / 127.5 - 1


@pytest.mark.parametrize('number', range(1, 9))
def test_jpeg_decoded_at_reduced_size_is_upright(number):
  """A crop that is a few pixels off has different colours."""
  ramps = preprocess_test.smooth(404, 606)
  encoded = encode(number, picture=Image.fromarray(ramps))
  upright = pixels(without_exif(encoded))
  config = pp(crop=(40, 56), crop_area=(0.3, 0.9))
  train, evaluate = pipelines(crop_area=(0.3, 0.9))
  for seed in range(3):
    drawn = geometry.sample(upright.shape, tf.constant([0, seed], tf.int64), config)
    y, x, height, width = drawn.window.numpy().tolist()
    assert height >= 80  # At most half of the pixels were decoded.
    want = shrunk(upright[y : y + height, x : x + width])
    want = want[:, :: -1 if drawn.flip else 1]
    # The ramps rise by 2 / 404 per pixel, and windows are rounded by at most 7.
    ratio = int(jpeg.ratio(drawn.window[2:], drawn.size))
    errors = np.abs(train(encoded, (0, seed)) - want)
    assert errors[2:-2, 2:-2].mean() < 0.005 * (ratio + 1)
  errors = np.abs(evaluate(encoded) - shrunk(upright))
  assert errors[2:-2, 2:-2].mean() < 0.01


@pytest.mark.parametrize('fmt', FORMATS)
def test_invalid_orientations_are_ignored(fmt):
  for number in (None, 0, 9):
    assert int(orientation.read(encode(number, fmt))) == 1


def test_damaged_exif_data_are_ignored():
  encoded = encode(6)
  start = encoded.index(b'Exif\0\0') + 6
  size = int.from_bytes(encoded[start - 8 : start - 6], 'big') - 8
  for end in range(start, start + size, 3):
    damaged = encoded[:start] + b'\xee' * (end - start) + encoded[end:]
    assert images.decode(damaged).shape[2] == 3


def test_exif_data_may_follow_other_segments():
  encoded = encode(6)
  profile = b'\xff\xe2\xff\xff' + b'\0' * 65533
  late = encoded[:2] + 3 * profile + encoded[2:]
  assert int(orientation.read(late)) == 6


class Photos(tfds.core.GeneratorBasedBuilder):
  """One photograph per orientation, with the original file."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self):
    image = tfds.features.Image(shape=(None, None, 3), encoding_format='jpeg')
    return tfds.core.DatasetInfo(
      builder=self, features=tfds.features.FeaturesDict({'image': image})
    )

  def _split_generators(self, dl_manager):
    return {'train': self._generate_examples()}

  def _generate_examples(self):
    for number in range(1, 9):
      yield number, {'image': io.BytesIO(encode(number))}


def test_tfds_images_are_decoded_as_stored(tmp_path, tiny_config):
  Photos(data_dir=tmp_path, file_format='tfrecord').download_and_prepare()
  tiny_config.update(dataset='photos', tfds_data_dir=str(tmp_path))
  source = sources.open_split(tiny_config, 'train', ('image',))
  stored = images.decode(encode(1))
  for number in range(8):
    record = source.record(number)
    assert int(orientation.read(record['record'])) in range(1, 9)
    seen = images.decode(source.read(record)['image'])
    np.testing.assert_array_equal(seen, stored)


@pytest.mark.parametrize('fmt', ['JPEG', 'PNG', 'WEBP'])
def test_removing_exif_data_gives_the_stored_pixels(fmt):
  encoded = encode(6, fmt)
  found = orientation.as_stored(encoded)
  np.testing.assert_array_equal(
    images.decode(found), images.decode(encoded, upright=False)
  )
