"""scikit-learn's digits with captions in English, for image and text towers.

Images and splits are the same as in `digits`. The captions are made by a small
grammar: each image of a class has all captions of the class in `texts`.

  "a photo of a seven", "the number 7"     name the class
  "an odd digit greater than six"          describe it

The classes in HELD_OUT are never named in the captions of their training images,
which only describe them; their names do occur in captions of others ("a digit
greater than three"). Captions of test images name all classes.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from vit_jax.data.tfds import digits

WORDS = (
  'zero',
  'one',
  'two',
  'three',
  'four',
  'five',
  'six',
  'seven',
  'eight',
  'nine',
)
HELD_OUT = (3, 8)
# With {} for the word or the numeral of a class; different ones for testing.
TRAINING = (
  'a photo of a {}',
  'the number {}',
  'a handwritten {}',
  'this is a {}',
  'a drawing of the digit {}',
  'somebody wrote {}',
  '{}',
)
TEST = (
  'this digit is a {}',
  'a photo of the number {}',
  'somebody wrote the digit {}',
)


def naming(digit: int, templates: Sequence[str] = TRAINING) -> list[str]:
  """Returns captions that name a digit, by its word and by its numeral."""
  captions = []
  for template in templates:
    captions.append(template.replace('{}', WORDS[digit]))
    captions.append(template.replace('{}', str(digit)))
  return captions


def describing(digit: int) -> list[str]:
  """Returns captions that describe a digit without its name."""
  parity = 'an odd' if digit % 2 else 'an even'
  captions = [f'{parity} digit', f'{parity} number']
  for noun in ('a digit', f'{parity} digit'):
    if digit > 0:
      captions.append(f'{noun} greater than {WORDS[digit - 1]}')
    if digit < 9:
      captions.append(f'{noun} less than {WORDS[digit + 1]}')
  if 0 < digit < 9:
    captions.append(f'a digit between {WORDS[digit - 1]} and {WORDS[digit + 1]}')
  return captions


def training(digit: int) -> list[str]:
  """Returns the captions of a digit's training images."""
  descriptions = describing(digit)
  return descriptions if digit in HELD_OUT else [*naming(digit), *descriptions]


class DigitCaptions(tfds.core.GeneratorBasedBuilder):
  """Handwritten digits: images uint8 [8, 8, 1], labels, and captions."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self) -> tfds.core.DatasetInfo:
    texts = tfds.features.Sequence(tfds.features.Text())
    return digits.info(self, WORDS, texts=texts)

  def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
    del dl_manager  # Nothing to download.
    indices = digits.split_indices()
    train, test = indices['train'], indices['test']
    is_held_out = np.isin(digits.load().target[test], HELD_OUT)
    test_captions = functools.partial(naming, templates=TEST)
    return {
      'train': self._generate_examples(train, training),
      'test': self._generate_examples(test, test_captions),
      # The classes of `test` whose names occur in training, and the others.
      'test_seen': self._generate_examples(test[~is_held_out], test_captions),
      'test_held_out': self._generate_examples(test[is_held_out], test_captions),
    }

  def _generate_examples(
    self, indices: np.ndarray, texts: Callable[[int], list[str]]
  ) -> Iterator[tuple[int, dict]]:
    images = digits.images()
    target = digits.load().target
    for i in indices:
      label = int(target[i])
      yield int(i), {'image': images[i], 'label': label, 'texts': texts(label)}
