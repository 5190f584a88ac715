"""Tests of names of arrays that differ from those in the files of a program's hub."""

import jax
import ml_collections
import numpy as np
import pytest
import torch
import torchvision

from tests import tiny_models, torch_models, trees
from vit_jax import models
from vit_jax.weights import convert, reading
from vit_jax.weights.families import torchvision as torchvision_names, vit

# Imported through torch_models, which sets up their environment.
timm = torch_models.timm
transformers = torch_models.transformers

_VIT = dict(
  hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
  image_size=8, patch_size=4,
)  # fmt: skip
_DINO = {key: x for key, x in _VIT.items() if key != 'intermediate_size'}
_DETR = dict(
  use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, d_model=32,
  encoder_layers=1, decoder_layers=1, encoder_attention_heads=8, num_queries=3,
  decoder_attention_heads=8, encoder_ffn_dim=32, decoder_ffn_dim=32,
)  # fmt: skip


def resnet(*stages):
  return transformers.ResNetConfig(
    layer_type='bottleneck', embedding_size=8, hidden_sizes=[32, 64, 128, 256],
    depths=[1, 1, 1, 1], out_features=[f'stage{i}' for i in stages],
  )  # fmt: skip


@pytest.mark.parametrize(
  'name, fields',
  [
    ('ViTForImageClassification', _VIT),
    ('DeiTForImageClassificationWithTeacher', _VIT),
    ('Dinov2ForImageClassification', _DINO),
    ('Dinov2WithRegistersModel', {**_DINO, 'use_swiglu_ffn': True}),
    ('DINOv3ViTModel', _VIT),
    ('ViTMAEForPreTraining', {**_VIT, 'decoder_num_hidden_layers': 1}),
    ('IJepaModel', _VIT),
    ('DetrForObjectDetection', {**_DETR, 'backbone_config': resnet(4)}),
    ('DetrForSegmentation', {**_DETR, 'backbone_config': resnet(1, 2, 3, 4)}),
  ],
)
def test_state_dicts_of_models_in_memory_are_read(tmp_path, name, fields):
  """transformers 5 renames them when it writes them."""
  cls = getattr(transformers, name)
  model = torch_models.randomize(cls(cls.config_class(**fields)))
  model.save_pretrained(tmp_path / 'files')
  model.config.save_pretrained(tmp_path / 'memory')
  torch.save(model.state_dict(), tmp_path / 'memory' / 'pytorch_model.bin')
  got, want = (reading.read(str(tmp_path / x)) for x in ('memory', 'files'))
  trees.assert_same(reading.leaves_of(got), reading.leaves_of(want))


def assert_same_logits(path, state, theirs, size, **options):
  """Compares the logits of a saved state dict with those of its model."""
  torch.save(state, path)
  model = convert.read(str(path), **options)
  ours = models.make_model(model.config, num_classes=model.num_classes)
  images = tiny_models.images((2, *size, 3))
  want = torch_models.logits(theirs, images)
  apply = jax.jit(lambda p: ours.apply({'params': p}, images, train=False))
  np.testing.assert_allclose(
    apply(model.params), want, atol=1e-5 * abs(want).max(), rtol=0
  )


def dinov2(**fields):
  """Returns timm's DINOv2, tiny and without a head, for images of 8 x 8."""
  options = dict(
    img_size=8, patch_size=4, embed_dim=24, depth=4, num_heads=3, num_classes=0,
    init_values=0.1,
  )  # fmt: skip
  return torch_models.randomize(timm.models.VisionTransformer(**{**options, **fields}))


def test_files_of_dinov2s_authors_are_read(tmp_path):
  """Layers in chunks, gates, and registers beside a class token with a position."""
  gated = dict(mlp_layer=timm.layers.SwiGLUPacked, act_layer=torch.nn.SiLU)
  theirs = dinov2(reg_tokens=4, no_embed_class=True, **gated)
  state = theirs.state_dict()
  position = torch.full((1, 1, 24), 0.3)
  renamed = {'mask_token': torch.zeros(1, 24)}
  for name, x in state.items():
    if name.startswith('blocks.'):
      _, number, rest = name.split('.', 2)
      name = f'blocks.{int(number) // 2}.{number}.{rest}'
    for old, new in (('mlp.fc1', 'mlp.w12'), ('mlp.fc2', 'mlp.w3')):
      name = name.replace(old, new)
    renamed[name.replace('reg_token', 'register_tokens')] = x
  renamed['pos_embed'] = torch.cat([position, state['pos_embed']], 1)
  with torch.no_grad():  # timm adds the position to the token itself.
    theirs.cls_token += position
  renamed['cls_token'] = renamed['cls_token'].clone() - position
  for prefix in '', 'teacher.backbone.':
    content = {f'{prefix}{name}': x for name, x in renamed.items()}
    assert_same_logits(
      tmp_path / 'a.pth', content, theirs, (8, 8), num_heads=3, gelu='erf'
    )


@pytest.mark.parametrize('representation_size', [None, 16])
def test_torchvision_is_read(tmp_path, representation_size):
  theirs = torchvision.models.VisionTransformer(
    image_size=8, patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32,
    num_classes=5, representation_size=representation_size,
  )  # fmt: skip
  torch_models.randomize(theirs)
  state = theirs.state_dict()
  old = {
    name.replace('mlp.0', 'mlp.linear_1').replace('mlp.3', 'mlp.linear_2'): x
    for name, x in state.items()
  }
  for content in state, {'model': state, 'model_ema': old}:
    assert_same_logits(tmp_path / 'a.pth', content, theirs, (8, 8), num_heads=2)


@pytest.mark.parametrize(
  'name, num_heads', [('vit_b_16', 12), ('vit_l_32', 16), ('vit_h_14', 16)]
)
def test_heads_follow_from_torchvisions_widths(tmp_path, name, num_heads):
  with torch.device('meta'):
    theirs = getattr(torchvision.models, name)()
  block = theirs.encoder.layers[0]
  assert block.num_heads == num_heads == torchvision_names.HEADS[theirs.hidden_dim]
  assert isinstance(block.mlp[1], torch.nn.GELU)
  assert block.mlp[1].approximate == 'none'
  assert block.ln_1.eps == 1e-6


@pytest.mark.parametrize(
  'to, fields, transformer, missing',
  [
    ('npz', {}, {'norm': 'rms'}, []),
    ('npz', {}, {'position_embedding': 'rope'}, ['position_embedding=rope']),
    ('timm', {}, {'norm': 'rms', 'parallel': True}, ['norm=rms', 'parallel=True']),
    ('timm', {'classifier': 'map'}, {'qk_norm': True}, ['qk_norm=True']),
    ('timm', {'classifier': 'token_with_gap'}, {}, ['classifier=token_with_gap']),
    ('timm', {'resnet': {'num_layers': (1,)}}, {'mlp': 'swiglu'}, ['mlp=swiglu']),
    ('timm', {'registers': 4}, {'position_embedding': 'rope'}, []),
    (
      'timm',
      {'registers': 4},
      {'position_embedding': 'relative_bias'},
      ['registers=4'],
    ),
    ('hf', {}, {'qkv_bias': False}, []),
    ('hf', {'registers': 4}, {'qkv_bias': False, 'layer_scale': 1e-5}, ['qkv_bias=F']),
    ('hf', {}, {'mlp': 'swiglu'}, ['layer_scale=None']),
    ('workdir', {'classifier': 'token_with_gap'}, {'parallel': True}, []),
  ],
)
def test_formats_lack_fields_of_some_models(to, fields, transformer, missing):
  config = {'classifier': 'token', **fields, 'transformer': transformer}
  got = vit.Classifiers().missing(ml_collections.ConfigDict(config), to)
  assert len(got) == len(missing)
  for field, want in zip(got, missing):
    assert field.removeprefix('transformer.').startswith(want)
