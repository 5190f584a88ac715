"""Writes files that other processes and machines may read or write concurrently."""

from collections.abc import Iterable
import contextlib
import hashlib
import os
import secrets

from etils import epath


def is_remote(path) -> bool:
  """Returns whether a path is not on this machine, such as gs://..."""
  return '://' in os.fspath(path)


def temporary_name(path) -> epath.Path:
  """Returns a new hidden path next to a path; each writer has its own."""
  path = epath.Path(path)
  return path.parent / f'.{path.name}.{secrets.token_hex(4)}.tmp'


@contextlib.contextmanager
def replacing(path):
  """Opens a file for bytes, which replaces `path` when it is complete.

  No reader ever sees the file incomplete, not even after a power failure. After
  an error nothing is left behind. The folder of `path` must exist.
  """
  path, temporary = epath.Path(path), temporary_name(path)
  local = not is_remote(path)
  try:
    with temporary.open('wb') as file:
      yield file
      if local:
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    if local:
      _sync_folder(path.parent)
  except BaseException:
    with contextlib.suppress(Exception):
      temporary.unlink()
    raise


def write(path, content: str | bytes):
  """Writes a file, see `replacing`."""
  with replacing(path) as file:
    file.write(content.encode() if isinstance(content, str) else content)


def _sync_folder(path):
  """Makes the renames in a folder last, on file systems that can."""
  with contextlib.suppress(OSError):
    folder = os.open(path, os.O_RDONLY)
    try:
      os.fsync(folder)
    finally:
      os.close(folder)


@contextlib.contextmanager
def new_folder(path):
  """Makes a folder, which appears at `path` when it is complete.

  Yields the path to write to. After an error nothing is left behind.
  FileExistsError if `path` exists at the end and is not an empty folder.
  """
  path, temporary = epath.Path(path), temporary_name(path)
  temporary.mkdir(parents=True)
  try:
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


def digest(contents: Iterable) -> str:
  """Returns a hash of bytes-like objects, as 32 digits."""
  found = hashlib.blake2b(digest_size=16)
  for content in contents:
    found.update(content)
  return found.hexdigest()
