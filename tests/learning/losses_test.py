"""Tests of the losses against numbers that can be worked out by hand, and PyTorch."""

import math

import jax
import numpy as np
import pytest
from sklearn.utils import class_weight

from vit_jax.learning import losses


def test_softmax_of_two_labels_normalises_their_sum():
  logits = np.log(np.array([[0.5, 0.25, 0.25]]))
  got = losses.softmax_xent(logits, np.array([[0.0, 1.0, 1.0]]))
  np.testing.assert_allclose(got, [math.log(4)], rtol=1e-6)


def test_sigmoid_is_summed_over_the_classes():
  # sigmoid(0) = 1/2: every class costs log 2, whatever its label.
  got = losses.sigmoid_xent(np.zeros((1, 5)), np.array([[1.0, 1, 0, 0, 0]]))
  np.testing.assert_allclose(got, [5 * math.log(2)], rtol=1e-6)


def test_label_smoothing_of_two_labels():
  logits = np.log(np.array([[0.7, 0.1, 0.1, 0.1]]))
  labels = np.array([[1.0, 1.0, 0.0, 0.0]])
  got = losses.get_loss('softmax', 0.4)(logits, labels)
  # The labels become .4 .4 .1 .1.
  want = -(0.4 * math.log(0.7) + 0.6 * math.log(0.1))
  np.testing.assert_allclose(got, [want], rtol=1e-5)


WEIGHTS = np.array([0.25, 1.0, 3.5, 0.5], np.float32)


def logits_and_labels():
  """Returns logits [6, 4], and labels of one class each, int [6]."""
  rng = np.random.default_rng(0)
  return rng.normal(0, 3, (6, 4)).astype(np.float32), np.array([0, 0, 2, 1, 0, 3])


def test_weighted_mean_is_pytorchs():
  torch = pytest.importorskip('torch')
  logits, classes = logits_and_labels()
  labels = np.eye(4, dtype=np.float32)[classes]
  total = losses.get_loss('softmax', class_weights=WEIGHTS)(logits, labels)
  got = total.sum() / losses.label_weights(labels, WEIGHTS).sum()
  want = torch.nn.functional.cross_entropy(
    torch.tensor(logits), torch.tensor(classes), weight=torch.tensor(WEIGHTS)
  )
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_smoothed_labels_keep_the_weight_of_their_image():
  torch = pytest.importorskip('torch')
  logits, classes = logits_and_labels()
  labels = np.eye(4, dtype=np.float32)[classes]
  got = losses.get_loss('softmax', 0.3, class_weights=WEIGHTS)(logits, labels)
  smoothed = torch.nn.functional.cross_entropy(
    torch.tensor(logits), torch.tensor(classes), label_smoothing=0.3, reduction='none'
  )
  np.testing.assert_allclose(got, WEIGHTS[classes] * smoothed.numpy(), rtol=1e-6)


def test_mixed_labels_have_the_mean_of_the_weights():
  torch = pytest.importorskip('torch')
  logits, classes = logits_and_labels()
  labels = np.eye(4, dtype=np.float32)[classes]
  mixed = 0.3 * labels + 0.7 * labels[::-1]
  got = losses.get_loss('softmax', class_weights=WEIGHTS)(logits, mixed)
  want = torch.nn.functional.cross_entropy(
    torch.tensor(logits),
    torch.tensor(mixed),
    weight=torch.tensor(WEIGHTS),
    reduction='none',
  )
  np.testing.assert_allclose(got, want, rtol=1e-6)
  weights = losses.label_weights(mixed, WEIGHTS)
  want = 0.3 * WEIGHTS[classes] + 0.7 * WEIGHTS[classes[::-1]]
  np.testing.assert_allclose(weights, want, rtol=1e-6)


def test_sigmoid_weights_positive_labels_as_pytorch():
  torch = pytest.importorskip('torch')
  logits, _ = logits_and_labels()
  labels = np.random.default_rng(1).integers(0, 2, logits.shape).astype(np.float32)
  got = losses.sigmoid_xent(logits, labels, WEIGHTS)
  want = torch.nn.functional.binary_cross_entropy_with_logits(
    torch.tensor(logits),
    torch.tensor(labels),
    pos_weight=torch.tensor(WEIGHTS),
    reduction='none',
  )
  np.testing.assert_allclose(got, want.sum(axis=1), rtol=1e-6)


@pytest.mark.parametrize('gamma, alpha', [(2.0, 0.25), (0.5, None), (0.0, 0.75)])
def test_sigmoid_focal_loss_is_the_papers(gamma, alpha):
  logits, _ = logits_and_labels()
  labels = np.random.default_rng(1).random(logits.shape).astype(np.float32)  # Mixed.
  labels[:3] = labels[:3].round()
  got = losses.get_loss('sigmoid', gamma=gamma, alpha=alpha)(logits, labels)
  # Equations 4 and 5, in float64, and for mixed labels as torchvision computes them.
  p = 1 / (1 + np.exp(-logits.astype(np.float64)))
  p_t = p * labels + (1 - p) * (1 - labels)
  alpha_t = 1 if alpha is None else alpha * labels + (1 - alpha) * (1 - labels)
  xent = -(labels * np.log(p) + (1 - labels) * np.log(1 - p))
  want = alpha_t * (1 - p_t) ** gamma * xent
  np.testing.assert_allclose(got, want.sum(axis=1), rtol=1e-5)


def test_softmax_focal_loss_down_weights_the_cross_entropy():
  logits, classes = logits_and_labels()
  labels = np.eye(4, dtype=np.float32)[classes]
  xent = np.array(losses.softmax_xent(logits, labels))
  got = losses.softmax_xent(logits, labels, gamma=2.0)
  np.testing.assert_allclose(got, (1 - np.exp(-xent)) ** 2 * xent, rtol=1e-5)


@pytest.mark.parametrize('gamma', [0.5, 2.0])
def test_focal_loss_has_a_gradient_where_the_model_is_sure(gamma):
  logits, labels = np.array([[200.0, 0.0], [0.0, 200.0]]), np.eye(2)[[0, 0]]
  gradient = jax.grad(lambda x: losses.softmax_xent(x, labels, gamma=gamma).sum())(
    logits
  )
  # A sure, right row has none; a sure, wrong row that of the cross-entropy.
  np.testing.assert_allclose(gradient, [[0, 0], [-1, 1]], atol=1e-6)


def test_logit_adjustment_divides_by_the_prior():
  counts = np.array([60, 30, 10])
  # Logits that are the adjusted posterior: adding log prior gives the class frequencies.
  offsets = losses.logit_adjustment(counts, 1.0)
  loss = losses.get_loss('softmax', logit_offsets=offsets)
  got = loss(np.zeros((3, 3)), np.eye(3))
  np.testing.assert_allclose(got, -np.log([0.6, 0.3, 0.1]), rtol=1e-6)
  half = losses.logit_adjustment(counts, 0.5)
  np.testing.assert_allclose(half, 0.5 * offsets, rtol=1e-6)


def test_balanced_weights_are_scikit_learns():
  classes = np.repeat([0, 1, 2], [60, 30, 10])
  want = class_weight.compute_class_weight('balanced', classes=np.arange(3), y=classes)
  got = losses.balanced_weights(np.bincount(classes))
  np.testing.assert_allclose(got, want, rtol=1e-6)
