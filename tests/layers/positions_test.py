"""Tests of position embeddings: parameters, and closed forms on a 3x4 grid."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import numpy_vit, tiny_models
from vit_jax.figures import internals as figure
from vit_jax.layers import attention, positions

# Images of 3 x 4 patches; a token has width 16, each of two heads 8.
SIZE, H, W, D, E, LAYERS = (12, 16), 3, 4, 16, 8, 2


def vit(kind, layers='stem', transformer=(), **fields):
  transformer = {
    **tiny_models.tiny(LAYERS).transformer,
    'position_embedding': kind,
    'position_layers': layers,
    **dict(transformer),
  }
  return tiny_models.tiny(transformer=transformer, **fields)


def sincos_of_big_vision():
  """Writes out the definition: sin x, cos x, sin y, cos y of each patch."""
  table = np.zeros((H, W, D))
  for y, x, i in np.ndindex(H, W, D // 4):
    frequency = 10_000.0 ** (-i / (D // 4 - 1))
    table[y, x, i :: D // 4] = (
      np.sin(x * frequency), np.cos(x * frequency),
      np.sin(y * frequency), np.cos(y * frequency),
    )  # fmt: skip
  return table


def closed_form(kind, table):
  """Returns the embeddings of the 1 + 3 x 4 tokens for a learned table."""
  if kind == 'learned_1d':
    return table['pos_embedding'][0]
  if kind == 'sincos2d':
    grid = sincos_of_big_vision()
  else:
    grid = np.zeros((H, W, D))
    for y, x in np.ndindex(H, W):
      grid[y, x] = *table['x_embedding'][x], *table['y_embedding'][y]
  return np.concatenate([np.zeros((1, D)), grid.reshape(-1, D)])


IMAGES = np.random.RandomState(0).uniform(-1, 1, (2, *SIZE, 3)).astype('f')


@pytest.mark.parametrize(
  'kind, layers',
  [
    ('learned_1d', 'every'),
    ('learned_2d', 'stem'),
    ('learned_2d', 'shared'),
    ('sincos2d', 'shared'),
    ('relative', 'every'),
    ('relative', 'shared'),
  ],
)
def test_logits_match_the_closed_form(kind, layers):
  model = vit(kind, layers)
  params = tiny_models.numbers(model, SIZE)
  got = model.apply({'params': params}, IMAGES, train=False)
  names = [f'posembed_{i}' for i in range(LAYERS)]
  if layers != 'every':
    names = ['posembed_input'] * LAYERS
  tables = [params['Transformer'].get(name) for name in names]
  added, relative = [0.0] * LAYERS, None
  if kind == 'relative':
    relative = [table['relative_embedding'] for table in tables]
  else:
    added = [closed_form(kind, table) for table in tables]
    added[1:] = [0.0] if layers == 'stem' else added[1:]
  want = numpy_vit.logits(params, IMAGES, 2, added, relative)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
  blind = numpy_vit.logits(params, IMAGES, 2, [0.0] * LAYERS)
  assert np.abs(want - blind).max() > 0.1


def test_class_token_has_no_position_on_the_grid():
  module = positions.AddPositionEmbs(kind='sincos2d', grid=(H, W))
  x = np.random.RandomState(0).randn(2, H * W, D).astype(np.float32)
  assert module.init(jax.random.key(0), x) == {}
  want = x + sincos_of_big_vision().reshape(-1, D)
  np.testing.assert_allclose(module.apply({}, x), want, atol=1e-6)
  got = module.apply({}, np.concatenate([x[:, :1], x], axis=1))
  np.testing.assert_array_equal(got[:, 0], x[:, 0])
  np.testing.assert_allclose(got[:, 1:], want, atol=1e-6)


@pytest.mark.parametrize(
  'name, causal, masked', [('default', False, True), ('xla', True, False)]
)
def test_relative_attention_in_every_implementation(name, causal, masked):
  rng = np.random.RandomState(0)
  x, relative = (rng.randn(*shape).astype(np.float32) for shape in ((2, 5, D), (9, E)))
  mask = rng.rand(2, 1, 5, 5) < 0.6 if masked else None
  layer = attention.MultiHeadDotProductAttention(
    num_heads=2, attention=name, causal=causal
  )
  call = dict(mask=mask, relative=relative, deterministic=True)
  first = layer.clone(only_first=True)
  variables = jax.jit(lambda: layer.init(jax.random.key(0), x, **call))()

  @jax.jit
  def run(variables, x):
    apply = lambda layer, **kwargs: layer.apply(variables, x, **call, **kwargs)
    return apply(layer), apply(first), apply(layer, mutable='intermediates')[1]

  got, got_first, seen = run(variables, x)
  p = jax.tree.map(np.asarray, variables['params'])
  q, k, v = (np.einsum('bnd,dke->bkne', x, p[n]['kernel'])
             for n in ('query', 'key', 'value'))  # fmt: skip
  scores = q @ k.swapaxes(-1, -2)
  for i, j in np.ndindex(5, 5):
    scores[:, :, i, j] += q[:, :, i] @ relative[4 + i - j]
  allowed = np.tri(5, dtype=bool) if causal else mask
  shares = np.exp(scores / np.sqrt(E)) * allowed
  shares /= np.maximum(shares.sum(axis=-1, keepdims=True), 1e-30)
  want = np.einsum('bkne,ked->bnd', shares @ v, p['out']['kernel'])
  np.testing.assert_allclose(got, want, atol=1e-5)
  weights = seen['intermediates']['attention_weights'][0]
  np.testing.assert_allclose(weights, shares, atol=1e-5)
  np.testing.assert_allclose(got_first, want[:, :1], atol=1e-5)


def test_loop_over_layers_computes_the_same():
  for kind in ('relative', 'learned_2d'):
    plain = vit(kind, 'every', {'num_layers': 3})
    params = tiny_models.numbers(plain, SIZE)
    loop = vit(kind, 'every', dict(num_layers=3, scan=True, remat='full'))

    def run(model, params):
      return model.apply({'params': params}, IMAGES, train=True)

    np.testing.assert_allclose(
      jax.jit(functools.partial(run, loop))(params), run(plain, params),
      rtol=1e-4, atol=1e-3,
    )  # fmt: skip


def test_hybrids_use_the_grid_of_their_features():
  resnet = {'num_layers': (1,), 'width_factor': 0.5}
  model = vit(
    'learned_2d', classifier='gap', resnet=resnet, patches={'size': (1, 1)},
  )  # fmt: skip
  names = tiny_models.shapes(model, SIZE)
  assert names['Transformer/posembed_input/x_embedding'].shape == (W, D // 2)
  assert names['Transformer/posembed_input/y_embedding'].shape == (H, D // 2)


def test_rejects_invalid_position_embeddings():
  with pytest.raises(ValueError, match="relative.*'stem'.* 'every'"):
    tiny_models.shapes(vit('relative', 'stem'), SIZE)
  variables = {'params': tiny_models.numbers(vit('learned_2d'), SIZE)}
  bound = vit('learned_2d').bind(variables)
  flat = bound.embed(IMAGES)
  with pytest.raises(ValueError, match='needs the grid of the patches: pass enc'):
    bound.encode(flat, train=False)
  assert bound.encode(flat.reshape(2, H, W, D), train=False).shape == (2, 13, D)
  module = positions.AddPositionEmbs(kind='learned_2d', grid=(2, 3))
  with pytest.raises(ValueError, match='5 tokens are fewer than the 2 x 3'):
    module.init(jax.random.key(0), jnp.zeros((1, 5, 6)))
  with pytest.raises(ValueError, match="relative position embeddings.*'default'"):
    tiny_models.shapes(vit('relative', 'every', {'attention': 'flash'}), SIZE)


def test_attention_weights_of_models_with_a_grid():
  model = vit('sincos2d')
  params = tiny_models.numbers(model, SIZE)
  weights, logits = figure.forward(model, params, IMAGES)
  want = model.apply({'params': params}, IMAGES, train=False)
  np.testing.assert_allclose(logits, want, atol=1e-4)
  assert weights[0].shape == (2, 2, 1 + H * W, 1 + H * W)
