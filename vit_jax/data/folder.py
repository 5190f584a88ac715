"""A folder of images as a data set: `root/<split>/<class>/<image>`.

Images without labels may be anywhere below `root/<split>`. If there are files
metadata.jsonl or metadata.csv below it, they list the images, see
vit_jax/data/manifest.py.
vit_jax/data/checking.py lists the folder and checks the images.
"""

from collections.abc import Iterable, Sequence
import functools
import os
from typing import Any
import unicodedata

from absl import logging
import numpy as np

from vit_jax import console
from vit_jax.data import (
  checking,
  folder_formats,
  folder_layout,
  folds,
  manifest,
  manifest_files,
  records,
  registry,
  slices,
)
from vit_jax.data.images import formats, image_files, index as index_lib, listing
from vit_jax.data.lazy import tf


def is_folder(dataset: str) -> bool:
  """Returns whether a data set is a folder, not a name of TFDS or on the hub.

  A name of this package's data sets never means a folder, which is './digits'.
  ValueError for an archive; FileNotFoundError for another path without a folder.
  """
  if dataset in registry.BUILDERS or dataset.startswith(tuple(registry.SOURCES)):
    return False
  if tf.io.gfile.isdir(dataset):
    return True
  if folder_layout.is_path(dataset):
    raise folder_layout.unusable(dataset)
  return False


class Format(folder_formats.ListedFormat):
  """The folder format of this module."""

  def recognizes(self, root: str, split: str, features: Sequence[str] = ()) -> bool:
    return folder_layout.has_split_folders(root, split)

  def read_split(
    self, request: folder_formats.Request, **checks: Any
  ) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    return read_split(
      request.root, request.split, request.features, request.class_names, **checks
    )

  def list_images(self, root: str, split: str) -> folder_formats.Listing:
    index = checking.renew_index(root, split)
    listing.warn_of_ignored(index)
    if index.facts['metadata']:
      index = manifest.open_index(root, split, listed_lines)
    return folder_formats.Listing(index)


def read_split(
  root: str,
  split: str,
  features: Iterable[str],
  class_names: Sequence[str] | None = None,
  **kwargs: Any,
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
  """Reads the requested features of a split, like manifest.read_split."""
  workdir = kwargs.get('workdir')
  if any(metadata(root, base, workdir) for base in slices.bases(split)):
    parse = functools.partial(listed_lines, workdir=workdir)
    return manifest.read_split(root, split, features, class_names, parse, **kwargs)
  labelled = has_labels(root, split, workdir)
  available = ('image', 'label') if labelled else ('image',)
  features = tuple(features)
  if not labelled and 'label' in features:
    raise _no_classes_error(root, split, workdir)
  where = f"split '{split}' of folder '{root}'"
  requested = records.resolve(features, available, where)
  if 'label' not in requested:
    paths, _, _ = list_split(root, split, labelled=False, **kwargs)
    return {name: paths for name in requested}, {}
  paths, labels, names = list_split(root, split, class_names, **kwargs)
  assert labels is not None  # Since they are requested.
  columns = {'image': paths, 'label': labels[:, None]}
  return {name: columns[name] for name in requested}, {'label': names}


def list_split(
  root: str,
  split: str,
  class_names: Sequence[str] | None = None,
  broken: str = 'error',
  labelled: bool = True,
  **kwargs: Any,
) -> tuple[index_lib.Paths, np.ndarray | None, tuple[str, ...]]:
  """Lists the images of a split with classes, `root/<split>/<class>/<image>`.

  `split` is the name of a folder in `root`, or a slice of it, 'train[:90%]', or a fold,
  'train[fold=0/5]'; '.' is `root` itself. See checking.usable for `broken`,
  `max_pixels` and `workdir`.

  Returns (paths, labels, class_names): index.Paths of n images, ordered by a hash of
  their names; int32 [n], numbers of the classes; and their names, sorted. Unless
  `labelled`, the images may be anywhere below the split and have no labels, None.
  """
  views = []
  names = tuple(class_names or ())
  for base, instruction in slices.parts(split):
    index = checking.open_index(root, base, kwargs.get('workdir'))
    listing.warn_of_ignored(index)
    is_used = np.ones(len(index), bool)
    if labelled:
      split_names = _class_names(index)
      names = names or split_names
      records.class_numbers(index.top, split_names, names)
      is_class = np.array(list(map(_is_class, index.folders)))
      is_used = is_class[index.folder_of(index.order)]
    elif not len(index):
      raise FileNotFoundError(f"no images in '{index.top}': {formats.known_endings()}")
    if outside := np.count_nonzero(~is_used):
      logging.warning(
        "Left out %s of '%s' outside of class folders",
        console.pluralize(outside, 'image'),
        index.top,
      )
    fold = folds.parse(instruction)
    if fold is None:
      rows = slices.take(index.order[is_used], base, instruction)
    else:
      # Folds are of all images, so that they are the same with and without labels.
      strata = index.folder_of(index.order)
      rows = index.order[is_used & fold.contains(folds.assign(base, fold, strata))]
    views.append((index, rows))
  paths = checking.usable(views, f'{root}/{split}', broken, **kwargs)
  if not labelled:
    return paths, None, ()
  numbers = {name: i for i, name in enumerate(names)}
  labels = []
  for index, rows in paths.parts:
    table = [numbers.get(image_files.display(name), -1) for name in index.folders]
    labels.append(np.array(table, np.int32)[index.folder_of(rows)])
  return paths, np.concatenate(labels), names


def metadata(root: str, base: str, workdir: str | None = None) -> list[str]:
  """Returns the paths of metadata files below the folder of a split."""
  index = checking.open_index(root, base, workdir)
  return [os.path.join(index.top, name) for name in index.facts['metadata']]


def listed_lines(
  root: str, base: str, workdir: str | None = None
) -> list[manifest_files.Line]:
  """Returns the images in the metadata files below the folder of a split."""
  lines = manifest_files.parse_metadata(root, base, metadata(root, base, workdir))
  index = checking.open_index(root, base, workdir)
  if (missing := len(index) - len({line.image for line in lines})) > 0:
    logging.warning(
      'Left out %s of %s that no metadata file lists',
      console.pluralize(missing, 'image'),
      index.top,
    )
  return lines


def has_labels(root: str, split: str, workdir: str | None = None) -> bool:
  """Returns whether a split, which must exist, has class folders."""
  indices = [checking.open_index(root, base, workdir) for base in slices.bases(split)]
  folders: list[bytes] = []
  for index in indices:
    folders += index.folders
  # A split without any image counts as one whose class folders are missing.
  return not folders or any(map(_is_class, folders))


def _no_classes_error(root: str, split: str, workdir: str | None) -> ValueError:
  """Returns the error for labels of images that are not in class folders."""
  base = slices.bases(split)[0]
  index = checking.open_index(root, base, workdir)
  place = f"'{base}/<class>/' in '{root}'"
  folder = image_files.display(index.folders[0])
  if folder:
    top = folder.partition('/')[0]
    return ValueError(
      f"the images of '{index.top}' are too deep, such as those in '{folder}': class "
      f"folders must be directly in '{index.top}'; move the content of '{top}' one "
      'level up (config.dataset)'
    )
  return ValueError(
    f"the images of '{index.top}' are not in class folders: move them to {place}, list "
    "them with their labels in a file metadata.csv, whose columns are 'file_name' and "
    "'label', or train without labels (config.dataset, config.task)"
  )


def splits(root: str) -> list[str]:
  """Returns the splits of a folder or of its manifests; may raise FileNotFoundError."""
  entries = [name.rstrip('/') for name in tf.io.gfile.listdir(root)]
  manifests = [x for x in entries if x.endswith('.jsonl') and x not in listing.METADATA]
  names = [name.removesuffix('.jsonl') for name in manifests]
  if not names:
    for name in entries:
      if name in checking.SPLITS and tf.io.gfile.isdir(f'{root}/{name}'):
        names.append(name)
  if not names:
    raise FileNotFoundError(
      f"folder '{root}' has no split: {folder_layout.LAYOUT}; name other folders as "
      "splits, or pass '.' for the folder itself"
    )
  return sorted(names)


def _is_class(folder: bytes) -> bool:
  return bool(folder) and b'/' not in folder


def _class_names(index: index_lib.Index) -> tuple[str, ...]:
  """Returns the class names of a split."""
  bare = index.facts['bare']
  if bare and len(index):
    raise _bare_class_error(index, bare[0])
  folders = [folder for folder in index.folders if _is_class(folder)]
  if not folders:
    raise FileNotFoundError(
      f"no images in '{index.top}/<class>/': {folder_layout.LAYOUT}; "
      f'{formats.known_endings()}'
    )
  names = tuple(map(image_files.display, folders))
  _check_distinct(index.top, names)
  return names


def _bare_class_error(index: index_lib.Index, name: str) -> ValueError:
  """Returns the error for a class folder without images."""
  path = f'{index.top}/{name}'
  for folder in map(image_files.display, index.folders):
    if folder.startswith(f'{name}/'):
      return ValueError(
        f"class folder '{path}' has its images in folders inside it, such as "
        f"'{folder}': move them to '{path}', or, if '{folder}' is a class, to "
        f"'{index.top}'"
      )
  return ValueError(
    f"class folder '{path}' has no images: add some, or delete the folder; "
    f'{formats.known_endings()}'
  )


def _check_distinct(top: str, names: Sequence[str]) -> None:
  """Raises ValueError for names that differ only in how Unicode encodes accents."""
  composed: dict[str, str] = {}
  for name in names:
    twin = composed.setdefault(unicodedata.normalize('NFC', name), name)
    if twin != name:
      raise ValueError(
        f"class folders {twin!a} and {name!a} in '{top}' have the same name with "
        'accents encoded in two ways: move their images into one of them'
      )
