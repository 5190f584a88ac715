"""Gathers results of single images from all processes.

Results of an image may have any length, such as a list of boxes. They cannot be
summed over a batch, and are gathered once at the end of an evaluation.
"""

from collections.abc import Mapping
import io
import json

import jax
from jax.experimental import multihost_utils
import numpy as np

# Bytes per process in one exchange. Each device holds this number times the
# number of processes.
CHUNK = 16 * 2**20


def gather(results: Mapping[int, Mapping[str, np.ndarray]]) -> list[dict]:
  """Returns the results of all images, the same on every process.

  All processes must call it, including those without results.

  Args:
    results: results of this process: {index of the image within the split:
      {name: array of any shape}}. If several processes have the same image, the
      result of the first process counts.

  Returns:
    {name: array} for each image, in the order of the indices.

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
  """Packs arrays into an npz with two members, a table and the values."""
  table, values = [], []
  for index, arrays in results.items():
    for name, array in arrays.items():
      array = np.asarray(array)
      if array.dtype.hasobject:
        raise ValueError(
          f"'{name}' of image {index} holds Python objects: give numbers or "
          'strings of fixed length'
        )
      # NumPy knows types such as bfloat16 by name only.
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
  """Unpacks the result of `_encode`."""
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
    arrays[name] = array.reshape(shape).copy()  # Makes it writable.
    begin += array.nbytes
  return results
