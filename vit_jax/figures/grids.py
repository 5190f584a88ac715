"""Draws small images in a grid, with a caption below each; needs Pillow alone.

TensorBoard and the PNGs in a workdir show these grids. For figures of a paper,
draw the arrays that vit_jax/figures computes.
"""

from collections.abc import Mapping, Sequence
import textwrap
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from vit_jax.figures import colors, fonts

RIGHT, WRONG = colors.BLUE, colors.VERMILION  # Colours of predictions.
# Images with a shorter side below this are enlarged; in pixels.
LEAST = 96
# Value of `most` for pictures that a run draws repeatedly; in pixels.
MOST = 128
_GAP, _TITLE, _LINE, _FONT_SIZE = 8, 20, 15, 12
_MOST_LINES = 5  # Of one line of a caption; more lose their middle.
# Points of the colour map viridis, from 0 to 1.
_VIRIDIS = np.array(
  [
    (68, 1, 84), (71, 45, 123), (59, 82, 139), (44, 114, 142), (33, 145, 140),
    (39, 173, 129), (92, 200, 99), (170, 220, 50), (253, 231, 37),
  ]
)  # fmt: skip


class Caption(NamedTuple):
  """Text below an image; lines wider than the image are wrapped."""

  text: str  # One or more lines.
  color: str = 'black'  # As for Pillow, or RIGHT or WRONG.


def to_pixels(images) -> np.ndarray:
  """Converts images, float [..., H, W, C] in [-1, 1], to uint8 [..., H, W, 3].

  C is 3, or 1 for grey.
  """
  images = np.nan_to_num(np.asarray(images, np.float32))
  pixels = ((images + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
  return np.broadcast_to(pixels, (*pixels.shape[:-1], 3))


def heat(values, size: tuple[int, int]) -> np.ndarray:
  """Colours maps: 0 is dark blue, the largest value of each map is yellow.

  Takes float [n, h, w], not negative; returns uint8 [n, *size, 3].
  """
  values = np.nan_to_num(np.asarray(values, np.float32))
  largest = values.max(axis=(1, 2), keepdims=True)
  shares = values / np.where(largest > 0, largest, 1.0)
  points = np.linspace(0, 1, len(_VIRIDIS))
  channels = [np.interp(shares, points, channel) for channel in _VIRIDIS.T]
  pixels = np.stack(channels, axis=-1).round().astype(np.uint8)
  return _resized(pixels, *size, Image.Resampling.NEAREST)


def grid(
  images: np.ndarray,
  captions: Sequence[Caption] = (),
  columns: int = 4,
  titles: Sequence[str] = (),
  most: int | None = None,
) -> np.ndarray:
  """Draws images row by row, on white; returns uint8 [height, width, 3].

  Args:
    images: uint8 [n, H, W, 3]; if the shorter side is below LEAST, enlarged by
      a whole factor.
    captions: one for each image, or none at all.
    columns: number of images per row.
    titles: text above each column, or none at all.
    most: maximum length of the shorter side in pixels, to which larger images
      are shrunk; None for no maximum.
  """
  height, width = _cell(images.shape[1:3], most)
  shrinks = height < images.shape[1]
  how = Image.Resampling.BOX if shrinks else Image.Resampling.NEAREST
  images = _resized(images, height, width, how)
  texts = [_wrapped(caption.text, width) for caption in captions]
  lines = max(map(len, texts), default=0)
  top = _TITLE if titles else _GAP
  across, down = width + _GAP, height + _GAP + lines * _LINE
  canvas = Image.new(
    'RGB',
    (columns * across + _GAP, -(-len(images) // columns) * down + top),
    'white',
  )
  pen = ImageDraw.Draw(canvas)
  for i, title in enumerate(titles):
    _write(pen, (_GAP + i * across, 2), _wrapped(title, width)[:1])
  for i, image in enumerate(images):
    row, column = divmod(i, columns)
    corner = (_GAP + column * across, top + row * down)
    canvas.paste(Image.fromarray(image), corner)
    if captions:
      place = (corner[0], corner[1] + height + 1)
      _write(pen, place, texts[i], captions[i].color)
  return np.asarray(canvas)


def beside(images: Mapping[str, np.ndarray], most: int | None = MOST) -> np.ndarray:
  """Draws a row for each image, with a titled column for each version of it.

  The versions are float [n, H, W, C] in [-1, 1], by title; for `most` see `grid`.
  """
  versions = np.stack(list(images.values()), axis=1)  # [n, columns, H, W, C]
  return grid(
    to_pixels(versions.reshape(-1, *versions.shape[2:])),
    columns=len(images),
    titles=tuple(images),
    most=most,
  )


def _cell(size, most) -> tuple[int, int]:
  """Returns the (height, width) in pixels at which an image is drawn."""
  short = min(size)
  scale = 1.0 if most is None else min(1.0, most / short)
  if short < LEAST:
    scale = -(-LEAST // short)
  return round(size[0] * scale), round(size[1] * scale)


def _resized(images, height, width, how) -> np.ndarray:
  """Resizes images, and returns uint8 [n, height, width, 3]."""
  if images.shape[1:3] == (height, width):
    return images
  found = np.zeros((len(images), height, width, 3), np.uint8)
  for i, image in enumerate(images):
    found[i] = Image.fromarray(image).resize((width, height), how)
  return found


def _write(pen, corner, lines, color='black'):
  """Writes lines, as `_wrapped` returns them, below one another."""
  for i, (line, font) in enumerate(lines):
    pen.text((corner[0], corner[1] + i * _LINE), line, color, font)


def _wrapped(text, width) -> list[tuple]:
  """Returns lines of at most `width` pixels, each with its font."""
  found = []
  for line in text.split('\n'):
    line, font = fonts.drawable(line, _FONT_SIZE)
    letters = len(line) or 1
    while letters > 1 and any(
      font.getbbox(part)[2] > width for part in textwrap.wrap(line, letters)
    ):
      letters -= 1
    parts = textwrap.wrap(line, letters) or ['']
    if len(parts) > _MOST_LINES:  # The last may be a probability.
      parts[_MOST_LINES - 2 : -1] = ['...']
    found += [(part, font) for part in parts]
  return found
