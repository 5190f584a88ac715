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
_LARGE = 2**20  # Bytes of offsets; each process keeps smaller ones for itself.


class TfRecordSource(shards.ShardSource):
  """A split in tfrecord files; see shards.ShardSource.

  All processes must open the same split.
  """

  def __init__(self, files, record_bytes: float, reader: parsing.Reader):
    super().__init__(files, record_bytes, reader)
    counts = [file.examples_in_shard for file in files]
    self._offsets = offsets(self.paths, counts)

  def open_file(self, path):
    return _local(path) if image_files.is_local(path) else _remote(path)

  def read_file(self, file, shard, places):
    ends, found = self._offsets[shard], []
    gaps = np.flatnonzero(np.diff(places) != 1) + 1
    for run in np.split(np.array(places), gaps):  # Neighbours take one read.
      begin, end = int(ends[run[0]]), int(ends[run[-1] + 1])
      content = file(begin, end - begin)
      for i in run.tolist():
        record = content[ends[i] - begin : ends[i + 1] - begin]
        found.append(_data(record, self.paths[shard], i))
    return found


def _data(record: bytes, path: str, place: int) -> bytes:
  """Returns the data of a record; ValueError if a checksum is wrong."""
  found = record[_HEADER:-_FOOTER]
  checksum = _masked(found).to_bytes(_FOOTER, 'little')
  if _length(record) != len(found) or record[-_FOOTER:] != checksum:
    raise ValueError(
      f"record {place} of '{path}' is damaged, or the file has changed since "
      f'it was opened: {shards.REMEDY}'
    )
  return found


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

  def read(begin, size):
    return os.pread(descriptor, size, begin)

  weakref.finalize(read, file.close).atexit = False
  if hasattr(os, 'posix_fadvise'):
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
  return read


def _remote(path: str) -> Callable[[int, int], bytes]:
  """Returns the same as `_local`, for a file in a bucket."""

  def read(begin, size):
    with tf.io.gfile.GFile(path, 'rb') as file:
      file.seek(begin)
      return file.read(size)

  return read


def _scan(path: str, size: int, count: int) -> list[int]:
  """Reads the headers of a file; returns the lengths of its records."""
  found, begin, is_local = [], 0, image_files.is_local(path)
  # A file in a bucket is read sequentially in large blocks.
  opener = files.open_input(path, 0) if is_local else tf.io.gfile.GFile(path, 'rb')
  with opener as file:
    while begin < size:
      file.seek(begin)
      header = file.read(_HEADER)
      if not begin and header.startswith(_GZIP):
        raise ValueError(
          f"'{path}' is compressed (GZIP), so that records cannot be read by number: "
          'decompress it under the same name'
        )
      length = _length(header)
      found.append(_HEADER + _FOOTER + (length or 0))
      if len(header) < _HEADER or begin + found[-1] > size:
        raise ValueError(
          f"'{path}' is cut off within record {len(found) - 1}, at byte "
          f'{size:,}: {shards.REMEDY}'
        )
      if length is None:
        raise ValueError(
          f"'{path}' is damaged: the header of record {len(found) - 1}, at byte "
          f'{begin:,}, has a wrong checksum: {shards.REMEDY}'
        )
      begin += found[-1]
  if len(found) != count:
    raise shards.wrong_count(path, len(found), count)
  return found


def offsets(paths: Sequence[str], counts: Sequence[int]) -> list[np.ndarray]:
  """Returns where the records of files begin, the same on all processes.

  The files are in one folder, and `counts` are their numbers of records. Returns
  int64 [count + 1] for each file; the last is the file's end.
  """
  folder, names = os.path.dirname(paths[0]), list(map(os.path.basename, paths))
  what = f"reading the headers of '{folder}'"
  stored, stamps = {}, []

  def lacking():
    stamps[:] = shards.each(image_files.size_and_time, paths, 'Looking at files')
    for place in _places(folder):
      stored.update(_load(place))
    return [
      i
      for i, (name, count, stamp) in enumerate(zip(names, counts, stamps))
      if name not in stored or not _is_current(stored[name], count, stamp)
    ]

  everywhere = processes.attempt(f'{what}: looking for stored ones', lacking)
  todo = sorted(set().union(*everywhere))
  for i, lengths in zip(todo, _scan_all(what, paths, stamps, counts, todo)):
    stored[names[i]] = np.array([*stamps[i], *lengths], np.int64)
  found = [np.insert(np.cumsum(stored[name][2:]), 0, 0) for name in names]
  facts = {'number': sum(counts), 'hash of their offsets': files.digest(found)}
  processes.agree(f"the records of '{folder}'", facts)
  # Processes that share a disk write the same content.
  if everywhere[jax.process_index()]:
    _save(folder, stored)
  return _shared(found, facts['hash of their offsets'])


def _is_current(row: np.ndarray, count: int, stamp: Sequence[int]) -> bool:
  """Returns whether a stored row, see _FILE, has the records of the unchanged file."""
  if row.dtype != np.int64 or row.shape != (count + 2,):
    return False
  (size, time), lengths = row[:2].tolist(), row[2:]
  is_possible = ((lengths > 0) & (lengths <= size)).all() and lengths.sum() == size
  return [size, time] == list(stamp) and bool(is_possible)


def _shared(found: list[np.ndarray], key: str) -> list[np.ndarray]:
  """Returns large offsets memory-mapped: the processes of a machine share them."""
  cuts = np.cumsum(list(map(len, found)))
  if 8 * cuts[-1] < _LARGE:
    return found
  path = console.cache_folder() / 'tfrecords' / f'{key}.npy'
  for _ in range(2):
    with contextlib.suppress(OSError, ValueError, EOFError):  # Missing, or damaged.
      mapped = np.split(np.load(path, mmap_mode='r'), cuts[:-1])
      if all(map(np.array_equal, mapped, found)):
        return mapped
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      with files.replacing(path) as file:
        np.save(file, np.concatenate(found))
    except OSError as e:
      logging.warning('The offsets of the records cannot be shared: %s', e)
      break
  return found


def _scan_all(what, paths, stamps, counts, todo) -> list[np.ndarray]:
  """Returns the lengths in the files `todo`, of which each process reads a part."""
  facts = {paths[i]: (stamps[i][0], counts[i]) for i in todo}
  me, count, made = jax.process_index(), jax.process_count(), []

  def scan():
    mine = [paths[i] for i in todo[me::count]]
    title = 'Reading the headers of tfrecord files'
    made.extend(shards.each(lambda path: _scan(path, *facts[path]), mine, title))

  processes.attempt(what, scan)
  found, shares = {}, [todo[process::count] for process in range(count)]
  ends = [np.cumsum([counts[i] for i in share], dtype=int) for share in shares if share]
  # Of one length, so that JAX compiles one broadcast.
  padded = np.zeros(max((end[-1] for end in ends), default=0), np.uint32)
  if me < len(ends):
    padded[: ends[me][-1]] = list(itertools.chain(*made))
  for process, (share, end) in enumerate(zip(shares, ends)):
    lengths = multihost_utils.broadcast_one_to_all(padded, process == me)
    found.update(zip(share, np.split(np.asarray(lengths)[: end[-1]], end[:-1])))
  return [found[i] for i in todo]


def _places(folder: str) -> list[str]:
  """Returns where the lengths of a folder may be stored, the preferred first."""
  cached = files.digest([folder.encode()])[:16] + '.npz'
  cache = console.cache_folder() / 'tfrecords'
  return [os.path.join(folder, _FILE), str(cache / cached)]


def _save(folder: str, stored: dict):
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
    'start: %s', folder, image_files.first_line(error),
  )  # fmt: skip


def _load(path: str) -> dict:
  """Returns the stored rows of files, see _FILE; {} if there are none."""
  try:
    return image_files.from_npz(path, dict) or {}
  except OSError:
    return {}
