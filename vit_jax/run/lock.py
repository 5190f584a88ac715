"""Locks a folder, such as a workdir, so that one run at a time writes to it.

On a local disk the operating system keeps the lock, and releases it when the
process ends for any reason. Elsewhere (gs://) the holder renews a file; if the
file is no longer renewed, any run may take the workdir.
"""

import fcntl
import json
import os
import secrets
import socket
import threading
import time

from absl import logging
from etils import epath

from vit_jax import console
from vit_jax.distributed import files, processes

# Seconds between two renewals, and seconds without one after which a file is
# free.
_RENEWAL = 15.0
_ABANDONED = 60.0
# Seconds in which two runs that start at the same moment see each other's file.
_SETTLING = 2.0


class _Held(Exception):
  """Another run holds the workdir; the text describes it."""


class Holder:
  """Holds a folder inside a `with` block; process 0 does so for all processes.

  A caller that can do without the folder calls `take`, and `release` at the
  end. The folder is created if it does not exist. On entering, all processes
  raise ValueError if another run holds the folder (names its host, process and
  start) or the folder cannot be written. `flag` is what names it for users, and
  `name` the file in it that is locked.
  """

  def __init__(self, folder, flag='workdir', name='holder.json'):
    self._flag, self._folder = flag, folder
    self._path = epath.Path(folder) / name
    self._lock = None  # File descriptor, on file systems with locks.
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
    other = self.take()
    if other:
      raise ValueError(
        f"{self._flag}='{self._folder}' is held by {other}: wait until that run ends, "
        f'stop it (it saves first), or use another --{self._flag}'
      )
    return self

  def __exit__(self, *_):
    self.release()

  @processes.by_first('taking the workdir')
  def take(self, patient: bool = True) -> str | None:
    """Takes the workdir; returns None, or who holds it, on all processes.

    On a file system without locks, `patient` looks for a minute whether the file
    of another run is still renewed; if not patient, such a file counts. ValueError
    if the workdir cannot be written.
    """
    try:
      self._path.parent.mkdir(parents=True, exist_ok=True)
      if not self._lock_file():
        self._lease(patient)
    except _Held as e:
      return str(e)
    except OSError as e:
      raise ValueError(
        f"{self._flag}='{self._folder}' cannot be written: {e}; give a writable folder "
        f'(--{self._flag})'
      ) from e
    return None

  def release(self):
    """Frees the workdir, if it was taken."""
    self._done.set()
    if self._renewal is not None:
      self._renewal.join()
      if not self._taken_by:
        self._path.unlink(missing_ok=True)
    if self._lock is not None:
      os.ftruncate(self._lock, 0)
      os.close(self._lock)  # Releases the lock.

  def check(self):
    """Raises OSError if another run has taken the workdir meanwhile."""
    if self._taken_by:
      raise OSError(
        f"{self._flag}='{self._folder}' was not renewed for {_ABANDONED:.0f} seconds, "
        f'and {_describe(self._taken_by)} has taken it: this run stops, so that '
        'the two do not mix'
      )

  def _lock_file(self) -> bool:
    """Locks a local file; returns False if the file system has no locks."""
    if files.is_remote(self._path):
      return False
    file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      os.close(file)
      raise _Held(_describe(self._read())) from None
    except OSError:  # A file system without locks.
      os.close(file)
      return False
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(self._me).encode(), 0)
    self._lock = file
    return True

  def _lease(self, patient):
    """Takes a file that no run renews, and renews it from then on."""
    before = self._read()
    if before and not patient:
      raise _Held(_describe(before))
    if before:
      console.say(
        f"{self._flag}='{self._folder}' was held by {_describe(before)}: checking for "
        f'{_ABANDONED:.0f} seconds whether that run is alive ...'
      )
      end = time.monotonic() + _ABANDONED
      while time.monotonic() < end:
        time.sleep(min(1.0, _RENEWAL))
        now = self._read()
        if now is None:
          break  # It has just ended.
        if now != before:
          raise _Held(_describe(now))
    self._write(0)
    time.sleep(_SETTLING)
    found = self._read()
    if not found or found['id'] != self._me['id']:
      raise _Held(_describe(found))
    self._renewal = threading.Thread(target=self._renew, daemon=True)
    self._renewal.start()

  def _renew(self):
    count = 0
    while not self._done.wait(_RENEWAL):
      count += 1
      try:
        found = self._read()
        if found and found['id'] != self._me['id']:
          self._taken_by = found
          return
        self._write(count)
      except OSError as e:
        logging.warning("'%s' could not be renewed: %s", self._path, e)

  def _write(self, count):
    content = json.dumps({**self._me, 'renewed': count})
    files.write(self._path, content)

  def _read(self) -> dict | None:
    """Returns the content of the file; None if it has no valid content."""
    try:
      content = json.loads(self._path.read_text())
      return content if isinstance(content, dict) and 'id' in content else None
    except (FileNotFoundError, ValueError):
      return None


def _describe(holder) -> str:
  if not holder:
    return 'another run'
  keys = ('host', 'process', 'since')
  host, process, since = (holder.get(key, 'unknown') for key in keys)
  return f'process {process} on {host} since {since}'
