"""Classifiers of features: least squares, logistic regression, nearest neighbours."""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import threadpoolctl

from vit_jax import console
from vit_jax.distributed import processes
from vit_jax.evaluators import features
from vit_jax.inference import engine

CONSTANT = 100.0  # A constant feature, for the bias.
# Factors of half of the squared weights, added to the mean cross-entropy.
L2 = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
HELD_OUT = 0.2  # Fraction of the training images that choose the factor.
_EPS = 1e-5  # Added to standard deviations by the published few-shot protocol.
_SMALL = 1_000_000  # Numbers up to which one thread is as fast as several.
BLOCK_ROWS = 8192  # Images that `Linear` classifies at a time.
TEMPERATURE = 0.07  # Divides the similarities of nearest neighbours.
MAX_SIMILARITIES = 2**26  # Similarities that `neighbours` computes at a time.


class Linear(NamedTuple):
  """A linear classifier of features: kernel [D, C] and bias [C], float64."""

  kernel: np.ndarray
  bias: np.ndarray

  def predict(self, x: np.ndarray) -> np.ndarray:
    """Returns the classes, int64 [n], of features [n, D]."""
    blocks = np.array_split(x, len(x) // BLOCK_ROWS + 1)
    return np.concatenate(
      [(x @ self.kernel + self.bias).argmax(axis=-1) for x in blocks]
    )


class Result(NamedTuple):
  """A linear probe."""

  accuracy: float  # On the test images, from 0 to 1.
  l2: float  # The chosen penalty, see L2.
  held_out: dict[float, float]  # Accuracy on held-out images by penalty.


def least_squares(train: features.Features, num_classes: int, l2: float) -> Linear:
  """Fits targets of -1 or 1 for each class by ridge regression, in float64.

  Features are standardised; `l2` is the factor of the squared weights, including the
  weight of the constant feature, added to the sum of the squared errors. All examples
  have labels.
  """
  from sklearn import linear_model

  x = train.values
  mean = x.mean(axis=0, dtype=np.float64)
  inputs = np.full((len(x), x.shape[1] + 1), CONSTANT)  # [n, D + 1]
  centred = np.subtract(x, mean, out=inputs[:, :-1])
  # x.std would copy all of x in float64.
  scale = np.sqrt(np.einsum('nd,nd->d', centred, centred) / len(x)) + _EPS
  centred /= scale
  targets = np.where(train.labels[:, None] == np.arange(num_classes), 1.0, -1.0)
  model = linear_model.Ridge(l2, fit_intercept=False, copy_X=False, solver='cholesky')
  weights = model.fit(inputs, targets).coef_.T  # [D + 1, C]
  kernel = weights[:-1] / scale[:, None]
  return Linear(kernel, CONSTANT * weights[-1] - mean @ kernel)


def logistic(train: features.Features, l2: float, per_feature: bool = True) -> Any:
  """Returns a multinomial logistic regression with an L2 penalty, fitted by L-BFGS.

  It is a scikit-learn Pipeline. All examples have labels. Each feature is divided by
  its standard deviation; without `per_feature`, all by the root mean square of their
  length, so that one penalty suits layers of any width and pixels keep their contrast.
  """
  from sklearn import linear_model, pipeline, preprocessing

  x = train.values
  scaler = preprocessing.StandardScaler().fit(x)
  if not per_feature:
    scaler.scale_[:] = np.sqrt(scaler.var_.sum()) or 1.0
  model = linear_model.LogisticRegression(C=1 / (l2 * len(x)), max_iter=1000, tol=1e-5)
  with threadpoolctl.threadpool_limits(1 if x.size <= _SMALL else None):
    model.fit(scaler.transform(x), train.labels)
  return pipeline.make_pipeline(scaler, model)


def tuned(train: features.Features, test: features.Features) -> Result:
  """Fits by L-BFGS with the penalty in L2 that is best on held-out images.

  Images without a class do not count. Process 0 computes for all.
  """
  penalties = sorted(L2, reverse=True)
  rows = np.random.default_rng(0).permutation(train.labelled())
  num_held_out = max(1, round(HELD_OUT * len(rows)))
  held_out_rows, fitted_rows = rows[:num_held_out], rows[num_held_out:]

  def score(rows: np.ndarray, images: features.Features, l2: float) -> float:
    model = logistic(train.take(rows), l2)
    return images.accuracy(model.predict(images.values))

  def solve() -> list[Any]:
    held_out = train.take(held_out_rows)
    with console.bar(iterable=penalties, desc='L-BFGS', delay=3, leave=False) as bar:
      accuracies = [score(fitted_rows, held_out, l2) for l2 in bar]
    best = penalties[int(np.argmax(accuracies))]  # The strongest on a tie.
    return [score(rows, test, best), best, accuracies]

  accuracy, best, accuracies = processes.from_first('the linear probe', solve)
  return Result(accuracy, best, dict(zip(penalties, accuracies)))


def neighbours(
  train: features.Features, queries: np.ndarray, counts: Sequence[int]
) -> list[np.ndarray]:
  """Classifies features [n, D] by the k nearest training images.

  Returns classes, int64 [n], for each k of `counts`. Images are compared
  by the cosine of their features, and each neighbour's vote counts
  exp(cosine / TEMPERATURE): the protocol of DINO (arXiv 2104.14294, appendix F.1) and
  of "Unsupervised Feature Learning via Non-Parametric Instance Discrimination" (arXiv
  1805.01978, section 3.4). Training images without a class do not vote. The first
  local device computes, and keeps the training features [n, D] and at most
  MAX_SIMILARITIES cosines, or one row of them.
  """
  train = train.take(train.labelled())
  keys = _normalised(train.values)
  labels = train.labels
  num_classes = int(labels.max()) + 1

  @jax.jit
  def vote(keys: jax.Array, labels: jax.Array, queries: jax.Array) -> list[jax.Array]:
    cosines = jnp.matmul(_normalised(queries), keys.T, precision='highest')
    nearest, rows = jax.lax.top_k(cosines, max(counts))  # [B, k], from the nearest on.
    votes = jnp.exp(nearest / TEMPERATURE)[..., None]
    votes *= jax.nn.one_hot(labels[rows], num_classes)  # [B, k, classes]
    return [votes[:, :k].sum(axis=1).argmax(axis=-1) for k in counts]

  numbers_per_query = max(len(keys), max(counts) * num_classes)
  size = max(1, min(len(queries), MAX_SIMILARITIES // numbers_per_query))
  vote = functools.partial(vote, jnp.asarray(keys), jnp.asarray(labels))
  return [x.astype(np.int64) for x in engine.by_parts(vote, queries, size)]


def _normalised(x: Any) -> Any:
  return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
