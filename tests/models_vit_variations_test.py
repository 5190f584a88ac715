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

from vit_jax.layers import encoder

HEADS, WIDTH, HIDDEN = 2, 16, 32
_NORMS = {
  'layer': functools.partial(torch.nn.LayerNorm, eps=1e-6),
  'layer_no_bias': functools.partial(torch.nn.LayerNorm, eps=1e-6, bias=False),
  'rms': functools.partial(timm.layers.RmsNorm, eps=1e-6),
}
_PARALLEL = timm.models.vision_transformer.ParallelScalingBlock
# Name -> fields of the encoder. tests/weights/dino_test.py covers DINOv2.
CASES = {
  '22B': dict(norm='rms', qkv_bias=False, qk_norm=True, parallel=True),
  'parallel': dict(parallel=True),
  'no biases': dict(norm='layer_no_bias', qkv_bias=False, qk_norm=True),
}


def timm_model(norm='layer', qkv_bias=True, qk_norm=False, parallel=False):
  """Returns a timm model for images of 8 x 8, with random parameters."""
  gelu = functools.partial(torch.nn.GELU, 'tanh')
  more = {'block_fn': _PARALLEL} if parallel else {}
  args = dict(
    img_size=8, patch_size=4, num_classes=5, embed_dim=WIDTH, depth=1,
    num_heads=HEADS, mlp_ratio=HIDDEN / WIDTH, qkv_bias=qkv_bias, qk_norm=qk_norm,
    norm_layer=_NORMS[norm], act_layer=gelu,
  )  # fmt: skip
  model = timm.models.VisionTransformer(**{**args, **more})
  return torch_models.randomize(model)


def copied(state):
  """Returns a timm model's parameters in our tree, without absent ones."""
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
      'encoder_norm': norm('norm'),
    },
    'head': layer('head'),
  }


def ours(fields, **more):
  fields = {**tiny_models.tiny().transformer, **fields, **more}
  model_fields = {k: fields.pop(k) for k in ('registers', 'classifier') if k in fields}
  return tiny_models.tiny(transformer=fields, **model_fields)


@pytest.mark.parametrize('case', CASES)
def test_logits_match_timm(case):
  fields, x = CASES[case], np.asarray(tiny_models.images())
  theirs = timm_model(**fields)
  params, model = copied(theirs.state_dict()), ours(fields)
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x, train=False))
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes['params'])
  want = torch_models.logits(theirs, x)
  got = jax.jit(functools.partial(model.apply, train=False))({'params': params}, x)
  assert np.abs(want).max() > 0.1
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


_NEW = dict(
  mlp='swiglu', layer_scale=0.1, registers=3, position_embedding='axial_rope',
  mlp_norm=True, attention_norm=True,
)  # fmt: skip
VARIED = {**CASES['22B'], **_NEW}


def test_encoder_options_do_not_change_the_gradient():
  x = tiny_models.images()
  params = tiny_models.randomised(ours(VARIED, num_layers=2), x)

  def gradient(**options):
    model = ours(VARIED, num_layers=2, **options)
    loss = lambda p: (model.apply({'params': p}, x, train=True) ** 2).sum()
    return jax.jit(jax.value_and_grad(loss))(params)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
    gradient(scan=True, remat='dots', attention='xla'),
    gradient(),
  )


def test_layer_scale_starts_at_its_initial_value():
  _, params = encoder.LayerScale(0.25).init_with_output(jax.random.key(0), np.ones(3))
  np.testing.assert_array_equal(params['params']['gamma'], [0.25] * 3)


def test_registers_are_not_returned():
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
    ({'norm': 'batch'}, "norm='batch' must be one of.*layer_no_bias"),
    ({'position_embedding': 'rope', 'num_heads': 8}, "'rope'.*multiple of 4, not 2"),
  ],
)
def test_unsupported_options_are_rejected(fields, message):
  with pytest.raises(ValueError, match=message):
    tiny_models.shapes(ours(fields), 8)
