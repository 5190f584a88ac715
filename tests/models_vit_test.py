"""Tests of the models: published counts, timm's logits, every option."""

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models
from vit_jax import models_vit
from vit_jax.configs import models as model_configs
from vit_jax.weights import identify

# arXiv 2010.11929, 2106.10270 and 2105.01601, 1000 classes, no pre-logits layer.
COUNTS = {
  'ViT-Ti_16': 5_717_416,
  'ViT-S_16': 22_050_664,
  'ViT-S_32': 22_878_952,
  'ViT-B_8': 86_576_872,
  'ViT-B_16': 86_567_656,
  'ViT-B_32': 88_224_232,
  'ViT-L_16': 304_326_632,
  'ViT-L_32': 306_535_400,
  'ViT-H_14': 632_045_800,
  'ViT-S_16-gap-norep': 22_049_896,
  'ViT-S_32-gap-norep': 22_878_184,
  'ViT-B_16-gap-norep': 86_566_120,
  'ViT-B_32-gap-norep': 88_222_696,
  'R+ViT-Ti_16': 6_337_704,
  'R26+ViT-S_32': 36_431_912,
  'R26+ViT-B_32': 101_383_976,
  'R50+ViT-B_16': 98_659_112,
  'R50+ViT-L_32': 328_994_856,
  'R50+ViT-B_32': 110_945_832,
  'R50+ViT-L_16': 316_483_624,
  'Mixer-B_16': 59_880_472,
  'Mixer-B_32': 60_293_428,
  'Mixer-L_16': 208_196_168,
}


def tiny(**kwargs):
  """A model that compiles in no time."""
  fields = dict(
    num_classes=5,
    patches={'size': (4, 4)},
    hidden_size=16,
    transformer=dict(
      num_layers=2,
      mlp_dim=32,
      num_heads=2,
      dropout_rate=0.0,
      attention_dropout_rate=0.0,
    ),
  )
  return models.VisionTransformer(**{**fields, **kwargs})


def shapes(model, size=224, channels=3):
  """Shapes of the parameters, by path."""
  height, width = (size, size) if isinstance(size, int) else size
  tree = jax.eval_shape(
    lambda: model.init(
      jax.random.key(0), jnp.zeros((1, height, width, channels)), train=False
    )
  )
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree['params'])
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in leaves
  }


def images(shape=(2, 8, 8, 3), seed=1):
  return jax.random.uniform(jax.random.key(seed), shape, minval=-1)


def randomised(model, x, seed=0):
  """Parameters that are all random, heads and class tokens too."""
  params = model.init(jax.random.key(seed), x, train=False)['params']
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
  return jax.tree.unflatten(
    tree,
    [p + 0.1 * jax.random.normal(k, p.shape) for p, k in zip(leaves, keys)],
  )


@pytest.mark.parametrize('name', COUNTS)
def test_parameter_counts_are_the_published_ones(name):
  leaves_by_path = shapes(models.get_model(name, num_classes=1000))
  leaves = leaves_by_path.values()
  params = flax.traverse_util.unflatten_dict(leaves_by_path, sep='/')
  assert identify.describe(params) == name
  assert sum(leaf.size for leaf in leaves) == COUNTS[name]


def test_every_published_count_and_every_size_has_a_config():
  assert set(COUNTS) <= set(model_configs.MODEL_CONFIGS)
  for size in 'BLH':
    for patch in (14, 16, 32):
      assert f'ViT-{size}_{patch}' in model_configs.MODEL_CONFIGS


def test_functions_and_short_names_lead_to_the_same_config():
  for short, name in model_configs.SHORT_NAMES.items():
    config = getattr(model_configs, f'get_{short}_config')()
    assert config == model_configs.MODEL_CONFIGS[name]
    assert config.model_name == name
  assert model_configs.SHORT_NAMES['r50_l32'] == 'R50+ViT-L_32'
  assert model_configs.SHORT_NAMES['b16'] == 'ViT-B_16'


def test_pre_logits_layer_adds_one_dense_layer():
  base = shapes(models.get_model('b16', num_classes=1000))
  with_rep = shapes(
    models.get_model('b16', num_classes=1000, representation_size=768)
  )
  extra = sum(x.size for x in with_rep.values()) - sum(
    x.size for x in base.values()
  )
  assert extra == 768 * 768 + 768


def test_parameter_names_are_the_published_ones():
  names = shapes(models.get_model('b16', num_classes=10))
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


def test_hybrid_parameter_names_are_the_published_ones():
  names = shapes(models.get_model('R50+ViT-B_16', num_classes=10))
  assert names['conv_root/kernel'].shape == (7, 7, 3, 64)
  assert names['gn_root/scale'].shape == (64,)
  assert names['block1/unit1/conv_proj/kernel'].shape == (1, 1, 64, 256)
  assert names['block2/unit1/gn_proj/bias'].shape == (512,)
  assert names['block3/unit9/conv2/kernel'].shape == (3, 3, 256, 256)
  assert names['embedding/kernel'].shape == (1, 1, 1024, 768)
  # 16 times fewer positions down and across, whatever makes the features.
  assert names['Transformer/posembed_input/pos_embedding'].shape == (
    1,
    197,
    768,
  )


def test_patch_embedding_is_a_strided_convolution():
  x = images((2, 12, 8, 3))
  layer = models_vit.PatchEmbedding(features=7, patch_size=(3, 4))
  params = layer.init(jax.random.key(0), x)
  conv = nn.Conv(7, (3, 4), strides=(3, 4), padding='VALID')
  np.testing.assert_allclose(
    layer.apply(params, x), conv.apply(params, x), atol=1e-5
  )


def test_attention_is_flax_attention():
  x = jax.random.normal(jax.random.key(1), (2, 5, 12))
  layer = models_vit.MultiHeadDotProductAttention(num_heads=3)
  params = layer.init(jax.random.key(0), x, deterministic=True)
  flax_layer = nn.MultiHeadDotProductAttention(num_heads=3)
  np.testing.assert_allclose(
    layer.apply(params, x, deterministic=True),
    flax_layer.apply(params, x, x),
    atol=1e-5,
  )


def numpy_vit(params, x, heads):
  """The equations 1 to 4 of the paper, in float64, for square patches of 4."""

  def norm(p, x):
    x = x - x.mean(axis=-1, keepdims=True)
    return (
      x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * p['scale']
      + p['bias']
    )

  def dense(p, x, axes=1):
    return np.tensordot(x, p['kernel'], axes) + p['bias']

  def attention(p, x):
    q, k, v = (dense(p[name], x) for name in ('query', 'key', 'value'))
    result = np.zeros_like(q)
    for b in range(len(x)):
      for head in range(heads):
        scores = q[b, :, head] @ k[b, :, head].T / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        result[b, :, head] = weights @ v[b, :, head]
    return dense(p['out'], result, axes=2)

  def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

  kernel = params['embedding']['kernel']
  patches = [
    np.einsum('bijc,ijcd->bd', x[:, r : r + 4, c : c + 4], kernel)
    for r in range(0, x.shape[1], 4)
    for c in range(0, x.shape[2], 4)
  ]
  z = np.stack(patches, axis=1) + params['embedding']['bias']
  z = np.concatenate([np.repeat(params['cls'], len(x), axis=0), z], axis=1)
  encoder = params['Transformer']
  z = z + encoder['posembed_input']['pos_embedding']
  for i in range(2):
    block = encoder[f'encoderblock_{i}']
    z = z + attention(
      block['MultiHeadDotProductAttention_0'], norm(block['LayerNorm_0'], z)
    )
    mlp = block['MlpBlock_0']
    y = gelu(dense(mlp['Dense_0'], norm(block['LayerNorm_1'], z)))
    z = z + dense(mlp['Dense_1'], y)
  z = norm(encoder['encoder_norm'], z)[:, 0]
  z = np.tanh(dense(params['pre_logits'], z))
  return dense(params['head'], z)


def test_logits_are_those_of_the_equations_of_the_paper():
  model = tiny(representation_size=6)
  x = images((2, 8, 12, 3))
  params = randomised(model, x)
  exact = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
  want = numpy_vit(exact, np.asarray(x, np.float64), heads=2)
  got = model.apply({'params': params}, x, train=False)
  assert np.abs(want).max() > 0.1
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_hybrids_unit_standardises_its_kernels_and_ends_in_a_relu():
  unit = models.ResidualUnit(features=32, strides=(2, 2))
  x = jax.random.normal(jax.random.key(0), (1, 6, 6, 32))
  params = unit.init(jax.random.key(1), x)['params']
  # The block's last norm starts at 0: at first a unit is its projection alone.
  np.testing.assert_array_equal(params['gn3']['scale'], 0)
  params['gn3']['scale'] += 1.0
  got = unit.apply({'params': params}, x)
  assert got.shape == (1, 3, 3, 128)
  assert float(got.min()) == 0.0
  # Scale and mean of a kernel do not matter once it is standardised.
  for name in ('conv1', 'conv2', 'conv3', 'conv_proj'):
    params[name]['kernel'] = 3.0 * params[name]['kernel'] + 5.0
  again = unit.apply({'params': params}, x)
  np.testing.assert_allclose(again, got, atol=1e-3)


def test_standardised_convolution():
  conv = models.StdConv(features=3, kernel_size=(3, 3), strides=(2, 2))
  x = jax.random.normal(jax.random.key(0), (2, 9, 9, 4))
  params = conv.init(jax.random.key(1), x)['params']
  kernel = np.asarray(params['kernel'])
  kernel = (kernel - kernel.mean((0, 1, 2))) / (kernel.std((0, 1, 2)) + 1e-5)
  plain = nn.Conv(3, (3, 3), strides=(2, 2), padding='SAME', use_bias=False)
  np.testing.assert_allclose(
    conv.apply({'params': params}, x),
    plain.apply({'params': {'kernel': kernel}}, x),
    atol=1e-5,
  )


@pytest.mark.parametrize(
  'classifier, shape',
  [
    ('token', (2, 5)),
    ('gap', (2, 5)),
    ('unpooled', (2, 4, 5)),
    ('token_unpooled', (2, 5, 5)),
  ],
)
def test_classifiers(classifier, shape):
  model = tiny(classifier=classifier)
  x = images()
  params = randomised(model, x)
  logits = model.apply({'params': params}, x, train=False)
  assert logits.shape == shape
  assert ('cls' in params) == ('token' in classifier)


def test_gap_is_the_mean_of_what_unpooled_gives():
  x = images()
  params = randomised(tiny(classifier='gap'), x)
  unpooled = tiny(classifier='unpooled').apply(
    {'params': params}, x, train=False
  )
  pooled = tiny(classifier='gap').apply({'params': params}, x, train=False)
  np.testing.assert_allclose(unpooled.mean(axis=1), pooled, atol=1e-5)


def test_head_starts_at_its_bias_and_no_head_gives_the_pre_logits():
  x = images()
  model = tiny(head_bias_init=-10.0)
  logits, _ = model.init_with_output(jax.random.key(0), x, train=False)
  np.testing.assert_array_equal(logits, np.full((2, 5), -10.0))
  features, _ = tiny(num_classes=None).init_with_output(
    jax.random.key(0), x, train=False
  )
  assert features.shape == (2, 16)


def test_rectangular_images_and_patches():
  model = tiny(patches={'size': (2, 8)})
  x = images((2, 8, 24, 1))
  params = model.init(jax.random.key(0), x, train=False)['params']
  table = params['Transformer']['posembed_input']['pos_embedding']
  assert table.shape == (1, 1 + 4 * 3, 16)


def test_positions_matter_only_with_position_embeddings():
  x = images((1, 8, 8, 3))
  turned = x.reshape(1, 2, 4, 8, 3)[:, ::-1].reshape(x.shape)
  for add, same in ((True, False), (False, True)):
    transformer = {**tiny().transformer, 'add_position_embedding': add}
    model = tiny(transformer=transformer)
    params = randomised(model, x)
    difference = model.apply({'params': params}, x, train=False) - model.apply(
      {'params': params}, turned, train=False
    )
    assert (jnp.abs(difference).max() < 1e-5) == same


def test_dtype_reaches_every_layer_and_logits_stay_float32():
  x = images()
  model = tiny(dtype='bfloat16', representation_size=8)
  params = randomised(model, x)
  logits, seen = model.apply(
    {'params': params},
    x,
    train=False,
    capture_intermediates=True,
    mutable=['intermediates'],
  )
  assert logits.dtype == jnp.float32
  leaves, _ = jax.tree_util.tree_flatten_with_path(seen['intermediates'])
  types = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in leaves}
  for path, dtype in types.items():
    if dtype != jnp.bfloat16:
      assert (
        'attention_weights' in path
        or "['head']" in path
        or (path.startswith("['__call__']"))
      ), path
  assert any('attention_weights' in path for path in types)
  assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(params))
  half = tiny(param_dtype='bfloat16', representation_size=8)
  assert all(leaf.dtype == jnp.bfloat16 for leaf in shapes(half, 8).values())
  exact = tiny(representation_size=8).apply({'params': params}, x, train=False)
  np.testing.assert_allclose(logits, exact, atol=0.1)
  assert jnp.abs(logits - exact).max() > 0


@pytest.mark.parametrize('remat', ['full', 'dots'])
def test_remat_changes_neither_parameters_nor_gradients(remat):
  x = images()
  plain = tiny()
  spare = tiny(transformer={**plain.transformer, 'remat': remat})
  params = randomised(plain, x)

  def gradient(model):
    def loss(params):
      return (model.apply({'params': params}, x, train=False) ** 2).sum()

    return jax.jit(jax.grad(loss))(params)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4),
    gradient(spare),
    gradient(plain),
  )


def test_dropout_is_where_the_paper_has_it():
  x = images()
  model = tiny(transformer={**tiny().transformer, 'dropout_rate': 0.5})
  params = randomised(model, x)
  _, seen = model.apply(
    {'params': params},
    x,
    train=True,
    rngs={'dropout': jax.random.key(0)},
    capture_intermediates=lambda m, _: isinstance(m, nn.Dropout),
    mutable=['intermediates'],
  )
  encoder = seen['intermediates']['Transformer']
  zeros = lambda t: float((t['__call__'][0] == 0).mean())
  assert zeros(encoder['Dropout_0']) == pytest.approx(0.5, abs=0.15)
  block = encoder['encoderblock_1']
  assert zeros(block['Dropout_0']) == pytest.approx(0.5, abs=0.15)
  assert zeros(block['MlpBlock_0']['Dropout_0']) == pytest.approx(0.5, abs=0.15)
  assert zeros(block['MlpBlock_0']['Dropout_1']) == pytest.approx(0.5, abs=0.15)
  assert zeros(block['MultiHeadDotProductAttention_0']['Dropout_0']) == 0
  same = [model.apply({'params': params}, x, train=False) for _ in range(2)]
  np.testing.assert_array_equal(*same)


def test_attention_weights_and_tokens_are_sown():
  x = images()
  model = tiny()
  params = randomised(model, x)
  _, seen = model.apply(
    {'params': params}, x, train=False, mutable=['intermediates']
  )
  seen = seen['intermediates']
  [weights] = seen['Transformer']['encoderblock_0'][
    'MultiHeadDotProductAttention_0'
  ]['attention_weights']
  assert weights.shape == (2, 2, 5, 5)
  np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)
  assert seen['Transformer']['tokens'][0].shape == (2, 5, 16)
  assert seen['features'][0].shape == (2, 16)
  variables = model.init(jax.random.key(0), x, train=False)
  assert set(variables) == {'params'}


@pytest.mark.parametrize(
  'fields, shape, message',
  [
    ({'classifier': 'sum'}, (1, 8, 8, 3), "classifier='sum'.*token.*gap"),
    ({}, (1, 10, 8, 3), 'image height 10 is not a multiple.*use 8 or 12'),
    ({}, (1, 8, 2, 3), 'image width 2 is smaller than one patch of 4'),
    ({}, (8, 8, 3), r'must be \[batch, height, width, channels\]'),
    ({'hidden_size': 15}, (1, 8, 8, 3), 'num_heads=2 does not divide'),
    (
      {'transformer': {**tiny().transformer, 'remat': 'some'}},
      (1, 8, 8, 3),
      "remat='some' is unknown",
    ),
  ],
)
def test_wrong_input_is_named(fields, shape, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(
      lambda: tiny(**fields).init(
        jax.random.key(0), jnp.zeros(shape), train=False
      )
    )


def test_unknown_models_and_fields_are_named():
  with pytest.raises(
    ValueError, match="model 'b17' is unknown: use one of.*b16"
  ):
    models.get_model('b17', num_classes=3)
  with pytest.raises(ValueError, match=r"unknown fields \['hiden_size'\]"):
    models.get_model('b16', num_classes=3, hiden_size=3)
  config = model_configs.get_b16_config()
  config.transformer.num_layer = 3
  with pytest.raises(ValueError, match=r"unknown fields \['num_layer'\]"):
    models.make_model(config, num_classes=3)


@pytest.mark.parametrize('remat', ['', 'dots', 'full'])
def test_layers_in_a_loop_compute_the_same(remat):
  fields = dict(num_layers=3, mlp_dim=32, num_heads=2, dropout_rate=0.0,
                attention_dropout_rate=0.0)  # fmt: skip
  plain = tiny(transformer=fields)
  loop = tiny(transformer=dict(fields, scan=True, remat=remat))
  x = images()
  params = randomised(plain, x)
  assert jax.tree.structure(params) == jax.tree.structure(
    loop.init(jax.random.key(0), x, train=False)['params']
  )

  def loss(model):
    return lambda p: jnp.sum(model.apply({'params': p}, x, train=True) ** 2)

  want, want_grad = jax.value_and_grad(loss(plain))(params)
  got, got_grad = jax.jit(jax.value_and_grad(loss(loop)))(params)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
    got_grad,
    want_grad,
  )
  jaxpr = str(jax.make_jaxpr(loss(loop))(params))
  assert 'length=2' in jaxpr  # The last layer is outside of the loop.
  # Who looks inside sees every layer.
  _, seen = loop.apply(
    {'params': params}, x, train=False, mutable='intermediates'
  )
  assert 'encoderblock_2' in seen['intermediates']['Transformer']


def test_dropout_in_a_loop_differs_by_layer_and_key():
  fields = dict(num_layers=2, mlp_dim=32, num_heads=2, dropout_rate=0.5,
                scan=True)  # fmt: skip
  model = tiny(transformer=fields)
  x = images()
  params = randomised(model, x)

  def run(key):
    rngs = {'dropout': jax.random.key(key)}
    return model.apply({'params': params}, x, train=True, rngs=rngs)

  np.testing.assert_array_equal(run(0), run(0))
  assert np.abs(run(0) - run(1)).max() > 1e-3
  keys = jax.make_jaxpr(lambda: run(0))()
  assert 'random_split' in str(keys)
