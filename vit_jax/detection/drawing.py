"""Draws boxes with names on images; needs Pillow alone."""

from collections.abc import Sequence

from etils import epath
import numpy as np
from PIL import Image
from PIL import ImageDraw
from PIL import ImageFont

from vit_jax import preprocess
from vit_jax.files import images as images_lib

# Colours that colour-blind people can tell apart (Okabe and Ito, "Color
# Universal Design").
_COLORS = (
  '#E69F00', '#56B4E9', '#009E73', '#F0E442', '#D55E00', '#CC79A7', '#0072B2',
)  # fmt: skip
_LEAST = 256  # Smaller images are enlarged so that names can be read.


def draw(image, boxes, names: Sequence[str]) -> np.ndarray:
  """Draws boxes on an image; each class has a colour.

  Args:
    image: uint8 [H, W, 3]; enlarged by a whole factor if it is small.
    boxes: [n, 4], corners x0, y0, x1, y1 as shares of the image.
    names: text for each box; the first word decides the colour.

  Returns:
    uint8 [height, width, 3].
  """
  times = -(-_LEAST // min(image.shape[:2]))
  canvas = Image.fromarray(image)
  canvas = canvas.resize(
    (times * canvas.width, times * canvas.height), Image.Resampling.NEAREST
  )
  pen = ImageDraw.Draw(canvas)
  font = ImageFont.load_default(max(11, min(canvas.size) // 40))
  line = max(2, min(canvas.size) // 200)
  for box, name in zip(boxes, names):
    corners = np.asarray(box).reshape(2, 2) * canvas.size
    (x0, y0), (x1, y1) = corners.clip(0, np.array(canvas.size) - 1)
    word = name.split(' ')[0]
    color = _COLORS[sum(word.encode()) % len(_COLORS)]
    pen.rectangle((x0, y0, max(x0, x1), max(y0, y1)), outline=color, width=line)
    frame = pen.textbbox((x0 + line, y0 + line), name, font)
    pen.rectangle(frame, fill=color)
    pen.text((x0 + line, y0 + line), name, 'black', font)
  return np.asarray(canvas)


def draw_file(path, found) -> np.ndarray:
  """Draws the objects that a predictor found in an image file."""
  image = preprocess.from_user(path, images_lib.decode).numpy()
  height, width, _ = image.shape
  size = np.array([width, height, width, height])
  return draw(
    image,
    [np.array(box) / size for _, _, box in found],
    [f'{name} {100 * score:.0f}' for name, score, _ in found],
  )


def save(pictures: Sequence[np.ndarray], path):
  """Writes pictures of any sizes below each other into a PNG."""
  width = max(picture.shape[1] for picture in pictures)
  rows = [
    np.pad(
      picture,
      ((0, 0), (0, width - picture.shape[1]), (0, 0)),
      constant_values=255,
    )
    for picture in pictures
  ]
  epath.Path(path).write_bytes(images_lib.encode_png(np.concatenate(rows)))
