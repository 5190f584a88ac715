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
_PLAIN = {'ß': 'ss', 'æ': 'ae', 'œ': 'oe', 'ø': 'o', 'ł': 'l', 'đ': 'd'}


def drawable(text: str, size: float):
  """Returns a font, and a text as the font can draw it.

  Args:
    text: any text. Letters that no font has lose their accents, or become '?'.
    size: height of the letters in pixels.

  Returns:
    (text, font of Pillow).
  """
  # Pillow cannot draw a lone surrogate.
  text = text.encode('utf-8', 'replace').decode()
  font = ImageFont.load_default(size)
  if text.isascii():
    return text, font
  path = _dejavu()
  if path is not None:
    font = ImageFont.truetype(path, size)
  known = functools.partial(_has, path)
  found = ''.join(c if known(c) else _replaced(c, known) for c in text)
  if found != text:
    logging.log_first_n(
      logging.WARNING,
      "Pictures show '%s' as '%s': no font here has all of its letters%s",
      1,
      text,
      found,
      '' if path else " (pip install -e '.[plots]' brings one with more)",
    )
  return found, font


@functools.cache
def _dejavu() -> str | None:
  """Returns the path of matplotlib's font; does not import matplotlib."""
  spec = importlib.util.find_spec('matplotlib')
  for folder in spec.submodule_search_locations or () if spec else ():
    path = pathlib.Path(folder, 'mpl-data', 'fonts', 'ttf', 'DejaVuSans.ttf')
    if path.exists():
      return str(path)
  return None


@functools.cache
def _has(path, letter) -> bool:
  """Returns whether a font, Pillow's own for None, has a letter."""
  size = 20
  font = (
    ImageFont.truetype(path, size) if path else ImageFont.load_default(size)
  )
  missing = font.getmask('\U0010ffff')  # No letter.
  drawn = font.getmask(letter)
  return drawn.size != missing.size or bytes(drawn) != bytes(missing)


def _replaced(letter, known) -> str:
  low = letter.lower()
  if low in _PLAIN:
    plain = _PLAIN[low]
    return plain if letter == low else plain.capitalize()
  parts = unicodedata.normalize('NFKD', letter)
  parts = [c for c in parts if not unicodedata.combining(c)]
  return ''.join(c if known(c) else '?' for c in parts)
