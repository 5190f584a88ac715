"""scikit-learn's handwritten digits as a TFDS data set: no download.

1,797 real images of 8x8 grey pixels in 10 classes, from the test set of the UCI
"Optical Recognition of Handwritten Digits".

digits             all classes, split 80/20 by one fixed permutation
digits/0to4        the first five classes, split 80/20
digits/5to9_few    the other five, for learning from few labels: few_0 to
                   few_2 have 5 images a class each, without overlap; test has
                   the remaining images
digits/few         all classes, with few_0 to few_2 from the training images of
                   `digits`; test has the test images of `digits`
digits/few10       the same with 10 images a class, in few_0 to few_5;
                   unlabelled_0 to unlabelled_5 have the other training images
                   (here with their labels, to judge pseudo-labels by)
"""

from collections.abc import Iterator, Sequence
import functools
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

# Builder config -> (images per class, number of draws) of its splits few_<i>.
FEW = {'5to9_few': (5, 3), 'few': (5, 3), 'few10': (10, 6)}


@functools.cache
def load() -> Any:
  """Returns scikit-learn's digits, which only preparing a data set needs."""
  from sklearn import datasets

  return datasets.load_digits()


def split_indices(classes: Sequence[int] = range(10)) -> dict[str, np.ndarray]:
  """Returns the numbers of training and test images of some classes."""
  target = load().target
  order = np.random.RandomState(0).permutation(len(target))
  order = order[np.isin(target[order], classes)]
  train = len(order) * 4 // 5
  return {'train': order[:train], 'test': order[train:]}


def images() -> np.ndarray:
  """Returns all images, uint8 [n, 8, 8, 1], in the order of scikit-learn."""
  # Grey values 0 to 16 are scaled to 0 to 255.
  values = load().images * (255 / 16)
  return values.round().astype(np.uint8)[..., None]


def info(
  builder: Any, class_names: Sequence[str], size: int = 8, **features: Any
) -> tfds.core.DatasetInfo:
  """Returns the metadata of digits with labels and further features."""
  return builder.dataset_info_from_configs(
    description=f'Handwritten digits, {size}x{size} grey pixels, from scikit-learn.',
    homepage='https://archive.ics.uci.edu/dataset/80',
    features=tfds.features.FeaturesDict(
      {
        'image': tfds.features.Image(shape=(size, size, 1)),
        'label': tfds.features.ClassLabel(names=class_names),
        **features,
      }
    ),
    supervised_keys=('image', 'label'),
  )


class Digits(tfds.core.GeneratorBasedBuilder):
  """Handwritten digits: images uint8 [8, 8, 1], and labels."""

  VERSION = tfds.core.Version('1.0.0')
  # TFDS uses the first one for the plain name 'digits'.
  BUILDER_CONFIGS: ClassVar = [
    tfds.core.BuilderConfig(name=name) for name in ('all', '0to4', *FEW)
  ]

  def _classes(self) -> range:
    ranges = {'0to4': range(5), '5to9_few': range(5, 10)}
    return ranges.get(self.builder_config.name, range(10))

  def _info(self) -> tfds.core.DatasetInfo:
    return info(self, [str(i) for i in self._classes()])

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    del dl_manager  # Nothing to download.
    splits = split_indices(self._classes())
    if self.builder_config.name in FEW:
      splits = self._few(**splits)
    return {name: self._generate_examples(indices) for name, indices in splits.items()}

  def _few(self, train: np.ndarray, test: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the images of each split, with few labels."""
    name = self.builder_config.name
    target = load().target
    shots, draws = FEW[name]
    if name == '5to9_few':
      train = np.concatenate([train, test])
    images_by_class = [train[target[train] == c] for c in self._classes()]
    splits = {}
    for i in range(draws):
      shots_by_class = [x[i * shots : (i + 1) * shots] for x in images_by_class]
      splits[f'few_{i}'] = np.concatenate(shots_by_class)
    if name == '5to9_few':
      test = np.concatenate([x[draws * shots :] for x in images_by_class])
    elif name == 'few10':
      for i in range(draws):
        splits[f'unlabelled_{i}'] = train[~np.isin(train, splits[f'few_{i}'])]
    return {**splits, 'test': test}

  def _generate_examples(self, indices: np.ndarray) -> Iterator[tuple[int, dict]]:
    pixels = images()
    target = load().target
    first = self._classes()[0]
    for i in indices:
      yield int(i), {'image': pixels[i], 'label': int(target[i]) - first}
