"""Writes files that other processes and machines may read or write at once."""

import contextlib
import os
import secrets

from etils import epath


def is_remote(path) -> bool:
  """Returns whether a path is not on this machine, such as gs://..."""
  return '://' in os.fspath(path)


@contextlib.contextmanager
def replacing(path):
  """Opens a file for bytes, which takes the place of `path` when it is complete.

  No reader ever sees the file incomplete. After an error nothing is left
  behind. The folder of `path` must exist.
  """
  path = epath.Path(path)
  # Writers of the same file do not know each other.
  temporary = path.parent / f'.{path.name}.{secrets.token_hex(4)}.tmp'
  try:
    with temporary.open('wb') as file:
      yield file
    temporary.replace(path)
  except BaseException:
    with contextlib.suppress(Exception):
      temporary.unlink()
    raise


def write(path, content: str | bytes):
  """Writes a file, see `replacing`."""
  with replacing(path) as file:
    file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def new_folder(path):
  """Makes a folder, which appears at `path` when it is complete.

  Yields the path to write to. After an error nothing is left behind. `path`
  must not exist, or be an empty folder.
  """
  path = epath.Path(path)
  temporary = path.parent / f'.{path.name}.tmp'
  if temporary.exists():
    temporary.rmtree()
  try:
    temporary.mkdir(parents=True)
    yield temporary
    if path.exists():
      path.rmdir()
    temporary.rename(path)
  finally:
    if temporary.exists():
      temporary.rmtree()
