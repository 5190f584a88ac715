"""RGB pixels of PIL images as viewers show them, with NumPy and Pillow only."""

import numpy as np
from PIL import Image


class ModeError(ValueError):
  """The mode of an image does not say which value is white."""


def to_rgb(image: Image.Image) -> np.ndarray:
  """Returns the pixels of an image of any mode, uint8 [height, width, 3].

  Transparent pixels are composited on white. Grey images of 16 bits keep the
  upper 8; Pillow would clip them to 255. Raises ModeError for the modes 'I' and 'F'.
  """
  if image.mode in ('I', 'F'):
    raise ModeError(
      f"image is a PIL image of mode '{image.mode}', which does not say which value is "
      "white: convert it to mode 'L' (0 to 255) or 'I;16' (0 to 65535)"
    )
  if image.mode == 'La':  # Pillow converts it to nothing else.
    image = image.convert('LA')
  if image.mode.startswith('I;16'):
    clear = image.info.get('transparency')
    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    grey = np.where(values == clear, np.uint8(255), grey)
    return np.repeat(grey[..., None], 3, axis=-1)
  if not image.has_transparency_data:
    return np.asarray(image.convert('RGB'))
  pixels = np.asarray(image.convert('RGBA'))
  alpha = pixels[..., 3:].astype(np.uint16)  # Holds 255 * 255 + 127.
  colour = pixels[..., :3] * alpha
  colour += 255 * (255 - alpha) + 127
  colour //= 255
  return colour.astype(np.uint8)
