"""scikit-learn's digits with captions in English, for image and text towers.

Images and splits are the same as in `digits`. The captions are made by a small
grammar: each image of a class has all captions of the class in `texts`.

  "a photo of a seven", "the number 7"     name the class
  "an odd digit greater than six"          describe it

The classes in HELD_OUT are never named in the captions of their training images,
which only describe them; their names do occur in captions of others ("a digit
greater than three"). Captions of test images name all classes.
"""

import numpy as np
import tensorflow_datasets as tfds

from vit_jax.data.tfds import digits

WORDS = (
  'zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine'
)  # fmt: skip
HELD_OUT = (3, 8)
# With {} for the word or the numeral of a class; different ones for testing.
TRAINING = (
  'a photo of a {}', 'the number {}', 'a handwritten {}', 'this is a {}',
  'a drawing of the digit {}', 'somebody wrote {}', '{}',
)  # fmt: skip
TEST = (
  'this digit is a {}', 'a photo of the number {}', 'somebody wrote the digit {}'
)  # fmt: skip


def naming(digit: int, templates=TRAINING) -> list[str]:
  """Returns captions that name a digit, by its word and by its numeral."""
  names = WORDS[digit], str(digit)
  return [t.replace('{}', name) for t in templates for name in names]


def describing(digit: int) -> list[str]:
  """Returns captions that describe a digit without its name."""
  parity = 'an odd' if digit % 2 else 'an even'
  found = [f'{parity} digit', f'{parity} number']
  for noun in ('a digit', f'{parity} digit'):
    if digit > 0:
      found.append(f'{noun} greater than {WORDS[digit - 1]}')
    if digit < 9:
      found.append(f'{noun} less than {WORDS[digit + 1]}')
  if 0 < digit < 9:
    found.append(f'a digit between {WORDS[digit - 1]} and {WORDS[digit + 1]}')
  return found


def training(digit: int) -> list[str]:
  """Returns the captions of a digit's training images."""
  found = describing(digit)
  return found if digit in HELD_OUT else [*naming(digit), *found]


class DigitCaptions(tfds.core.GeneratorBasedBuilder):
  """Handwritten digits: images uint8 [8, 8, 1], labels, and captions."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self) -> tfds.core.DatasetInfo:
    texts = tfds.features.Sequence(tfds.features.Text())
    return digits.info(self, WORDS, texts=texts)

  def _split_generators(self, dl_manager):
    del dl_manager  # Nothing to download.
    found = digits.split_indices()
    target = digits.load().target[found['test']]
    out = np.isin(target, HELD_OUT)
    named = lambda digit: naming(digit, TEST)
    return {
      'train': self._generate_examples(found['train'], training),
      'test': self._generate_examples(found['test'], named),
      # Of `test`, the classes whose names occur in training, and the others.
      'test_seen': self._generate_examples(found['test'][~out], named),
      'test_held_out': self._generate_examples(found['test'][out], named),
    }

  def _generate_examples(self, indices, texts):
    images, target = digits.images(), digits.load().target
    for i in indices:
      label = int(target[i])
      yield int(i), {'image': images[i], 'label': label, 'texts': texts(label)}
