"""The layout of a data set in a folder, for messages. Does not import JAX."""

import os

from vit_jax.data import registry, slices
from vit_jax.data.images import image_files
from vit_jax.data.lazy import tf

LAYOUT = (
  'a folder must hold train/<class>/* and test/<class>/*, or train.jsonl and '
  'test.jsonl, or data/train-*.parquet'
)


def is_path(dataset: str) -> bool:
  """Returns whether a data set can only be a folder, not a name."""
  if dataset.startswith(tuple(registry.SOURCES)):
    return False
  is_archive = dataset.endswith(image_files.ARCHIVES)
  return is_archive or dataset.startswith(('/', '.', '~')) or '://' in dataset


def unusable(dataset: str) -> Exception:
  """Returns the error for a path that is not an existing folder."""
  if dataset.endswith(image_files.ARCHIVES):
    return ValueError(
      f"dataset='{dataset}' is an archive: unpack it and pass its folder, which must "
      'hold train/ and test/ (config.dataset)'
    )
  return FileNotFoundError(
    f"dataset='{dataset}' is not a folder that exists: {LAYOUT} (config.dataset)"
  )


def check_local(dataset: str) -> None:
  """Raises the error of `unusable` for a local path that is not an existing folder."""
  if is_path(dataset) and '://' not in dataset and not os.path.isdir(dataset):
    raise unusable(dataset)


def check_apart(workdir: str, root: str, split: str) -> None:
  """Raises ValueError for a workdir that is a data folder, or in a folder of a split.

  Its files would be taken for data, and the pictures among them for a class.
  """
  path = _real_path(workdir)
  folders = [os.path.join(root, base) for base in slices.bases(split)]
  is_inside = any(f'{path}/'.startswith(f'{_real_path(x)}/') for x in folders)
  if is_inside or path == _real_path(root):
    raise ValueError(
      f"workdir='{workdir}' is in the folder of the data, '{root}': use another "
      '--workdir, outside of it'
    )


def _real_path(path: str) -> str:
  """Returns an absolute path without links; URLs have no links."""
  return path.rstrip('/') if '://' in path else os.path.realpath(path)


def has_split_folders(root: str, split: str) -> bool:
  """Returns whether a data set has a folder for each part of a split."""
  folders = [os.path.join(root, base) for base in slices.bases(split)]
  return all(map(tf.io.gfile.isdir, folders))
