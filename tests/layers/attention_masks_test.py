"""Tests of attention that not all may pay to all: other keys, causal, masks."""

import functools

import flax.linen as nn
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.layers import attention, attention_kernels

B, Q, K, E = 2, 21, 3, 8


def plain(query, key, value, mask=None, causal=False):
  """The formula with its sums written out; 0 where a sum is empty."""
  shares = jnp.exp(jnp.einsum('bqke,bske->bkqs', query, key))
  if causal:
    rows, columns = np.indices(shares.shape[2:])
    shares = shares * (columns <= rows)
  if mask is not None:
    shares = shares * mask
  total = shares.sum(axis=-1, keepdims=True)
  shares = shares / jnp.where(total == 0, 1.0, total)
  return jnp.einsum('bkqs,bske->bqke', shares, value)


@functools.cache
def inputs(queries=Q, keys=Q):
  """Query, key, value, and the weights of a sum to differentiate."""
  lengths = (queries, keys, keys, queries)
  return [
    jax.random.normal(jax.random.key(i), (B, length, K, E))
    for i, length in enumerate(lengths)
  ]


def random_mask(*shape):
  """Half of it is True; the third query, if there is one, sees nothing."""
  mask = np.random.RandomState(0).rand(*shape) < 0.5
  mask[..., 2:3, :] = False
  return mask


MASKS = {
  'keys': np.arange(Q) < np.array([13, 21])[:, None, None, None],
  'queries and keys': random_mask(Q, Q),
  'heads': random_mask(1, K, Q, Q),
  'all': random_mask(B, K, Q, Q),
  'nothing': np.zeros((B, 1, 1, 1), bool),
}


def compare(name, args, atol=3e-5, **kwargs):
  """Compares values and gradients with those of the plain formula."""
  *args, weights = args

  def loss(function):
    def total(*args):
      out = function(*args, **kwargs)
      return jnp.sum(out * weights), out

    return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*args)

  with pltpu.force_tpu_interpret_mode():
    got = loss(attention.IMPLEMENTATIONS[name])
  for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(loss(plain))):
    np.testing.assert_allclose(mine, theirs, atol=atol, rtol=1e-5)


@pytest.mark.parametrize('lengths', [(21, 5), (5, 128), (130, 37), (1, 21)])
@pytest.mark.parametrize('name', ['default', 'xla', 'flash'])
def test_keys_of_another_sequence(name, lengths):
  compare(name, inputs(*lengths))


@pytest.mark.parametrize('length', [21, 128, 150])
@pytest.mark.parametrize('name', ['default', 'xla', 'flash'])
def test_causal(name, length):
  compare(name, inputs(length, length), atol=1e-4, causal=True)


def test_causal_in_blocks(monkeypatch):
  monkeypatch.setattr(attention_kernels, '_CAUSAL_BLOCK', 4)
  compare('default', inputs(), atol=1e-4, causal=True)  # 6, 6, 6 and 3 queries.


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('mask', MASKS)
@pytest.mark.parametrize('name', ['default', 'xla'])
def test_masks(name, mask, causal):
  compare(name, inputs(), mask=MASKS[mask], causal=causal)


@pytest.mark.parametrize('queries, keys', [(21, 21), (20, 20), (4, 21)])
@pytest.mark.parametrize('causal', [False, True])
def test_cudnn_is_asked_only_for_what_it_can_do(monkeypatch, queries, keys, causal):
  """As jax checks it on a GPU, in its cudnn/fused_attention_stablehlo.py."""
  if causal and queries != keys:
    queries = keys
  library = jax.nn.dot_product_attention

  def cudnn(query, key, value, mask=None, *, implementation, **kwargs):
    assert implementation == 'cudnn'
    lengths = (query.shape[1], key.shape[1])
    assert not any(length % 2 for length in lengths)
    assert mask is None or mask.shape[2:] == lengths
    if mask is not None and not isinstance(mask, jax.core.Tracer):
      assert np.asarray(mask).any(axis=-1).all()
    return library(query, key, value, mask=mask, implementation='xla', **kwargs)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', cudnn)
  compare('cudnn', inputs(queries, keys), causal=causal)
  for shape in ((queries, keys), (B, 1, queries, keys), (1, 1, 1, keys)):
    mask = random_mask(*shape)
    compare('cudnn', inputs(queries, keys), mask=mask, causal=causal)
  attention.IMPLEMENTATIONS['cudnn'](
    *inputs(queries, keys)[:3], mask=random_mask(queries, keys), causal=causal
  )


def test_tangents_with_a_mask():
  *args, _ = inputs()
  kwargs = dict(mask=MASKS['all'], causal=True)
  default = functools.partial(attention.IMPLEMENTATIONS['default'], **kwargs)
  got = jax.jvp(default, args, args[::-1])
  want = jax.jvp(functools.partial(plain, **kwargs), args, args[::-1])
  for mine, theirs in zip(got, want, strict=True):
    np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_masks_in_bfloat16():
  *args, weights = inputs()
  args = [x.astype(jnp.bfloat16) for x in args]
  mask = MASKS['all']

  def loss(function):
    return lambda *args: jnp.sum(function(*args, mask=mask) * weights)

  gradients = jax.grad(loss(attention.IMPLEMENTATIONS['default']), (0, 1, 2))
  exact = jax.grad(loss(plain), (0, 1, 2))(*inputs()[:3])
  for got, want in zip(gradients(*args), exact, strict=True):
    assert got.dtype == jnp.bfloat16
    error = jnp.linalg.norm(got.astype(jnp.float32) - want)
    assert error < 0.02 * jnp.linalg.norm(want)


@pytest.mark.parametrize('name', ['default', 'xla'])
def test_cross_attention_is_that_of_flax(name):
  x = jax.random.normal(jax.random.key(0), (B, 5, 12))
  kv = jax.random.normal(jax.random.key(1), (B, 7, 10))
  mask = np.random.RandomState(0).rand(B, 1, 5, 7) < 0.7
  layer = attention.MultiHeadDotProductAttention(num_heads=3, attention=name)
  variables = layer.init(jax.random.key(2), x, kv, deterministic=True)
  kernels = {k: v['kernel'].shape for k, v in variables['params'].items()}
  assert kernels == {
    'query': (12, 3, 4), 'key': (10, 3, 4), 'value': (10, 3, 4), 'out': (3, 4, 12)
  }  # fmt: skip
  theirs = nn.MultiHeadDotProductAttention(num_heads=3)
  for allowed in (None, mask):
    np.testing.assert_allclose(
      layer.apply(variables, x, kv, mask=allowed, deterministic=True),
      theirs.apply(variables, x, kv, mask=allowed),
      atol=1e-5,
    )


def layer_and_params(**fields):
  x = jax.random.normal(jax.random.key(0), (B, 5, 12))
  layer = attention.MultiHeadDotProductAttention(num_heads=3, **fields)
  params = layer.init(jax.random.key(2), x, deterministic=True)['params']
  params['out']['bias'] += 1.5
  return layer, {'params': params}, x


@pytest.mark.parametrize('name', ['default', 'xla'])
def test_the_weights_that_are_shown_are_masked(name):
  mask = np.ones((5, 5), bool)
  mask[3], mask[4, 1] = False, False
  layer, variables, x = layer_and_params(attention=name, causal=True)
  out, seen = layer.apply(
    variables, x, mask=mask, deterministic=True, mutable='intermediates'
  )
  [weights] = seen['intermediates']['attention_weights']
  assert weights.shape == (B, 3, 5, 5)
  np.testing.assert_array_equal(
    weights[0, 0] > 0,
    np.array(
      [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0],
        [1, 0, 1, 1, 1],
      ],
      bool,
    ),
  )
  sums = np.broadcast_to([1, 1, 1, 0, 1], (B, 3, 5))
  np.testing.assert_allclose(weights.sum(axis=-1), sums, atol=1e-6)
  # Who sees nothing gets the bias, shown or not.
  np.testing.assert_array_equal(out[:, 3], 1.5)
  unseen = layer.apply(variables, x, mask=mask, deterministic=True)
  np.testing.assert_allclose(unseen, out, atol=1e-5)


def test_dropout_of_masked_weights():
  layer, variables, x = layer_and_params(dropout_rate=0.5, causal=True)
  run = lambda x: layer.apply(
    variables, x, deterministic=False, rngs={'dropout': jax.random.key(0)}
  )
  other = run(x.at[:, 3:].set(0.0))
  np.testing.assert_array_equal(run(x)[:, :3], other[:, :3])
  assert np.abs(run(x) - other)[:, 3:].max() > 0.01


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize(
  'name, masked',
  [('default', False), ('default', True), ('xla', True), ('flash', False)],
)
def test_the_first_token_alone_is_that_of_all(name, causal, masked):
  layer, variables, x = layer_and_params(attention=name, causal=causal)
  first = layer.clone(only_first=True)
  mask = random_mask(B, 1, 5, 5) if masked else None
  run = lambda layer: jax.jit(
    lambda x: layer.apply(variables, x, mask=mask, deterministic=True)
  )(x)
  with pltpu.force_tpu_interpret_mode():
    got, want = run(first), run(layer)[:, :1]
  assert got.shape == (B, 1, 12)
  np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
  'fields, args, message',
  [
    ({'causal': True}, {'kv': (B, 5, 12)}, 'causal=True.*kv'),
    ({}, {'kv': (B + 1, 5, 12)}, r'kv must be tokens \[2, tokens, width\]'),
    ({}, {'kv': (5, 12)}, r'kv must be tokens .*got \(5, 12\)'),
    ({}, {'mask': (B, 5)}, r'= \[2, 3, 5, 5\], got bool \[2, 5\]'),
    ({}, {'mask': (1, B, 3, 5, 5)}, 'broadcast'),
    ({}, {'kv': (B, 4, 12), 'mask': (5, 5)}, r'\[2, 3, 5, 4\], got'),
    ({'attention': 'flash'}, {'mask': (5, 5)}, "flash'.*masks"),
  ],
)
def test_what_does_not_go_together_is_named(fields, args, message):
  layer, variables, x = layer_and_params(**fields)
  args = {
    name: jnp.ones(shape, bool if name == 'mask' else jnp.float32)
    for name, shape in args.items()
  }
  with pytest.raises(ValueError, match=message):
    layer.apply(variables, x, **args, deterministic=True)


def test_masks_are_bool():
  layer, variables, x = layer_and_params()
  with pytest.raises(ValueError, match='mask must be bool.*got float32'):
    layer.apply(variables, x, mask=jnp.zeros((5, 5)), deterministic=True)
  with pytest.raises(ValueError, match="attention='flash'.* masks"):
    attention.check('flash', 0.0, 'tpu', 'bfloat16', mask=True)
  attention.check('cudnn', 0.0, 'gpu', 'bfloat16', mask=True)
  attention.check('flash', 0.0, 'tpu', 'bfloat16')
