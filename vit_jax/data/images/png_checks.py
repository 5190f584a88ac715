"""Checks PNG files, whose damage Pillow does not always report.

Pillow compares no checksums of the pixels, and missing rows become zeros.
"""

from collections.abc import Iterator
import struct
import zlib

import numpy as np

_MAGIC = b'\x89PNG\r\n\x1a\n'
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # By the type of colour.


def check(encoded: bytes, pixels: np.ndarray) -> None:
  """Raises ValueError if a PNG has damaged or too few pixels.

  Files of other formats pass. Missing rows of an interlaced PNG are not noticed.

  Args:
    encoded: the content of a file.
    pixels: what Pillow has read from it, [height, width, ...].
  """
  if not encoded.startswith(_MAGIC):
    return
  compressed = []
  for name, data, checksum in _chunks(encoded):
    if name == b'IDAT':
      if zlib.crc32(data, zlib.crc32(name)) != checksum:
        raise ValueError('its pixels are damaged: their checksum differs')
      compressed.append(data)
  if pixels[-1].any():  # All rows are there.
    return
  width, height, depth, color, *_, interlace = struct.unpack_from(
    '>IIBBBBB', encoded, len(_MAGIC) + 8
  )
  row_bits = width * depth * _CHANNELS[color]
  size = height * (1 + -(-row_bits // 8))  # Each row begins with its filter.
  rows = zlib.decompressobj().decompress(b''.join(compressed), size)
  if not interlace and len(rows) < size:
    raise ValueError(f'it has fewer rows than the {height:,} of its header')


def _chunks(encoded: bytes) -> Iterator[tuple[bytes, bytes, int]]:
  """Yields name, content and checksum of each chunk."""
  start = len(_MAGIC)
  while start + 8 <= len(encoded):
    size, name = struct.unpack_from('>I4s', encoded, start)
    end = start + 8 + size
    checksum = int.from_bytes(encoded[end : end + 4])
    yield name, encoded[start + 8 : end], checksum
    start = end + 4
