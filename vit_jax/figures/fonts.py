"""Fonts for text in pictures: letters that a font lacks would become boxes.

Pillow's own font has the letters of English alone. matplotlib, if it is
installed, brings DejaVu, which has Latin letters of all languages, Greek,
Cyrillic, Hebrew and Arabic.
"""

import functools
import importlib.util
import pathlib
import unicodedata

from PIL import ImageFont


def drawable(text: str, size: float):
  """Returns a text as a font can draw it, and the font, `size` pixels high.

  Without matplotlib, letters lose their accents, or become '?'.
  """
  # Pillow cannot draw a lone surrogate.
  text = text.encode('utf-8', 'replace').decode()
  path = None if text.isascii() else _dejavu()
  if path is not None:
    return text, ImageFont.truetype(path, size)
  parts = unicodedata.normalize('NFKD', text)
  plain = ''.join(c for c in parts if not unicodedata.combining(c))
  plain = plain.encode('ascii', 'replace').decode()
  return plain, ImageFont.load_default(size)


@functools.cache
def _dejavu() -> pathlib.Path | None:
  """Returns the path of matplotlib's font; does not import matplotlib."""
  spec = importlib.util.find_spec('matplotlib')
  if spec is None:
    return None
  folder = pathlib.Path(spec.origin).parent
  return folder / 'mpl-data' / 'fonts' / 'ttf' / 'DejaVuSans.ttf'
