"""Tests of the variations of ViT-22B and DINOv2 against timm, with copied weights."""

import functools

import jax
import numpy as np
import pytest

from tests import tiny_models

# isort: split
from tests import torch_models

# isort: split
import timm
import torch

from vit_jax.layers import encoder

HEADS, WIDTH, HIDDEN = 2, 16, 32
_NORMS = {
  'layer': functools.partial(torch.nn.LayerNorm, eps=1e-6),
  'layer_no_bias': functools.partial(torch.nn.LayerNorm, eps=1e-6, bias=False),
  'rms': functools.partial(timm.layers.RmsNorm, eps=1e-6),
}
_PARALLEL = timm.models.vision_transformer.ParallelScalingBlock
# Name -> fields of the encoder, or `registers` and `classifier` of the model.
CASES = {
  '22B': dict(norm='rms', qkv_bias=False, qk_norm=True, parallel=True),
  'parallel': dict(parallel=True),
  'qk_norm': dict(qk_norm=True),
  'no biases': dict(norm='layer_no_bias', qkv_bias=False, qk_norm=True),
  'DINOv2': dict(mlp='swiglu', layer_scale=0.1, registers=3),
  'no class token': dict(layer_scale=0.1, registers=3, classifier='gap'),
}


def of_timm(
  norm='layer', qkv_bias=True, qk_norm=False, parallel=False, mlp='gelu',
  layer_scale=None, registers=0, classifier='token',
):  # fmt: skip
  """A model of timm, for images of 8 x 8, with random parameters."""
  gelu = functools.partial(torch.nn.GELU, 'tanh')
  more = {'block_fn': _PARALLEL} if parallel else {}
  if mlp == 'swiglu':  # Half of its hidden layer is the gate.
    more.update(mlp_layer=timm.layers.SwiGLUPacked, mlp_ratio=2 * HIDDEN / WIDTH)
    gelu = torch.nn.SiLU
  if classifier == 'gap':
    more.update(class_token=False, global_pool='avg', fc_norm=False)
  args = dict(
    img_size=8, patch_size=4, num_classes=5, embed_dim=WIDTH, depth=1,
    num_heads=HEADS, mlp_ratio=HIDDEN / WIDTH, qkv_bias=qkv_bias, qk_norm=qk_norm,
    norm_layer=_NORMS[norm], act_layer=gelu, init_values=layer_scale,
    reg_tokens=registers, no_embed_class=registers > 0,
  )  # fmt: skip
  model = timm.models.VisionTransformer(**{**args, **more})
  return torch_models.randomize(model)


def copied(state):
  """The parameters of a model of timm in our tree, as far as they are there."""
  state = {name: value.detach().numpy() for name, value in state.items()}

  def layer(name, shape=None, scale='kernel'):
    found = {}
    if f'{name}.weight' in state:
      weight = state[f'{name}.weight'].T
      found[scale] = weight if shape is None else weight.reshape(shape)
    if f'{name}.bias' in state:
      found['bias'] = state[f'{name}.bias']
    return found

  norm = functools.partial(layer, scale='scale')

  def block(start):
    gate = None
    if f'{start}in_proj.weight' in state:
      cuts = np.cumsum([HIDDEN, WIDTH, WIDTH])
      first, *qkv = np.split(state[f'{start}in_proj.weight'], cuts)
      biases = state.get(f'{start}in_proj.bias')
      if biases is not None:
        bias, *biases = np.split(biases, cuts)
      else:
        bias = state[f'{start}mlp_bias']
      dense = {'kernel': first.T, 'bias': bias}
      names = ('in_norm', 'attn_out_proj', 'mlp_out_proj', '')
    else:
      qkv = np.split(state[f'{start}attn.qkv.weight'], 3)
      biases = state.get(f'{start}attn.qkv.bias')
      biases = None if biases is None else np.split(biases, 3)
      dense = layer(f'{start}mlp.fc1')
      if len(dense['bias']) == 2 * HIDDEN:
        halves = {k: np.split(x, 2, axis=-1) for k, x in dense.items()}
        gate, dense = ({k: x[i] for k, x in halves.items()} for i in (0, 1))
      names = ('norm1', 'attn.proj', 'mlp.fc2', 'attn.')
    mlp = {'Dense_0': dense, **({} if gate is None else {'gate': gate})}
    first_norm, out, last, inner = names
    attention = {'out': layer(start + out, (HEADS, -1, WIDTH))}
    for i, name in enumerate(('query', 'key', 'value')):
      attention[name] = {'kernel': qkv[i].T.reshape(WIDTH, HEADS, -1)}
      if biases is not None:
        attention[name]['bias'] = biases[i].reshape(HEADS, -1)
    for ours, theirs in ('query_ln', 'q_norm'), ('key_ln', 'k_norm'):
      if f'{start}{inner}{theirs}.weight' in state:
        attention[ours] = norm(f'{start}{inner}{theirs}')
    found = {
      'LayerNorm_0': norm(start + first_norm),
      'MultiHeadDotProductAttention_0': attention,
      'MlpBlock_0': {**mlp, 'Dense_1': layer(start + last)},
    }
    for i in (0, 1):
      if f'{start}ls{i + 1}.gamma' in state:
        found[f'LayerScale_{i}'] = {'gamma': state[f'{start}ls{i + 1}.gamma']}
    if f'{start}norm2.weight' in state:
      found['LayerNorm_1'] = norm(f'{start}norm2')
    return found

  kernel = state['patch_embed.proj.weight'].transpose(2, 3, 1, 0)
  table, first = state['pos_embed'], {}
  if 'reg_token' in state:
    first['register_tokens'] = state['reg_token']
  if 'cls_token' in state:
    first['cls'] = state['cls_token']
    if 'reg_token' in state:  # The class token has no position there.
      table = np.concatenate([0 * first['cls'], table], axis=1)
  return {
    **first,
    'embedding': {'kernel': kernel, 'bias': state['patch_embed.proj.bias']},
    'Transformer': {
      'posembed_input': {'pos_embedding': table},
      'encoderblock_0': block('blocks.0.'),
      'encoder_norm': norm('norm'),
    },
    'head': layer('head'),
  }


def ours(fields, **more):
  fields = {**tiny_models.tiny().transformer, **fields, **more}
  own = {k: fields.pop(k) for k in ('registers', 'classifier') if k in fields}
  return tiny_models.tiny(transformer=fields, **own)


@pytest.mark.parametrize('case', CASES)
def test_logits_are_those_of_timm(case):
  fields, x = CASES[case], np.asarray(tiny_models.images())
  theirs = of_timm(**fields)
  params, model = copied(theirs.state_dict()), ours(fields)
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x, train=False))
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes['params'])
  want = torch_models.logits(theirs, x)
  got = jax.jit(functools.partial(model.apply, train=False))({'params': params}, x)
  assert np.abs(want).max() > 0.1
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


_NEW = dict(position_embedding='axial_rope', mlp_norm=True, attention_norm=True)
VARIED = {**CASES['22B'], **CASES['DINOv2'], **_NEW}


@pytest.fixture(scope='module')
def varied():
  """Parameters, images, and the gradient of a loss without any option."""
  x = tiny_models.images()
  model = ours(VARIED, num_layers=2)
  params = tiny_models.randomised(model, x)
  return params, x, gradient(model, params, x)


def gradient(model, params, x):
  def loss(params):
    return (model.apply({'params': params}, x, train=True) ** 2).sum()

  return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize(
  'options', [{'remat': 'full', 'attention': 'xla'}, {'scan': True, 'remat': 'dots'}]
)
def test_options_of_the_encoder_do_not_change_the_gradient(options, varied):
  params, x, want = varied
  got = gradient(ours(VARIED, num_layers=2, **options), params, x)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), got, want
  )


def test_layer_scale_multiplies_the_last_layer_of_each_branch():
  """A model whose last layers of a branch contain the factors has the same loss."""
  x = tiny_models.images()
  fields = dict(num_layers=2, parallel=True, stochastic_depth=0.3)
  params = tiny_models.randomised(ours(fields, layer_scale=0.1), x)

  def loss(params, folded):
    if folded:
      layers = {**params['Transformer']}
      for i in (0, 1):
        block = dict(layers[f'encoderblock_{i}'])
        for j, (branch, last) in enumerate(
          [('MultiHeadDotProductAttention_0', 'out'), ('MlpBlock_0', 'Dense_1')]
        ):
          gamma = block.pop(f'LayerScale_{j}')['gamma']
          scaled = jax.tree.map(lambda leaf, g=gamma: leaf * g, block[branch][last])
          block[branch] = {**block[branch], last: scaled}
        layers[f'encoderblock_{i}'] = block
      params = {**params, 'Transformer': layers}
    model = ours(fields, layer_scale=None if folded else 0.1)
    rngs = {'dropout': jax.random.key(0)}
    return (model.apply({'params': params}, x, train=True, rngs=rngs) ** 2).sum()

  compute = jax.jit(loss, static_argnums=1)
  np.testing.assert_allclose(compute(params, False), compute(params, True), rtol=1e-4)


def test_factors_of_branches_begin_with_the_given_value():
  _, params = encoder.LayerScale(0.25).init_with_output(jax.random.key(0), np.ones(3))
  np.testing.assert_array_equal(params['params']['gamma'], [0.25] * 3)


def test_registers_are_no_tokens_of_the_result():
  model, x = (
    ours({'registers': 3}).clone(classifier='token_unpooled'),
    np.ones((1, 8, 8, 3)),
  )
  params = tiny_models.randomised(model, x)
  shape = lambda **more: (
    jax.eval_shape(functools.partial(model.apply, {'params': params}, **more), x).shape
  )
  assert shape(train=False) == (1, 5, 5)
  tokens = lambda x: model.bind({'params': params}).add_positions(
    model.bind({'params': params}).embed(x), train=False
  )
  got = jax.jit(tokens)(x)
  assert got.shape == (1, 8, WIDTH)  # Class token, registers, four patches.
  np.testing.assert_allclose(got[:, 1:4], params['register_tokens'])


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'causal': True, 'classifier': 'gap', 'registers': 2}, 'registers=2.*causal=True'),
    ({'position_layers': 'every', 'registers': 2}, "'every'.*registers"),
    ({'mlp': 'geglu'}, "mlp='geglu' is unknown.*swiglu"),
    (
      {'position_embedding': 'rope', 'position_layers': 'shared'},
      "'rope' has no table .* position_layers='shared'",
    ),
    ({'position_embedding': 'rope', 'num_heads': 8}, "'rope'.*multiple of 4, not 2"),
  ],
)
def test_what_does_not_work_is_rejected(fields, message):
  with pytest.raises(ValueError, match=message):
    tiny_models.shapes(ours(fields), 8)


def test_attention_pooling_has_the_variations_too():
  """In all norms the bias is missing, and queries and keys have norms."""
  shapes = tiny_models.shapes(ours(CASES['22B']).clone(classifier='map'), 8)
  pooling = {name for name in shapes if name.startswith('MAPHead_0/')}
  attention = 'MAPHead_0/MultiHeadDotProductAttention_0'
  assert pooling == {
    'MAPHead_0/probe',
    'MAPHead_0/LayerNorm_0/scale',
    *(
      f'MAPHead_0/MlpBlock_0/Dense_{i}/{x}' for i in (0, 1) for x in ('kernel', 'bias')
    ),
    *(f'{attention}/{x}/kernel' for x in ('query', 'key', 'value', 'out')),
    f'{attention}/out/bias',
    *(f'{attention}/{x}_ln/scale' for x in ('query', 'key')),
  }


def test_an_unknown_norm_is_rejected():
  with pytest.raises(ValueError, match="norm='batch' is unknown.*layer_no_bias"):
    tiny_models.shapes(ours({'norm': 'batch'}), 8)
