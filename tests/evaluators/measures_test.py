"""Tests of the measures of a report against scikit-learn's own multi-class functions."""

import numpy as np
import pytest
from sklearn import metrics

from vit_jax.evaluators import measures


@pytest.fixture
def data():
  """Probabilities with ties [90, 5] and labels; class 3 has no images."""
  rng = np.random.default_rng(0)
  logits = rng.integers(-2, 3, (90, 5)).astype(np.float32)
  classes = rng.choice([0, 1, 2, 4], 90, p=[0.6, 0.25, 0.1, 0.05])
  logits[np.arange(90), classes] += 1
  logits[:, 1] -= 20 * (rng.random(90) < 0.9)  # Class 1 is rarely predicted.
  return logits, classes


def test_multi_class_measures_are_scikit_learns(data):
  logits, classes = data
  labels = classes[:, None] == np.arange(5)
  probabilities = measures.probabilities(logits, exclusive=True)
  predicted = measures.predictions(probabilities, exclusive=True)
  best, present = probabilities.argmax(1), [0, 1, 2, 4]
  tables = measures.of_classes(probabilities, labels, predicted)
  assert tables['support'].tolist() == [np.sum(classes == i) for i in range(5)]
  for name in measures.OF_CLASSES:
    assert np.isnan(tables[name]).tolist() == [False, False, False, True, False]
  for average, weights in (('macro', None), ('weighted', tables['support'])):
    want = metrics.precision_recall_fscore_support(
      classes, best, labels=present, average=average, zero_division=0
    )
    got = [measures.mean(tables[x], weights) for x in ('precision', 'recall', 'f1')]
    np.testing.assert_allclose(got, want[:3], atol=1e-6)
  got = measures.mean(tables['recall'])
  with pytest.warns(UserWarning, match='classes not in y_true'):
    want = metrics.balanced_accuracy_score(classes, best)
  np.testing.assert_allclose(got, want, atol=1e-6)
  one_hot = labels[:, present].astype(int)
  for name, function in (
    ('auroc', metrics.roc_auc_score),
    ('average_precision', metrics.average_precision_score),
  ):
    want = function(one_hot, probabilities[:, present], average='macro')
    np.testing.assert_allclose(measures.mean(tables[name]), want, atol=1e-6)
  np.testing.assert_allclose(
    measures.kappa(labels, predicted), metrics.cohen_kappa_score(classes, best)
  )
  np.testing.assert_allclose(
    measures.log_loss(probabilities, labels),
    metrics.log_loss(classes, probabilities, labels=range(5)),
  )
  confusion = measures.confusion(labels, predicted)
  assert confusion.sum() == 90
  assert np.trace(confusion) == np.sum(best == classes)


def test_multi_label_measures_are_scikit_learns():
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(60, 4)).round(1)
  labels = rng.random((60, 4)) < [0.5, 0.3, 0.1, 0.9]
  probabilities = measures.probabilities(logits, exclusive=False)
  predicted = measures.predictions(probabilities, exclusive=False)
  np.testing.assert_array_equal(predicted, logits > 0)
  tables = measures.of_classes(probabilities, labels, predicted)
  want = metrics.precision_recall_fscore_support(labels, predicted, zero_division=0)
  for name, values in zip(('precision', 'recall', 'f1', 'support'), want):
    np.testing.assert_allclose(tables[name], values, atol=1e-6)
  want = metrics.roc_auc_score(labels, probabilities, average=None)
  np.testing.assert_allclose(tables['auroc'], want, atol=1e-6)
  want = metrics.average_precision_score(labels, probabilities, average=None)
  np.testing.assert_allclose(tables['average_precision'], want, atol=1e-6)


def test_calibration_error_is_the_mean_gap_between_confidence_and_accuracy():
  # Bin (.6, .8] has two images of confidence .7 and accuracy .5, bin (.8, 1] two of .95
  # and 1.
  best = np.array([0.7, 0.7, 0.95, 0.95])
  probabilities = np.stack([best, 1 - best], axis=1)
  labels = np.array([[1, 0], [0, 1], [1, 0], [1, 0]]) > 0
  bins = measures.reliability(probabilities, labels, 5)
  assert bins.counts.tolist() == [0, 0, 0, 2, 2]
  np.testing.assert_allclose(bins.accuracy[3:], [0.5, 1])
  np.testing.assert_allclose(measures.calibration_error(bins), (0.2 + 0.05) / 2)


def test_what_is_not_defined_is_nan():
  labels = np.ones((3, 1)) > 0
  tables = measures.of_classes(np.ones((3, 1)), labels, labels)
  assert np.isnan(tables['auroc'][0])
  assert tables['recall'][0] == 1
  assert np.isnan(measures.mean(tables['auroc']))
  assert np.isnan(measures.kappa(labels, labels))
