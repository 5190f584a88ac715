"""Fonts for text in pictures: letters that a font lacks would become boxes.

Pillow's own font has the letters of English alone. matplotlib, if it is
installed, brings DejaVu, which has Latin letters of all languages, Greek,
Cyrillic, Hebrew and Arabic.
"""

import functools
import importlib.util
import pathlib
import unicodedata

from absl import logging
from PIL import ImageFont

# Letters that Unicode does not decompose.
_PLAIN = str.maketrans(
  {'ß': 'ss', 'æ': 'ae', 'œ': 'oe', 'ø': 'o', 'ł': 'l', 'đ': 'd'}
  | {'Æ': 'Ae', 'Œ': 'Oe', 'Ø': 'O', 'Ł': 'L', 'Đ': 'D'}
)


def drawable(text: str, size: float):
  """Returns a text as a font can draw it, and the font, `size` pixels high.

  Letters that no font has lose their accents, or become '?'.
  """
  # Pillow cannot draw a lone surrogate.
  text = text.encode('utf-8', 'replace').decode()
  path = None if text.isascii() else _dejavu()
  found = ''.join(
    c if text.isascii() or _has(path, c) else _replaced(c, path) for c in text
  )
  if found != text:
    logging.log_first_n(
      logging.WARNING,
      "Pictures show '%s' as '%s': no font here has all of its letters%s",
      1,
      text,
      found,
      '' if path else " (pip install -e '.[plots]' brings one with more)",
    )
  return found, _font(path, size)


@functools.cache
def _dejavu() -> str | None:
  """Returns the path of matplotlib's font; does not import matplotlib."""
  spec = importlib.util.find_spec('matplotlib')
  for folder in spec.submodule_search_locations or () if spec else ():
    path = pathlib.Path(folder, 'mpl-data', 'fonts', 'ttf', 'DejaVuSans.ttf')
    if path.exists():
      return str(path)
  return None


def _font(path, size):
  """Returns the font of a file, or Pillow's own for None."""
  if path is None:
    return ImageFont.load_default(size)
  return ImageFont.truetype(path, size)


@functools.cache
def _has(path, letter) -> bool:
  """Returns whether a font has a letter."""
  font = _font(path, 20)
  missing, drawn = font.getmask('\U0010ffff'), font.getmask(letter)
  return drawn.size != missing.size or bytes(drawn) != bytes(missing)


def _replaced(letter, path) -> str:
  """Returns letters without accents, or '?', for one that a font lacks."""
  parts = unicodedata.normalize('NFKD', letter.translate(_PLAIN))
  parts = [c for c in parts if not unicodedata.combining(c)]
  return ''.join(c if _has(path, c) else '?' for c in parts)
