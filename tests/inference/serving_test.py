"""Tests of how servers prepare images, against predictions with TensorFlow."""

import io
import json
import struct
import subprocess
import sys
import zlib

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
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # By the colour type of a PNG.


def png(depth, colour, **chunks):
  """Writes a PNG of random bytes: Pillow writes few of all kinds."""

  def chunk(name, data):
    size, check = len(data), zlib.crc32(name + data)
    return struct.pack('>I', size) + name + data + struct.pack('>I', check)

  height, width = 9, 12
  row = (width * CHANNELS[colour] * depth + 7) // 8
  rng = np.random.RandomState(1)
  rows = b''.join(b'\0' + rng.bytes(row) for _ in range(height))
  header = struct.pack('>IIBBBBB', width, height, depth, colour, 0, 0, 0)
  return b''.join(
    [
      b'\x89PNG\r\n\x1a\n',
      chunk(b'IHDR', header),
      *(chunk(name.encode(), data) for name, data in chunks.items()),
      chunk(b'IDAT', zlib.compress(rows)),
      chunk(b'IEND', b''),
    ]
  )


def encoded(pixels, kind, **options):
  buffer = io.BytesIO()
  Image.fromarray(pixels).save(buffer, kind, **options)
  return buffer.getvalue()


def turned():
  exif = Image.Exif()
  exif[274] = 6
  return encoded(PHOTO, 'PNG', exif=exif)


PALETTE = np.random.RandomState(2).bytes(768)
FILES = {
  **{f'grey of {n} bits': png(n, 0) for n in (1, 2, 4, 8, 16)},
  **{f'colours of {n} bits': png(n, 2) for n in (8, 16)},
  **{f'grey and alpha of {n} bits': png(n, 4) for n in (8, 16)},
  **{f'colours and alpha of {n} bits': png(n, 6) for n in (8, 16)},
  'palette': png(8, 3, PLTE=PALETTE),
  'palette with alpha': png(8, 3, PLTE=PALETTE, tRNS=PALETTE[:256]),
  'a transparent grey': png(4, 0, tRNS=b'\0\5'),
  'turned by EXIF': turned(),
  'WebP with alpha': encoded(PIXELS.astype(np.uint8), 'WEBP', lossless=True),
  'GIF with alpha': encoded(PIXELS.astype(np.uint8), 'GIF'),
}


def settings(channels=3, resize=None, **changes):
  """`config.pp`, and what model.json says of it."""
  pp = common.get_config().pp
  with pp.ignore_type():
    pp.update(crop=(8, 10), resize=resize, channels=channels)
  facts = {
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
def test_photographs_are_resized_and_cropped_as_for_predictions(resize):
  pp, facts = settings(resize=resize)
  photo = datasets.load_sample_images().images[0]
  for kind, most in (('PNG', 1e-4), ('JPEG', 0.05)):
    file = encoded(photo, kind)
    got = serving.prepare(file, json.loads(json.dumps(facts)))
    np.testing.assert_allclose(got, preprocess.prepare(file, None, pp), atol=most)
  if resize is None:  # A JPEG is first made smaller, which averages pixels.
    whole = np.asarray(tf.image.resize(photo, [8, 10])) / 127.5 - 1
    assert np.abs(got - whole).mean() > 0.05


def test_transparent_pixels_are_white_and_the_upper_bits_count():
  """What a reader can check: 2/5 of opacity over white; 40,000 / 256 is 156."""
  pixels = np.full((8, 10, 4), (10, 100, 200, 102), np.uint8)
  pixels[4:, :, 3] = 0
  got = serving.prepare(encoded(pixels, 'PNG'), settings(range=[0, 255])[1])
  np.testing.assert_allclose(got[0, 0], [157, 193, 233], atol=1e-3)
  np.testing.assert_allclose(got[7, 0], [255, 255, 255], atol=1e-3)
  grey = encoded(np.full((8, 10), 40_000, np.uint16), 'PNG')
  got = serving.prepare(grey, settings(range=[0, 255])[1])
  np.testing.assert_allclose(got, 156, atol=1e-3)


def test_images_of_pillow_are_those_of_their_files():
  for name in ('grey of 16 bits', 'palette with alpha', 'a transparent grey'):
    file = FILES[name]
    decode = lambda file: preprocess.prepare(file, None, settings()[0]).numpy()
    got = preprocess.from_user(Image.open(io.BytesIO(file)), decode)
    np.testing.assert_allclose(got, decode(file), atol=1e-6)


def test_models_for_canvases_are_refused():
  canvas = {'size': [32, 32], 'shorter_side': 32, 'longest_side': 40}
  for facts in (canvas, settings(size=['height', 'width'])[1]):
    with pytest.raises(ValueError, match='preprocessing=.*--image_size'):
      serving.prepare(FILES['palette'], facts)


def test_servers_load_neither_jax_nor_tensorflow():
  code = (
    'import sys; from vit_jax.inference import serving; '
    'from vit_jax.data.texts import tokenizers; '
    "print([x for x in ('jax', 'flax', 'tensorflow') if x in sys.modules])"
  )
  found = subprocess.run([sys.executable, '-c', code], capture_output=True)
  assert found.stdout.split() == [b'[]'], found.stderr
