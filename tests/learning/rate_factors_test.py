"""Tests of factors on learning rates; timm is the oracle of layer-wise decay."""

import flax.traverse_util
import ml_collections
import numpy as np
import pytest
import timm
from timm.optim import param_groups_layer_decay
import torch

from vit_jax.configs import common, models as model_configs
from vit_jax.learning import rate_factors
from vit_jax.weights import convert

FACTOR = 0.75


def factors(model, params, **fields):
  config = common.get_config()
  config.update(fields)
  config.layer_decay = FACTOR
  with config.unlocked():
    config.model = ml_collections.ConfigDict(model)
  tree = rate_factors.make(config, lambda: params)
  return flax.traverse_util.flatten_dict(tree, sep='/')


@pytest.mark.parametrize(
  'name',
  [
    'vit_tiny_patch16_224',
    'deit_tiny_distilled_patch16_224',
    'vit_base_patch16_siglip_224',  # Attention pooling.
    'vit_base_patch16_clip_224',  # A norm before the blocks.
    'eva02_tiny_patch14_224',  # A norm of pooled tokens, a gated MLP.
  ],
)
def test_factors_are_those_of_timm(tmp_path, name):
  """Weights that hold timm's factors, read by our loader, hold ours."""
  args = dict(depth=3, embed_dim=32, num_heads=2, img_size=28, num_classes=3)
  if 'eva02' not in name:
    args['patch_size'] = 14
  model = timm.create_model(name, **args)
  with torch.no_grad():
    for group in param_groups_layer_decay(model, layer_decay=FACTOR):
      for param in group['params']:
        param.fill_(group['lr_scale'])
  timm.models.save_for_hf(model, tmp_path, model_args=args)
  weights = convert.read(str(tmp_path))
  stored = flax.traverse_util.flatten_dict(weights.params, sep='/')
  for path, factor in factors(weights.config, weights.params).items():
    if not path.endswith(
      ('key/bias', 'embedding/bias')
    ):  # Not in all of timm's models.
      np.testing.assert_array_equal(stored[path], np.float32(factor), path)


def test_other_parts_of_a_model_have_the_full_rate():
  config = ml_collections.ConfigDict({'vit': {'transformer': {'num_layers': 2}}})
  params = {
    'backbone': {
      'embedding': {'kernel': 0},
      'Transformer': {'encoderblock_1': {'LayerNorm_0': {'scale': 0}}},
    },
    'decoder': {'encoderblock_0': {'kernel': 0}},
  }
  assert factors(config, params) == {
    'backbone/embedding/kernel': FACTOR**3,
    'backbone/Transformer/encoderblock_1/LayerNorm_0/scale': FACTOR,
    'decoder/encoderblock_0/kernel': 1.0,
  }


def test_a_model_without_blocks_is_refused():
  with pytest.raises(ValueError, match=r'layer_decay=0.75 needs a Vision Transformer'):
    factors(model_configs.get_config('bit_r50x1'), {'head': {'bias': 0}})


def test_lr_multipliers_and_layer_decay_multiply():
  config = ml_collections.ConfigDict({'transformer': {'num_layers': 1}})
  params = {'head': {'bias': 0}, 'embedding': {'kernel': 0, 'bias': 0}}
  rules = (('^head/', 10.0), ('bias$', 0.0))
  assert factors(config, params, lr_multipliers=rules) == {
    'head/bias': 10.0,
    'embedding/kernel': FACTOR**2,
    'embedding/bias': 0.0,
  }


def test_without_rules_there_are_no_factors():
  assert rate_factors.make(common.get_config(), pytest.fail) is None
