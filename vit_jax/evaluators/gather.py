"""Results of single images, brought together from all processes.

What an evaluator finds on an image may be of any length, boxes for one: it cannot
be summed over a batch, but is gathered once at the end.
"""

from collections.abc import Mapping
import io
import json

import jax
from jax.experimental import multihost_utils
import numpy as np

# Bytes of each process that travel at a time: so much lies on every device, times
# the number of processes.
CHUNK = 16 * 2**20


def gather(results: Mapping[int, Mapping[str, np.ndarray]]) -> list[dict]:
  """Returns the results of all images, the same on every process.

  All processes must call it, also those that have none.

  Args:
    results: what this process found: arrays by name, of any shape, for each
      image by its `index`, its number within the split. Several processes may
      have the same image: that of the first counts.

  Returns:
    The arrays by name of each image once, in the order of the indices.

  Raises:
    ValueError: if an array holds Python objects.
  """
  data = _encode(results)
  if jax.process_count() == 1:
    everything = [data]
  else:
    everything = _exchange(data)
  found = {}
  for part in map(_decode, everything):
    for index, arrays in part.items():
      found.setdefault(index, arrays)
  return [found[index] for index in sorted(found)]


def _exchange(data: bytes) -> list[bytes]:
  """Returns the bytes of every process."""
  # JAX has no 64-bit integers by default.
  size = np.array(divmod(len(data), 2**30), np.int32)
  sizes = multihost_utils.process_allgather(size)  # [processes, 2]
  sizes = [int(high) * 2**30 + int(low) for high, low in sizes]
  parts = [[] for _ in sizes]
  for begin in range(0, max(sizes), CHUNK):
    chunk = np.zeros(min(CHUNK, max(sizes) - begin), np.uint8)
    mine = np.frombuffer(data[begin : begin + CHUNK], np.uint8)
    chunk[: len(mine)] = mine
    for part, row in zip(parts, multihost_utils.process_allgather(chunk)):
      part.append(row.tobytes())
  return [b''.join(part)[:size] for part, size in zip(parts, sizes)]


def _encode(results) -> bytes:
  """Packs arrays into bytes: an npz of few members, however many arrays."""
  table, values = [], []
  for index, arrays in results.items():
    for name, array in arrays.items():
      array = np.asarray(array)
      if array.dtype.hasobject:
        raise ValueError(
          f"'{name}' of image {index} holds Python objects: give numbers or "
          'strings of fixed length'
        )
      # Types that NumPy does not know itself, bfloat16 for one, go by name.
      kind = array.dtype.name if array.dtype.kind == 'V' else array.dtype.str
      table.append([int(index), name, kind, array.shape])
      values.append(array.tobytes())
    if not arrays:
      table.append([int(index), None, None, None])
  buffer = io.BytesIO()
  np.savez(
    buffer,
    table=np.frombuffer(json.dumps(table).encode(), np.uint8),
    values=np.frombuffer(b''.join(values), np.uint8),
  )
  return buffer.getvalue()


def _decode(data: bytes) -> dict[int, dict[str, np.ndarray]]:
  """Returns what `_encode` packed."""
  with np.load(io.BytesIO(data)) as file:
    table = json.loads(file['table'].tobytes())
    values = file['values'].tobytes()
  results, begin = {}, 0
  for index, name, kind, shape in table:
    arrays = results.setdefault(index, {})
    if name is None:
      continue
    dtype = np.dtype(kind)
    count = int(np.prod(shape))
    array = np.frombuffer(values, dtype, count, begin)
    arrays[name] = array.reshape(shape).copy()  # To be changed at will.
    begin += array.nbytes
  return results
