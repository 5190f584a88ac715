"""Tests of fine-tuning compared with training from scratch."""

import contextlib
import copy
import io
import json
import statistics

import numpy as np
import pytest
from sklearn import datasets as sklearn_datasets

from tests import conftest, looked_up
from vit_jax import predict, train
from vit_jax.configs import common, digits_transfer
from vit_jax.data import sources
from vit_jax.studies import runs as runs_lib, transfer


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


def make_config(data_dir):
  """Returns the config of the example, cut down to a few steps of a tiny model."""
  config = digits_transfer.get_config()
  assert config.pretrain.pp.crop < config.finetune.pp.crop
  for run in (config.pretrain, config.finetune, config.scratch):
    tiny = conftest.make_tiny_config(data_dir)
    run.tfds_data_dir = data_dir
    run.model = copy.deepcopy(tiny.model)
    run.update(batch=8, batch_eval=104, total_steps=2, warmup_steps=1, log_images=0)
    run.update(total_epochs=None, warmup_epochs=None)
  config.seeds = (0, 1)
  return config


@pytest.fixture
def config(data_dir):
  return make_config(data_dir)


@pytest.fixture(scope='module')
def finished(data_dir, tmp_path_factory):
  """A study: its folder, its result, and what it printed."""
  workdir = tmp_path_factory.mktemp('study')
  with contextlib.redirect_stdout(io.StringIO()) as out:
    result = transfer.transfer(make_config(data_dir), str(workdir))
  return workdir, result, out.getvalue()


def test_both_ways_and_what_is_left_behind(config, finished):
  tmp_path, result, out = finished
  assert json.loads((tmp_path / 'transfer.json').read_text()) == result
  tuned, scratch = ([row[f'seed_{seed}'] for seed in (0, 1)] for row in result[:2])
  means = [*(row['mean'] for row in result), result[0]['margin']]
  margin = (sum(tuned) - sum(scratch)) / 2
  assert means == pytest.approx([sum(tuned) / 2, sum(scratch) / 2, margin])
  assert result[1]['std'] == pytest.approx(statistics.stdev(scratch))
  rows = {line.split('  ')[0]: line for line in out.splitlines()}
  for name, value in zip(('fine-tuned', 'from scratch', 'fine-tuned'), means):
    assert f' {100 * value:.2f} ± ' in rows[name]
  for seed in (0, 1):
    run = predict.load(str(tmp_path / f'finetune_{seed}'))
    assert run.config.pp.train == f'few_{seed}'
    assert run.config.pretrained == str(tmp_path / 'pretrain')
    same = predict.load(str(tmp_path / f'scratch_{seed}'))
    assert same.config.pp == run.config.pp
    assert same.config.model == run.config.model
  # Again: all runs are finished, nothing is trained.
  before = sorted(tmp_path.rglob('*'))
  assert transfer.transfer(config, str(tmp_path)) == result
  assert [p for p in sorted(tmp_path.rglob('*')) if 'tfevents' not in p.name] == [
    p for p in before if 'tfevents' not in p.name
  ]


def test_weights_come_in_at_another_resolution(config, finished, tmp_path):
  """With a learning rate of 0, what is not interpolated or new is unchanged."""
  pretrained = str(finished[0] / 'pretrain')
  run = runs_lib.seeded(config.finetune, 0)
  run.update(pretrained=pretrained, base_lr=0.0)
  state, _ = train.train_and_evaluate(run, str(tmp_path / 'run'))
  before = predict.load(pretrained).params
  np.testing.assert_array_equal(
    state.params['embedding']['kernel'], before['embedding']['kernel']
  )
  tables = [
    p['Transformer']['posembed_input']['pos_embedding'] for p in (before, state.params)
  ]
  assert [t.shape[1] for t in tables] == [1 + 4 * 4, 1 + 6 * 6]
  np.testing.assert_allclose(tables[0][0, -1], tables[1][0, -1], atol=1e-6)
