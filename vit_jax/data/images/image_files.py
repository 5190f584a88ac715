"""Reads image files, local or in a bucket.

Errors that storage has now and then lead to another attempt.
"""

import errno
import functools
import os
import re
import time

import tensorflow as tf

# Seconds to wait before each new attempt to read.
_DELAYS = (0.5, 2.0)
# Errors for which another attempt is useless.
_LASTING = (
  errno.ENOENT,
  errno.ENOTDIR,
  errno.EISDIR,
  errno.EACCES,
  errno.ELOOP,
)


def traced(function):
  """Has TensorFlow trace a function of an encoded image once, for all pipelines.

  Every new pipeline would otherwise build all of its branches again, which takes
  as long as a few steps of a small model.
  """
  compiled = tf.function(function, autograph=False)
  # TensorFlow takes threads that wait for the first trace for traces of their own.
  compiled._omit_frequent_tracing_warning = True

  @functools.wraps(function)
  def call(encoded, *args, **kwargs):
    # TensorFlow would trace again for each content that is not a tensor.
    return compiled(tf.convert_to_tensor(encoded), *args, **kwargs)

  return call


def display(path) -> str:
  """Returns a path as text, even if its bytes are not UTF-8."""
  return os.fsencode(path).decode(errors='backslashreplace')


def is_local(path) -> bool:
  """Returns whether a path has no scheme, such as gs://."""
  return b'://' not in os.fsencode(path)


def retried(path, function):
  """Calls function(path), with new attempts after passing storage errors.

  A FileNotFoundError, and the OSError of the last attempt, name the file.
  """
  for delay in (*_DELAYS, None):
    try:
      return function(path)
    except (OSError, tf.errors.OpError) as e:
      number = getattr(e, 'errno', None)
      if number == errno.ENOENT or isinstance(e, tf.errors.NotFoundError):
        raise FileNotFoundError(f"there is no image file '{display(path)}'") from e
      if delay is None or number in _LASTING:
        reason = e.strerror if isinstance(e, OSError) else first_line(e)
        raise OSError(
          f"'{display(path)}' cannot be read: {reason}; make it readable from "
          'this machine, then start again'
        ) from e
      time.sleep(delay)


def read_file(path) -> bytes:
  """Returns the content of an image file, local or with a scheme; see `retried`."""
  return retried(os.fsencode(path), _read)


def _read(path):
  with open(path, 'rb') if is_local(path) else tf.io.gfile.GFile(path, 'rb') as f:
    return f.read()


def first_line(error: Exception) -> str:
  """Returns an error's message in one line, without TensorFlow's wrapping."""
  lines = getattr(error, 'message', str(error)).splitlines()
  wrapping = (' ', '\t', 'Graph execution error', 'Detected at ', 'Node: ')
  own = [x for x in lines if x.strip() and not x.startswith(wrapping)]
  line = (own or lines or [type(error).__name__])[0]
  line = re.sub(r'^\{\{function_node .*?\}\} ', '', line)
  line = re.sub(r'^Error in user-defined function .*? iterator: \S+: ', '', line)
  line = re.sub(r'^\w*Error: ', '', line)
  if line.startswith('jpeg::Uncompress failed'):
    line = 'its JPEG data are damaged or cut off'
  return re.sub(r' \[Op:.*', '', line)[:400]


def time_of(folder) -> int:
  """Returns the time of a folder's last change in ns; -1 if unknown."""
  try:
    return os.stat(folder).st_mtime_ns
  except OSError:
    return -1


def size_and_time(path) -> tuple[int, int]:
  """Returns the size of a file and the time of its last change in ns."""
  if is_local(path):
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
  status = tf.io.gfile.stat(path)
  return status.length, status.mtime_nsec


def stamp(path) -> int:
  """Returns a number from a file's size and time; 0 if there is no file."""
  try:
    size, time = retried(path, size_and_time)
  except FileNotFoundError:
    return 0
  return (size * 0x9E3779B97F4A7C15 + time) % 2**64 or 1
