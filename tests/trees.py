"""Comparisons of trees of arrays."""

import flax.core
import jax
import numpy as np


def assert_same(a, b):
  """Asserts that two trees of arrays, frozen or not, are equal, bit for bit."""
  a, b = (flax.core.unfreeze(jax.device_get(tree)) for tree in (a, b))
  jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b, **tolerances):
  """Asserts that two trees of arrays are equal up to rounding."""
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerances), a, b)
