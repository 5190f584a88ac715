"""A folder of images as a data set: `root/<split>/<class>/<image>`.

Images without labels may lie in `root/<split>` anyhow.

Who lists it, and looks at its images, is said in vit_jax/data/checking.py.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import os

from absl import logging
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from vit_jax import datasets
from vit_jax.data import checking
from vit_jax.files import listing
from vit_jax.files import paths as paths_lib
from vit_jax.files import reading


def is_folder(dataset: str) -> bool:
  """Tells a folder from the name of a TFDS data set.

  A folder of the current one may have the name of a data set that comes with this
  package, the workdir of a run on it for one: './digits' is the folder then.

  Raises:
    FileNotFoundError: if it is written as a path, but there is no such folder.
  """
  if dataset in datasets.BUILDERS:
    return False
  if tf.io.gfile.isdir(dataset):
    return True
  if dataset.startswith(('/', '.', '~')) or '://' in dataset:
    raise FileNotFoundError(
      f"dataset='{dataset}' is not a folder that exists: {checking.LAYOUT} "
      '(config.dataset)'
    )
  return False


def list_split(
  root: str,
  split: str,
  class_names: Sequence[str] | None = None,
  broken: str = 'error',
  **kwargs,
):
  """Lists the images of a split of classes, `root/<split>/<class>/<image>`.

  Args:
    root: the folder, local or gs://.
    split: name of a folder in it, or a slice of one: 'train[:90%]'; '.' is the
      folder itself.
    class_names: names that the classes must have; None takes those found.
    broken: what to do about images that cannot be decoded: 'error', 'skip', or
      'trust' (do not look).
    **kwargs: `max_pixels` and `workdir`, see `checking.usable` and
      `checking.open_index`.

  Returns:
    paths: of n images, ordered by a hash of their names; paths_lib.Paths.
    labels: int32 [n], index into the class names.
    class_names: tuple of them, sorted.

  Raises:
    FileNotFoundError: if there is no such split or no image in it.
    ValueError: on missing, unknown or empty classes, and on broken images.
    OSError: if a folder or a file cannot be read.
  """
  views = []
  for base, instruction in parts(split):
    index = checking.open_index(root, base, kwargs.get('workdir'))
    names = _class_names(index)
    class_names = names if class_names is None else tuple(class_names)
    _check_classes(index.top, names, class_names)
    is_class = np.array(list(map(_is_class, index.folders)))
    rows = index.order[is_class[index.folder_of(index.order)]]
    _warn_of_ignored(index, len(rows))
    views.append((index, take_slice(rows, base, instruction)))
  paths = checking.usable(
    views, f'{root}/{split}', broken, kwargs.get('max_pixels')
  )
  numbers = {name: i for i, name in enumerate(class_names)}
  labels = [np.zeros(0, np.int32)]
  for index, rows in paths.parts:
    table = [numbers.get(reading.display(f), -1) for f in index.folders]
    labels.append(np.array(table, np.int32)[index.folder_of(rows)])
  return paths, np.concatenate(labels), class_names


def list_images(
  root: str, split: str, broken: str = 'error', **kwargs
) -> paths_lib.Paths:
  """Lists the images of a split, in whatever folders of `root/<split>` they lie.

  Args:
    root: see list_split.
    split: see list_split.
    broken: see list_split.
    **kwargs: see list_split.

  Returns:
    Paths, ordered by a hash of their names: in the order of list_split.

  Raises:
    FileNotFoundError: if there is no such split or no image in it.
    ValueError: on broken images.
    OSError: if a folder or a file cannot be read.
  """
  views = []
  for base, instruction in parts(split):
    index = checking.open_index(root, base, kwargs.get('workdir'))
    if not len(index):
      raise FileNotFoundError(
        f"no images in '{index.top}': known are the endings "
        f'{", ".join(listing.EXTENSIONS)}, in any case'
      )
    _warn_of_ignored(index, len(index))
    views.append((index, take_slice(index.order, base, instruction)))
  return checking.usable(
    views, f'{root}/{split}', broken, kwargs.get('max_pixels')
  )


def has_labels(root: str, split: str, workdir=None) -> bool:
  """Tells a split of class folders from one of images without labels.

  Args:
    root: see list_split.
    split: see list_split.
    workdir: see checking.open_index.

  Raises:
    FileNotFoundError: if there is no such split.
  """
  found = [checking.open_index(root, base, workdir) for base, _ in parts(split)]
  # Where there is no image at all, it is class folders that are missing.
  return not any(map(len, found)) or any(
    _is_class(folder) for index in found for folder in index.folders
  )


def parts(split: str) -> Iterator[tuple[str, str]]:
  """Yields the parts of 'train[:9]+test' with their slices: 'train', '[:9]'."""
  for part in split.split('+'):
    base, bracket, instruction = part.strip().partition('[')
    yield base, bracket + instruction


def splits(root: str) -> list[str]:
  """Returns the names of the splits of a folder, those of manifests too.

  Raises:
    FileNotFoundError: if there is no such folder, or no split in it.
  """
  if not tf.io.gfile.isdir(root):
    raise FileNotFoundError(f"'{root}' is not a folder that exists")
  names = [name.rstrip('/') for name in tf.io.gfile.listdir(root)]
  lists = {x.removesuffix('.jsonl') for x in names if x.endswith('.jsonl')}
  known = ('train', 'test', 'val', 'validation')
  folders = {
    x for x in names if x in known and tf.io.gfile.isdir(f'{root}/{x}')
  }
  if not lists and not folders:
    raise FileNotFoundError(
      f"folder '{root}' has no split: {checking.LAYOUT}; others can be named, and '.' is "
      'the folder itself'
    )
  return sorted(lists or folders)


def _is_class(folder: bytes) -> bool:
  return bool(folder) and b'/' not in folder


def _class_names(index) -> tuple[str, ...]:
  """Returns the names of the classes of a split."""
  bare = index.facts['bare']
  if bare and len(index):
    raise ValueError(
      f"class folder '{index.top}/{bare[0]}' holds no image: known are the "
      f'endings {", ".join(listing.EXTENSIONS)}, in any case'
    )
  found = [folder for folder in index.folders if _is_class(folder)]
  if not found:
    raise FileNotFoundError(
      f"no images in '{index.top}/<class>/': {checking.LAYOUT}, with files that end in "
      f'{", ".join(listing.EXTENSIONS)}'
    )
  try:
    return tuple(folder.decode() for folder in found)
  except UnicodeDecodeError as e:
    raise ValueError(
      f"the name of class folder '{index.top}/{reading.display(e.object)}' is no "
      'UTF-8: rename it'
    ) from e


def _warn_of_ignored(index, taken):
  count, *first = index.facts['ignored']
  count += len(index) - taken
  if count:
    logging.warning(
      'Ignored %d files of %s that are no images of a class folder, the first: %s',
      count,
      index.top,
      os.path.join(index.top, *first)
      if first
      else 'an image in another folder',
    )


def _check_classes(top, names, expected):
  missing = sorted(set(expected) - set(names))
  unknown = sorted(set(names) - set(expected))
  if unknown:
    raise ValueError(
      f"'{top}' has classes that the training split lacks: {unknown[:10]}; add "
      'them there or take them away here'
    )
  if missing:
    raise ValueError(
      f"'{top}' has no images of the classes {missing[:10]} of the training "
      'split; add some, or take these classes away there'
    )


def take_slice(found: Sequence, name: str, instruction: str) -> Sequence:
  """Takes a slice like '[:90%]' of a list, with TFDS's own arithmetic."""
  if not instruction:
    return found
  info = tfds.core.SplitInfo(
    name=name, shard_lengths=[len(found)], num_bytes=0, filename_template=None
  )
  begin, end = bounds(info, instruction)
  return found[begin:end]


def bounds(info, instruction: str) -> tuple[int, int]:
  """Returns from where to where a slice of a split goes, by TFDS's arithmetic.

  Args:
    info: the whole split, a tfds.core.SplitInfo.
    instruction: the slice, '[:90%]' for one, or '' for all of it.

  Raises:
    ValueError: if the slice reaches beyond the split, or is empty.
  """
  count, split = info.num_examples, f'{info.name}{instruction}'
  remedy = f"'{info.name}' has {count:,} examples (config.pp, config.evals)"
  try:
    # By another name, since '.' is none of TFDS's.
    spec = tfds.core.ReadInstruction.from_spec(f'train{instruction}')
    [absolute] = spec.to_absolute({'train': info})
  except (ValueError, AssertionError) as e:
    reason = str(e).strip().splitlines()[-1]
    raise ValueError(
      f"split '{split}' cannot be taken: {reason} {remedy}"
    ) from e
  begin = absolute.from_ or 0
  end = count if absolute.to is None else absolute.to
  if begin >= end:
    raise ValueError(
      f"split '{split}' is empty, from {begin} to {end}: {remedy}"
    )
  return begin, end
