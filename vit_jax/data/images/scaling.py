"""Scales the values of images that are not 8-bit colour, see `config.pp.range`.

  stored values -> [-1, 1] -> crops and augmentation -> mean 0, deviation 1

The second scaling is optional (`config.pp.mean`, `config.pp.std`).
"""

import ml_collections
import numpy as np

from vit_jax.data.images import images
from vit_jax.data.lazy import tf


def decode(
  encoded: 'tf.Tensor', pp: ml_collections.ConfigDict, upright: bool = True
) -> 'tf.Tensor':
  """Decodes one image, and scales `pp.range` to [-1, 1]; values outside are clipped.

  Returns float32 [height, width, pp.channels]. See images.decode_values.
  """
  values = images.decode_values(encoded, pp.channels, upright)
  low, high = (np.asarray(bound, np.float32) for bound in pp.range)
  return tf.clip_by_value((values - low) * (2 / (high - low)) - 1, -1.0, 1.0)


def standardize(image: 'tf.Tensor', pp: ml_collections.ConfigDict) -> 'tf.Tensor':
  """Scales an image [h, w, C] in [-1, 1] by `pp.mean` and `pp.std`, if they are set."""
  if pp.mean is None:
    return image
  scale, offset = standardization(pp)
  return image * scale + offset


def standardization(pp: ml_collections.ConfigDict) -> tuple[np.ndarray, np.ndarray]:
  """Returns scale and offset of `standardize`, float32, for each channel or for all."""
  low, high = (np.asarray(bound, np.float64) for bound in pp.range)
  mean = np.asarray(pp.mean, np.float64)
  std = np.asarray(pp.std, np.float64)
  # A value is low + (x + 1) / 2 * (high - low).
  scale = (high - low) / 2 / std
  offset = ((high + low) / 2 - mean) / std
  return scale.astype(np.float32), offset.astype(np.float32)
