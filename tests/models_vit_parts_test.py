"""Tests of the parts of a Vision Transformer: embed, encode, classify."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_models
from vit_jax import models


def parts(model, variables, x, **kwargs):
  """Logits by the three methods, one by one."""
  apply = lambda *args, **kw: model.apply(variables, *args, **kw)
  tokens = apply(x, method='embed')
  encoded = apply(tokens, train=False, method='encode', **kwargs)
  return apply(encoded, train=False, method='classify')


@pytest.mark.parametrize(
  'fields',
  [
    {},
    {'classifier': 'gap', 'representation_size': 6},
    {'classifier': 'unpooled', 'num_classes': None},
    {'classifier': 'token_unpooled', 'dtype': 'bfloat16'},
    {'resnet': {'num_layers': (1,), 'width_factor': 0.5},
     'patches': {'size': (1, 1)}},
  ],
)  # fmt: skip
def test_the_model_is_made_of_its_parts(fields):
  model = tiny_models.tiny(**fields)
  x = tiny_models.images()
  variables = {'params': tiny_models.randomised(model, x)}
  whole = model.apply(variables, x, train=False)
  first = {'only_first': model.classifier == 'token'}
  np.testing.assert_array_equal(parts(model, variables, x, **first), whole)
  np.testing.assert_allclose(parts(model, variables, x), whole, atol=1e-5)


def test_shapes_of_the_parts():
  model = tiny_models.tiny()
  x = tiny_models.images((2, 8, 12, 3))
  variables = {'params': tiny_models.randomised(model, x)}
  bound = model.bind(variables)
  grid = bound.embed(x, flat=False)
  tokens = bound.embed(x)
  assert grid.shape == (2, 2, 3, 16)
  np.testing.assert_array_equal(grid.reshape(tokens.shape), tokens)
  encoded = bound.encode(tokens, train=False)
  assert encoded.shape == (2, 7, 16)  # The class token is the first.
  first = bound.encode(tokens, train=False, only_first=True)
  np.testing.assert_allclose(first, encoded[:, :1], atol=1e-5)
  np.testing.assert_array_equal(bound.encode(grid, train=False), encoded)
  with pytest.raises(ValueError, match=r'tokens must be \[batch, tokens, width'):
    bound.encode(tokens[0], train=False)


def test_without_a_transformer_the_tokens_stay_as_they_are():
  model = tiny_models.tiny(transformer=None, classifier='unpooled')
  x = tiny_models.images()
  variables = {'params': tiny_models.randomised(model, x)}
  assert set(variables['params']) == {'embedding', 'head'}
  logits = model.apply(variables, x, train=False)
  assert logits.shape == (2, 2, 2, 5)
  flat = parts(model, variables, x)
  np.testing.assert_allclose(flat.reshape(logits.shape), logits, atol=1e-6)


class Masked(models.VisionTransformer):
  """Tells from what is left of an image what a patch was."""

  def setup(self):
    super().setup()
    self.mask_token = self.param(
      'mask_token', nn.initializers.normal(), (1, 1, self.hidden_size)
    )

  def __call__(self, images, hidden, *, train):
    tokens = self.embed(images)  # [B, N, D]
    tokens = jnp.where(hidden[..., None], self.mask_token, tokens)
    return self.classify(self.encode(tokens, train=train), train=train)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_subclass_replaces_tokens_and_adds_parameters(dtype):
  plain = tiny_models.tiny(classifier='unpooled', dtype=dtype)
  masked = Masked(**{
    name: getattr(plain, name)
    for name in ('num_classes', 'patches', 'transformer', 'hidden_size',
                 'classifier', 'dtype')
  })  # fmt: skip
  x = tiny_models.images()
  hidden = jnp.array([[True, False, False, False]] * 2)
  params = masked.init(jax.random.key(0), x, hidden, train=False)['params']
  token = params.pop('mask_token')
  assert token.shape == (1, 1, 16)
  want = plain.init(jax.random.key(0), x, train=False)['params']
  jax.tree.map(np.testing.assert_array_equal, params, want)
  params = tiny_models.randomised(plain, x)

  def run(token, x, hidden):
    variables = {'params': {**params, 'mask_token': token}}
    return masked.apply(variables, x, hidden, train=False)

  nothing = jnp.zeros_like(hidden)
  np.testing.assert_array_equal(
    run(token, x, nothing), plain.apply({'params': params}, x, train=False)
  )
  # What was in the hidden patch, the first, does not show in any logit.
  other = x.at[:, :4, :4].multiply(-1)
  logits = run(token, x, hidden)
  assert logits.shape == (2, 4, 5)
  np.testing.assert_array_equal(run(token, other, hidden), logits)
  assert np.abs(run(token, other, nothing) - logits).max() > 1e-3
  gradient = jax.grad(lambda token: run(token, x, hidden).sum())(token)
  assert np.abs(gradient).max() > 1e-3


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
    {},
    {'position_embedding': 'sincos2d'},
    {'position_grid': (3, 3)},
    {'add_position_embedding': False, 'scan': True},
  ],
)
def test_tokens_are_dropped_after_their_positions_were_added(fields):
  """Tokens that are dropped equal tokens to which no other one attends."""
  plain = tiny_models.tiny(transformer={**tiny_models.tiny().transformer, **fields})
  x = tiny_models.images()
  kept = jnp.array([[0, 2, 3], [0, 4, 1]])  # Of five tokens, by image.
  model = dropping(plain)
  drawn = jax.jit(lambda key: model.init(key, x, kept, train=False))
  params = drawn(jax.random.key(0))['params']
  want = dict(tiny_models.init(plain, x))
  del want['head']  # No classifier follows.
  jax.tree.map(np.testing.assert_array_equal, params, want)
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


def test_no_token_is_dropped_where_later_layers_add_positions():
  transformer = dict(tiny_models.tiny().transformer)
  model = dropping(
    tiny_models.tiny(transformer={**transformer, 'position_layers': 'shared'})
  )
  kept = jnp.array([[0, 2, 3], [0, 4, 1]])
  with pytest.raises(ValueError, match="position_layers='shared' adds .*'stem'"):
    model.init(jax.random.key(0), tiny_models.images(), kept, train=False)


def test_encode_takes_a_mask():
  model = tiny_models.tiny()
  x = tiny_models.images()
  variables = {'params': tiny_models.randomised(model, x)}
  bound = model.bind(variables)
  # Nobody attends to the last patch; the class token is the first of the keys.
  mask = jnp.array([True, True, True, True, False])[None, None, None]
  other = x.at[:, 4:, 4:].multiply(-1)
  for first in (False, True):
    left, right = (
      bound.encode(bound.embed(y), train=False, mask=mask, only_first=first)
      for y in (x, other)
    )
    np.testing.assert_array_equal(left[:, :4], right[:, :4])


def test_a_causal_model_reads_its_tokens_or_their_mean():
  transformer = {**tiny_models.tiny().transformer, 'causal': True}
  model = tiny_models.tiny(classifier='unpooled', transformer=transformer)
  x = tiny_models.images()
  params = tiny_models.randomised(model, x)
  run = lambda x: model.apply({'params': params}, x, train=False)
  changed = np.abs(run(x) - run(x.at[:, 4:, :4].multiply(-1))).max(axis=(0, 2))
  assert changed[:2].max() == 0.0  # The third of four patches has changed.
  assert changed[2:].min() > 1e-3
  with pytest.raises(ValueError, match="classifier='token' reads .* use 'gap'"):
    model.clone(classifier='token').init(jax.random.key(0), x, train=False)


class Halves(nn.Module):
  """An encoder of one's own: it knows neither masks nor first tokens."""

  factor: float
  dtype: str
  param_dtype: str

  def __call__(self, x, *, train):
    assert not train
    assert (self.dtype, self.param_dtype) == (jnp.bfloat16, jnp.float32)
    return self.factor * x


def test_an_encoder_of_ones_own():
  model = tiny_models.tiny(
    encoder=Halves, transformer={'factor': 0.5}, dtype='bfloat16',
    num_classes=0,
  )  # fmt: skip
  x = tiny_models.images()
  params = tiny_models.randomised(model, x)
  got = model.apply({'params': params}, x, train=False)
  cls = jnp.broadcast_to(params['cls'][:, 0], (2, 16))
  np.testing.assert_array_equal(got, 0.5 * cls.astype(jnp.bfloat16))
  with pytest.raises(ValueError, match='Halves adds .* argument `parts`'):
    model.apply(
      {'params': params}, jnp.zeros((2, 4, 16)), train=False,
      method='add_positions',
    )  # fmt: skip
