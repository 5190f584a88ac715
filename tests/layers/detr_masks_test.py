"""Tests of DETR's mask head against Hugging Face's."""

import jax
import numpy as np
import pytest
import transformers

from tests import torch_models
from vit_jax import models as models_lib
from vit_jax.layers import detr_masks
from vit_jax.weights import convert


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  """A narrow DETR of Hugging Face with masks; the same model, and variables."""
  folder = tmp_path_factory.mktemp('detr')
  theirs = transformers.DetrForSegmentation(
    transformers.DetrConfig(
      backbone='resnet26',  # Half of the layers of a ResNet-50.
      use_timm_backbone=True,
      use_pretrained_backbone=False,
      num_queries=5,
      num_labels=4,
      d_model=32,
      encoder_layers=1,
      decoder_layers=1,
      encoder_attention_heads=8,
      decoder_attention_heads=8,
      encoder_ffn_dim=16,
      decoder_ffn_dim=16,
    )
  )
  torch_models.randomize(theirs).eval().save_pretrained(folder)
  found = convert.read(str(folder))
  ours = models_lib.make_model(
    found.config,
    num_classes=found.num_classes,
    masks_at_a_time=3,  # Two parts.
  )
  return theirs, ours, {'params': found.params, **found.extra}


def test_masks_are_those_of_hugging_face_for_a_padded_batch(models):
  theirs, ours, variables = models
  rng = np.random.RandomState(0)
  # Three of the four maps have an odd height or width: 25 x 17, 13 x 9, 7 x 5.
  images = rng.uniform(-1, 1, (2, 100, 66, 3)).astype(np.float32)
  mask = np.ones((2, 100, 66), bool)
  mask[1, 70:], mask[1, :, 40:] = False, False
  want = torch_models.detect(theirs, images, mask)

  def compute(images, mask):
    outputs = ours.apply(variables, images, mask, train=False)
    features = ours.apply(variables, images, mask, train=False, draw=False)
    some = ours.apply(
      variables,
      features['features'],
      np.array([[4, 0], [2, 2]]),
      method='draw_masks',
    )
    return outputs, some

  got, some = jax.jit(compute)(images, mask)
  assert got['masks'].shape == (2, 5, 25, 17)
  assert np.std(want.pred_masks.numpy()) > 0.05
  np.testing.assert_allclose(got['masks'], want.pred_masks, atol=1e-4)
  np.testing.assert_allclose(got['logits'][-1], want.logits, atol=1e-4)
  np.testing.assert_allclose(some[0], got['masks'][0, [4, 0]], atol=1e-5)
  np.testing.assert_allclose(some[1], got['masks'][1, [2, 2]], atol=1e-5)


def test_attention_sums_to_one_over_heads_and_real_cells():
  rng = np.random.RandomState(0)
  query = rng.randn(1, 2, 3, 4).astype(np.float32)
  key = rng.randn(1, 2, 2, 3, 4).astype(np.float32)
  mask = np.array([[[True, True], [True, False]]])
  got = detr_masks.attention_maps(query, key, mask)
  logits = np.einsum('qke,hwke->qhwk', query[0], key[0])
  odds = np.exp(logits) * mask[0][..., None]
  want = odds / odds.sum(axis=(1, 2, 3), keepdims=True)
  np.testing.assert_allclose(got[0], want, atol=1e-6)
