"""Lists the images below a folder, reading many folders in parallel.

Hidden files are left out, as are entries with the name of an image that are not
files, such as folders and broken links.
"""

import collections
from collections.abc import Iterator, Sequence
import concurrent.futures
import datetime
import functools
import json
import os
import re
import time
from typing import Any, NamedTuple

from absl import logging
import numpy as np

from vit_jax import console
from vit_jax.data.images import formats, image_files, index as index_lib, multichannel
from vit_jax.data.lazy import tf
from vit_jax.distributed import text_files

# Files that describe the images of a folder, as in an "imagefolder" of `datasets`.
METADATA = ('metadata.jsonl', 'metadata.csv')
# If a folder changed less than this many seconds before its listing, a later
# change may have the same time stamp.
_TICK = 2.0
_SHOWN = 8  # Kinds of ignored files that a message names.
_MOST_VISITS = 100  # To one folder, through different links.


def list_folder(root: str, base: str) -> index_lib.Index:
  """Lists the images of a split.

  Arrays (.npy) are images where there are no others, since next to photos they may
  hold anything.

  Raises:
    OSError: if a folder cannot be read, which it names.
    ValueError: if more than 100 links lead to one folder, as links in linked folders do.
  """
  index = _list_folder(root, base, formats.encoded_endings())
  arrays = index.facts['ignored']['by_ending'].get(multichannel.NPY_ENDING)
  if len(index) or not arrays:
    return index
  return _list_folder(root, base, (multichannel.NPY_ENDING.encode(),))


def _list_folder(root: str, base: str, endings: tuple[bytes, ...]) -> index_lib.Index:
  """Lists the files of a split whose names end with one of `endings`."""
  folders = _scan_all(os.fsencode(os.path.join(root, base)), endings)
  with_images = [folder for folder in folders if folder.num_images]
  names = b''.join(folder.names for folder in with_images)
  digests = np.frombuffer(b''.join(folder.digests for folder in with_images), '>u8')
  order = np.lexsort(digests.reshape(-1, 2).T[::-1]).astype(np.uint32)
  folder_names = [folder.name for folder in with_images]
  counts = [folder.num_images for folder in with_images]
  return index_lib.Index(
    root, base, folder_names, counts, names, order, _facts(folders)
  )


def _scan_all(top: bytes, endings: tuple[bytes, ...]) -> list['_Folder']:
  """Lists a folder and all folders below it, sorted by name."""
  level = [b'']
  folders = []
  visits: collections.Counter[tuple[int, ...]] = collections.Counter()
  with (
    concurrent.futures.ThreadPoolExecutor(image_files.REMOTE_THREADS) as pool,
    console.bar(desc='Listing images', delay=3, leave=False, unit=' images') as bar,
  ):
    while level:
      level_folders = pool.map(functools.partial(_scan, top, endings), level)
      level = []
      for folder in level_folders:
        folders.append(folder)
        if folder.identity:
          visits[folder.identity] += 1
        if visits[folder.identity] > _MOST_VISITS:
          pool.shutdown(wait=False, cancel_futures=True)
          raise ValueError(
            f"more than {_MOST_VISITS} links in '{image_files.display(top)}' lead to the "
            f"folder '{image_files.display(folder.name)}': remove links to folders that "
            'contain links'
          )
        level += folder.subfolders
        bar.update(folder.num_images)
  return sorted(folders, key=lambda folder: folder.name)


def _facts(folders: Sequence['_Folder']) -> dict[str, Any]:
  """Returns the facts of an Index."""
  ignored = []
  bare = []
  for folder in folders:
    ignored += folder.ignored
    is_class = folder.name and b'/' not in folder.name
    if is_class and not folder.num_images:
      bare.append(image_files.display(folder.name))
  metadata = []
  for path in map(os.fsdecode, ignored):
    if os.path.basename(path) in METADATA:
      metadata.append(path)
  return {
    'listed': f'{datetime.datetime.now():%Y-%m-%d %H:%M}',
    'times': {os.fsdecode(folder.name): folder.time for folder in folders},
    'endings': list(formats.endings()),
    'ignored': {
      'first': image_files.display(ignored[0]) if ignored else None,
      'by_ending': collections.Counter(map(_ending, ignored)),
    },
    'metadata': metadata,
    'bare': bare,
  }


class _Folder(NamedTuple):
  """The content of one folder; names are relative to the folder of the split."""

  name: bytes
  identity: tuple[int, ...]  # Device and inode of a local folder, else empty.
  time: int  # When it was last changed.
  num_images: int
  names: bytes  # Names of the images, each followed by a zero byte.
  digests: bytes  # Hashes by which images are ordered, 16 bytes each.
  subfolders: list[bytes]
  ignored: list[bytes]  # Entries that are neither images nor folders.


def _scan(top: bytes, endings: tuple[bytes, ...], name: bytes) -> _Folder:
  """Lists one folder."""
  path = os.path.join(top, name) if name else top
  local = image_files.is_local(path)
  changed = image_files.time_of(path) if local else 0
  if local and time.time() - changed / 1e9 < _TICK:
    changed = -2  # A later change could go unnoticed.
  prefix = name + b'/' if name else b''

  def list_entries(path: bytes) -> tuple[list[bytes], list[bytes], list[bytes]]:
    image_names, subfolders, ignored = [], [], []
    entries = _local_entries(path) if local else _remote_entries(path, endings)
    for entry in entries:
      entry_path = prefix + entry.name
      if entry.name.startswith(b'.'):
        continue
      if _has_ending(entry.name, endings):
        if entry.is_file:
          image_names.append(entry.name)
        else:
          ignored.append(entry_path)
      elif entry.is_folder and not (entry.is_link and _is_loop(top, entry_path)):
        subfolders.append(entry_path)
      else:
        ignored.append(entry_path)
    return sorted(image_names), sorted(subfolders), sorted(ignored)

  image_names, subfolders, ignored = image_files.retried(path, list_entries)
  digests = []
  for image_name in image_names:
    digests.append(index_lib.hash_name(b'/' + prefix + image_name))
  return _Folder(
    name=name,
    identity=_identity(path) if local else (),
    time=changed,
    num_images=len(image_names),
    names=b''.join(image_name + b'\0' for image_name in image_names),
    digests=b''.join(digests),
    subfolders=subfolders,
    ignored=ignored,
  )


def _identity(folder: bytes) -> tuple[int, ...]:
  """Returns the device and inode of a folder; () if it cannot be read."""
  try:
    status = os.stat(folder)
  except OSError:
    return ()
  return status.st_dev, status.st_ino


def _has_ending(name: bytes, endings: tuple[bytes, ...]) -> bool:
  return name.lower().endswith(endings)


class _Entry(NamedTuple):
  """An entry of a folder."""

  name: bytes
  is_file: bool
  is_folder: bool
  is_link: bool = False


def _local_entries(path: bytes) -> Iterator[_Entry]:
  with os.scandir(path) as entries:
    for entry in entries:
      if entry.is_symlink():  # It may lead nowhere, or to itself.
        is_file = os.path.isfile(entry.path)
        yield _Entry(entry.name, is_file, os.path.isdir(entry.path), is_link=True)
      else:
        yield _Entry(entry.name, entry.is_file(), entry.is_dir())


def _remote_entries(path: bytes, endings: tuple[bytes, ...]) -> Iterator[_Entry]:
  for entry in map(os.fsencode, tf.io.gfile.listdir(path)):
    name = entry.rstrip(b'/')
    is_folder = entry.endswith(b'/')
    if not is_folder and not _has_ending(name, endings):
      is_folder = tf.io.gfile.isdir(os.path.join(path, name))
    yield _Entry(name, not is_folder, is_folder)


def _is_loop(top: bytes, name: bytes) -> bool:
  """Returns whether a link leads to a folder that contains the link."""
  components = name.split(b'/')
  real = os.path.realpath(os.path.join(top, name))
  for i in range(len(components)):
    parent = os.path.join(top, b'/'.join(components[:i]))
    if os.path.realpath(parent) == real:
      return True
  return False


def expand(paths: Sequence[str]) -> list[str]:
  """Returns paths, with folders, patterns and lists replaced by their images.

  A folder stands for all images below it, sorted; a pattern with *, ? or [ ] for
  the files and folders that match; a list (.txt, or .jsonl with the key `image`
  or `path`) for its paths, relative to the folder of the list.
  """
  expanded: list[str] = []
  for path in paths:
    if tf.io.gfile.isdir(os.fsencode(path)):
      index = list_folder(path, '')
      warn_of_ignored(index)
      if not len(index):
        raise FileNotFoundError(f"no images in '{path}': {formats.known_endings()}")
      expanded += map(os.fsdecode, index.paths(range(len(index))))
    elif re.search('[*?[]', path) and not tf.io.gfile.exists(os.fsencode(path)):
      matches = sorted(tf.io.gfile.glob(path))
      if not matches:
        raise FileNotFoundError(f"no file matches '{path}'")
      expanded += expand(matches)
    elif path.endswith(('.txt', '.jsonl')):
      expanded += _read_list(path)
    else:
      expanded.append(path)
  return expanded


def _read_list(path: str) -> list[str]:
  """Returns the paths in a list, see `expand`."""
  image_paths = []
  lines = text_files.lines(image_files.read_file(path), path)
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    image_path: Any = line
    if path.endswith('.jsonl'):
      try:
        row = json.loads(line)
        image_path = row['image'] if 'image' in row else row['path']
      except (ValueError, TypeError, KeyError):
        image_path = None
      if not isinstance(image_path, str):
        raise ValueError(
          f'\'{path}\', line {number}: must be like {{"image": "cat.jpg"}}'
        )
    image_paths.append(os.path.join(os.path.dirname(path), image_path))
  return image_paths


def _ending(name: bytes) -> str:
  return os.path.splitext(image_files.display(name))[1].lower()


def warn_of_ignored(index: index_lib.Index) -> None:
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
    console.pluralize(len(index) + counts.total(), 'file'),
    index.top.rstrip('/'),
    ', '.join(kinds),
    index.facts['ignored']['first'],
    remedy and f'; {remedy}',
  )
