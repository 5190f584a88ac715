"""Tests of jax.export: every kind of model takes a batch of any size."""

import jax
from jax import export
import numpy as np
import pytest

from tests import tiny_models
from vit_jax import models, models_detr, models_igpt

KEY = jax.random.key(0)
SIZE = (32, 32, 3)  # Of an image.
VIT = dict(
  patches={'size': (8, 8)}, hidden_size=16,
  transformer=dict(num_layers=1, mlp_dim=16, num_heads=2),
)  # fmt: skip


def vit(**transformer):
  fields = {**tiny_models.tiny().transformer, **transformer}
  return tiny_models.tiny(patches={'size': (8, 8)}, transformer=fields)


def detr(**fields):
  return models_detr.Detr(
    3, units=(1, 1, 1), backbone_width=8, hidden_size=16, num_queries=3,
    num_encoder_layers=0, num_decoder_layers=1, num_heads=2, mlp_dim=16,
    **fields,
  )  # fmt: skip


def igpt(**fields):
  return models_igpt.ImageGPT(
    16, 3, 2, num_colors=8, num_positions=16, num_classes=3, **fields
  )


MODELS = {
  'vit_in_a_loop': lambda: vit(num_layers=2, scan=True, attention='xla'),
  'vit_any_grid': lambda: vit(position_grid=(3, 3), num_layers=1),
  'hybrid': lambda: tiny_models.tiny(
    resnet={'num_layers': (1,), 'width_factor': 0.5},
    patches={'size': (1, 1)},
  ),
  'detr_vit': lambda: detr(backbone='vit', vit=VIT),
  'detr_panoptic': lambda: detr(mask_head=True, masks_at_a_time=2),
  'igpt_masked_in_a_loop': lambda: igpt(causal=False, scan=True),
}  # fmt: skip


def arguments(name, count):
  """Inputs of a model for so many images, by argument name."""
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


def test_every_kind_of_model_is_exported():
  kinds = {name.split('_')[0] for name in MODELS}
  # tests/inference/export_test.py and tests/tasks/image_text/image_text_test.py.
  elsewhere = {'mixer', 'bit', 'lit'}
  assert kinds | elsewhere >= set(models.KINDS) | {'hybrid'}


@pytest.mark.parametrize('name', MODELS)
def test_a_model_is_exported_with_a_free_batch(name):
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
