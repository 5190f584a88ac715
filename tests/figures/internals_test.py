"""Tests of Vision Transformer internals: attention, filters, positions."""

import flax.linen as nn
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import decomposition
from sklearn.metrics import pairwise

from tests import tiny_models
from vit_jax import models
from vit_jax.figures import internals
from vit_jax.layers import attention as layers
from vit_jax.tasks import masked_patches


def made(weights, grid, num_prefix_tokens=0):
  """Builds Attention from weights; the tokens before the patches are a class token."""
  model = tiny_models.tiny(classifier='token' if num_prefix_tokens else 'gap')
  return internals.make_attention(model, weights, None, grid)


def random_weights(shape, seed=0):
  """Weights [B, K, N, N] whose rows sum to 1."""
  weights = np.random.RandomState(seed).rand(*shape).astype(np.float32)
  return weights / weights.sum(axis=-1, keepdims=True)


def transformer(num_layers=2, **fields):
  return dict(
    num_layers=num_layers, mlp_dim=32, num_heads=2, dropout_rate=0.0,
    attention_dropout_rate=0.0, **fields,
  )  # fmt: skip


def test_distances_on_rectangular_grids_match_a_loop():
  (h, w), (p, q), before = (2, 3), (4, 8), 1
  weights = random_weights((2, 2, 7, 7))
  expected = np.zeros((1, 2))
  for image in weights:
    for head, rows in enumerate(image):
      for query in range(h * w):
        far, whole = 0.0, 0.0
        for key in range(h * w):
          weight = rows[before + query, before + key]
          down = (key // w - query // w) * p
          across = (key % w - query % w) * q
          far += weight * (down**2 + across**2) ** 0.5
          whole += weight
        expected[0, head] += far / whole / (h * w) / len(weights)
  found = internals.mean_distances([weights], (h, w), (p, q))
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_queries_that_attend_to_no_patch_have_distance_0():
  blind = np.zeros((1, 1, 5, 5), np.float32)
  blind[..., 0] = 1  # All attend to the class token.
  found = internals.mean_distances([blind], (2, 2), (4, 4))
  assert found.tolist() == [[0.0]]


def test_rollout_matches_a_hand_computation():
  first = np.array([[[
    [[1.0, 0.0], [0.5, 0.5]],  # Mean over heads: [[.5, .5], [.25, .75]].
    [[0.0, 1.0], [0.0, 1.0]],
  ]]], np.float32)[0]  # fmt: skip
  second = np.array([[[
    [[0.5, 0.5], [1.0, 0.0]],  # Mean over heads: [[.5, .5], [.5, .5]].
    [[0.5, 0.5], [0.0, 1.0]],
  ]]], np.float32)[0]  # fmt: skip
  # Averaged with the identity: [[.75, .25], [.125, .875]] and [[.75, .25],
  # [.25, .75]]; the second layer times the first:
  expected = [[[0.59375, 0.40625], [0.28125, 0.71875]]]
  found = internals.rollout([first, second])
  np.testing.assert_allclose(found, expected, atol=1e-7)
  # Class token before one patch, and two patches without a class token.
  found = internals.rollout_maps(made([first, second], (1, 1), 1))
  np.testing.assert_allclose(found, [[[0.40625]]], atol=1e-7)
  found = internals.rollout_maps(made([first, second], (1, 2)))
  np.testing.assert_allclose(found, [[[0.4375, 0.5625]]], atol=1e-7)
  found = internals.maps(made([first, second], (1, 2)))
  np.testing.assert_allclose(found, [[[[0.375, 0.625]]], [[[0.5, 0.5]]]])


def parameters(model, images):
  """Random parameters, made without compiling the model."""
  return jax.device_get(tiny_models.drawn(tiny_models.tree(model, images)))


def recorded(model, params, images):
  """Runs a model normally and records attention's inputs and outputs by layer."""

  @jax.jit
  def run(params, images):
    seen = []

    def record(call, args, kwargs, context):
      result = call(*args, **kwargs)
      if isinstance(context.module, layers.MultiHeadDotProductAttention):
        seen.append((args[0], result))
      return result

    with nn.intercept_methods(record):
      return model.apply({'params': params}, images, train=False), seen

  with pltpu.force_tpu_interpret_mode():
    return jax.device_get(run(params, images))


def check_weights(model, images):
  """Recomputes the output of attention from its weights, in NumPy."""
  params = parameters(model, images)
  found = internals.attention(model, params, images)
  expected, seen = recorded(model, params, images)
  assert len(found.weights) == len(seen) == 2
  for i, (x, result) in enumerate(seen):
    layer = params['Transformer'][f'encoderblock_{i}']
    layer = layer['MultiHeadDotProductAttention_0']
    value = np.einsum('bsd,dke->bske', x, layer['value']['kernel'])
    value = value + layer['value']['bias']
    heads = np.einsum('bkqs,bske->bqke', found.weights[i], value)
    mine = np.einsum('bqke,ked->bqd', heads, layer['out']['kernel'])
    mine = (mine + layer['out']['bias'])[:, : result.shape[1]]
    np.testing.assert_allclose(mine, result, atol=1e-5)
    np.testing.assert_allclose(found.weights[i].sum(axis=-1), 1, atol=1e-5)
  np.testing.assert_allclose(found.outputs, expected, atol=1e-4)
  return found


@pytest.mark.parametrize(
  'name, classifier',
  [('flash', 'token'), ('xla', 'gap')],  # Other tests use `default`.
)
def test_weights_reproduce_the_output_of_attention(name, classifier):
  model = tiny_models.tiny(
    classifier=classifier, transformer=transformer(attention=name)
  )
  found = check_weights(model, tiny_models.images((2, 8, 12, 3)))
  assert found.grid == (2, 3)
  assert found.num_prefix_tokens == (classifier == 'token')
  assert internals.maps(found).shape == (2, 2, 2, 3)
  assert internals.rollout_maps(found).shape == (2, 2, 3)


def test_grid_of_a_hybrid_is_its_feature_grid():
  model = tiny_models.tiny(
    num_layers=2,
    patches={'size': (1, 1)},
    resnet=dict(num_layers=(1,), width_factor=0.5),
  )
  found = check_weights(model, tiny_models.images((1, 8, 16, 3)))
  assert found.grid == (2, 4)
  assert found.weights[0].shape == (1, 2, 9, 9)


def test_masked_patch_models_run_without_masks():
  fields = tiny_models.tiny(classifier='gap')
  model = masked_patches.MaskedViT(
    5, fields.patches, transformer(), 16, classifier='gap'
  )
  found = check_weights(model, tiny_models.images())
  assert found.grid == (2, 2)
  assert found.outputs.shape == (2, 5)


def test_registers_are_excluded_from_maps():
  model = tiny_models.tiny(registers=2, transformer=transformer(1))
  images = tiny_models.images()
  found = internals.attention(model, parameters(model, images), images)
  assert found.num_prefix_tokens == 3
  weights = found.weights[0].mean(axis=1)[..., 3:]
  [got] = internals.maps(found)
  np.testing.assert_allclose(got, weights[:, 0].reshape(got.shape), rtol=1e-5)
  tokens = internals.token_maps(found)
  assert tokens.shape == (3, *got.shape)
  for token in range(3):
    np.testing.assert_allclose(
      tokens[token], weights[:, token].reshape(got.shape), rtol=1e-5
    )


@pytest.mark.parametrize(
  'fields, expected',
  [
    (dict(classifier='token'), [1, 0, 0, 0, 0, 0]),
    (dict(classifier='token', distilled=True), [0.5, 0.5, 0, 0, 0, 0]),
    (dict(classifier='token_gap'), [0, 0, 0.25, 0.25, 0.25, 0.25]),
    (dict(classifier='token_with_gap'), [0.5, 0, 0.125, 0.125, 0.125, 0.125]),
  ],
)
def test_maps_are_read_from_the_tokens_that_the_head_reads(fields, expected):
  weights = [random_weights((1, 2, 6, 6))]  # Two tokens, then 2 x 2 patches.
  found = internals.make_attention(tiny_models.tiny(**fields), weights, None, (2, 2))
  np.testing.assert_array_equal(found.readout, [expected])
  rows = np.array(expected) @ weights[0].mean(axis=1)
  np.testing.assert_allclose(internals.maps(found)[0].ravel(), rows[0, 2:], rtol=1e-6)


def test_attention_pooling_mixes_the_rows_of_rollout():
  model = tiny_models.tiny(2, classifier='map', registers=1)
  images = tiny_models.images()
  found = internals.attention(model, parameters(model, images), images)
  assert [w.shape for w in found.weights] == [(2, 2, 5, 5)] * 2
  assert found.num_prefix_tokens == 1
  np.testing.assert_allclose(found.readout[:, 1:].sum(axis=1), 1, rtol=1e-6)
  assert not found.readout[:, 0].any()  # The pooling does not read the register.
  mixed = internals.rollout(found.weights)
  expected = np.einsum('bq,bqk->bk', found.readout, mixed)[:, 1:]
  maps = internals.rollout_maps(found)
  np.testing.assert_allclose(maps.reshape(2, 4), expected, rtol=1e-5)


class Layered(nn.Module):
  """A custom encoder with numbered layers, the last of which is used twice."""

  num_layers: int

  @nn.compact
  def __call__(self, x, *, train):
    for i in range(self.num_layers):
      last = Layer(i, name=f'layer_{i}')
      x = last(x)
    return last(x)


class Layer(nn.Module):
  """Sows its number."""

  number: int

  @nn.compact
  def __call__(self, x):
    shape = (len(x), 1, x.shape[1], x.shape[1])
    self.sow('intermediates', 'attention_weights', jnp.full(shape, self.number))
    return x


def test_layers_are_ordered_by_number():
  model = tiny_models.tiny(encoder=Layered, transformer=dict(num_layers=12))
  images = tiny_models.images()
  found = internals.attention(model, parameters(model, images), images)
  assert [w.max() for w in found.weights] == [*range(12), 11]


def test_rejects_models_without_attention_weights():
  images = tiny_models.images()
  mixer = models.get_model('Mixer-B_16', num_classes=5)
  with pytest.raises(ValueError, match='model=MlpMixer has no attention weights'):
    internals.attention(mixer, {}, images)
  fields = transformer(1, attention_pattern='axial')
  axial = tiny_models.tiny(classifier='gap', transformer=fields)
  with pytest.raises(ValueError, match="attention_pattern='axial' .* use 'global'"):
    internals.attention(axial, parameters(axial, images), images)


def test_filters_are_the_principal_components_up_to_sign():
  kernel = np.random.RandomState(0).randn(4, 3, 2, 40).astype(np.float32)
  components, explained = internals.principal_filters(kernel, 7)
  filters = kernel.reshape(24, 40).T
  pca = decomposition.PCA(7, svd_solver='full').fit(filters)
  assert components.shape == (7, 4, 3, 2)
  products = (components.reshape(7, 24) * pca.components_).sum(axis=1)
  np.testing.assert_allclose(np.abs(products), 1, atol=1e-5)
  np.testing.assert_allclose(explained, pca.explained_variance_ratio_, rtol=1e-5)


@pytest.mark.parametrize('foreground', ['', 'negative'])
def test_colours_are_the_principal_components_of_patches(foreground):
  tokens = np.random.RandomState(0).randn(3, 4, 5, 8) * np.arange(1, 9) + 7
  colours, explained = internals.patch_colours(tokens, foreground)
  rows, kept = tokens.reshape(-1, 8), np.ones(60, bool)
  if foreground:
    pca = decomposition.PCA(1, svd_solver='full')
    first = pca.fit_transform(rows)[:, 0]
    first *= np.sign(pca.components_[0, np.abs(pca.components_[0]).argmax()])
    kept = (first > 0) == (foreground == 'positive')
  pca = decomposition.PCA(3, svd_solver='full')
  values = pca.fit_transform(rows[kept])
  want = (values - values.min(axis=0)) / np.ptp(values, axis=0)
  got = colours.reshape(60, 3)
  assert not got[~kept].any()
  same = np.abs(got[kept] - want).max(axis=0) < 1e-4
  turned = np.abs(got[kept] - (1 - want)).max(axis=0) < 1e-4
  assert (same | turned).all()
  np.testing.assert_allclose(explained, pca.explained_variance_ratio_, rtol=1e-4)


def test_similarity_is_the_cosine_without_the_class_token():
  table = np.random.RandomState(0).randn(1, 7, 5)
  found = internals.position_similarity(table, (2, 3))
  expected = pairwise.cosine_similarity(table[0, 1:])
  np.testing.assert_allclose(found.reshape(6, 6), expected, atol=1e-6)
