"""Tests with real processes: killed at any moment, they resume bit for bit."""

import re
import signal

import pytest

from tests import processes, trees
from vit_jax.run import checkpoints as checkpoints_lib, metrics as metrics_lib


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  return processes.write_config(tmp_path_factory.mktemp('config'))


@pytest.fixture(scope='module')
def reference(config, data_dir, tmp_path_factory):
  """A run that nothing disturbs: its folder and what it printed."""
  workdir = tmp_path_factory.mktemp('reference')
  status, output = processes.finish(
    config, workdir, '--config.checkpoint_every=20', data_dir=data_dir
  )
  assert status == 0, output
  return workdir, output


def test_what_a_user_sees(reference):
  workdir, output = reference
  lines = output.splitlines()
  assert not [line for line in lines if 'WARNING' in line or 'Traceback' in line]
  [first] = [line for line in lines if line.startswith('step  5/60')]
  assert 'loss' in first
  assert 'img/s' in first
  assert 'left' in first
  assert 'Computing in float32 with default attention.' in output
  assert 'Done in' in output
  for name in ('checkpoints', 'metrics.jsonl', 'tensorboard --logdir='):
    assert name in output
  assert f'vit_jax predict --workdir={workdir}' in output


_CHECKPOINTS = 'vit_jax.run.checkpoints'
# Where the clock of a kill starts, and the most that it then runs: see
# tests.forked.start. In this order: the first lives find no checkpoint.
KILLS = [
  ('start-up', 'vit_jax.run.workdir', 'create', 1, 0.02),
  ('first save', _CHECKPOINTS, '_Handler.finalize', 1, 0.01),
  ('deletion', _CHECKPOINTS, '_NewestAndBest.should_preserve', 2, 0.0),
  ('restore', _CHECKPOINTS, '_read', 1, 0.02),
  ('step', 'vit_jax.run.loop', 'Run.update', 8, 0.1),
  ('metrics', 'vit_jax.run.metrics', 'MetricsLog.write', 3, 0.0),
  ('save', _CHECKPOINTS, '_Handler.finalize', 2, 0.05),
]


def test_killed_at_many_moments_the_end_is_the_same(
  config, data_dir, reference, tmp_path
):
  workdir = tmp_path / 'run'
  outputs = ''
  for seed, kill in enumerate([*KILLS, None]):
    process = processes.start(
      config, workdir, '--config.checkpoint_every=3', data_dir=data_dir,
      kill=kill and (*kill[1:], seed),
    )  # fmt: skip
    outputs += process.communicate()[0]
    assert process.returncode == (-signal.SIGKILL if kill else 0), (
      kill, outputs,
    )  # fmt: skip
  assert 'Traceback' not in outputs
  assert 'Resuming from step' in outputs
  assert sorted(path.name for path in workdir.glob('*checkpoints')) == ['checkpoints']
  got, step = processes.load_state(workdir)
  want, last = processes.load_state(reference[0])
  assert step == last == 60
  trees.assert_same(got, want)
  ours, theirs = metrics_lib.read(workdir), metrics_lib.read(reference[0])
  assert [line['step'] for line in ours] == [line['step'] for line in theirs]
  for a, b in zip(ours, theirs):
    for key in ('train_loss', 'lr', 'accuracy_test', 'loss_test'):
      assert a.get(key) == b.get(key)


def test_a_full_disk_and_signals_stop_a_run_and_the_same_command_resumes(
  config, data_dir, reference, tmp_path
):
  # A file of more than 16 KiB cannot be written, as on a disk that is full.
  status, output = processes.finish(
    config, tmp_path, '--config.checkpoint_every=10', data_dir=data_dir,
    file_size=16 * 1024,
  )  # fmt: skip
  assert status == 1, output
  assert 'Error: a checkpoint could not be written to' in output
  assert 'File too large' in output
  assert 'Last complete step: none' in output
  assert output.splitlines()[-1].startswith('Error: ')
  checkpoints = checkpoints_lib.Checkpoints(tmp_path, read_only=True)
  assert not checkpoints.steps()
  # Checkpoints only at the end: what is there after a signal is its own.
  flags = ('--config.checkpoint_every=0', '--config.keep_checkpoints=1')
  before = 0
  for number in (signal.SIGTERM, signal.SIGINT):
    process = processes.start(config, tmp_path, *flags, data_dir=data_dir)
    for line in process.stdout:
      if re.match('step +[0-9]+/60 ', line):
        process.send_signal(number)
        break
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number, output
    assert 'Saved step' in output
    assert 'Traceback' not in output
    step = checkpoints.steps()[-1]
    assert before < step < 60
    before = step
  status, output = processes.finish(config, tmp_path, *flags, data_dir=data_dir)
  assert status == 0, output
  assert f'Resuming from step {step}.' in output
  assert not list((tmp_path / 'checkpoints').glob('*tmp*'))
  trees.assert_same(
    processes.load_state(tmp_path)[0], processes.load_state(reference[0])[0]
  )
