"""Times what a process does before its first batch, and reading from slow storage.

  python -m benchmarks.starts manifest 1000000   # Opens a manifest twice.
  python -m benchmarks.starts shards 1000        # Opens an array_record split.
  python -m benchmarks.starts offsets 10000000   # Opens the offsets of records twice.
  python -m benchmarks.starts check 64           # Merges the checks of 64 processes.
  python -m benchmarks.starts bucket             # Reads at 40 ms per read.

Each opening runs in a new process, as at a start of a run.
"""

from collections.abc import Callable, Iterator, Sequence
import json
import multiprocessing
import os
import pathlib
import resource
import sys
import tempfile
import time
import types
from typing import Any

import numpy as np

_RECORD = 116  # Bytes of a record of 100 bytes in a tfrecord file.


def _measure(name: str, function: Callable[..., str], *args: Any) -> None:
  """Runs a function in a new process; prints its time and memory."""
  context = multiprocessing.get_context('spawn')
  process = context.Process(target=_measured, args=(name, function, *args))
  process.start()
  process.join()


def _measured(name: str, function: Callable[..., str], *args: Any) -> None:
  import tensorflow as tf

  tf.constant(0)
  memory = _peak_memory()
  start = time.perf_counter()
  result = function(*args)
  seconds = time.perf_counter() - start
  growth = _peak_memory() - memory
  print(f'{name}: {seconds:.1f} s, {growth:,.0f} MB more, {result}', flush=True)


def _peak_memory() -> float:
  """Returns the most memory that this process has had, in MB."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _image_path(i: int) -> str:
  """Returns the path of an image, in one of 1,000 folders as in ImageNet."""
  folder = f'n{i % 1000:08d}'
  return f'{folder}/{folder}_{i}.JPEG'


def _open_manifest(root: str) -> str:
  from vit_jax.data import manifest

  columns, names = manifest.read_split(
    root, 'train', ['image', 'label'], broken='trust'
  )
  digest = columns['image'].digest(), int(columns['label'].numpy().sum())
  return f'{len(names["label"])} classes, {digest}'


def manifest(folder: str, count: int) -> None:
  """Times the first and the next opening of a manifest of `count` images."""
  with open(f'{folder}/train.jsonl', 'w') as file:
    for i in range(count):
      row = {'image': _image_path(i), 'label': f'c{i % 1000}'}
      file.write(json.dumps(row) + '\n')
  for start in ('first start', 'next start'):
    _measure(start, _open_manifest, folder)


def _instructions(paths: Sequence[str], per_shard: int) -> list[types.SimpleNamespace]:
  """Returns the files of a split as TFDS describes them, each read as a whole."""
  instructions = []
  for path in paths:
    instructions.append(
      types.SimpleNamespace(
        filename=path, skip=0, take=per_shard, examples_in_shard=per_shard
      )
    )
  return instructions


def _open_shards(paths: Sequence[str], per_shard: int) -> str:
  from array_record.python import array_record_module as module

  from vit_jax.data.tfds import shards

  num_opens = 0
  reader = module.ArrayRecordReader

  def counted_reader(*args: Any, **kwargs: Any) -> Any:
    nonlocal num_opens
    num_opens += 1
    return reader(*args, **kwargs)

  module.ArrayRecordReader = counted_reader
  parser = types.SimpleNamespace(features=(), names={})
  source = shards.ArrayRecordSource(_instructions(paths, per_shard), 100, parser)
  indices = np.random.default_rng(0).integers(source.num_examples, size=4096)
  count = len(source.stored(indices))
  descriptors = len(os.listdir('/proc/self/fd'))
  return f'{count} records, {num_opens} opens, {descriptors} descriptors'


def shards(folder: str, count: int, per_shard: int = 20) -> None:
  """Times opening and reading `count` array_record shards."""
  from array_record.python import array_record_module as module

  paths = [f'{folder}/x-{i:05d}.array_record' for i in range(count)]
  for i, path in enumerate(paths):
    writer = module.ArrayRecordWriter(path, 'group_size:1')
    for k in range(per_shard):
      writer.write(b'%d/%d' % (i, k) * 20)
    writer.close()
  _measure('open and read 4,096', _open_shards, paths, per_shard)


def _open_offsets(paths: Sequence[str], per_shard: int) -> str:
  from vit_jax.data.tfds import tfrecords

  tfrecords._scan = lambda path, size, count: [_RECORD] * count  # Not timed.
  offsets = tfrecords.offsets(paths, [per_shard] * len(paths))
  private = 0  # In KiB.
  for line in pathlib.Path('/proc/self/smaps').read_text().splitlines():
    if line.startswith('Private_Dirty'):
      private += int(line.split()[1])
  count = len(offsets) * per_shard
  return f'{count:,} records, private memory {private / 1024:,.0f} MB'


def offsets(folder: str, count: int) -> None:
  """Times opening the offsets of `count` records in 100 tfrecord files."""
  paths = [f'{folder}/x-{i:05d}' for i in range(100)]
  for path in paths:
    open(path, 'wb').close()
  for start in ('first start', 'next start'):
    _measure(start, _open_offsets, paths, count // 100)


def _check(folder: str, count: int, images: int = 1_000_000) -> str:
  import jax

  from vit_jax.data import checking
  from vit_jax.data.images import index as index_lib

  stamps = np.random.default_rng(0).integers(1, 2**63, size=images)

  class Checked(index_lib.Index):
    """An index whose files need no reading."""

    def _map_blocks(
      self, rows: np.ndarray, function: Callable[[bytes], Any], title: str
    ) -> Iterator[tuple[np.ndarray, list]]:
      del function
      for i in range(0, len(rows), 4096):
        block = rows[i : i + 4096]
        results = stamps[block].tolist()
        if title == 'Checking images':
          results = [('', stamp) for stamp in results]
        yield block, results

  paths = [f'/data/{_image_path(i)}' for i in range(images)]
  index = index_lib.from_paths('/data', 'train.jsonl', paths)
  index.__class__ = Checked
  jax.process_count = lambda: count
  for process in reversed(range(count)):
    index.checks = index_lib.Checks.empty(images)
    jax.process_index = lambda process=process: process
    checking._check_local(index, np.arange(images), None, 10**9, folder)
  size = sum(file.stat().st_size for file in pathlib.Path(folder).glob('data/*'))
  start = time.perf_counter()
  checking._merge_results(index, folder)
  seconds = time.perf_counter() - start
  assert index.checks.status.all()
  return f'{size / 2**20:,.0f} MB written by all, merged in {seconds:.1f} s'


def check(folder: str, count: int) -> None:
  """Times merging the checks of a million images by `count` processes."""
  _measure('check', _check, folder, count)


def _framed(data: bytes) -> bytes:
  """Returns a record of a tfrecord file."""
  from vit_jax.data.tfds import tfrecords

  length = len(data).to_bytes(8, 'little')
  checksums = (tfrecords._masked(x).to_bytes(4, 'little') for x in (length, data))
  return length + next(checksums) + data + next(checksums)


def _read_bucket(paths: Sequence[str], per_shard: int, shuffled: bool) -> str:
  from vit_jax.data import records
  from vit_jax.data.lazy import tf
  from vit_jax.data.tfds import tfrecords

  class Slow(tfrecords.TfRecordSource):
    """Records of 100 bytes, of which each read takes 40 ms."""

    def open_file(self, path: str) -> Callable[[int, int], bytes]:
      first = paths.index(path) * per_shard

      def read_range(begin: int, length: int) -> bytes:
        time.sleep(0.04)
        reads.append(length)
        rows = range(begin // _RECORD, (begin + length) // _RECORD)
        return b''.join(_framed(b'%-100d' % (first + i)) for i in rows)

      return read_range

  reads = []
  offsets = np.arange(per_shard + 1) * _RECORD
  tfrecords.offsets = lambda paths, counts: [offsets] * len(paths)
  parser = types.SimpleNamespace(features=(), names={})
  source = Slow(_instructions(paths, per_shard), 100_000, parser)
  numbers = np.arange(16384)
  if shuffled:
    numbers = np.random.default_rng(0).permutation(source.num_examples)[:16384]
  data = tf.data.Dataset.from_tensor_slices(numbers).batch(source.chunk)
  data = data.map(source.lookup, num_parallel_calls=records.CALLS)
  start = time.perf_counter()
  values = []
  for batch in data.as_numpy_iterator():
    values += batch['record'].tolist()
  seconds = time.perf_counter() - start
  assert [int(x) for x in values] == numbers.tolist()
  return f'{len(values) / seconds:,.0f} records/s, {len(reads):,} reads'


def bucket(folder: str, count: int) -> None:
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
