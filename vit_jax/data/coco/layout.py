"""Finds the annotation file and the images of a split in a folder.

Two layouts are known, here for a split `train`:

annotations/instances_train2017.json  images in train2017/, as in COCO
train/_annotations.coco.json          images next to the file, as in Roboflow

The year may differ or be absent, or appear only in the folder of the images, which may
also be images/train2017/, images/, or the folder at which the paths in the file begin.
`validation`, `val` and `valid` are names of the same split; `test` is the validation
split of a folder whose test images have no annotations, as in COCO. Segments for
panoptic segmentation are in annotations/panoptic_train2017.json, with PNGs in
annotations/panoptic_train2017/ or panoptic_train2017/.
"""

from collections.abc import Sequence
import os
import re
from typing import NamedTuple

from vit_jax.data import slices
from vit_jax.data.lazy import tf

_LAYOUT = (
  'a folder with boxes must hold annotations/instances_<split>.json and the images '
  'in <split>/, or <split>/_annotations.coco.json next to the images'
)
_ROBOFLOW = '_annotations.coco.json'
_SPLIT = r'(?:train|validation|valid|val|test)(?:\d{4})?'


class Place(NamedTuple):
  """Where a split is stored."""

  path: str  # Path of the annotation file.
  name: str  # Name of the split there, such as 'train2017'.
  folders: tuple[str, ...]  # Folders that may hold its images.
  segments: tuple[str, ...] = ()  # Folders that may hold its PNGs of segments.


def exists(root: str, split: str) -> bool:
  """Returns whether a folder has boxes for any part of a split."""
  return any(has(root, base, 'instances') for base in slices.bases(split))


def has(root: str, base: str, kind: str) -> bool:
  """Returns whether a folder has the file of a kind for a part of a split."""
  return _find(root, base, kind) is not None


def kind_of_segments(root: str, split: str) -> str:
  """Returns 'panoptic', or 'outlines' if only objects are annotated."""
  if all(has(root, base, 'panoptic') for base in slices.bases(split)):
    return 'panoptic'
  return 'outlines' if exists(root, split) else 'panoptic'


def splits(root: str) -> list[str]:
  """Returns the names of the splits of a folder that have boxes."""
  names = set()
  for file in _list_folder(os.path.join(root, 'annotations')):
    if match := re.fullmatch(f'instances_({_SPLIT})\\.json', file):
      names.add(match[1])
  for name in _list_folder(root):
    if re.fullmatch(_SPLIT, name) and _exists(root, name, _ROBOFLOW):
      names.add(name)
  return sorted(names)


def find(root: str, base: str, kind: str = 'instances') -> Place:
  """Finds the file of a split: 'instances', 'outlines', 'panoptic' or 'captions'."""
  place = _find(root, base, 'instances' if kind == 'outlines' else kind)
  if place is None:
    files = _list_folder(os.path.join(root, 'annotations'))
    available = sorted(f'annotations/{file}' for file in files)
    segments = 'segments are annotations/panoptic_<split>.json and its PNGs'
    raise FileNotFoundError(
      f"folder '{root}' has no annotations of split '{base}': "
      f'{segments if kind == "panoptic" else _LAYOUT}; it has {available[:10]} '
      '(config.dataset, config.pp.train, config.pp.test, config.evals)'
    )
  return place


def folder_of(path: str, folders: Sequence[str], files: Sequence[str]) -> str:
  """Returns the folder that holds the images of an annotation file."""
  probes = files[:: max(1, len(files) // 5)]
  for folder in folders:
    if any(_exists(folder, name) for name in probes):
      return folder
  raise FileNotFoundError(
    f"'{path}' lists images such as '{files[0]}', which are in none of "
    f'{[folder.rstrip("/") for folder in folders]}: put the images of the split there'
  )


def _find(root: str, base: str, kind: str) -> Place | None:
  """Returns the place of a split; None if there is none."""
  folder = os.path.join(root, 'annotations')
  files = sorted(_list_folder(folder))
  other_names = slices.VALIDATION if base in ('test', *slices.VALIDATION) else ()
  for name in dict.fromkeys((base, *other_names)):
    pattern = rf'{kind}_({re.escape(name)}(\d{{4}})?)\.json'
    matches = [re.fullmatch(pattern, file) for file in files]
    names = [match[1] for match in matches if match]
    if len(names) > 1:
      raise ValueError(
        f"'{folder}' has {kind} of split '{name}' for several years: use one of "
        f'{names} (config.pp.train, config.pp.test)'
      )
    if names:
      return _in_annotations(root, kind, names[0])
    if kind == 'instances' and _exists(root, name, _ROBOFLOW):
      folder_of_split = os.path.join(root, name)
      path = os.path.join(folder_of_split, _ROBOFLOW)
      return Place(path, name, (folder_of_split,))
  return None


def _in_annotations(root: str, kind: str, name: str) -> Place:
  """Returns the place of a split of COCO's layout."""
  without_year = name.rstrip('0123456789')
  folders = dict.fromkeys(
    (name, without_year, f'images/{name}', f'images/{without_year}', 'images', '')
  )
  segments = f'annotations/panoptic_{name}', f'panoptic_{name}'
  return Place(
    os.path.join(root, 'annotations', f'{kind}_{name}.json'),
    name,
    tuple(os.path.join(root, folder) for folder in folders),
    tuple(os.path.join(root, folder) for folder in segments),
  )


def _exists(*path: str) -> bool:
  return tf.io.gfile.exists(os.path.join(*path))


def _list_folder(folder: str) -> list[str]:
  """Returns the names in a folder; [] if there is no folder."""
  if not tf.io.gfile.isdir(folder):
    return []
  return [name.rstrip('/') for name in tf.io.gfile.listdir(folder)]
