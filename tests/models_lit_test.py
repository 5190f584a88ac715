"""Tests of LiT against published counts and names, and a forward pass in NumPy."""

import functools
import re

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from tests import tiny_models
from vit_jax import models, models_lit
from vit_jax.configs import models as model_configs
from vit_jax.layers import bert, text_towers
from vit_jax.weights import identify

# Numbers of parameters of the released models, and of their embeddings.
COUNTS = {
  'LiT-B16B': (195_871_489, 768),
  'LiT-B16B_2': (195_280_897, 768),
  'LiT-L16L': (638_443_521, 1024),
  'LiT-L16S': (331_140_353, 1024),
  'LiT-L16Ti': (311_913_089, 1024),
}
VIT = dict(
  patches={'size': (4, 4)}, hidden_size=8, representation_size=None,
  transformer=dict(
    num_layers=1, mlp_dim=16, num_heads=2, dropout_rate=0.0,
    attention_dropout_rate=0.0,
  ),
)  # fmt: skip
BERT = dict(
  width=8, num_layers=2, num_heads=2, mlp_dim=16, vocab_size=20,
  num_positions=12,
)  # fmt: skip
TEXT = dict(width=8, num_layers=1, mlp_dim=16, num_heads=2, vocab_size=20)
PP = dict(tokenizer_name='bert', size=8, max_len=5)


def make(text_model='bert', out_dim=(None, 8), **kwargs):
  text = {'bert': {'config': {**BERT, 'num_layers': 1}}}.get(text_model, TEXT)
  fields = dict(image=VIT, text_model=text_model, text=text, pp=PP, out_dim=out_dim)
  return models_lit.LitModel(**{**fields, **kwargs})


def inputs():
  images = np.random.default_rng(0).uniform(-1, 1, (3, 8, 8, 3))
  tokens = [[1, 5, 7, 2, 0], [1, 4, 0, 0, 0], [1, 9, 9, 3, 19]]
  return images.astype(np.float32), np.array(tokens, np.int32)


@functools.cache
def of_one_layer(name):
  """Returns a published model with one layer per tower, its shapes, and full depths."""
  config = model_configs.get_config(name)
  image, text = config.image.transformer, config.text
  with config.unlocked(), config.ignore_type():
    if config.text_model == 'bert':
      text.config = text_towers.BERTS[text.config]
      text = text.config
    depths = image.num_layers, text.get('num_layers', bert.BertEncoder.num_layers)
    image.num_layers = text.num_layers = 1
  model = models.make_model(config)
  images = jax.ShapeDtypeStruct((1, model.pp.size, model.pp.size, 3), 'float32')
  tokens = jax.ShapeDtypeStruct((1, model.pp.max_len), 'int32')
  init = lambda x, y: model.init(jax.random.key(0), images=x, tokens=y)
  return model, jax.eval_shape(init, images, tokens)['params'], depths


def shapes(name):
  """Shapes of a published model, whose layers are alike."""
  _, params, (image, text) = of_one_layer(name)
  found = {}
  for path, leaf in flax.traverse_util.flatten_dict(params, sep='/').items():
    layer = re.search('(?<=encoderblock_)0|(?<=layers_)0', path)
    depth = image if path.startswith('img/') else text
    for number in range(depth if layer else 1):
      start, end = layer.span() if layer else (0, 0)
      found[f'{path[:start]}{number if layer else ""}{path[end:]}'] = leaf
  return flax.traverse_util.unflatten_dict(found, sep='/')


@pytest.mark.parametrize('name', COUNTS)
def test_published_models(name):
  params, (count, width) = shapes(name), COUNTS[name]
  assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count
  found = identify.model_config(params)
  assert found.to_dict() == model_configs.get_config(name).to_dict()
  assert params['txt']['head']['bias'].shape == (width,)
  if 'B16B' not in name:
    return  # The others differ from LiT-B16B_2 only in their sizes.
  model, params, _ = of_one_layer(name)
  images = jax.ShapeDtypeStruct((2, 224, 224, 3), 'float32')
  tokens = jax.ShapeDtypeStruct((3, 16), 'int32')
  apply = lambda v, i, t: model.apply(v, images=i, tokens=t)
  zimg, ztxt, out = jax.eval_shape(apply, {'params': params}, images, tokens)
  assert (zimg.shape, ztxt.shape) == ((2, width), (3, width))
  kind = 'transformed' if model.text_model == 'bert' else 'embedded'
  assert set(out) == {
    f'txt/{kind}', 'txt/pre_logits', 'txt/logits', 'txt/norm',
    'txt/normalized', 'img/norm', 'img/normalized', 't',
  }  # fmt: skip


def test_bert_parameters_have_the_published_names_and_shapes():
  params = shapes('LiT-B16B')['txt']
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  found = {path: leaf.shape for path, leaf in flat.items()}
  block = {}
  start = 'encoder_block/layer_sequence/layers_11/'
  for name, inside, outside in (
    ('attention_block/attention_layer/query', 768, 768),
    ('attention_block/attention_layer/key', 768, 768),
    ('attention_block/attention_layer/value', 768, 768),
    ('attention_block/dense_layer', 768, 768),
    ('mlp_block/mlp/dense_layer', 768, 3072),
    ('mlp_block/dense_layer', 3072, 768),
  ):
    block[f'{start}{name}/kernel'] = (inside, outside)
    block[f'{start}{name}/bias'] = (outside,)
  for name in ('attention_block', 'mlp_block'):
    for leaf in ('scale', 'bias'):
      block[f'{start}{name}/layer_norm/{leaf}'] = (768,)
  others = {
    'embedder/embedders_token_ids/embedding': (30_522, 768),
    'embedder/embedders_position_ids/embedding': (512, 768),
    'embedder/embedders_segment_ids/embedding': (2, 768),
    'layer_norm/scale': (768,),
    'layer_norm/bias': (768,),
  }
  wanted = {f'BertEncoder_0/{k}': v for k, v in {**block, **others}.items()}
  wanted |= {'head/kernel': (768, 768), 'head/bias': (768,)}
  inner = lambda path: 'layers_' not in path or 'layers_11' in path
  assert {k: v for k, v in found.items() if inner(k)} == wanted


def gelu(x):
  return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def norm(p, x, eps=1e-6):
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
  return x * p['scale'] + p['bias']


def dense(p, x):
  return x @ p['kernel'] + p['bias']


def encode(p, x):
  """Applies a pre-norm encoder of one layer, without positions, to tokens [B, N, D]."""
  block = p['encoderblock_0']
  heads = block['MultiHeadDotProductAttention_0']
  y = norm(block['LayerNorm_0'], x)
  query, key, value = (
    np.einsum('bnd,dke->bnke', y, heads[name]['kernel']) + heads[name]['bias']
    for name in ('query', 'key', 'value')
  )
  weights = np.einsum('bqke,bske->bkqs', query, key) / query.shape[-1] ** 0.5
  y = np.einsum('bkqs,bske->bqke', special.softmax(weights, -1), value)
  out = heads['out']
  x = x + np.einsum('bqke,ked->bqd', y, out['kernel']) + out['bias']
  mlp = block['MlpBlock_0']
  y = gelu(dense(mlp['Dense_0'], norm(block['LayerNorm_1'], x)))
  x = x + dense(mlp['Dense_1'], y)
  return norm(p['encoder_norm'], x)


@pytest.mark.parametrize('out_dim', [(None, 8), 8])
def test_whole_model_matches_numpy(out_dim):
  model = make('text_transformer', out_dim, temperature_init=2.0)
  images, tokens = inputs()
  apply = jax.jit(lambda v: model.apply(v, images=images, tokens=tokens))
  variables = tiny_models.drawn(
    jax.eval_shape(lambda: model.init(jax.random.key(0), images=images, tokens=tokens))
  )
  zimg, ztxt, out = apply(variables)
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), variables['params'])
  x = images.astype(np.float64).reshape(3, 2, 4, 2, 4, 3).swapaxes(2, 3)
  kernel = p['img']['embedding']['kernel'].reshape(-1, 8)
  x = x.reshape(3, 4, -1) @ kernel + p['img']['embedding']['bias']
  x = np.concatenate([np.repeat(p['img']['cls'], 3, 0), x], 1)
  encoder = p['img']['Transformer']
  x = encode(encoder, x + encoder['posembed_input']['pos_embedding'])[:, 0]
  x = dense(p['img']['head'], x) if out_dim != (None, 8) else x
  y = p['txt']['Embed_0']['embedding'][tokens] + p['txt']['pos_embedding']
  y = dense(p['txt']['head'], encode(p['txt']['Encoder_0'], y)[:, -1])
  for found, raw, name in ((zimg, x, 'img'), (ztxt, y, 'txt')):
    length = np.linalg.norm(raw, axis=1, keepdims=True)
    np.testing.assert_allclose(found, raw / length, atol=2e-5)
    np.testing.assert_allclose(out[f'{name}/norm'], length, rtol=2e-5)
  np.testing.assert_allclose(out['t'], np.exp(p['t']), rtol=1e-6)
  logits = np.exp(p['t']) * (
    (x / np.linalg.norm(x, axis=1, keepdims=True))
    @ (y / np.linalg.norm(y, axis=1, keepdims=True)).T
  )
  found = models_lit.similarity(zimg, ztxt, out)
  np.testing.assert_allclose(found, logits, atol=1e-4)


@pytest.fixture(scope='module')
def embedded():
  """Variables of a model, and its outputs for images and texts."""
  images, tokens = inputs()
  model = make()
  init = lambda: model.init(jax.random.key(0), images=images, tokens=tokens)
  variables = tiny_models.drawn(jax.eval_shape(init))
  return variables, jax.jit(model.apply)(variables, images=images, tokens=tokens)


def test_single_input_gives_the_same_embeddings(embedded):
  variables, both = embedded
  images, tokens = inputs()
  apply = jax.jit(make().apply)
  zimg, none, out = apply(variables, images=images)
  assert none is None
  assert not any(name.startswith('txt') for name in out)
  np.testing.assert_allclose(zimg, both[0], atol=1e-6)
  none, ztxt, out = apply(variables, tokens=tokens)
  assert none is None
  assert not any(name.startswith('img') for name in out)
  np.testing.assert_allclose(ztxt, both[1], atol=1e-6)
  out = make().init_with_output(jax.random.key(0))[0][2]
  assert out['t'] == 1  # exp(0), as published.


def drawn(model, tokens):
  init = lambda: model.init(jax.random.key(0), tokens)
  return tiny_models.drawn(jax.eval_shape(init))


def test_bfloat16_embeddings_are_float32_and_close(embedded):
  images, tokens = inputs()
  variables, wanted = embedded
  half = make(dtype='bfloat16')
  found = jax.jit(half.apply)(variables, images=images, tokens=tokens)
  for x, y in zip(found[:2], wanted[:2]):
    assert x.dtype == jnp.float32
    np.testing.assert_allclose(x, y, atol=0.05)
    assert (np.asarray(x) != y).any()


def test_causal_tower_pools_the_end_token():
  fields = dict(causal=True, pool='eos', gelu='quick', norm_eps=1e-5)
  model = text_towers.TextTransformer(4, **{**TEXT, **fields})
  tokens = np.array([[1, 5, 19, 0, 0], [1, 6, 7, 8, 19]])
  params = drawn(model, tokens)
  apply = jax.jit(model.apply)
  found = apply(params, tokens)[0]
  # Tokens after the end token have no effect, and may be left out.
  other = np.array([[1, 5, 19, 3, 4], [1, 6, 7, 8, 19]])
  np.testing.assert_allclose(apply(params, other)[0], found, atol=1e-6)
  short = apply(params, tokens[:1, :3])[0]
  np.testing.assert_allclose(short, found[:1], atol=1e-6)


@pytest.mark.parametrize(
  'change, tokens, words',
  [
    ({}, np.ones((2, 13), int), 'has 13 tokens per text, but the model has 12'),
    ({}, np.ones(4, int), r'must be integers \[texts, tokens\], got int32\[4\]'),
    ({'text': {'config': 'huge'}}, np.ones((2, 4), int), "config='huge'"),
    ({'text_model': 'gpt'}, np.ones((2, 4), int), "text_model='gpt'"),
  ],
)
@pytest.mark.usefixtures('unchecked_shapes')
def test_wrong_inputs_and_fields(change, tokens, words):
  with pytest.raises(ValueError, match=words):
    jax.eval_shape(lambda: make(**change).init(jax.random.key(0), tokens=tokens))


def test_too_many_tokens_for_a_text_transformer():
  model = text_towers.TextTransformer(4, **TEXT)
  params = drawn(model, np.ones((1, 5), int))
  with pytest.raises(ValueError, match='6 tokens per text.* has 5'):
    jax.eval_shape(model.apply, params, np.ones((1, 6), int))
