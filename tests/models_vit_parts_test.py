"""Tests of the parts of a Vision Transformer: embed, encode, classify."""

import functools

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_models
from vit_jax import models


def parts(bound, x, **kwargs):
  """Returns the logits, computed by the three methods in turn."""
  encoded = bound.encode(bound.embed(x), train=False, **kwargs)
  return bound.classify(encoded, train=False)


@pytest.mark.parametrize(
  'fields',
  [
    {'classifier': 'gap', 'representation_size': 6},
    {'resnet': {'num_layers': (1,), 'width_factor': 0.5},
     'patches': {'size': (1, 1)}},
  ],
)  # fmt: skip
def test_model_equals_its_parts(fields):
  model = tiny_models.tiny(**fields)
  x = tiny_models.images()
  params = tiny_models.randomised(model, x)

  @jax.jit
  def compute(params):
    bound = model.bind({'params': params})
    first = {'only_first': model.classifier == 'token'}
    return bound(x, train=False), parts(bound, x, **first), parts(bound, x)

  whole, first, every = compute(params)
  np.testing.assert_array_equal(first, whole)
  np.testing.assert_allclose(every, whole, atol=1e-5)


def test_shapes_of_the_parts():
  model = tiny_models.tiny(num_layers=2)
  x = tiny_models.images((2, 8, 12, 3))
  params = tiny_models.randomised(model, x)

  @jax.jit
  def compute(params):
    bound = model.bind({'params': params})
    grid, tokens = bound.embed(x, flat=False), bound.embed(x)
    encode = functools.partial(bound.encode, train=False)
    return grid, tokens, encode(tokens), encode(grid), encode(tokens, only_first=True)

  grid, tokens, encoded, of_grid, first = compute(params)
  assert grid.shape == (2, 2, 3, 16)
  np.testing.assert_array_equal(grid.reshape(tokens.shape), tokens)
  assert encoded.shape == (2, 7, 16)  # The class token is the first.
  np.testing.assert_allclose(first, encoded[:, :1], atol=1e-5)
  np.testing.assert_array_equal(of_grid, encoded)
  with pytest.raises(ValueError, match=r'tokens must be \[batch, tokens, width'):
    model.bind({'params': params}).encode(tokens[0], train=False)


def test_no_transformer_leaves_tokens_unchanged():
  model = tiny_models.tiny(transformer=None, classifier='unpooled')
  x = tiny_models.images()
  params = tiny_models.randomised(model, x)
  assert set(params) == {'embedding', 'head'}

  @jax.jit
  def compute(params):
    bound = model.bind({'params': params})
    return bound(x, train=False), parts(bound, x)

  logits, again = compute(params)
  assert logits.shape == (2, 2, 2, 5)
  np.testing.assert_allclose(again.reshape(logits.shape), logits, atol=1e-6)


class Masked(models.VisionTransformer):
  """Predicts masked patches from the rest of an image."""

  def setup(self):
    super().setup()
    self.mask_token = self.param(
      'mask_token', nn.initializers.normal(), (1, 1, self.hidden_size)
    )

  def __call__(self, images, hidden, *, train):
    tokens = self.embed(images)  # [B, N, D]
    tokens = jnp.where(hidden[..., None], self.mask_token, tokens)
    return self.classify(self.encode(tokens, train=train), train=train)


def test_subclass_replaces_tokens_and_adds_parameters():
  plain = tiny_models.tiny(classifier='unpooled')
  fields = ('num_classes', 'patches', 'transformer', 'hidden_size', 'classifier')
  masked = Masked(**{name: getattr(plain, name) for name in fields})
  x = tiny_models.images()
  hidden = jnp.array([[True, False, False, False]] * 2)
  init = jax.jit(functools.partial(masked.init, train=False))
  params = init(jax.random.key(0), x, hidden)['params']
  token = params.pop('mask_token')
  assert token.shape == (1, 1, 16)
  want = tiny_models.init(plain, x)
  jax.tree.map(np.testing.assert_array_equal, params, want)
  params = tiny_models.randomised(plain, x)

  @jax.jit
  def run(token, x, hidden):
    variables = {'params': {**params, 'mask_token': token}}
    return masked.apply(variables, x, hidden, train=False)

  nothing = jnp.zeros_like(hidden)
  want = jax.jit(lambda x: plain.apply({'params': params}, x, train=False))(x)
  np.testing.assert_allclose(run(token, x, nothing), want, atol=1e-6)
  # The contents of the hidden patch, the first, affect no logit.
  other = x.at[:, :4, :4].multiply(-1)
  logits = run(token, x, hidden)
  assert logits.shape == (2, 4, 5)
  np.testing.assert_array_equal(run(token, other, hidden), logits)
  assert np.abs(run(token, other, nothing) - logits).max() > 1e-3
  gradient = jax.jit(jax.grad(lambda token: run(token, x, hidden).sum()))(token)
  assert np.abs(gradient).max() > 1e-3
  # Tokens of another dtype are cast to the dtype of the computation.
  half = masked.clone(dtype='bfloat16')
  encode = functools.partial(half.apply, train=False, method='encode')
  variables = {'params': {**params, 'mask_token': token}}
  encoded = jax.eval_shape(encode, variables, jnp.zeros((2, 4, 16)))
  assert encoded.dtype == jnp.bfloat16


class Dropping(models.VisionTransformer):
  """Encodes only some of the tokens, the first of which is the class token."""

  def __call__(self, images, kept, *, train):
    tokens = self.embed(images, flat=not self.needs_grid)
    tokens = self.add_positions(tokens, train=train)  # [B, N, D]
    tokens = jnp.take_along_axis(tokens, kept[..., None], axis=1)
    return self.encode(tokens, train=train, positioned=True)


def dropping(plain):
  fields = ('num_classes', 'patches', 'transformer', 'hidden_size')
  return Dropping(**{name: getattr(plain, name) for name in fields})


@pytest.mark.parametrize(
  'fields',
  [
    {'position_grid': (3, 3)},
    {'num_layers': 2, 'add_position_embedding': False, 'scan': True},
  ],
)
def test_tokens_are_dropped_after_adding_positions(fields):
  """Dropping tokens equals masking them in attention."""
  plain = tiny_models.tiny(transformer={**tiny_models.tiny().transformer, **fields})
  x = tiny_models.images()
  kept = jnp.array([[0, 2, 3], [0, 4, 1]])  # Of five tokens, per image.
  model = dropping(plain)
  params = tiny_models.randomised(plain, x)
  visible = (kept[:, None] == jnp.arange(5)[:, None]).any(axis=-1)  # [2, 5]

  @jax.jit
  def both(params):
    bound = plain.bind({'params': params})
    tokens = bound.embed(x, flat=not bound.needs_grid)
    masked = bound.encode(tokens, train=False, mask=visible[:, None, None])
    positioned = bound.add_positions(tokens, train=False)
    return (
      jnp.take_along_axis(masked, kept[..., None], axis=1),
      model.apply({'params': params}, x, kept, train=False),
      bound.encode(tokens, train=False),
      bound.encode(positioned, train=False, positioned=True),
    )

  masked, few, whole, again = both(params)
  assert few.shape == (2, 3, 16)
  np.testing.assert_allclose(few, masked, atol=1e-5)
  np.testing.assert_allclose(again, whole, atol=1e-6)
  assert np.abs(few[:, 0] - whole[:, 0]).max() > 1e-3


def test_causal_model():
  transformer = {**tiny_models.tiny().transformer, 'causal': True}
  model = tiny_models.tiny(classifier='unpooled', transformer=transformer)
  x = tiny_models.images()
  params = tiny_models.randomised(model, x)
  run = jax.jit(lambda x: model.apply({'params': params}, x, train=False))
  changed = np.abs(run(x) - run(x.at[:, 4:, :4].multiply(-1))).max(axis=(0, 2))
  assert changed[:2].max() == 0.0  # The third of four patches was changed.
  assert changed[2:].min() > 1e-3
  with pytest.raises(ValueError, match="classifier='token' reads .* use 'gap'"):
    tiny_models.shapes(model.clone(classifier='token'), 8)


class Halves(nn.Module):
  """A custom encoder, without masks or prefix tokens."""

  factor: float
  dtype: str
  param_dtype: str

  def __call__(self, x, *, train):
    assert not train
    assert (self.dtype, self.param_dtype) == (jnp.bfloat16, jnp.float32)
    return self.factor * x


def test_custom_encoder():
  model = tiny_models.tiny(
    encoder=Halves, transformer={'factor': 0.5}, dtype='bfloat16',
    num_classes=0,
  )  # fmt: skip
  x = tiny_models.images()
  params = tiny_models.randomised(model, x)
  got = jax.jit(functools.partial(model.apply, train=False))({'params': params}, x)
  cls = jnp.broadcast_to(params['cls'][:, 0], (2, 16))
  np.testing.assert_array_equal(got, 0.5 * cls.astype(jnp.bfloat16))


def test_works_in_flax_nnx():
  """Outputs and gradients are equal, with and without dropout."""
  dropout = dict(tiny_models.tiny().transformer, num_layers=1, dropout_rate=0.5)
  model = tiny_models.tiny(transformer=dropout)
  params = tiny_models.numbers(model, 8)
  images = np.random.RandomState(1).randn(2, 8, 8, 3).astype(np.float32)
  module = nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0))
  streams = nnx.state(module)
  module = nnx.eval_shape(lambda m, x: m.lazy_init(x, train=False), module, images)
  nnx.update(module, streams)
  state = nnx.state(module, nnx.Param)
  nnx.replace_by_pure_dict(state, params)
  nnx.update(module, state)

  def ours(module, rngs):
    logits = module(images, train=True, rngs=rngs)
    return (logits**2).mean(), (logits, module(images, train=False))

  def linen(params, key):
    apply = functools.partial(model.apply, {'params': params}, images)
    logits = apply(train=True, rngs={'dropout': key})
    return (logits**2).mean(), (logits, apply(train=False))

  grads, outputs = nnx.jit(nnx.grad(ours, has_aux=True))(module, nnx.Rngs(dropout=3))
  key = nnx.Rngs(dropout=3).dropout()
  wanted = jax.jit(jax.grad(linen, has_aux=True))(params, key)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4 * abs(y).max()),
    (nnx.to_pure_dict(grads), outputs),
    wanted,
  )
  assert np.abs(outputs[0] - outputs[1]).max() > 0.1  # Dropout was on.
