"""Tests of linear probes: the optimum, the choice of the penalty, SGD."""

import jax
import numpy as np
import pytest

from tests.evaluators import features_test
from vit_jax import cli
from vit_jax.data import records
from vit_jax.distributed import sharding
from vit_jax.evaluators import features
from vit_jax.evaluators import linear_probe
from vit_jax.run import config as run_config


def blobs(seed, count=300, noise=1.0):
  """Points around the corners of a triangle, in 6 dimensions, 4 of noise."""
  rng = np.random.RandomState(seed)
  labels = np.arange(count) % 3
  values = noise * rng.randn(count, 6)
  values[:, :2] += 2 * np.array([(0, 1), (1, -1), (-1, -1)])[labels]
  return features.Features(values.astype(np.float32), labels.astype(np.int32))


def test_the_gradient_of_the_penalised_loss_is_zero_at_the_optimum():
  """L-BFGS on the mean cross-entropy + l2 / 2 |W|^2, of any origin."""
  x, labels = blobs(0)
  x, l2 = 5 * x + 3, 0.01
  model = linear_probe.fit(x, labels, l2)
  z = (x - x.mean(axis=0)) / x.std(axis=0)
  kernel, bias = model[-1].coef_.T, model[-1].intercept_
  logits = (z @ kernel + bias).astype(np.float64)
  p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
  error = p - np.eye(3)[labels]
  np.testing.assert_allclose(z.T @ error / len(z) + l2 * kernel, 0, atol=1e-4)
  np.testing.assert_allclose(error.mean(axis=0), 0, atol=1e-4)


def test_held_out_images_choose_the_penalty():
  train, test = blobs(1, 60, 1.5), blobs(2, 3000, 1.5)
  train = train._replace(labels=np.where(np.arange(60) == 7, -1, train.labels))
  found = linear_probe.probe(train, test, (10.0, 1e-1, 1e-6))
  assert found.method == 'L-BFGS'
  assert set(found.held_out) == {10.0, 1e-1, 1e-6}
  assert found.held_out[found.l2] == max(found.held_out.values())
  rows = train.labelled()
  assert len(rows) == 59
  model = linear_probe.fit(train.values[rows], train.labels[rows], found.l2)
  assert found.accuracy == (model.predict(test.values) == test.labels).mean()
  assert found.accuracy > 0.7


def test_too_few_images():
  train = blobs(0, 3)._replace(labels=np.array([0, -1, -1]))
  with pytest.raises(ValueError, match='1 labelled images are too few'):
    linear_probe.probe(train, train)
  train = train._replace(labels=np.full(3, -1))
  with pytest.raises(ValueError, match='no image of the split has one class'):
    linear_probe.probe(train, train)


def test_what_fits_in_memory():
  memory = cli.machine_memory()
  assert linear_probe.fits(memory // 64, 1, 1)
  assert not linear_probe.fits(memory // 64 + 1, 1, 1)


def test_sgd_learns_what_can_be_told_apart(tiny_config):
  """Images of three shades of grey, by their mean and its square."""
  tiny_config.pp.channels = 3
  tiny_config.update(batch=16, batch_eval=16)
  config = run_config.complete(tiny_config)
  task = run_config.get_task('classify')(config, {'class_names': list('abc')})
  mesh = sharding.make_mesh({'data': 8})
  shades = 100 * (np.arange(48) % 3) + np.arange(48) // 3
  source = features_test.grey(shades)
  labels = np.arange(48)[:, None] % 3
  labels[5] = -1  # Does not count.
  source = records.MemorySource(
    {'image': source.lookup(np.arange(48))['image'], 'label': labels},
    source.names,
  )

  def intermediates(params, extra, batch, capture):
    mean = batch['image'].mean(axis=(1, 2, 3))[:, None]  # [B, 1]
    both = jax.numpy.concatenate([mean, mean**2], axis=1)
    return {'good': (both,), 'bad': (0 * mean,)}

  task.intermediates = intermediates
  extractor = features.Extractor(task, mesh, ('good', 'bad'))
  found = linear_probe.probe_sgd(
    task, mesh, extractor, source, source, {}, {}, epochs=20, learning_rate=20.0
  )
  assert list(found) == ['good', 'bad']
  assert found['good'] == linear_probe.Result(1.0, 0.0, {}, 'SGD')
  assert found['bad'].accuracy == pytest.approx(16 / 47)  # One class of three.


def test_layers_are_extracted_in_groups_that_fit():
  widths = {'a': 3, 'b': 4, 'c': 9, 'd': 1}
  assert linear_probe.groups(widths, 7) == [['a', 'b'], ['c'], ['d']]
  assert linear_probe.groups(widths, 99) == [list('abcd')]
  assert linear_probe.groups(widths, 0) == [['a'], ['b'], ['c'], ['d']]
