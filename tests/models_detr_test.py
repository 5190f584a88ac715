"""Tests of DETR and its masks against Hugging Face's model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from tests import torch_models

# isort: split
import timm

from vit_jax import models
from vit_jax.layers import resnet
from vit_jax.weights import convert


@timm.models.register_model
def resnet14(**kwargs):
  """The smallest ResNet with all stages, which timm does not have."""
  return timm.create_model('resnet26', layers=(1, 1, 1, 1), **kwargs)


@pytest.fixture(scope='module')
def narrow(tmp_path_factory):
  """Hugging Face's DETR with masks, narrow; the same model here, and its variables."""
  folder = tmp_path_factory.mktemp('detr')
  theirs = transformers.DetrForSegmentation(
    transformers.DetrConfig(
      backbone='resnet14',
      use_timm_backbone=True,
      use_pretrained_backbone=False,
      num_queries=5,
      num_labels=4,
      d_model=32,
      encoder_layers=2,
      decoder_layers=2,
      encoder_attention_heads=8,
      decoder_attention_heads=8,
      encoder_ffn_dim=16,
      decoder_ffn_dim=16,
    )
  )
  rng = torch.Generator().manual_seed(1)
  for name, value in torch_models.randomize(theirs).named_buffers():
    positive = name.endswith(('weight', 'running_var'))
    noise = torch.rand(value.shape, generator=rng)
    value.copy_(noise / 2 + 0.7 if positive else noise / 5 - 0.1)
  theirs.eval().save_pretrained(folder)
  found = convert.read(str(folder))
  ours = models.make_model(
    found.config,
    num_classes=found.num_classes,
    masks_at_a_time=3,  # Two chunks.
  )
  return theirs, ours, {'params': found.params, **found.extra}


def test_padded_batch_matches_hugging_face(narrow):
  theirs, ours, variables = narrow
  rng = np.random.RandomState(0)
  # Three of the four maps have an odd height or width: 25 x 17, 13 x 9, 7 x 5.
  images = rng.uniform(-1, 1, (2, 100, 66, 3)).astype(np.float32)
  mask = np.ones((2, 100, 66), bool)
  mask[1, 70:], mask[1, :, 40:] = False, False
  want = torch_models.detect(theirs, images, mask)

  def outputs(model, images, mask):
    out = model(images, mask, train=False, draw=False)
    features = out.pop('features')
    some = model.draw_masks(features, np.array([[4, 0], [2, 2]]))
    return out, model.segmentation(features), some

  compute = jax.jit(functools.partial(ours.apply, method=outputs))
  got, masks, some = compute(variables, images, mask)
  assert got['logits'].shape == (2, 2, 5, 5)
  assert masks.shape == (2, 5, 25, 17)
  assert np.std(want.pred_masks.numpy()) > 0.05
  np.testing.assert_allclose(got['logits'][-1], want.logits, atol=1e-4)
  np.testing.assert_allclose(got['boxes'][-1], want.pred_boxes, atol=1e-4)
  np.testing.assert_allclose(masks, want.pred_masks, atol=1e-4)
  np.testing.assert_allclose(some[0], masks[0, [4, 0]], atol=1e-5)
  np.testing.assert_allclose(some[1], masks[1, [2, 2]], atol=1e-5)
  # Rows that pad the batch have no real pixels.
  empty = jax.tree.leaves(compute(variables, images, np.zeros_like(mask)))
  assert all(np.isfinite(x).all() for x in empty)


def test_dilation_keeps_the_size_of_the_last_map():
  images = jnp.zeros((1, 64, 96, 3))
  maps = {}
  for dilated in (False, True):
    model = resnet.ResNet((1, 1, 1, 2), 8, dilated)
    (out, _) = jax.eval_shape(
      lambda rng, model=model: model.init_with_output(rng, images), jax.random.key(0)
    )
    maps[dilated] = [x.shape[1:] for x in out]
  assert maps[False] == [(16, 24, 32), (8, 12, 64), (4, 6, 128), (2, 3, 256)]
  assert maps[True] == [*maps[False][:3], (4, 6, 256)]
