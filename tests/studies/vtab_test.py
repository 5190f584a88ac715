"""Tests of the VTAB-1k program: missing data, the table, resuming."""

import json
import re
import shutil
import statistics

import numpy as np
import pytest

from tests import conftest, tiny_models, vtab_data
from tests.studies import fake_training
from vit_jax import train
from vit_jax.configs import common, vtab as vtab_config
from vit_jax.data.tfds import vtab as data, vtab_tasks
from vit_jax.studies import runs as runs_lib, vtab


@pytest.fixture
def config(tmp_path):
  """The config with a tiny model and two steps, without data."""
  config = vtab_config.get_config('testing')
  tiny = conftest.make_tiny_config(str(tmp_path / 'tfds'))
  config.run.model = tiny_models.config()
  config.run.model.patches.size = (4, 4)
  config.run.tfds_data_dir = tiny.tfds_data_dir
  config.run.pretrained_dir = None
  config.run.pp.crop = 8
  config.run.update(
    batch=16, batch_eval=24, total_steps=2, warmup_steps=1, log_images=0
  )
  config.checkpoints = 'none'
  return config


def test_tasks_with_data_are_trained_and_compared(
  config, tmp_path, monkeypatch, capsys
):
  def measure(run):
    prepared = train.prepare(run)
    assert prepared.train.num_examples == 1000
    [test] = prepared.tests.values()
    return {'accuracy_test': 6 / test.num_examples}

  fake_training.Fake(monkeypatch, measure)
  here = config.run.tfds_data_dir
  # The smallest sizes that VTAB allows.
  sizes = {'train': 800, 'validation': 200, 'test': 24}
  vtab_data.write('kitti', here, sizes)
  workdir = str(tmp_path / 'vtab')
  result = vtab.vtab(config, workdir)
  out = capsys.readouterr().out
  assert '18 of 19 tasks are left out' in out
  assert '--config.download=True' in out
  assert f"  svhn: 'svhn_cropped' is not in {here}/svhn_cropped" in out
  assert "  clevr_count, clevr_distance: 'clevr' is not in" in out
  assert 'resisc45: ' in out
  assert 'downloaded by hand: Dataset can be downloaded from OneDrive' in out
  assert {'kitti_distance', *result['skipped']} == set(vtab_tasks.TASKS)
  rows = {(row['group'], row['task']): row for row in result['rows']}
  kitti = rows['structured', 'kitti_distance']
  assert kitti['mean'] == kitti['seed_0'] == 0.25
  assert rows['natural', 'dtd']['mean'] is None
  assert rows['specialised', '0 of 4']['H/14 JFT'] is None
  # Means are over the available tasks, including the paper's.
  for name in ('all', '1 of 19'), ('structured', '1 of 8'):
    assert rows[name]['mean'] == kitti['mean']
    assert rows[name]['H/14 JFT'] == pytest.approx(0.845)
  line = rf'all \(1 of 19\) +{100 * kitti["mean"]:.2f} +84.50 +82.20 +79.90'
  assert re.search(line, out)
  stored = json.loads((tmp_path / 'vtab/vtab.json').read_text())
  assert stored == result['rows']
  # A second call finds the run finished and needs no data.
  shutil.rmtree(here)
  again = vtab.vtab(config, workdir)
  assert 'already done' in capsys.readouterr().out
  assert again['rows'] == result['rows']
  assert again['skipped'].keys() == result['skipped'].keys()


def test_stops_before_creating_a_workdir_without_data(config, tmp_path):
  with pytest.raises(
    FileNotFoundError, match='no task of VTAB has data.*tfds_data_dir'
  ):
    vtab.vtab(config, str(tmp_path / 'vtab'))
  assert not (tmp_path / 'vtab').exists()


def test_downloads_missing_data_on_request(config, monkeypatch, tmp_path, capsys):
  prepared = []

  def prepare(run, dataset):
    prepared.append(dataset)
    if dataset == 'dtd':
      raise ValueError('the server is away')
    vtab_data.write('kitti', run.tfds_data_dir, {'train': 1})

  monkeypatch.setattr(data, 'lacking', lambda task: '')
  monkeypatch.setattr(data.builders, 'get_builder', prepare)
  config.tasks = ('dtd', 'kitti_distance')
  config.download = True
  runs = {task: vtab.runs_of(config, task) for task in config.tasks}
  assert vtab.skipped_tasks(config, runs, set()) == {'dtd': 'the server is away'}
  assert prepared == ['dtd', 'kitti']
  out = capsys.readouterr().out
  assert '1 of 2 tasks are left out' in out
  assert '--config.download' not in out


def test_a_task_without_data_is_left_to_other_machines(config, monkeypatch, tmp_path):
  """The table includes their results."""
  fake = fake_training.Fake(monkeypatch, lambda run: {'accuracy_test': 0.5})
  config.update(tasks=('dtd', 'svhn'), seeds=(0, 1))
  run, _ = vtab.runs_of(config, 'svhn')
  runs_lib.train_all([run], tmp_path)
  lacking = lambda run, dataset: 'why' if dataset == 'vtab/svhn' else ''
  monkeypatch.setattr(data, 'missing', lacking)
  found = vtab.vtab(config, str(tmp_path))
  assert fake.trained == ['svhn_0', 'dtd_0', 'dtd_1']
  assert found['skipped'] == {'svhn': 'why'}
  svhn = found['rows'][-1]
  assert (svhn['task'], svhn['seed_0'], svhn['seed_1']) == ('svhn', 0.5, None)
  # A mean is over the same tasks for all seeds.
  [both] = [row for row in found['rows'] if row['task'] == '2 of 19']
  assert (both['seed_0'], both['seed_1']) == (0.5, None)


def test_every_task_has_the_settings_of_the_paper():
  """Table 4: steps, batch, rate, decay; and augmentation that keeps labels."""
  assert set(common.VTAB) == set(vtab_tasks.TASKS)
  config = vtab_config.get_config('l16')
  config.seeds = (3,)
  for task in vtab_tasks.TASKS:
    [run] = vtab.runs_of(config, task)
    assert run.name == f'{task}_3'
    run = run.config
    assert (run.dataset, run.seed) == (f'vtab/{task}', 3)
    assert (run.total_steps, run.warmup_steps, run.batch) == (2500, 500, 512)
    assert (run.optimizer, run.momentum, run.base_lr) == ('sgd', 0.9, 0.01)
    assert (run.decay_type, run.grad_norm_clip) == ('cosine', 1)
    assert (run.weight_decay, run.ema_decay, run.pp.resize) == (0, 0, None)
    assert (run.pp.crop, run.pp.train, run.pp.test) == (
      384, 'train800val200', 'test',
    )  # fmt: skip
    if run.pp.crop_area is not None:
      assert run.pp.crop_area == (pytest.approx(0.7347, abs=1e-4),) * 2
      assert run.pp.crop_ratio is None
  augmented = {
    task: (run.pp.crop_area is not None, run.pp.flip)
    for task in vtab_tasks.TASKS
    for run in [vtab.runs_of(config, task)[0].config]
  }
  unchanged = [task for task, pair in augmented.items() if pair == (False, False)]  # fmt: skip
  assert unchanged == [
    'dsprites_x_position', 'dsprites_orientation', 'smallnorb_azimuth'
  ]  # fmt: skip
  assert augmented['svhn'] == (True, False)
  assert augmented['clevr_count'] == (False, True)
  assert sum(pair == (True, True) for pair in augmented.values()) == 10
  config.validate = True
  [run] = vtab.runs_of(config, 'dtd')
  assert run.name == 'dtd_val_3'
  assert (run.config.pp.train, run.config.pp.test) == ('train800', 'val200')


def test_published_tables_agree():
  """The means of table 9 match table 2, which has one more digit."""
  for model, accuracies in vtab.PUBLISHED.items():
    assert list(accuracies) == list(vtab_tasks.TASKS)
    mean = np.mean(list(accuracies.values()))
    assert mean == pytest.approx(vtab_config.MEANS[model], abs=0.011)


def test_the_table_of_all_tasks_over_two_seeds(config, tmp_path, capsys):
  config.seeds = (0, 1)
  published = vtab.PUBLISHED['L/16 I21k']
  accuracies = {
    task: {0: value / 100, 1: value / 100 + 0.01} for task, value in published.items()
  }
  rows = vtab.report(config, accuracies, str(tmp_path))
  by_task = {row['task']: row for row in rows}
  row = by_task['19 of 19']
  assert row['mean'] == pytest.approx(0.7271 + 0.005, abs=1e-4)
  assert row['std'] == pytest.approx(statistics.stdev((0, 0.01)))
  assert by_task['7 of 7']['L/16 I21k'] == pytest.approx(0.8327, abs=1e-4)
  assert by_task['svhn']['seed_1'] == pytest.approx(0.819)
  assert [row['task'] for row in rows if row['task'] not in published] == [
    '19 of 19', '7 of 7', '4 of 4', '8 of 8',
  ]  # fmt: skip
  out = capsys.readouterr().out
  assert 'all (19)  ' in out
  assert '73.21 ± 0.71' in out
  assert 'BiT-L 76.29' in out
  config.validate = True  # The paper has no accuracies on these images.
  rows = vtab.report(config, accuracies, str(tmp_path))
  assert 'L/16 I21k' not in rows[0]
  assert json.loads((tmp_path / 'vtab_val.json').read_text()) == rows
  assert 'L/16' not in capsys.readouterr().out


@pytest.mark.parametrize('changes, message', [
  ({'tasks': ('svnh',)}, r"tasks='svnh'.* 'vtab/svhn'\?.*config.t"),
  ({'sedes': (0,)}, "no key 'sedes': did you mean 'seeds'"),
  ({'run.evals': (('x', 'test'),)}, "'accuracy_test' is not among|evals="),
])  # fmt: skip
def test_a_wrong_config_is_rejected_first(config, changes, message, tmp_path):
  for key, value in changes.items():
    tiny_models.put(config, key, value)
  with pytest.raises(ValueError, match=message):
    vtab.vtab(config, str(tmp_path / 'vtab'))
  assert not (tmp_path / 'vtab').exists()
