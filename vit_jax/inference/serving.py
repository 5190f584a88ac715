"""Prepares images for an exported model, with only NumPy and Pillow.

A server imports neither JAX nor TensorFlow:

  with open(f'{folder}/model.json') as file:
    facts = json.load(file)
  image = serving.prepare(content, facts['preprocessing'])

See docs/serve.md for complete servers.
"""

from collections.abc import Mapping
import io
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from vit_jax.data.images import rgb

_AFFINE, _BILINEAR = Image.Transform.AFFINE, Image.Resampling.BILINEAR


def prepare(file: bytes, preprocessing: Mapping[str, Any]) -> np.ndarray:
  """Decodes an image to the input of a model, like `vit_jax predict`.

  The image is rotated according to its EXIF orientation, transparent pixels become
  white, and 16 bits become 8. It is resized like tf.image.resize, without the
  antialiasing of Pillow's `resize`.

  Takes the content of an image file, and `preprocessing` of the model.json that
  `vit_jax export` writes. Returns float32 [height, width, channels]. Raises ValueError
  if the model reads canvases or images of any size, and Pillow's errors.
  """
  pp = preprocessing
  if 'resize' not in pp or not all(isinstance(n, int) for n in pp.get('size', ())):
    raise ValueError(
      f'preprocessing={dict(pp)} is for canvases or images of any size: '
      'export the model with --image_size=HEIGHT,WIDTH'
    )
  if missing := {'size', 'channels', 'range', 'jpeg_shrink'} - pp.keys():
    raise ValueError(
      f'preprocessing={dict(pp)} lacks {", ".join(sorted(missing))}: pass it as in the '
      'model.json that `vit_jax export` wrote'
    )
  image = Image.open(io.BytesIO(file))
  (height, width), (low, high) = pp['size'], pp['range']
  whole = pp['resize'] or pp['size']
  if pp['jpeg_shrink']:  # Decodes a large JPEG at 1/2, 1/4 or 1/8.
    image.draft(None, 2 * [whole] if isinstance(whole, int) else whole[::-1])
  image = Image.fromarray(rgb.to_rgb(ImageOps.exif_transpose(image)))
  image = image.convert('RGB' if pp['channels'] == 3 else 'L')
  if isinstance(whole, int):  # Length of the shorter side.
    whole = [round(n * whole / min(image.size)) for n in image.size[::-1]]
  y, x = image.height / whole[0], image.width / whole[1]  # Source pixels per pixel.
  top, left = (whole[0] - height) // 2 * y, (whole[1] - width) // 2 * x
  move = (width, height), _AFFINE, (x, 0, left, 0, y, top), _BILINEAR
  bands = [band.convert('F').transform(*move) for band in image.split()]
  return np.stack(bands, -1) * ((high - low) / 255) + low
