"""Tests of box geometry and DETR's losses."""

import functools

import jax
import numpy as np
import torch
import transformers

from tests import torch_models  # noqa: F401 (before transformers.loss)
from vit_jax.tasks.detection import boxes


def test_generalised_iou():
  first, second, want = zip(
    ([0, 0, 2, 2], [0, 0, 2, 2], 1),
    ([0, 0, 2, 2], [1, 1, 3, 3], 1 / 7 - 2 / 9),
    ([0, 0, 1, 1], [2, 0, 3, 1], -1 / 3),
    ([1, 1, 1, 1], [1, 1, 1, 1], 0),  # No area.
  )
  compute = jax.jit(jax.vmap(jax.value_and_grad(boxes.giou)))
  value, slope = compute(np.array(first, np.float32), np.array(second, np.float32))
  np.testing.assert_allclose(value, want, atol=1e-6)
  assert np.isfinite(slope).all()


def test_losses_and_gradients_match_hugging_face():
  from transformers.loss import loss_for_object_detection

  layers, images, queries, classes, most = 3, 4, 20, 5, 8
  rng = np.random.RandomState(0)
  logits = rng.randn(layers, images, queries, classes + 1).astype(np.float32)
  predicted = rng.uniform(0.1, 0.9, (layers, images, queries, 4))
  predicted = predicted.astype(np.float32)
  labels = rng.randint(0, classes, (images, most))
  targets = rng.uniform(0.1, 0.6, (images, most, 4)).astype(np.float32)
  counts = np.array([3, 0, 8, 1])  # One image has no objects.

  @jax.jit
  @functools.partial(jax.value_and_grad, argnums=(0, 1))
  def ours(logits, predicted, class_weight, no_object):
    sums = boxes.losses(
      logits, predicted, labels, targets, counts, class_weight, no_object
    )
    weight = (counts + no_object * (queries - counts)).sum()
    assert sums.pop('query').shape == (layers, images, most)
    sums = {name: x.sum(axis=1) for name, x in sums.items()}
    return (
      boxes.CLASS * sums['class'] / weight
      + (boxes.L1 * sums['l1'] + boxes.GIOU * sums['giou']) / counts.sum()
    ).sum()

  for class_weight, no_object in ((1, boxes.NO_OBJECT), (3, 0.5)):
    theirs = [torch.tensor(x).requires_grad_() for x in (logits, predicted)]
    want, _, _ = loss_for_object_detection.ForObjectDetectionLoss(
      theirs[0][-1],
      [
        dict(class_labels=torch.tensor(x[:n]), boxes=torch.tensor(y[:n]))
        for x, y, n in zip(labels, targets, counts)
      ],
      'cpu',
      theirs[1][-1],
      transformers.DetrConfig(
        num_labels=classes,
        auxiliary_loss=True,
        decoder_layers=layers,
        class_cost=class_weight,
        eos_coefficient=no_object,
      ),
      *theirs,
    )
    want.backward()
    got, slopes = ours(logits, predicted, class_weight, no_object)
    np.testing.assert_allclose(got, want.item(), rtol=1e-5)
    for slope, other in zip(slopes, theirs):
      np.testing.assert_allclose(slope, other.grad, atol=1e-5)
