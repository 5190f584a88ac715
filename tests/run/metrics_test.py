"""Tests of metrics.jsonl and event files: on disk, in buckets, damaged."""

import re

import ml_collections
import numpy as np
import pytest

from tests import processes
from vit_jax.run import metrics as metrics_lib


def steps(workdir):
  return [line['step'] for line in metrics_lib.read(workdir)]


def test_lines_are_written_to_disk_immediately(tmp_path):
  log = metrics_lib.MetricsLog(tmp_path)
  for step in (1, 2, 3):
    log.write(step, {'loss': 0.5})
    assert steps(tmp_path)[-1] == step
  log.write_config(0, ml_collections.ConfigDict({'a': {'b': '|`'}}))
  log.write_pictures(3, {'some': np.zeros((2, 3, 3), np.uint8)})
  log.flush()
  # Already on disk in case of a kill after a checkpoint.
  [path] = tmp_path.glob('*tfevents*')
  found = path.read_bytes()
  assert b'| a.b | `"\\|\'"` |' in found
  assert b'\x89PNG' in found
  log.close()
  log = metrics_lib.MetricsLog(tmp_path, 2)
  log.close()
  assert steps(tmp_path) == [1, 2]


def test_buckets_are_written_at_checkpoints_and_at_the_end(tmp_path, monkeypatch):
  monkeypatch.setattr(metrics_lib.files, 'is_remote', lambda path: True)
  log = metrics_lib.MetricsLog(tmp_path)
  log.write(1, {'loss': 1.0})
  assert steps(tmp_path) == []
  log.flush()  # As for a checkpoint.
  assert steps(tmp_path) == [1]
  [events] = tmp_path.glob('*tfevents*')
  assert events.stat().st_size > 0
  for step in range(2, 50):
    log.write(step, {'loss': 1.0})
  # Killed here and resumed from step 1.
  again = metrics_lib.MetricsLog(tmp_path, 1)
  assert steps(tmp_path) == [1]
  again.write(2, {'loss': 0.25})
  again.close()
  assert metrics_lib.read(tmp_path) == [
    {'step': 1, 'loss': 1.0},
    {'step': 2, 'loss': 0.25},
  ]
  log.close()


def test_workdir_that_was_moved_is_reported(tmp_path):
  workdir = tmp_path / 'run'
  workdir.mkdir()
  (workdir / 'config.json').touch()
  log = metrics_lib.MetricsLog(workdir)
  workdir.rename(tmp_path / 'moved')
  with pytest.raises(OSError, match=r"run' was moved or deleted .*--workdir"):
    log.write(1, {'loss': 1.0})
  log.close()
  assert not workdir.exists()


FULL = """
import json, pathlib, resource, sys
from vit_jax import console
from vit_jax.run import metrics
console.quiet()
workdir = pathlib.Path(sys.argv[1])
(workdir / 'config.json').touch()
log = metrics.MetricsLog(workdir)
log.flush()
[events] = workdir.glob('*tfevents*')
size = events.stat().st_size + 10 if sys.argv[2] == 'events' else 1
resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
try:
  log.write(1, {'loss': 1.0})
  log.flush()
except OSError as e:
  print(json.dumps(str(e)))
log.close()
"""


@pytest.mark.parametrize('file', ['metrics', 'events'])
def test_full_disk_is_reported_with_the_file(tmp_path, file):
  """Stands for a full disk: a limit of the size of files."""
  [line] = processes.run_code(FULL, tmp_path, file).splitlines()
  name = 'metrics.jsonl' if file == 'metrics' else 'events.out.tfevents.*'
  assert re.match(
    f"\"'{tmp_path}/{name}' cannot be written: File too large; free", line
  )


@pytest.mark.parametrize('bad', [b'\xff\xfe', b'[1]', b'{"st'])
def test_invalid_lines_are_removed_and_reported(tmp_path, caplog, bad):
  good = b'{"step": 1, "loss": 2.0}\n'
  path = tmp_path / 'metrics.jsonl'
  path.write_bytes(good + bad + b'\n\n' + good)
  assert steps(tmp_path) == [1, 1]
  assert metrics_lib.find(tmp_path, 1, 'loss')
  for _ in range(2):
    metrics_lib.MetricsLog(tmp_path, 5).close()
  [message] = caplog.messages
  assert repr(bad) in message
  assert path.read_bytes() == 2 * good


def test_incomplete_last_line_is_not_damage(tmp_path, caplog):
  (tmp_path / 'metrics.jsonl').write_bytes(b'{"step": 1, "a": 1.0}\n{"step": 2')
  metrics_lib.MetricsLog(tmp_path, 5).close()
  assert steps(tmp_path) == [1]
  assert not caplog.text
