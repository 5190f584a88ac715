"""Times what a process does before its first batch, and reading from slow storage.

  python -m benchmarks.starts manifest 1000000   # Opens a manifest twice.
  python -m benchmarks.starts shards 1000        # Opens an array_record split.
  python -m benchmarks.starts offsets 10000000   # Opens the offsets of records twice.
  python -m benchmarks.starts check 64           # Merges the checks of 64 processes.
  python -m benchmarks.starts bucket             # Reads at 40 ms per read.

Each opening runs in a new process, as at a start of a run.
"""

import json
import multiprocessing
import os
import pathlib
import resource
import sys
import tempfile
import time
import types

import numpy as np


def _measure(name, function, *args):
  """Runs a function in a new process; prints its time and memory."""
  context = multiprocessing.get_context('spawn')
  process = context.Process(target=_measured, args=(name, function, *args))
  process.start()
  process.join()


def _measured(name, function, *args):
  import tensorflow as tf

  tf.constant(0)
  peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  before = peak()
  start = time.perf_counter()
  result = function(*args)
  seconds = time.perf_counter() - start
  print(
    f'{name}: {seconds:.1f} s, {peak() - before:,.0f} MB more, {result}', flush=True
  )


def _open_manifest(root):
  from vit_jax.data import manifest

  columns, names = manifest.read_split(
    root, 'train', ['image', 'label'], broken='trust'
  )
  digest = columns['image'].digest(), int(columns['label'].numpy().sum())
  return f'{len(names["label"])} classes, {digest}'


def manifest(folder, count):
  """Times the first and the next opening of a manifest of `count` images."""
  with open(f'{folder}/train.jsonl', 'w') as file:
    for i in range(count):
      row = {
        'image': f'n{i % 1000:08d}/n{i % 1000:08d}_{i}.JPEG',
        'label': f'c{i % 1000}',
      }
      file.write(json.dumps(row) + '\n')
  for start in ('first start', 'next start'):
    _measure(start, _open_manifest, folder)


def _instructions(paths, per_shard):
  return [
    types.SimpleNamespace(
      filename=path, skip=0, take=per_shard, examples_in_shard=per_shard
    )
    for path in paths
  ]


def _open_shards(paths, per_shard):
  from array_record.python import array_record_module as module

  from vit_jax.data.tfds import shards

  opens = []
  reader = module.ArrayRecordReader
  module.ArrayRecordReader = lambda *a, **kw: opens.append(a) or reader(*a, **kw)
  parser = types.SimpleNamespace(features=(), names={})
  source = shards.ArrayRecordSource(_instructions(paths, per_shard), 100, parser)
  indices = np.random.default_rng(0).integers(source.num_examples, size=4096)
  count = len(source.stored(indices))
  descriptors = len(os.listdir('/proc/self/fd'))
  return f'{count} records, {len(opens)} opens, {descriptors} descriptors'


def shards(folder, count, per_shard=20):
  """Times opening and reading `count` array_record shards."""
  from array_record.python import array_record_module as module

  paths = [f'{folder}/x-{i:05d}.array_record' for i in range(count)]
  for i, path in enumerate(paths):
    writer = module.ArrayRecordWriter(path, 'group_size:1')
    for k in range(per_shard):
      writer.write(b'%d/%d' % (i, k) * 20)
    writer.close()
  _measure('open and read 4,096', _open_shards, paths, per_shard)


def _open_offsets(paths, per_shard):
  from vit_jax.data.tfds import tfrecords

  tfrecords._scan = lambda path, size, count: [116] * count  # Not what is timed.
  offsets = tfrecords.offsets(paths, [per_shard] * len(paths))
  smaps = open('/proc/self/smaps').read().split('\n')
  private = sum(int(line.split()[1]) for line in smaps if line[:13] == 'Private_Dirty')
  return (
    f'{len(offsets) * per_shard:,} records, private memory {private / 1024:,.0f} MB'
  )


def offsets(folder, count):
  """Times opening the offsets of `count` records in 100 tfrecord files."""
  paths = [f'{folder}/x-{i:05d}' for i in range(100)]
  for path in paths:
    open(path, 'wb').close()
  for start in ('first start', 'next start'):
    _measure(start, _open_offsets, paths, count // 100)


def _check(folder, count, images=1_000_000):
  import jax

  from vit_jax.data import checking
  from vit_jax.data.images import index as index_lib

  class Checked(index_lib.Index):
    """An index whose files need no reading."""

    def _each(self, rows, function, title):
      del function
      stamps = np.random.default_rng(0).integers(2**63, size=len(rows)).tolist()
      checked = [('', x) for x in stamps] if title == 'Checking images' else stamps
      for i in range(0, len(rows), 4096):
        yield rows[i : i + 4096], checked[i : i + 4096]

  paths = (f'/data/n{i % 1000:08d}/n{i % 1000:08d}_{i}.JPEG' for i in range(images))
  index = index_lib.from_paths('/data', 'train.jsonl', list(paths))
  index.__class__ = Checked
  jax.process_count = lambda: count
  for process in reversed(range(count)):
    index.status[:], index.stamps[:] = 0, 0
    jax.process_index = lambda process=process: process
    checking._check_share(index, np.arange(images), None, 10**9, folder)
  size = sum(file.stat().st_size for file in pathlib.Path(folder).glob('data/*'))
  start = time.perf_counter()
  checking._merge_shares(index, folder)
  seconds = time.perf_counter() - start
  assert index.status.all()
  return f'{size / 2**20:,.0f} MB written by all, merged in {seconds:.1f} s'


def check(folder, count):
  """Times merging the checks of a million images by `count` processes."""
  _measure('check', _check, folder, count)


def _framed(data):
  """Returns a record of a tfrecord file."""
  from vit_jax.data.tfds import tfrecords

  length = len(data).to_bytes(8, 'little')
  checksums = (tfrecords._masked(x).to_bytes(4, 'little') for x in (length, data))
  return length + next(checksums) + data + next(checksums)


def _read_bucket(paths, per_shard, shuffled):
  from vit_jax.data import records
  from vit_jax.data.lazy import tf
  from vit_jax.data.tfds import tfrecords

  class Slow(tfrecords.TfRecordSource):
    """Records of 100 bytes, of which each read takes 40 ms."""

    def open_file(self, path):
      shard = paths.index(path)
      size = 116

      def read_range(begin, length):
        time.sleep(0.04)
        reads.append(length)
        rows = range(begin // size, (begin + length) // size)
        return b''.join(_framed(b'%-100d' % (shard * per_shard + i)) for i in rows)

      return read_range

  reads = []
  tfrecords.offsets = lambda paths, counts: (
    [np.arange(per_shard + 1) * 116] * len(paths)
  )
  parser = types.SimpleNamespace(features=(), names={})
  source = Slow(_instructions(paths, per_shard), 100_000, parser)
  numbers = np.arange(16384)
  if shuffled:
    numbers = np.random.default_rng(0).permutation(source.num_examples)[:16384]
  data = tf.data.Dataset.from_tensor_slices(numbers).batch(source.chunk)
  data = data.map(source.lookup, num_parallel_calls=records.CALLS)
  start = time.perf_counter()
  values = [x for batch in data.as_numpy_iterator() for x in batch['record']]
  seconds = time.perf_counter() - start
  assert [int(x) for x in values] == numbers.tolist()
  return f'{len(values) / seconds:,.0f} records/s, {len(reads):,} reads'


def bucket(folder, count):
  """Times reading from `count` tfrecord shards that answer after 40 ms."""
  del folder
  paths = [f'gs://bucket/x-{i:05d}' for i in range(count)]
  _measure('in random order', _read_bucket, paths, 1000, True)
  _measure('in order', _read_bucket, paths, 1000, False)


if __name__ == '__main__':
  timed = (manifest, shards, offsets, check, bucket)
  commands = {function.__name__: function for function in timed}
  if len(sys.argv) < 2 or sys.argv[1] not in commands:
    sys.exit(__doc__)
  count = int(sys.argv[2]) if len(sys.argv) > 2 else 1000
  with tempfile.TemporaryDirectory() as folder:
    commands[sys.argv[1]](folder, count)
