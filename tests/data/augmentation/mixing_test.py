"""Tests of mixup and CutMix against NumPy, on one device and on eight."""

import jax
import numpy as np
import pytest
from scipy import stats

from vit_jax.data.augmentation import mixing
from vit_jax.distributed import sharding

B, H, W, C = 16, 10, 12, 3


def make_batch(seed=0):
  rng = np.random.RandomState(seed)
  labels = rng.rand(B, 5) * (rng.rand(B, 5) < 0.5)  # Any, not only one-hot.
  return {
    'image': rng.uniform(-1, 1, (B, H, W, C)).astype(np.float32),
    'label': labels.astype(np.float32),
    'position': np.arange(B),
  }


_mix = jax.jit(mixing.mix, static_argnums=(2, 3))


def mix(batch, number, mixup=0.0, cutmix=0.0):
  return jax.tree.map(np.asarray, _mix(batch, jax.random.key(number), mixup, cutmix))


def shares(got, batch):
  """Returns the weights of the original pixels [H, W] and of the original label.

  Solved for all rows at once, which also checks that they share the same weight.
  """

  def solve(mixed, plain, axes):
    partner = np.roll(plain, 1, axis=0).astype(np.float64)
    way = plain - partner
    share = ((mixed - partner) * way).sum(axes) / (way**2).sum(axes)
    want = share[..., None] * plain + (1 - share[..., None]) * partner
    np.testing.assert_allclose(mixed, want, atol=1e-5)
    return share

  pixels = solve(got['image'], batch['image'], (0, 3))
  return pixels, solve(got['label'], batch['label'], (0, 1))


def test_mixup_matches_numpy():
  batch = make_batch()
  for number in range(10):
    got = mix(batch, number, mixup=0.5)
    pixels, label = shares(got, batch)
    assert 0.5 <= label <= 1
    np.testing.assert_allclose(pixels, label, atol=1e-5)
    for name in ('image', 'label'):
      want = label * batch[name][0] + (1 - label) * batch[name][-1]
      np.testing.assert_allclose(got[name][0], want, atol=1e-5)
    np.testing.assert_array_equal(got['position'], np.arange(B))


def test_cutmix_matches_numpy():
  batch = make_batch()
  for number in range(15):
    got = mix(batch, number, cutmix=1.0)
    pixels, label = shares(got, batch)
    inside = pixels < 0.5
    np.testing.assert_allclose(pixels, 1 - inside, atol=1e-5)
    np.testing.assert_allclose(label, 1 - inside.mean(), atol=1e-5)
    # Pixels in a rectangle are copied exactly, all others are unchanged.
    want = batch['image'].copy()
    if inside.any():
      y, x = np.nonzero(inside)
      box = np.s_[:, y.min() : y.max() + 1, x.min() : x.max() + 1]
      want[box] = np.roll(batch['image'], 1, axis=0)[box]
      assert inside[box[1:]].all()
    np.testing.assert_array_equal(got['image'], want)


def draw(count, mixup, cutmix, size):
  """Pixels [count, *size] of mixed batches of a white and a black image."""
  image = np.stack([np.ones((*size, 1)), np.zeros((*size, 1))]).astype(np.float32)
  batch = {'image': image, 'label': np.eye(2, dtype=np.float32)}
  got = jax.jit(jax.vmap(lambda rng: mixing.mix(batch, rng, mixup, cutmix)['image']))(
    jax.random.split(jax.random.key(1), count)
  )
  return np.asarray(got[:, 0, ..., 0])


def test_distribution_of_mixup_and_cutmix():
  """Either mixup with a folded beta weight, or a box of that area anywhere."""
  p, height = 0.8, 64
  pixels = draw(3000, p, p, (height, 48))
  low, high = pixels.min(axis=(1, 2)), pixels.max(axis=(1, 2))
  mixed = (0 < low) & (low < 1)
  assert 1390 < mixed.sum() < 1610
  np.testing.assert_array_equal(low[mixed], high[mixed])
  beta = stats.beta(p, p)
  cdf = lambda a: np.where(a < 0.5, 0, beta.cdf(a) - beta.cdf(1 - a))
  assert stats.kstest(low[mixed], cdf).pvalue > 0.01
  boxes = pixels[~mixed] == 0
  covered = boxes.mean(axis=0)
  # More often in the middle of the image, and symmetric about it.
  np.testing.assert_allclose(covered, covered[::-1, ::-1], atol=0.1)
  assert covered.min() > 0.08
  assert covered[height // 2, 24] > covered[0, 0] + 0.2
  # The edge shortens some boxes: keep only the sides of the others.
  rows = boxes.any(axis=2)
  sides = rows[~rows[:, 0] & ~rows[:, -1]].sum(axis=1) / height
  sides = sides[sides > 0]
  # A side s = sqrt(1 - l) touches no edge for a fraction 1 - s of the centres.
  s = np.linspace(0, 1, 4001)
  weight = np.cumsum(2 * s * beta.pdf(np.clip(1 - s**2, 1e-6, 1 - 1e-6)) * (1 - s))
  cdf = lambda v: np.interp(v, s, weight / weight[-1])
  grid = np.arange(1, height) / height
  below = np.mean(sides[:, None] <= grid, axis=0)
  # Sides are whole pixels; empty boxes are not observed.
  first = cdf(0.5 / height)
  want = (cdf(grid + 0.5 / height) - first) / (1 - first)
  assert np.abs(below - want).max() < 1.63 / np.sqrt(len(sides)) + 0.01


def test_without_either_the_batch_is_unchanged():
  batch = make_batch()
  got = mix(batch, 0)
  assert set(got) == set(batch)
  for key, value in batch.items():
    np.testing.assert_array_equal(got[key], value)


def test_eight_devices_mix_like_one():
  batch = make_batch()
  mesh = sharding.make_mesh({'data': 4, 'fsdp': 2})
  split = sharding.batch_sharding(mesh)
  placed = jax.device_put(batch, split)
  assert len(placed['image'].addressable_shards) == 8
  step = jax.jit(mixing.mix, static_argnums=(2, 3), out_shardings=split)
  for number in range(6):
    got = step(placed, jax.random.key(number), 0.0, 1.0)
    assert got['image'].addressable_shards[0].data.shape == (B // 8, H, W, C)
    want = mix(batch, number, 0.0, 1.0)
    for key in batch:
      np.testing.assert_allclose(got[key], want[key], atol=1e-6)


def test_batch_of_one_cannot_be_mixed():
  mixing.check(0, 0, 1)
  with pytest.raises(ValueError, match='mixup=0.2 mixes.*batch=1: use --config.batch'):
    mixing.check(0.2, 0, 1)
  batch = {'image': np.zeros((1, 2, 2, 1)), 'label': np.zeros((1, 2))}
  with pytest.raises(ValueError, match='cutmix=1.0 .*config.task_options.cutmix=0'):
    mixing.mix(batch, jax.random.key(0), 0.0, 1.0)
