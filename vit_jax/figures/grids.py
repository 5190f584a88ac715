"""Draws small images in a grid with captions, for TensorBoard and a workdir."""

from collections.abc import Mapping, Sequence
import math
from typing import NamedTuple

import numpy as np
from PIL import Image

from vit_jax.figures import colors, drawing

RIGHT, WRONG = colors.BLUE, colors.VERMILION  # Colours of predictions.
# Images with a shorter side below this are enlarged; in pixels.
LEAST = 96
# Value of `most` for pictures that a run draws repeatedly; in pixels.
MOST = 128
_GAP, _TITLE, _LINE = 8, 20, 15  # Pixels.
# Size of the font in pixels, and width of a letter of DejaVu Sans Mono in this size.
_FONT_SIZE, _LETTER = 10, 6
_MOST_LINES = 5  # Maximum number of lines of a wrapped line of a caption.


class Caption(NamedTuple):
  """Text below an image; lines wider than the image are wrapped."""

  text: str  # One or more lines.
  color: str = 'black'  # A matplotlib colour, such as RIGHT or WRONG.


def to_pixels(images: np.ndarray) -> np.ndarray:
  """Converts images, float [..., H, W, C] in [-1, 1], to uint8 [..., H, W, 3].

  C is 3, or 1 for grey.
  """
  images = np.nan_to_num(np.asarray(images, np.float32))
  pixels = ((images + 1) * 127.5).round().clip(0, 255).astype(np.uint8)
  return np.broadcast_to(pixels, (*pixels.shape[:-1], 3))


def heat(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
  """Colours maps: 0 is dark blue, the largest value of each map is yellow.

  Takes float [n, h, w], not negative; returns uint8 [n, *size, 3].
  """
  import matplotlib

  values = np.nan_to_num(np.asarray(values, np.float32))
  largest = values.max(axis=(1, 2), keepdims=True)
  scaled = values / np.where(largest > 0, largest, 1.0)
  pixels = matplotlib.colormaps['viridis'](scaled, bytes=True)[..., :3]
  return _resized(pixels, *size, Image.Resampling.NEAREST)


def grid(
  images: np.ndarray,
  captions: Sequence[Caption] = (),
  columns: int = 4,
  titles: Sequence[str] = (),
  most: int | None = None,
) -> np.ndarray:
  """Draws images row by row, on white; returns uint8 [height, width, 3].

  Images are uint8 [n, H, W, 3], enlarged by a whole factor if the shorter side is below
  LEAST, and shrunk if it is above `most`. There is a caption for each image, or none,
  and a title above each column, or none.
  """
  height, width = _cell(images.shape[1:3], most)
  shrinks = height < images.shape[1]
  method = Image.Resampling.BOX if shrinks else Image.Resampling.NEAREST
  images = _resized(images, height, width, method)
  line_length = width // _LETTER
  texts = []
  for caption in captions:
    text = drawing.wrapped(caption.text, line_length, _MOST_LINES)
    texts.append(text.split('\n'))
  num_lines = max(map(len, texts), default=0)
  top = _TITLE if titles else _GAP
  across = width + _GAP
  down = height + _GAP + num_lines * _LINE
  rows = math.ceil(len(images) / columns)
  size = (rows * down + top, columns * across + _GAP, 3)
  canvas = np.full(size, 255, np.uint8)
  labels = []  # (x, baseline, text, colour).
  for i, title in enumerate(titles):
    labels.append((_GAP + i * across, top - 6, title[:line_length], 'black'))
  for i, image in enumerate(images):
    row, column = divmod(i, columns)
    x, y = _GAP + column * across, top + row * down
    canvas[y : y + height, x : x + width] = image
    if captions:
      for number, line in enumerate(texts[i], 1):
        baseline = y + height + number * _LINE - 2
        labels.append((x, baseline, line, captions[i].color))
  return drawing.write(canvas, labels, _FONT_SIZE) if labels else canvas


def side_by_side(
  images: Mapping[str, np.ndarray], most: int | None = MOST
) -> np.ndarray:
  """Draws a row for each image, with a column for each version of it.

  The versions are float [n, H, W, C] in [-1, 1], by title.
  """
  versions = np.stack(list(images.values()), axis=1)  # [n, columns, H, W, C]
  return grid(
    to_pixels(versions.reshape(-1, *versions.shape[2:])),
    columns=len(images),
    titles=tuple(images),
    most=most,
  )


def _cell(size: tuple[int, int], most: int | None) -> tuple[int, int]:
  """Returns the (height, width) in pixels at which an image is drawn."""
  short = min(size)
  scale = 1.0 if most is None else min(1.0, most / short)
  if short < LEAST:
    scale = -(-LEAST // short)
  return round(size[0] * scale), round(size[1] * scale)


def _resized(
  images: np.ndarray, height: int, width: int, method: Image.Resampling
) -> np.ndarray:
  """Resizes images, and returns uint8 [n, height, width, 3]."""
  if images.shape[1:3] == (height, width):
    return images
  resized = [Image.fromarray(image).resize((width, height), method) for image in images]
  return np.stack(resized) if resized else np.zeros((0, height, width, 3), np.uint8)
