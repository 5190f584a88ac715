"""Tests of EoMT against Hugging Face's models, with random weights."""

import functools

import jax
import numpy as np
import pytest
import torch

from tests import torch_models
from vit_jax import models
from vit_jax.weights import convert

transformers = torch_models.transformers

SIZES = dict(
  hidden_size=16, num_hidden_layers=3, num_attention_heads=2, image_size=16,
  patch_size=4, num_blocks=2, num_queries=5, num_labels=4, train_num_points=50,
)  # fmt: skip


def make_model(name):
  """Returns one of Hugging Face's models, whose parameters are all random."""
  if name == 'dinov3':
    config = transformers.EomtDinov3Config(intermediate_size=24, **SIZES)
    model = transformers.EomtDinov3ForUniversalSegmentation(config)
  else:
    gated = name == 'dinov2, gated'
    config = transformers.EomtConfig(mlp_ratio=3, use_swiglu_ffn=gated, **SIZES)
    model = transformers.EomtForUniversalSegmentation(config)
  return torch_models.randomize(model).eval()


@pytest.fixture(scope='module', params=['dinov2', 'dinov2, gated', 'dinov3'])
def pair(request, tmp_path_factory):
  """A model of Hugging Face; the same model here, and its variables."""
  folder = tmp_path_factory.mktemp('eomt')
  theirs = make_model(request.param)
  theirs.attn_mask_probs.fill_(0)
  theirs.save_pretrained(folder)
  weights = convert.read(str(folder))
  ours = models.make_model(weights.config, num_classes=weights.num_classes)
  return theirs, ours, {'params': weights.params}


def predictions_of(theirs, images, rates):
  """Returns all predictions of Hugging Face's model, the last one last."""
  patch = theirs.config.patch_size
  theirs.grid_size = (images.shape[1] // patch, images.shape[2] // patch)
  theirs.attn_mask_probs.copy_(torch.tensor(rates))
  predictions = []
  predict = theirs.predict

  def record(logits):
    prediction = predict(logits)
    predictions.append(prediction)
    return prediction

  theirs.predict = record
  # A layer of rate 0 has no prediction in evaluation, and keeps the mask before it.
  theirs.training = True
  try:
    with torch.no_grad():
      theirs(torch.tensor(images).permute(0, 3, 1, 2))
  finally:
    theirs.training = False
    del theirs.predict
  return tuple(torch.stack(x).numpy() for x in zip(*predictions))


# Images of the size of the position embeddings, and of as many patches in a rectangle.
@pytest.mark.parametrize(
  'size, rates',
  [((16, 16), (1.0, 1.0)), ((8, 32), (0.0, 1.0)), ((8, 32), None)],
)
def test_predictions_match_hugging_face(pair, size, rates):
  theirs, ours, variables = pair
  images = np.random.RandomState(0).uniform(-1, 1, (2, *size, 3)).astype(np.float32)
  masks, logits = predictions_of(theirs, images, rates or (0.0, 0.0))
  apply = functools.partial(ours.apply, train=False)
  key = jax.random.key(0)
  if rates is None:
    outputs = jax.jit(apply)(variables, images)
    masks, logits = masks[-1:], logits[-1:]
  else:
    apply = functools.partial(
      apply, mask_rates=jax.numpy.array(rates), rngs={'dropout': key}
    )
    outputs = jax.jit(apply)(variables, images)
  assert outputs['masks'].shape == (len(masks), 2, 5, size[0], size[1])
  assert masks.std() > 0.3
  np.testing.assert_allclose(outputs['logits'], logits, atol=1e-5)
  np.testing.assert_allclose(outputs['masks'], masks, atol=1e-5)


def test_hugging_face_reads_written_weights(pair, tmp_path):
  theirs, _, _ = pair
  theirs.attn_mask_probs.fill_(0)
  theirs.save_pretrained(tmp_path / 'theirs')
  convert.convert(str(tmp_path / 'theirs'), str(tmp_path / 'ours'), 'hf')
  written = type(theirs).from_pretrained(tmp_path / 'ours').eval()
  pixels = torch.rand(1, 3, 16, 16)
  for model in (theirs, written):
    model.grid_size = (4, 4)
  with torch.no_grad():
    expected, actual = theirs(pixels), written(pixels)
  assert torch.equal(actual.class_queries_logits, expected.class_queries_logits)
  assert torch.equal(actual.masks_queries_logits, expected.masks_queries_logits)
