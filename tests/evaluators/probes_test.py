"""Tests of few-shot probes: choice of images, layers, accuracy."""

import json

import jax
import numpy as np
import pytest

from tests import evaluations
from vit_jax.data import records, sources
from vit_jax.data.images import images as images_lib
from vit_jax.distributed import sharding
from vit_jax.evaluators import probes
from vit_jax.inference import engine
from vit_jax.run import config as run_config


def test_chooses_the_same_examples_per_class():
  labels = np.array([0, 1, -1, 1, 0, 2, 0, 1, 2, 2, 2, 0])
  chosen = probes.choose(labels, 'abc', 3, seed=1)
  assert (labels[chosen] == np.arange(3)[:, None]).all()
  assert all(len(set(row)) == 3 for row in chosen.tolist())
  np.testing.assert_array_equal(probes.choose(labels, 'abc', 2, seed=1), chosen[:, :2])
  # The choice for a class does not depend on the others.
  other = np.where(labels == 2, 1, labels)
  np.testing.assert_array_equal(probes.choose(other, 'ab', 3, seed=1)[0], chosen[0])
  found = {tuple(probes.choose(labels, 'abc', 3, s)[0]) for s in range(20)}
  assert len(found) > 4


def test_classes_without_examples():
  labels, names = np.array([5, 2, 2, 5, -1, 2, 5, 5, 2, -1]), 'abcdef'
  chosen = probes.choose(labels, names, 2, seed=4, skip_empty=True)
  assert labels[chosen].tolist() == [[2, 2], [5, 5]]
  with pytest.raises(ValueError, match="0 examples of class 'a'"):
    probes.choose(labels, names, 2, seed=4)


def test_fewer_examples_than_shots():
  labels = np.array([0, 0, 0, 1, 1, -1])
  with pytest.raises(ValueError, match="shots=3 .* 2 examples of class 'bee'.*config.fewshot.shots"):  # fmt: skip
    probes.choose(labels, ('ant', 'bee'), 3, 0)
  with pytest.raises(ValueError, match=r"classes \['ant'\].*two"):
    probes.choose(labels, ('ant',), 1, 0)
  with pytest.raises(ValueError, match=r"classes \['bee'\].*two"):
    probes.choose(labels[3:], ('ant', 'bee'), 1, 0, skip_empty=True)


def test_splits(tiny_config):
  config = run_config.complete(tiny_config)
  assert probes.splits(config, config.fewshot) == (None, 'train', 'test')
  config.pp.train, config.evals = 'train[:90%]', (('val', 'train[90%:]'),)
  assert probes.splits(config, config.fewshot) == (None, 'train[:90%]', 'train[90%:]')
  config.fewshot.dataset = 'imagenet2012'
  assert probes.splits(config, config.fewshot) == (
    'imagenet2012',
    'train[:99%]',
    'validation',
  )
  config.fewshot.train = 'train[:5%]'
  assert probes.splits(config, config.fewshot)[1:] == ('train[:5%]', 'validation')


def test_images_are_squeezed_and_cropped(tiny_config):
  assert probes.squeezed(tiny_config.pp, None).resize == (9, 9)
  tiny_config.pp.crop = (224, 448)
  assert probes.squeezed(tiny_config.pp, 8 / 7).resize == (256, 512)
  tiny_config.pp.antialias = True  # As published weights say.
  assert probes.squeezed(tiny_config.pp, None) == tiny_config.pp
  assert probes.squeezed(tiny_config.pp, 1.5).resize == (336, 672)
  assert tiny_config.pp.resize is None


def grey(values, labels, names):
  """Images of one noisy grey value each, with labels."""
  rng = np.random.RandomState(0)
  pixels = np.add.outer(values, rng.randint(0, 6, (8, 8, 3)))
  encoded = [images_lib.encode_png(x.astype(np.uint8)) for x in pixels]
  columns = {'image': encoded, 'label': np.array(labels)[:, None]}
  return records.MemorySource(columns, {'label': names})


@pytest.fixture
def task(tiny_config):
  """A classifier whose layer 0 is 0 and whose layer 1 is the mean grey."""
  tiny_config.pp.channels = 3
  tiny_config.update(batch=8, batch_eval=8, layer_probe=2)
  tiny_config.fewshot.update(shots=(1, 3), seeds=(0, 5), squeeze=1.0)
  config = run_config.complete(tiny_config)
  task = run_config.get_task('classify')(config, {'class_names': list('abc')})

  def intermediates(params, extra, batch, capture):
    mean = batch['image'].mean(axis=(1, 2))  # [B, C]
    return {'b/layer_1': (mean,), 'a/layer_0': (0 * mean,), 'features': (mean,)}

  task.intermediates = intermediates
  return task


@pytest.fixture
def splits(monkeypatch):
  """Sources by split name: two classes with 3 training images each.

  The third test image is light, but labelled as dark.
  """
  names = ('dark', 'light')
  opened = {
    'train': grey([0, 5, 240, 10, 230, 220], [0, 0, 1, 0, 1, 1], names),
    'test': grey([20, 220, 180, 90], [0, 1, 0, 0], names),
  }
  monkeypatch.setattr(
    sources, 'open_split', lambda config, split, *_, **__: opened[split]
  )
  return opened


@pytest.fixture
def mesh():
  return sharding.make_mesh({'data': 1}, jax.devices()[:1])


def few_shot(task, mesh):
  return probes.FewShot(evaluations.evaluation(task, mesh), **task.config.fewshot)


def test_accuracy_on_a_split(task, splits, mesh):
  probe = few_shot(task, mesh)
  accuracies = probe.accuracies(probe.extract({}, {}, all_images=False))
  assert accuracies == {'features': {1: [0.75] * 2, 3: [0.75] * 2}}
  assert probe.accuracies(probe.extract({}, {}, all_images=True)) == accuracies
  with pytest.raises(engine.Stopped):
    probe.run({}, {}, lambda: True)
  probe.accuracies = lambda *_: {'features': {1: [0.5, 1.0], 3: [0.25] * 2}}
  assert probe.run({}, {}) == {'fewshot_1': 0.75, 'fewshot_3': 0.25}


def test_classes_are_matched_by_name(task, splits, mesh):
  """The test images lack the first class, so 'light' comes first."""
  task.config.fewshot.update(shots=(2,), knn=(3,))
  splits['test'] = grey([250, 220, 230], [0, 0, 0], ('light',))
  assert few_shot(task, mesh).run({}, {}) == {'fewshot_2': 1.0, 'knn_3': 1.0}
  task.config.fewshot.shots = ()
  assert few_shot(task, mesh).run({}, {}) == {'knn_3': 1.0}
  splits['test'] = grey([250, 0], [1, 0], ('black', 'light'))
  with pytest.raises(ValueError, match=r"\['black'\]"):
    few_shot(task, mesh)


def test_classes_of_the_same_name_are_matched_by_place():
  match = probes.class_numbers
  names = 'crane', 'cat', 'crane'
  assert match(names, names).tolist() == [0, 1, 2, -1]
  assert match(('b', 'a'), ('a', 'b', 'c')).tolist() == [1, 0, -1]
  with pytest.raises(ValueError, match="several classes .* named 'crane'"):
    match(('cat', 'crane'), names)


def test_an_evaluation_probes_all_layers(task, splits, mesh, tmp_path, capsys):
  splits['test'] = grey([20, 220, 180, 90], [0, 1, 1, 0], ('dark', 'light'))
  probe = probes.LayerProbe(evaluations.evaluation(task, mesh, workdir=tmp_path), 2)
  assert probe.final
  found = probe.run({}, {})
  rows = json.loads((tmp_path / 'probe.json').read_text())['layers']
  table = {row['layer']: row['accuracy'] for row in rows}
  # Shades are separable; features that are all 0 are not.
  assert table == {'layer_0': 0.5, 'layer_1': 1.0, 'pixels': 1.0}
  assert list(table) == ['layer_0', 'layer_1', 'pixels']
  assert found == {'probe_best': 1.0, 'probe_pixels': 1.0}
  assert 'pixels      100.00 %' in capsys.readouterr().out
  assert (tmp_path / 'probe.png').read_bytes()[1:4] == b'PNG'
  # The standard deviation over seeds.
  draws = {'layer_0': [0.5, 0.7], 'layer_1': [0.5] * 2, 'pixels': [0.25, 0.75]}
  probe.accuracies = lambda *_: {name: {2: x} for name, x in draws.items()}
  assert probe.run({}, {}) == {'probe_best': pytest.approx(0.6), 'probe_pixels': 0.5}
  for row in json.loads((tmp_path / 'probe.json').read_text())['layers']:
    assert row['std'] == pytest.approx(np.std(draws[row['layer']], ddof=1))
  assert 'layer_0      60.00 % ± 14.14  best layer\n' in capsys.readouterr().out


def test_layer_probe_requirements_are_named(task, splits, mesh):
  with pytest.raises(ValueError, match='shots=4 .* 3 examples'):
    probes.LayerProbe(evaluations.evaluation(task, mesh), 4)
  task.intermediates = lambda *args: {}
  with pytest.raises(ValueError, match='layer_0, layer_1'):
    probes.LayerProbe(evaluations.evaluation(task, mesh), 4)
