"""Tests of what models make of shifts and permutations: closed forms."""

import functools

import jax
import numpy as np
import pytest

from tests import tiny_models
from vit_jax import models
from vit_jax.figures import invariance

WITHOUT = ('ViT without positions', 'ViT without positions, mean pooling')
WITH = ('ViT', 'ViT, mean pooling', 'Hybrid of ResNet and ViT', 'MLP-Mixer')
OWN = {
  'mean colour': lambda images: images.mean(axis=(1, 2)),
  'left half': lambda images: images[:, :, :6],
}


@functools.cache
def found():
  """Changes of all models, for patches of 4 x 4, two down and three across."""
  images = np.asarray(tiny_models.images((2, 8, 12, 3)))
  return invariance.compare(images, extra=OWN)


def row(name):
  return found().names.index(name)


def test_all_models_are_compared():
  assert found().names == (*WITH[:2], *WITHOUT, *WITH[2:], *OWN)
  assert found().patch == 4
  assert found().shifts.tolist() == list(range(9))
  assert found().shifted.shape == (8, 9)
  assert found().shifted.dtype == found().shuffled.dtype == np.float32
  assert (found().shifted[:, 0] == 0).all()


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
def test_positions_break_it(name):
  assert found().shuffled[row(name)] > 0.05
  assert found().shifted[row(name), 1:].min() > 0.05


def test_a_function_of_ones_own_stands_beside_them():
  mean = row('mean colour')
  assert found().shuffled[mean] < 1e-5
  assert found().shifted[mean].max() < 1e-5
  images = np.asarray(tiny_models.images((2, 8, 12, 3)))
  left, right = (x.reshape(2, -1) for x in np.split(images, 2, axis=2))
  want = np.linalg.norm(left - right, axis=1) / np.linalg.norm(left, axis=1)
  apply = OWN['left half']
  got = invariance.changes([apply], images, [np.roll(images, 6, axis=2)])
  np.testing.assert_allclose(got, [[want.mean()]], rtol=1e-5)


def test_relative_change_is_the_mean_over_images():
  before = [[3.0, 4.0], [0.0, 2.0]]
  after = [[3.0, 9.0], [0.0, 2.0]]
  assert invariance.relative_change(before, after) == 0.5


def test_patches_change_places():
  image = np.arange(24).reshape(1, 4, 6, 1)
  got = invariance.shuffle_patches(image, 2, [5, 0, 1, 2, 3, 4])
  assert got[0, ..., 0].tolist() == [
    [16, 17, 0, 1, 2, 3],
    [22, 23, 6, 7, 8, 9],
    [4, 5, 12, 13, 14, 15],
    [10, 11, 18, 19, 20, 21],
  ]


def embedding(**fields):
  """The patch embedding of a model, with whole numbers for parameters."""
  model = tiny_models.tiny(**fields)
  params = jax.tree.map(np.round, tiny_models.numbers(model, (8, 12)))
  return jax.jit(
    functools.partial(
      model.apply, {'params': params}, method='embed', flat=False
    )
  )


def test_the_patch_embedding_is_equivariant_to_shifts_by_whole_patches():
  # Sums of whole numbers are exact in any order.
  images = np.round(8 * np.asarray(tiny_models.images((2, 8, 12, 3))))
  embed = embedding()

  def change(embed, tokens, pixels):
    moved = embed(np.roll(images, pixels, axis=2))
    want = np.roll(embed(images), tokens, axis=2)
    return invariance.relative_change(want, moved)

  assert [change(embed, i, 4 * i) for i in (1, 2)] == [0, 0]
  # Not so to other shifts; and the ResNet of a hybrid sees where images end.
  assert change(embed, 1, 3) > 0.5
  hybrid = embedding(
    patches={'size': (1, 1)}, resnet=dict(num_layers=(1,), width_factor=0.5)
  )
  assert change(hybrid, 1, 4) > 0.01


def test_features_are_those_before_the_head():
  model = tiny_models.tiny(
    classifier='gap', transformer=None, representation_size=4
  )
  images = tiny_models.images()
  params = tiny_models.numbers(model, 8)
  apply = functools.partial(model.apply, train=False, mutable='intermediates')
  _, seen = jax.jit(apply)({'params': params}, images)
  np.testing.assert_allclose(
    invariance.features(model, params)(images),
    seen['intermediates']['features'][0],
    rtol=1e-4, atol=1e-4,
  )  # fmt: skip


@pytest.mark.parametrize(
  'shape, patch, count',
  [
    ((1, 224, 224, 3), 16, 196),
    ((1, 32, 64, 1), 8, 32),
    ((1, 48, 32, 3), 8, 24),
    ((1, 8, 8, 1), 4, 4),
  ],
)
def test_patches_fit_the_images(shape, patch, count):
  assert invariance.patch_side(np.zeros(shape)) == patch
  for model in invariance.standard_models(patch).values():
    shapes = tiny_models.shapes(model, shape[1:3], shape[3])
    if isinstance(model, models.MlpMixer):
      kernel = shapes['MixerBlock_0/token_mixing/Dense_0/kernel']
      assert kernel.shape[0] == count
    elif 'Transformer/posembed_input/pos_embedding' in shapes:
      table = shapes['Transformer/posembed_input/pos_embedding']
      assert table.shape[1] == count + (model.classifier == 'token')


def test_what_cannot_be_compared_is_refused():
  for shape in ((1, 30, 32, 3), (1, 4, 8, 3), (32, 32, 3)):
    with pytest.raises(ValueError, match='multiples of 4 and at least 8'):
      invariance.compare(np.zeros(shape, np.float32))
  with pytest.raises(ValueError, match=r"names of standard models, \['ViT'\]"):
    invariance.compare(np.zeros((1, 8, 8, 3)), extra={'ViT': np.asarray})
