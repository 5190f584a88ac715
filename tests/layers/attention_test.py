"""Tests of attention: each implementation against the formula in NumPy."""

import functools

import flax.linen as nn
import jax
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import splash_attention
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_models, trees
from vit_jax import train
from vit_jax.configs import pretrain
from vit_jax.distributed import sharding
from vit_jax.layers import attention, attention_kernels, dtypes, fused_attention
from vit_jax.run import config as run_config

B, Q, K, E = 2, 21, 3, 8
DEFAULT = attention.IMPLEMENTATIONS['default']


@functools.cache
def inputs(queries=Q, keys=Q, shape=(B, K, E)):
  """Query, key, value, and the gradient of the output."""
  rng, (batch, heads, width) = np.random.RandomState(0), shape
  return [
    rng.randn(batch, length, heads, width).astype(np.float32)
    for length in (queries, keys, keys, queries)
  ]


def expected(query, key, value, gradient, mask=None, causal=False):
  """Output and gradients in float64; 0 where a query attends to nothing."""
  query, key, value, gradient = (
    np.asarray(x, np.float64) for x in (query, key, value, gradient)
  )
  logits = np.einsum('bqke,bske->bkqs', query, key)
  weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
  if causal:
    weights = weights * np.tri(*weights.shape[2:])
  if mask is not None:
    weights = weights * mask
  total = weights.sum(axis=-1, keepdims=True)
  weights = weights / np.where(total == 0, 1, total)
  by_weight = np.einsum('bqke,bske->bkqs', gradient, value)
  mean = (weights * by_weight).sum(axis=-1, keepdims=True)
  by_logit = weights * (by_weight - mean)
  return np.einsum('bkqs,bske->bqke', weights, value), (
    np.einsum('bkqs,bske->bqke', by_logit, key),
    np.einsum('bkqs,bqke->bske', by_logit, query),
    np.einsum('bkqs,bqke->bske', weights, gradient),
  )


def loss(function, gradient):
  def total(*args):
    out = function(*args)
    return jnp.sum(out * gradient), out

  return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))


def assert_expected(found, args, gradient, atol=3e-5, **kwargs):
  """Compares the result of `loss` with `expected`."""
  (_, out), gradients = jax.device_get(found)
  want, want_gradients = expected(*args, gradient, **kwargs)
  np.testing.assert_allclose(out, want, atol=1e-5, rtol=1e-5)
  for got, want in zip(gradients, want_gradients, strict=True):
    np.testing.assert_allclose(got, want, atol=atol, rtol=1e-5)


def compare(name, args, atol=3e-5, **kwargs):
  """Compares output and gradients of an implementation with `expected`."""
  *args, gradient = args
  options = attention_kernels.Options(**kwargs)
  function = functools.partial(attention.IMPLEMENTATIONS[name], options=options)
  # Pallas interprets the TPU kernels.
  with pltpu.force_tpu_interpret_mode():
    found = loss(function, gradient)(*args)
  assert_expected(found, args, gradient, atol, **kwargs)


def random_mask(*shape):
  """Half of the mask is True; the third query, if any, attends to nothing."""
  mask = np.random.RandomState(0).rand(*shape) < 0.5
  mask[..., 2:3, :] = False
  return mask


@pytest.mark.parametrize(
  'name, queries, keys',
  [('default', 21, 5), ('xla', 5, 21), ('flash', 130, 37), ('flash', 1, 21)],
)
def test_keys_from_another_sequence(name, queries, keys):
  compare(name, inputs(queries, keys))


@pytest.mark.parametrize('name, length', [('default', 21), ('xla', 21), ('flash', 150)])
def test_causal(name, length):
  compare(name, inputs(length, length), atol=1e-4, causal=True)


def test_causal_in_blocks(monkeypatch):
  monkeypatch.setattr(attention_kernels, 'CAUSAL_BLOCK', 4)
  compare('default', inputs(), atol=1e-4, causal=True)  # 6, 6, 6 and 3 queries.


@pytest.mark.parametrize(
  'queries, mask, causal',
  [
    (5, None, False),
    (40, random_mask(B, K, 40, 40), False),
    (40, None, True),
  ],
)
def test_many_keys(queries, mask, causal):
  # From 32 keys on, operands are transposed on CPUs.
  args = inputs(queries, 40)
  compare('default', args, atol=1e-4, mask=mask, causal=causal)


KEYS = np.arange(Q) < np.array([13, 21])[:, None, None, None]
NOTHING = np.zeros((B, 1, 1, 1), bool)


@pytest.mark.parametrize(
  'name, mask, causal',
  [
    ('default', KEYS, False),
    ('default', random_mask(B, K, Q, Q), True),
    ('default', NOTHING, True),
    ('xla', random_mask(1, 1, Q, Q), False),
    ('xla', NOTHING, True),
  ],
)
def test_masks(name, mask, causal):
  compare(name, inputs(), mask=mask, causal=causal)


@pytest.mark.parametrize('queries, keys, causal', [(21, 21, True), (4, 21, False)])
def test_cudnn_is_called_only_with_supported_inputs(monkeypatch, queries, keys, causal):
  """The same checks as in JAX's cudnn/fused_attention_stablehlo.py."""
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
  args, mask = inputs(queries, keys), random_mask(B, 1, queries, keys)
  compare('cudnn', args, causal=causal)
  compare('cudnn', args, mask=mask, causal=causal)
  if causal:
    options = attention_kernels.Options(mask, causal=True)
    attention.IMPLEMENTATIONS['cudnn'](*args[:3], options)


@pytest.fixture
def in_blocks(monkeypatch):
  """Few tokens are computed in blocks, as many are."""
  monkeypatch.setattr(attention_kernels, 'FEW_TOKENS', 0)


@pytest.mark.parametrize('causal', [False, True])
def test_flash_of_few_tokens(monkeypatch, causal):
  """Two programs of two heads each for an image; then one of three narrow heads."""
  monkeypatch.setattr(fused_attention, '_MOST_HEADS', 2)
  compare('flash', inputs(Q, Q, (B, 4, 64)), atol=1e-4, causal=causal)
  compare('flash', inputs(Q, Q, (B, 3, 8)), atol=1e-4, causal=causal)


@pytest.mark.parametrize(
  'tokens, heads, head_dim, itemsize, lanes',
  [
    (197, 6, 64, 2, 384),  # S/16: all heads.
    (197, 12, 64, 2, 384),
    (257, 16, 80, 2, 640),  # H/14: 640 is the least multiple of 80 and of 128.
    (577, 16, 64, 2, 256),
    (577, 16, 64, 4, 128),
    (197, 3, 64, 2, 192),  # Ti/16 has no multiple of 128.
  ],
)
def test_flash_has_whole_heads_that_fit(tokens, heads, head_dim, itemsize, lanes):
  width = heads * head_dim
  assert fused_attention._lanes(tokens, width, head_dim, itemsize) == lanes


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.usefixtures('in_blocks')
def test_flash_with_several_blocks(monkeypatch, causal):
  monkeypatch.setattr(attention_kernels, '_MOST_IN_BLOCK', 128)
  compare('flash', inputs(130, 130, (1, 1, 8)), atol=1e-4, causal=causal)


@pytest.mark.parametrize(
  'tokens, size',
  [(50, 128), (197, 256), (577, 640), (1025, 384), (4096, 512), (4097, 896)],
)
@pytest.mark.usefixtures('in_blocks')
def test_flash_pads_little_and_has_few_blocks(monkeypatch, tokens, size):
  """For example, 4,097 tokens take 5 blocks of 896 tokens; 9 of 512 would be longer."""
  blocks = []
  make_kernel = splash_attention.make_splash_mha

  def record(*args, block_sizes, **kwargs):
    blocks.append(block_sizes.block_kv_dkv)
    return make_kernel(*args, block_sizes=block_sizes, **kwargs)

  monkeypatch.setattr(splash_attention, 'make_splash_mha', record)
  x = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.float32)
  with pltpu.force_tpu_interpret_mode():
    out = jax.eval_shape(attention.IMPLEMENTATIONS['flash'], x, x, x)
  assert (out.shape, blocks) == (x.shape, [size])


@pytest.mark.parametrize('tokens', [5, 700])
def test_flash_in_bfloat16_on_tpus_that_multiply_float32(monkeypatch, tokens):
  """Mosaic cannot compile products of bfloat16 for TPU v3."""
  factors = []

  def in_blocks(query, key, value, segments):
    factors.append(query.dtype)
    return query

  def at_once(query, key, value, head_dim, causal, multiply_as):
    factors.append(multiply_as or query.dtype)
    return query

  monkeypatch.setattr(
    splash_attention, 'make_splash_mha', lambda *args, **kwargs: in_blocks
  )
  monkeypatch.setattr(fused_attention, 'attend', at_once)
  x = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.bfloat16)
  for kind in ('TPU v3', 'TPU v5 lite'):
    monkeypatch.setattr(dtypes, 'device_kind', lambda kind=kind: kind)
    compute = functools.partial(attention.IMPLEMENTATIONS['flash'])  # Not cached.
    assert jax.eval_shape(compute, x, x, x).dtype == jnp.bfloat16
  assert factors == [jnp.float32, jnp.bfloat16]


def test_flash_in_bfloat16():
  """Softmax and sums are float32, so that only the factors are rounded."""
  *args, _ = inputs(Q, Q, (1, 2, 8))
  narrow = [jnp.asarray(x, jnp.bfloat16) for x in args]
  wide = [x.astype(jnp.float32) for x in narrow]
  compute = attention.IMPLEMENTATIONS['flash']
  with pltpu.force_tpu_interpret_mode():
    out, exact = compute(*narrow), compute(*wide)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(out.astype(np.float32), exact, atol=0.02)


def test_flash_with_split_images_and_heads():
  *args, gradient = inputs(17, 17, (4, 2, 8))
  mesh = sharding.make_mesh({'data': 2, 'fsdp': 2, 'model': 2})
  function = loss(attention.IMPLEMENTATIONS['flash'], gradient)
  with jax.set_mesh(mesh), pltpu.force_tpu_interpret_mode():
    assert_expected(function(*args), args, gradient)


def test_flash_of_images_that_a_mesh_cannot_split():
  *args, gradient = inputs(17, 17, (3, 2, 8))
  function = loss(attention.IMPLEMENTATIONS['flash'], gradient)
  with jax.set_mesh(sharding.make_mesh({'data': 2}, jax.devices()[:2])):
    assert_expected(function(*args), args, gradient)


def test_flash_with_split_queries(monkeypatch):
  """A formula replaces the interpreted kernel, which deadlocks with collectives."""
  shapes = []

  def kernel(query, key, value, segments):
    shapes.append((query.shape, key.shape))
    same = segments.q[:, None] == segments.kv
    logits = jnp.where(same, jnp.einsum('kqe,kse->kqs', query, key), -1e30)
    return jnp.einsum('kqs,kse->kqe', jax.nn.softmax(logits), value)

  def make_kernel(mask, head_shards, q_seq_shards, block_sizes):
    assert mask.masks == [splash_attention.FullMask((128, 128))] * 4
    assert block_sizes.block_q == 128
    return kernel

  monkeypatch.setattr(splash_attention, 'make_splash_mha', make_kernel)
  *args, gradient = inputs(17, 17, (4, 2, 8))
  function = loss(attention.IMPLEMENTATIONS['flash'], gradient)
  with jax.set_mesh(sharding.make_mesh({'data': 2, 'sequence': 4})):
    assert_expected(function(*args), args, gradient)
  # 5 of 17 queries and all keys, in whole blocks.
  assert set(shapes) == {((4, 128, 8), (4, 128, 8))}


def test_tangents_and_second_derivatives():
  *args, gradient = inputs(5, 5)

  def plain(query, key, value):
    logits = jnp.einsum('bqke,bske->bkqs', query, key)
    return jnp.einsum('bkqs,bske->bqke', jax.nn.softmax(logits), value)

  @functools.partial(jax.jit, static_argnums=0)
  def derivatives(function, *args):
    inner = jax.grad(lambda *args: jnp.sum(function(*args) * gradient), (0, 1, 2))
    return jax.jvp(function, args, args[::-1]), jax.jvp(inner, args, args[::-1])[1]

  for got, want in zip(
    jax.tree.leaves(derivatives(DEFAULT, *args)),
    jax.tree.leaves(derivatives(plain, *args)),
    strict=True,
  ):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('mask', [None, random_mask(B, K, Q, Q)])
def test_bfloat16_gradients_are_close_to_float32(mask):
  *args, gradient = inputs()
  low = [jnp.asarray(x, jnp.bfloat16) for x in args]
  options = attention_kernels.Options(mask)
  _, gradients = loss(functools.partial(DEFAULT, options=options), gradient)(*low)
  for got, want in zip(gradients, expected(*args, gradient, mask)[1], strict=True):
    assert got.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(got, np.float64) - want)
    assert error < 0.02 * np.linalg.norm(want)


def test_huge_logits_give_finite_gradients():
  query, key, value, gradient = inputs()
  for leaf in jax.tree.leaves(loss(DEFAULT, gradient)(query * 1e4, key, value)):
    assert np.isfinite(leaf).all()


def layer_and_params(x, kv=None, **fields):
  layer = attention.MultiHeadDotProductAttention(num_heads=3, **fields)
  init = functools.partial(layer.init, deterministic=True)
  params = tiny_models.drawn(jax.eval_shape(init, jax.random.key(0), x, kv)['params'])
  return layer, {'params': params}


X = np.random.RandomState(0).randn(B, 5, 12).astype(np.float32)


def test_cross_attention_matches_flax():
  kv = np.random.RandomState(1).randn(B, 7, 10).astype(np.float32)
  mask = np.random.RandomState(0).rand(B, 1, 5, 7) < 0.7
  layer, variables = layer_and_params(X, kv)
  kernels = {k: v['kernel'].shape for k, v in variables['params'].items()}
  assert kernels == {
    'query': (12, 3, 4), 'key': (10, 3, 4), 'value': (10, 3, 4), 'out': (3, 4, 12)
  }  # fmt: skip
  theirs = nn.MultiHeadDotProductAttention(num_heads=3)
  for allowed in (None, mask):
    ours = functools.partial(layer.apply, mask=allowed, deterministic=True)
    want = functools.partial(theirs.apply, mask=allowed)
    np.testing.assert_allclose(
      jax.jit(ours)(variables, X, kv), jax.jit(want)(variables, X, kv), atol=1e-5
    )


def test_sown_weights_are_masked():
  mask = np.ones((5, 5), bool)
  mask[3], mask[4, 1] = False, False
  layer, variables = layer_and_params(X, causal=True)
  apply = functools.partial(layer.apply, mask=mask, deterministic=True)
  out, seen = jax.jit(functools.partial(apply, mutable='intermediates'))(variables, X)
  [weights] = seen['intermediates']['attention_weights']
  assert weights.shape == (B, 3, 5, 5)
  want = [
    [1, 0, 0, 0, 0],
    [1, 1, 0, 0, 0],
    [1, 1, 1, 0, 0],
    [0, 0, 0, 0, 0],
    [1, 0, 1, 1, 1],
  ]
  np.testing.assert_array_equal(weights[0, 0] > 0, np.array(want, bool))
  sums = np.broadcast_to([1, 1, 1, 0, 1], (B, 3, 5))
  np.testing.assert_allclose(weights.sum(axis=-1), sums, atol=1e-6)
  # A query that attends to nothing yields the bias, whether weights are sown or not.
  bias = variables['params']['out']['bias']
  np.testing.assert_array_equal(out[:, 3], np.broadcast_to(bias, (B, 12)))
  np.testing.assert_allclose(jax.jit(apply)(variables, X), out, atol=1e-5)


def test_dropout_with_masked_weights():
  layer, variables = layer_and_params(X, dropout_rate=0.5, causal=True)
  rngs = {'dropout': jax.random.key(0)}
  run = jax.jit(
    lambda x: layer.apply(variables, x, deterministic=False, rngs=rngs)
  )  # fmt: skip
  other = X.copy()
  other[:, 3:] = 0
  np.testing.assert_array_equal(run(X)[:, :3], run(other)[:, :3])
  assert np.abs(run(X) - run(other))[:, 3:].max() > 0.01


@pytest.mark.parametrize(
  'name, masked, causal',
  [('default', True, True), ('flash', False, False)],
)
def test_only_first_matches_the_first_of_all_tokens(name, masked, causal):
  layer, variables = layer_and_params(X, attention=name, causal=causal)
  mask = random_mask(B, 1, 5, 5) if masked else None

  @jax.jit
  def both(x):
    kwargs = dict(mask=mask, deterministic=True)
    first = layer.clone(only_first=True).apply(variables, x, **kwargs)
    return first, layer.apply(variables, x, **kwargs)

  with pltpu.force_tpu_interpret_mode():
    got, want = both(X)
  assert got.shape == (B, 1, 12)
  np.testing.assert_allclose(got, want[:, :1], atol=1e-5)


def test_last_layer_computes_only_what_is_used():
  """Logits and gradients equal those of a model that computes everything."""
  model = tiny_models.tiny()
  x = tiny_models.images((2, 12, 8, 3))
  params = tiny_models.randomised(model, x)

  def value(params, seen):
    mutable = 'intermediates' if seen else False
    out = model.apply({'params': params}, x, train=True, mutable=mutable)
    return jnp.sum((out[0] if seen else out) ** 2)

  lowered = [
    jax.jit(jax.value_and_grad(value), static_argnums=1).lower(params, seen)
    for seen in (False, True)
  ]
  (got, got_grad), (want, want_grad) = (x.compile()(params) for x in lowered)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  trees.assert_close(got_grad, want_grad, rtol=1e-3, atol=1e-4)
  # And it computes less: one token of 7.
  less, more = (x.cost_analysis()['flops'] for x in lowered)
  assert less < 0.9 * more


@pytest.mark.parametrize(
  'fields, args, message',
  [
    ({'causal': True}, {'kv': (B, 5, 12)}, 'causal=True.*kv'),
    ({}, {'mask': (B, 5)}, r'= \[2, 3, 5, 5\], got bool \[2, 5\]'),
    ({'attention': 'flash'}, {'mask': (5, 5)}, "flash'.*masks"),
  ],
)
def test_rejects_incompatible_inputs(fields, args, message):
  layer, variables = layer_and_params(X, **fields)
  args = {
    name: jnp.ones(shape, bool if name == 'mask' else jnp.float32)
    for name, shape in args.items()
  }
  with pytest.raises(ValueError, match=message):
    layer.apply(variables, X, **args, deterministic=True)


def test_masks_must_be_bool():
  layer, variables = layer_and_params(X)
  with pytest.raises(ValueError, match='mask must be bool.*got float32'):
    layer.apply(variables, X, mask=jnp.zeros((5, 5)), deterministic=True)


@pytest.mark.parametrize(
  'args, message',
  [
    (('best', 0.0, 'tpu', 'bfloat16'), "attention='best' is unknown: .*flash"),
    (('cudnn', 0.0, 'gpu', 'float32'), 'bfloat16, but the devices are'),
    (('flash', 0.1, 'tpu', 'bfloat16'), 'attention_dropout_rate=0.0'),
    (('xla', 0.1), "attention='xla' does not support dropout"),
  ],
)
def test_rejects_unsupported_options(args, message):
  with pytest.raises(ValueError, match=message):
    attention.check(*args)


def test_training_rejects_flash_before_compilation():
  config = pretrain.get_config('ti16,imagenet2012')
  config.model.transformer.attention = 'flash'
  config = run_config.resolve_steps(run_config.complete(config), 1_000_000)
  mesh = sharding.make_mesh({'data': -1})
  with pytest.raises(ValueError, match="attention='flash' needs TPUs"):
    train.make_program(config, {'class_names': ['a', 'b']}, mesh)
