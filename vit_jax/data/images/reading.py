"""Reads image files, local or in a bucket.

Errors that storage has now and then lead to another attempt. Anything but a
regular file, such as a pipe, is refused without waiting.
"""

import errno
import functools
import os
import re
import stat
import time

import tensorflow as tf

# First and last bytes of complete files, by format.
_ENDS = (
  (b'\xff\xd8\xff', b'\xff\xd9'),
  (b'\x89PNG\r\n\x1a\n', b'IEND\xaeB`\x82'),
)
_BEGINS = (b'GIF8', b'BM', b'RIFF', *(begin for begin, _ in _ENDS))
# Formats of photographs that are not read: endings of the names of files, and
# what their contents have from a byte on.
_FOREIGN = {
  'HEIC': ((b'.heic', b'.heif'), 4, (b'ftyphei', b'ftyphev', b'ftypmif1')),
  'AVIF': ((b'.avif',), 4, (b'ftypavi',)),
  'TIFF': ((b'.tif', b'.tiff'), 0, (b'II*\0', b'MM\0*')),
}
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
        raise FileNotFoundError(
          f"there is no image file '{display(path)}'"
        ) from e
      if delay is None or number in _LASTING:
        reason = e.strerror if isinstance(e, OSError) else first_line(e)
        raise OSError(
          f"'{display(path)}' cannot be read: {reason}; make it readable from "
          'this machine, then start again'
        ) from e
      time.sleep(delay)


def read_file(path) -> bytes:
  """Returns the content of an image file, local or with a scheme.

  See `retried`; what is not a regular file is a ValueError.
  """
  return retried(os.fsencode(path), _read)


def _read(path, begin: int | None = None, end: int = 0):
  """Returns the content of a file, or its first and last bytes, joined."""
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
  """Returns an error's message in one line, without TensorFlow's wrapping."""
  lines = getattr(error, 'message', str(error)).splitlines()
  wrapping = (' ', '\t', 'Graph execution error', 'Detected at ', 'Node: ')
  own = [x for x in lines if x.strip() and not x.startswith(wrapping)]
  line = (own or lines or [type(error).__name__])[0]
  line = re.sub(r'^\{\{function_node .*?\}\} ', '', line)
  line = re.sub(
    r'^Error in user-defined function .*? iterator: \S+: ', '', line
  )
  line = re.sub(r'^\w*Error: ', '', line)
  if line.startswith('jpeg::Uncompress failed'):
    line = 'its JPEG data are damaged or cut off'
  return re.sub(r' \[Op:.*', '', line)[:400]


def why_malformed(path: bytes) -> str:
  """Checks both ends of a file; returns what is wrong with them, or ''."""
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


def why_foreign(name='', content: bytes = b'') -> str:
  """Returns why an image of a name or a content is not read, or ''."""
  name = os.fsencode(name).lower()
  for kind, (endings, start, begins) in _FOREIGN.items():
    if name.endswith(endings) or content.startswith(begins, start):
      return (
        f'it is {kind}, which this package does not read: convert it to JPEG or '
        f'PNG, such as by `magick mogrify -format jpg *.{kind.lower()}`'
      )
  return ''


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
