"""Lists the images below a folder, reading many folders in parallel.

Hidden files are left out, as are entries with the name of an image that are not
files, such as folders and broken links.
"""

from collections.abc import Sequence
import concurrent.futures
import datetime
import json
import os
import re
import time
from typing import NamedTuple

import numpy as np

from vit_jax import console
from vit_jax.data.images import image_files, index as index_lib
from vit_jax.data.lazy import tf

EXTENSIONS = ('.jpg', '.jpeg', '.png', '.webp', '.bmp', '.gif')
_ENDINGS = tuple(ending.encode() for ending in EXTENSIONS)
ENDINGS = f'the known endings are {", ".join(EXTENSIONS)}, in upper or lower case'
_LISTS = ('.txt', '.jsonl')
# If a folder changed less than this many seconds before its listing, a later
# change may have the same time stamp.
_TICK = 2.0


def list_folder(root: str, base: str) -> index_lib.Index:
  """Lists the images of a split; OSError names a folder that cannot be read."""
  top = os.path.join(root, base)
  local = image_files.is_local(top)
  level, found = [b''], []
  with (
    concurrent.futures.ThreadPoolExecutor(index_lib.REMOTE_THREADS) as pool,
    console.bar(desc='Listing images', delay=3, leave=False, unit=' images') as bar,
  ):
    while level:
      pieces = pool.map(lambda name: _scan(top, name, local), level)
      level = []
      for piece in pieces:
        found.append(piece)
        level += piece.inner
        bar.update(piece.count)
  found.sort(key=lambda piece: piece.name)
  holding = [piece for piece in found if piece.count]
  others = [other for piece in found for other in piece.others]
  ignored = sum(piece.ignored for piece in found)
  bare = [
    image_files.display(piece.name)
    for piece in found
    if not piece.count and (piece.ignored or piece.inner)
    if piece.name and b'/' not in piece.name
  ]
  facts = {
    'listed': f'{datetime.datetime.now():%Y-%m-%d %H:%M}',
    'times': {os.fsdecode(piece.name): piece.time for piece in found},
    'ignored': [ignored, *map(image_files.display, others[:1])],
    'bare': bare,
    'broken': {},
  }
  return index_lib.Index(
    root,
    base,
    [piece.name for piece in holding],
    [piece.count for piece in holding],
    b''.join(piece.names for piece in holding),
    _order(b''.join(piece.digests for piece in holding)),
    facts,
  )


class _Piece(NamedTuple):
  """The content of one folder."""

  name: bytes
  time: int
  count: int
  names: bytes
  digests: bytes
  inner: list[bytes]
  ignored: int
  others: list[bytes]


def _scan(top, name, local) -> _Piece:
  """Lists one folder."""
  path = os.path.join(os.fsencode(top), name) if name else os.fsencode(top)
  listing = _local_entries if local else _remote_entries
  changed = image_files.time_of(path) if local else 0
  if local and time.time() - changed / 1e9 < _TICK:
    changed = -2  # A later change could go unnoticed.
  prefix = name + b'/' if name else b''

  def look(path):
    found, inner, others = [], [], []
    for entry, is_file, is_folder, is_link in listing(path):
      if entry.startswith(b'.'):
        continue
      image = is_image(entry)
      if image and is_file:
        found.append(entry)
      elif not image and is_folder and not (is_link and _is_loop(top, prefix + entry)):
        inner.append(prefix + entry)
      else:
        others.append(entry)
    return sorted(found), sorted(inner), others

  found, inner, others = image_files.retried(path, look)
  return _Piece(
    name=name,
    time=changed,
    count=len(found),
    names=b''.join(x + b'\0' for x in found),
    digests=b''.join(index_lib.hash_name(b'/' + prefix + x) for x in found),
    inner=inner,
    ignored=len(others),
    others=[prefix + min(others)] if others else [],
  )


def _local_entries(path):
  """Yields (name, is file, is folder, is link) of each entry."""
  with os.scandir(path) as entries:
    for entry in entries:
      if entry.is_symlink():
        target = entry.path
        yield entry.name, os.path.isfile(target), os.path.isdir(target), True
      else:
        yield entry.name, entry.is_file(), entry.is_dir(), False


def _remote_entries(path):
  """Yields the same as `_local_entries` for a remote folder."""
  for entry in map(os.fsencode, tf.io.gfile.listdir(path)):
    name = entry.rstrip(b'/')
    is_folder = entry != name or (
      not is_image(name) and tf.io.gfile.isdir(os.path.join(path, name))
    )
    yield name, not is_folder, is_folder, False


def _is_loop(top, name) -> bool:
  """Returns whether a link leads to a folder that contains the link."""
  top, parts = os.fsencode(top), name.split(b'/')
  real = os.path.realpath(os.path.join(top, name))
  above = (b'/'.join(parts[:i]) for i in range(len(parts)))
  return any(os.path.realpath(os.path.join(top, x)) == real for x in above)


def expand(paths: Sequence[str]) -> list[str]:
  """Returns paths, with folders, patterns and lists replaced by their images.

  A folder stands for all images below it, sorted; a pattern with *, ? or [ ] for
  the files and folders that match; a list (.txt, or .jsonl with the key `image`
  or `path`) for its paths, relative to the folder of the list.

  Raises:
    FileNotFoundError: if a folder or a pattern has no images.
    ValueError: if a line of a list is wrong.
  """
  found = []
  for path in paths:
    if tf.io.gfile.isdir(path):
      index = list_folder(path, '')
      if not len(index):
        raise FileNotFoundError(f"no images in '{path}': {ENDINGS}")
      found += map(os.fsdecode, index.paths(range(len(index))))
    elif re.search('[*?[]', path) and not tf.io.gfile.exists(path):
      matches = sorted(tf.io.gfile.glob(path))
      if not matches:
        raise FileNotFoundError(f"no file matches '{path}'")
      found += expand(matches)
    elif path.endswith(_LISTS):
      found += _listed(path)
    else:
      found.append(path)
  return found


def _listed(path) -> list[str]:
  """Returns the paths in a list, see `expand`."""
  found = []
  lines = image_files.read_file(path).decode().splitlines()
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    if path.endswith('.jsonl'):
      try:
        row = json.loads(line)
        line = row['image'] if 'image' in row else row['path']
      except (ValueError, TypeError, KeyError):
        line = None
      if not isinstance(line, str):
        raise ValueError(
          f'\'{path}\', line {number}: must be like {{"image": "cat.jpg"}}'
        )
    found.append(os.path.join(os.path.dirname(path), line))
  return found


def is_image(name: bytes) -> bool:
  """Returns whether a name has the ending of an image file."""
  return name.lower().endswith(_ENDINGS)


def _order(digests: bytes) -> np.ndarray:
  """Returns the order of digests of 16 bytes each, uint32 [n]."""
  words = np.frombuffer(digests, '>u8').reshape(-1, 2).astype(np.uint64)
  return np.lexsort((words[:, 1], words[:, 0])).astype(np.uint32)
