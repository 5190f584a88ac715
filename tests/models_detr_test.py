"""Tests of DETR against published counts and Hugging Face's model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from tests import torch_models
from vit_jax import models, models_detr
from vit_jax.layers import detection, resnet
from vit_jax.weights import convert


@pytest.mark.parametrize(
  'name, total, trainable',
  [('r50', 41_524_768, 41_302_368), ('r101', 60_464_672, 60_242_272)],
)
def test_parameters_are_those_of_the_published_models(name, total, trainable):
  model = models_detr.Detr(91, units=resnet.UNITS[name])
  images = jnp.zeros((1, 64, 64, 3))
  shapes = jax.eval_shape(
    lambda rng: model.init(rng, images, train=False), jax.random.key(0)
  )

  def count(tree):
    return sum(x.size for x in jax.tree.leaves(tree))

  backbone = shapes['params']['backbone']
  kept = count((backbone['conv_root'], backbone['block1']))
  assert count(shapes['params']) == total
  assert total - kept == trainable


def hf_detr():
  """A narrow DETR-R50 of Hugging Face with random weights and statistics."""
  model = transformers.DetrForObjectDetection(
    transformers.DetrConfig(
      num_queries=7,
      num_labels=5,
      d_model=32,
      encoder_layers=2,
      decoder_layers=2,
      encoder_attention_heads=4,
      decoder_attention_heads=4,
      encoder_ffn_dim=48,
      decoder_ffn_dim=48,
    )
  )
  rng = torch.Generator().manual_seed(1)
  for name, value in torch_models.randomize(model).named_buffers():
    positive = name.endswith(('weight', 'running_var'))
    noise = torch.rand(value.shape, generator=rng)
    value.copy_(noise / 2 + 0.7 if positive else noise / 5 - 0.1)
  return model.eval()


def test_logits_and_boxes_are_those_of_hugging_face_for_a_padded_batch(
  tmp_path,
):
  theirs = hf_detr()
  theirs.save_pretrained(tmp_path)
  found = convert.read(str(tmp_path))
  variables = {'params': found.params, **found.extra}
  ours = models.make_model(found.config, num_classes=found.num_classes)
  rng = np.random.RandomState(0)
  images = rng.uniform(-1, 1, (2, 96, 64, 3)).astype(np.float32)
  mask = np.ones((2, 96, 64), bool)
  mask[1, 70:], mask[1, :, 50:] = False, False
  want = torch_models.detect(theirs, images, mask)
  apply = jax.jit(lambda x, m: ours.apply(variables, x, m, train=False))
  got = apply(images, mask)
  assert got['logits'].shape == (2, 2, 7, 6)
  np.testing.assert_allclose(got['logits'][-1], want.logits, atol=1e-4)
  np.testing.assert_allclose(got['boxes'][-1], want.pred_boxes, atol=1e-4)
  # Rows that fill up a batch have no real pixel.
  empty = apply(images, np.zeros_like(mask))
  assert all(np.isfinite(x).all() for x in empty.values())
  # What lies in the padding has no influence.
  images[~mask] = 1.0
  again = models_detr.normalise(jnp.asarray(images), jnp.asarray(mask))
  want = torch_models.normalised(images, mask)
  np.testing.assert_allclose(again, want, atol=1e-6)


def test_sine_positions_in_closed_form():
  mask = np.zeros((1, 3, 4), bool)
  mask[0, :2, :3] = True  # Padded by a row and a column.
  got = detection.sine_positions(jnp.asarray(mask), 8)
  # Row 1 of 2, column 2 of 3; wavelengths 1 and 100 times 2 pi.
  y, x = np.pi, 2 / 3 * 2 * np.pi
  want = [
    f(place / power) for place in (y, x) for power in (1, 100) for f in (np.sin, np.cos)
  ]
  np.testing.assert_allclose(got[0, 0, 1], want, atol=1e-5)


def test_dilation_keeps_the_size_of_the_last_map():
  images = jnp.zeros((1, 64, 96, 3))
  maps = {}
  for dilated in (False, True):
    model = resnet.ResNet((1, 1, 1, 2), 8, dilated)
    (out, _) = jax.eval_shape(
      lambda rng, model=model: model.init_with_output(rng, images),
      jax.random.key(0),
    )
    maps[dilated] = [x.shape[1:] for x in out]
  assert maps[False] == [(16, 24, 32), (8, 12, 64), (4, 6, 128), (2, 3, 256)]
  assert maps[True] == [*maps[False][:3], (4, 6, 256)]
