"""Tests of studies whose runs are trained by several processes."""

import json
import shlex

import pytest
import tensorflow_datasets as tfds

from tests.studies import fake_training
from vit_jax.commands import hosts, train as command
from vit_jax.configs import common
from vit_jax.data.tfds import builders

STUDY = """
import ml_collections
from tests import processes
exec(processes.CONFIG)
get_base = get_config

def get_config():
  config = ml_collections.ConfigDict()
  config.trainer = 'study'
  config.base = get_base()
  config.base.update(
    total_steps=3, eval_every=0, checkpoint_every=0, log_images=0
  )
  config.variants = (
    ('slow', {'base_lr': 0.001, 'pp.train': 'train[:{seed}0%]'}),
    ('other', {'model': {**config.base.model, 'hidden_size': 8}}),
  )
  config.seeds = (5, 6)
  config.metric = 'accuracy_test'
  return config
"""


def test_machines_may_prepare_the_same_data_at_once(data_dir, monkeypatch):
  """TFDS raises an error on the later machine."""
  config = common.get_config()
  config.tfds_data_dir = data_dir
  dataset = 'digits'
  builders.get_builder(config, dataset)

  def late(builder, **kwargs):
    raise FileExistsError('Destination already exists')

  monkeypatch.setattr(tfds.core.DatasetBuilder, 'download_and_prepare', late)
  builder = builders._prepare(config, dataset)
  assert builder.info.splits['test'].num_examples == 360


@pytest.fixture
def study(tmp_path, data_dir, monkeypatch):
  """Runs the command of a study in a workdir, with further flags."""
  monkeypatch.setattr(hosts, 'run', lambda args, work: work())
  file = tmp_path / 'study.py'
  file.write_text(STUDY)

  def call(workdir, *words):
    command.main([
      f'--config={file}', f'--workdir={tmp_path}/{workdir}',
      f'--config.base.tfds_data_dir={data_dir}', *words,
    ])  # fmt: skip

  return call


def test_a_printed_command_trains_a_run_of_the_study(
  study, tmp_path, capsys, monkeypatch
):
  fake = fake_training.Fake(monkeypatch, lambda _: {'accuracy_test': 0.5})
  study('printed', '--print', '--config.seeds=5')
  lines = capsys.readouterr().out.splitlines()
  assert not (tmp_path / 'printed').exists()
  names = ['slow_5', 'other_5']
  for line, name in zip(lines, names, strict=True):
    assert shlex.split(line)[:2] == ['vit_jax', 'train']
    assert shlex.split(line)[-1] == f'--run={name}'
    command.main(shlex.split(line)[2:])
  study('whole', '--config.seeds=5')
  assert fake.trained == names * 2
  for name in names:
    printed, whole = (
      json.loads((tmp_path / folder / name / 'config.json').read_text())
      for folder in ('printed', 'whole')
    )
    assert printed == whole
  assert whole['model']['hidden_size'] == 8
  # The study finds them done.
  capsys.readouterr()
  study('printed', '--config.seeds=5')
  assert fake.trained == names * 2
  assert capsys.readouterr().out.count('already done') == 2
  assert (tmp_path / 'printed/study.json').exists()
  study('printed', '--config.seeds=5', '--print')
  assert not capsys.readouterr().out
  with pytest.raises(ValueError, match="run='slow_7' is not one of the runs slow_"):
    study('printed', '--run=slow_7')


def test_programs_with_dependent_runs_reject_run_flags():
  with pytest.raises(ValueError, match="trainer='transfer'.*--print and --run"):
    command.main(['--config=configs/digits_transfer.py', '--workdir=/w', '--run=a'])
