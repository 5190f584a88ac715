"""Tests of patch embeddings."""

import flax.linen as nn
import jax
import numpy as np

from tests import tiny_models
from vit_jax import models_vit


def test_patch_embedding_is_a_strided_convolution():
  x = tiny_models.images((2, 12, 8, 3))
  layer = models_vit.PatchEmbedding(features=7, patch_size=(3, 4))
  params = layer.init(jax.random.key(0), x)
  conv = nn.Conv(7, (3, 4), strides=(3, 4), padding='VALID')
  np.testing.assert_allclose(layer.apply(params, x), conv.apply(params, x), atol=1e-5)
