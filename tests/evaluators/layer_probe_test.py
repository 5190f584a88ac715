"""Tests of probes of all layers, against scikit-learn and models by hand."""

import json

import jax
import numpy as np
import pytest
from sklearn import linear_model

from tests import tiny_models
from vit_jax.data import records
from vit_jax.data.images import images as images_lib
from vit_jax.distributed import sharding
from vit_jax.evaluators import features
from vit_jax.evaluators import layer_probe
from vit_jax.inference import engine
from vit_jax.run import config as run_config


def clusters(seed, count, width):
  """Features whose first two numbers tell three classes apart."""
  rng = np.random.RandomState(seed)
  labels = np.arange(count) % 3
  values = rng.randn(count, width)
  values[:, :2] += 2 * np.array([(0, 1), (1, -1), (-1, -1)])[labels]
  return values.astype(np.float32), labels


def test_accuracies_are_those_of_scikit_learn():
  known = {name: clusters(i, 90, 4 + i) for i, name in enumerate('ab')}
  asked = {name: clusters(9 + i, 300, 4 + i) for i, name in enumerate('ab')}
  labels, truth = known['a'][1].copy(), asked['a'][1].copy()
  labels[:3], truth[7] = -1, -1
  found = layer_probe.probe(
    {name: 100 * x + 5 for name, (x, _) in known.items()},
    labels,
    {name: 100 * x + 5 for name, (x, _) in asked.items()},
    truth,
    l2=0.01,
  )
  assert list(found) == ['a', 'b']
  for name, (x, _) in known.items():
    x = x[3:]
    length = np.sqrt(((x - x.mean(axis=0)) ** 2).sum(axis=1).mean())
    # Twice the inverse of the summed cross-entropy's share of the penalty.
    model = linear_model.LogisticRegression(C=1 / (0.01 * len(x)), tol=1e-6)
    model.fit((x - x.mean(axis=0)) / length, labels[3:])
    z = (asked[name][0] - x.mean(axis=0)) / length
    right = (model.predict(z) == truth)[truth >= 0]
    mean, std = found[name]
    assert mean == pytest.approx(right.mean(), abs=0.004)
    assert std == 0
    assert mean > 0.7


def test_draws_have_a_few_examples_of_each_class():
  labels = np.array([5, 2, 2, 5, -1, 2, 5, 5, 2, -1])
  draws = layer_probe.draw(labels, 2, 3, seed=4)
  for rows in draws:
    assert sorted(labels[rows]) == [2, 2, 5, 5]
    assert len(set(rows.tolist())) == 4
  assert len({tuple(sorted(rows)) for rows in draws}) > 1
  again = layer_probe.draw(labels, 2, 1, seed=6)
  assert again[0].tolist() == draws[2].tolist()
  [whole] = layer_probe.draw(labels, None, 1, seed=0)
  assert whole.tolist() == [0, 1, 2, 3, 5, 6, 7, 8]


@pytest.mark.parametrize(
  ('kwargs', 'message'),
  [
    ({'per_class': 3}, r'per_class=3 are more than the 2 .* of class 1: lower'),
    ({'per_class': 0}, 'per_class=0 must be 1 or more'),
    ({'draws': 0}, 'draws=0 must be 1 or more'),
  ],
)
def test_wrong_wishes(kwargs, message):
  x, labels = {'a': np.ones((5, 2))}, np.array([0, 1, 0, 1, 0])
  with pytest.raises(ValueError, match=message):
    layer_probe.probe(x, labels, x, labels, **kwargs)
  with pytest.raises(ValueError, match=r'the classes \[1\]: a probe needs two'):
    layer_probe.probe(x, np.array([1, -1, 1, -1, 1]), x, labels)


def test_spread_is_that_of_the_draws():
  (x, labels), (y, truth) = clusters(0, 60, 5), clusters(1, 99, 5)
  found = layer_probe.probe(
    {'x': x}, labels, {'x': y}, truth, per_class=2, draws=4, seed=3
  )
  each = []
  for seed in range(3, 7):
    one = layer_probe.probe(
      {'x': x}, labels, {'x': y}, truth, per_class=2, seed=seed
    )
    each.append(one['x'][0])
  assert found['x'] == pytest.approx((np.mean(each), np.std(each, ddof=1)))
  assert found['x'][1] > 0
  [row] = layer_probe.as_rows(found)
  assert row == {'layer': 'x', 'accuracy': found['x'][0], 'std': found['x'][1]}


@pytest.fixture
def task(tiny_config):
  tiny_config.pp.channels = 3
  tiny_config.update(batch=8, batch_eval=8)
  tiny_config.model.transformer.num_layers = 2
  config = run_config.complete(tiny_config)
  return run_config.get_task('classify')(config, {'class_names': list('abc')})


def shades(count, kept=(0, 1, 2), names='abc'):
  """Images of three shades of grey with some noise, labelled by the shade.

  Args:
    count: number of images of all shades.
    kept: numbers of the shades of which there are images, and hence classes.
    names: names of all shades.
  """
  rng = np.random.RandomState(count)
  labels = np.arange(count) % 3
  labels = labels[np.isin(labels, kept)]
  pixels = 90 * labels[:, None, None, None] + rng.randint(0, 40, (1, 8, 8, 3))
  encoded = [images_lib.encode_png(x.astype(np.uint8)) for x in pixels]
  numbers = np.searchsorted(kept, labels)
  columns = {'image': encoded, 'label': numbers[:, None]}
  return records.MemorySource(columns, {'label': [names[i] for i in kept]})


def test_classes_are_told_by_name(task):
  """The test images lack the class 'b', so that 'c' is their second one."""
  mesh = sharding.make_mesh({'data': 8})
  grey = lambda params, extra, batch, capture: {
    'a/layer_0': (batch['image'].mean(axis=(1, 2)),)
  }
  task.intermediates = grey
  evaluator = layer_probe.LayerProbe(
    task, mesh, None, shades(21), shades(12, kept=(0, 2)), per_class=2, draws=2
  )
  assert evaluator.run({}, {}) == {'probe_best': 1.0, 'probe_pixels': 1.0}
  with pytest.raises(ValueError, match=r"training images lack: \['d'\]"):
    layer_probe.LayerProbe(
      task, mesh, None, shades(21), shades(12, names='abd'), per_class=2
    )


def test_an_evaluation_probes_all_layers(task, tmp_path, capsys):
  mesh = sharding.make_mesh({'data': 8})
  train, test = shades(21), shades(12)

  def intermediates(params, extra, batch, capture):
    mean = batch['image'].mean(axis=(1, 2))  # [B, C]
    return {'b/layer_1': (3 * mean,), 'a/layer_0': (0 * mean,)}

  task.intermediates = intermediates
  evaluator = layer_probe.LayerProbe(
    task, mesh, tmp_path, train, test, per_class=2, draws=2
  )
  with pytest.raises(engine.Stopped):
    evaluator.run({}, {}, lambda: True)
  found = evaluator.run({}, {})
  rows = json.loads((tmp_path / 'probe.json').read_text())['layers']
  table = {row['layer']: row['accuracy'] for row in rows}
  # Shades can be told apart, and features that are all 0 cannot.
  assert table == {'layer_0': 1 / 3, 'layer_1': 1.0, 'pixels': 1.0}
  assert list(table) == ['layer_0', 'layer_1', 'pixels']
  assert found == {'probe_best': 1.0, 'probe_pixels': 1.0}
  lines = (tmp_path / 'probe.csv').read_text().splitlines()
  assert lines[0] == 'layer,accuracy'
  assert len(lines) == 4
  assert (tmp_path / 'probe.png').read_bytes()[1:4] == b'PNG'
  assert 'pixels      100.00 %' in capsys.readouterr().out


def test_what_an_evaluation_needs(task):
  mesh = sharding.make_mesh({'data': 8})
  bare = records.MemorySource({'image': [b'']}, {})
  with pytest.raises(ValueError, match='the test images .* have no labels'):
    layer_probe.LayerProbe(task, mesh, None, shades(3), bare)
  with pytest.raises(
    ValueError, match='per_class=10 are more than the 1 train'
  ):
    layer_probe.LayerProbe(task, mesh, None, shades(3), shades(3))
  task.intermediates = lambda *args: {}
  with pytest.raises(ValueError, match='sows no layer_0, layer_1'):
    layer_probe.LayerProbe(task, mesh, None, shades(3), shades(3))


def test_layers_are_means_of_the_inputs_of_blocks(task):
  """Layer 1 is what a model of one block has in front of its second norm."""
  x = tiny_models.images()
  params = tiny_models.numbers(task.model, 8)
  names = list(features.layers(task))
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  made = features.Extractor(task, mesh, ['layer_1', 'pixels', 'layer_0'])
  got = made.split(jax.jit(made.compute)(params, {}, {'image': x}))
  assert names == ['layer_0', 'layer_1', 'layer_2']
  np.testing.assert_array_equal(got['pixels'], x.reshape(2, -1))

  fields = dict(task.model.transformer)
  blocks = params['Transformer']

  def by_hand(count):
    model = task.model.clone(transformer={**fields, 'num_layers': count})
    norm = blocks[f'encoderblock_{count}']['LayerNorm_0']
    tree = {**blocks, 'encoder_norm': norm}
    return model.apply(
      {'params': {**params, 'Transformer': tree}},
      x,
      method=lambda m, x: m.encode(m.embed(x), train=False),
    ).mean(axis=1)

  for count in (0, 1):
    want = jax.jit(by_hand, static_argnums=0)(count)
    np.testing.assert_allclose(got[f'layer_{count}'], want, atol=1e-5)
