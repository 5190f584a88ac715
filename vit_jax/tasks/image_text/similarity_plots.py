"""Draws the matrix of the similarities of images and texts."""

from collections.abc import Sequence
import textwrap

import numpy as np
from PIL import Image, ImageDraw
from scipy import special

from vit_jax.figures import fonts, grids

_CELL, _GAP, _TEXT = 64, 4, 300  # Pixels: side of a cell, gap, width of texts.
_LINE, _FONT_SIZE = 15, 12


def matrix(images, texts: Sequence[str], logits) -> np.ndarray:
  """Draws the probabilities of texts for images: a column an image, a row a text.

  Args:
    images: float [n, H, W, C] in [-1, 1].
    texts: m texts.
    logits: float [n, m]. A cell has the share of the text among the texts for
      the image, by softmax, in percent.

  Returns:
    uint8 [height, width, 3].
  """
  shares = special.softmax(np.asarray(logits, np.float64), axis=1)
  step = _CELL + _GAP
  size = (_TEXT + len(images) * step, (len(texts) + 1) * step)
  canvas = Image.new('RGB', size, 'white')
  pen = ImageDraw.Draw(canvas)
  pixels = grids.to_pixels(images)
  colors = grids.heat(shares.T[None], shares.T.shape)[0]  # [m, n, 3]
  for column, image in enumerate(pixels):
    left = _TEXT + column * step
    small = Image.fromarray(image).resize((_CELL, _CELL))
    canvas.paste(small, (left, 0))
    for row in range(len(texts)):
      top = (row + 1) * step
      color = tuple(int(x) for x in colors[row, column])
      pen.rectangle((left, top, left + _CELL, top + _CELL), color)
      ink = 'black' if sum(color) > 384 else 'white'
      words = f'{100 * shares[column, row]:.0f}'
      line, font = fonts.drawable(words, _FONT_SIZE)
      pen.text((left + 8, top + _CELL / 2 - 8), line, ink, font)
  for row, text in enumerate(texts):
    lines = textwrap.wrap(text, _TEXT // 7)[:4]
    for i, line in enumerate(lines):
      line, font = fonts.drawable(line, _FONT_SIZE)
      place = (_GAP, (row + 1) * step + _GAP + i * _LINE)
      pen.text(place, line, 'black', font)
  return np.asarray(canvas)
