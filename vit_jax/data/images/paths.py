"""Holds the paths of a split's images in few bytes each, by number."""

from collections.abc import Iterable
from collections.abc import Sequence

import numpy as np

from vit_jax.data.images import index as index_lib
from vit_jax.data.images import reading

# Number of names hashed at a time.
_BLOCK = 4096


class Paths(Sequence):
  """Sequence of image paths as text, stored as rows of indices.

  Args:
    parts: (index, rows) pairs.
  """

  def __init__(self, parts: Iterable[tuple[index_lib.Index, np.ndarray]]):
    self.parts = list(parts)
    self._ends = np.cumsum([len(rows) for _, rows in self.parts])
    self._digest = None

  def __len__(self):
    return int(self._ends[-1]) if len(self._ends) else 0

  def __getitem__(self, i):
    if isinstance(i, slice):
      return [self[j] for j in range(*i.indices(len(self)))]
    if not -len(self) <= i < len(self):
      raise IndexError(i)
    return reading.display(self.encoded([i % len(self)])[0])

  def encoded(self, numbers) -> np.ndarray:
    """Returns the paths of some images, as an array of bytes objects."""
    numbers = np.asarray(numbers, np.int64)
    which = np.searchsorted(self._ends, numbers, side='right')
    found = np.empty(len(numbers), object)
    for k, (index, rows) in enumerate(self.parts):
      mine = np.flatnonzero(which == k)
      if len(mine):
        begin = self._ends[k] - len(rows)
        found[mine] = index.paths(rows[numbers[mine] - begin])
    return found

  def broken(self) -> list[int]:
    """Returns the numbers of the images known to be broken."""
    found = [np.zeros(0, np.int64)]
    for (index, rows), end in zip(self.parts, self._ends):
      bad = np.flatnonzero(index.status[rows] == index_lib.BROKEN)
      found.append(bad + end - len(rows))
    return np.concatenate(found).tolist()

  def reason(self, number: int) -> str:
    """Returns why an image is broken."""
    k = int(np.searchsorted(self._ends, number, side='right'))
    index, rows = self.parts[k]
    row = rows[number - self._ends[k] + len(rows)]
    return index.facts['broken'].get(str(row), '')

  def without(self, numbers: Sequence[int]) -> 'Paths':
    """Returns the paths without those of some numbers."""
    kept, begin = [], 0
    numbers = np.asarray(numbers, np.int64)
    for (index, rows), end in zip(self.parts, self._ends):
      mine = numbers[(numbers >= begin) & (numbers < end)] - begin
      kept.append((index, np.delete(rows, mine) if len(mine) else rows))
      begin = end
    return Paths(kept)

  def store(self, workdir):
    """Writes those indices to the workdir of a run that are not stored yet."""
    for index, _ in self.parts:
      if index.path is None:
        index.save(index_lib.place(workdir, index.root, index.base))

  def digest(self) -> str:
    """Returns a hash of the names, relative to their folders, in order."""
    if self._digest is None:
      self._digest = index_lib.digest(
        b''.join(name + b'\0' for name in index.names(rows[i : i + _BLOCK]))
        for index, rows in self.parts
        for i in range(0, len(rows), _BLOCK)
      )
    return self._digest
