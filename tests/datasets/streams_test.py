"""Tests of what can only be streamed: a pure function of (seed, position)."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_datasets.core import file_adapters
from tensorflow_datasets.core.utils import shard_utils

from vit_jax import input_pipeline
from vit_jax.datasets import streams

# Records in each file, those of them that are skipped, and those that are taken.
FILES = [
  (40, 0, 40), (3, 0, 3), (37, 5, 20), (0, 0, 0), (18, 0, 18), (1, 0, 1),
  *[(20, 0, 20)] * 16, (55, 50, 5),
]  # fmt: skip
TOTAL = sum(take for _, _, take in FILES)


class Numbers:
  """Parses records that are numbers."""

  features, names = ('value',), {}

  def parse_all(self, serialized):
    return {'value': tf.strings.to_number(serialized, tf.int64)}


@pytest.fixture
def make_source(tmp_path):
  """Writes files whose records say 1000 * file + place; opens them."""

  def make(files=FILES, record_bytes=100.0):
    found = []
    for i, (size, skip, take) in enumerate(files):
      path = tmp_path / f'{i}.tfrecord'
      with tf.io.TFRecordWriter(str(path)) as writer:
        for j in range(size):
          writer.write(str(1000 * i + j))
      found.append(shard_utils.FileInstruction(str(path), skip, take, size))
    tfrecord = file_adapters.FileFormat.TFRECORD
    return streams.StreamSource(found, tfrecord, record_bytes, Numbers())

  return make


def numbers(files=FILES):
  """What the records of the split say, in order."""
  return [
    1000 * i + j
    for i, (_, skip, take) in enumerate(files)
    for j in range(skip, skip + take)
  ]


def read(data, count=None):
  data = data if count is None else data.take(count)
  return next(data.batch(10**6).as_numpy_iterator())


@pytest.mark.parametrize(
  'parts, files', [(1, FILES), (3, FILES), (5, [(40, 1, 39), (9, 0, 8)])]
)
def test_all_parts_together_have_every_example_once(make_source, parts, files):
  source = make_source(files)
  total = len(numbers(files))
  assert source.num_examples == total
  found = [read(source.once(parts, part)) for part in range(parts)]
  sizes = [len(part['index']) for part in found]
  assert max(sizes) - min(sizes) <= 1
  index = np.concatenate([part['index'] for part in found])
  values = np.concatenate([part['value'] for part in found])
  assert sorted(index) == list(range(total))
  np.testing.assert_array_equal(values, np.array(numbers(files))[index])
  epoch = [
    read(source.forever(parts, part, 0, 7, 5), sizes[part])
    for part in range(parts)
  ]
  trained = np.concatenate([part['index'] for part in epoch])
  assert sorted(trained) == list(range(total))
  assert trained.tolist() != index.tolist()


def test_fewer_records_than_parts(make_source):
  source = make_source([(2, 0, 2)])
  sizes = [len(list(source.once(3, part))) for part in range(3)]
  assert sizes == [0, 1, 1]
  with pytest.raises(ValueError, match='2 examples are too few for 3 groups'):
    source.forever(3, 0, 0, 5, 0)


@pytest.mark.parametrize('window', [1, 64])
def test_a_run_that_goes_on_sees_what_it_would_have_seen(make_source, window):
  source = make_source()
  size = source.share(2, 1)[1] - source.share(2, 1)[0]
  whole = read(source.forever(2, 1, 0, window, 3), 2 * size + 50)
  for key in whole:
    assert whole[key][:size].tolist() != whole[key][size : 2 * size].tolist()
    for epoch in (whole[key][:size], whole[key][size : 2 * size]):
      assert len(set(epoch)) == size
  for start in (63, size - 1, size + 101):
    got = read(source.forever(2, 1, start, window, 3), 40)
    for key in whole:
      np.testing.assert_array_equal(got[key], whole[key][start : start + 40])
  other = read(source.forever(2, 1, 0, window, 4), size)
  assert other['value'].tolist() != whole['value'][:size].tolist()


def sequence(takes, order, begin, end):
  """The plain meaning of a plan: the records of a share, file by file in turns."""
  flat = [(file, place) for file in order for place in range(takes[file])]
  share = flat[begin:end]
  files = list(dict.fromkeys(file for file, _ in share))
  found = []
  for group in range(0, len(files), streams._FILES):
    queues = [
      [place for place in share if place[0] == file]
      for file in files[group : group + streams._FILES]
    ]
    while any(queues):
      for i, queue in enumerate(queues):
        found += queue[: streams._TURN]
        queues[i] = queue[streams._TURN :]
  return found


def test_a_plan_leaves_out_what_came_before():
  rng = np.random.RandomState(0)
  for count in (1, 5, 16, 17, 50):
    takes = rng.randint(0, 60, count)
    order = rng.permutation(count)
    begin, end = sorted(rng.randint(0, takes.sum() + 1, 2))
    want = sequence(takes, order, begin, end)
    for done in {0, end - begin, *rng.randint(0, end - begin + 1, 20)}:
      files, skips, kept, rest = streams.plan(takes, order, begin, end, done)
      assert 0 <= rest < streams._TURN * streams._FILES
      got = []
      for group in zip(files, skips, kept):
        queues = [
          [(file, skip + i) for i in range(take)]
          for file, skip, take in zip(*group)
        ]
        while any(queues):
          for i, queue in enumerate(queues):
            got += queue[: streams._TURN]
            queues[i] = queue[streams._TURN :]
      assert got[rest:] == want[done:]


def test_going_on_and_evaluation_open_only_the_files_they_need(
  make_source, tmp_path
):
  files = [(60, 0, 60)] * 64
  # Of large records, few are read ahead.
  source, start = make_source(files, 2.0**23), 3000
  whole = read(source.forever(1, 0, 0, 10, 0), 64 * 60)['value']
  # Files are read sixteen at a time: those of the last turn are needed.
  needed = {value // 1000 for value in whole[-16 * 60 :]}
  assert len(needed) == 16
  for i in set(range(64)) - needed:
    (tmp_path / f'{i}.tfrecord').unlink()
  got = read(source.forever(1, 0, start, 10, 0), 20)['value']
  np.testing.assert_array_equal(got, whole[start : start + 20])
  # Evaluation on the second of two hosts, whose files are the second half.
  source = make_source(files)
  for i in range(32):
    (tmp_path / f'{i}.tfrecord').unlink()
  assert sorted(read(source.once(2, 1))['value']) == numbers(files)[32 * 60 :]


def test_a_file_that_is_cut_short_stops_the_run(make_source, tmp_path):
  source = make_source([(10, 0, 10), (10, 0, 10)])
  with tf.io.TFRecordWriter(str(tmp_path / '1.tfrecord')) as writer:
    writer.write('1')
  with pytest.raises(tf.errors.OpError, match='expected to contain 10'):
    list(source.once(1, 0))


def test_the_window_is_bounded_by_records_and_bytes(make_source):
  source = make_source()  # Of records of 100 bytes.
  assert source.window(50_000, 2**30) == 50_000
  assert source.window(50_000, 30_000) == 100
  assert source.window(10, 30_000) == 10
  assert source.window(10, 1) == 1


@pytest.mark.parametrize('parts', [None, 8])
def test_evaluation_pads_each_part(make_source, tiny_config, parts):
  source = make_source()
  tiny_config.batch_eval = 16

  def example(record, seed):
    return {'value': record['value']}

  hosts = [np.arange(8), np.arange(8, 16)]
  found = [
    list(
      input_pipeline.eval_dataset(
        tiny_config, source, example, rows, parts
      ).as_numpy_iterator()
    )
    for rows in hosts
  ]
  steps = -(-TOTAL // 16)
  assert [len(batches) for batches in found] == [steps, steps]
  batches = [batch for host in found for batch in host]
  assert {batch['mask'].shape for batch in batches} == {(8,)}
  index = np.concatenate([batch['index'] for batch in batches])
  mask = np.concatenate([batch['mask'] for batch in batches])
  assert sorted(index[mask == 1]) == list(range(TOTAL))
  assert set(index[mask == 0]) <= {-1}


def test_hosts_that_feed_the_same_rows_read_the_same(make_source, tiny_config):
  """Rows by rows: a batch is made of its parts, whoever reads them."""
  source = make_source()
  tiny_config.update(batch=16, shuffle_buffer=20)

  def example(record, seed):
    return {'value': record['value'], 'seed': seed}

  def batches(rows, parts, start):
    data = input_pipeline.train_dataset(
      tiny_config, source, example, rows, start, parts
    )
    return list(data.take(3).as_numpy_iterator())

  everything = batches(np.arange(16), 4, 5)
  for rows in (np.arange(4, 8), np.array([0, 1, 2, 3, 12, 13, 14, 15])):
    for whole, mine in zip(everything, batches(rows, 4, 5), strict=True):
      for key in whole:
        np.testing.assert_array_equal(mine[key], whole[key][rows])
