"""The formats of image files that this installation reads."""

import functools
import importlib
from typing import NamedTuple

from PIL import Image, features

from vit_jax import console
from vit_jax.data.images import multichannel

_PACKAGE = 'pillow_heif'  # Makes Pillow read HEIC.
HEIC_ENDINGS = ('.heic', '.heif')
_OTHER_VALUES = (
  'not of 8-bit colour: set the range of its values and its number of channels '
  '(--config.pp.range, --config.pp.channels)'
)


class _Format(NamedTuple):
  name: str  # Pillow's.
  endings: tuple[str, ...]
  feature: str | None = None  # Pillow's name of the feature, see PIL.features.


_JPEG = _Format('JPEG', ('.jpg', '.jpeg'))
# Some of Pillow's other readers start programs.
_BY_PILLOW = (
  _Format('PNG', ('.png',)),
  _Format('WEBP', ('.webp',), 'webp'),
  _Format('BMP', ('.bmp',)),
  _Format('GIF', ('.gif',)),
  _Format('TIFF', ('.tif', '.tiff')),
  _Format('AVIF', ('.avif',), 'avif'),
  _Format('HEIF', HEIC_ENDINGS),
  _Format('JPEG2000', ('.jp2', '.j2k', '.jpx'), 'jpg_2000'),
)


@functools.cache
def _readable() -> tuple[_Format, ...]:
  """Returns the formats that Pillow reads here; makes it read HEIC if possible."""
  Image.init()
  try:
    importlib.import_module(_PACKAGE).register_heif_opener()
  except ImportError:
    pass
  readable = []
  for image_format in _BY_PILLOW:
    is_built_in = image_format.feature is None or features.check(image_format.feature)
    if image_format.name in Image.OPEN and is_built_in:
      readable.append(image_format)
  return tuple(readable)


@functools.cache
def endings() -> tuple[str, ...]:
  """Returns the endings of the files that are read, in lower case."""
  readable = list(_JPEG.endings)
  for image_format in _readable():
    readable += image_format.endings
  return tuple(readable)


@functools.cache
def encoded_endings() -> tuple[bytes, ...]:
  """Returns `endings` as bytes, for names of files."""
  return tuple(ending.encode() for ending in endings())


def known_endings() -> str:
  """Says which endings are known, for messages."""
  endings_text = ', '.join((*endings(), multichannel.NPY_ENDING))
  return f'the known endings are {endings_text}, in upper or lower case'


def _iso_format(encoded: bytes) -> str | None:
  """Returns the format of an ISO base media file, whose "brands" name it; or None."""
  if encoded[4:8] != b'ftyp':
    return None
  brands = encoded[8 : int.from_bytes(encoded[:4])]
  return 'AVIF' if b'avi' in brands else 'HEIF'


def by_pillow(encoded: bytes) -> tuple[str, ...]:
  """Returns Pillow's names of the formats that a file, which is no JPEG, may have."""
  names = tuple(x.name for x in _readable())
  # Pillow's readers of AVIF and HEIF raise errors for files of the other.
  iso = _iso_format(encoded)
  if iso is None:
    return names
  return (iso,) if iso in names else ()


def why_unreadable(encoded: bytes) -> str:
  """Returns why Pillow cannot read the content of a file."""
  if encoded.startswith(multichannel.NPY):
    return f'an array (.npy) {_OTHER_VALUES}'
  if encoded.startswith(multichannel.TIFF):
    return f'a TIFF that is damaged, or {_OTHER_VALUES}'
  remedy = heic_remedy() if _iso_format(encoded) == 'HEIF' else ''
  return remedy or 'not an image of a known format, or truncated'


def heic_remedy() -> str:
  """Says how to read HEIC, for messages; '' if it is read."""
  if any(x.name == 'HEIF' for x in _readable()):
    return ''
  return console.install(_PACKAGE, 'heif', 'HEIC')
