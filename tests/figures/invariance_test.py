"""Tests of models under shifts and permutations: closed forms."""

import functools

import jax
import numpy as np
import pytest

from tests import tiny_models
from vit_jax.figures import invariance

WITHOUT = ('ViT without positions', 'ViT without positions, mean pooling')
WITH = ('ViT', 'ViT, mean pooling', 'Hybrid of ResNet and ViT', 'MLP-Mixer')


@functools.cache
def found():
  """Changes of all models, for two rows and three columns of 4x4 patches."""
  images = np.asarray(tiny_models.images((2, 8, 12, 3)))
  return invariance.compare(images, patch=4)


def row(name):
  return found().names.index(name)


@pytest.mark.parametrize('name', WITHOUT)
def test_without_positions_the_order_of_patches_does_not_matter(name):
  shifted = found().shifted[row(name)]
  assert found().shuffled[row(name)] < 1e-5
  assert shifted[[4, 8]].max() < 1e-5
  # Other shifts change what is in a patch.
  assert shifted[[1, 2, 3, 5, 6, 7]].min() > 0.1
  # Shifts that differ by a whole patch give the same patches in another order.
  np.testing.assert_allclose(shifted[1:4], shifted[5:8], atol=1e-5)


@pytest.mark.parametrize('name', WITH)
def test_positions_break_the_invariance(name):
  assert found().shuffled[row(name)] > 0.05
  assert found().shifted[row(name), 1:].min() > 0.05


def embedding(**fields):
  """The patch embedding of a model with integer-valued parameters."""
  model = tiny_models.tiny(**fields)
  params = jax.tree.map(np.round, tiny_models.numbers(model, (8, 12)))
  return jax.jit(
    functools.partial(model.apply, {'params': params}, method='embed', flat=False)
  )


def test_patch_embedding_is_equivariant_to_whole_patch_shifts():
  # Sums of integers are exact in any order.
  images = np.round(8 * np.asarray(tiny_models.images((2, 8, 12, 3))))
  embed = embedding()

  def change(embed, tokens, pixels):
    moved = embed(np.roll(images, pixels, axis=2))
    want = np.roll(embed(images), tokens, axis=2)
    return invariance.relative_change(want, moved)

  assert [change(embed, i, 4 * i) for i in (1, 2)] == [0, 0]
  # Other shifts change it, and the ResNet of a hybrid sees the image borders.
  assert change(embed, 1, 3) > 0.5
  hybrid = embedding(
    patches={'size': (1, 1)}, resnet=dict(num_layers=(1,), width_factor=0.5)
  )
  assert change(hybrid, 1, 4) > 0.01
