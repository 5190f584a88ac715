"""Tests that killed processes resume with bit-identical results."""

import signal

import pytest

from tests import processes, trees
from vit_jax.run import checkpoints as checkpoints_lib, metrics as metrics_lib

STEPS = '--config.total_steps=45'


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  return processes.write_config(tmp_path_factory.mktemp('config'))


@pytest.fixture(scope='module')
def reference(config, data_dir, tmp_path_factory):
  """An uninterrupted run: its workdir and its output."""
  workdir = tmp_path_factory.mktemp('reference')
  status, output = processes.finish(
    config, workdir, STEPS, '--config.checkpoint_every=20', data_dir=data_dir
  )
  assert status == 0, output
  return workdir, output


def test_console_output(reference):
  workdir, output = reference
  lines = output.splitlines()
  assert not [line for line in lines if 'WARNING' in line or 'Traceback' in line]
  [first] = [line for line in lines if line.startswith('step  5/45')]
  assert 'loss' in first
  assert 'img/s' in first
  assert 'left' in first
  assert 'Computing in float32 with default attention.' in output
  assert 'Done in' in output
  for name in ('checkpoints', 'metrics.jsonl', 'tensorboard --logdir='):
    assert name in output
  assert f'vit_jax predict --workdir={workdir}' in output


_CHECKPOINTS = 'vit_jax.run.checkpoints'
# Each start of the run: the signal that ends it, the call that starts its timer, and
# the maximum delay (see tests.forked.start). The first ones find no checkpoint.
LIVES = [
  (signal.SIGKILL, 'vit_jax.run.workdir', 'create', 1, 0.02),
  (signal.SIGKILL, _CHECKPOINTS, '_Handler.finalize', 1, 0.01),  # The first save.
  (signal.SIGKILL, _CHECKPOINTS, '_NewestAndBest.should_preserve', 2, 0.0),  # Deletes.
  (signal.SIGINT, 'vit_jax.run.loop', 'Run.update', 5, 0.0),
  (signal.SIGKILL, 'vit_jax.run.metrics', 'MetricsLog.write', 3, 0.0),
  (signal.SIGKILL, _CHECKPOINTS, '_Handler.finalize', 2, 0.05),
]


def test_run_killed_at_many_points_gives_the_same_result(
  config, data_dir, reference, tmp_path
):
  workdir = tmp_path / 'run'
  checkpoints = checkpoints_lib.Checkpoints(workdir, read_only=True)
  outputs = ''
  for seed, (number, *moment) in enumerate(LIVES):
    status, output = processes.finish(
      config, workdir, STEPS, '--config.checkpoint_every=3', data_dir=data_dir,
      kill=(number, *moment, seed),
    )  # fmt: skip
    outputs += output
    stopped = number == signal.SIGINT
    assert status == (128 + number if stopped else -number), (moment, outputs)
    if stopped:
      step = checkpoints.steps()[-1]
      assert f'Saved step {step} ' in output
    if seed == 0:
      check_full_disk(config, workdir, data_dir)
  status, output = processes.finish(
    config, workdir, STEPS, '--config.checkpoint_every=3', data_dir=data_dir
  )
  assert status == 0, output
  assert f'Resuming from step {step}.' in outputs
  assert 'Traceback' not in outputs + output
  assert sorted(path.name for path in workdir.glob('*checkpoints')) == ['checkpoints']
  assert not list((workdir / 'checkpoints').glob('*tmp*'))
  got, step = processes.load_state(workdir)
  want, last = processes.load_state(reference[0])
  assert step == last == 45
  trees.assert_same(got, want)
  ours, theirs = metrics_lib.read(workdir), metrics_lib.read(reference[0])
  assert [line['step'] for line in ours] == [line['step'] for line in theirs]
  for a, b in zip(ours, theirs):
    for key in ('train_loss', 'lr', 'accuracy_test', 'loss_test'):
      assert a.get(key) == b.get(key)


def check_full_disk(config, workdir, data_dir):
  """Checks that a run without checkpoints reports a full disk."""
  # Files are limited to 16 KiB.
  status, output = processes.finish(
    config, workdir, '--config.checkpoint_every=10', data_dir=data_dir,
    file_size=16 * 1024,
  )  # fmt: skip
  assert status == 1, output
  assert 'Error: a checkpoint could not be written to' in output
  assert 'File too large' in output
  assert 'Traceback' not in output
  assert 'Last complete step: none' in output
  assert output.splitlines()[-1].startswith('Error: ')
  assert not checkpoints_lib.Checkpoints(workdir, read_only=True).steps()
