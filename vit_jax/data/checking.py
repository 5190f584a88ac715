"""Lists folders and checks their images, once for all processes.

Process 0 lists a folder, and each process checks its part of the images. The
result, an index, is stored in the workdir of the run or next to the images
(`vit_jax index`), and all processes use it.
"""

from collections.abc import Callable, Sequence
import contextlib
import itertools
import os
import time

from absl import logging
import jax
import numpy as np
import tensorflow as tf

from vit_jax import console
from vit_jax.configs import common
from vit_jax.data.images import image_files, images, index as index_lib, listing
from vit_jax.distributed import processes

_SHOWN = 10  # Broken images that a message names.
# Number of folders whose indices stay in memory: a training and a test split.
_RECENT = 2
_recent: dict[str, tuple[index_lib.Index, float]] = {}
# Seconds for which the list of a remote folder counts as up to date.
_REMOTE_AGE = 600.0
LAYOUT = (
  'a folder must hold train/<class>/* and test/<class>/*, or train.jsonl and test.jsonl'
)
SPLITS = ('train', 'test', 'val', 'validation')  # Usual names.


def usable(
  views: Sequence[tuple[index_lib.Index, np.ndarray]],
  where: str,
  broken: str,
  max_pixels: int | None = None,
  named: Callable[[int], str] | None = None,
  workdir=None,
  why: Callable[[bytes, int], str] | None = None,
) -> index_lib.Paths:
  """Checks that images can be decoded; each process checks its part of them.

  Returns all images, or without the broken ones if these are skipped. Raises
  ValueError if images are broken or none is left, and OSError for a file that
  cannot be read, which does not count as broken.

  Args:
    views: (index, rows) pairs.
    where: name of the split for messages.
    broken: how to treat images that cannot be decoded: 'error', 'skip', or
      'trust' (no check).
    max_pixels: files with more pixels are broken; None: the config's default.
    named: function from an image's number to its name, by default its path.
    workdir: folder of a run, in which results are stored about every minute and
      before raising an error, so that the next start checks only the other and
      the changed files.
    why: function (path, max_pixels) -> why an image is broken, '' if it is not.
  """
  paths = index_lib.Paths(views)
  if not len(paths):
    raise ValueError(f"split '{where}' is empty")
  limit = max_pixels or common.get_config().max_image_pixels
  me, count = jax.process_index(), jax.process_count()

  def look():
    for index, rows in views:
      index.look_again(rows)
      if broken != 'trust':
        path = workdir and _part(index, workdir, me)
        if me and path:
          _recall(index, path)
        mine = rows[rows % count == me]
        if index.check(mine, why or images.why_broken, limit, path):
          if me and path:
            index.save(path)
    found = paths.broken()
    return list(found), list(found.values())[:_SHOWN]

  def store():
    for index, _ in views:
      others = [_part(index, workdir, i) for i in range(1, count)]
      if any([_recall(index, path, compare=False) for path in others]):
        index.save(_part(index, workdir, 0))
      for path in filter(tf.io.gfile.exists, others):
        tf.io.gfile.remove(path)
    if bad and broken == 'error':
      paths.store(workdir)

  found = {}
  for numbers, whys in processes.attempt(f"checking the images of '{where}'", look):
    for i, reason in itertools.zip_longest(numbers, whys, fillvalue=''):
      found[i] = found.get(i) or reason
  bad = sorted(found)
  if workdir and broken != 'trust':
    processes.from_first(f"storing the check of '{where}'", store)
  paths.mark(found)
  named = named or paths.__getitem__
  lines = [f'{named(i)}: {found[i]}' for i in bad[:_SHOWN]]
  if bad and broken != 'skip':
    shown = '\n  '.join(lines)
    raise ValueError(
      f'{len(bad)} of {len(paths)} images cannot be read:\n  {shown}\n'
      'Repair, restore or delete them, or leave them out with '
      '--config.broken_images=skip'
    )
  if len(bad) == len(paths):
    raise ValueError(f"no image of '{where}' can be read")
  if bad:
    logging.warning(
      'Skipped %d of %d images of %s that cannot be read, the first: %s',
      len(bad), len(paths), where, lines[0],
    )  # fmt: skip
  return paths.without(bad)


def _part(index, workdir, process) -> str:
  """Returns where a process stores its part of a check; the first, the whole."""
  path = index_lib.place(workdir, index.root, index.base)
  return f'{path}.{process}' if process else path


def _recall(index, path, compare=True) -> bool:
  """Recalls the results of a stored part of a check, if there is one."""
  with contextlib.suppress(FileNotFoundError):
    part = index_lib.Index.load(path, index.root, index.base)
    if part is not None:
      index.recall(part, compare)
      return True
  return False


def open_index(root: str, base: str, workdir=None) -> index_lib.Index:
  """Returns the index of a split: a stored one if up to date, or a new one.

  Process 0 decides and lists. The other processes read the index stored in the
  workdir, without which they list the folder, and all compare theirs.
  """
  top = os.path.join(root, base)
  if jax.process_count() == 1:
    return _find_index(root, base, workdir)

  def first():
    index = _find_index(root, base, workdir)
    if index.path is None and workdir:
      try:
        index.save(index_lib.place(workdir, root, base))
      except OSError as e:
        raise ValueError(
          f"workdir='{workdir}' cannot be written: {e}; give a writable folder "
          'that all processes share (--workdir)'
        ) from e
    return index.path, index.digest()

  path, digest = processes.from_first(f"listing the images of '{top}'", first)

  def read():
    index, _ = _recent.get(top, (None, 0))
    if index is None or index.digest() != digest:
      index = path and index_lib.Index.load(path, root, base)
      _remember(index or listing.list_folder(root, base))
    found = _recent[top][0]
    return {'number': len(found), 'hash of their names': found.digest()}

  everywhere = processes.attempt(f"reading the index of '{top}'", read)
  mine = everywhere[jax.process_index()]
  processes.agree(f"the images of '{top}'", mine)
  return _recent[top][0]


def open_listed(
  root: str, names: Sequence[str], paths: Sequence[str], workdir=None
) -> index_lib.Index:
  """Returns an index of listed images, with the stored status of each.

  `names` are those of the list, and of other lists that may know its images;
  see index.of_paths for `paths`.
  """
  index = index_lib.of_paths(root, names[0], paths)
  for name in dict.fromkeys(names):
    for old in _stored(root, name, workdir):
      index.recall(old)
  return index


def _stored(root, base, workdir=None):
  """Yields the stored indices of a split, that of the run first."""
  for folder in dict.fromkeys((workdir, None)):
    with contextlib.suppress(FileNotFoundError):
      path = index_lib.place(folder, root, base)
      found = index_lib.Index.load(path, root, base)
      if found is not None:
        yield found


def renew_index(root: str, base: str) -> index_lib.Index:
  """Lists a split anew, keeping the status of unchanged files."""
  _check_split(root, base)
  index = listing.list_folder(root, base)
  for old in _stored(root, base):
    index.recall(old)
  return index


def _find_index(root, base, workdir):
  """Returns the index in memory, a stored one, or a new one."""
  top = _check_split(root, base)
  index, since = _recent.get(top, (None, 0))
  if index is not None and index.is_true():
    if image_files.is_local(top) or time.time() - since < _REMOTE_AGE:
      return index
  old = None
  for found in _stored(root, base, workdir):
    if found.is_true():
      date, path = found.facts['listed'], found.path
      console.say(f"Images of '{top}' as listed on {date} in '{path}'.")
      return _remember(found)
    old = old or found
  if old is not None:
    console.say(f"'{top}' has changed since {old.facts['listed']}: listing it anew.")
  index = listing.list_folder(root, base)
  if old is not None:
    index.recall(old)
  return _remember(index)


def _remember(index):
  _recent.pop(index.top, None)
  while len(_recent) >= _RECENT:
    del _recent[next(iter(_recent))]
  _recent[index.top] = index, time.time()
  return index


def _check_split(root, base):
  """Returns the folder of a split; raises FileNotFoundError if missing."""
  top = os.path.join(root, base)
  if not tf.io.gfile.isdir(top):
    there = [
      name.rstrip('/')
      for name in sorted(tf.io.gfile.listdir(root))
      if name.endswith('.jsonl') or tf.io.gfile.isdir(f'{root}/{name}')
    ]
    # Without any split the folders in `root` are taken for classes.
    has = [name for name in SPLITS if {name, f'{name}.jsonl'} & {*there}]
    whole = has[0] if has else '.'
    raise FileNotFoundError(
      f"folder '{root}' has no split '{base}': {LAYOUT}; it holds "
      f"{there[:10]}. To test on a tenth of '{whole}': "
      f"--config.pp.train='{whole}[:90%]' --config.pp.test='{whole}[90%:]'"
    )
  return top
