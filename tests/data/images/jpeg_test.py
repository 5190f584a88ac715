"""Tests of JPEG files: truncation, and decoding at reduced size."""

import io

import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from vit_jax import preprocess
from vit_jax.configs import common
from vit_jax.data.images import images, jpeg


def encode(image, **kwargs):
  buffer = io.BytesIO()
  image.save(buffer, 'JPEG', **kwargs)
  return buffer.getvalue()


def cut(data, share):
  """Returns the first part of a file."""
  return data[: int(len(data) * share)]


def textured(height, width, seed=0):
  """A picture with coarse and fine structure, like a photograph."""
  rng = np.random.RandomState(seed)
  image = np.zeros((height, width, 3))
  for size in (4, 16, 64):
    part = rng.randint(0, 255, (size, size, 3), dtype=np.uint8)
    part = Image.fromarray(part).resize((width, height), Image.BICUBIC)
    image += np.asarray(part, float) / 3
  return Image.fromarray(image.astype(np.uint8))


PICTURE = textured(203, 301)
KINDS = {
  'colour': (PICTURE, {}),
  'cmyk': (PICTURE.convert('CMYK'), {}),
  'restarts': (PICTURE, {'restart_marker_rows': 2}),
  'progressive': (PICTURE, {'progressive': True}),
}
decode = tf.function(images.decode, reduce_retracing=True)


@pytest.mark.parametrize('kind', KINDS)
def test_truncated_file_is_not_an_image(kind):
  picture, kwargs = KINDS[kind]
  data = encode(picture, **kwargs)
  assert decode(tf.constant(data)).shape == (203, 301, 3)
  for share in (0.3, 0.7):
    with pytest.raises(images.decode_errors(), match='Invalid JPEG'):
      decode(tf.constant(cut(data, share)))


def test_crop_fails_only_if_it_needs_missing_data():
  half = tf.constant(cut(encode(PICTURE), 0.5))
  above = jpeg.decode(half, window=tf.constant([0, 0, 60, 60]))
  whole = jpeg.decode(tf.constant(encode(PICTURE)), window=tf.constant([0, 0, 60, 60]))
  np.testing.assert_array_equal(above, whole)
  with pytest.raises(images.decode_errors(), match='Invalid JPEG'):
    jpeg.decode(half, window=tf.constant([20, 20, 170, 60]))


@pytest.mark.parametrize(
  'shape, size, want',
  [
    ((3000, 4000), (224, 224), 8),
    ((896, 896), (224, 224), 4),
    ((895, 4000), (224, 224), 2),
    ((448, 2000), (224, 500), 2),
  ],
)
def test_reduced_size_is_at_least_the_target_size(shape, size, want):
  assert int(jpeg.ratio(tf.constant(shape), size)) == want


def test_reduced_decoding_of_large_files_looks_the_same():
  pp = common.get_config().pp
  pp.crop = 32
  large, small = textured(300, 420), textured(60, 90)
  for seed in (None, tf.constant([0, 1], tf.int64)):
    found = {}
    for shrink in (True, False):
      pp.jpeg_shrink = shrink
      found[shrink] = [
        preprocess.prepare(tf.constant(encode(x, quality=95)), seed, pp).numpy()
        for x in (large, small)
      ]
    np.testing.assert_array_equal(found[True][1], found[False][1])
    differences = np.abs(found[True][0] - found[False][0])
    assert 0 < differences.mean() < 0.2
