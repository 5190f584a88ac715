"""Draws boxes, segments or classes with names on images; needs only Pillow."""

from collections.abc import Sequence
from typing import Any

from etils import epath
import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from vit_jax.data.images import images as images_lib
from vit_jax.figures import colors, drawing

LEAST = 256  # Pixels to which the shorter side of an image is enlarged.


def draw(image: np.ndarray, boxes: np.ndarray, names: Sequence[str]) -> np.ndarray:
  """Draws boxes on an image; each class has a colour.

  Args:
    image: uint8 [H, W, 3], enlarged by a whole factor if it is small.
    boxes: corners [n, 4], x0, y0, x1, y1 in pixels.
    names: texts, whose first word decides the colour.
  """
  pixels = drawing.enlarged(image, LEAST)
  factor = len(pixels) // len(image)
  canvas = Image.fromarray(pixels)
  pen = ImageDraw.Draw(canvas)
  line = max(2, min(canvas.size) // 200)
  last = np.array(canvas.size) - 1
  for box, name in zip(boxes, names):
    (x0, y0), (x1, y1) = (np.reshape(box, (2, 2)) * factor).clip(0, last)
    frame = (x0, y0, max(x0, x1), max(y0, y1))
    pen.rectangle(frame, outline=_color(name), width=line)
    _write(pen, (x0 + line, y0 + line), name, canvas.size)
  return np.asarray(canvas)


def overlay(
  image: np.ndarray,
  numbers: np.ndarray,
  names: Sequence[str],
  tints: np.ndarray | None = None,
) -> np.ndarray:
  """Colours the segments of an image, in shades of their own colour.

  White lines are between them.

  Args:
    image: see `draw`.
    numbers: number of the segment of each pixel, int [H, W], from 1; pixels of none,
      0, stay as they are.
    names: names of the segments, see `draw`.
    tints: colours of the segments, [n, 3]; by default those of the names.
  """
  if tints is None:
    tints = np.array([ImageColor.getrgb(_color(name)) for name in names])
  pixels = drawing.enlarged(image, LEAST).astype(np.float32)
  factor = len(pixels) // len(image)
  large = np.asarray(numbers).repeat(factor, 0).repeat(factor, 1)
  table = np.concatenate([np.zeros((1, 3)), np.reshape(tints, (-1, 3))])
  shades = pixels.mean(axis=-1, keepdims=True) / 2 + table[large] / 2
  pixels = np.where(large[..., None] > 0, shades, pixels)
  is_edge = np.zeros(large.shape, bool)
  is_edge[1:] |= large[1:] != large[:-1]
  is_edge[:, 1:] |= large[:, 1:] != large[:, :-1]
  pixels[is_edge] = 255
  canvas = Image.fromarray(pixels.astype(np.uint8))
  pen = ImageDraw.Draw(canvas)
  for number, name in enumerate(names, start=1):
    rows, columns = np.nonzero(large == number)  # Row by row.
    if len(rows):
      row = rows[len(rows) // 2]
      columns = columns[rows == row]
      position = int(columns[len(columns) // 2]), int(row)
      tint = tuple(np.asarray(tints[number - 1]).tolist())
      _write(pen, position, name, canvas.size, 'mm', tint)
  return np.asarray(canvas)


def _color(name: str) -> str:
  word = name.split(' ')[0]
  return colors.FRAMES[sum(word.encode()) % len(colors.FRAMES)]


def _write(
  pen: Any,
  position: tuple[int, int],
  name: str,
  size: tuple[int, int],
  anchor: str = 'la',
  tint: tuple[int, ...] | None = None,
) -> None:
  """Writes a name on a ground of a colour, by default its own."""
  font = ImageFont.load_default(max(11, min(size) // 40))
  tint = ImageColor.getrgb(_color(name)) if tint is None else tint
  pen.rectangle(pen.textbbox(position, name, font, anchor), fill=tint)
  pen.text(position, name, 'black' if sum(tint) > 300 else 'white', font, anchor)


def save(pictures: Sequence[np.ndarray], path: epath.PathLike) -> None:
  """Writes pictures of any sizes below each other into a PNG."""
  width = max(picture.shape[1] for picture in pictures)
  rows = []
  for picture in pictures:
    padding = ((0, 0), (0, width - picture.shape[1]), (0, 0))
    rows.append(np.pad(picture, padding, constant_values=255))
  epath.Path(path).write_bytes(images_lib.encode_png(np.concatenate(rows)))
