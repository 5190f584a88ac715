"""Tests of the ResNet in front of a hybrid."""

import flax.linen as nn
import jax
import numpy as np

from tests import tiny_models
from vit_jax import models


def test_hybrid_parameter_names_match_published_ones():
  layers = dict(num_layers=1, mlp_dim=8, num_heads=12)
  model = models.get_model('R50+ViT-B_16', num_classes=10, transformer=layers)
  names = tiny_models.shapes(model)
  assert names['conv_root/kernel'].shape == (7, 7, 3, 64)
  assert names['gn_root/scale'].shape == (64,)
  assert names['block1/unit1/conv_proj/kernel'].shape == (1, 1, 64, 256)
  assert names['block2/unit1/gn_proj/bias'].shape == (512,)
  assert names['block3/unit9/conv2/kernel'].shape == (3, 3, 256, 256)
  assert names['embedding/kernel'].shape == (1, 1, 1024, 768)
  # Features are 16 times smaller down and across, as with patches of 16.
  assert names['Transformer/posembed_input/pos_embedding'].shape == (1, 197, 768)


def test_residual_branch_starts_at_zero():
  unit = models.ResidualUnit(features=32, strides=(2, 2))
  params = jax.jit(unit.init)(jax.random.key(1), np.ones((1, 6, 6, 32)))['params']
  np.testing.assert_array_equal(params['gn3']['scale'], 0)


def test_standardised_convolution():
  """With all fields of nn.Conv, which decoders rely on."""
  fields = dict(
    features=6, kernel_size=(3, 3), strides=(2, 2), use_bias=True,
    padding=[(1, 1), (1, 1)], feature_group_count=2,
  )  # fmt: skip
  conv, plain = models.StdConv(**fields), nn.Conv(**fields)
  x = jax.random.normal(jax.random.key(0), (2, 9, 9, 4))
  params = tiny_models.drawn(jax.eval_shape(conv.init, jax.random.key(1), x)['params'])
  kernel = np.asarray(params['kernel'])
  kernel = (kernel - kernel.mean((0, 1, 2))) / (kernel.std((0, 1, 2)) + 1e-5)
  np.testing.assert_allclose(
    conv.apply({'params': params}, x),
    plain.apply({'params': {**params, 'kernel': kernel}}, x),
    atol=1e-5,
  )
