"""Tests of linear classifiers: closed form, optimum, choice of the penalty."""

import numpy as np
import pytest
from sklearn import neighbors

from vit_jax.evaluators import features, solvers


def blobs(seed, count=300, noise=1.0):
  """Points around the corners of a triangle in 6 dimensions, 4 of them noise."""
  rng = np.random.RandomState(seed)
  labels = np.arange(count) % 3
  values = noise * rng.randn(count, 6)
  values[:, :2] += 2 * np.array([(0, 1), (1, -1), (-1, -1)])[labels]
  return features.Features(values.astype(np.float32), labels.astype(np.int32))


def closed_form(x, labels, num_classes, l2, test):
  """Scores by the published formula, in NumPy with float64."""
  x, test = x.astype(np.float64), test.astype(np.float64)
  mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5
  x, test = (np.c_[(v - mean) / std, np.full(len(v), 100.0)] for v in (x, test))
  y = np.where(labels[:, None] == np.arange(num_classes), 1.0, -1.0)
  inverse = np.linalg.inv(x.T @ x + l2 * np.eye(x.shape[1]))
  return test @ (inverse @ x.T @ y)


@pytest.mark.parametrize(('n', 'd'), [(60, 20), (20, 60), (21, 20)])
def test_scores_match_the_closed_form(n, d, monkeypatch):
  """More examples than features, and fewer: the dual problem."""
  rng = np.random.RandomState(0)
  x = rng.randn(n, d).astype(np.float32) * rng.uniform(0.1, 9, d) + 3
  x[:, 5] = 7  # A constant feature.
  x[:, 6] *= 1e-4  # A feature whose deviation is close to the added 1e-5.
  x, test = x.astype(np.float32), rng.randn(8, d).astype(np.float32)
  test[:, 5] = 7
  test[:, 6] *= 1e-4
  labels = np.arange(n) % 4
  model = solvers.least_squares(features.Features(x, labels), 4, 2.0**10)
  want = closed_form(x, labels, 4, 2.0**10, test)
  np.testing.assert_allclose(test @ model.kernel + model.bias, want, atol=1e-5)
  monkeypatch.setattr(solvers, 'BLOCK_ROWS', 3)
  assert model.predict(test).tolist() == want.argmax(axis=1).tolist()


@pytest.mark.parametrize('each', [True, False])
def test_gradient_of_the_penalised_loss_is_zero_at_the_optimum(each):
  """L-BFGS on mean cross-entropy + l2 / 2 |W|^2, for shifted and scaled inputs."""
  train, l2 = blobs(0), 0.01
  x = 50 * train.values + 3
  model = solvers.logistic(train._replace(values=x), l2, each)
  z = x - x.mean(axis=0)
  z /= x.std(axis=0) if each else np.sqrt((z**2).sum(axis=1).mean())
  kernel, bias = model[-1].coef_.T, model[-1].intercept_
  logits = (z @ kernel + bias).astype(np.float64)
  p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
  error = p - np.eye(3)[train.labels]
  np.testing.assert_allclose(z.T @ error / len(z) + l2 * kernel, 0, atol=1e-4)
  np.testing.assert_allclose(error.mean(axis=0), 0, atol=1e-4)
  assert (model.predict(x) == logits.argmax(axis=1)).all()


def test_held_out_images_choose_the_penalty(monkeypatch):
  monkeypatch.setattr(solvers, 'L2', (10.0, 1e-1, 1e-6))
  train, test = blobs(1, 60, 1.5), blobs(2, 3000, 1.5)
  train = train._replace(labels=np.where(np.arange(60) == 7, -1, train.labels))
  found = solvers.tuned(train, test)
  assert list(found.held_out) == [10.0, 1e-1, 1e-6]
  assert found.held_out[found.l2] == max(found.held_out.values())
  rows = train.labelled()
  assert len(rows) == 59
  model = solvers.logistic(train.take(rows), found.l2)
  assert found.accuracy == (model.predict(test.values) == test.labels).mean()
  assert found.accuracy > 0.7


def test_neighbours_match_scikit_learn(monkeypatch):
  """Several k at once, in batches of 7 test images; unlabelled images do not vote."""
  train, test = blobs(1, 200, 1.5), blobs(2, 100, 1.5)
  train = train._replace(labels=np.where(np.arange(200) % 9, train.labels, -1))
  monkeypatch.setattr(solvers, 'MAX_SIMILARITIES', 7 * 177)
  found = solvers.neighbours(train, test.values, (1, 20, 50))
  rows = train.labelled()
  assert len(rows) == 177
  for k, classes in zip((1, 20, 50), found, strict=True):
    want = neighbors.KNeighborsClassifier(
      k, weights=lambda distance: np.exp((1 - distance) / 0.07), metric='cosine'
    ).fit(train.values[rows], train.labels[rows])
    assert classes.tolist() == want.predict(test.values).tolist()
  assert test.accuracy(found[1]) > test.accuracy(found[0]) > 0.5
