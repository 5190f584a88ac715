"""Reads records of tfrecord files by number.

A tfrecord file has no table of its records, but a record's header holds its
length:

  length  uint64, little endian
  CRC     uint32, masked CRC-32C of the length
  data    `length` bytes
  CRC     uint32, masked CRC-32C of the data

The offsets of all records are therefore read once. They are stored in the
folder of the data or, where that cannot be written, in the cache of this
package, and are valid as long as the size and the time of a file stay the same.
With several processes, each reads the headers of some files for all.
"""

import base64
from collections.abc import Sequence
from concurrent import futures
import contextlib
import io
import json
import os
import struct
import weakref
import zlib

from absl import logging
import google_crc32c
import jax
import numpy as np
import tensorflow as tf

from vit_jax import cli
from vit_jax.data.images import index as index_lib
from vit_jax.data.images import reading
from vit_jax.data.tfds import parsing
from vit_jax.data.tfds import shards
from vit_jax.distributed import processes

_HEADER, _FOOTER = 12, 4
_LENGTH = struct.Struct('<QI')
_CHECKSUM = struct.Struct('<I')
# The first bytes of a compressed file.
GZIP = b'\x1f\x8b'
_FILE = '.tfrecord_offsets.npz'
_VERSION = 1
# Bytes of remote files read at a time for their headers.
_BLOCK = 4 * 2**20
# Where records are larger, the system shall not read ahead from the headers.
_LARGE = 2**16
# Bytes that a process tells the others at a time.
_MESSAGE = 2**18


class TfRecordSource(shards.ShardSource):
  """A split in tfrecord files; see shards.ShardSource.

  All processes must open the same split.

  Raises:
    ValueError: if a file is damaged, compressed, or has another number of
      records than dataset_info.json says.
    OSError: if a file cannot be read.
  """

  def __init__(self, files, record_bytes: float, reader: parsing.Reader):
    super().__init__(files, record_bytes, reader)
    counts = [file.examples_in_shard for file in files]
    self._offsets = offsets(self.paths, counts)

  def open_file(self, path):
    return _Remote(path) if shards.is_remote(path) else _Local(path)

  def read_file(self, file, shard, places):
    ends, path = self._offsets[shard], self.paths[shard]
    return [
      _data(file.read(int(ends[i]), int(ends[i + 1] - ends[i])), path, i)
      for i in places
    ]


def _data(record: bytes, path: str, place: int) -> bytes:
  """Returns the data of a record after a check of both checksums."""
  found = record[_HEADER:-_FOOTER]
  if (
    _length(record) != len(found)
    or _masked(found) != _CHECKSUM.unpack(record[-_FOOTER:])[0]
  ):
    raise ValueError(
      f"record {place} of '{path}' is damaged, or the file has changed since "
      f'it was opened: {shards.REMEDY}'
    )
  return found


def _masked(content: bytes) -> int:
  """Returns the masked CRC-32C of some bytes."""
  crc = google_crc32c.value(content)
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _length(header: bytes) -> int | None:
  """Returns the length that a header says; None if its checksum is wrong."""
  if len(header) < _HEADER:
    return None
  length, checksum = _LENGTH.unpack_from(header)
  return length if _masked(header[:8]) == checksum else None


# --- Files ---


class _Local:
  """A file on a disk; `far`: the parts that are read lie far apart."""

  def __init__(self, path: str, far: bool = True):
    self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    weakref.finalize(self, os.close, self._descriptor).atexit = False
    if far and hasattr(os, 'posix_fadvise'):
      os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

  def read(self, begin: int, size: int) -> bytes:
    """Returns a part of the file; may be called by several threads."""
    return os.pread(self._descriptor, size, begin)


class _Remote:
  """A file in a bucket."""

  def __init__(self, path: str):
    self._path = path

  def read(self, begin: int, size: int) -> bytes:
    with tf.io.gfile.GFile(self._path, 'rb') as file:
      file.seek(begin)
      return file.read(size)


def _in_blocks(file):
  """Returns a function (begin, size) -> bytes; `begin` must not decrease."""
  start, held = 0, b''

  def read(begin, size):
    nonlocal start, held
    while begin + size > start + len(held):
      more = file.read(_BLOCK)
      if not more:
        break
      kept = held[max(0, begin - start) :]
      start += len(held) - len(kept)
      held = kept + more
    return held[begin - start : begin - start + size]

  return read


def _stamp(path) -> tuple[int, int]:
  """Returns the size and the time of a file."""
  if shards.is_remote(path):
    found = tf.io.gfile.stat(path)
    return found.length, found.mtime_nsec
  found = os.stat(path)
  return found.st_size, found.st_mtime_ns


def _scan(path: str, size: int, count: int) -> np.ndarray:
  """Reads the headers of a file; returns int64 [count + 1], begins and the end.

  Raises:
    ValueError: if the file is damaged, or has another number of records.
  """
  found = [0]
  with contextlib.ExitStack() as stack:
    if shards.is_remote(path):
      content = _in_blocks(stack.enter_context(tf.io.gfile.GFile(path, 'rb')))
    else:
      content = _Local(path, far=size > _LARGE * count).read
    if content(0, len(GZIP)) == GZIP:
      raise ValueError(
        f"'{path}' is compressed (GZIP), and such records cannot be read by "
        'number: run python -m vit_jax.data.tfds.convert NAME'
      )
    while found[-1] < size:
      begin, place = found[-1], len(found) - 1
      header = content(begin, _HEADER)
      length = _length(header)
      end = begin + _HEADER + _FOOTER + (length or 0)
      if len(header) < _HEADER or end > size:
        raise ValueError(
          f"'{path}' is cut off within record {place}, at byte {size:,}: "
          f'{shards.REMEDY}'
        )
      if length is None:
        raise ValueError(
          f"'{path}' is damaged: the header of record {place}, at byte "
          f'{begin:,}, has a wrong checksum: {shards.REMEDY}'
        )
      found.append(end)
  if len(found) - 1 != count:
    raise shards.wrong_count(path, len(found) - 1, count)
  return np.array(found, np.int64)


# --- The offsets of a split ---


def offsets(paths: Sequence[str], counts: Sequence[int]) -> list[np.ndarray]:
  """Returns where the records of files begin, the same on all processes.

  Args:
    paths: the files, in one folder.
    counts: number of records of each file.

  Returns:
    For each file int64 [count + 1], with the file's end; errors as above.
  """
  folder, names = os.path.dirname(paths[0]), list(map(os.path.basename, paths))
  stored: dict[str, tuple] = {}
  stamps = []

  def look():
    stamps[:] = shards.each(lambda path: shards.attempted(path, _stamp), paths)
    for place in _places(folder):
      stored.update(_load(place))
    lacking = []
    for i, (name, stamp, count) in enumerate(zip(names, stamps, counts)):
      old, ends = stored.get(name, (None, ()))
      if old != stamp or len(ends) != count + 1:
        lacking.append(i)
    return lacking

  what = f"reading the headers of '{folder}'"
  lacking = processes.attempt(f'{what}: looking for stored ones', look)
  todo = sorted(set().union(*lacking))
  mine = todo[jax.process_index() :: jax.process_count()]
  made = {}

  def scan():
    made.update(_scan_all(paths, [stamp[0] for stamp in stamps], counts, mine))

  if todo:
    processes.attempt(what, scan)
    made = _exchange(what, made, todo, counts)
    for i, ends in made.items():
      if ends[-1] != stamps[i][0]:
        raise ValueError(
          f"'{paths[i]}' has {stamps[i][0]:,} bytes here and {ends[-1]:,} on "
          'another host: give all hosts the same files'
        )
      stored[names[i]] = stamps[i], ends
  # One process writes what all see. What it did not write for another process,
  # which has a disk of its own, that process writes itself.
  processes.from_first(
    f'{what}: storing them', lambda: todo and _save(folder, stored)
  )
  if lacking[jax.process_index()] and jax.process_index():
    there = {k: v for place in _places(folder) for k, v in _load(place).items()}
    if any(there.get(n, (None,))[0] != s for n, s in zip(names, stamps)):
      _save(folder, stored)
  found = [stored[name][1] for name in names]
  processes.agree(
    f"the records of '{folder}'",
    {'number': sum(counts), 'hash of their offsets': index_lib.digest(found)},
  )
  return found


def _scan_all(paths, sizes, counts, numbers) -> dict[int, np.ndarray]:
  """Returns the offsets of some files by their numbers."""
  remote = shards.is_remote(paths[0])
  threads = 2 * index_lib.REMOTE_THREADS if remote else 16

  def scan(i):
    return shards.attempted(
      paths[i], lambda path: _scan(path, sizes[i], counts[i])
    )

  with futures.ThreadPoolExecutor(threads) as pool:
    found = cli.bar(
      iterable=pool.map(scan, numbers), total=len(numbers), delay=3,
      desc='Reading the headers of tfrecord files', leave=False, unit=' files',
    )  # fmt: skip
    try:
      return dict(zip(numbers, found))
    except BaseException:
      pool.shutdown(cancel_futures=True)
      raise


def _exchange(what, mine, todo, counts) -> dict[int, np.ndarray]:
  """Returns the offsets that all processes have read, by number of the file."""
  if jax.process_count() == 1:
    return mine
  lengths = [np.diff(ends) for ends in mine.values()]
  content = zlib.compress(
    np.concatenate([[], *lengths]).astype('<i8').tobytes()
  )
  pieces = [content[i : i + _MESSAGE] for i in range(0, len(content), _MESSAGE)]
  everywhere = [b''] * jax.process_count()
  for turn in range(max(processes.gather(f'{what}: counting', len(pieces)))):
    piece = pieces[turn] if turn < len(pieces) else b''
    told = processes.gather(
      f'{what}: telling each other', base64.b64encode(piece).decode()
    )
    everywhere = [a + base64.b64decode(b) for a, b in zip(everywhere, told)]
  found = {}
  for process, content in enumerate(everywhere):
    theirs = todo[process :: jax.process_count()]
    lengths = np.frombuffer(zlib.decompress(content), '<i8')
    ends = np.cumsum([counts[i] for i in theirs])
    for i, part in zip(theirs, np.split(lengths, ends[:-1])):
      found[i] = np.concatenate([[0], np.cumsum(part)]).astype(np.int64)
  return found


# --- On disk ---


def _places(folder: str) -> list[str]:
  """Returns where the offsets of a folder may be stored, the best place first."""
  key = index_lib.digest([folder.encode()])[:16]
  return [
    os.path.join(folder, _FILE),
    str(cli.cache_folder() / 'tfrecords' / f'{key}.npz'),
  ]


def _save(folder: str, stored: dict):
  """Writes offsets, {name: ((size, time), offsets)}, where that is possible."""
  names = list(stored)
  columns = {
    'stamps': np.array([stored[name][0] for name in names], np.int64),
    'counts': np.array([len(stored[name][1]) - 1 for name in names], np.int64),
    'lengths': np.concatenate([np.diff(stored[name][1]) for name in names]),
  }
  facts = {'version': _VERSION, 'names': names, 'digest': _digest(columns)}
  content = io.BytesIO()
  facts = np.frombuffer(json.dumps(facts).encode(), np.uint8)
  np.savez_compressed(content, facts=facts, **columns)
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
    "The offsets of the records in '%s' cannot be stored, and every start reads "
    'them anew: %s',
    folder,
    reading.first_line(error),
  )


def _load(path: str) -> dict:
  """Returns stored offsets, {name: ((size, time), offsets)}; {} without any."""
  try:
    with tf.io.gfile.GFile(path, 'rb') as file:
      content = file.read()
  except (OSError, tf.errors.OpError):
    return {}
  try:
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
      facts = json.loads(found['facts'].tobytes())
      columns = {name: found[name] for name in ('stamps', 'counts', 'lengths')}
    if facts['version'] != _VERSION or facts['digest'] != _digest(columns):
      raise ValueError('another version')
    lengths = np.split(columns['lengths'], np.cumsum(columns['counts'])[:-1])
    return {
      name: (tuple(stamp), np.concatenate([[0], np.cumsum(part)]))
      for name, stamp, part in zip(
        facts['names'], columns['stamps'].tolist(), lengths, strict=True
      )
    }
  except Exception:  # NumPy does not document the errors for damaged files.
    logging.warning("'%s' is damaged or of another version: ignored", path)
    return {}


def _digest(columns) -> str:
  return index_lib.digest(np.ascontiguousarray(x) for x in columns.values())
