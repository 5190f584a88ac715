"""Reads records of TFDS's files, called shards, by number.

Records are numbered in TFDS's order: shard by shard, in the order of the file.
Errors name the file.
"""

import abc
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import errno
import os
import resource
import threading
from typing import Any

import numpy as np

from vit_jax.data import records
from vit_jax.data.images import image_files, orientation
from vit_jax.data.lazy import tf
from vit_jax.data.tfds import parsing

# Largest number of open files: with fewer than the shards, a random order reopens files.
_OPEN_FILES = 1024
# Largest number of parallel reads from a bucket. Threads start when all others are
# waiting, so that their number follows the latency.
_REMOTE_READS = 256
_RECORD = 'record'  # Feature of `lookup`, which `read` parses.
REMEDY = 'copy or prepare the data set again'
# Largest split, in bytes, whose labels are read at the start: they are among its images.
LABELLED_BYTES = 2**27
# Words in array_record's errors after which another attempt is useless.
_LASTING = ('Corrupted', 'Invalid', 'should be at least', 'out of bound')


class ShardSource(records.Source, abc.ABC):
  """A split in files whose records can be read by number.

  `files` are TFDS's FileInstructions: the files of the split, and which records
  of each belong to it. `record_bytes` is the mean size of a record. For the other
  arguments see records.Source.
  """

  def __init__(
    self,
    files: Sequence[Any],
    record_bytes: float,
    features: Iterable[str],
    names: Mapping[str, Sequence[str]],
  ) -> None:
    self.paths = [os.fspath(file.filename) for file in files]
    self._skips = np.array([file.skip for file in files], np.int64)
    self._ends = np.cumsum([file.take for file in files])
    # Open files by shard, the last used last.
    self._files: collections.OrderedDict[int, Any] = collections.OrderedDict()
    self._lock = threading.Lock()
    _allow_open_files(min(len(files), _OPEN_FILES))
    self._pool = None
    chunks = 1
    if not all(map(image_files.is_local, self.paths)):
      self._pool = futures.ThreadPoolExecutor(_REMOTE_READS)
      chunks = 4  # Keeps enough reads in flight.
    super().__init__(int(self._ends[-1]), features, names)
    self.chunk = records.chunk(self.num_examples, record_bytes / chunks)

  def stored(self, indices: np.ndarray) -> np.ndarray:
    """Returns what `read_file` returns of the records with these numbers [b]."""
    shards, numbers = self._places(indices)
    rows = np.lexsort([numbers, shards])  # In the order of the files.
    starts_read = np.diff(shards[rows]) != 0
    if self._pool is not None:
      # Only neighbouring records are read together, all others in parallel.
      starts_read |= np.diff(numbers[rows]) != 1
    runs = np.split(rows, np.flatnonzero(starts_read) + 1) if len(rows) else []

    def read(run: np.ndarray) -> Sequence[Any]:
      return self._read(int(shards[run[0]]), numbers[run].tolist())

    contents = np.empty(len(shards), object)
    map_runs = map if self._pool is None else self._pool.map
    for run, run_contents in zip(runs, map_runs(read, runs)):
      for row, content in zip(run, run_contents):
        contents[row] = content
    return contents

  def name(self, index: int) -> str:
    [shard], [number] = self._places(np.array([index]))
    return f'record {number} of {os.path.basename(self.paths[shard])}'

  def _places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the shards of examples, and the number of each in its shard."""
    shards = np.searchsorted(self._ends, indices, side='right')
    starts = self._ends[shards - 1] * (shards > 0)
    return shards, indices - starts + self._skips[shards]

  def _read(self, shard: int, numbers: list[int]) -> Sequence[Any]:
    """Returns records of a shard by their numbers in it, ascending."""

    def read(path: str) -> Sequence[Any]:
      with self._lock:
        file = self._files.pop(shard, None)
        if file is not None:
          self._files[shard] = file
      file = self.open_file(path) if file is None else file
      try:
        contents = self.read_file(file, shard, numbers)
      except BaseException:
        with self._lock:
          self._files.pop(shard, None)  # Another attempt reopens the file.
        raise
      with self._lock:
        self._files[shard] = file
        if len(self._files) > _OPEN_FILES:
          self._files.popitem(last=False)
      return contents

    return attempted(self.paths[shard], read)

  @abc.abstractmethod
  def open_file(self, path: str) -> Any:
    """Opens a file for reading; what it returns is closed when unused."""

  @abc.abstractmethod
  def read_file(self, file: Any, shard: int, numbers: list[int]) -> Sequence[Any]:
    """Returns records of an open file by their numbers in it, ascending."""


class SerializedSource(ShardSource):
  """A split in files of serialized records, which `reader` parses."""

  def __init__(
    self, files: Sequence[Any], record_bytes: float, reader: parsing.Reader
  ) -> None:
    super().__init__(files, record_bytes, reader.features, reader.names)
    self._reader = reader
    self._num_bytes = self.num_examples * record_bytes
    self._labels: np.ndarray | None = None  # Once they are read.

  def labels(self) -> np.ndarray | None:
    """Returns the classes of the examples; None for a split above 128 MiB."""
    if 'label' not in self.features or self._num_bytes > LABELLED_BYTES:
      return None
    if self._labels is None:
      contents = self.stored(np.arange(self.num_examples))
      self._labels = self._reader.parse_labels(contents)
    return self._labels

  def lookup(self, indices: 'tf.Tensor') -> records.Record:
    serialized = tf.numpy_function(self.stored, [indices], tf.string, stateful=False)
    return {_RECORD: tf.ensure_shape(serialized, [None])}

  def read(self, record: records.Record) -> records.Record:
    """Parses the record of one example; its image stays as it was prepared."""
    if _RECORD not in record:  # Pseudo-labels without their images.
      return record
    record = dict(record)
    record |= self._reader.parse(record.pop(_RECORD))
    if 'image' in record:
      record['image'] = orientation.as_stored(record['image'])
    return record


class ArrayRecordSource(SerializedSource):
  """A split in array_record files, which are checked: ValueError, OSError."""

  def __init__(
    self, files: Sequence[Any], record_bytes: float, reader: parsing.Reader
  ) -> None:
    super().__init__(files, record_bytes, reader)
    self._counts = {
      path: file.examples_in_shard for path, file in zip(self.paths, files)
    }
    # The records are counted when a file is first read: an open one takes .6 MB.
    map_files(image_files.size_and_time, list(self._counts), 'Looking at files')

  def open_file(self, path: str) -> Any:
    from array_record.python import array_record_module

    with _named(path):
      file = array_record_module.ArrayRecordReader(
        path,
        options='readahead_buffer_size:0,max_parallelism:0',
        file_reader_buffer_size=32768,
      )
      if file.num_records() != self._counts[path]:
        file.read([0])  # Explains why a damaged file counts as empty.
        raise wrong_count(path, file.num_records(), self._counts[path])
    return file

  def read_file(self, file: Any, shard: int, numbers: list[int]) -> Sequence[bytes]:
    with _named(self.paths[shard]):
      return file.read(numbers)


def map_files(function: Callable[[str], Any], paths: Sequence[str], title: str) -> list:
  """Returns function(path) of all paths, computed in threads."""
  return image_files.in_threads(
    lambda path: attempted(path, function), paths, title, ' files'
  )


def _allow_open_files(count: int) -> None:
  """Raises the limit on open files where possible."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft == resource.RLIM_INFINITY:
    return
  limit = soft + count
  if hard != resource.RLIM_INFINITY:
    limit = min(limit, hard)
  resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def attempted(path: str, function: Callable) -> Any:
  """Calls function(path), see image_files.retried."""
  try:
    return image_files.retried(path, function)
  except FileNotFoundError as e:
    raise FileNotFoundError(
      f"'{path}' is missing, but dataset_info.json lists it: {REMEDY}"
    ) from e


def wrong_count(path: str, count: int, expected: int) -> ValueError:
  """Returns the error for a number of records other than TFDS's."""
  return ValueError(
    f"'{path}' has {count:,} records, but dataset_info.json says {expected:,}: {REMEDY}"
  )


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
  """Converts array_record's errors to Python's, with the file's name."""
  try:
    yield
  except (RuntimeError, IndexError) as e:
    reason = image_files.first_line(e)
    if 'No such file' in reason:
      raise FileNotFoundError(errno.ENOENT, reason) from e
    if any(word in reason for word in _LASTING):
      raise ValueError(f"'{path}' is damaged: {reason}: {REMEDY}") from e
    raise OSError(None, reason) from e
