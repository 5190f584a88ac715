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
  with pytest.raises(
    ValueError, match=r'tokens must be \[batch, tokens, width'
  ):
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
