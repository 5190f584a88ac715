"""Lists the images below a folder, reading many folders in parallel.

Hidden files are left out, as are entries with the name of an image that are not
files, such as folders and broken links.
"""

import collections
from collections.abc import Sequence
import concurrent.futures
import datetime
import json
import os
import re
import time
from typing import NamedTuple

from absl import logging
import numpy as np

from vit_jax import console
from vit_jax.data.images import formats, image_files, index as index_lib
from vit_jax.data.lazy import tf
from vit_jax.distributed import text_files

# Files that describe the images of a folder, as in an "imagefolder" of `datasets`.
METADATA = ('metadata.jsonl', 'metadata.csv')
# If a folder changed less than this many seconds before its listing, a later
# change may have the same time stamp.
_TICK = 2.0
_SHOWN = 8  # Kinds of ignored files that a message names.


def list_folder(root: str, base: str) -> index_lib.Index:
  """Lists the images of a split; OSError names a folder that cannot be read."""
  top = os.fsencode(os.path.join(root, base))
  level, found = [b''], []
  with (
    concurrent.futures.ThreadPoolExecutor(image_files.REMOTE_THREADS) as pool,
    console.bar(desc='Listing images', delay=3, leave=False, unit=' images') as bar,
  ):
    while level:
      pieces = pool.map(lambda name: _scan(top, name), level)
      level = []
      for piece in pieces:
        found.append(piece)
        level += piece.inner
        bar.update(piece.count)
  found.sort(key=lambda piece: piece.name)
  holding = [piece for piece in found if piece.count]
  others = [other for piece in found for other in piece.others]
  bare = [
    image_files.display(piece.name)
    for piece in found
    if not piece.count and (piece.others or piece.inner)
    if piece.name and b'/' not in piece.name
  ]
  facts = {
    'listed': f'{datetime.datetime.now():%Y-%m-%d %H:%M}',
    'times': {os.fsdecode(piece.name): piece.time for piece in found},
    'endings': list(formats.endings()),
    'ignored': {
      'first': image_files.display(others[0]) if others else None,
      'by_ending': collections.Counter(map(_ending, others)),
    },
    'metadata': [
      os.fsdecode(other)
      for other in others
      if os.path.basename(os.fsdecode(other)) in METADATA
    ],
    'bare': bare,
  }
  names = b''.join(piece.names for piece in holding)
  digests = np.frombuffer(b''.join(piece.digests for piece in holding), '>u8')
  order = np.lexsort(digests.reshape(-1, 2).T[::-1]).astype(np.uint32)
  folders, counts = [x.name for x in holding], [x.count for x in holding]
  return index_lib.Index(root, base, folders, counts, names, order, facts)


class _Piece(NamedTuple):
  """The content of one folder; names are relative to the folder of the split."""

  name: bytes
  time: int  # Of the last change.
  count: int  # Of images.
  names: bytes  # Of images, each followed by a zero byte.
  digests: bytes  # By which images are ordered, 16 bytes each.
  inner: list[bytes]  # Folders.
  others: list[bytes]  # Ignored entries.


def _scan(top, name) -> _Piece:
  """Lists one folder."""
  path = os.path.join(top, name) if name else top
  local = image_files.is_local(path)
  entries = _local_entries if local else _remote_entries
  changed = image_files.time_of(path) if local else 0
  if local and time.time() - changed / 1e9 < _TICK:
    changed = -2  # A later change could go unnoticed.
  prefix = name + b'/' if name else b''

  def look(path):
    found, inner, others = [], [], []
    for entry, is_file, is_folder, is_link in entries(path):
      if entry.startswith(b'.'):
        continue
      image = _is_image(entry)
      if image and is_file:
        found.append(entry)
      elif not image and is_folder and not (is_link and _is_loop(top, prefix + entry)):
        inner.append(prefix + entry)
      else:
        others.append(prefix + entry)
    return sorted(found), sorted(inner), sorted(others)

  found, inner, others = image_files.retried(path, look)
  return _Piece(
    name=name,
    time=changed,
    count=len(found),
    names=b''.join(x + b'\0' for x in found),
    digests=b''.join(index_lib.hash_name(b'/' + prefix + x) for x in found),
    inner=inner,
    others=others,
  )


def _local_entries(path):
  """Yields (name, is file, is folder, is link) of each entry."""
  with os.scandir(path) as entries:
    for entry in entries:
      if entry.is_symlink():  # Which may lead nowhere, or to itself.
        yield entry.name, os.path.isfile(entry.path), os.path.isdir(entry.path), True
      else:
        yield entry.name, entry.is_file(), entry.is_dir(), False


def _remote_entries(path):
  """Yields the same as `_local_entries` for a remote folder."""
  for entry in map(os.fsencode, tf.io.gfile.listdir(path)):
    name = entry.rstrip(b'/')
    is_folder = entry != name or (
      not _is_image(name) and tf.io.gfile.isdir(os.path.join(path, name))
    )
    yield name, not is_folder, is_folder, False


def _is_loop(top, name) -> bool:
  """Returns whether a link leads to a folder that contains the link."""
  parts = name.split(b'/')
  real = os.path.realpath(os.path.join(top, name))
  above = (b'/'.join(parts[:i]) for i in range(len(parts)))
  return any(os.path.realpath(os.path.join(top, x)) == real for x in above)


def expand(paths: Sequence[str]) -> list[str]:
  """Returns paths, with folders, patterns and lists replaced by their images.

  A folder stands for all images below it, sorted; a pattern with *, ? or [ ] for
  the files and folders that match; a list (.txt, or .jsonl with the key `image`
  or `path`) for its paths, relative to the folder of the list.
  """
  found = []
  for path in paths:
    if tf.io.gfile.isdir(os.fsencode(path)):
      index = list_folder(path, '')
      warn_of_ignored(index)
      if not len(index):
        raise FileNotFoundError(f"no images in '{path}': {formats.known_endings()}")
      found += map(os.fsdecode, index.paths(range(len(index))))
    elif re.search('[*?[]', path) and not tf.io.gfile.exists(os.fsencode(path)):
      matches = sorted(tf.io.gfile.glob(path))
      if not matches:
        raise FileNotFoundError(f"no file matches '{path}'")
      found += expand(matches)
    elif path.endswith(('.txt', '.jsonl')):
      found += _listed(path)
    else:
      found.append(path)
  return found


def _listed(path) -> list[str]:
  """Returns the paths in a list, see `expand`."""
  listed = []
  lines = text_files.lines(image_files.read_file(path), path)
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
    listed.append(os.path.join(os.path.dirname(path), line))
  return listed


def _is_image(name: bytes) -> bool:
  return name.lower().endswith(formats.encoded_endings())


def _ending(name: bytes) -> str:
  return os.path.splitext(image_files.display(name))[1].lower()


def warn_of_ignored(index: index_lib.Index):
  """Warns of the entries of a folder that are not images, by their endings."""
  counts = collections.Counter(index.facts['ignored']['by_ending'])
  if not counts:
    return
  kinds = [f'{n:,} {ending or "without ending"}' for ending, n in counts.most_common()]
  if len(kinds) > _SHOWN:
    kinds[_SHOWN:] = [f'{len(kinds) - _SHOWN:,} more kinds']
  is_heic = any(counts[ending] for ending in formats.HEIC_ENDINGS)
  remedy = formats.heic_remedy() if is_heic else ''
  logging.warning(
    "Left out %s of %s in '%s': %s, the first: '%s'%s",
    f'{counts.total():,}',
    console.counted(len(index) + counts.total(), 'file'),
    index.top.rstrip('/'),
    ', '.join(kinds),
    index.facts['ignored']['first'],
    remedy and f'; {remedy}',
  )
