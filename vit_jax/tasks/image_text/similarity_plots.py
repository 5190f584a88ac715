"""Draws the matrix of the similarities of images and texts."""

from collections.abc import Sequence
import textwrap

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy import special

from vit_jax.figures import grids

_CELL, _GAP, _TEXT = 64, 4, 300  # Pixels: side of a cell, gap, width of texts.


def matrix(images: np.ndarray, texts: Sequence[str], logits: np.ndarray) -> np.ndarray:
  """Draws the probabilities of texts for images: one column per image.

  Args:
    images: float [n, H, W, C] in [-1, 1].
    texts: m texts.
    logits: float [n, m]; a cell has the softmax over the texts, in percent.

  Returns:
    uint8 [height, width, 3].
  """
  probabilities = special.softmax(np.asarray(logits, np.float64), axis=1).T  # [m, n]
  step = _CELL + _GAP
  size = (_TEXT + len(images) * step, (len(texts) + 1) * step)
  canvas = Image.new('RGB', size, 'white')
  pen = ImageDraw.Draw(canvas)
  pen.font = ImageFont.load_default(12)
  for column, image in enumerate(grids.to_pixels(images)):
    small = Image.fromarray(image).resize((_CELL, _CELL))
    canvas.paste(small, (_TEXT + column * step, 0))
  [heat] = grids.heat(probabilities[None], probabilities.shape)
  colors = heat.astype(int)  # [m, n, 3]
  for row, text in enumerate(texts):
    y = (row + 1) * step
    lines = textwrap.wrap(text, _TEXT // 7)[:4]
    pen.text((_GAP, y + _GAP), '\n'.join(lines), 'black')
    for column, color in enumerate(colors[row]):
      x = _TEXT + column * step
      pen.rectangle((x, y, x + _CELL, y + _CELL), tuple(color))
      ink = 'black' if color.sum() > 384 else 'white'
      percent = f'{100 * probabilities[row, column]:.0f}'
      pen.text((x + 8, y + _CELL / 2 - 8), percent, ink)
  return np.asarray(canvas)
