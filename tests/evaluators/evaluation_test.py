"""Tests of the splits on which a trained model is evaluated."""

import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import conftest, evaluations
from vit_jax import predict
from vit_jax.distributed import sharding
from vit_jax.evaluators import base, evaluation, means, report
from vit_jax.inference import engine
from vit_jax.run import metrics


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  """A run on the class folders of a data set without test images, not trained."""
  folder = tmp_path_factory.mktemp('data')
  conftest.make_folder(folder / 'images', (10,), splits=('whole',))
  for path in (folder / 'images' / 'whole').iterdir():
    path.rename(folder / 'images' / path.name)
  (folder / 'images' / 'whole').rmdir()
  config = conftest.make_tiny_config(None)
  config.dataset = str(folder / 'images')
  config.pp.update(train='.[:90%]', test='.[90%:]')
  conftest.write_classifier(folder / 'run', config, ['ant', 'bee', 'cow'])
  return predict.load(str(folder / 'run'))


def test_name_of_an_evaluation_stands_for_its_split(model, capsys):
  by_name = evaluation.evaluate(model, 'test')
  assert "split '.[90%:]'" in capsys.readouterr().out
  by_split = evaluation.evaluate(model, '.[90%:]')
  assert by_name['num_examples'] == by_split['num_examples'] == 3
  assert by_name['loss'] == by_split['loss']


def test_missing_split_is_reported_with_the_flags_of_the_command(model):
  with pytest.raises(
    FileNotFoundError, match=r"--split='\.\[90%:\]'.*--dataset"
  ) as error:
    evaluation.evaluate(model, 'val')
  assert '--config' not in str(error.value)
  with pytest.raises(
    FileNotFoundError, match=r"no split 'test'.*--split=SPLIT"
  ) as error:
    evaluation.evaluate(model, 'test', dataset=model.config.dataset)
  assert '--config' not in str(error.value)


def test_split_of_the_data_comes_before_the_name_of_an_evaluation(
  model, tmp_path, monkeypatch
):
  shutil.copytree(model.config.dataset, tmp_path / 'test')
  monkeypatch.setitem(model.config, 'dataset', str(tmp_path))
  assert evaluation.evaluate(model, 'test')['num_examples'] == 30


def test_evaluators_share_a_pass_and_the_outputs(model, monkeypatch, tmp_path):
  alone = evaluation.evaluate(model, 'test')
  passes = []
  split_alone = engine.split

  def split(task, source, *args):
    passes.append(source)
    return split_alone(task, source, *args)

  monkeypatch.setattr(engine, 'split', split)
  names = {'balanced_accuracy', 'kappa'}
  both = evaluation.evaluate(model, 'test', predictions=str(tmp_path / 'test.csv'))
  assert len(passes) == 1
  assert names < both.keys() - alone.keys()
  assert both['loss'] == pytest.approx(alone['loss'], rel=1e-6)


def test_the_outputs_of_a_shared_pass_are_computed_once(model):
  mesh = sharding.mesh_of(model.params)
  data = evaluations.evaluation(model.task, mesh)
  batch = {
    name: jnp.zeros(spec.shape, spec.dtype)
    for name, spec in model.task.batch_spec(8).items()
  }
  batch |= {'mask': jnp.ones(8), 'index': jnp.arange(8)}

  def flops(*evaluators):
    shared = base.Pass(data, [cls(data) for cls in evaluators])
    with jax.set_mesh(mesh):
      compiled = shared.program.lower(model.params, {}, batch).compile()
    return compiled.cost_analysis()['flops']

  single = flops(means.Means)
  assert single < flops(means.Means, report.Report) < 1.1 * single


class Number(base.BatchEvaluator):
  """Returns a number under a name, and what a batch had."""

  metrics = types.MappingProxyType({'number': metrics.Metric()})

  def compute(self, params, extra, batch):
    return batch.pop('mask').sum()

  def finish(self, results):
    return {'number': float(sum(results))}


class WithRun(Number):
  def run(self, params, extra, stop):
    return {'number': 5.0}


class WithoutSuper(Number):
  def __init__(self, evaluation):
    pass


def test_only_evaluators_that_look_at_each_batch_once_share(model):
  mesh = sharding.mesh_of(model.params)
  data, other_data = (evaluations.evaluation(model.task, mesh) for _ in range(2))
  first, second, alone, other = (
    Number(data),
    Number(data),
    WithRun(data),
    Number(other_data),
  )
  shared, *rest = base.sharing_passes(data, [alone, first, other, second])
  assert isinstance(shared, base.Pass)
  assert rest == [alone, other]
  assert base.sharing_passes(data, [alone]) == [alone]
  with pytest.raises(ValueError, match=r'WithoutSuper.*super\(\).__init__\(evaluation'):
    base.sharing_passes(data, [first, WithoutSuper(data)])


def test_values_of_a_pass_have_different_names_and_count_images(model, monkeypatch):
  data = evaluations.evaluation(model.task, sharding.mesh_of(model.params))
  batches = [
    {'mask': np.array([1, 1, 0], np.float32)}, {'mask': np.ones(3, np.float32)}
  ]  # fmt: skip
  monkeypatch.setattr(engine, 'split', lambda *args: map(args[3], batches))
  found = Number(data).run({}, {})
  assert (found['number'], found['num_examples']) == (5, 5)
  with pytest.raises(ValueError, match=r"Number.finish: another .*\['number'\]"):
    base.Pass(data, [Number(data), Number(data)]).run({}, {})
  batches[:] = []
  with pytest.raises(ValueError, match="split='test' has no images"):
    Number(data).run({}, {})


@pytest.mark.parametrize('form', ['mean', 'vectors'])
def test_measures_that_are_not_sums_and_weights_are_named(form, model, monkeypatch):
  def measure(params, extra, batch):
    return {'loss': 0.5 if form == 'mean' else (batch['mask'], batch['mask'])}

  monkeypatch.setattr(model.task, 'measure', measure, raising=False)
  with pytest.raises(ValueError, match=r"measure=.*'loss'.*pairs of .*\(sum, weight\)"):
    evaluation.evaluate(model, 'test')
