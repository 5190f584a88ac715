"""A folder of images as a data set: `root/<split>/<class>/<image>`.

Images without labels may lie in `root/<split>` anyhow.

Everything that can be wrong with such a folder is found here, before training.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import hashlib
import os

from absl import logging
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from vit_jax.data import images

EXTENSIONS = ('.jpg', '.jpeg', '.png', '.webp', '.bmp', '.gif')
_LAYOUT = (
  'a folder must hold train/<class>/* and test/<class>/*, or train.jsonl and '
  'test.jsonl'
)


def is_folder(dataset: str) -> bool:
  """Tells a folder from the name of a TFDS data set.

  Raises:
    FileNotFoundError: if it is written as a path, but there is no such folder.
  """
  if tf.io.gfile.isdir(dataset):
    return True
  if dataset.startswith(('/', '.', '~')) or '://' in dataset:
    raise FileNotFoundError(
      f"dataset='{dataset}' is not a folder that exists: {_LAYOUT} "
      '(config.dataset)'
    )
  return False


def list_split(
  root: str,
  split: str,
  class_names: Sequence[str] | None = None,
  broken: str = 'error',
):
  """Lists the images of a split of classes, `root/<split>/<class>/<image>`.

  Args:
    root: the folder, local or gs://.
    split: name of a folder in it, or a slice of one: 'train[:90%]'.
    class_names: names that the classes must have; None takes those found.
    broken: what to do about images that cannot be decoded: 'error', 'skip', or
      'trust' (do not look).

  Returns:
    paths: list of n paths, ordered by a hash of their names.
    labels: int64 [n], index into the class names.
    class_names: tuple of them, sorted.

  Raises:
    FileNotFoundError: if there is no such split or no image in it.
    ValueError: on missing, unknown or empty classes, and on broken images.
  """
  paths, labels = [], []
  for base, instruction in parts(split):
    found, names = _list_classes(root, base)
    class_names = names if class_names is None else tuple(class_names)
    _check_classes(f'{root}/{base}', names, class_names)
    found = take_slice(found, base, instruction)
    paths += [path for path, _ in found]
    labels += [class_names.index(name) for _, name in found]
  keep = images.usable(paths, f'{root}/{split}', broken)
  labels = np.array(labels, np.int64)[keep]
  return [paths[i] for i in keep], labels, class_names


def list_images(root: str, split: str, broken: str = 'error') -> list[str]:
  """Lists the images of a split, in whatever folders of `root/<split>` they lie.

  Args:
    root: see list_split.
    split: see list_split.
    broken: see list_split.

  Returns:
    Paths, ordered by a hash of their names: in the order of list_split.

  Raises:
    FileNotFoundError: if there is no such split or no image in it.
    ValueError: on broken images.
  """
  paths = []
  for base, instruction in parts(split):
    top = _split_folder(root, base)
    found, ignored = _find_images(top)
    if not found:
      raise FileNotFoundError(
        f"no images in '{top}': known are the endings {', '.join(EXTENSIONS)}, "
        'in any case'
      )
    _warn_of_ignored(ignored, top)
    found.sort(key=lambda path: hash_name(path[len(top) :]))
    paths += take_slice(found, base, instruction)
  return [paths[i] for i in images.usable(paths, f'{root}/{split}', broken)]


def has_labels(root: str, split: str) -> bool:
  """Tells a split of class folders from one of images without labels.

  Args:
    root: see list_split.
    split: see list_split.

  Raises:
    FileNotFoundError: if there is no such split.
  """
  tops = [_split_folder(root, base) for base, _ in parts(split)]
  for top in tops:
    for name in _listdir(top):
      path = os.path.join(top, name)
      if not is_image(name) and tf.io.gfile.isdir(path):
        if any(map(is_image, _listdir(path))):
          return True
  # Where there is no image at all, it is class folders that are missing.
  return not any(_find_images(top)[0] for top in tops)


def parts(split: str) -> Iterator[tuple[str, str]]:
  """Yields the parts of 'train[:9]+test' with their slices: 'train', '[:9]'."""
  for part in split.split('+'):
    base, bracket, instruction = part.strip().partition('[')
    yield base, bracket + instruction


def is_image(name: str) -> bool:
  """Tells an image file by the ending of its name."""
  return name.lower().endswith(EXTENSIONS)


def _split_folder(root, base):
  """Returns the folder of a split, which must exist."""
  top = os.path.join(root, base)
  if not tf.io.gfile.isdir(top):
    there = [
      name
      for name in _listdir(root)
      if name.endswith('.jsonl') or tf.io.gfile.isdir(f'{root}/{name}')
    ]
    raise FileNotFoundError(
      f"folder '{root}' has no split '{base}': {_LAYOUT}; it holds "
      f'{there[:10]} (config.pp.train, config.pp.test)'
    )
  return top


def _list_classes(root, split):
  """Returns [(path, class)] of a split in their order, and the class names."""
  top = _split_folder(root, split)
  names, found, ignored = [], [], []
  for name in _listdir(top):
    if not tf.io.gfile.isdir(os.path.join(top, name)):
      ignored.append(os.path.join(top, name))
      continue
    files = [os.path.join(top, name, f) for f in _listdir(f'{top}/{name}')]
    pictures = [f for f in files if is_image(f)]
    ignored += [f for f in files if not is_image(f)]
    if files and not pictures:
      raise ValueError(
        f"class folder '{top}/{name}' holds no image: known are the endings "
        f'{", ".join(EXTENSIONS)}, in any case'
      )
    if pictures:
      names.append(name)
      found += [(image, name) for image in pictures]
  if not found:
    raise FileNotFoundError(
      f"no images in '{top}/<class>/': {_LAYOUT}, with files that end in "
      f'{", ".join(EXTENSIONS)}'
    )
  _warn_of_ignored(ignored, top)
  found.sort(key=lambda pair: hash_name(pair[0][len(top) :]))
  return found, tuple(names)


def _find_images(top):
  """Returns paths of the images below a folder, and of all other files."""
  found, ignored = [], []
  for name in _listdir(top):
    path = os.path.join(top, name)
    if is_image(name):  # No look at each of a million files.
      found.append(path)
    elif tf.io.gfile.isdir(path):
      inner, others = _find_images(path)
      found += inner
      ignored += others
    else:
      ignored.append(path)
  return found, ignored


def _warn_of_ignored(paths, top):
  if paths:
    logging.warning(
      'Ignored %d files of %s that are no images of a class folder, the first: %s',
      len(paths),
      top,
      paths[0],
    )


def _listdir(path):
  """Names in a folder, sorted, without hidden ones."""
  names = (name.rstrip('/') for name in tf.io.gfile.listdir(path))
  return sorted(name for name in names if not name.startswith('.'))


def hash_name(name: str) -> bytes:
  """Returns by what images are ordered, the same for a name everywhere."""
  return hashlib.md5(name.encode(), usedforsecurity=False).digest()


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
  info = tfds.core.SplitInfo(
    name=name, shard_lengths=[len(found)], num_bytes=0, filename_template=None
  )
  try:
    spec = tfds.core.ReadInstruction.from_spec(name + instruction)
    [absolute] = spec.to_absolute({name: info})
  except (ValueError, AssertionError) as e:
    raise ValueError(
      f"split '{name}{instruction}' cannot be read: {e} (config.pp.train, "
      'config.pp.test)'
    ) from e
  return found[absolute.from_ : absolute.to]
