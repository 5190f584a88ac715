"""scikit-learn's digits, rotated: the target of regression is the angle.

Images have 12x12 grey pixels. Angles are uniform from -60 to 60 degrees, counterclockwise.
The splits have the same digits as in `digits`: `train` four times at different angles,
`test` once.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image
import tensorflow_datasets as tfds

from vit_jax.data.tfds import digits

_RANGE = 60.0  # Largest angle in degrees.
_MARGIN = 2  # Pixels around a digit.


class DigitAngles(tfds.core.GeneratorBasedBuilder):
  """Rotated digits: images uint8 [12, 12, 1], labels, and angles in degrees."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self) -> tfds.core.DatasetInfo:
    names = [str(i) for i in range(10)]
    return digits.info(self, names, size=8 + 2 * _MARGIN, angle=np.float32)

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    del dl_manager  # Nothing to download.
    indices = digits.split_indices()
    return {
      'train': self._generate_examples(indices['train'], 4),
      'test': self._generate_examples(indices['test'], 1),
    }

  def _generate_examples(
    self, indices: np.ndarray, repeats: int
  ) -> Iterator[tuple[int, dict]]:
    margins = ((0, 0), (_MARGIN, _MARGIN), (_MARGIN, _MARGIN))
    pixels = np.pad(digits.images()[..., 0], margins)
    target = digits.load().target
    for i in indices.tolist():
      for k, angle in enumerate(np.random.RandomState(i).uniform(-1, 1, repeats)):
        angle = np.float32(_RANGE * angle)
        rotated = Image.fromarray(pixels[i]).rotate(angle, Image.Resampling.BICUBIC)
        image = np.asarray(rotated)[..., None]
        yield 4 * i + k, {'image': image, 'label': int(target[i]), 'angle': angle}
