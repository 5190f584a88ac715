"""Tests of the Vision Transformer: the paper's equations, every option."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests import numpy_vit, tiny_models
from vit_jax import models


def apply(model, params, x):
  return jax.jit(functools.partial(model.apply, train=False))({'params': params}, x)


def test_parameter_names_match_published_ones():
  names = tiny_models.shapes(models.get_model('b16', num_classes=10))
  block = 'Transformer/encoderblock_11'
  attention = f'{block}/MultiHeadDotProductAttention_0'
  expected = {
    'cls': (1, 1, 768),
    'embedding/kernel': (16, 16, 3, 768),
    'embedding/bias': (768,),
    'Transformer/posembed_input/pos_embedding': (1, 197, 768),
    f'{block}/LayerNorm_0/scale': (768,),
    f'{block}/LayerNorm_1/bias': (768,),
    f'{attention}/query/kernel': (768, 12, 64),
    f'{attention}/key/bias': (12, 64),
    f'{attention}/value/kernel': (768, 12, 64),
    f'{attention}/out/kernel': (12, 64, 768),
    f'{attention}/out/bias': (768,),
    f'{block}/MlpBlock_0/Dense_0/kernel': (768, 3072),
    f'{block}/MlpBlock_0/Dense_1/kernel': (3072, 768),
    'Transformer/encoder_norm/scale': (768,),
    'head/kernel': (768, 10),
    'head/bias': (10,),
  }
  assert {k: v.shape for k, v in names.items() if k in expected} == expected


def test_logits_match_the_papers_equations():
  model = tiny_models.tiny(num_layers=2, representation_size=6)
  x = tiny_models.images((2, 8, 12, 3))
  params = tiny_models.randomised(model, x)
  table = params['Transformer']['posembed_input']['pos_embedding']
  want = numpy_vit.logits(params, x, heads=2, added=[table, 0.0])
  got = apply(model, params, x)
  assert np.abs(want).max() > 0.1
  np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
  'classifier, shape',
  [
    ('token', (2, 5)),
    ('gap', (2, 5)),
    ('token_gap', (2, 5)),
    ('unpooled', (2, 4, 5)),
    ('token_unpooled', (2, 5, 5)),
  ],
)
def test_classifiers(classifier, shape):
  model = tiny_models.tiny(classifier=classifier)
  init = functools.partial(model.init_with_output, train=False)
  logits, variables = jax.eval_shape(init, jax.random.key(0), tiny_models.images())
  assert logits.shape == shape
  assert ('cls' in variables['params']) == ('token' in classifier)


def test_gap_is_the_mean_of_unpooled_tokens():
  x = tiny_models.images()
  model = tiny_models.tiny(classifier='gap')
  params = tiny_models.randomised(model, x)
  unpooled = apply(model.clone(classifier='unpooled'), params, x)
  np.testing.assert_allclose(
    unpooled.mean(axis=1), apply(model, params, x), atol=1e-5
  )  # fmt: skip


def test_initial_head_bias_and_pre_logits_without_a_head():
  x = tiny_models.images()
  model = tiny_models.tiny(head_bias_init=-10.0, transformer=None, classifier='gap')
  head = tiny_models.init(model, x)['head']
  np.testing.assert_array_equal(head['kernel'], 0)
  np.testing.assert_array_equal(head['bias'], -10.0)
  init = tiny_models.tiny(num_classes=None).init_with_output
  features, _ = jax.eval_shape(lambda: init(jax.random.key(0), x, train=False))
  assert features.shape == (2, 16)


def test_rectangular_images_and_patches():
  names = tiny_models.shapes(tiny_models.tiny(patches={'size': (2, 8)}), (8, 24))
  table = names['Transformer/posembed_input/pos_embedding']
  assert table.shape == (1, 1 + 4 * 3, 16)


def test_patch_order_is_irrelevant_without_position_embeddings():
  x = tiny_models.images((1, 8, 8, 3))
  turned = x.reshape(1, 2, 4, 8, 3)[:, ::-1].reshape(x.shape)
  transformer = {**tiny_models.tiny().transformer, 'add_position_embedding': False}
  model = tiny_models.tiny(transformer=transformer)
  params = tiny_models.randomised(model, x)
  got, want = apply(model, params, jnp.concatenate([x, turned]))
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_dtype_reaches_every_layer_and_logits_stay_float32():
  x = tiny_models.images()
  model = tiny_models.tiny(dtype='bfloat16', representation_size=8)
  params = tiny_models.randomised(model, x)
  inside = dict(capture_intermediates=True, mutable=['intermediates'])
  logits, seen = jax.eval_shape(
    lambda: model.apply({'params': params}, x, train=False, **inside)
  )
  assert logits.dtype == jnp.float32
  leaves, _ = jax.tree_util.tree_flatten_with_path(seen['intermediates'])
  other = [jax.tree_util.keystr(p) for p, x in leaves if x.dtype != jnp.bfloat16]
  # On CPUs, products of 16 bits are float32, see vit_jax.layers.xla_hints.
  products = r"\['MlpBlock_0'\]|\['out'\]"
  expected = rf"attention_weights|\['layer_|\['head'\]|^\['__call__'\]|{products}"
  assert all(re.search(expected, name) for name in other), other
  assert any('attention_weights' in path for path in other)
  half = tiny_models.tiny(param_dtype='bfloat16', representation_size=8)
  for variant, dtype in ((model, jnp.float32), (half, jnp.bfloat16)):
    assert {leaf.dtype for leaf in tiny_models.shapes(variant, 8).values()} == {
      jnp.dtype(dtype)
    }
  logits = apply(model, params, x)
  exact = apply(model.clone(dtype='float32'), params, x)
  np.testing.assert_allclose(logits, exact, atol=0.1)
  assert jnp.abs(logits - exact).max() > 0


def test_attention_weights_and_tokens_are_sown():
  x = tiny_models.images()
  model = tiny_models.tiny()
  params = tiny_models.randomised(model, x)
  sown = functools.partial(model.apply, train=False, mutable=['intermediates'])
  _, seen = jax.jit(sown)({'params': params}, x)
  seen = seen['intermediates']
  [weights] = seen['Transformer']['encoderblock_0']['MultiHeadDotProductAttention_0'][
    'attention_weights'
  ]
  assert weights.shape == (2, 2, 5, 5)
  np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
  assert seen['Transformer']['tokens'][0].shape == (2, 5, 16)
  assert seen['features'][0].shape == (2, 16)
  variables = jax.eval_shape(lambda: model.init(jax.random.key(0), x, train=False))
  assert set(variables) == {'params'}


def test_attention_pooling_matches_pytorch():
  """The class token is not pooled."""
  x = tiny_models.images()
  model = tiny_models.tiny(classifier='token_map')
  params = tiny_models.randomised(model, x)
  inner = tiny_models.tiny(classifier='token_unpooled', num_classes=None)
  tokens = torch.tensor(np.asarray(apply(inner, params, x)))[:, 1:]  # [2, 4, 16]
  pool = jax.tree.map(lambda p: torch.tensor(np.asarray(p)), params['MAPHead_0'])
  theirs = pool['MultiHeadDotProductAttention_0']
  functional = torch.nn.functional
  parts = [theirs[name] for name in ('query', 'key', 'value')]
  query = pool['probe'].expand(2, 1, 16).transpose(0, 1)
  keys = tokens.transpose(0, 1)
  y, _ = functional.multi_head_attention_forward(
    query, keys, keys, 16, 2,
    torch.cat([part['kernel'].reshape(16, 16).T for part in parts]),
    torch.cat([part['bias'].reshape(16) for part in parts]),
    None, None, False, 0.0,
    theirs['out']['kernel'].reshape(16, 16).T, theirs['out']['bias'],
  )  # fmt: skip
  norm, mlp = pool['LayerNorm_0'], pool['MlpBlock_0']
  z = functional.layer_norm(y, (16,), norm['scale'], norm['bias'], 1e-6)
  z = z @ mlp['Dense_0']['kernel'] + mlp['Dense_0']['bias']
  z = functional.gelu(z, approximate='tanh')
  y = (y + z @ mlp['Dense_1']['kernel'] + mlp['Dense_1']['bias'])[0]
  want = y.numpy() @ params['head']['kernel'] + params['head']['bias']
  np.testing.assert_allclose(apply(model, params, x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  'fields, shape, message',
  [
    ({'classifier': 'gap', 'distilled': True}, (1, 8, 8, 3), "='gap'.*use 'token'"),
    ({'classifier': 'sum'}, (1, 8, 8, 3), "classifier='sum'.*token.*gap"),
    ({}, (1, 10, 8, 3), 'image height 10 is not a multiple.*use 8 or 12'),
    ({}, (1, 8, 2, 3), 'image width 2 is smaller than one patch of 4'),
    ({}, (8, 8, 3), r'must be \[batch, height, width, channels\]'),
    ({'hidden_size': 15}, (1, 8, 8, 3), 'num_heads=2 does not divide'),
    (
      {'transformer': {**tiny_models.tiny().transformer, 'remat': 'some'}},
      (1, 8, 8, 3),
      "remat='some' must be one of",
    ),
  ],
)
@pytest.mark.usefixtures('unchecked_shapes')
def test_wrong_input_is_named(fields, shape, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(
      lambda: tiny_models.tiny(**fields).init(
        jax.random.key(0), jnp.zeros(shape), train=False
      )
    )
