"""Tests of attention inside a detector against Hugging Face's."""

import types

import numpy as np
import pytest
import transformers

from tests import torch_models
from vit_jax import models
from vit_jax.tasks.detection import attention_figures, detect
from vit_jax.weights import convert


def hf_detr():
  """A tiny DETR of Hugging Face with random weights."""
  backbone = transformers.ResNetConfig(
    embedding_size=8, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1]
  )
  config = transformers.DetrConfig(
    backbone_config=backbone, use_timm_backbone=False, num_queries=5, num_labels=3,
    d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8,
    attn_implementation='eager',
  )  # fmt: skip
  model = transformers.DetrForObjectDetection(config)
  return torch_models.randomize(model).eval()


def test_attention_matches_hugging_face_for_a_padded_batch(tmp_path):
  theirs = hf_detr()
  theirs.save_pretrained(tmp_path)
  found = convert.read(str(tmp_path))
  params, extra = found.params, found.extra
  model = models.make_model(found.config, num_classes=found.num_classes)
  task = types.SimpleNamespace(
    model=model, detections=lambda x: detect.Task.detections(None, x)
  )
  rng = np.random.RandomState(0)
  images = rng.uniform(-1, 1, (2, 96, 64, 3)).astype(np.float32)
  real = np.ones((2, 96, 64), bool)
  real[1, 48:], real[1, :, 32:] = False, False
  want = torch_models.detect(theirs, images, real, output_attentions=True)
  batch = {'image': images, 'real': real, 'count': np.zeros(2)}
  seen = attention_figures.compute(task, params, extra, batch)
  encoder = want.encoder_attentions[-1].mean(dim=1).numpy()  # [B, S, S]
  decoder = want.cross_attentions[-1].mean(dim=1).numpy()  # [B, Q, S]
  np.testing.assert_allclose(seen.encoder.reshape(2, 6, 6), encoder, atol=1e-5)
  np.testing.assert_allclose(seen.decoder.reshape(2, 5, 6), decoder, atol=1e-5)
  assert seen.encoder.shape == (2, 3, 2, 3, 2)
  np.testing.assert_allclose(seen.filled, [(1, 1), (0.5, 0.5)])
  probabilities = want.logits.softmax(dim=-1)[..., :-1].numpy()
  np.testing.assert_allclose(seen.scores, probabilities.max(-1), atol=1e-5)


def test_kinds_of_boxes():
  # The first and the fourth cover 0.09 of the image.
  sizes = [(0.3, 0.3), (0.5, 0.3), (0.3, 0.5), (0.9, 0.1), (0.5, 0.5)]
  boxes = np.array([(0.5, 0.5, *size) for size in sizes])
  small, wide, tall = (getattr(attention_figures, x) for x in ('SMALL', 'WIDE', 'TALL'))
  assert attention_figures.kinds(boxes).tolist() == [small, wide, tall, small, wide]


def made(scores=((0.1, 0.8, 0.9),), filled=((1.0, 1.0),)):
  """Attention in images of 2 x 4 cells; values are the attending cell."""
  count = len(filled)
  encoder = np.zeros((count, 2, 4, 2, 4), np.float32)
  encoder += np.arange(8).reshape(2, 4, 1, 1)
  return attention_figures.Attention(
    boxes=np.tile(np.float32([0, 0, 0.5, 0.5]), (count, 3, 1)),
    labels=np.zeros((count, 3), np.int32),
    scores=np.array(scores),
    encoder=encoder,
    decoder=np.ones((count, 3, 2, 4), np.float32),
    filled=np.array(filled),
  )


def test_points_map_to_cells_of_the_unpadded_image():
  points = [[(0, 0), (0.6, 0.4), (1, 1)], [(0, 0), (0.6, 0.4), (1, 1)]]
  seen = made(scores=[[0.5] * 3] * 2, filled=[(1, 1), (0.5, 0.75)])
  found = attention_figures.at_points(seen, points)
  assert found.shape == (2, 3, 2, 4)
  # Row 0 of 2 and column 2 of 4; the second image fills 1 x 3 cells,
  # and its far corner is in the first cell of the padding.
  assert found[..., 0, 0].tolist() == [[0, 2, 7], [0, 1, 7]]
  with pytest.raises(ValueError, match='point 0.5,1.2 lies outside .*--points'):
    attention_figures.at_points(seen, [[(0.5, 1.2)]] * 2)
