"""Tests of few-shot probes: the closed form, the choice of shots, errors."""

import os
import pty
import sys
import termios

import numpy as np
import pytest

from vit_jax import cli
from vit_jax.data import records
from vit_jax.data import sources
from vit_jax.data.images import images
from vit_jax.distributed import sharding
from vit_jax.evaluators import features
from vit_jax.evaluators import fewshot
from vit_jax.inference import engine
from vit_jax.run import config as run_config


def closed_form(x, labels, num_classes, l2, test):
  """Scores by the published formula, in NumPy and float64 only."""
  x, test = x.astype(np.float64), test.astype(np.float64)
  mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5
  x, test = (np.c_[(v - mean) / std, np.full(len(v), 100.0)] for v in (x, test))
  y = np.where(labels[:, None] == np.arange(num_classes), 1.0, -1.0)
  inverse = np.linalg.inv(x.T @ x + l2 * np.eye(x.shape[1]))
  return test @ (inverse @ x.T @ y)


@pytest.mark.parametrize(('n', 'd'), [(60, 20), (20, 60), (21, 20)])
def test_scores_are_those_of_the_closed_form(n, d):
  """More examples than features, and fewer: the dual problem."""
  rng = np.random.RandomState(0)
  x = rng.randn(n, d).astype(np.float32) * rng.uniform(0.1, 9, d) + 3
  x[:, 5] = 7  # A feature without information.
  x, test = x.astype(np.float32), rng.randn(8, d).astype(np.float32)
  test[:, 5] = 7
  labels = np.arange(n) % 4
  kernel, bias = fewshot.fit(x, labels, 4, 2.0**10)
  want = closed_form(x, labels, 4, 2.0**10, test)
  np.testing.assert_allclose(test @ kernel + bias, want, atol=1e-5)


def test_the_same_few_of_each_class():
  labels = np.array([0, 1, -1, 1, 0, 2, 0, 1, 2, 2, 2, 0])
  chosen = fewshot.choose(labels, 'abc', 3, seed=1)
  assert (labels[chosen] == np.arange(3)[:, None]).all()
  assert all(len(set(row)) == 3 for row in chosen.tolist())
  np.testing.assert_array_equal(
    fewshot.choose(labels, 'abc', 2, seed=1), chosen[:, :2]
  )
  # The choice in a class does not depend on the other classes.
  other = np.where(labels == 2, 1, labels)
  np.testing.assert_array_equal(
    fewshot.choose(other, 'ab', 3, seed=1)[0], chosen[0]
  )
  found = {tuple(fewshot.choose(labels, 'abc', 3, s)[0]) for s in range(20)}
  assert len(found) > 4


def test_fewer_examples_than_shots():
  labels = np.array([0, 0, 0, 1, 1, -1])
  with pytest.raises(ValueError, match="shots=3 are more than the 2 examples of the class 'bee'.*config.fewshot.shots"):  # fmt: skip
    fewshot.choose(labels, ('ant', 'bee'), 3, 0)
  with pytest.raises(ValueError, match=r"classes \['ant'\]: a probe needs two"):
    fewshot.choose(labels, ('ant',), 1, 0)


def test_features_that_are_not_finite():
  with pytest.raises(ValueError, match='features are not finite'):
    fewshot.fit(np.full((4, 3), np.nan), np.arange(4) % 2, 2, 1.0)


def test_images_without_a_class_do_not_count():
  values = np.eye(3, dtype=np.float32)
  test = features.Features(values, np.array([0, -1, 1], np.int32))
  assert fewshot.accuracy(test, np.eye(3), np.zeros(3)) == 0.5
  with pytest.raises(ValueError, match='no image of the split has one class'):
    fewshot.accuracy(test._replace(labels=np.full(3, -1)), np.eye(3), 0)


def test_splits(tiny_config):
  config = run_config.complete(tiny_config)
  assert fewshot.splits(config) == (None, 'train', 'test')
  config.pp.train, config.evals = 'train[:90%]', (('val', 'train[90%:]'),)
  assert fewshot.splits(config) == (None, 'train[:90%]', 'train[90%:]')
  config.fewshot.dataset = 'imagenet2012'
  assert fewshot.splits(config) == ('imagenet2012', 'train[:99%]', 'validation')
  config.fewshot.train = 'train[:5%]'
  assert fewshot.splits(config)[1:] == ('train[:5%]', 'validation')


def test_images_are_squeezed_and_cropped(tiny_config):
  assert fewshot.squeezed(tiny_config.pp, 8 / 7).resize == (9, 9)
  tiny_config.pp.crop = (224, 448)
  assert fewshot.squeezed(tiny_config.pp, 8 / 7).resize == (256, 512)
  assert tiny_config.pp.resize is None


@pytest.fixture
def probe(tiny_config, monkeypatch):
  """Probes with the mean grey of an image as its only feature."""
  tiny_config.fewshot.update(shots=(1, 3), seeds=(0, 5), squeeze=1.0)
  tiny_config.batch_eval = 8
  config = run_config.complete(tiny_config)
  with config.ignore_type():
    config.fewshot.layer = lambda params, extra, batch: batch['image']
  splits = {'train': [0, 5, 250, 10, 240, 230], 'test': [20, 220, 180, 90]}
  truth = {'train': [0, 0, 1, 0, 1, 1], 'test': [0, 1, 0, 0]}

  def open_split(config, split, wanted, *_):
    return records.MemorySource(
      {
        'image': [
          images.encode_png(np.full((8, 8, 3), value, np.uint8))
          for value in splits[split]
        ],
        'label': np.array(truth[split])[:, None],
      },
      {'label': ('dark', 'light')},
    )

  monkeypatch.setattr(sources, 'open_split', open_split)
  task = run_config.get_task('classify')(config, {'class_names': ['a', 'b']})
  return fewshot.FewShot(task, sharding.make_mesh({'data': 8}))


def test_the_accuracy_of_a_split(probe):
  # The third test image is light, and labelled as dark.
  assert probe.run({}, {}) == {'fewshot_1': 0.75, 'fewshot_3': 0.75}
  assert probe.accuracies({}, {}) == {1: [0.75] * 2, 3: [0.75] * 2}
  with pytest.raises(engine.Stopped):
    probe.run({}, {}, lambda: True)


def test_a_bar_on_a_terminal_drops_no_seed(probe, monkeypatch):
  """The bar is drawn on a pseudo-terminal after each probe."""
  controller, terminal = pty.openpty()
  termios.tcsetwinsize(terminal, (24, 80))
  os.set_blocking(controller, False)
  make_bar = cli.bar
  with open(terminal, 'w') as stderr:
    monkeypatch.setattr(sys, 'stderr', stderr)
    monkeypatch.setattr(
      cli,
      'bar',
      lambda **kwargs: make_bar(
        **{**kwargs, 'delay': 1e-9, 'mininterval': 0, 'miniters': 1}
      ),
    )
    assert probe.accuracies({}, {}) == {1: [0.75] * 2, 3: [0.75] * 2}
    assert b'Few-shot probes' in os.read(controller, 10_000)
  os.close(controller)
