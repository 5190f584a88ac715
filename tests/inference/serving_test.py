"""Tests that servers prepare images like predictions, which use TensorFlow."""

import io
import json
import subprocess
import sys

import numpy as np
from PIL import Image
import pytest
from sklearn import datasets
import tensorflow as tf

from vit_jax import preprocess
from vit_jax.configs import common
from vit_jax.inference import serving

PHOTO = datasets.load_sample_images().images[0][::4, ::4]  # [107, 160, 3].
PIXELS = np.random.RandomState(0).randint(0, 2**16, (9, 12, 4), np.uint16)


def encoded(pixels, kind='PNG', **options):
  buffer, image = io.BytesIO(), pixels
  if isinstance(pixels, np.ndarray):
    image = Image.fromarray(pixels)
  image.save(buffer, kind, **options)
  return buffer.getvalue()


def turned():
  exif = Image.Exif()
  exif[274] = 6
  return encoded(PHOTO, exif=exif)


BYTES = PIXELS.astype(np.uint8)
PALETTE = Image.fromarray(BYTES[..., :3]).quantize(16)
FILES = {
  'one bit': encoded(BYTES[..., 0] > 127),
  'grey': encoded(BYTES[..., 0]),
  'grey of 16 bits': encoded(PIXELS[..., 0]),
  'grey and alpha': encoded(Image.fromarray(BYTES).convert('LA')),
  'a transparent grey': encoded(BYTES[..., 0], transparency=int(BYTES[0, 0, 0])),
  'colours': encoded(BYTES[..., :3]),
  'colours and alpha': encoded(BYTES),
  'palette': encoded(PALETTE),
  'palette with alpha': encoded(PALETTE, transparency=bytes(range(0, 256, 16))),
  'turned by EXIF': turned(),
  'WebP with alpha': encoded(BYTES, 'WEBP', lossless=True),
  'GIF with alpha': encoded(BYTES, 'GIF'),
}


HOW = {
  'resize_mode': 'squash', 'interpolation': 'bilinear', 'antialias': False,
  'crop_rounding': 'down',
}  # fmt: skip


def settings(channels=3, resize=None, **changes):
  """`config.pp`, and its settings in model.json."""
  pp = common.get_config().pp
  how = {**HOW, **{key: changes.pop(key) for key in HOW if key in changes}}
  with pp.ignore_type():
    pp.update(crop=(8, 10), resize=resize, channels=channels, **how)
    pp.jpeg_shrink = not pp.antialias
  facts = {
    **how,
    'size': [8, 10], 'resize': resize, 'channels': channels, 'range': [-1, 1],
    'jpeg_shrink': bool(pp.jpeg_shrink), **changes,
  }  # fmt: skip
  return pp, facts


@pytest.mark.parametrize('name', FILES)
def test_servers_and_predictions_have_the_same_pixels(name):
  for channels in (3, 1):
    pp, facts = settings(channels)
    got = serving.prepare(FILES[name], facts)
    want = preprocess.prepare(FILES[name], None, pp).numpy()
    assert (got.shape, got.dtype) == ((8, 10, channels), np.float32)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.ptp(got) > 0.5


@pytest.mark.parametrize('resize', [None, 40, (50, 30)])
def test_photos_are_resized_and_cropped_as_for_predictions(resize):
  pp, facts = settings(resize=resize)
  photo = datasets.load_sample_images().images[0]
  for kind, most in (('PNG', 1e-4), ('JPEG', 0.05)):
    file = encoded(photo, kind)
    got = serving.prepare(file, json.loads(json.dumps(facts)))
    np.testing.assert_allclose(got, preprocess.prepare(file, None, pp), atol=most)
  if resize is None:  # JPEGs are downscaled while decoding, which averages pixels.
    whole = np.asarray(tf.image.resize(photo, [8, 10])) / 127.5 - 1
    assert np.abs(got - whole).mean() > 0.05


@pytest.mark.parametrize('interpolation', ['bilinear', 'bicubic', 'lanczos'])
def test_photos_are_resized_by_pillow_where_published_weights_say_so(interpolation):
  photo = datasets.load_sample_images().images[0]
  file = encoded(photo[:301, :555], 'JPEG')
  for resize, mode, rounding in (
    (None, 'squash', 'down'), (41, 'squash', 'even'), ((16, 23), 'squash', 'even'),
    ((16, 20), 'cover', 'down'),
  ):  # fmt: skip
    pp, facts = settings(
      resize=resize, resize_mode=mode, crop_rounding=rounding, antialias=True,
      interpolation=interpolation,
    )  # fmt: skip
    got = serving.prepare(file, json.loads(json.dumps(facts)))
    want = preprocess.prepare(file, None, pp).numpy()
    assert np.abs(got - want).mean() < 0.5 / 127.5
    assert np.abs(got - want).max() < 8 / 127.5


def test_pillow_images_match_their_files():
  for name in ('grey of 16 bits', 'palette with alpha', 'a transparent grey'):
    file = FILES[name]
    decode = lambda file: preprocess.prepare(file, None, settings()[0]).numpy()
    got = preprocess.from_user(Image.open(io.BytesIO(file)), decode)
    np.testing.assert_allclose(got, decode(file), atol=1e-6)


def test_models_for_canvases_are_rejected():
  canvas = {'size': [32, 32], 'shorter_side': 32, 'longest_side': 40}
  for facts in (canvas, settings(size=['height', 'width'])[1]):
    with pytest.raises(ValueError, match='preprocessing=.*--image_size'):
      serving.prepare(FILES['palette'], facts)


def test_the_whole_description_is_rejected():
  with pytest.raises(ValueError, match='whole model.json'):
    serving.prepare(b'', {'classes': ['a'], 'preprocessing': {'size': [8, 8]}})


def test_damaged_settings_are_rejected():
  facts = settings()[1]
  for key in 'size', 'channels', 'range', 'jpeg_shrink', 'antialias', 'resize_mode':
    damaged = {name: x for name, x in facts.items() if name != key}
    with pytest.raises(ValueError, match=f'preprocessing=.* lacks {key}: pass'):
      serving.prepare(FILES['palette'], damaged)


def test_servers_load_neither_jax_nor_tensorflow():
  code = (
    'import sys; from vit_jax.inference import serving; '
    'from vit_jax.data.texts import tokenizers; '
    "print([x for x in ('jax', 'flax', 'tensorflow') if x in sys.modules])"
  )
  found = subprocess.run([sys.executable, '-c', code], capture_output=True)
  assert found.stdout.split() == [b'[]'], found.stderr
