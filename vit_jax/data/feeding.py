"""Reads batches and places them on the devices; errors name the image."""

import collections
from collections.abc import Callable, Iterable, Iterator
import itertools

import jax
import numpy as np

from vit_jax.data import records
from vit_jax.data.images import image_files, images
from vit_jax.data.lazy import tf
from vit_jax.distributed import sharding


def on_devices(
  batches: Iterable[dict], mesh: jax.sharding.Mesh, prefetch: int
) -> Iterator[dict]:
  """Yields batches as global arrays, placed `prefetch` batches ahead.

  `batches` are dicts of NumPy arrays [b, ...], the rows of this process. They are
  split over the mesh's batch axes if these divide the number of rows, else
  replicated.
  """
  split = sharding.batch_sharding(mesh)
  replicated = sharding.replicated(mesh)

  def place(value: np.ndarray) -> jax.Array:
    rows = len(value) * (jax.process_count() if mesh.is_multi_process else 1)
    even = rows % sharding.batch_shards(mesh) == 0
    return jax.make_array_from_process_local_data(split if even else replicated, value)

  def place_batches() -> Iterator[dict[str, jax.Array]]:
    for batch in batches:
      yield {key: place(value) for key, value in batch.items()}

  global_batches = place_batches()
  ready = collections.deque(itertools.islice(global_batches, max(1, prefetch)))
  while ready:
    yield ready.popleft()
    ready.extend(itertools.islice(global_batches, 1))


def read(
  data: 'tf.data.Dataset',
  source: records.Source,
  indices: Callable,
  example: Callable | None = None,
) -> Iterator[dict]:
  """Yields batches of tf.data as NumPy arrays; errors name the image that failed.

  Args:
    data: the batches.
    source: the source of their examples.
    indices: maps the number of a batch to the numbers of its examples in `source`.
    example: maps (record, None) to the tensors of an example.

  Raises:
    ValueError: if an image cannot be decoded.
    OSError: if a file cannot be read.
  """
  count = 0
  # At exit, Python closes this generator after it has cleared the module. TensorFlow's
  # message may quote bytes that are not UTF-8.
  error = (tf.errors.OpError, UnicodeDecodeError)
  try:
    for batch in data.as_numpy_iterator():
      yield batch
      count += 1
  except error as e:
    explain(e, source, indices(count), example)


def explain(
  error: Exception,
  source: records.Source,
  indices: Iterable[int],
  example: Callable | None = None,
) -> None:
  """Finds the example that failed to be read, and raises an error as `read` does."""
  for index in indices:
    part, number = source.locate(int(index))
    try:
      record = part.record(number)
    except tf.errors.OpError as cause:
      reason = f'{part.name(number)}: {image_files.first_line(cause)}'
      if isinstance(cause, tf.errors.InvalidArgumentError):
        raise ValueError(reason) from None  # It is damaged.
      raise OSError(reason) from None
    if 'image' in part.features:
      part.check(record, number)
    if example is not None:
      try:
        example({'index': tf.constant(index, tf.int64), **part.read(record)}, None)
      except images.decode_errors() as cause:
        reason = f'{part.name(number)}: {image_files.first_line(cause)}'
        raise ValueError(reason) from None
  raise ValueError(
    f'reading the data failed: {image_files.first_line(error)}'
  ) from error
