"""Tests of studies whose runs are trained by several processes."""

import itertools
import json
import shlex

import pytest
import tensorflow_datasets as tfds

from tests import forked, processes
from tests.studies import fake_training
from vit_jax.commands import hosts, train as command
from vit_jax.configs import common
from vit_jax.data.tfds import builders

# A machine that shares a sweep. No machine finishes its first run before all have
# started one.
MACHINE = """
import pathlib, sys, time
import pytest
from tests.studies import fake_training
from vit_jax import __main__ as program
from vit_jax.run import config as run_config
from vit_jax.studies import runs
runs._PAUSE = 0.2
me, place, count = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
def measure(config):
  [(name, *_)] = run_config.evaluations(config)
  print('TRAINS', fake.trained[-1], flush=True)
  (place / f'begun_{me}').touch()
  while len(list(place.glob('begun_*'))) < count:
    time.sleep(0.05)
  time.sleep(0.2)
  return {
    f'accuracy_{name}': 0.5 + config.base_lr, f'loss_{name}': config.seed
  }
fake = fake_training.Fake(pytest.MonkeyPatch(), measure)
program.run('sweep', sys.argv[4:])
"""

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


def test_machines_share_a_sweep(tmp_path):
  words = [
    f'--config={processes.write_config(tmp_path)}',
    f'--workdir={tmp_path}/sweep', '--held_out=10%', '--seeds=2',
    '--values=config.base_lr=.001,.03,.01', '--nodistributed',
  ]  # fmt: skip
  machines = [
    forked.start_code(
      MACHINE, [str(me), str(tmp_path), '2', *words], processes._environment(1)
    )
    for me in range(2)
  ]
  outputs = [machine.communicate()[0] for machine in machines]
  assert [machine.returncode for machine in machines] == [0, 0], outputs
  trained = [
    [line.split()[1] for line in output.splitlines() if 'TRAINS' in line]
    for output in outputs
  ]
  assert all(trained)
  assert sorted(itertools.chain(*trained)) == [
    'base_lr=0.001', 'base_lr=0.01', 'base_lr=0.03',
    'base_lr=0.03,test_0', 'base_lr=0.03,test_1',
  ]  # fmt: skip
  tables = [
    output.split('Choice:\nbase_lr')[1].split('  table')[0]
    + output.split('Mean and standard deviation')[1]
    for output in outputs
  ]
  assert tables[0] == tables[1]
  assert 'accuracy_test (%)  53.00 ± 0.00  53.00 53.00' in tables[0]


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
