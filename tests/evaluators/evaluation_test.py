"""Tests of the splits on which a trained model is evaluated."""

import shutil

import pytest

from tests import conftest
from vit_jax import predict
from vit_jax.evaluators import evaluation


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


@pytest.mark.parametrize('form', ['mean', 'vectors'])
def test_measures_that_are_not_sums_and_weights_are_named(form, model, monkeypatch):
  def measure(params, extra, batch):
    return {'loss': 0.5 if form == 'mean' else (batch['mask'], batch['mask'])}

  monkeypatch.setattr(model.task, 'measure', measure, raising=False)
  with pytest.raises(ValueError, match=r"measure=.*'loss'.*pairs of .*\(sum, weight\)"):
    evaluation.evaluate(model, 'test')
