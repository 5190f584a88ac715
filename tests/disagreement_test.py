"""Tests of processes started with different files or different flags."""

import pytest

from tests import conftest, processes

CASES = """
import json, os, sys
import jax
jax.config.update('jax_platforms', 'cpu')
from vit_jax.distributed import processes
me = int(sys.argv[2])
os.chdir(f'{sys.argv[3]}/host{me}')  # Each host has its own disk.
processes.initialize(sys.argv[1], 2, me)
from tests import conftest
from vit_jax import console
console.load_tensorflow()
from vit_jax import train
from vit_jax.data.tfds import builders

said = {}
def case(name, folder, **changes):
  config = conftest.make_tiny_config(None)
  config.dataset = f'./{folder}'
  config.pp.update(crop=16, channels=3)
  config.update(batch=16, batch_eval=16, **changes)
  try:
    train.check_start(train.prepare(config), 'workdir')
    said[name] = ['', 'no error']
  except Exception as e:
    said[name] = [type(e).__name__, str(e)]

case('same', 'whole')
case('eval_every', 'whole', eval_every=3 + me)
case('train', 'train_differs')
case('test', 'test_differs')

# Prepared on one host only.
config = conftest.make_tiny_config('tfds')
if not me:
  from vit_jax.data import registry
  registry.register('digits')
  builders._prepare(config, 'digits')
said['prepared'] = builders.get_builder(config, 'digits').info.splits['train'].num_examples
print('SAID ' + json.dumps(said), flush=True)
"""


@pytest.fixture(scope='module')
def reports(tmp_path_factory):
  """What each of two processes reports, by case."""
  root = tmp_path_factory.mktemp('disagreement')
  for host in ('host0', 'host1'):
    for name in ('whole', 'train_differs', 'test_differs'):
      conftest.make_folder(root / host / name, (4, 2))
  (root / 'host1/train_differs/train/bee/bee1.PNG').unlink()
  (root / 'host1/test_differs/test/bee/bee1.PNG').unlink()
  statuses, outputs = processes.run_two(CASES, root, devices=8)
  assert statuses == [0, 0], outputs
  assert not list(root.glob('*/workdir'))  # Nothing was written.
  return processes.said(outputs)


def test_identical_processes_agree(reports):
  assert reports[0]['same'] == reports[1]['same'] == ['', 'no error']


@pytest.mark.parametrize(
  ('case', 'words'),
  [
    ('eval_every', ('differ in the config', 'eval_every: 3 on process 0', '4 on')),
    ('train', ("the images of './train_differs/train'", 'number: 12 on', '11 on')),
    ('test', ("the images of './test_differs/test'", 'number: 6 on', '5 on')),
  ],
)  # fmt: skip
def test_both_processes_name_the_difference(reports, case, words):
  assert reports[0][case] == reports[1][case]
  kind, text = reports[0][case]
  assert kind == 'ValueError'
  for word in words:
    assert word in text
  assert 'process 1 (' in text


def test_one_process_prepares_the_data_set_for_both(reports):
  assert reports[0]['prepared'] == reports[1]['prepared'] > 0
