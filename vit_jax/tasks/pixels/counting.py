"""Count-based models of pixels, baselines that a trained model should beat.

  position  the frequency of each colour at a position of the training images
  context   the frequency of each colour given the colours of the left and the
            upper pixel

One is added to each count, so that no colour is impossible. Both are measured in
bits per dimension on test images.
"""

import numpy as np

from vit_jax import console
from vit_jax.inference import engine


def position_bits(train: np.ndarray, test: np.ndarray, num_colors: int):
  """Returns the bits per dimension of a histogram at each position.

  Takes the numbers of the colours of training and test images, int [n, H, W].
  """
  rows, columns = np.indices(train.shape[1:])
  shape = (*train.shape[1:], num_colors)
  return _bits(lambda images: (rows, columns, images), shape, train, test)


def context_bits(train: np.ndarray, test: np.ndarray, num_colors: int):
  """Returns the bits per dimension of counts given the left and upper pixel.

  For the arguments see `position_bits`. Needs memory for `num_colors`**3 counts.
  """

  def place(images):
    # What lies outside of an image counts as another colour.
    framed = np.pad(images, ((0, 0), (1, 0), (1, 0)), constant_values=num_colors)
    return framed[:, 1:, :-1], framed[:, :-1, 1:], images

  shape = (num_colors + 1, num_colors + 1, num_colors)
  return _bits(place, shape, train, test)


def _bits(place, shape, train, test):
  """Returns the mean bits of test pixels by the counts of training pixels."""
  counts = np.ones(shape)
  np.add.at(counts, place(train), 1)
  shares = counts / counts.sum(axis=-1, keepdims=True)
  return float(-np.log2(shares[place(test)]).mean())


class Counting:
  """Measures count-based models after the last update of a pixels.Task."""

  final = True

  def __init__(self, task, mesh, train, test):
    self._task, self._mesh, self._sources = task, mesh, (train, test)
    colors = lambda batch: {'colors': task.colors(batch['image']).astype(np.uint16)}
    self._colors = engine.everywhere(mesh, colors)

  def run(self, params, extra, stop=engine.never):
    """Returns `position_bits` and `context_bits`; prints them."""
    task, found = self._task, []
    for source in self._sources:
      colors = engine.collect(
        task.config, self._mesh, source.evaluated, task.example, self._colors,
        stop, 'Counting colours',
      )  # fmt: skip
      found.append(colors['colors'].reshape(-1, *task.image_size))
    by_position = position_bits(*found, len(task.palette))
    by_context = context_bits(*found, len(task.palette))
    console.say(
      f'Bits per dimension of count-based models: {by_position:.4f} with the colours '
      f'at each position, {by_context:.4f} given the left and the upper pixel.'
    )
    return {'position_bits': by_position, 'context_bits': by_context}
