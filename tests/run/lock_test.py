"""Tests of the lock of a workdir."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests import processes
from vit_jax import train
from vit_jax.run import lock

HOLDS = """
import sys
from vit_jax.run import lock
with lock.Holder(sys.argv[1]):
  print('held', flush=True)
  sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
  """Another process that holds the lock."""
  process = subprocess.Popen(
    [sys.executable, '-c', HOLDS, str(tmp_path)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env={**os.environ, 'PYTHONPATH': str(processes.ROOT)},
  )
  assert process.stdout.readline() == 'held\n'
  yield process
  process.kill()
  process.wait()


@pytest.fixture
def no_locks(monkeypatch):
  """A file system without locks, like gs://, with frequent renewals."""

  def flock(*_):
    raise OSError(errno.ENOTSUP, 'Operation not supported')

  monkeypatch.setattr(fcntl, 'flock', flock)
  monkeypatch.setattr(lock, '_RENEWAL', 0.05)
  monkeypatch.setattr(lock, '_ABANDONED', 1.0)


def test_second_run_stops_before_writing(holder, tiny_config, tmp_path):
  with pytest.raises(ValueError, match=f'held by process {holder.pid} on .* since 20'):
    train.train_and_evaluate(tiny_config, tmp_path)
  assert [p.name for p in tmp_path.iterdir()] == ['holder.json']


def test_kill_releases_the_lock(holder, tmp_path):
  holder.send_signal(signal.SIGKILL)
  holder.wait()
  held_by = json.loads((tmp_path / 'holder.json').read_text())['process']
  assert held_by == holder.pid  # Not removed by the killed process.
  with lock.Holder(tmp_path):
    held_by = json.loads((tmp_path / 'holder.json').read_text())['process']
    assert held_by == os.getpid()


def test_workdir_is_released_after_the_run(tmp_path):
  for _ in range(2):
    with lock.Holder(tmp_path / 'new') as held:
      held.check()
      # Also within one process, such as a notebook.
      with pytest.raises(ValueError, match=f'process {os.getpid()} on'):
        lock.Holder(tmp_path / 'new').__enter__()


@pytest.mark.usefixtures('no_locks')
def test_without_locks_a_renewed_file_holds_the_workdir(tmp_path):
  with lock.Holder(tmp_path) as held:
    with pytest.raises(ValueError, match=f'process {os.getpid()} on'):
      lock.Holder(tmp_path).__enter__()
    held.check()
  assert not list(tmp_path.iterdir())
  (tmp_path / 'holder.json').write_text('half a li')
  with lock.Holder(tmp_path):
    pass


@pytest.mark.usefixtures('no_locks')
@pytest.mark.parametrize('age, other', [(0.5, 'process 1 on other'), (2, None)])
def test_without_locks_a_file_expires_unless_renewed(tmp_path, age, other):
  path = tmp_path / 'holder.json'
  found = {'host': 'other', 'process': 1, 'since': 'noon', 'id': 'x'}
  path.write_text(json.dumps({**found, 'renewed': time.time() - age}))
  held = lock.Holder(tmp_path)
  assert held.take() == (other and f'{other} since noon')
  held.release()
  assert path.exists() == bool(other)


@pytest.mark.usefixtures('no_locks')
def test_run_stops_if_its_workdir_was_taken(tmp_path):
  with lock.Holder(tmp_path) as held:
    (tmp_path / 'holder.json').write_text(
      json.dumps({'host': 'b', 'process': 7, 'since': 'noon', 'id': 'y'})
    )
    held._renewal.join()
    with pytest.raises(OSError, match='taken by process 7 on b since noon'):
      held.check()
  assert (tmp_path / 'holder.json').exists()  # It belongs to the other run.


def test_unwritable_workdir(tmp_path):
  (tmp_path / 'file').touch()
  with pytest.raises(ValueError, match='cannot be written'):
    lock.Holder(tmp_path / 'file' / 'below').__enter__()
