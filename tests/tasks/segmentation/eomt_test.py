"""Tests of the targets and the schedule of EoMT."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.tasks.segmentation import eomt


def test_masked_attention_ends_layer_by_layer():
  # Two layers: four periods of 10 steps; the exponent is 0.9.
  rates = lambda step: np.asarray(eomt.mask_rates(step, 40, 2))
  for step, expected in (
    (0, [1, 1]), (10, [1, 1]), (15, [0.5**0.9, 1]), (20, [0, 1]),
    (25, [0, 0.5**0.9]), (30, [0, 0]), (40, [0, 0]),
  ):  # fmt: skip
    np.testing.assert_allclose(rates(step), expected, atol=1e-6)


def test_targets_are_the_classes_with_most_pixels():
  segmentation = jnp.array([[[3, 3, 3], [1, 1, 0]], [[-1, -1, -1], [2, -1, -1]]])
  targets = jax.jit(functools.partial(eomt.targets, num_classes=4, most=2))
  labels, segments, counts = targets(segmentation)
  assert counts.tolist() == [2, 1]
  assert labels[0].tolist() == [3, 1]
  assert labels[1, 0] == 2
  # Class 0 has the fewest pixels, so it is not a target; nor are pixels without a class.
  assert segments[0].tolist() == [[1, 1, 1], [2, 2, 0]]
  assert segments[1].tolist() == [[0, 0, 0], [1, 0, 0]]
