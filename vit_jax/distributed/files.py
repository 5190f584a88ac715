"""Reads files of unknown origin, and writes files that other processes may read."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from typing import Any, BinaryIO

from etils import epath

# Most bytes of a JSON file with settings. The names of ImageNet-21k's classes are 2 MB,
# the index of a model of 400 billion parameters 0.1 MB.
JSON_LIMIT = 2**24
_BLOCK = 2**18  # Bytes read at a time.
_ABANDONED = 24 * 3600  # Age in seconds of temporary files that nobody writes to.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_KINDS = (
  (stat.S_ISFIFO, 'named pipe'),
  (stat.S_ISCHR, 'device'),
  (stat.S_ISBLK, 'device'),
)


class FileError(ValueError):
  """The content of a file cannot be used; the message names the file."""


def is_remote(path: epath.PathLike) -> bool:
  """Returns whether a path is not on this machine, such as gs://..."""
  return '://' in os.fspath(path)


def open_input(path: epath.PathLike, buffering: int = -1) -> BinaryIO:
  """Opens a file for reading bytes, and never waits for a writer.

  FileError for a local named pipe, device or socket; links to regular files are
  followed. `buffering` is for local files, see open().
  """
  if is_remote(path):
    return epath.Path(path).open('rb')
  return open(path, 'rb', buffering, opener=_regular)


def _regular(path: epath.PathLike, flags: int) -> int:
  """Returns a descriptor of a regular file or a folder, which open() rejects."""
  try:
    # Opening a named pipe without O_NONBLOCK waits for a writer.
    descriptor = os.open(path, flags | os.O_NONBLOCK)
  except OSError as e:
    if e.errno == errno.ENXIO:
      raise _not_regular(path, 'socket') from e
    raise
  mode = os.fstat(descriptor).st_mode
  if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
    return descriptor
  os.close(descriptor)
  raise _not_regular(path, next(kind for test, kind in _KINDS if test(mode)))


def _not_regular(path: epath.PathLike, kind: str) -> FileError:
  name = os.fsencode(path).decode(errors='backslashreplace')
  return FileError(f"'{name}' is a {kind}, not a regular file")


def check_input(path: epath.PathLike) -> None:
  """Raises what `open_input` does, for a library that opens a local path itself."""
  if not is_remote(path):
    open_input(path).close()


def read(path: epath.PathLike, limit: int | None = None) -> bytes:
  """Returns the content of a file; FileError if it has more than `limit` bytes.

  A local file must be a regular one, see `open_input`.
  """
  with open_input(path) as file:
    if limit is None:
      return file.read()
    content = bytearray()
    while len(content) <= limit and (block := file.read(_BLOCK)):
      content += block
  if len(content) > limit:
    raise FileError(f"'{path}' has more than {limit:,} bytes, too many for its kind")
  return bytes(content)


def read_json(
  path: epath.PathLike, limit: int = JSON_LIMIT, object_hook: Callable | None = None
) -> Any:
  """Returns the value in a JSON file; ValueError if it is damaged. See also `read`.

  ValueError also if an object repeats a key, since Python would use the last value.
  """

  def unique(pairs: Sequence[tuple[str, Any]]) -> Any:
    value = check_unique(pairs)
    return object_hook(value) if object_hook else value

  try:
    return json.loads(read(path, limit), object_pairs_hook=unique)
  except RecursionError:
    raise ValueError('it is nested too deeply') from None


def check_unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  """Returns an object of JSON as a dict; ValueError if it repeats a key."""
  value = dict(pairs)
  if len(value) < len(pairs):
    counts = collections.Counter(key for key, _ in pairs)
    [(key, _)] = counts.most_common(1)
    raise ValueError(f"the key '{key}' is repeated: keep one of them")
  return value


def expanded(path: epath.PathLike) -> str:
  """Returns a path whose leading '~' or '~user' is replaced by that home folder."""
  return os.path.expanduser(os.fspath(path))


def check_no_pattern(path: epath.PathLike, name: str) -> None:
  """Raises ValueError for a local path that Orbax and TensorFlow read as a pattern.

  They would not find what they have written there, or would find files elsewhere.
  """
  special = set('*?[\\') & set(os.path.abspath(path))
  if special and not is_remote(path):
    raise ValueError(
      f"{name}='{path}' is below a folder with {' '.join(sorted(special))} in its name, "
      'which has a meaning in patterns: use a path without * ? [ and \\'
    )


def temporary_name(path: epath.PathLike) -> epath.Path:
  """Returns a new hidden path next to a path; each writer has its own."""
  path = epath.Path(path)
  # File systems allow 255 bytes, and a character takes up to 4 in UTF-8.
  return path.parent / f'.{path.name[:60]}.{secrets.token_hex(4)}.tmp'


def _delete_abandoned(path: epath.Path, temporary: epath.Path) -> None:
  """Deletes what killed processes left of writing a local path.

  `temporary` is new: its time is of the clock that the files' times are of.
  """
  pattern = re.compile(rf'\.{re.escape(path.name[:60])}\.[0-9a-f]{{8}}\.tmp')
  latest = temporary.stat().mtime - _ABANDONED
  for name, modified in _temporaries(os.path.abspath(path.parent)).items():
    if modified < latest and pattern.fullmatch(name):
      abandoned = path.parent / name
      if abandoned.is_dir():
        shutil.rmtree(abandoned, ignore_errors=True)
      else:
        with contextlib.suppress(OSError):  # It may be of another user.
          abandoned.unlink()


@functools.cache  # A folder may get a million files, one after another.
def _temporaries(folder: str) -> dict[str, float]:
  """Returns the temporary files and folders in a folder, and when they were modified."""
  times = {}
  with contextlib.suppress(OSError), os.scandir(folder) as entries:
    for entry in entries:
      if entry.name.endswith('.tmp'):
        times[entry.name] = entry.stat(follow_symlinks=False).st_mtime
  return times


@contextlib.contextmanager
def replacing(path: epath.PathLike) -> Iterator[BinaryIO]:
  """Opens a file for bytes, which replaces `path` when it is complete.

  No reader ever sees the file incomplete, not even after a power failure. An error
  leaves nothing behind, and what a kill leaves is deleted by a write a day later; the
  error of a full disk names `path`. The folder of `path` must exist.
  """
  temporary = temporary_name(path)
  path = epath.Path(path)
  local = not is_remote(path)
  try:
    with temporary.open('wb') as file:
      if local:
        _delete_abandoned(path, temporary)
      yield file
      if local:
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    if local:
      _sync_folder(path.parent)
  except BaseException as e:
    with contextlib.suppress(Exception):
      temporary.unlink()
    if isinstance(e, OSError) and e.errno in _FULL:
      e.filename = os.fspath(path)
    raise


def write(path: epath.PathLike, content: str | bytes) -> None:
  """Writes a file, see `replacing`."""
  with replacing(path) as file:
    file.write(content.encode() if isinstance(content, str) else content)


def _sync_folder(path: epath.PathLike) -> None:
  """Makes the renames in a folder last, on file systems that can."""
  with contextlib.suppress(OSError):
    folder = os.open(path, os.O_RDONLY)
    try:
      os.fsync(folder)
    finally:
      os.close(folder)


@contextlib.contextmanager
def new_folder(path: epath.PathLike) -> Iterator[epath.Path]:
  """Makes a folder, which appears at `path` when it is complete.

  Yields the path to write to. Nothing is left behind, see `replacing`.
  FileExistsError if `path` exists at the end and is not an empty folder.
  """
  temporary = temporary_name(path)
  path = epath.Path(path)
  temporary.mkdir(parents=True)
  try:
    if not is_remote(path):
      _delete_abandoned(path, temporary)
    yield temporary
    try:
      if is_remote(path):
        temporary.rename(path)
      else:
        os.rename(temporary, path)  # Also replaces an empty folder.
    except OSError as e:
      if not path.exists():
        raise
      raise FileExistsError(
        f"'{path}' was written by another process in the meantime, and is not "
        'overwritten: use another path, or delete it first'
      ) from e
  finally:
    if temporary.exists():
      temporary.rmtree()


@contextlib.contextmanager
def naming_output(path: epath.PathLike, flag: str) -> Iterator[None]:
  """Makes an OSError in a `with` block one sentence about the path of --FLAG."""
  try:
    yield
  except FileExistsError:  # Its message says what to do.
    raise
  except OSError as e:
    raise OSError(
      f"{flag}='{path}' cannot be written: {e.strerror or e}; pass a path that is "
      f'writable and has space (--{flag})'
    ) from e


def check_new_folder(path: epath.PathLike, flag: str) -> None:
  """Raises OSError, see `naming_output`, unless a folder can be made at `path`."""
  with naming_output(path, flag):
    trial = temporary_name(path)
    trial.mkdir(parents=True)
    trial.rmtree()


def digest(contents: Iterable) -> str:
  """Returns a hash of bytes-like objects, as 32 digits."""
  state = hashlib.blake2b(digest_size=16)
  for content in contents:
    state.update(content)
  return state.hexdigest()
