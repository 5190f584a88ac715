"""Tests of the losses of classes and masks against Hugging Face's EoMT."""

import jax
import numpy as np
import pytest
import torch

from tests import torch_models
from vit_jax.layers import xla_hints
from vit_jax.tasks.segmentation import set_losses

NUM_POINTS, NUM_CLASSES, QUERIES = 40, 3, 6
OPTIONS = set_losses.Options(num_points=NUM_POINTS)
COUNTS = np.array([3, 0, 4])  # One image has no objects.
PIXELS = 20, 28


def draws_of(key, num_layers, query):
  """Yields the points of Hugging Face's loss in its order, from the same keys."""
  keys = jax.random.split(key, (num_layers, len(COUNTS), 2))
  num_uncertain = int(OPTIONS.importance * NUM_POINTS)
  shapes = int(OPTIONS.oversample * NUM_POINTS), NUM_POINTS - num_uncertain
  for layer in range(num_layers):
    for image in range(len(COUNTS)):
      yield set_losses.random_points(keys[layer, image, 0], (1, NUM_POINTS))
    parts = [], []
    for image, count in enumerate(COUNTS):
      target_keys = jax.random.split(keys[layer, image, 1], query.shape[2])
      for target in np.argsort(query[layer, image, :count]):  # In order of queries.
        for part, size, subkey in zip(
          parts, shapes, jax.random.split(target_keys[target])
        ):
          part.append(set_losses.random_points(subkey, (size,)))
    yield from map(np.stack, parts)


def hugging_face_losses(masks, logits, labels, segments):
  """Returns the weighted losses of one layer, and their sum's gradient by masks."""
  transformers = torch_models.transformers
  config = transformers.EomtConfig(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_blocks=1,
    image_size=16, num_labels=NUM_CLASSES, train_num_points=NUM_POINTS,
  )  # fmt: skip
  model = transformers.EomtForUniversalSegmentation(config)
  masks = torch.tensor(masks).requires_grad_()
  mask_labels, class_labels = [], []
  for image, count in enumerate(COUNTS):
    objects = [segments[image] == n + 1 for n in range(count)]
    target = np.reshape(objects, (count, *PIXELS)).astype(np.float32)
    mask_labels.append(torch.tensor(target))
    class_labels.append(torch.tensor(labels[image, :count]))
  losses = model.get_loss_dict(
    masks, torch.tensor(logits), mask_labels, class_labels, {}
  )
  sum(losses.values()).backward()
  return {name: x.item() for name, x in losses.items()}, masks.grad.numpy()


@pytest.fixture(params=['cpu', 'tpu'])
def platform(request, monkeypatch):
  """Traces the functions for a platform; both are computed on the CPU."""
  monkeypatch.setattr(xla_hints, 'on_tpus', lambda: request.param == 'tpu')


def test_losses_and_gradients_match_hugging_face(platform, monkeypatch):
  # Of five targets, the first four are computed in two chunks; the third is skipped.
  monkeypatch.setattr(set_losses, '_CHUNK', 2)
  rng = np.random.RandomState(0)
  masks = 3 * rng.randn(2, 3, QUERIES, 5, 7).astype(np.float32)
  logits = rng.randn(2, 3, QUERIES, NUM_CLASSES + 1).astype(np.float32)
  labels = rng.randint(0, NUM_CLASSES, (3, 5))
  segments = rng.randint(0, 5, (3, *PIXELS))
  segments[0, segments[0] == 4] = 0
  key = jax.random.key(7)

  @jax.jit
  def losses_and_gradient(masks):
    def total(masks):
      outputs = {'logits': logits, 'masks': masks}
      sums = set_losses.losses(outputs, labels, segments, COUNTS, key, OPTIONS)
      num_objects = COUNTS.sum()
      weight = num_objects + OPTIONS.no_object_weight * (3 * QUERIES - num_objects)
      losses = {  # [L]
        'cross_entropy': OPTIONS.class_weight * sums['class'].sum(1) / weight,
        'mask': OPTIONS.mask_weight * sums['mask'].sum(1) / num_objects,
        'dice': OPTIONS.dice_weight * sums['dice'].sum(1) / num_objects,
      }
      return sum(losses.values()).sum(), (losses, sums['query'])

    return jax.grad(total, has_aux=True)(masks)

  gradient, (losses, query) = losses_and_gradient(masks)
  np.testing.assert_array_equal((query >= 0).sum(-1), [COUNTS, COUNTS])
  draws = draws_of(key, 2, np.asarray(query))

  def rand(*shape, device=None):
    points = np.array(next(draws))
    assert points.shape == shape
    return torch.tensor(points)

  monkeypatch.setattr(torch, 'rand', rand)
  for layer in range(2):
    expected, slope = hugging_face_losses(masks[layer], logits[layer], labels, segments)
    assert len(expected) == 3
    for name, value in expected.items():
      loss = losses[name.removeprefix('loss_')][layer]
      np.testing.assert_allclose(loss, value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(gradient[layer], slope, atol=1e-6)


def test_points_at_the_centres_of_pixels_have_their_values(platform):
  maps = np.arange(12.0).reshape(1, 3, 4)
  points = np.array([[[0.5 / 4, 0.5 / 3], [3.5 / 4, 1.5 / 3], [1.0 / 4, 2.5 / 3]]])
  sample = jax.jit(set_losses.sample)
  np.testing.assert_allclose(sample(maps, points), [[0, 7, 8.5]], rtol=1e-6)
  # The corner is shared with three pixels outside, which are 0.
  corner = np.ones((1, 1, 2))
  np.testing.assert_allclose(sample(maps, corner), [[11 / 4]], rtol=1e-6)
