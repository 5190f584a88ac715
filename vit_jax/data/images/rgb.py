"""RGB pixels of PIL images as viewers show them, with NumPy and Pillow only."""

import numpy as np
from PIL import Image


def to_rgb(image: Image.Image) -> np.ndarray:
  """Returns the pixels of an image of any mode, uint8 [height, width, 3].

  Transparent pixels are composited on white. Grey images of 16 bits keep the
  upper 8; Pillow would clip them to 255.
  """
  if image.mode.startswith('I;16'):
    clear = image.info.get('transparency')
    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    grey = np.where(values == clear, np.uint8(255), grey)
    return np.repeat(grey[..., None], 3, axis=-1)
  if not (image.has_transparency_data or image.mode == 'La'):
    return np.asarray(image.convert('RGB'))
  pixels = np.asarray(image.convert('RGBA'), np.int32)
  colour, alpha = pixels[..., :3], pixels[..., 3:]
  return ((colour * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
