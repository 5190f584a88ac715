"""Tests of the rotated digits."""

import numpy as np
from scipy import ndimage

from vit_jax.data.tfds import digit_angles, digits


def test_images_are_digits_rotated_by_their_angles(tmp_path):
  builder = digit_angles.DigitAngles(data_dir=str(tmp_path))
  numbers = np.arange(25)
  examples = dict(builder._generate_examples(numbers, 4))
  assert len(examples) == 100
  angles = np.array([example['angle'] for example in examples.values()])
  assert 30 < abs(angles).max() <= 60
  assert len(set(angles.tolist())) == 100
  originals = np.pad(digits.images(), ((0, 0), (2, 2), (2, 2), (0, 0)))
  for key, example in examples.items():
    original = originals[key // 4, ..., 0].astype(float)
    assert example['label'] == digits.load().target[key // 4]
    rotated = ndimage.rotate(original, example['angle'], reshape=False)
    pixels = example['image'][..., 0].astype(float)
    assert np.corrcoef(pixels.ravel(), rotated.ravel())[0, 1] > 0.95
