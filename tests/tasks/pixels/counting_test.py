"""Tests of models that only count, against loops."""

import math

import numpy as np
import pytest

from vit_jax.tasks.pixels import counting, sampling

COLORS = 3
TRAIN = np.random.RandomState(0).randint(COLORS, size=(20, 4, 5))
TEST = np.random.RandomState(1).randint(COLORS, size=(7, 4, 5))


def bits(contexts):
  """Bits a pixel of TEST by add-one counts, given the context of each pixel."""
  seen = [
    (contexts(image, y, x), image[y, x])
    for image in TRAIN for y in range(4) for x in range(5)
  ]  # fmt: skip
  total = 0
  for image in TEST:
    for y in range(4):
      for x in range(5):
        mine = [c for where, c in seen if where == contexts(image, y, x)]
        share = (mine.count(image[y, x]) + 1) / (len(mine) + COLORS)
        total -= math.log2(share)
  return total / TEST.size


def test_counts_at_positions():
  want = bits(lambda image, y, x: (y, x))
  assert counting.position_bits(TRAIN, TEST, COLORS) == pytest.approx(want)


def test_counts_given_left_and_upper_pixel():
  def context(image, y, x):
    return image[y, x - 1] if x else None, image[y - 1, x] if y else None

  want = bits(context)
  assert counting.context_bits(TRAIN, TEST, COLORS) == pytest.approx(want)


def test_the_lower_part_of_an_image_is_cut():
  found = sampling.cut(np.ones((2, 4, 5, 1)), [1, 3])
  np.testing.assert_array_equal(found[0, :, 0, 0], [1, 0, 0, 0])
  np.testing.assert_array_equal(found[1, :, 0, 0], [1, 1, 1, 0])
