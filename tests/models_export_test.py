"""Tests of jax.export: every kind of model exports for any batch size."""

import jax
from jax import export
import numpy as np
import pytest

from tests import tiny_models
from vit_jax import models_detr, models_igpt

KEY = jax.random.key(0)
SIZE = (32, 32, 3)  # Of an image.


def vit(**transformer):
  fields = {**tiny_models.tiny().transformer, **transformer}
  return tiny_models.tiny(patches={'size': (8, 8)}, transformer=fields)


def igpt(**fields):
  return models_igpt.ImageGPT(
    16, 3, 2, num_colors=8, num_positions=16, num_classes=3, **fields
  )


def detr():
  return models_detr.Detr(
    3, units=(1, 1, 1), backbone_width=8, hidden_size=16, num_queries=3,
    num_encoder_layers=0, num_decoder_layers=1, num_heads=2, mlp_dim=16,
    mask_head=True, masks_at_a_time=2,
  )  # fmt: skip


# tests/inference/export_test.py covers Mixers, BiTs and others.
MODELS = {
  'vit_in_a_loop': lambda: vit(num_layers=2, scan=True, attention='xla'),
  'detr_panoptic': detr,
  'igpt_masked_in_a_loop': lambda: igpt(causal=False, scan=True),
}


def arguments(name, count):
  """Returns the inputs of a model for `count` images, by argument name."""
  rng = np.random.RandomState(count)
  if name.startswith('igpt'):
    colors = rng.randint(0, 8, (count, 16)).astype(np.int32)
    return dict(colors=colors, masked=rng.rand(count, 16) < 0.3)
  images = rng.uniform(-1, 1, (count, *SIZE)).astype(np.float32)
  if not name.startswith('detr'):
    return dict(inputs=images)
  mask = np.ones((count, *SIZE[:2]), bool)
  mask[:, 24:, :] = mask[:, :, 16:] = False
  return dict(images=images, mask=mask)


@pytest.mark.parametrize('name', MODELS)
def test_exports_with_a_symbolic_batch_size(name):
  model = MODELS[name]()
  one, three = (arguments(name, count) for count in (1, 3))
  draw = np.random.RandomState(0).uniform
  variables = jax.tree.map(  # Positive, for the variances.
    lambda x: draw(0.01, 0.3, x.shape).astype(x.dtype),
    jax.eval_shape(lambda key: model.init(key, **one, train=False), KEY),
  )
  apply = jax.jit(
    lambda variables, kwargs: model.apply(variables, **kwargs, train=False)
  )
  [batch] = export.symbolic_shape('batch')
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), one
  )
  exported = export.export(apply)(variables, shapes)
  loaded = export.deserialize(exported.serialize())
  got, want = loaded.call(variables, three), apply(variables, three)
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert x.shape == y.shape
    assert np.ptp(y) > 1e-3
    np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5)
