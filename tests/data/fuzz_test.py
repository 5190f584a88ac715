"""Damaged images either decode or raise an error that names the file."""

import io

import numpy as np
from PIL import Image
import pillow_heif
import pytest

from vit_jax import preprocess
from vit_jax.data.images import images

_LIMIT = 10**6
pillow_heif.register_heif_opener()


def encode(fmt, **kwargs):
  rng = np.random.RandomState(0)
  pixels = np.kron(rng.randint(0, 255, (5, 7, 3)), np.ones((6, 6, 1)))
  image = Image.fromarray(pixels.astype(np.uint8))
  buffer = io.BytesIO()
  image.save(buffer, fmt, **kwargs)
  return buffer.getvalue()


FILES = {
  'jpeg': encode('JPEG'),
  'progressive': encode('JPEG', progressive=True),
  'png': encode('PNG'),
  'gif': encode('GIF'),
  'bmp': encode('BMP'),
  'webp': encode('WEBP'),
  'tiff': encode('TIFF'),
  'lzw tiff': encode('TIFF', compression='tiff_lzw'),
  'avif': encode('AVIF'),
  'heic': encode('HEIF'),
  'jpeg 2000': encode('JPEG2000'),
}


def mutate(data: bytes, rng) -> bytes:
  """Flips, overwrites, inserts, repeats or deletes some bytes, or truncates."""
  data = bytearray(data)
  for _ in range(rng.randint(1, 4)):
    # The first bytes are the header, where damage is worst.
    end = len(data) if rng.rand() < 0.5 else min(len(data), 64)
    at, size = rng.randint(max(1, end)), int(2 ** rng.uniform(0, 6))
    kind = rng.randint(6)
    if kind == 0 and data:
      data[min(at, len(data) - 1)] ^= 1 << rng.randint(8)
    elif kind == 1:
      data[at : at + size] = bytes([rng.choice([0, 255, 127])]) * size
    elif kind == 2:
      data[at:at] = rng.bytes(size)
    elif kind == 3:
      data[at:at] = data[at : at + size]
    elif kind == 4:
      del data[at : at + size]
    else:
      del data[at:]
  return bytes(data)


@pytest.mark.parametrize('kind', FILES)
def test_damaged_images(kind, tmp_path):
  rng = np.random.RandomState(len(kind))
  path = tmp_path / 'image.jpg'
  refused = 0
  for _ in range(45):
    path.write_bytes(mutate(FILES[kind], rng))
    error = None
    try:
      image = preprocess.from_user(path, images.decode, _LIMIT)
    except ValueError as e:
      error = e
    if error is None:
      assert image.dtype == np.uint8
      assert 0 < image.shape[0] * image.shape[1] <= _LIMIT
      assert image.shape[2] == 3
    else:
      refused += 1
      assert type(error) is ValueError
      assert str(path) in str(error)
      assert '\n' not in str(error)
    why = images.broken_reason(str(path).encode(), _LIMIT)
    assert isinstance(why, str)
    assert '\n' not in why
  assert refused > 5
