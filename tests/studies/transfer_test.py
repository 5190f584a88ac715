"""Tests of fine-tuning compared with training from scratch."""

import json

import numpy as np
import pytest
from sklearn import datasets as sklearn_datasets

from tests import conftest, looked_up
from tests.studies import fake_training
from vit_jax import predict, train
from vit_jax.configs import common, digits_transfer
from vit_jax.data import sources
from vit_jax.studies import study


def labels_of(dataset, split, data_dir):
  config = common.set_dataset(common.get_config(), dataset)
  config.tfds_data_dir = data_dir
  source = sources.open_split(config, split)
  records = looked_up.features(source)
  return source.class_names, np.stack(records['label'])[:, 0], records['image']


def test_classes_and_labels_of_the_digits(data_dir):
  target = sklearn_datasets.load_digits().target
  names, train_labels, _ = labels_of('digits/0to4', 'train', data_dir)
  _, test_labels, _ = labels_of('digits/0to4', 'test', data_dir)
  assert names == ('0', '1', '2', '3', '4')
  assert len(train_labels) + len(test_labels) == np.sum(target < 5)
  assert np.bincount(train_labels).min() > 120
  seen, total = [], 0
  for split in ('few_0', 'few_1', 'few_2', 'test'):
    names, labels, images = labels_of('digits/5to9_few', split, data_dir)
    assert names == ('5', '6', '7', '8', '9')
    if split != 'test':
      assert np.bincount(labels).tolist() == [5] * 5
    total += len(labels)
    seen += images
  assert total == np.sum(target >= 5)
  assert len(set(seen)) > 0.99 * total  # No image is in two splits.


@pytest.fixture(scope='module')
def config(data_dir):
  """The example config, reduced to two steps of a tiny model."""
  config = digits_transfer.get_config()
  assert config.pretrain.pp.crop < config.finetune.pp.crop
  for run in (config.pretrain, config.finetune, config.scratch):
    run.tfds_data_dir = data_dir
    run.model = conftest.make_tiny_config(data_dir).model
    run.update(batch=8, batch_eval=104, total_steps=2, warmup_steps=1, log_images=0)
    run.update(total_epochs=None, warmup_epochs=None)
  config.seeds = (0, 1)
  return config


@pytest.fixture(scope='module')
def finished(config, tmp_path_factory):
  """A study without training: workdir, rows and configs of its runs."""
  workdir = tmp_path_factory.mktemp('study')
  values = {
    'pretrain': 1.0, 'finetune_0': 0.3, 'finetune_1': 0.5, 'scratch_0': 0.1,
    'scratch_1': 0.4,
  }  # fmt: skip
  with pytest.MonkeyPatch.context() as patch:
    fake = fake_training.Fake(
      patch, lambda _: {'accuracy_test': values[fake.trained[-1]]}
    )
    conftest.write_classifier(workdir / 'pretrain', config.pretrain, '01234')
    rows = study.transfer(config, str(workdir))
  return workdir, rows, fake.configs


def test_fine_tuning_and_scratch_use_the_same_labels(
  config, finished, monkeypatch, capsys
):
  workdir, rows, configs = finished
  assert json.loads((workdir / 'transfer.json').read_text()) == rows
  tuned, scratch = rows
  assert (tuned['seed_0'], tuned['seed_1']) == (0.3, 0.5)
  assert (scratch['seed_0'], scratch['seed_1']) == (0.1, 0.4)
  assert tuned['margin'] == pytest.approx(0.15)
  tuned, scratch = configs['finetune_1'], configs['scratch_1']
  assert tuned.pp.train == scratch.pp.train == 'few_1'
  assert tuned.pretrained == str(workdir / 'pretrain')
  assert (tuned.pp, tuned.model) == (scratch.pp, scratch.model)
  # A second call finds all runs finished.
  monkeypatch.setattr(train, 'train_and_evaluate', None)
  assert study.transfer(config, str(workdir)) == rows
  assert 'from scratch  25.00 ± 21.21' in capsys.readouterr().out


def test_weights_are_loaded_at_another_resolution(finished, tmp_path):
  """Weights that are neither interpolated nor new are unchanged."""
  workdir, _, configs = finished
  before = predict.load(str(workdir / 'pretrain')).params
  prepared = train.prepare(configs['finetune_0'])
  weights = train.check_start(prepared, tmp_path / 'run')
  after = prepared.program.create_state(weights).params
  np.testing.assert_array_equal(
    after['embedding']['kernel'], before['embedding']['kernel']
  )
  tables = [
    p['Transformer']['posembed_input']['pos_embedding'] for p in (before, after)
  ]
  assert [t.shape[1] for t in tables] == [1 + 4 * 4, 1 + 6 * 6]
  np.testing.assert_allclose(tables[0][0, -1], tables[1][0, -1], atol=1e-6)
  assert not np.any(after['head']['kernel'])
