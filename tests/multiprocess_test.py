"""Tests of runs with two processes on loopback, two devices each."""

import json
import re
import signal

import numpy as np
from PIL import Image
import pytest

from tests import input_pipeline_test, processes, trees
from vit_jax import input_pipeline
from vit_jax.data import sources
from vit_jax.run import metrics as metrics_lib, workdir as workdir_lib

# Masked patches, since their micro-batches have unequal weights.
FLAGS = (
  '--config.task=masked_patches', '--config.accum_steps=2',
  '--config.model.hidden_size=64', '--config.model.transformer.mlp_dim=256',
  '--config.total_steps=12', '--config.eval_every=6', '--config.progress_every=1',
  '--config.checkpoint_every=6', '--config.early_stopping.patience=9',
)  # fmt: skip
PICTURES = ('--config.log_images=8', '--config.log_attention=True')


def addresses():
  """Returns the flags with which two processes find each other."""
  place = processes.address()
  return [
    [f'--coordinator={place}', '--num_processes=2', f'--process_id={i}']
    for i in range(2)
  ]


def start_pair(config, workdir, *flags, data_dir):
  """Starts two processes that split the parameters."""
  flags = (*FLAGS, '--config.mesh.data=1', '--config.mesh.fsdp=4', *flags)
  return [
    processes.start(config, workdir, *flags, *address, data_dir=data_dir, devices=2)
    for address in addresses()
  ]


def finish_pair(pair):
  outputs = [p.communicate(timeout=300)[0] for p in pair]
  return [p.returncode for p in pair], outputs


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  return processes.write_config(tmp_path_factory.mktemp('config'))


@pytest.fixture(scope='module')
def two_processes(config, data_dir, tmp_path_factory):
  """The folder of an uninterrupted run with two processes."""
  workdir = tmp_path_factory.mktemp('two')
  pair = start_pair(config, workdir, *PICTURES, data_dir=data_dir)
  statuses, outputs = finish_pair(pair)
  assert statuses == [0, 0], outputs
  assert 'on 4 cpu devices in 2 processes' in outputs[0]
  assert 'Parameters, fsdp: 2 arrays, ' in outputs[0]
  assert 'Done in' in outputs[0]
  # Only the first prints progress.
  assert not re.search(r'^(step|Done|digits)', outputs[1], re.MULTILINE)
  return workdir


def test_two_processes_match_one_process(config, data_dir, two_processes, tmp_path):
  """With parameters split over both, dropout and micro-batches."""
  status, output = processes.finish(
    config, tmp_path, *FLAGS, *PICTURES, data_dir=data_dir
  )
  assert status == 0, output
  got, want = metrics_lib.read(two_processes), metrics_lib.read(tmp_path)
  assert [line['step'] for line in got] == [line['step'] for line in want]
  for a, b in zip(got, want):
    rel = 1e-5
    for key in ('train_loss', 'loss_test'):
      assert (key in a) == (key in b)
      if key in b:
        assert a[key] == pytest.approx(b[key], rel=rel)
  assert got[-1]['num_examples_test'] == 360
  for name in ('masked_patches', 'attention'):
    with (
      Image.open(two_processes / f'{name}.png') as ours,
      Image.open(tmp_path / f'{name}.png') as theirs,
    ):
      difference = np.subtract(ours, theirs, dtype=int)
    # Rounding may change a colour or the last digit of a caption.
    assert (abs(difference) <= 3).mean() > 0.99


def test_signal_to_one_process_stops_both_and_they_resume(
  config, data_dir, two_processes, tmp_path
):
  # Evaluates only at the end.
  flags = ['--config.eval_every=0', '--config.early_stopping.patience=0']
  pair = start_pair(config, tmp_path, *flags, data_dir=data_dir)
  for line in pair[0].stdout:
    if line.startswith('step  3/12'):
      pair[1].send_signal(signal.SIGTERM)
      break
  statuses, outputs = finish_pair(pair)
  assert statuses == [128 + signal.SIGTERM] * 2, outputs
  [step] = re.findall(r'Saved step (\d+)', ''.join(outputs))
  pair = start_pair(config, tmp_path, *flags, data_dir=data_dir)
  statuses, outputs = finish_pair(pair)
  assert statuses == [0, 0], outputs
  assert f'Resuming from step {step}.' in outputs[0]
  trees.assert_same(
    processes.load_state(tmp_path)[0], processes.load_state(two_processes)[0]
  )


BATCHES = """
import json, sys
import jax, numpy as np, tensorflow as tf
from jax.experimental import multihost_utils
from ml_collections import ConfigDict
address, index, path = sys.argv[1:4]
jax.distributed.initialize(address, 2, int(index))
from vit_jax import input_pipeline
from vit_jax.data import sources
from vit_jax.distributed import sharding
config = ConfigDict(json.loads(sys.argv[4]))
source = sources.open_split(config, 'train')
mesh = sharding.make_mesh({'data': -1})
rows = sharding.local_rows(mesh, config.batch)
assert rows.tolist() == list(range(8 * int(index), 8 * int(index) + 8))
example = input_pipeline.labelled_example(config, 10)
batches = input_pipeline.train_batches(config, source, example, mesh, 3)
batch = multihost_utils.process_allgather(next(batches), tiled=True)
if index == '0':
  np.savez(path, **batch)
# Both feed all rows, since one model spans them, so they must read the same data, also
# from tfrecord files, of which each has read half of the headers.
config.dataset, config.tfds_data_dir = 'shapes', sys.argv[5]
source = sources.open_split(config, 'train', ('image',))
mesh = sharding.make_mesh({'data': 1, 'model': 8})
def contents(record, seed):
  return {'value': tf.cast(tf.io.decode_png(record['image'])[0, 0, 0], tf.int32)}
for name, batches in (
  ('train', input_pipeline.train_batches(config, source, contents, mesh, 1)),
  ('test', input_pipeline.eval_batches(config, source, contents, mesh)),
):
  shards = next(batches)['value'].addressable_shards
  np.save(f'{path}_{name}_{index}.npy', np.stack([x.data for x in shards]))
"""


def test_two_processes_see_the_same_batch_as_one(tiny_config, tmp_path):
  input_pipeline_test.prepare(
    input_pipeline_test.Shapes, str(tmp_path), 'tfrecord', num_shards=3
  )
  source = sources.open_split(tiny_config, 'train')
  example = input_pipeline.labelled_example(tiny_config, 10)
  rows = np.arange(16)
  data = input_pipeline.train_dataset(tiny_config, source, example, rows, 3)
  want = next(data.as_numpy_iterator())
  path = tmp_path / 'batch.npz'
  config = json.dumps(workdir_lib.to_plain(tiny_config))
  statuses, outputs = processes.run_two(BATCHES, path, config, tmp_path, devices=4)
  assert statuses == [0, 0], outputs
  assert len(list(tmp_path.glob('shapes/*/.tfrecord_offsets.npz'))) == 1
  assert not list(tmp_path.glob('shapes/*/*.tmp'))
  got = np.load(path)
  for key in want:
    np.testing.assert_array_equal(got[key], want[key])
  for name, count in (('train', 16), ('test', 40)):
    seen = [np.load(f'{path}_{name}_{i}.npy') for i in range(2)]
    np.testing.assert_array_equal(seen[0], seen[1])
    assert len(set(seen[0][0])) == count
