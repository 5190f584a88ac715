"""Streams TFDS data sets from files without random access (tfrecord).

The order is a pure function of (seed, position), as for all sources, but it is
no permutation of the whole data set. In each epoch (seed, epoch) determines the
order of the files. The rows of a batch are divided into parts, one for each
group of hosts that feeds the same rows. Each part reads its share of the
sequence of records, a few files at a time, and permutes the records within each
window of its share.

A streamed source guarantees:

- Every epoch has every example once, over all parts together.
- Hosts that feed the same rows read the same records.
- A resumed run sees the examples that it would have seen without interruption,
as
  long as the number of parts (of hosts, if `config.mesh.model` is 1) and the
  size of the window (`config.shuffle_buffer`, `config.shuffle_buffer_bytes`)
  are unchanged. Otherwise it resumes in another order, in which some examples
  of the current epoch come twice and others not at all.
- Resuming skips earlier epochs, and earlier files of the epoch, without reading
  them. It reads again the beginning of the files that are open at that place,
  and at most one window of records.

The shuffle is weaker than a permutation: records that are close in a file come
up close in time.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.core import file_adapters

from vit_jax.data import order
from vit_jax.data import records
from vit_jax.datasets import parsing

# Number of files read at a time, and records taken from each in turn.
_FILES = 16
_TURN = 16
# Windows in memory: one being read, one being permuted, one in use.
_WINDOWS = 3


class StreamSource(records.Source):
  """A split of a TFDS data set whose files have no random access.

  Args:
    files: files of the split, and which records of each belong to the split.
    file_format: format of TFDS.
    record_bytes: mean size of a record.
    reader: parser of the records.
  """

  random_access = False

  def __init__(
    self,
    files: Sequence[tfds.core.utils.shard_utils.FileInstruction],
    file_format: file_adapters.FileFormat,
    record_bytes: float,
    reader: parsing.Reader,
  ):
    self._takes = np.array([file.take for file in files], np.int64)
    super().__init__(int(self._takes.sum()), reader.features, reader.names)
    self.chunk = records.chunk(self.num_examples, record_bytes)
    self._paths = tf.constant([str(file.filename) for file in files])
    self._skips = tf.constant([file.skip for file in files], tf.int64)
    # Number of the first record of each file, among the records of the split.
    self._numbers = tf.constant(np.cumsum(self._takes) - self._takes)
    self._adapter = file_adapters.ADAPTER_FOR_FORMAT[file_format]
    self._record_bytes = record_bytes
    self._reader = reader

  def window(self, shuffle_buffer: int, shuffle_bytes: float) -> int:
    """Returns the number of records to permute among themselves.

    Args:
      shuffle_buffer: greatest number of records.
      shuffle_bytes: greatest number of bytes for all windows in memory.
    """
    fitting = int(shuffle_bytes / (_WINDOWS * max(1.0, self._record_bytes)))
    return max(1, min(shuffle_buffer, fitting))

  def share(self, parts: int, part: int) -> tuple[int, int]:
    """Returns (begin, end) of a part's share of the sequence of an epoch."""
    return (
      part * self.num_examples // parts,
      (part + 1) * self.num_examples // parts,
    )

  def once(self, parts: int, part: int) -> tf.data.Dataset:
    """Returns a part's share of the records, once, as tf.data.

    All parts together have every example once. A record also has its number
    within the split, `index`.
    """
    begin, end = self.share(parts, part)
    sequence = tf.range(len(self._takes), dtype=tf.int64)
    return self._parsed(self._read(sequence, begin, end, 0).batch(self.chunk))

  def forever(
    self, parts: int, part: int, start: int, window: int, seed: int
  ) -> tf.data.Dataset:
    """Returns a part's share of the records of all epochs, as tf.data.

    Args:
      parts: number of parts.
      part: number of the part.
      start: number of records of this part to skip.
      window: number of records to permute among themselves.
      seed: seed of the order.

    Raises:
      ValueError: if there are more parts than examples.
    """
    if self.num_examples < parts:
      raise ValueError(
        f'{self.num_examples} examples are too few for {parts} groups of hosts: '
        'use a larger split (config.pp.train)'
      )
    begin, end = self.share(parts, part)
    size, files = end - begin, len(self._takes)
    first, inside = divmod(start, size)
    lead = inside % window

    def epoch_windows(epoch):
      sequence = order.example_indices(
        epoch * files + tf.range(files, dtype=tf.int64), files, seed
      )
      done = tf.where(epoch == first, tf.constant(inside - lead, tf.int64), 0)

      def permute(number, batch):
        count = tf.shape(batch['index'], tf.int64)[0]
        place = epoch * self.num_examples + begin + done + number * window
        places = tf.random.experimental.index_shuffle(
          tf.range(count),
          tf.stack([tf.constant(seed, tf.int64), place]),
          count - 1,
        )
        return {key: tf.gather(value, places) for key, value in batch.items()}

      data = self._read(sequence, begin, end, done).batch(window)
      return data.enumerate().map(permute)

    epochs = tf.data.Dataset.range(first, np.iinfo(np.int64).max)
    windows = epochs.flat_map(epoch_windows).prefetch(1)
    return self._parsed(windows.rebatch(self.chunk)).skip(lead)

  def _read(self, sequence, begin: int, end: int, done) -> tf.data.Dataset:
    """Reads a share of the records, several files at a time.

    Args:
      sequence: the files in their order, int64 [files].
      begin: first record of the share, in the sequence of records.
      end: end of the share, exclusive.
      done: number of records to skip, int64 scalar.

    Returns:
      tf.data of `index`, int64 scalar, and `serialized`, string scalar.
    """
    files, skips, takes, rest = tf.numpy_function(
      lambda sequence, done: plan(self._takes, sequence, begin, end, done),
      [sequence, done],
      [tf.int64] * 4,
    )
    groups = [tf.ensure_shape(x, [None, _FILES]) for x in (files, skips, takes)]

    def read_group(files, skips, takes):
      data = tf.data.Dataset.from_tensor_slices((files, skips, takes))
      return data.filter(lambda file, skip, take: take > 0).interleave(
        self._read_file,
        cycle_length=_FILES,
        block_length=_TURN,
        num_parallel_calls=_FILES,
        deterministic=True,
      )

    data = tf.data.Dataset.from_tensor_slices(tuple(groups))
    data = data.flat_map(read_group).skip(tf.ensure_shape(rest, []))
    return data.map(
      lambda index, serialized: dict(index=index, serialized=serialized)
    )

  def _read_file(self, file, skip, take):
    """Reads `take` records of a file, after skipping `skip` of the split."""
    index = self._numbers[file] + skip
    data = self._adapter.make_tf_data(self._paths[file])
    data = data.skip(self._skips[file] + skip).take(take)
    data = tf.data.Dataset.zip(tf.data.Dataset.range(index, index + take), data)
    # Fails if a file is truncated, since its end would shift all later records.
    return data.apply(tf.data.experimental.assert_cardinality(take))

  def _parsed(self, batches):
    """Parses batches of serialized records; returns tf.data of records."""

    def parse(batch):
      parsed = self._reader.parse_all(batch['serialized'])
      return {'index': batch['index'], **parsed}

    return batches.map(
      parse, num_parallel_calls=records.CALLS, deterministic=True
    ).unbatch()


def plan(takes, sequence, begin, end, done):
  """Computes which records of which files to read for a share of an epoch.

  Args:
    takes: number of records of each file, int64 [files].
    sequence: the files in the order of the epoch, int64 [files].
    begin: first record of the share, in the sequence of records.
    end: end of the share, exclusive.
    done: number of records to skip at the beginning of the share.

  Returns:
    Three int64 [groups, files]: numbers of the files that are read in turns,
    records to skip in each, and records to take from each (0: no file). And the
    number of records to skip after that, int64 scalar, less than a turn of
    every file.
  """
  takes = takes[sequence]
  places = np.cumsum(takes) - takes
  skips = np.clip(begin - places, 0, takes)
  takes = np.clip(end - places, 0, takes) - skips
  kept = np.flatnonzero(takes)
  pad = -len(kept) % _FILES
  files, skips, takes = (
    np.pad(x[kept], (0, pad)).reshape(-1, _FILES)
    for x in (sequence, skips, takes)
  )
  ends = np.cumsum(takes.sum(axis=1))
  group = np.searchsorted(ends, done, side='right')
  files, skips, takes = files[group:], skips[group:], takes[group:]
  rest = done - (ends[group - 1] if group else 0)
  if len(takes):
    turns = _full_turns(takes[0], rest)
    read = np.minimum(takes[0], turns * _TURN)
    skips[0] += read
    takes[0] -= read
    rest -= read.sum()
  return files, skips, takes, np.int64(rest)


def _full_turns(takes, count) -> int:
  """Returns how many turns of all files fit into `count` records."""
  low, high = 0, -(-int(takes.max()) // _TURN)
  while low < high:
    middle = -(-(low + high) // 2)
    if np.minimum(takes, middle * _TURN).sum() <= count:
      low = middle
    else:
      high = middle - 1
  return low
