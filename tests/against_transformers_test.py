"""Tests of the comparison between training here and training transformers' models."""

import jax
import pytest

from benchmarks import against_transformers, twins
from tests import torch_models
from tests.tasks.segmentation import segment_semantic_test as data_test
from vit_jax.tasks.segmentation import set_losses

torch = torch_models.torch


@pytest.fixture
def config(tmp_path, monkeypatch):
  monkeypatch.setattr(data_test, 'SIZES', ((16, 24),))
  config = data_test.make_config(data_test.write_data(tmp_path / 'data'), layers=())
  config.model.classifier = 'token'
  config.model.transformer.num_layers = 1
  config.update(optimizer='adam', optim_dtype='float32', base_lr=0.01)
  config.update(total_steps=9, warmup_steps=2, batch=8, weight_decay=2.0)
  return config


def compare(config):
  """Returns losses and mIoU, ours and theirs."""
  row = twins.compare(against_transformers.COMPARISON, config)
  return [*zip(*row['losses'])], row['mIoU']


def test_linear_head_matches_pytorch(config):
  config.grad_norm_clip = 0.5
  (ours, theirs), (miou, their_miou) = compare(config)
  assert ours == pytest.approx(theirs, rel=1e-4)
  assert ours[-1] < ours[0] - 0.1
  assert miou == pytest.approx(their_miou, abs=0.02)


def test_eomt_matches_transformers_on_the_same_points(config, monkeypatch):
  """Points are a grid; masked attention is random from update 3 on."""
  config.model.update(kind='eomt', num_queries=5, num_query_layers=1, num_upscales=1)
  config.model.transformer.layer_scale = 1.0
  config.task_options = {'max_classes': 3, 'num_points': 49, 'importance': 0.0}
  config.update(grad_norm_clip=0.0, total_steps=6)
  grid = (torch.cartesian_prod(torch.arange(7), torch.arange(7)) + 0.5) / 7
  random_points, rand = set_losses.random_points, torch.rand

  def our_points(key, shape):
    if shape[-1] == 49:
      return jax.numpy.broadcast_to(grid.numpy(), (*shape, 2))
    return random_points(key, shape)

  def their_points(*shape, **kwargs):
    return grid.expand(shape) if shape[1:] == (49, 2) else rand(*shape, **kwargs)

  monkeypatch.setattr(set_losses, 'random_points', our_points)
  monkeypatch.setattr(torch, 'rand', their_points)
  (ours, theirs), mious = compare(config)
  assert ours[:3] == pytest.approx(theirs[:3], rel=1e-4)
  assert ours[2] < ours[0]
  assert all(0.1 < miou <= 1 for miou in mious)
