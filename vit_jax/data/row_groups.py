"""Row groups of Parquet files, each read once, when its first row is needed.

The tables stay in memory if the data are small, else memory-mapped in the cache of this
package, which needs as much disk space as the data. Without that space, the last row
groups stay in memory.
"""

import collections
from collections.abc import Callable, Hashable
import json
import pathlib
import threading
from typing import TYPE_CHECKING

from absl import logging

from vit_jax import console
from vit_jax.distributed import files

if TYPE_CHECKING:
  import pyarrow as pa

MEMORY = 2**28  # Most bytes of row groups in memory.


class RowGroups:
  """Tables by key, in memory or memory-mapped; `num_bytes` is the size of all."""

  def __init__(self, num_bytes: int) -> None:
    # Folder of cached tables; None: in memory.
    self._folder: pathlib.Path | None = None
    if num_bytes > MEMORY:
      self._folder = console.cache_folder() / 'parquet'
    self._tables: collections.OrderedDict[Hashable, pa.Table] = (
      collections.OrderedDict()
    )
    self._lock = threading.Lock()  # Guards `_tables` and `_folder`.

  def __len__(self) -> int:
    return len(self._tables)

  def get(self, key: tuple, read: Callable[[], 'pa.Table']) -> 'pa.Table':
    """Returns a table, by values for JSON that name it; one thread at a time reads."""
    name = json.dumps(key)
    table = self._tables.get(name)
    if table is not None:
      return table
    with self._lock:
      table = self._tables.get(name)
      if table is None:  # No other thread has read it in the meantime.
        table = self._get_stored(name, read)
        self._tables[name] = table
        if self._folder is None:
          self._limit_memory()
    return table

  def _get_stored(self, name: str, read: Callable[[], 'pa.Table']) -> 'pa.Table':
    """Returns a table, memory-mapped where possible."""
    if self._folder is None:
      return read().combine_chunks()
    path = self._folder / f'{files.digest([name.encode()])}.arrow'
    table = _map_file(path)
    if table is not None:
      return table
    table = read().combine_chunks()
    try:
      _write(path, table)
    except OSError as e:
      logging.warning(
        "'%s' cannot keep row groups, so reading in random order is slow: %s",
        self._folder,
        e,
      )
      self._folder = None
      self._tables.clear()
      return table
    mapped = _map_file(path)
    return table if mapped is None else mapped

  def _limit_memory(self) -> None:
    """Drops the tables that were read first, but never the last one."""
    num_bytes = sum(table.nbytes for table in self._tables.values())
    while num_bytes > MEMORY and len(self._tables) > 1:
      _, table = self._tables.popitem(last=False)
      num_bytes -= table.nbytes


def _write(path: pathlib.Path, table: 'pa.Table') -> None:
  import pyarrow as pa

  path.parent.mkdir(parents=True, exist_ok=True)
  with files.replacing(path) as file, pa.ipc.new_file(file, table.schema) as writer:
    writer.write_table(table)


def _map_file(path: pathlib.Path) -> 'pa.Table | None':
  """Returns the table in an Arrow file, memory-mapped; None without a whole one."""
  import pyarrow as pa

  try:
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    table.validate(full=True)  # Reading damaged offsets may end the process.
    return table
  except (OSError, ValueError):
    return None
