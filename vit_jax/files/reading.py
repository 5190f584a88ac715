"""Reads files of images, of this machine or of a bucket.

What storage fails at now and then is tried again. What is no regular file, a pipe
for one, is refused and not waited for.
"""

import errno
import os
import re
import stat
import time

import tensorflow as tf

# How a whole file of a format begins and ends.
_ENDS = (
  (b'\xff\xd8\xff', b'\xff\xd9'),
  (b'\x89PNG\r\n\x1a\n', b'IEND\xaeB`\x82'),
)
_BEGINS = (b'GIF8', b'BM', b'RIFF', *(begin for begin, _ in _ENDS))
# Seconds after which a read that failed is tried again.
_DELAYS = (0.5, 2.0)
# Errors that a second try does not mend.
_LASTING = (
  errno.ENOENT,
  errno.ENOTDIR,
  errno.EISDIR,
  errno.EACCES,
  errno.ELOOP,
)


def display(path) -> str:
  """Returns a path as text, also one whose bytes are no UTF-8."""
  return os.fsencode(path).decode(errors='backslashreplace')


def is_local(path: bytes) -> bool:
  """Tells a path of this machine from one with a scheme, gs:// for one."""
  return b'://' not in path


def retried(path, function):
  """Calls function(path), again where it fails as storage does now and then.

  Raises:
    FileNotFoundError: if there is no such file.
    OSError: if it cannot be read; names it.
  """
  for delay in (*_DELAYS, None):
    try:
      return function(path)
    except (OSError, tf.errors.OpError) as e:
      number = getattr(e, 'errno', None)
      if number == errno.ENOENT or isinstance(e, tf.errors.NotFoundError):
        raise FileNotFoundError(
          f"there is no image file '{display(path)}'"
        ) from e
      if delay is None or number in _LASTING:
        reason = e.strerror if isinstance(e, OSError) else first_line(e)
        raise OSError(
          f"'{display(path)}' cannot be read: {reason}; look whether it can be "
          'from this machine, then start again'
        ) from e
      time.sleep(delay)


def read_file(path) -> bytes:
  """Returns the contents of an image file.

  Args:
    path: str, bytes or os.PathLike; of this machine or with a scheme.

  Raises:
    FileNotFoundError: if there is no such file.
    OSError: if it cannot be read.
    ValueError: if it is no regular file; it is not waited for.
  """
  return retried(os.fsencode(path), _read)


def _read(path, begin: int | None = None, end: int = 0):
  """Returns a file's contents; or but its first and last bytes, joined."""
  if not is_local(path):
    with tf.io.gfile.GFile(path, 'rb') as file:
      if begin is None:
        return file.read()
      head = file.read(begin)
      file.seek(max(0, file.size() - end))
      return head + file.read(end)
  descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
  try:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
      raise ValueError(f"'{display(path)}' is no regular file")
    if begin is None:
      with os.fdopen(descriptor, 'rb', closefd=False) as file:
        return file.read()
    start = max(0, status.st_size - end)
    return os.pread(descriptor, begin, 0) + os.pread(descriptor, end, start)
  finally:
    os.close(descriptor)


def first_line(error: Exception) -> str:
  """Returns what an error says in one line, without TensorFlow's wrapping."""
  lines = getattr(error, 'message', str(error)).splitlines()
  wrapping = (' ', '\t', 'Graph execution error', 'Detected at ', 'Node: ')
  own = [x for x in lines if x.strip() and not x.startswith(wrapping)]
  line = (own or lines or [type(error).__name__])[0]
  line = re.sub(r'^\{\{function_node .*?\}\} ', '', line)
  line = re.sub(
    r'^Error in user-defined function .*? iterator: \S+: ', '', line
  )
  line = re.sub(r'^(ValueError|TypeError): ', '', line)
  if line.startswith('jpeg::Uncompress failed'):
    line = 'its JPEG data are damaged or cut off'
  return re.sub(r' \[Op:.*', '', line)[:200]


def why_malformed(path: bytes) -> str:
  """Looks at both ends of a file; returns what is wrong with them, or ''.

  Raises:
    OSError: see read_file.
  """
  try:
    ends = retried(path, lambda path: _read(path, 16, 64))
  except (ValueError, FileNotFoundError) as e:
    return str(e)
  if not ends:
    return 'zero bytes'
  if not ends.startswith(_BEGINS):
    return 'it does not begin as an image'
  for begin, end in _ENDS:
    if ends.startswith(begin) and not ends.rstrip(b'\0').endswith(end):
      return 'it does not end as an image'
  return ''


def time_of(folder) -> int:
  """Returns when a folder was changed, in ns; -1 if it cannot be seen."""
  try:
    return os.stat(folder).st_mtime_ns
  except OSError:
    return -1


def stamp(path) -> int:
  """Returns a number that follows from size and time of a file; 0 without one."""

  def look(path):
    if is_local(path):
      status = os.stat(path)
      return status.st_size, status.st_mtime_ns
    status = tf.io.gfile.stat(path)
    return status.length, status.mtime_nsec

  try:
    size, time = retried(path, look)
  except FileNotFoundError:
    return 0
  return (size * 0x9E3779B97F4A7C15 + time) % 2**64 or 1
