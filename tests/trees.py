"""Compares trees of arrays, for several tests."""

import flax.core
import jax
import numpy as np


def assert_same(a, b):
  """Asserts that two trees of arrays, frozen or not, are equal, bit for bit."""
  a, b = (flax.core.unfreeze(jax.device_get(tree)) for tree in (a, b))
  jax.tree.map(np.testing.assert_array_equal, a, b)
