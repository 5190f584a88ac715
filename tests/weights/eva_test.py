"""Tests of the weights of timm's Eva (DINOv3, EVA-02, RoPE-ViT) and Beit."""

import functools
import re

import jax
import numpy as np
import pytest
import torch

from tests import torch_models, trees
from vit_jax import models
from vit_jax.weights import convert, writing
from vit_jax.weights.families import vit_files

timm = torch_models.timm
SIZES = dict(
  depth=2, embed_dim=16, num_heads=2, img_size=(8, 12), patch_size=4, num_classes=3
)


def timm_model(name, folder, **fields):
  args = {**SIZES, **fields}
  theirs = torch_models.randomize(timm.create_model(name, **args))
  args.pop('num_classes')
  for attention in (block.attn for block in theirs.blocks):
    if 'relative_position_index' in dict(attention.named_buffers()):
      index = attention.relative_position_index  # Older files have it.
      attention.register_buffer('relative_position_index', index)
  timm.models.save_for_hf(theirs, folder, model_args=args)
  return theirs.eval()


def assert_close(got, want):
  assert want.std() > 0.1
  np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def outputs(model, images):
  with torch.no_grad():
    return model.forward_features(images).numpy(), model(images).numpy()


@pytest.mark.parametrize(
  'name',
  [
    # Registers, gated MLP, query and value biases.
    'vit_small_plus_patch16_dinov3_qkvb',
    # Rotation of neighbouring channels, norms in MLP and attention, learned positions.
    'eva02_base_patch16_clip_224',
    # Columns before rows.
    'vit_small_patch16_rope_224',
    # Norm after pooling, biases on the attention logits.
    'beitv2_base_patch16_224',
  ],
)
def test_tokens_and_logits_match_timm_and_round_trip(tmp_path, name):
  theirs = timm_model(name, tmp_path / 'a')
  found = convert.read(str(tmp_path / 'a'))
  images = np.random.RandomState(0).uniform(-1, 1, (2, 8, 12, 3)).astype(np.float32)
  module = models.make_model(found.config, num_classes=3)
  apply = functools.partial(module.apply, train=False, mutable='intermediates')
  logits, seen = jax.jit(apply)({'params': found.params}, images)
  tokens = seen['intermediates']['Transformer']['tokens'][0]
  pixels = torch.tensor(images).permute(0, 3, 1, 2)
  want = outputs(theirs, pixels)
  for ours, other in zip((tokens, logits), want):
    assert_close(ours, other)

  convert.convert(str(tmp_path / 'a'), str(tmp_path / 'b'), 'timm')
  there = timm.create_model(f'local-dir:{tmp_path}/b', pretrained=True).eval()
  for again, other in zip(outputs(there, pixels), want):
    assert_close(again, other)
  again = convert.read(str(tmp_path / 'b'))
  trees.assert_same(again.params, found.params)
  assert again.config == found.config
  if found.config.transformer.position_embedding != 'rope':
    with pytest.raises(ValueError, match='written as hf, .*: pass --to=timm.workdir'):
      convert.convert(str(tmp_path / 'a'), str(tmp_path / 'c'), 'hf')


def test_rotary_embeddings_follow_from_the_architecture():
  """Without arguments in config.json, as for timm's own weights."""
  count = 0
  for name in timm.list_models(module='eva'):
    if re.search('sapiens2|_pe_|mixed|enormous', name):
      continue  # See tests/weights/reading_test.py.
    with torch.device('meta'):
      theirs = timm.create_model(name, depth=1)
    state = {'pos_embed': None} if theirs.pos_embed is not None else {}
    found = vit_files.from_timm({'architecture': name}, state)
    assert found.num_heads == theirs.blocks[0].attn.num_heads
    got, rope = found.model['transformer'], theirs.rope
    assert got['norm_eps'] == theirs.blocks[0].norm1.eps
    assert got['gelu'] == 'erf'
    kinds = {
      'NoneType': None,
      'RotaryEmbeddingDinoV3': 'rope',
      'RotaryEmbeddingCat': 'learned_axial_rope' if state else 'axial_rope',
    }
    assert got.get('position_embedding') == kinds[type(rope).__name__]
    assert got.get('rope_temperature') == getattr(rope, 'temperature', None)
    shape = getattr(rope, 'ref_feat_shape', None)
    assert got.get('rope_grid') == (shape and tuple(shape))
    count += 1
  assert count > 35


def test_rejects_weights_without_an_architecture(tmp_path):
  timm_model('eva02_tiny_patch14_224', tmp_path)
  (tmp_path / 'config.json').unlink()
  with pytest.raises(ValueError, match=r'rotary embeddings depend on.*config.json'):
    convert.read(str(tmp_path), num_heads=2, gelu='erf')


def test_rejects_models_that_timm_cannot_compute(tmp_path):
  timm_model('beit_base_patch16_224', tmp_path)
  found = convert.read(str(tmp_path))
  found.config.transformer.gelu = 'tanh'
  with pytest.raises(ValueError, match="gelu='tanh'.*timm's Beit.*--to=workdir"):
    writing.WRITERS['timm'](found, tmp_path / 'b')
