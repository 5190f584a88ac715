"""Compares trees of arrays, for several tests."""

import jax
import numpy as np


def assert_same(a, b):
  """Asserts that two trees of arrays are equal, bit for bit."""
  jax.tree.map(
    np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b)
  )
