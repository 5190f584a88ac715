"""Tests the count of multiply-adds against table 6 of the paper."""

import pytest

from vit_jax.configs import models
from vit_jax.scale import flops


@pytest.mark.parametrize(
  'name, epochs, exaflops',
  [
    ('b32', 7, 56.3),
    ('b16', 7, 223.7),
    ('l32', 7, 195.9),
    ('l16', 7, 783.6),
    ('l16', 14, 1567.2),
    ('h14', 14, 4258.6),
  ],
)
def test_pre_training_compute_is_that_of_table_6(name, epochs, exaflops):
  # JFT-300M: 303 million images, 18,291 classes.
  count = flops.forward_multiply_adds(
    models.get_config(name), (224, 224), num_classes=18_291
  )
  got = flops.training_flops(count) * 303e6 * epochs / 1e18
  assert got == pytest.approx(exaflops, abs=0.06)


def test_rectangles_mean_pooling_and_pre_logits():
  config = models.get_config('s16_gap_norep')
  config.representation_size = 100
  layer = 8 * (4 * 384**2 + 2 * 384 * 1536) + 2 * 8 * 8 * 384
  want = 8 * 256 * 384 + 12 * layer + 384 * 100 + 100 * 10
  got = flops.forward_multiply_adds(config, (64, 32), 10, channels=1)
  assert got == want


def test_hybrids_are_refused():
  with pytest.raises(ValueError, match=r'R50\+ViT-B_16 has a ResNet'):
    flops.forward_multiply_adds(models.get_config('r50_b16'), (224, 224), 10)
