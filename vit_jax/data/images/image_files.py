"""Reads image files, local or in a bucket, and retries on storage errors."""

from collections.abc import Callable, Sequence
from concurrent import futures
import functools
import io
import os
import re
import time
from typing import Any

from absl import logging
import numpy as np

from vit_jax import console
from vit_jax.data.lazy import tf
from vit_jax.distributed import files

PathLike = str | bytes | os.PathLike
ARCHIVES = ('.zip', '.tar', '.tar.gz', '.tgz', '.tar.bz2', '.tar.xz', '.7z', '.rar')
REMOTE_THREADS = 32  # Threads that read files of a bucket.
_DELAYS = (0.5, 2.0)  # Seconds before each new attempt to read.
# Errors for which another attempt is useless.
_LASTING = (PermissionError, IsADirectoryError, NotADirectoryError)


def traced(function: Callable) -> Callable:
  """Has TensorFlow trace a function of an encoded image once, for all pipelines."""

  @functools.cache
  def compiled() -> Callable:
    graph_function = tf.function(function, autograph=False)
    # TensorFlow counts threads that wait for the first trace as new traces.
    graph_function._omit_frequent_tracing_warning = True
    return graph_function

  @functools.wraps(function)
  def call(encoded: 'tf.Tensor | bytes', *args: Any, **kwargs: Any) -> Any:
    # TensorFlow would trace again for each value that is not a tensor.
    return compiled()(tf.convert_to_tensor(encoded), *args, **kwargs)

  return call


def call_python(
  function: Callable,
  content: 'tf.Tensor',
  dtype: 'tf.DType',
  shape: Sequence[int | None],
) -> 'tf.Tensor':
  """Calls a Python function of bytes, a string scalar, in a TensorFlow graph."""

  def call(
    value: bytes | np.ndarray,
  ) -> Any:  # Bytes in a graph, else an array of them.
    return function(value.item() if isinstance(value, np.ndarray) else value)

  result = tf.numpy_function(call, [content], dtype, stateful=False)
  return tf.ensure_shape(result, shape)


def display(path: PathLike) -> str:
  """Returns a path as a string, even if its bytes are not UTF-8."""
  return os.fsencode(path).decode(errors='backslashreplace')


def is_local(path: PathLike) -> bool:
  """Returns whether a path has no scheme, such as gs://."""
  return b'://' not in os.fsencode(path)


def retried(path: PathLike, function: Callable) -> Any:
  """Returns function(path), and retries after temporary storage errors.

  A FileNotFoundError, and the OSError of the last attempt, name the file.
  """
  for delay in (*_DELAYS, None):
    try:
      return function(path)
    except (FileNotFoundError, tf.errors.NotFoundError) as e:
      raise FileNotFoundError(f"there is no image file '{display(path)}'") from e
    except (OSError, tf.errors.OpError) as e:
      if delay is None or isinstance(e, _LASTING):
        reason = e.strerror if isinstance(e, OSError) else first_line(e)
        raise OSError(
          f"'{display(path)}' cannot be read: {reason}; make it readable from "
          'this machine, then start again'
        ) from e
      time.sleep(delay)


def read_file(path: PathLike) -> bytes:
  """Returns the contents of an image file, local or with a scheme; see `retried`.

  ValueError for a URL.
  """
  path = os.fsencode(os.path.expanduser(path))
  if path.startswith((b'https://', b'http://')):
    raise ValueError(f"'{display(path)}' is a URL: download it and pass the file")
  return retried(path, _read)


def _read(path: bytes) -> bytes:
  if is_local(path):
    return files.read(os.fsdecode(path))
  with tf.io.gfile.GFile(path, 'rb') as file:
    return file.read()


def from_npz(path: PathLike, make: Callable) -> Any:
  """Returns make(arrays) of a .npz file.

  None if the file is missing or, with a warning, if it is damaged; OSError if it
  cannot be read.
  """
  try:
    content = read_file(path)
  except FileNotFoundError:
    return None
  try:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
      return make(arrays)
  except Exception:  # NumPy does not document the errors for damaged files.
    logging.warning("'%s' is damaged: ignored", path)
    return None


def in_threads(
  function: Callable, items: Sequence, title: str = '', unit: str = 'it'
) -> list:
  """Returns function(item) of all items, as a list; with a title, shows progress."""
  with futures.ThreadPoolExecutor(REMOTE_THREADS) as pool:
    results = pool.map(function, items)
    if title:
      results = console.bar(
        desc=title, iterable=results, total=len(items), delay=3, leave=False, unit=unit
      )
    return list(results)


def first_line(error: Exception) -> str:
  """Returns an error's message in one line, without TensorFlow's wrapping."""
  lines = getattr(error, 'message', str(error)).splitlines()
  wrapping = (' ', '\t', 'Graph execution error', 'Detected at ', 'Node: ')
  message_lines = []
  for line in lines:
    if line.strip() and not line.startswith(wrapping):
      message_lines.append(line)
  line = (message_lines or lines or [type(error).__name__])[0]
  for pattern in (
    r'^\{\{function_node .*?\}\} ',
    r'^Error in user-defined function .*? iterator: \S+: ',
    r'^\w*Error: ',
    r' \[Op:.*',
  ):
    line = re.sub(pattern, '', line)
  line = re.sub(r'^assertion failed: \[(.*?)\] \[.*', r'\1', line)
  if line.startswith('jpeg::Uncompress failed'):
    line = 'its JPEG data are damaged or truncated'
  return line[:400]


def time_of(folder: PathLike) -> int:
  """Returns when a local folder was last changed in ns; -1 if unknown."""
  try:
    return os.stat(folder).st_mtime_ns
  except OSError:
    return -1


def size_and_time(path: PathLike) -> tuple[int, int]:
  """Returns the size of a file in bytes, and when it was last changed in ns."""
  if is_local(path):
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
  status = tf.io.gfile.stat(path)
  return status.length, status.mtime_nsec


def stamp(path: PathLike) -> int:
  """Returns a hash of a file's size and time; 0 if there is no file."""
  try:
    size, time = retried(path, size_and_time)
  except FileNotFoundError:
    return 0
  return (size * 0x9E3779B97F4A7C15 + time) % 2**64 or 1
