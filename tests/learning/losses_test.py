"""Tests of the losses against numbers that can be worked out by hand."""

import math

import numpy as np

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
