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

  path: str  # Of the annotation file.
  name: str  # Of the split there, 'train2017'.
  folders: tuple[str, ...]  # That may hold its images.
  segments: tuple[str, ...] = ()  # That may hold its PNGs of segments.


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
  files = _listed(os.path.join(root, 'annotations'))
  matches = [re.fullmatch(f'instances_({_SPLIT})\\.json', file) for file in files]
  found = {match[1] for match in matches if match}
  for name in _listed(root):
    if re.fullmatch(_SPLIT, name) and _has(root, name, _ROBOFLOW):
      found.add(name)
  return sorted(found)


def find(root: str, base: str, kind: str = 'instances') -> Place:
  """Finds the file of a split: 'instances', 'outlines', 'panoptic' or 'captions'."""
  found = _find(root, base, 'instances' if kind == 'outlines' else kind)
  if found is None:
    there = [f'annotations/{x}' for x in _listed(os.path.join(root, 'annotations'))]
    segments = 'segments are annotations/panoptic_<split>.json and its PNGs'
    raise FileNotFoundError(
      f"folder '{root}' has no annotations of split '{base}': "
      f'{segments if kind == "panoptic" else _LAYOUT}; it has {sorted(there)[:10]} '
      '(config.dataset, config.pp.train, config.pp.test, config.evals)'
    )
  return found


def folder_of(path: str, folders: Sequence[str], files: Sequence[str]) -> str:
  """Returns the folder that holds the images of an annotation file."""
  probed = files[:: max(1, len(files) // 5)]
  for where in folders:
    if any(_has(where, name) for name in probed):
      return where
  raise FileNotFoundError(
    f"'{path}' lists images such as '{files[0]}', which are in none of "
    f'{[where.rstrip("/") for where in folders]}: put the images of the split there'
  )


def _find(root, base, kind) -> Place | None:
  where = os.path.join(root, 'annotations')
  files = sorted(_listed(where))
  others = slices.VALIDATION if base in ('test', *slices.VALIDATION) else ()
  for name in dict.fromkeys((base, *others)):
    pattern = rf'{kind}_({re.escape(name)}(\d{{4}})?)\.json'
    found = [match[1] for match in (re.fullmatch(pattern, x) for x in files) if match]
    if len(found) > 1:
      raise ValueError(
        f"'{where}' has {kind} of split '{name}' for several years: use one of {found} "
        '(config.pp.train, config.pp.test)'
      )
    if found:
      return _in_annotations(root, kind, found[0])
    if kind == 'instances' and _has(root, name, _ROBOFLOW):
      top = os.path.join(root, name)
      return Place(os.path.join(top, _ROBOFLOW), name, (top,))
  return None


def _in_annotations(root, kind, name) -> Place:
  plain = name.rstrip('0123456789')
  inside = name, plain, f'images/{name}', f'images/{plain}', 'images', ''
  segments = f'annotations/panoptic_{name}', f'panoptic_{name}'
  return Place(
    os.path.join(root, 'annotations', f'{kind}_{name}.json'),
    name,
    tuple(os.path.join(root, x) for x in dict.fromkeys(inside)),
    tuple(os.path.join(root, x) for x in segments),
  )


def _has(*parts) -> bool:
  return tf.io.gfile.exists(os.path.join(*parts))


def _listed(where) -> list[str]:
  if not tf.io.gfile.isdir(where):
    return []
  return [name.rstrip('/') for name in tf.io.gfile.listdir(where)]
