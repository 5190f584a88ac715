"""Tests of the order of examples: one uniform permutation per epoch."""

import collections
import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from vit_jax.data import order


def indices(positions, n, seed=3):
  return order.example_indices(tf.constant(positions, tf.int64), n, seed).numpy()


def chi2(counts, expected):
  """Returns chi-squared per degree of freedom."""
  return ((counts - expected) ** 2 / expected).sum() / (len(counts) - 1)


@pytest.mark.parametrize('n', [1, 2, 9, 10, 1023, 1024, 3000])
def test_every_epoch_is_a_different_permutation(n):
  found = indices(range(3 * n), n)
  epochs = found.reshape(3, n)
  assert (np.sort(epochs) == np.arange(n)).all()
  if n > 2:
    assert len(set(map(tuple, epochs))) == 3
    for seed in (4, 3 + 2**32):
      assert (indices(range(3 * n), n, seed) != found).any()
  # Any subset of positions, such as the rows of one host, matches the whole run.
  for rows in (range(n // 2, 3 * n), range(0, 3 * n, 7), [3 * n - 1]):
    np.testing.assert_array_equal(indices(rows, n), found[list(rows)])


# Limits of the words of the cipher, and powers of 4 plus 1.
@pytest.mark.parametrize('n', [50_000, 2**16, 2**16 + 1, 2**18, 2**18 + 1, 2**20])
def test_orders_differ_over_thousands_of_epochs_and_seeds(n):
  # The order of n examples is known by its first eight with a probability of n**-8.
  starts = np.arange(4096)[:, None] * n + np.arange(8)
  orders = indices(starts.ravel(), n).reshape(starts.shape)
  assert len(set(map(tuple, orders))) == 4096
  seeds = [*range(0, 4096, 64), 2**31, 2**32, 2**40, 2**63 - 1]
  assert len({tuple(indices(range(8), n, seed)) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize('n', [2**16 + 1, 2**18 + 1])
@pytest.mark.parametrize('epoch', [0, 256, 4095])
def test_every_example_is_drawn_once_if_their_number_is_a_power_of_4_plus_1(n, epoch):
  found = indices(np.arange(n) + epoch * n, n)
  assert (np.bincount(found) == 1).all()


@pytest.mark.parametrize('n', [1024, 50_000, 2**16, 2**16 + 2, 2**18, 1_281_167])
def test_orders_of_small_seeds_and_epochs_are_tensorflows(n):
  for seed, epoch in [(0, 0), (255, 255), (7, 100)]:
    want = tf.raw_ops.RandomIndexShuffle(
      index=range(20), seed=[0, seed, epoch], max_index=n - 1, rounds=8
    )
    np.testing.assert_array_equal(indices(epoch * n + np.arange(20), n, seed), want)


@pytest.mark.parametrize('n', [14_100_000, 10**9])
def test_large_permutation_is_as_uniform_as_numpys(n):
  batch, batches = 4096, 40

  def measure(found):
    """Returns correlations of neighbours, and chi-squared over 1,000 classes."""
    lags = [
      np.mean([np.corrcoef(x[:-lag], x[lag:])[0, 1] for x in found])
      for lag in (1, 2, 4)
    ]
    classes = [np.bincount(x * 1000 // n, minlength=1000) for x in found]
    return lags, np.mean([chi2(x, batch / 1000) for x in classes])

  starts = np.linspace(0, n - batch, batches, dtype=np.int64)
  positions = starts[:, None] + np.arange(batch)
  found = indices(positions.ravel(), n).reshape(positions.shape)
  draws = np.random.default_rng(0).choice(n, positions.shape, replace=False)
  (lags, ours), (numpys_lags, numpys) = measure(found), measure(draws)
  # Four standard deviations of the difference of two such means.
  deviation = math.sqrt(2 / positions.size)
  np.testing.assert_allclose(lags, numpys_lags, atol=4 * deviation)
  assert abs(ours - numpys) < 4 * math.sqrt(2 * 2 / 999 / batches)


def test_all_permutations_of_three_are_equally_likely():
  found = indices(range(3 * 6000), 3).reshape(-1, 3)
  counts = collections.Counter(map(tuple, found.tolist()))
  every = [counts[x] for x in itertools.permutations(range(3))]
  assert chi2(np.array(every), 1000) < 3
