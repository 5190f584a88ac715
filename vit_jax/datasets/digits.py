"""scikit-learn's handwritten digits as a TFDS data set: no download.

1,797 real images of 8x8 grey pixels in 10 classes, from the test set of the UCI
"Optical Recognition of Handwritten Digits". Split 80/20 by one fixed permutation.
"""

import numpy as np
from sklearn import datasets
import tensorflow_datasets as tfds

NUM_TRAIN = 1437


class Digits(tfds.core.GeneratorBasedBuilder):
  """Handwritten digits; images uint8 [8, 8, 1], labels 0 to 9."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self) -> tfds.core.DatasetInfo:
    return self.dataset_info_from_configs(
      description='Handwritten digits, 8x8 grey pixels, from scikit-learn.',
      homepage='https://archive.ics.uci.edu/dataset/80',
      features=tfds.features.FeaturesDict(
        {
          'image': tfds.features.Image(shape=(8, 8, 1)),
          'label': tfds.features.ClassLabel(names=[str(i) for i in range(10)]),
        }
      ),
      supervised_keys=('image', 'label'),
    )

  def _split_generators(self, dl_manager):
    del dl_manager  # Nothing to download.
    order = np.random.RandomState(0).permutation(1797)
    return {
      'train': self._generate_examples(order[:NUM_TRAIN]),
      'test': self._generate_examples(order[NUM_TRAIN:]),
    }

  def _generate_examples(self, indices):
    digits = datasets.load_digits()
    # Grey values 0 to 16, spread over 0 to 255.
    images = (digits.images * (255 / 16)).round().astype(np.uint8)[..., None]
    for i in indices:
      yield int(i), {'image': images[i], 'label': int(digits.target[i])}
