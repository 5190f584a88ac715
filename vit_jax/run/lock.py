"""Locks a folder, such as a workdir, so that one run at a time writes to it.

On a local disk the operating system keeps the lock, and releases it when the
process ends for any reason. Elsewhere (gs://, file systems without locks) the lock is
a file, by these rules, which compare no clocks of different hosts:

1. The run whose id is in the file has the lock. It renews the file, that is, changes
   its content, every _RENEWAL seconds, and deletes it at the end.
2. Without a file the lock is free. With one, a newcomer reads it once a second: new
   content comes from a run that is alive; content that stays the same for _ABANDONED
   seconds of the newcomer's monotonic clock was abandoned. Of the time between two
   looks at most _RENEWAL seconds count.
3. A newcomer creates the file, which only one can do. Where storage cannot tell
   (gs://), or over an abandoned file, it writes, waits for _SETTLE seconds and reads:
   of several newcomers, the last to write has the lock.
4. Before each checkpoint or part, `check` reads the file. It stops a run whose id is
   no longer there, or that failed to renew the file for so long that a newcomer may
   replace it. So a run that was suspended, or slow in step 3, does not write.
"""

import contextlib
import fcntl
import os
import secrets
import socket
import threading
import time
from typing import Any

from absl import logging
from etils import epath
import msgspec

from vit_jax import console
from vit_jax.distributed import files, processes

_RENEWAL = 15.0  # Seconds between two renewals of a file.
_ABANDONED = 60.0  # Seconds without a renewal after which a file is free.
_LOOK = 1.0  # Seconds between two looks at the file of another run.
_SETTLE = 2.0  # Seconds after which concurrent writes of newcomers have arrived.
_LONGEST = 4096  # Bytes read of a file.


class _Run(msgspec.Struct):
  """Content of a file: the run that has the lock."""

  host: str
  process: int
  since: str
  id: str
  renewals: int = 0

  def __str__(self) -> str:
    return f'process {self.process} on {self.host} since {self.since}'


class Holder:
  """Locks a folder inside a `with` block; process 0 does so for all processes.

  The folder is created if it does not exist. On entering, all processes raise
  ValueError if another run has locked the folder (names its host, process and start)
  or the folder cannot be written; without locks it takes up to a minute to tell
  whether the other run is alive. `flag` is its name for users, and `name` the file in
  it that is locked.
  """

  def __init__(
    self, folder: epath.PathLike, flag: str = 'workdir', name: str = 'holder.json'
  ):
    self._folder = f"{flag}='{folder}'"
    self._flag = flag
    self._path = epath.Path(folder) / name
    # File descriptor, on file systems with locks.
    self._file: int | None = None
    # Renews the file, on other file systems.
    self._thread: threading.Thread | None = None
    self._stop = threading.Event()
    self._guard = threading.Lock()  # Keeps the thread and `check` apart.
    # Times of time.monotonic of the last renewal, and of the last look at the file.
    self._renewed = 0.0
    self._look_time = 0.0
    # Content of the file at the last look.
    self._content = None
    self._unchanged = 0.0  # Seconds for which looks have shown this content.
    self._run = _Run(
      socket.gethostname(),
      os.getpid(),
      time.strftime('%Y-%m-%d %H:%M:%S %Z'),
      secrets.token_hex(8),
    )

  def __enter__(self) -> 'Holder':
    self._take()
    return self

  def __exit__(self, *_: Any) -> None:
    self._release()

  @processes.by_first('locking the workdir')
  def _take(self) -> None:
    try:
      self._path.parent.mkdir(parents=True, exist_ok=True)
      run = self._lock_or_create()
    except OSError as e:
      raise ValueError(
        f'{self._folder} cannot be written: {e}; use a writable folder (--{self._flag})'
      ) from e
    if run:
      raise ValueError(
        f'{self._folder} is held by {run}: wait until that run ends, stop it (it '
        f'saves first), or use another --{self._flag}'
      )

  def _lock_or_create(self) -> str | None:
    """Takes the folder; returns which other run has it."""
    if files.is_remote(self._path):
      return self._take_file()
    is_new = self._create()
    with contextlib.suppress(_NoLocks):
      return self._lock()
    return self._take_file(is_new)

  def _release(self) -> None:
    if self._thread is not None:
      self._stop.set()
      self._thread.join()
      self._thread = None
      with contextlib.suppress(OSError):  # Left behind, it is abandoned.
        if self._is_mine():
          self._path.unlink()
    if self._file is not None:
      if self._is_in_place(self._file):
        self._path.unlink()
      os.close(self._file)  # Releases the lock.
      self._file = None

  def check(self) -> None:
    """Raises OSError if another run has or may have taken the folder."""
    if self._file is not None:
      self._check_lock(self._file)
    elif self._thread is not None:
      with self._guard:
        self._check_file()

  def _lock(self) -> str | None:
    """Locks a file on a local disk; returns which run has locked it."""
    file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
      os.close(file)
      if isinstance(e, BlockingIOError):
        return self._other()
      raise _NoLocks from e
    if not self._is_in_place(file):  # The other run has just deleted it.
      os.close(file)
      return self._lock()
    os.ftruncate(file, 0)
    os.pwrite(file, msgspec.json.encode(self._run), 0)
    self._file = file
    return None

  def _is_in_place(self, file: int) -> bool:
    """Returns whether an open file is the one in the folder."""
    try:
      return os.path.samestat(os.fstat(file), os.stat(self._path))
    except FileNotFoundError:
      return False

  def _check_lock(self, file: int) -> None:
    """Raises OSError if the locked file is no longer in the folder."""
    if not self._is_in_place(file):
      raise OSError(
        f"{self._folder} was moved or deleted, or its lock '{self._path}' was: this run "
        'stops, since another one may use the folder'
      )

  def _take_file(self, is_new: bool = False) -> str | None:
    """Takes a file that no run renews, and renews it; returns which run has it."""
    if not is_new:
      content = self._look()
      if content is not None:
        content = self._watch()
      if content is not None and self._unchanged < _ABANDONED:
        return self._other()
      self._write()
      time.sleep(_SETTLE)
    if not self._is_mine():
      return self._other()
    self._renewed = time.monotonic()
    self._stop.clear()
    self._thread = threading.Thread(target=self._renew, daemon=True)
    self._thread.start()
    return None

  def _watch(self) -> bytes | None:
    """Looks at the file until its content changes or is abandoned; returns it."""
    content = current = self._content
    description = (
      f'Checking for up to {_ABANDONED:.0f} seconds whether {self._other()}, which '
      f'locked {self._folder}, is still running'
    )
    with console.status(description):
      while current == content and self._unchanged < _ABANDONED:
        time.sleep(_LOOK)
        current = self._look()
    return current

  def _create(self) -> bool:
    """Creates the file unless it exists; returns whether it did."""
    try:
      with open(self._path, 'xb') as file:
        file.write(msgspec.json.encode(self._run))
      return True
    except FileExistsError:
      return False

  def _renew(self) -> None:
    """Renews the file until the lock is released or another run has it."""
    while not self._stop.wait(_RENEWAL):
      try:
        with self._guard:
          if not self._is_mine():
            return
          self._write()
      except Exception as e:  # pylint: disable=broad-except
        logging.warning("'%s' could not be renewed: %s", self._path, e)

  def _check_file(self) -> None:
    """Raises OSError if the file is another run's, or was renewed too long ago."""
    try:
      is_mine = self._is_mine()
      if is_mine and self._is_late():
        self._write()
    except Exception as e:  # pylint: disable=broad-except
      if self._is_late():
        raise OSError(
          f"'{self._path}' could not be renewed for {_ABANDONED - _RENEWAL:.0f} seconds "
          f'({e}): this run stops, since another one may take {self._folder}'
        ) from e
      return
    if not is_mine:
      raise OSError(
        f'{self._folder} was taken by {self._other()}, because it was not renewed for '
        f'{_ABANDONED:.0f} seconds, or its lock was deleted: this run stops, so that the '
        'two do not interfere'
      )

  def _is_late(self) -> bool:
    """Returns whether another run may soon take the file as abandoned."""
    return time.monotonic() - self._renewed > _ABANDONED - _RENEWAL

  def _write(self) -> None:
    """Writes new content to the file."""
    start = time.monotonic()
    self._run.renewals += 1
    files.write(self._path, msgspec.json.encode(self._run))
    self._renewed = start

  def _look(self) -> bytes | None:
    """Reads the file, None if there is none, and counts how long it is unchanged."""
    content = None
    with contextlib.suppress(FileNotFoundError), self._path.open('rb') as file:
      content = file.read(_LONGEST)
    now = time.monotonic()
    if content == self._content:
      # Storage that hung, or a suspended machine, may have kept the other run waiting.
      self._unchanged += min(now - self._look_time, _RENEWAL)
    else:
      self._unchanged = 0.0
    self._content, self._look_time = content, now
    return content

  def _is_mine(self) -> bool:
    """Reads the file; returns whether this run has the lock."""
    run = _decoded(self._look())
    return run is not None and run.id == self._run.id

  def _other(self) -> str:
    """Reads the file; describes the run that has the lock."""
    return str(_decoded(self._look()) or 'another run')


class _NoLocks(Exception):
  """The file system has no locks."""


def _decoded(content: bytes | None) -> _Run | None:
  """Returns the content of a file; None if it is not complete."""
  try:
    return msgspec.json.decode(content or b'', type=_Run)
  except msgspec.DecodeError:
    return None
