"""Shows images that are not 8-bit colour in false colours, see `config.pp.range`."""

from typing import Any

import ml_collections
import numpy as np

from vit_jax.data.images import scaling

_TAILS = (1, 99)  # Percentiles of principal components that become -1 and 1.


def of_inputs(images: Any, pp: ml_collections.ConfigDict) -> np.ndarray:
  """Returns inputs of a model [..., H, W, C] as float32 [..., H, W, 1 or 3] in [-1, 1].

  `pp` is `config.pp`; images of 8-bit colour are returned unchanged.
  """
  if pp.range is None:
    return images
  images = np.asarray(images, np.float32)
  if pp.mean is not None:
    scale, offset = scaling.standardization(pp)
    images = (images - offset) / scale
  return of_scaled(images, pp)


def of_scaled(images: np.ndarray, pp: ml_collections.ConfigDict) -> np.ndarray:
  """Returns the same for images float32 [..., H, W, C] in [-1, 1]."""
  if pp.shown_channels:
    return images[..., list(pp.shown_channels)]
  if images.shape[-1] in (1, 3):
    return images
  return _components(images)


def _components(images: np.ndarray) -> np.ndarray:
  """Returns the first three principal components of pixels, [..., H, W, 3] in [-1, 1]."""
  pixels = images.reshape(-1, images.shape[-1]).astype(np.float64)
  pixels = pixels - pixels.mean(axis=0)
  _, vectors = np.linalg.eigh(pixels.T @ pixels)  # In ascending order.
  vectors = vectors[:, ::-1][:, :3]
  vectors = vectors * np.where(vectors.sum(axis=0) < 0, -1, 1)  # Bright remains bright.
  components = pixels @ vectors
  low, high = np.percentile(components, _TAILS, axis=0)
  components = 2 * (components - low) / np.maximum(high - low, 1e-12) - 1
  colours = np.full((len(pixels), 3), -1.0)  # Two channels have two components.
  colours[:, : components.shape[1]] = components.clip(-1, 1)
  return colours.reshape(*images.shape[:-1], 3).astype(np.float32)
