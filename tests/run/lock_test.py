"""Tests of the lock of a workdir."""

from concurrent import futures
import contextlib
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
from vit_jax.distributed import files
from vit_jax.run import lock

# Takes the lock, then checks it for each line of stdin.
HOLDS = """
import errno, fcntl, sys
from vit_jax.run import lock
def flock(*_):
  raise OSError(errno.ENOTSUP, 'Operation not supported')
if sys.argv[2:]:
  fcntl.flock = flock
  for name, seconds in zip(('_RENEWAL', '_ABANDONED', '_LOOK', '_SETTLE'), sys.argv[2:]):
    setattr(lock, name, float(seconds))
with lock.Holder(sys.argv[1]) as held:
  print('held', flush=True)
  for line in sys.stdin:
    try:
      held.check()
      print('checked', flush=True)
    except OSError as e:
      print(e, flush=True)
"""
# Seconds: RENEWAL, ABANDONED, LOOK, SETTLE.
SHORT = (0.1, 1.0, 0.05, 0.2)


def hold(folder, *seconds):
  """Starts a process that holds the lock."""
  return subprocess.Popen(
    [sys.executable, '-c', HOLDS, str(folder), *map(str, seconds)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env={**os.environ, 'PYTHONPATH': str(processes.ROOT)},
  )


@pytest.fixture
def holder(tmp_path):
  """Another process that holds the lock."""
  process = hold(tmp_path)
  assert process.stdout.readline() == 'held\n'
  yield process
  process.kill()
  process.wait()


def flock(*_):
  raise OSError(errno.ENOTSUP, 'Operation not supported')


@pytest.fixture
def no_locks(monkeypatch):
  """A file system without locks, like gs://, with frequent renewals."""
  monkeypatch.setattr(fcntl, 'flock', flock)
  for name, seconds in zip(('_RENEWAL', '_ABANDONED', '_LOOK', '_SETTLE'), SHORT):
    monkeypatch.setattr(lock, name, seconds)


class Clock:
  """Replaces the module time: only `sleep` makes time pass."""

  def __init__(self):
    self.now = 1e6
    self.events = {}  # By seconds slept: what other runs do then.
    self.slept = 0.0
    self.strftime = time.strftime

  def monotonic(self):
    return self.now

  def sleep(self, seconds):
    self.now += seconds
    self.slept += seconds
    for moment in sorted(self.events):
      if moment <= self.slept:
        self.events.pop(moment)()


@pytest.fixture
def clock(monkeypatch):
  """A file system without locks, and a clock that only `sleep` moves."""
  clock = Clock()
  monkeypatch.setattr(fcntl, 'flock', flock)
  monkeypatch.setattr(lock, 'time', clock)
  return clock


def content_of(host, **more):
  run = {'host': host, 'process': 1, 'since': 'noon', 'id': host, **more}
  return json.dumps(run).encode()


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


def test_run_stops_if_its_workdir_was_moved_or_deleted(tmp_path):
  with lock.Holder(tmp_path / 'a') as held:
    held.check()
    (tmp_path / 'a').rename(tmp_path / 'b')
    with pytest.raises(
      OSError, match="workdir='.*a' was moved or deleted.*this run stops"
    ):
      held.check()
    with lock.Holder(tmp_path / 'a'), pytest.raises(OSError, match='was moved'):
      held.check()


# --- File systems without locks ---


@pytest.mark.usefixtures('no_locks')
def test_without_locks_a_renewed_file_holds_the_workdir(tmp_path, capsys):
  with lock.Holder(tmp_path) as held:
    with pytest.raises(ValueError, match=f'process {os.getpid()} on'):
      lock.Holder(tmp_path).__enter__()
    held.check()
  assert f'whether process {os.getpid()} on' in capsys.readouterr().out
  assert not list(tmp_path.iterdir())


def test_without_locks_a_free_workdir_takes_no_time(tmp_path, clock):
  for folder in (tmp_path / 'new', tmp_path / 'new'):
    with lock.Holder(folder) as held:
      held.check()
  assert clock.slept == 0


ODD = {
  'far ahead': content_of('other', renewed=1e12),
  'list': b'[1]',
  'null': b'{"renewed": null}',
  'number': b'9999999999',
  'half': content_of('other')[:20],
  'binary': bytes(range(256)),
  'deep': b'[' * 100_000,
  'huge': b'x' * 10_000_000,
}


@pytest.mark.parametrize('name', ODD)
def test_without_locks_an_unchanged_file_is_abandoned_after_a_minute(
  name, tmp_path, clock
):
  (tmp_path / 'holder.json').write_bytes(ODD[name])
  with lock.Holder(tmp_path) as held:
    assert 60 <= clock.slept < 65
    held.check()
    assert json.loads((tmp_path / 'holder.json').read_bytes())['process'] == os.getpid()


@pytest.mark.parametrize('content', [content_of('other', renewals=8), b'half a li'])
def test_without_locks_new_content_holds_the_workdir(content, tmp_path, clock):
  path = tmp_path / 'holder.json'
  path.write_bytes(content_of('other', renewals=7))
  clock.events[59] = lambda: path.write_bytes(content)
  with pytest.raises(ValueError, match='is held by'):
    lock.Holder(tmp_path).__enter__()
  assert clock.slept == 59
  assert path.read_bytes() == content


def test_without_locks_a_released_file_is_free_at_once(tmp_path, clock):
  path = tmp_path / 'holder.json'
  path.write_bytes(content_of('other'))
  clock.events[10] = path.unlink
  with lock.Holder(tmp_path) as held:
    assert clock.slept == 12
    held.check()


def test_without_locks_the_last_of_two_newcomers_has_the_workdir(tmp_path, clock):
  path = tmp_path / 'holder.json'
  path.write_bytes(content_of('other'))
  # Looks end after 60 seconds; then both write, and wait for two seconds.
  clock.events[61] = lambda: path.write_bytes(content_of('newcomer'))
  with pytest.raises(ValueError, match='held by process 1 on newcomer'):
    lock.Holder(tmp_path).__enter__()
  assert path.read_bytes() == content_of('newcomer')


def test_without_locks_only_one_newcomer_creates_the_file(tmp_path, clock):
  path = tmp_path / 'holder.json'
  path.touch()  # The other one has created it, and writes to it.
  clock.events[1] = lambda: path.write_bytes(content_of('newcomer'))
  with pytest.raises(ValueError, match='held by process 1 on newcomer'):
    lock.Holder(tmp_path).__enter__()
  assert clock.slept == 1


def test_in_a_bucket_newcomers_wait_for_each_other(tmp_path, clock, monkeypatch):
  monkeypatch.setattr(files, 'is_remote', lambda _: True)
  with lock.Holder(tmp_path / 'a') as held:
    held.check()
  assert clock.slept == 2
  path = tmp_path / 'a' / 'holder.json'
  clock.events[3] = lambda: path.write_bytes(content_of('newcomer'))
  with pytest.raises(ValueError, match='held by process 1 on newcomer since noon'):
    lock.Holder(tmp_path / 'a').__enter__()


@pytest.mark.usefixtures('no_locks')
@pytest.mark.parametrize('is_abandoned', [True, False])
def test_without_locks_one_of_many_newcomers_goes_on(is_abandoned, tmp_path):
  if is_abandoned:
    (tmp_path / 'holder.json').write_bytes(content_of('other'))

  def enter(_):
    with contextlib.suppress(ValueError):
      return lock.Holder(tmp_path).__enter__()

  with futures.ThreadPoolExecutor(12) as pool:
    [winner] = filter(None, pool.map(enter, range(12)))
  winner.check()
  winner.__exit__()


@pytest.mark.usefixtures('no_locks')
@pytest.mark.parametrize('is_deleted', [True, False])
def test_run_stops_if_its_workdir_was_taken(is_deleted, tmp_path):
  path = tmp_path / 'holder.json'
  with lock.Holder(tmp_path) as held:
    path.unlink()
    if not is_deleted:
      path.write_bytes(content_of('b'))
    for _ in range(2):
      other = 'another run' if is_deleted else 'process 1 on b since noon'
      with pytest.raises(OSError, match=f'taken by {other}'):
        held.check()
      held._thread.join()
  assert path.exists() != is_deleted  # It belongs to the other run.


def test_run_stops_if_it_cannot_renew_its_file(tmp_path, clock, monkeypatch):
  written = files.write
  with lock.Holder(tmp_path) as held:

    def fail(*_):
      raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(files, 'write', fail)
    clock.now += 44
    held.check()
    clock.now += 2
    with pytest.raises(OSError, match='holder.json.* not be renewed .*No space left'):
      held.check()
    monkeypatch.setattr(files, 'write', written)
    held.check()  # Nobody has taken it, and it can be renewed again.
    monkeypatch.setattr(files, 'write', fail)
    clock.now += 44
    held.check()


@pytest.mark.usefixtures('no_locks')
@pytest.mark.parametrize('end', [signal.SIGSTOP, signal.SIGKILL])
def test_without_locks_a_stopped_process_loses_the_workdir(end, tmp_path):
  other = hold(tmp_path, *SHORT)
  try:
    assert other.stdout.readline() == 'held\n'
    with pytest.raises(ValueError, match=f'held by process {other.pid} on'):
      lock.Holder(tmp_path).__enter__()
    other.send_signal(end)
    with lock.Holder(tmp_path) as held:
      if end == signal.SIGSTOP:
        other.send_signal(signal.SIGCONT)
        answer, _ = other.communicate('check\n')
        assert f'taken by process {os.getpid()} on' in answer
      held.check()
    assert not list(tmp_path.iterdir())
  finally:
    other.kill()
    other.wait()


def test_unwritable_workdir(tmp_path):
  (tmp_path / 'file').touch()
  with pytest.raises(ValueError, match='cannot be written'):
    lock.Holder(tmp_path / 'file' / 'below').__enter__()
