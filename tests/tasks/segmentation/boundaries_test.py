"""Tests of Boundary IoU against erosions of scipy."""

import jax
import numpy as np
import pytest
from scipy import ndimage

from vit_jax.tasks.segmentation import boundaries


def region(mask):
  """Returns the boundary region of a mask, as the released code does."""
  distance = max(1, round(0.02 * np.hypot(*mask.shape)))
  square = np.ones((3, 3), bool)
  return mask & ~ndimage.binary_erosion(mask, square, distance, border_value=0)


def test_boundary_regions_are_those_of_scipy():
  sizes = np.array([[75, 100], [30, 21], [64, 128]])  # 2.5, 0.73 and 2.9 pixels.
  rng = np.random.default_rng(0)
  true, predicted = np.full((2, 3, 80, 128), -1, np.int32)
  expected = np.zeros((3, 3, 4), int)
  for i, (height, width) in enumerate(sizes):
    blocks = rng.integers(-1, 4, (6, 5))
    pixels = np.kron(blocks, np.ones((13, 26), int))[:height, :width]
    moved = np.roll(np.abs(pixels), 1 + i, axis=(0, 1))
    true[i, :height, :width] = pixels
    predicted[i, :height, :width] = moved
    moved = np.where(pixels < 0, -1, moved)
    for number in range(4):
      first, second = region(pixels == number), region(moved == number)
      expected[i, :, number] = (first & second).sum(), first.sum(), second.sum()
  assert expected[[0, 2], 0].all()
  counts = jax.jit(boundaries.counts, static_argnums=3)(true, predicted, sizes, 4)
  np.testing.assert_array_equal(counts, expected)


@pytest.mark.parametrize(
  'size, distance', [((375, 500), 12), ((500, 375), 12), ((3, 4), 1), ((150, 200), 5)]
)
def test_distances_are_rounded_as_in_the_released_code(size, distance):
  """2 % of the diagonal of 375 x 500 pixels are 12.5, which Python rounds to 12."""
  assert max(1, round(0.02 * np.hypot(*size))) == distance
  classes = np.zeros(size, np.int32)
  mask = jax.jit(boundaries.boundaries)(classes, np.array(size))
  is_inside = ~np.asarray(mask)
  rows, columns = size[0] - 2 * distance, size[1] - 2 * distance
  assert is_inside.sum() == max(0, rows) * max(0, columns)
