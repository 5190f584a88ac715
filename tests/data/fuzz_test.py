"""Damaged files of every kind give an image, or one error that names the file."""

import io
import json

import numpy as np
from PIL import Image
import pytest

from vit_jax import preprocess
from vit_jax.data import manifest
from vit_jax.data.images import images

_LIMIT = 10**6


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
}


def mutate(data: bytes, rng) -> bytes:
  """Flips, overwrites, inserts, repeats, takes away, or swaps some bytes."""
  data = bytearray(data)
  for _ in range(rng.randint(1, 4)):
    # The first bytes are a header, where damage is worst.
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


def attempt(function, *args, **kwargs):
  """Returns (result, None) or (None, the ValueError)."""
  try:
    return function(*args, **kwargs), None
  except ValueError as e:
    return None, e


@pytest.mark.parametrize('kind', FILES)
def test_damaged_images(kind, tmp_path):
  rng = np.random.RandomState(len(kind))
  path = tmp_path / 'image.jpg'
  refused = 0
  for _ in range(45):
    path.write_bytes(mutate(FILES[kind], rng))
    image, error = attempt(preprocess.from_user, path, images.decode, _LIMIT)
    if error is None:
      assert image.dtype == np.uint8
      assert 0 < image.shape[0] * image.shape[1] <= _LIMIT
      assert image.shape[2] == 3
    else:
      refused += 1
      assert type(error) is ValueError
      assert str(path) in str(error)
      assert '\n' not in str(error)
    why = images.why_broken(str(path).encode(), _LIMIT)
    assert isinstance(why, str)
    assert '\n' not in why
  assert refused > 5


LINES = b"""{"image": "a.png", "label": "cat", "x": [1, 2.5], "y": {"z": true}}
{"image": "a.png", "label": ["dog", "cat"], "x": [3], "y": {"z": false}}
{"image": "a.png", "label": null, "x": [], "o": [{"b": [1, 2], "c": "d"}]}
{"image": "a.png", "label": 3, "objects": [], "x": [1e400, NaN]}
"""
CLASSES = json.dumps({'label': ['cat', 'dog'], 'o/c': ['d']}).encode()
VALUES = (
  b'null', b'[]', b'{}', b'-1', b'1e999', b'NaN', b'[[1], [2, 3], []]', b'true',
  b'"x"', b'[1, "x"]', b'[{}]', b'\xff',
)  # fmt: skip


def replace_value(data, rng):
  """Puts another value where one stands."""
  starts = [i for i, c in enumerate(data) if c in b':[,']
  at = starts[rng.randint(len(starts))] + 1
  ends = [i for i in range(at, len(data)) if data[i] in b',]}'] or [len(data)]
  return data[:at] + VALUES[rng.randint(len(VALUES))] + data[ends[0] :]


def test_damaged_manifests(tmp_path):
  Image.new('RGB', (4, 4)).save(tmp_path / 'a.png')
  rng = np.random.RandomState(0)
  refused = 0
  for i in range(120):
    lines = LINES.splitlines(keepends=True)[: rng.randint(1, 5)]
    files = {'train.jsonl': b''.join(lines), 'classes.json': CLASSES}
    name = 'train.jsonl' if i % 4 else 'classes.json'
    change = mutate if rng.rand() < 0.4 else replace_value
    files[name] = change(files[name], rng)
    for other, content in files.items():
      (tmp_path / other).write_bytes(content)
    found, error = attempt(
      manifest.read_split,
      str(tmp_path),
      'train',
      ('image', 'label?', 'x?', 'y?', 'o?'),
      broken='trust',
    )
    if error is None:
      assert len(found[0]['image']) >= 1
    else:
      refused += 1
      assert type(error) is ValueError, repr(error)
      assert str(tmp_path) in str(error)
  assert 30 < refused < 120
