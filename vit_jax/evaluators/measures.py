"""Measures of classification that reports contain, computed by scikit-learn.

Arrays have a row per image: `probabilities`, float [n, C]; `labels` and `predicted`, bool
[n, C]. Rates of a class without images are nan, and means over classes leave it out.
"""

from typing import NamedTuple

import numpy as np

# Measures of each class, in the order of a report.
OF_CLASSES = ('precision', 'recall', 'f1', 'auroc', 'average_precision')


class Bins(NamedTuple):
  """Predictions of similar confidence: arrays [bins]."""

  counts: np.ndarray
  confidence: np.ndarray  # Mean; nan without predictions.
  accuracy: np.ndarray


def probabilities(
  logits: np.ndarray, exclusive: bool, temperature: float = 1.0
) -> np.ndarray:
  """Returns probabilities, float64 [n, C], of logits [n, C] divided by a temperature.

  Unless classes are `exclusive`, they do not sum to 1.
  """
  from scipy import special  # Late: takes a fifth of a second.

  scaled = logits.astype(np.float64) / temperature
  return special.softmax(scaled, axis=1) if exclusive else special.expit(scaled)


def predictions(probabilities: np.ndarray, exclusive: bool) -> np.ndarray:
  """Returns the predicted classes, bool [n, C]: the most probable one, or all above 1/2."""
  if not exclusive:
    return probabilities > 0.5
  best = probabilities.argmax(axis=1)
  return best[:, None] == np.arange(probabilities.shape[1])


def of_classes(
  probabilities: np.ndarray, labels: np.ndarray, predicted: np.ndarray
) -> dict[str, np.ndarray]:
  """Returns the measures OF_CLASSES, and `support`, by name, float64 [C].

  A class that is never predicted has precision 0. AUROC and average precision are those
  of the class against all others.
  """
  from sklearn import metrics  # Late: an extra.

  support = labels.sum(axis=0)
  tables: dict[str, np.ndarray] = {}
  for name in OF_CLASSES:
    tables[name] = np.full(len(support), np.nan)
  for i in np.flatnonzero(support):
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
      labels[:, i], predicted[:, i], average='binary', zero_division=0
    )
    tables['precision'][i] = precision
    tables['recall'][i] = recall
    tables['f1'][i] = f1
    tables['average_precision'][i] = metrics.average_precision_score(
      labels[:, i], probabilities[:, i]
    )
    if support[i] < len(labels):
      tables['auroc'][i] = metrics.roc_auc_score(labels[:, i], probabilities[:, i])
  return {**tables, 'support': support}


def mean(values: np.ndarray, weights: np.ndarray | None = None) -> float:
  """Returns the mean over classes whose value is defined; nan if there is none."""
  is_defined = ~np.isnan(values)
  if not is_defined.any():
    return float('nan')
  if weights is not None:
    weights = weights[is_defined]
  return float(np.average(values[is_defined], weights=weights))


def reliability(
  probabilities: np.ndarray, labels: np.ndarray, num_bins: int = 15
) -> Bins:
  """Compares confidence and accuracy in bins of equal width (arXiv 1706.04599).

  The confidence is the probability of the predicted class.
  """
  confidence = probabilities.max(axis=1)
  correct = labels[np.arange(len(labels)), probabilities.argmax(axis=1)]
  # Bins include their upper ends.
  numbers = np.ceil(confidence * num_bins).astype(int) - 1
  numbers = numbers.clip(0, num_bins - 1)
  counts = np.bincount(numbers, minlength=num_bins)
  with np.errstate(invalid='ignore'):
    return Bins(
      counts,
      np.bincount(numbers, confidence, num_bins) / counts,
      np.bincount(numbers, correct, num_bins) / counts,
    )


def calibration_error(bins: Bins) -> float:
  """Returns the expected calibration error (arXiv 1706.04599, equation 3)."""
  gaps = np.abs(bins.accuracy - bins.confidence)
  return mean(gaps, bins.counts)


def kappa(labels: np.ndarray, predicted: np.ndarray) -> float:
  """Returns Cohen's kappa; nan if labels and predictions are all of one class."""
  from sklearn import metrics  # Late: an extra.

  true, best = labels.argmax(axis=1), predicted.argmax(axis=1)
  if len({*true.tolist(), *best.tolist()}) < 2:
    return float('nan')
  return float(metrics.cohen_kappa_score(true, best))


def log_loss(probabilities: np.ndarray, labels: np.ndarray) -> float:
  """Returns the mean negative logarithm of the probability of the true class."""
  from sklearn import metrics  # Late: an extra.

  if not len(labels):
    return float('nan')
  classes = np.arange(labels.shape[1])
  return float(metrics.log_loss(labels.argmax(axis=1), probabilities, labels=classes))


def confusion(labels: np.ndarray, predicted: np.ndarray) -> np.ndarray:
  """Returns the number of images by true and predicted class, int64 [C, C]."""
  from sklearn import metrics  # Late: an extra.

  if not len(labels):  # scikit-learn refuses these.
    return np.zeros(2 * labels.shape[1:], np.int64)
  return metrics.confusion_matrix(
    labels.argmax(axis=1),
    predicted.argmax(axis=1),
    labels=np.arange(labels.shape[1]),
  )
