"""Finds the annotation file and the images of a split in a folder.

The layouts that are known, for a split `train`:

annotations/instances_train2017.json  images in train2017/, as COCO is laid out
annotations/train.json                images in train/
train.json                            images in train/
train/_annotations.coco.json          images beside the file, as of Roboflow

The year may be absent or another, also that of the images alone; these may also
lie in images/train2017/, in images/, or where the paths in the file begin.
`validation`, `val` and `valid` are names of the same split; `test` is the
validation split of a folder whose test images have no annotations, as those of
COCO. Segments for panoptic segmentation lie in annotations/panoptic_train2017.json,
with PNGs in annotations/panoptic_train2017/ or panoptic_train2017/.
"""

from collections.abc import Sequence
import os
import re
from typing import NamedTuple

import tensorflow as tf

from vit_jax.data import slices

LAYOUT = (
  'a folder with boxes must hold annotations/instances_<split>.json (or '
  'annotations/<split>.json, <split>.json) and the images in <split>/, or '
  '<split>/_annotations.coco.json beside the images'
)
# Folder and name of annotation files, in the order in which they are tried.
_FORMS = {
  'instances': (
    ('annotations', r'instances_{}\.json'),
    ('annotations', r'{}\.json'),
    ('', r'{}\.json'),
  ),
  'panoptic': (('annotations', r'panoptic_{}\.json'),),
  'captions': (
    ('annotations', r'captions_{}\.json'),
    ('', r'captions_{}\.json'),
  ),
}
_ROBOFLOW = '_annotations.coco.json'
_VALIDATION = ('validation', 'val', 'valid')
_SPLIT = r'((?:train|validation|valid|val|test)(?:\d{4})?)'
_PROBED = 5  # Number of images looked for in a folder.


class Place(NamedTuple):
  """Where a split lies."""

  path: str  # Of the annotation file.
  name: str  # Of the split there, 'train2017'.
  folders: tuple[str, ...]  # In which its images may lie.
  segments: tuple[str, ...] = ()  # In which its PNGs of segments may lie.


def exists(root: str, split: str) -> bool:
  """Returns whether a folder has boxes for any part of a split."""
  return any(_find(root, base, 'instances') for base, _ in slices.parts(split))


def has(root: str, base: str, kind: str) -> bool:
  """Returns whether a folder has the file of a kind for a part of a split."""
  return _find(root, base, kind) is not None


def kind_of_segments(root: str, split: str) -> str:
  """Returns 'panoptic', or 'outlines' if objects alone are annotated."""
  bases = [base for base, _ in slices.parts(split)]
  if all(_find(root, base, 'panoptic') for base in bases):
    return 'panoptic'
  return 'outlines' if exists(root, split) else 'panoptic'


def splits(root: str) -> list[str]:
  """Returns the names of the splits of a folder that have boxes."""
  found = {
    match[1]
    for where, form in _FORMS['instances']
    for file in _listed(os.path.join(root, where))
    if (match := re.fullmatch(form.format(_SPLIT), file))
  }
  for name in _listed(root):
    if re.fullmatch(_SPLIT, name) and _has(root, name, _ROBOFLOW):
      found.add(name)
  return sorted(found)


def find(root: str, base: str, kind: str = 'instances') -> Place:
  """Finds a split's annotation file: 'instances', 'outlines' or 'panoptic'."""
  found = _find(root, base, 'instances' if kind == 'outlines' else kind)
  if found is None:
    inside = _listed(os.path.join(root, 'annotations'))
    there = sorted(f'annotations/{name}' for name in inside)
    there += sorted(name for name in _listed(root) if name.endswith('.json'))
    wanted = (
      'segments, annotations/panoptic_<split>.json and the PNGs beside it'
      if kind == 'panoptic'
      else LAYOUT
    )
    raise FileNotFoundError(
      f"folder '{root}' has no annotations of split '{base}': {wanted}; it has "
      f'{there[:10]} (config.dataset, config.pp.train, config.pp.test, '
      'config.evals)'
    )
  return found


def folder_of(path: str, folders: Sequence[str], files: Sequence[str]) -> str:
  """Returns the folder in which the images of an annotation file lie."""
  probed = files[:: max(1, len(files) // _PROBED)]
  for where in folders:
    if any(_has(where, name) for name in probed):
      return where
  raise FileNotFoundError(
    f"'{path}' lists images such as '{files[0]}', which are in none of "
    f'{[where.rstrip("/") for where in folders]}: put the images of the split there'
  )


def _find(root, base, kind) -> Place | None:
  names = [base]
  if base in ('test', *_VALIDATION):
    names += [name for name in _VALIDATION if name != base]
  for name in names:
    for where, form in _FORMS[kind]:
      found = _only(root, os.path.join(root, where), form, name)
      if found:
        return found
    if kind == 'instances' and _has(root, name, _ROBOFLOW):
      top = os.path.join(root, name)
      return Place(os.path.join(top, _ROBOFLOW), name, (top,))
  return None


def _only(root, where, form, name) -> Place | None:
  """Returns the one place of a form, of any year; None if there is none."""
  pattern = form.format(rf'({re.escape(name)}(\d{{4}})?)')
  matches = [re.fullmatch(pattern, file) for file in _listed(where)]
  matches = sorted(filter(None, matches), key=lambda match: match[0])
  if len(matches) > 1:
    raise ValueError(
      f"'{where}' has several files of split '{name}', "
      f'{[match[0] for match in matches]}: name the split of one, such as '
      f"'{matches[-1][1]}' (config.pp.train, config.pp.test)"
    )
  if not matches:
    return None
  [match] = matches
  names = dict.fromkeys((match[1], match[1].rstrip('0123456789')))
  inside = (*names, *(f'images/{name}' for name in names), 'images', '')
  segments = f'annotations/panoptic_{match[1]}', f'panoptic_{match[1]}'
  return Place(
    os.path.join(where, match[0]),
    match[1],
    tuple(os.path.join(root, x) for x in inside),
    tuple(os.path.join(root, x) for x in segments),
  )


def _has(*parts) -> bool:
  return tf.io.gfile.exists(os.path.join(*parts))


def _listed(where) -> list[str]:
  if not tf.io.gfile.isdir(where):
    return []
  return [name.rstrip('/') for name in tf.io.gfile.listdir(where)]
