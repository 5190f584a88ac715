"""Reads records of tfrecord files by number.

A tfrecord file has no index, but a record's header holds its length:

  length  uint64, little endian
  CRC     uint32, masked CRC-32C of the length
  data    `length` bytes
  CRC     uint32, masked CRC-32C of the data

The lengths of all records are therefore read once. They are stored in the
folder of the data or, if that is read-only, in the cache of this package, and are
valid as long as size and time of a file stay the same. With several processes, each
reads the headers of some files for all, and the processes of a machine share the
offsets, 8 bytes per record, in a memory-mapped file in the cache.
"""

from collections.abc import Callable, Sequence
import contextlib
import io
import itertools
import os
import struct
from typing import Any
import weakref

from absl import logging
import google_crc32c
import jax
from jax.experimental import multihost_utils
import numpy as np

from vit_jax import console
from vit_jax.data.images import image_files
from vit_jax.data.lazy import tf
from vit_jax.data.tfds import parsing, shards
from vit_jax.distributed import files, processes

_HEADER, _FOOTER = 12, 4
_LENGTH = struct.Struct('<QI')
_GZIP = b'\x1f\x8b'  # The first bytes of a compressed file.
# Name of a tfrecord file -> its size, its time, and the lengths of its records,
# including headers and checksums.
_FILE = '.tfrecord_offsets.npz'
# Bytes of offsets that processes share; each has smaller ones for itself.
_LARGE = 2**20


class TfRecordSource(shards.SerializedSource):
  """A split in tfrecord files; see shards.SerializedSource.

  All processes must open the same split.
  """

  def __init__(
    self, files: Sequence[Any], record_bytes: float, reader: parsing.Reader
  ) -> None:
    super().__init__(files, record_bytes, reader)
    counts = [file.examples_in_shard for file in files]
    self._offsets = offsets(self.paths, counts)

  def open_file(self, path: str) -> Callable[[int, int], bytes]:
    return _local(path) if image_files.is_local(path) else _remote(path)

  def read_file(
    self, file: Callable[[int, int], bytes], shard: int, numbers: list[int]
  ) -> list[bytes]:
    offsets, path = self._offsets[shard], self.paths[shard]
    gaps = np.flatnonzero(np.diff(numbers) != 1) + 1
    contents = []
    for run in np.split(np.array(numbers), gaps):  # Neighbours take one read.
      begin = int(offsets[run[0]])
      end = int(offsets[run[-1] + 1])
      block = file(begin, end - begin)
      for i in run.tolist():
        record = block[offsets[i] - begin : offsets[i + 1] - begin]
        contents.append(_data(record, path, i))
    return contents


def _data(record: bytes, path: str, number: int) -> bytes:
  """Returns the data of a record; ValueError if a checksum is wrong."""
  content = record[_HEADER:-_FOOTER]
  checksum = _masked(content).to_bytes(_FOOTER, 'little')
  if _length(record) != len(content) or record[-_FOOTER:] != checksum:
    raise ValueError(
      f"record {number} of '{path}' is damaged, or the file has changed since "
      f'it was opened: {shards.REMEDY}'
    )
  return content


def _masked(content: bytes) -> int:
  """Returns the masked CRC-32C of bytes."""
  crc = google_crc32c.value(content)
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _length(header: bytes) -> int | None:
  """Returns the length in a header; None if its checksum is wrong."""
  if len(header) < _HEADER:
    return None
  length, checksum = _LENGTH.unpack_from(header)
  return length if _masked(header[:8]) == checksum else None


def _local(path: str) -> Callable[[int, int], bytes]:
  """Returns a function (begin, size) -> bytes of a file, for many threads."""
  file = files.open_input(path, buffering=0)
  descriptor = file.fileno()

  def read(begin: int, size: int) -> bytes:
    return os.pread(descriptor, size, begin)

  weakref.finalize(read, file.close).atexit = False
  if hasattr(os, 'posix_fadvise'):
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
  return read


def _remote(path: str) -> Callable[[int, int], bytes]:
  """Returns the same as `_local`, for a file in a bucket."""

  def read(begin: int, size: int) -> bytes:
    with tf.io.gfile.GFile(path, 'rb') as file:
      file.seek(begin)
      return file.read(size)

  return read


def _scan(path: str, size: int, count: int) -> list[int]:
  """Reads the headers of a file; returns the lengths of its records."""
  # A file in a bucket is read sequentially in large blocks.
  is_local = image_files.is_local(path)
  opener = files.open_input(path, 0) if is_local else tf.io.gfile.GFile(path, 'rb')
  lengths: list[int] = []
  begin = 0
  with opener as file:
    while begin < size:
      file.seek(begin)
      header = file.read(_HEADER)
      if not begin and header.startswith(_GZIP):
        raise ValueError(
          f"'{path}' is compressed (GZIP), so that records cannot be read by number: "
          'decompress it under the same name'
        )
      data_length = _length(header)
      length = _HEADER + _FOOTER + (data_length or 0)
      if len(header) < _HEADER or begin + length > size:
        raise ValueError(
          f"'{path}' is cut off within record {len(lengths)}, at byte {size:,}: "
          f'{shards.REMEDY}'
        )
      if data_length is None:
        raise ValueError(
          f"'{path}' is damaged: the header of record {len(lengths)}, at byte "
          f'{begin:,}, has a wrong checksum: {shards.REMEDY}'
        )
      lengths.append(length)
      begin += length
  if len(lengths) != count:
    raise shards.wrong_count(path, len(lengths), count)
  return lengths


def offsets(paths: Sequence[str], counts: Sequence[int]) -> list[np.ndarray]:
  """Returns the offsets of the records in files, the same on all processes.

  Args:
    paths: files in one folder.
    counts: their numbers of records.

  Returns:
    int64 [count + 1] for each file; the last offset is the file's end.
  """
  folder = os.path.dirname(paths[0])
  names = [os.path.basename(path) for path in paths]
  doing = f"reading the headers of '{folder}'"

  def read_stored() -> tuple[list[Any], dict[str, np.ndarray]]:
    stamps = shards.map_files(image_files.size_and_time, paths, 'Looking at files')
    stored: dict[str, np.ndarray] = {}
    for path in _places(folder):
      stored.update(_load(path))
    return stamps, stored

  looking = f'{doing}: looking for stored ones'
  stamps, stored = processes.attempt_local(looking, read_stored)
  local_missing = []
  for i, (name, count, stamp) in enumerate(zip(names, counts, stamps)):
    if name not in stored or not _is_current(stored[name], count, stamp):
      local_missing.append(i)
  missing_by_process = processes.gather(f'{doing}: comparing them', local_missing)
  missing = sorted(set().union(*missing_by_process))
  all_lengths = _scan_all(doing, paths, stamps, counts, missing)
  for i, lengths in zip(missing, all_lengths):
    stored[names[i]] = np.array([*stamps[i], *lengths], np.int64)
  offsets = [np.insert(np.cumsum(stored[name][2:]), 0, 0) for name in names]
  digest = files.digest(offsets)
  processes.agree(
    f"the records of '{folder}'",
    {'number': sum(counts), 'hash of their offsets': digest},
  )
  # Processes that share a disk write the same content.
  if local_missing:
    _save(folder, stored)
  return _shared(offsets, digest)


def _is_current(row: np.ndarray, count: int, stamp: Sequence[int]) -> bool:
  """Returns whether a stored row, see _FILE, has the records of the unchanged file."""
  if row.dtype != np.int64 or row.shape != (count + 2,):
    return False
  size, time = row[:2].tolist()
  lengths = row[2:]
  is_possible = ((lengths > 0) & (lengths <= size)).all() and lengths.sum() == size
  return [size, time] == list(stamp) and bool(is_possible)


def _shared(offsets_of_files: list[np.ndarray], key: str) -> list[np.ndarray]:
  """Returns large offsets memory-mapped: the processes of a machine share them."""
  cuts = np.cumsum(list(map(len, offsets_of_files)))
  if 8 * cuts[-1] < _LARGE:
    return offsets_of_files
  path = console.cache_folder() / 'tfrecords' / f'{key}.npy'
  for _ in range(2):
    with contextlib.suppress(OSError, ValueError, EOFError):  # Missing, or damaged.
      mapped = np.split(np.load(path, mmap_mode='r'), cuts[:-1])
      if all(map(np.array_equal, mapped, offsets_of_files)):
        return mapped
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      with files.replacing(path) as file:
        np.save(file, np.concatenate(offsets_of_files))
    except OSError as e:
      logging.warning('The offsets of the records cannot be shared: %s', e)
      break
  return offsets_of_files


def _scan_all(
  doing: str,
  paths: Sequence[str],
  stamps: Sequence[Any],
  counts: Sequence[int],
  missing: Sequence[int],
) -> list[np.ndarray]:
  """Returns the lengths of the records in the files with the numbers `missing`.

  Each process reads some of the files.
  """
  size_and_count = {paths[i]: (stamps[i][0], counts[i]) for i in missing}
  process, num_processes = jax.process_index(), jax.process_count()

  def scan_file(path: str) -> list[int]:
    size, count = size_and_count[path]
    return _scan(path, size, count)

  def scan() -> list[list[int]]:
    local_paths = [paths[i] for i in missing[process::num_processes]]
    title = 'Reading the headers of tfrecord files'
    return shards.map_files(scan_file, local_paths, title)

  local_lengths = processes.attempt_local(doing, scan)
  files_of_processes = []
  ends_of_processes = []  # Ends of the files in the lengths of a process.
  for i in range(num_processes):
    if numbers := missing[i::num_processes]:
      files_of_processes.append(numbers)
      ends_of_processes.append(np.cumsum([counts[j] for j in numbers], dtype=int))
  # All of one length, so that JAX compiles one broadcast.
  longest = max((ends[-1] for ends in ends_of_processes), default=0)
  padded = np.zeros(longest, np.uint32)
  if process < len(ends_of_processes):
    total = ends_of_processes[process][-1]
    padded[:total] = list(itertools.chain.from_iterable(local_lengths))
  lengths_by_file: dict[int, np.ndarray] = {}
  for i, (numbers, ends) in enumerate(zip(files_of_processes, ends_of_processes)):
    lengths = multihost_utils.broadcast_one_to_all(padded, process == i)
    lengths_of_files = np.split(np.asarray(lengths)[: ends[-1]], ends[:-1])
    lengths_by_file.update(zip(numbers, lengths_of_files))
  return [lengths_by_file[i] for i in missing]


def _places(folder: str) -> list[str]:
  """Returns where the lengths of a folder may be stored, the preferred first."""
  cached = files.digest([folder.encode()])[:16] + '.npz'
  cache = console.cache_folder() / 'tfrecords'
  return [os.path.join(folder, _FILE), str(cache / cached)]


def _save(folder: str, stored: dict[str, np.ndarray]) -> None:
  """Writes the rows of files, see _FILE, to the first writable place."""
  content = io.BytesIO()
  np.savez_compressed(content, **stored)
  for path in _places(folder):
    try:
      tf.io.gfile.makedirs(os.path.dirname(path))
      temporary = f'{path}.{jax.process_index()}.{os.getpid()}.tmp'
      with tf.io.gfile.GFile(temporary, 'wb') as file:
        file.write(content.getvalue())
      tf.io.gfile.rename(temporary, path, overwrite=True)
      return
    except (OSError, tf.errors.OpError) as e:
      error = e
  logging.warning(
    "The offsets of the records in '%s' cannot be stored and are read at every "
    'start: %s',
    folder,
    image_files.first_line(error),
  )


def _load(path: str) -> dict:
  """Returns the stored rows of files, see _FILE; {} if there are none."""
  try:
    return image_files.from_npz(path, dict) or {}
  except OSError:
    return {}
