"""Tests of the encoder: recomputation, dropout, layers in a loop, masks."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_models, trees
from vit_jax.distributed import sharding


def test_dropout_is_placed_as_in_the_paper():
  transformer = {**tiny_models.tiny().transformer, 'num_layers': 1, 'dropout_rate': 0.5}
  model = tiny_models.tiny(transformer=transformer)
  x = tiny_models.images()
  variables = {'params': tiny_models.randomised(model, x)}
  apply = functools.partial(
    model.apply,
    train=True,
    capture_intermediates=lambda m, _: isinstance(m, nn.Dropout),
    mutable=['intermediates'],
  )
  _, seen = jax.jit(apply)(variables, x, rngs={'dropout': jax.random.key(0)})
  encoder = seen['intermediates']['Transformer']
  zeros = lambda t: float((np.asarray(t['__call__'][0]) == 0).mean())
  assert zeros(encoder['Dropout_0']) == pytest.approx(0.5, abs=0.15)
  block = encoder['encoderblock_0']
  assert zeros(block['Dropout_0']) == pytest.approx(0.5, abs=0.15)
  assert zeros(block['MlpBlock_0']['Dropout_0']) == pytest.approx(0.5, abs=0.15)
  assert zeros(block['MlpBlock_0']['Dropout_1']) == pytest.approx(0.5, abs=0.15)
  assert zeros(block['MultiHeadDotProductAttention_0']['Dropout_0']) == 0


def test_loop_over_layers_computes_the_same():
  fields = dict(num_layers=3, mlp_dim=32, num_heads=2, dropout_rate=0.0,
                attention_dropout_rate=0.0)  # fmt: skip
  plain = tiny_models.tiny(transformer=fields)
  loop = tiny_models.tiny(transformer=dict(fields, scan=True))
  x = tiny_models.images()
  params = tiny_models.randomised(plain, x)
  made = jax.eval_shape(lambda: loop.init(jax.random.key(0), x, train=False)['params'])
  assert jax.tree.structure(params) == jax.tree.structure(made)

  def loss(model):
    return lambda p: jnp.sum(model.apply({'params': p}, x, train=True) ** 2)

  want, want_grad = jax.jit(jax.value_and_grad(loss(plain)))(params)
  got, got_grad = jax.jit(jax.value_and_grad(loss(loop)))(params)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  trees.assert_close(got_grad, want_grad, rtol=1e-3, atol=1e-5)
  jaxpr = str(jax.make_jaxpr(loss(loop))(params))
  assert 'length=2' in jaxpr  # The last layer is outside of the loop.
  # Sowing intermediates disables the loop.
  _, seen = jax.eval_shape(
    lambda: loop.apply({'params': params}, x, train=False, mutable='intermediates')
  )
  assert 'encoderblock_2' in seen['intermediates']['Transformer']


def test_dropout_in_a_loop_differs_by_layer_and_key():
  fields = dict(num_layers=2, mlp_dim=32, num_heads=2, dropout_rate=0.5,
                scan=True)  # fmt: skip
  model = tiny_models.tiny(transformer=fields)
  x = tiny_models.images()
  params = tiny_models.randomised(model, x)

  @jax.jit
  def run(key):
    rngs = {'dropout': jax.random.key(key)}
    return model.apply({'params': params}, x, train=True, rngs=rngs)

  np.testing.assert_array_equal(run(0), run(0))
  assert np.abs(run(0) - run(1)).max() > 1e-3
  keys = jax.make_jaxpr(lambda: run(0))()
  assert 'random_split' in str(keys)


def counting(layers, width):
  """Parameters with which attention i adds 1 to feature 2 i, and MLP i to 2 i + 1."""
  model = tiny_models.encoder(
    num_layers=layers, mlp_dim=8, num_heads=1, add_position_embedding=False
  )
  shapes = jax.eval_shape(
    lambda: model.init(jax.random.key(0), jnp.zeros((1, 2, width)), train=False)
  )['params']
  params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
  for i in range(layers):
    block = params[f'encoderblock_{i}']
    attend = block['MultiHeadDotProductAttention_0']
    attend['out']['bias'][2 * i] = 1
    block['MlpBlock_0']['Dense_1']['bias'][2 * i + 1] = 1
  params['encoder_norm']['scale'][:] = 1
  return params


@pytest.mark.parametrize('fields', [{}, {'scan': True, 'remat': 'dots'}])
def test_stochastic_depth_drops_branches_by_layer_and_image(fields):
  layers, width, images, most = 3, 7, 4000, 0.6
  params = counting(layers, width)
  model = tiny_models.encoder(
    num_layers=layers, mlp_dim=8, num_heads=1, dropout_rate=0.0, attention_dropout_rate=0.0,
    add_position_embedding=False, stochastic_depth=most, **fields,
  )  # fmt: skip
  x = np.zeros((images, 2, width), np.float32)

  @functools.partial(jax.jit, static_argnames='train')
  def run(key, train):
    rngs = {'dropout': jax.random.key(key)}
    return model.apply({'params': params}, x, train=train, rngs=rngs)

  out = np.asarray(run(0, True), np.float64)
  # The last feature stays 0 and the first is 1, as its rate is 0: they serve to
  # invert the norm.
  out = (out - out[..., -1:]) / (out[..., :1] - out[..., -1:])
  np.testing.assert_array_equal(out[:, 0], out[:, 1])  # All tokens of an image.
  branches = out[:, 0, :-1]  # [images, 2 layers]
  rates = np.repeat([0.0, 0.3, 0.6], 2)
  is_kept = branches > 1e-3
  np.testing.assert_allclose(is_kept.mean(axis=0), 1 - rates, atol=0.04)
  kept = np.where(is_kept, branches * (1 - rates), 1)
  np.testing.assert_allclose(kept, 1, rtol=1e-4)
  np.testing.assert_allclose(branches.mean(axis=0), 1, atol=0.1)
  # Branches are dropped independently, and differently for each key.
  correlation = np.corrcoef(is_kept[:, 2:].T) - np.eye(2 * layers - 2)
  assert np.abs(correlation).max() < 0.08
  assert np.abs(run(1, True) - run(0, True)).max() > 0.1
  # Evaluation drops nothing.
  np.testing.assert_array_equal(run(0, False), run(1, False))
  want = np.append(np.ones(2 * layers), 0)
  want = (want - want.mean()) / want.std()
  np.testing.assert_allclose(run(0, False)[0, 0], want, rtol=1e-4)


def encoder_and_params(**fields):
  fields = dict(
    dict(num_layers=2, mlp_dim=24, num_heads=2, dropout_rate=0.0,
         attention_dropout_rate=0.0), **fields,
  )  # fmt: skip
  x = jnp.asarray(np.random.RandomState(0).randn(4, 7, 16), jnp.float32)
  model = tiny_models.encoder(**fields)
  params = tiny_models.randomised(model, x, seed=1)
  return model, params, x


def loss_of_five(model, x, mask):
  """Returns the loss of the first five tokens as a function of the parameters."""

  def total(params):
    out = model.apply({'params': params}, x, train=True, mask=mask)[:, :5]
    return jnp.sum(jnp.sin(3 * out))

  return total


@pytest.fixture(scope='module')
def five_tokens():
  """Parameters, seven tokens; loss and gradient with only the first five."""
  model, params, x = encoder_and_params(add_position_embedding=False)
  value, gradient = jax.jit(jax.value_and_grad(loss_of_five(model, x[:, :5], None)))(
    params
  )
  whole = jax.jit(loss_of_five(model, x, None))(params)
  assert abs(float(whole - value)) > 0.01
  return params, x, (value, gradient)


@pytest.mark.parametrize(
  'fields', [{'remat': 'full'}, {'attention': 'xla', 'scan': True, 'remat': 'dots'}]
)
def test_masks_reach_every_layer(fields, five_tokens):
  """Masked keys have no effect, as if they were absent."""
  params, x, want = five_tokens
  model, _, _ = encoder_and_params(add_position_embedding=False, **fields)
  keys = (np.arange(7) < 5)[None, None, None]
  got = jax.jit(jax.value_and_grad(loss_of_five(model, x, keys)))(params)
  trees.assert_close(got, want, rtol=1e-3, atol=1e-4)


VARIED = dict(
  norm='rms', qkv_bias=False, qk_norm=True, parallel=True, mlp='swiglu', layer_scale=0.1
)  # fmt: skip


def test_on_eight_devices():
  model, params, x = encoder_and_params(causal=True, scan=True, **VARIED)
  mask = np.random.RandomState(0).rand(4, 1, 7, 7) < 0.5

  def loss(params, x, mask):
    return jnp.sum(model.apply({'params': params}, x, train=True, mask=mask) ** 3)

  want = jax.jit(jax.value_and_grad(loss))(params, x, mask)
  mesh = sharding.make_mesh({'data': 2, 'fsdp': 2, 'model': 2})
  args = (
    jax.device_put(params, sharding.tree_shardings(params, (), mesh)),
    *jax.device_put((x, mask), sharding.batch_sharding(mesh)),
  )
  with jax.set_mesh(mesh):
    got = jax.device_get(jax.jit(jax.value_and_grad(loss))(*args))
  trees.assert_close(got, want, rtol=1e-3, atol=1e-3)
