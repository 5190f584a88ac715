"""An index: the images of a folder, and which of them can be decoded.

An index takes a few bytes more than the names of the images. It is up to date as long
as no folder has changed, and the result of checking a file is valid as long as its
size and modification time are the same.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import concurrent.futures
import hashlib
import json
import os
import time
from typing import Any, NamedTuple, overload

from etils import epath
import numpy as np

from vit_jax import console
from vit_jax.data.images import formats, image_files
from vit_jax.distributed import files

# Status of a file: not checked; was decoded; cannot be decoded.
UNKNOWN, DECODED, BROKEN = range(3)

_SAVE_EVERY = 60.0  # Seconds between saves of the results of a check.
_THREADS = 2 * (os.cpu_count() or 1)
_BLOCK = 4096  # Number of files passed to the threads at a time.


class Checks(NamedTuple):
  """The results of checking the files of an index, by row.

  Attributes:
    status: uint8 [n], UNKNOWN, DECODED or BROKEN.
    stamps: uint64 [n], hash of size and time of each file when checked, or 0.
    reasons: why files are broken, by row.
    settings: what the results depend on: 'max_pixels', and 'sizes', a hash of expected
      sizes; empty before the first check.
  """

  status: np.ndarray
  stamps: np.ndarray
  reasons: dict[int, str]
  settings: dict[str, Any]

  @classmethod
  def empty(cls, count: int) -> 'Checks':
    """Returns the checks of `count` files of which none was checked."""
    return cls(np.zeros(count, np.uint8), np.zeros(count, np.uint64), {}, {})

  def selected(self, rows: np.ndarray) -> 'Checks':
    """Returns the checks of some rows only; the others are UNKNOWN."""
    checks = Checks.empty(len(self.status))._replace(settings=self.settings)
    checks.status[rows] = self.status[rows]
    checks.stamps[rows] = self.stamps[rows]
    for row in np.flatnonzero(checks.status == BROKEN).tolist():
      checks.reasons[row] = self.reasons.get(row, '')
    return checks

  def fits(self, other: 'Checks') -> bool:
    """Returns whether the settings of both agree; an absent one agrees with any."""
    names = self.settings.keys() & other.settings.keys()
    return all(self.settings[name] == other.settings[name] for name in names)

  def arrays(self) -> dict[str, np.ndarray]:
    """Returns the checks as arrays, for a file."""
    facts = {'reasons': self.reasons, 'settings': self.settings}
    return {'status': self.status, 'stamps': self.stamps, 'checks': _as_bytes(facts)}

  @classmethod
  def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> 'Checks':
    """Returns the checks with these `arrays`."""
    facts = json.loads(arrays['checks'].tobytes())
    reasons = {int(row): reason for row, reason in facts['reasons'].items()}
    return cls(arrays['status'], arrays['stamps'], reasons, facts['settings'])


def merge(a: Checks, b: Checks) -> Checks:
  """Returns the checks of `a`, and of files that it has not checked those of `b`.

  Both are of the same files. Returns `a` if `b` has other settings.
  """
  if not a.fits(b):
    return a
  is_new = a.status == UNKNOWN
  reasons = dict(a.reasons)
  for row, reason in b.reasons.items():
    if is_new[row]:
      reasons[row] = reason
  return Checks(
    np.where(is_new, b.status, a.status),
    np.where(is_new, b.stamps, a.stamps),
    reasons,
    b.settings | a.settings,
  )


class Index:
  """Images below a folder, by row; the rows never change.

  Attributes:
    root, base, top: folder of the data set, name of the split, and its folder.
    path: file with exactly this content; None if there is none.
    folders: paths of the folders with images, relative to `top`; bytes.
    counts: int64 [f], number of images in each folder.
    order: uint32 [n], rows in the order of a hash of their names.
    checks: results of checking the files.
    facts: values for JSON: 'listed' (a date), 'times' (of the last change of
      every folder), 'endings' (of images), 'ignored' (counts of the other entries by
      their endings, and the first one),
      'metadata' (paths of files that describe the images),
      'bare' (direct subfolders that hold no image).
  """

  def __init__(
    self,
    root: str,
    base: str,
    folders: list[bytes],
    counts: Sequence[int] | np.ndarray,
    names: bytes | memoryview,
    order: np.ndarray,
    facts: dict[str, Any],
  ) -> None:
    self.root, self.base = root, base
    self.top = os.path.join(root, base)
    self.path: str | None = None
    self.folders = folders
    self.counts = np.asarray(counts, np.int64)
    self.order = order
    self.checks = Checks.empty(len(order))
    self.facts = facts
    self._names = names  # Each name ends with a zero byte.
    ends = np.flatnonzero(np.frombuffer(names, np.uint8) == 0)
    self._ends = ends.astype(np.uint32 if len(names) < 2**32 else np.int64)
    self._last = np.cumsum(self.counts)

  def __len__(self) -> int:
    return len(self.order)

  def folder_of(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the number of the folder of each row."""
    return np.searchsorted(self._last, rows, side='right')

  def names(self, rows: Sequence[int] | np.ndarray) -> list[bytes]:
    """Returns the paths of images relative to `top`, by row."""
    rows = np.asarray(rows, np.int64)
    ends = self._ends[rows].tolist()
    begins = np.where(rows > 0, self._ends[rows - 1].astype(np.int64) + 1, 0)
    folders, names = self.folders, self._names
    paths = []
    for number, begin, end in zip(self.folder_of(rows).tolist(), begins.tolist(), ends):
      name = bytes(names[begin:end])
      folder = folders[number]
      paths.append(b'%s/%s' % (folder, name) if folder else name)
    return paths

  def paths(self, rows: Sequence[int] | np.ndarray) -> list[bytes]:
    """Returns the complete paths of images, by row."""
    top = os.fsencode(self.top)
    paths = []
    for name in self.names(rows):
      paths.append(name if b'://' in name else os.path.join(top, name))
    return paths

  def digest(self) -> str:
    """Returns a hash of all names, their order, and the broken ones."""
    bad = np.flatnonzero(self.checks.status == BROKEN)
    return files.digest([*self._all_names(), self.order, bad])

  def _all_names(self) -> tuple[bytes, bytes, bytes | memoryview]:
    return _lines(self.folders), self.counts.tobytes(), self._names

  def arrays(self) -> dict[str, np.ndarray]:
    """Returns the list of images as arrays, without the status of each."""
    return dict(
      facts=_as_bytes(self.facts),
      folders=np.frombuffer(_lines(self.folders), np.uint8),
      names=np.frombuffer(self._names, np.uint8),
      counts=self.counts,
      order=self.order,
    )

  @classmethod
  def from_arrays(
    cls, root: str, base: str, arrays: Mapping[str, np.ndarray]
  ) -> 'Index':
    """Returns the index with these `arrays`; the names are not copied."""
    facts = json.loads(arrays['facts'].tobytes())
    folders = arrays['folders'].tobytes().split(b'\0')[:-1]
    names = memoryview(arrays['names'])
    return cls(root, base, folders, arrays['counts'], names, arrays['order'], facts)

  # --- Status of the files ---

  def check(
    self,
    rows: Sequence[int] | np.ndarray,
    explain: Callable,
    max_pixels: int,
    save: Callable[[], None] | None = None,
  ) -> bool:
    """Checks the files of rows that were not checked before.

    See checking.usable for `explain`, `max_pixels` and errors. `save` is called about
    every minute. Returns whether any file was checked.
    """
    self.check_anew('max_pixels', max_pixels)
    status, stamps, reasons, _ = self.checks
    rows = np.unique(rows[status[rows] == UNKNOWN])

    def check_file(path: bytes) -> tuple[str, int]:
      stamp = image_files.stamp(path)
      return explain(path, max_pixels), stamp

    save_time = time.monotonic()
    pause = _SAVE_EVERY
    for block, results in self._map_blocks(rows, check_file, 'Checking images'):
      for row, (reason, stamp) in zip(block.tolist(), results):
        stamps[row] = stamp
        status[row] = BROKEN if reason else DECODED
        if reason:
          reasons[row] = reason
      start_time = time.monotonic()
      if save and start_time - save_time >= pause:
        save()
        save_time = time.monotonic()
        # Saving takes a tenth of the time at most.
        pause = max(_SAVE_EVERY, 10 * (save_time - start_time))
        done = np.searchsorted(rows, block[-1], side='right')
        console.log(f'Checked and saved {done:,} of {len(rows):,} images.')
    if len(rows):
      self.path = None
    return len(rows) > 0

  def check_anew(self, name: str, value: Any) -> None:
    """Forgets all checks if a setting has changed."""
    settings = self.checks.settings
    if settings.get(name) != value:
      empty = Checks.empty(len(self))
      self.checks = empty._replace(settings={**settings, name: value})

  def forget_changed(self, rows: np.ndarray) -> None:
    """Forgets the checks of broken files that have changed since."""
    status, stamps, reasons, _ = self.checks
    for row in np.unique(rows[status[rows] == BROKEN]).tolist():
      if image_files.stamp(self.paths([row])[0]) != stamps[row]:
        status[row] = UNKNOWN
        reasons.pop(row, None)
        self.path = None

  def recall(self, old: 'Index') -> None:
    """Takes over the checks of another index for files that have not changed."""
    if not self.checks.fits(old.checks):
      return
    checks = old.checks
    if self._all_names() != old._all_names():
      checks = self._by_name(old)
    is_new = (self.checks.status == UNKNOWN) & (checks.status != UNKNOWN)
    rows = np.flatnonzero(is_new & (checks.stamps > 0))
    unchanged = []
    for block, stamps in self._map_blocks(rows, image_files.stamp, 'Comparing images'):
      is_same = np.array(stamps, np.uint64) == checks.stamps[block]
      unchanged.append(block[is_same])
    if unchanged:
      self.checks = merge(self.checks, checks.selected(np.concatenate(unchanged)))

  def _by_name(self, old: 'Index') -> Checks:
    """Returns the checks of another index for the rows of this one."""
    old_rows = np.flatnonzero(old.checks.status)
    keys = _keys(self, np.arange(len(self)))
    _, rows, places = np.intersect1d(keys, _keys(old, old_rows), return_indices=True)
    old_rows = old_rows[places]
    checks = Checks.empty(len(self))._replace(settings=old.checks.settings)
    checks.status[rows] = old.checks.status[old_rows]
    checks.stamps[rows] = old.checks.stamps[old_rows]
    for row, old_row in zip(rows.tolist(), old_rows.tolist()):
      if old_row in old.checks.reasons:
        checks.reasons[row] = old.checks.reasons[old_row]
    return checks

  def _map_blocks(
    self, rows: Sequence[int] | np.ndarray, function: Callable[[bytes], Any], title: str
  ) -> Iterator[tuple[np.ndarray, list]]:
    """Yields (rows, results of function(path)), block by block."""
    threads = _THREADS if image_files.is_local(self.top) else image_files.REMOTE_THREADS
    # A task per file would take 30 us more each.
    piece_size = -(-_BLOCK // (8 * threads))

    def call(rows: np.ndarray) -> list:
      return list(map(function, self.paths(rows)))

    with (
      concurrent.futures.ThreadPoolExecutor(threads) as pool,
      console.bar(
        desc=title, total=len(rows), delay=3, leave=False, unit=' images'
      ) as bar,
    ):
      for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK]
        pieces = [block[i : i + piece_size] for i in range(0, len(block), piece_size)]
        results = []
        for piece_results in pool.map(call, pieces):
          results += piece_results
        yield block, results
        bar.update(len(block))

  # --- On disk ---

  def save(self, path: epath.PathLike) -> None:
    """Writes the index to a file atomically."""
    _write(path, **self.arrays(), **self.checks.arrays())
    self.path = str(path)

  @classmethod
  def load(cls, path: epath.PathLike, root: str, base: str) -> 'Index | None':
    """Returns the index in a file; None if it is missing, or damaged (with a warning).

    The data set in `root` may have been moved since the file was written.
    """

    def make(arrays: Mapping[str, np.ndarray]) -> 'Index':
      index = cls.from_arrays(root, base, arrays)
      index.checks = Checks.from_arrays(arrays)
      index.path = str(path)
      return index

    return image_files.from_npz(path, make)

  def save_checks(self, path: str, rows: np.ndarray) -> None:
    """Writes the checks of some rows to a file atomically; see `load_checks`."""
    names = np.frombuffer(files.digest(self._all_names()).encode(), np.uint8)
    _write(path, names=names, **self.checks.selected(rows).arrays())

  def load_checks(self, paths: Sequence[str]) -> Checks:
    """Returns the merged checks in files of `save_checks`, if they exist.

    Files that are damaged, of other images or of another check are ignored.
    """
    names = files.digest(self._all_names()).encode()

    def make(arrays: Mapping[str, np.ndarray]) -> Checks | None:
      return Checks.from_arrays(arrays) if arrays['names'].tobytes() == names else None

    checks = Checks.empty(len(self))._replace(settings=self.checks.settings)

    def load(path: str) -> Checks | None:
      return image_files.from_npz(path, make)

    for stored in image_files.in_threads(load, paths):
      if stored is not None:
        checks = merge(checks, stored)
    return checks

  def is_up_to_date(self) -> bool:
    """Returns whether no folder has changed since it was listed.

    Always True for a remote folder, where a change cannot be detected.
    """
    if self.facts.get('endings') != list(formats.endings()):
      return False
    if not image_files.is_local(self.top):
      return True
    folders = self.facts['times']
    paths = [os.path.join(self.top, folder) for folder in folders]
    times = image_files.in_threads(image_files.time_of, paths)
    return times == list(folders.values())


class Paths(Sequence):
  """The paths of a split's images as strings; `parts` are (index, rows) pairs."""

  def __init__(self, parts: Iterable[tuple[Index, np.ndarray]]) -> None:
    self.parts = list(parts)
    sizes = [len(rows) for _, rows in self.parts]
    self._part = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    rows = [np.zeros(0, np.uint32), *(rows for _, rows in self.parts)]
    self._rows = np.concatenate(rows)
    self._digest: str | None = None

  def __len__(self) -> int:
    return len(self._rows)

  @overload
  def __getitem__(self, i: int) -> str: ...

  @overload
  def __getitem__(self, i: slice) -> list[str]: ...

  def __getitem__(self, i: int | slice) -> str | list[str]:
    if isinstance(i, slice):
      return [self[j] for j in range(*i.indices(len(self)))]
    if not -len(self) <= i < len(self):
      raise IndexError(i)
    return image_files.display(self.encoded([i % len(self)])[0])

  def encoded(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the paths of some images, as an array of bytes objects."""
    part, rows = self._part[numbers], self._rows[numbers]
    paths = np.empty(len(rows), object)
    for k, (index, _) in enumerate(self.parts):
      mask = part == k
      if mask.any():
        paths[mask] = index.paths(rows[mask])
    return paths

  def broken(self) -> dict[int, str]:
    """Returns why images are known to be broken, by number."""
    reasons: dict[int, str] = {}
    for k, (index, rows) in enumerate(self.parts):
      is_broken = index.checks.status[rows] == BROKEN
      numbers = np.flatnonzero(self._part == k)[is_broken].tolist()
      for i in numbers:
        reasons[i] = index.checks.reasons.get(int(self._rows[i]), '')
    return reasons

  def mark(self, reasons: dict[int, str]) -> None:
    """Marks images as broken: reasons by number, possibly of other processes."""
    for number, reason in reasons.items():
      index, _ = self.parts[self._part[number]]
      row = int(self._rows[number])
      index.checks.status[row] = BROKEN
      index.checks.reasons.setdefault(row, reason)

  def without(self, numbers: Sequence[int]) -> 'Paths':
    """Returns the paths without the images of some numbers."""
    mask = np.ones(len(self), bool)
    mask[numbers] = False
    parts = []
    for k, (index, rows) in enumerate(self.parts):
      parts.append((index, rows[mask[self._part == k]]))
    return Paths(parts)

  def store(self, workdir: str | None) -> None:
    """Writes indices that are not stored yet to the workdir of a run."""
    for index, _ in self.parts:
      if index.path is None:
        index.save(place(workdir, index.root, index.base))

  def digest(self) -> str:
    """Returns a hash of the names, relative to their folders, in order."""
    if self._digest is None:
      self._digest = files.digest(self._blocks())
    return self._digest

  def _blocks(self) -> Iterator[bytes]:
    """Yields the names in order, block by block."""
    for index, rows in self.parts:
      for start in range(0, len(rows), _BLOCK):
        yield _lines(index.names(rows[start : start + _BLOCK]))


def _as_bytes(facts: dict[str, Any]) -> np.ndarray:
  return np.frombuffer(json.dumps(facts).encode(), np.uint8)


def _write(path: epath.PathLike, **arrays: Any) -> None:
  """Writes arrays to a .npz file atomically."""
  path = epath.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  with files.replacing(path) as file:
    np.savez_compressed(file, **arrays)


def place(workdir: str | None, root: str, base: str) -> str:
  """Returns the path of the stored index of a split, by default next to it."""
  if workdir is None:
    folder = root.rstrip('/') if base in ('', '.') else f'{root}/{base}'
    return f'{folder}.index.npz'
  name = ''.join(c if c.isalnum() else '_' for c in base)
  key = files.digest([f'{root}/{base}'.encode()])[:8]
  return f'{workdir}/data/{name}-{key}.npz'


def from_paths(root: str, base: str, paths: Sequence[str]) -> Index:
  """Makes an index of listed files; `order` is the order of the list."""
  split = [b'\0'.join(os.path.split(os.fsencode(path))) for path in paths]
  rows = sorted(range(len(split)), key=split.__getitem__)
  order = np.empty(len(rows), np.uint32)
  order[rows] = np.arange(len(rows))
  counts = collections.Counter(split[row].partition(b'\0')[0] for row in rows)
  names = _lines(split[row].partition(b'\0')[2] for row in rows)
  index = Index(root, base, list(counts), list(counts.values()), names, order, {})
  index.top = root if '://' in root else ''  # The paths are complete.
  return index


def hash_name(name: bytes) -> bytes:
  """Returns the hash of a name by which images are ordered."""
  return hashlib.md5(name, usedforsecurity=False).digest()


def hash_order(names: Iterable[str]) -> list[int]:
  """Returns the order of names by their hash: a slice is a random sample."""
  hashes = [hash_name(name.encode()) for name in names]
  return sorted(range(len(hashes)), key=hashes.__getitem__)


def _lines(names: Iterable[bytes]) -> bytes:
  """Joins names, each followed by a zero byte."""
  return b''.join(name + b'\0' for name in names)


def _keys(index: Index, rows: Sequence[int] | np.ndarray) -> np.ndarray:
  """Returns a hash of the names of rows, uint64 [n]."""
  keys = np.empty(len(rows), np.uint64)
  for start in range(0, len(rows), _BLOCK):
    names = index.names(rows[start : start + _BLOCK])
    digests = b''.join(hash_name(name)[:8] for name in names)
    keys[start : start + _BLOCK] = np.frombuffer(digests, np.uint64)
  return keys
