"""Tests of the variations of ViT-22B against timm, with copied weights."""

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

HEADS, WIDTH, HIDDEN = 2, 16, 32
# Name -> fields of the encoder, and timm's arguments.
_NORMS = {
  'layer': functools.partial(torch.nn.LayerNorm, eps=1e-6),
  'layer_no_bias': functools.partial(torch.nn.LayerNorm, eps=1e-6, bias=False),
  'rms': functools.partial(timm.layers.RmsNorm, eps=1e-6),
}
_PARALLEL = timm.models.vision_transformer.ParallelScalingBlock
CASES = {
  '22B': dict(norm='rms', qkv_bias=False, qk_norm=True, parallel=True),
  'parallel': dict(parallel=True),
  'qk_norm': dict(qk_norm=True),
  'no biases': dict(norm='layer_no_bias', qkv_bias=False, qk_norm=True),
}


def of_timm(norm='layer', qkv_bias=True, qk_norm=False, parallel=False):
  """A model of timm, for images of 8 x 8, with random parameters."""
  model = timm.models.VisionTransformer(
    img_size=8, patch_size=4, num_classes=5, embed_dim=WIDTH, depth=2,
    num_heads=HEADS, mlp_ratio=HIDDEN / WIDTH, qkv_bias=qkv_bias, qk_norm=qk_norm,
    norm_layer=_NORMS[norm], act_layer=functools.partial(torch.nn.GELU, 'tanh'),
    **({'block_fn': _PARALLEL} if parallel else {}),
  )  # fmt: skip
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
      names = ('norm1', 'attn.proj', 'mlp.fc2', 'attn.')
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
      'MlpBlock_0': {'Dense_0': dense, 'Dense_1': layer(start + last)},
    }
    if f'{start}norm2.weight' in state:
      found['LayerNorm_1'] = norm(f'{start}norm2')
    return found

  kernel = state['patch_embed.proj.weight'].transpose(2, 3, 1, 0)
  return {
    'cls': state['cls_token'],
    'embedding': {'kernel': kernel, 'bias': state['patch_embed.proj.bias']},
    'Transformer': {
      'posembed_input': {'pos_embedding': state['pos_embed']},
      'encoderblock_0': block('blocks.0.'),
      'encoderblock_1': block('blocks.1.'),
      'encoder_norm': norm('norm'),
    },
    'head': layer('head'),
  }


def ours(fields, **more):
  transformer = {**tiny_models.tiny().transformer, **fields, **more}
  return tiny_models.tiny(transformer=transformer)


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


@pytest.fixture(scope='module')
def of_22b():
  """Parameters, images, and the gradient of a loss without any option."""
  x = tiny_models.images()
  params = tiny_models.randomised(ours(CASES['22B']), x)
  return params, x, gradient(ours(CASES['22B']), params, x)


def gradient(model, params, x):
  def loss(params):
    return (model.apply({'params': params}, x, train=True) ** 2).sum()

  return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize(
  'options',
  [
    {'scan': True},
    {'remat': 'full', 'attention': 'xla'},
    {'scan': True, 'remat': 'dots'},
  ],
  ids=str,
)
def test_options_of_the_encoder_do_not_change_the_gradient(options, of_22b):
  params, x, want = of_22b
  got = gradient(ours(CASES['22B'], num_layers=2, **options), params, x)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), got, want
  )


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
