"""Tests of communication between processes, with two of them on loopback."""

import json
import re
import signal

import jax
import pytest

from tests import processes as running
from vit_jax.distributed import heartbeats, processes

BEGIN = """
import os, signal, sys, time
import jax
jax.config.update('jax_platforms', 'cpu')
from vit_jax.distributed import heartbeats
from vit_jax.distributed import processes
me = int(sys.argv[2])
heartbeats.GRACE, heartbeats.HEARTBEAT = 0.5, 5
processes.initialize(sys.argv[1], 2, me)
"""

CALLS = """
import json
said = {}
def note(key, function):
  try:
    said[key] = function()
  except Exception as e:
    said[key] = [type(e).__name__, str(e)]
def fails_on_one():
  if me == 1:
    raise FileNotFoundError('there is no such file')
  return 'well'
def fails_on_first():
  raise ValueError('no good')
def loop(number):
  step = 0
  while True:
    step += 1
    if me and number == 1 and step == 3:
      heartbeats.watch.ask_to_stop()
    if heartbeats.watch.passed((number, step)):
      return step
    time.sleep(0.001)
note('gather', lambda: processes.gather('counting', [me]))
note('first', lambda: processes.from_first('listing', lambda: {'by': me}))
note('first_fails', lambda: processes.from_first('listing', fails_on_first))
note('well', lambda: processes.attempt('reading', lambda: me + 1))
note('attempt', lambda: processes.attempt('reading', fails_on_one))
note('agree', lambda: processes.agree('the data', {'n': 3, 'same': None}))
note('differ', lambda: processes.agree('the data', {'n': 7 + me, 'same': 1}))
note('stop', lambda: [loop(1), loop(2)])
note('elsewhere', lambda: processes.gather('here' if me else 'there', 0))
if me:
  heartbeats.client().blocking_key_value_get('go', 60_000)
else:
  note('late', lambda: processes.gather('the next', 0, deadline=0.01))
  heartbeats.client().key_value_set('go', '')
print('SAID ' + json.dumps(said), flush=True)
"""

ALONE = """
import sys
import jax
jax.config.update('jax_platforms', 'cpu')
from vit_jax.distributed import processes
if sys.argv[2] == '0':
  processes.initialize(sys.argv[1], 2, 0, initialization_timeout=2)
"""

KILLED = """
if me == 0:
  os.kill(os.getpid(), signal.SIGTERM)
processes.gather('the end', 0)
"""

LEFT = """
try:
  if me == 1:
    raise OSError('503 UNAVAILABLE: an error of its own')
  processes.gather('the end', 0)
except Exception as e:
  heartbeats.watch.report(e)
  raise
"""

# Only process 1 fails to read an image, in the second of three runs. Before them
# comes a run that another machine has locked.
STUDY = """
import fcntl, json, pathlib
from jax.experimental import multihost_utils
from tests import conftest
from vit_jax.studies import runs as runs_lib
trained = []
def train_and_evaluate(config, workdir, held):
  trained.append(workdir[-1])
  if trained == ['a']:
    processes.agree('the data', {'n': me})
  print('SAID ' + json.dumps(trained), flush=True)
  if me == 1:
    raise ValueError("'cat7.jpg' is no image")
  while True:
    multihost_utils.process_allgather(jax.numpy.ones(1))
runs_lib.train.train_and_evaluate = train_and_evaluate
runs_lib.check = lambda *args: None
config = conftest.make_tiny_config(None)
runs = [runs_lib.Run(name, config) for name in '0abc']
if me == 0:
  pathlib.Path(sys.argv[3], '0').mkdir()
  file = open(sys.argv[3] + '/0/holder.json', 'w')
  fcntl.flock(file, fcntl.LOCK_EX)
try:
  runs_lib.train_all(runs, sys.argv[3])
except Exception as e:
  heartbeats.watch.report(e)
  raise
"""

COLLECTIVE = """
from jax.experimental import multihost_utils
multihost_utils.process_allgather(jax.numpy.ones(1))
if me == 1:
  os.kill(os.getpid(), signal.SIGKILL)
try:
  while True:
    multihost_utils.process_allgather(jax.numpy.ones(1))
except Exception as e:
  heartbeats.watch.report(e)
  raise
"""


def test_calls():
  statuses, outputs = running.run_two(BEGIN + CALLS)
  assert statuses == [0, 0], outputs
  said = running.said(outputs)
  for each in said:
    assert each['gather'] == [[0], [1]]
    assert each['first'] == {'by': 0}
    assert each['well'] == [1, 2]
    assert each['agree'] is None
    kind, text = each['differ']
    assert kind == 'ValueError'
    assert 'differ in the data:\n  n: 7 on process 0 (' in text
    assert '8 on process 1 (' in text
    assert 'same' not in text.split('Give')[0]
    kind, text = each['elsewhere']
    assert kind == 'RuntimeError'
    assert "'there'" in text
    assert "'here'" in text
  # Both stop at the same step, and the next run stops immediately.
  assert said[0]['stop'] == said[1]['stop']
  assert said[0]['stop'][0] >= 3
  assert said[0]['stop'][1] == 1
  assert said[0]['first_fails'] == ['ValueError', 'no good']
  assert said[1]['first_fails'][0] == 'ValueError'
  assert said[1]['first_fails'][1].startswith('process 0 (')
  assert said[1]['attempt'] == ['FileNotFoundError', 'there is no such file']
  assert said[0]['attempt'][0] == 'FileNotFoundError'
  assert said[0]['attempt'][1].endswith('): there is no such file')
  kind, text = said[0]['late']
  assert kind == 'TimeoutError'
  assert 'process 1 (' in text
  assert 'the next' in text
  assert 'VIT_JAX_DEADLINE' in text


def test_process_without_peers_times_out():
  statuses, outputs = running.run_two(ALONE)
  assert statuses == [-signal.SIGABRT, 0]
  assert 'Waiting for the other processes' in outputs[0]
  assert 'within 2 seconds' in outputs[0]


def test_reports_that_the_first_process_was_killed():
  statuses, outputs = running.run_two(BEGIN + KILLED)
  assert statuses == [-signal.SIGTERM, -signal.SIGABRT], outputs
  # JAX's message; process 0 runs the coordination service.
  assert re.search('leader task|coordination_service', outputs[1])


def test_reports_a_failed_process():
  statuses, outputs = running.run_two(BEGIN + LEFT)
  assert statuses == [128 + signal.SIGTERM, 1]
  [line] = [x for x in outputs[0].splitlines() if x.startswith('Error: process 1 (')]
  assert line.endswith('has failed: 503 UNAVAILABLE: an error of its own')
  assert 'Traceback' not in outputs[0]
  # The message resembles a lost connection, but all processes are alive.
  assert outputs[1].endswith('OSError: 503 UNAVAILABLE: an error of its own\n')
  assert 'Lost the connection' not in outputs[1]


def test_study_ends_when_one_process_fails(tmp_path):
  statuses, outputs = running.run_two(BEGIN + STUDY, tmp_path)
  assert statuses == [128 + signal.SIGTERM, 1], outputs
  said = [output.split('SAID ')[1].splitlines() for output in outputs]
  # After an error in both, both continue with the run that one cannot read.
  assert json.loads(said[0][0]) == json.loads(said[1][0]) == ['a', 'b']
  [line] = [x for x in said[0] if x.startswith('Error: ')]
  assert line.startswith('Error: process 1 (')
  assert line.endswith("has failed: 'cat7.jpg' is no image")
  assert said[1][-1] == "ValueError: 'cat7.jpg' is no image"


def test_collective_reports_a_lost_process():
  statuses, outputs = running.run_two(BEGIN + COLLECTIVE)
  assert statuses == [-signal.SIGABRT, -signal.SIGKILL], outputs
  assert 'Lost the connection to another process' in outputs[0]
  assert re.search(r'heartbeat\D*\b1\b', outputs[0])
  assert 'Traceback' not in outputs[0]


def test_single_process_sends_nothing():
  assert jax.process_count() == 1
  assert processes.gather('x', (1, 2)) == [[1, 2]]
  assert processes.from_first('x', lambda: {'a': 1}) == {'a': 1}
  processes.agree('x', {'a': 1})
  with pytest.raises(KeyError, match='as it is'):
    processes.attempt('x', lambda: {}['as it is'])
  with pytest.raises(RuntimeError), processes.connected(distributed=False):
    raise RuntimeError('Gloo')
  assert not heartbeats.watch.failed


@pytest.mark.parametrize(
  ('args', 'words'),
  [
    (('localhost:99999', 2, 0), "coordinator='localhost:99999' must be HOST:PORT"),
    (('localhost', 2, 0), "coordinator='localhost' must be HOST:PORT"),
    (('localhost:1234', 2, 2), 'process_id=2 must be from 0 to 1'),
    (('localhost:1234', 2, None), 'must be given together'),
  ],
)  # fmt: skip
def test_rejects_wrong_coordinators(args, words):
  with pytest.raises(ValueError, match=words):
    processes.connect(True, *args)
