"""Locks a folder, such as a workdir, so that one run at a time writes to it.

On a local disk the operating system keeps the lock, and releases it when the
process ends for any reason. Elsewhere (gs://, file systems without locks) the run
renews a file; once it is no longer renewed, any run may take the folder.
"""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
import time

from absl import logging
from etils import epath

from vit_jax.distributed import files, processes

_RENEWAL = 15.0  # Seconds between two renewals of a file.
_ABANDONED = 60.0  # Seconds without a renewal after which a file is free.


class Holder:
  """Locks a folder inside a `with` block; process 0 does so for all processes.

  A caller that can do without the folder calls `take`, and `release` at the
  end. The folder is created if it does not exist. On entering, all processes
  raise ValueError if another run has locked the folder (names its host, process
  and start) or the folder cannot be written. `flag` is its name for users, and
  `name` the file in it that is locked.
  """

  def __init__(self, folder, flag='workdir', name='holder.json'):
    self._what = f"{flag}='{folder}'"
    self._flag = flag
    self._path = epath.Path(folder) / name
    self._file = None  # File descriptor, on file systems with locks.
    self._renewal = None
    self._done = threading.Event()
    self._taken_by = None
    self._me = {
      'host': socket.gethostname(),
      'process': os.getpid(),
      'since': time.strftime('%Y-%m-%d %H:%M:%S %Z'),
      'id': secrets.token_hex(8),
    }

  def __enter__(self):
    if other := self.take():
      raise ValueError(
        f'{self._what} is held by {other}: wait until that run ends, stop it (it '
        f'saves first), or use another --{self._flag}'
      )
    return self

  def __exit__(self, *_):
    self.release()

  @processes.by_first('locking the workdir')
  def take(self) -> str | None:
    """Takes the folder; returns None, or which run has it, on all processes.

    ValueError if the folder cannot be written.
    """
    try:
      self._path.parent.mkdir(parents=True, exist_ok=True)
      with contextlib.suppress(_NoLocks):
        return self._lock()
      return self._lease()
    except OSError as e:
      raise ValueError(
        f'{self._what} cannot be written: {e}; use a writable folder (--{self._flag})'
      ) from e

  def release(self):
    """Frees the folder, if it was taken."""
    self._done.set()
    if self._renewal is not None:
      self._renewal.join()
      if not self._taken_by:
        self._path.unlink(missing_ok=True)
    if self._file is not None:
      os.ftruncate(self._file, 0)
      os.close(self._file)  # Releases the lock.

  def check(self):
    """Raises OSError if another run has taken the folder meanwhile."""
    if self._taken_by:
      raise OSError(
        f'{self._what} was taken by {_describe(self._taken_by)}, because it was not '
        f'renewed for {_ABANDONED:.0f} seconds: this run stops, so that the two do '
        'not interfere'
      )

  def _lock(self) -> str | None:
    """Locks a file on a local disk; returns which run has locked it."""
    if files.is_remote(self._path):
      raise _NoLocks
    file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
      os.close(file)
      if isinstance(e, BlockingIOError):
        return _describe(self._read())
      raise _NoLocks from e
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(self._me).encode(), 0)
    self._file = file
    return None

  def _lease(self) -> str | None:
    """Takes a file that no run renews, and renews it from then on."""
    found = self._read()
    if found and time.time() - found.get('renewed', 0) < _ABANDONED:
      return _describe(found)
    self._write()
    self._renewal = threading.Thread(target=self._renew, daemon=True)
    self._renewal.start()
    return None

  def _renew(self):
    while not self._done.wait(_RENEWAL):
      try:
        found = self._read()
        if found and found['id'] != self._me['id']:
          self._taken_by = found
          return
        self._write()
      except OSError as e:
        logging.warning("'%s' could not be renewed: %s", self._path, e)

  def _write(self):
    files.write(self._path, json.dumps({**self._me, 'renewed': time.time()}))

  def _read(self) -> dict | None:
    """Returns the content of the file; None if it is not complete."""
    try:
      return json.loads(self._path.read_text())
    except (FileNotFoundError, ValueError):
      return None


class _NoLocks(Exception):
  """The file system has no locks."""


def _describe(run) -> str:
  if not run:
    return 'another run'
  return 'process {process} on {host} since {since}'.format_map(run)
