"""Grids of images that a model has drawn or completed."""

import numpy as np

from vit_jax.figures import captions

_ACROSS = 8  # Samples in a row.


def samples(images: np.ndarray) -> np.ndarray:
  """Draws images, float [n, H, W, C] in [-1, 1], side by side."""
  across = min(_ACROSS, max(1, len(images)))
  return captions.grid(
    captions.to_pixels(images), columns=across, most=captions.MOST
  )


def beside(**images: np.ndarray) -> np.ndarray:
  """Draws a row for each image, with a titled column for each version of it."""
  versions = np.stack(list(images.values()), axis=1)  # [n, columns, H, W, C]
  return captions.grid(
    captions.to_pixels(versions.reshape(-1, *versions.shape[2:])),
    columns=len(images),
    titles=tuple(images),
    most=captions.MOST,
  )


def cut(images: np.ndarray, rows) -> np.ndarray:
  """Returns images that are grey below the `rows` that are kept, int or [n]."""
  below = np.arange(images.shape[1]) >= np.reshape(rows, (-1, 1))  # [n, H]
  return np.where(below[..., None, None], 0.0, images)
