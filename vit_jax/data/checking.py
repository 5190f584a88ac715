"""Lists the images of a folder and checks each one, once for all processes.

Process 0 lists a folder, and each process checks some of the images. The
result, an index, is stored in the workdir of the run or next to the images
(`vit_jax index`), and all processes use it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import copy
import functools
import os

from absl import logging
import jax
import numpy as np

from vit_jax import console
from vit_jax.configs import common
from vit_jax.data import folder_layout, slices
from vit_jax.data.images import image_files, images, index as index_lib, listing
from vit_jax.data.lazy import tf
from vit_jax.distributed import processes

_SHOWN = 10  # Broken images that a message names.
# Indices in memory by folder: the last two, of a training and a test split.
_recent: dict[str, index_lib.Index] = {}
SPLITS = ('train', 'test', *slices.VALIDATION)  # Usual names.


def usable(
  views: Sequence[tuple[index_lib.Index, np.ndarray]],
  where: str,
  broken: str,
  max_pixels: int | None = None,
  describe: Callable[[int], str] | None = None,
  workdir: str | None = None,
  explain: Callable[[bytes, int], str] | None = None,
  channels: int | None = None,
) -> index_lib.Paths:
  """Checks that images can be decoded; returns those that are not broken.

  Each process checks some of them. In a run's `workdir`, results are stored about every
  minute and before raising an error, so that the next start checks only the
  remaining and the changed files.

  Args:
    views: (index, rows) pairs.
    where: names the split in messages.
    broken: 'error', 'skip', or 'trust' (no check, all images are returned).
    max_pixels: files with more pixels are broken; by default the config's limit.
    describe: maps an image's number to its name, by default its path.
    workdir: folder of the run.
    explain: maps (path, max_pixels) to the reason why an image is broken, or ''.
    channels: number of channels of images.decode_values; None: 8-bit colour.

  Raises:
    ValueError: if images are broken and not skipped, or none is left.
    OSError: if a file cannot be read, which does not count as broken.
  """
  paths = index_lib.Paths(views)
  if not len(paths):
    raise ValueError(f"split '{where}' is empty")
  limit = max_pixels or common.get_config().max_image_pixels

  if explain is None:
    explain = images.broken_reason
    if channels is not None:
      explain = functools.partial(images.broken_reason, channels=channels)

  def check() -> list[tuple[int, str]]:
    for index, rows in views:
      index.check_anew('channels', channels)
      index.forget_changed(rows)
      if broken != 'trust':
        _check_local(index, rows, explain, limit, workdir)
    local_reasons = paths.broken()
    shown_numbers = _first_of_each(paths, local_reasons)
    results = []
    for number, reason in local_reasons.items():
      results.append((number, reason if number in shown_numbers else ''))
    return results

  reasons: dict[int, str] = {}
  for process_results in processes.attempt(f"checking the images of '{where}'", check):
    for number, reason in process_results:
      reasons[number] = reasons.get(number) or reason

  def store() -> None:
    for index, _ in views:
      _merge_results(index, workdir)
    if reasons and broken == 'error':
      paths.store(workdir)

  if workdir and broken != 'trust':
    processes.from_first(f"storing the check of '{where}'", store)
  paths.mark(reasons)
  if not reasons or broken == 'trust':
    return paths
  _report_broken(paths, reasons, where, broken, describe)
  return paths.without(sorted(reasons))


def _report_broken(
  paths: index_lib.Paths,
  reasons: Mapping[int, str],
  where: str,
  broken: str,
  describe: Callable[[int], str] | None,
) -> None:
  """Raises the error of `usable`, or warns of the images that are left out."""
  lines = []
  for number in _first_of_each(paths, sorted(reasons)):
    name = paths[number] if describe is None else describe(number)
    lines.append(f'{name}: {reasons[number]}')
  if broken != 'skip':
    message = '\n  '.join(lines)
    raise ValueError(
      f'{len(reasons):,} of {len(paths):,} images cannot be read:\n  {message}\n'
      'Repair, restore or delete them, or leave them out with '
      '--config.broken_images=skip'
    )
  if len(reasons) == len(paths):
    raise ValueError(f"no image of '{where}' can be read, the first: {lines[0]}")
  logging.warning(
    'Skipped %d of %d images of %s that cannot be read, the first: %s',
    len(reasons),
    len(paths),
    where,
    lines[0],
  )


def _first_of_each(paths: index_lib.Paths, numbers: Iterable[int]) -> list[int]:
  """Returns a number of each path to show, sorted by path; images may be repeated."""
  by_path: dict[str, int] = {}
  for number in numbers:
    by_path.setdefault(paths[number], number)
  return [number for _, number in sorted(by_path.items())[:_SHOWN]]


def _check_local(
  index: index_lib.Index,
  rows: np.ndarray,
  explain: Callable[[bytes, int], str],
  limit: int,
  workdir: str | None,
) -> None:
  """Checks the rows that belong to this process."""
  process = jax.process_index()
  rows = np.unique(rows[rows % jax.process_count() == process])
  if not workdir:
    index.check(rows, explain, limit)
    return
  path = index_lib.place(workdir, index.root, index.base)
  if process == 0:  # Stores the results of all processes, see `usable`.
    index.check(rows, explain, limit, lambda: index.save(path))
    return
  path = f'{path}.{process}of{jax.process_count()}'
  stored = copy.copy(index)
  stored.checks = index.load_checks([path])
  index.recall(stored)
  if index.check(rows, explain, limit, lambda: index.save_checks(path, rows)):
    index.save_checks(path, rows)


def _merge_results(index: index_lib.Index, workdir: str | None) -> None:
  """Moves the stored results of the other processes into the stored index."""
  path = index_lib.place(workdir, index.root, index.base)
  folder, name = os.path.split(path)
  entries = tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else []
  paths = [f'{folder}/{entry}' for entry in entries if entry.startswith(f'{name}.')]
  # Results of a different number of processes may be out of date.
  current = [path for path in paths if path.endswith(f'of{jax.process_count()}')]
  checks = index.load_checks(current)
  if checks.status.any():
    index.checks = index_lib.merge(index.checks, checks)
    index.save(path)
  image_files.in_threads(tf.io.gfile.remove, paths)


def open_index(root: str, base: str, workdir: str | None = None) -> index_lib.Index:
  """Returns the index of a split: a stored one if up to date, or a new one.

  Process 0 decides and lists. The other processes read the index stored in the
  workdir, or list the folder if there is none, and all compare theirs.
  """
  top = os.path.join(root, base)
  if jax.process_count() == 1:
    return _find_index(root, base, workdir)

  def first() -> tuple[str | None, str]:
    index = _find_index(root, base, workdir)
    if index.path is None and workdir:
      try:
        index.save(index_lib.place(workdir, root, base))
      except OSError as e:
        raise ValueError(
          f"workdir='{workdir}' cannot be written: {e}; use a writable folder "
          'that all processes share (--workdir)'
        ) from e
    return index.path, index.digest()

  path, digest = processes.from_first(f"listing the images of '{top}'", first)

  def read() -> None:
    index = _recent.get(top)
    if index is None or index.digest() != digest:
      index = path and index_lib.Index.load(path, root, base)
      _remember(index or listing.list_folder(root, base))

  processes.attempt(f"reading the index of '{top}'", read)
  index = _recent[top]
  facts = {'number': len(index), 'hash of their names': index.digest()}
  processes.agree(f"the images of '{top}'", facts)
  return index


def open_listed(
  root: str, split: str, ending: str, paths: Sequence[str], workdir: str | None = None
) -> index_lib.Index:
  """Returns an index of listed images, see index.from_paths, with their stored status.

  `ending`, such as 'jsonl', tells apart the lists of a split.
  """
  index = index_lib.from_paths(root, f'{split}.{ending}', paths)
  return recall_listed(index, split, ending, workdir)


def recall_listed(
  index: index_lib.Index, split: str, ending: str, workdir: str | None = None
) -> index_lib.Index:
  """Recalls the status stored of a split or its parts, see `open_listed`."""
  for name in dict.fromkeys((split, *slices.bases(split))):
    _recall(index, _stored(index.root, f'{name}.{ending}', workdir))
  return index


def renew_index(root: str, base: str) -> index_lib.Index:
  """Lists a split anew, keeping the status of unchanged files."""
  _check_split(root, base)
  return _recall(listing.list_folder(root, base), _stored(root, base))


def _recall(
  index: index_lib.Index, stored: Iterable[index_lib.Index]
) -> index_lib.Index:
  for old in stored:
    index.recall(old)
  return index


def _stored(root: str, base: str, workdir: str | None = None) -> list[index_lib.Index]:
  """Returns the stored indices of a split, first the one in the workdir."""
  indices = []
  for folder in dict.fromkeys((workdir, None)):
    index = index_lib.Index.load(index_lib.place(folder, root, base), root, base)
    if index is not None:
      indices.append(index)
  return indices


def _find_index(root: str, base: str, workdir: str | None) -> index_lib.Index:
  """Returns the index in memory, a stored one, or a new one."""
  top = _check_split(root, base)
  index = _recent.get(top)
  if index is not None and index.is_up_to_date():
    return index
  stored = _stored(root, base, workdir)
  for index in stored:
    if index.is_up_to_date():
      date = index.facts['listed']
      path = index.path
      console.log(f"Images of '{top}' as listed on {date} in '{path}'.")
      return _remember(index)
  if stored:
    date = stored[0].facts['listed']
    console.log(f"'{top}' has changed since {date}: listing it again.")
  return _remember(_recall(listing.list_folder(root, base), stored))


def _remember(index: index_lib.Index) -> index_lib.Index:
  """Keeps an index in memory, and only the last of the others."""
  _recent.pop(index.top, None)
  for top in [*_recent][:-1]:
    del _recent[top]
  _recent[index.top] = index
  return index


def _check_split(root: str, base: str) -> str:
  """Returns the folder of a split; raises FileNotFoundError if missing."""
  top = os.path.join(root, base)
  if not tf.io.gfile.isdir(top):
    entries = []
    for name in sorted(tf.io.gfile.listdir(root)):
      if name.endswith('.jsonl') or tf.io.gfile.isdir(f'{root}/{name}'):
        entries.append(name.rstrip('/'))
    for entry in entries:
      name = entry.removesuffix('.jsonl')
      if name.lower() == base.lower():
        ending = entry.removeprefix(name)
        raise slices.NoSplitError(
          f"folder '{root}' has no split '{base}', but '{entry}'",
          f"Names of splits are lower case: rename it to '{base}{ending}'",
        )
    existing = '.'  # Without any split the folders in `root` are probably classes.
    for name in reversed(SPLITS):
      if name in entries or f'{name}.jsonl' in entries:
        existing = name
    raise slices.NoSplitError(
      f"folder '{root}' has no split '{base}': {folder_layout.LAYOUT}; "
      f'it holds {entries[:10]}',
      f"To test on a tenth of '{existing}': --config.pp.train='{existing}[:90%]' "
      f"--config.pp.test='{existing}[90%:]'",
    )
  return top
