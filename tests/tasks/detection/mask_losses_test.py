"""Tests of the mask losses against Hugging Face's."""

import jax
import numpy as np
import torch

from tests import torch_models  # noqa: F401 (before transformers.loss)
from vit_jax.tasks.detection import mask_losses


def test_losses_and_gradients_match_hugging_face():
  from transformers.loss import loss_for_object_detection

  rng = np.random.RandomState(0)
  counts = np.array([3, 0, 4, 1])  # One image has no objects.
  logits = 3 * rng.randn(4, 4, 5, 7).astype(np.float32)
  segments = rng.randint(0, 5, (4, 18, 27))
  segments[2][segments[2] == 4] = 0  # An object without a pixel.

  # In Hugging Face's order: one list of the objects of all images.
  pairs = [(i, n) for i, count in enumerate(counts) for n in range(count)]
  theirs = torch.tensor(logits).requires_grad_()
  small = torch.stack([theirs[i, n] for i, n in pairs])
  large = torch.nn.functional.interpolate(
    small[:, None], size=(18, 27), mode='bilinear', align_corners=False
  )[:, 0].flatten(1)
  targets = torch.tensor(
    np.stack([segments[i] == n + 1 for i, n in pairs]), dtype=torch.float32
  ).flatten(1)
  boxes = len(pairs)
  want = {
    'focal': loss_for_object_detection.sigmoid_focal_loss(large, targets, boxes),
    'dice': loss_for_object_detection.dice_loss(large, targets, boxes),
  }
  sum(want.values()).backward()

  def loss(logits):
    sums = mask_losses.losses(logits, segments, counts)
    sums = {name: x.sum() / boxes for name, x in sums.items()}
    return sum(sums.values()), sums

  (_, got), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(logits)
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value.item(), rtol=1e-5)
  np.testing.assert_allclose(slope, theirs.grad, atol=1e-6)
