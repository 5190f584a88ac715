"""The parts of a split: annotations, checked, and the images taken of each."""

from collections.abc import Sequence
import itertools
import os
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from vit_jax import cli
from vit_jax.data import slices
from vit_jax.data.coco import boxes
from vit_jax.data.coco import layout
from vit_jax.data.coco import masks
from vit_jax.data.coco import reading
from vit_jax.data.images import index as index_lib
from vit_jax.distributed import processes

SEGMENTS = 'panoptic_image'


class Part(NamedTuple):
  """A part of a split: its annotations, checked, and the images taken."""

  found: reading.Annotations
  shares: np.ndarray  # float32 [m, 4], see boxes.check.
  paths: dict[str, list[str]]  # Paths of the images taken, by feature.
  rows: np.ndarray  # int64, numbers of the images taken, in order.

  def column(self, name, classes):
    """Returns a feature of the images taken; labels count `classes`."""
    found = self.found
    if name == SEGMENTS:
      return self._segments()
    if name == 'image/id':
      return tf.constant(found.image_ids[self.rows])
    ids = found.ids
    if found.outlines is not None and name.startswith('panoptic'):
      # As `masks.paint` numbers the objects of each image.
      ids = np.concatenate([np.arange(n) + 1 for n in found.counts])
    numbers = {name: i for i, name in enumerate(classes)}
    table = np.array([numbers[name] for name in found.classes], np.int64)
    values = {
      'bbox': self.shares,
      'label': table[found.label],
      'area': found.area,
      'is_crowd': found.crowd,
      'id': ids,
    }[name.split('/')[-1]]
    ragged = tf.RaggedTensor.from_row_lengths(values, found.counts)
    return tf.gather(ragged, self.rows)

  def _segments(self):
    """Returns paths of PNGs, or the objects to paint for each image taken."""
    if SEGMENTS in self.paths:
      return tf.constant(self.paths[SEGMENTS])
    found = self.found
    ends = np.cumsum(found.counts)
    begins = ends - found.counts
    rows = [
      masks.encode_image(
        *found.sizes[i], zip(found.ids[a:b], found.outlines[a:b])
      )
      for i, a, b in zip(self.rows, begins[self.rows], ends[self.rows])
    ]
    return tf.RaggedTensor.from_row_lengths(
      list(itertools.chain(*rows)), [len(row) for row in rows]
    )


def open_parts(
  root: str,
  split: str,
  kind: str,
  broken_boxes: str,
  class_names: Sequence[str] | None = None,
) -> list[Part]:
  """Reads the annotations on all processes, which compare them.

  See source.open_split for arguments and errors, layout.find for `kind`, and
  boxes.check for `broken_boxes`.
  """
  parts = []

  def read():
    for base, instruction in slices.parts(split):
      part = _open_part(root, base, instruction, kind, broken_boxes)
      first = parts[0].found.classes if parts else None
      _check_classes(part.found, class_names or first)
      parts.append(part)

  what = f"the annotations of '{root}', split '{split}'"
  processes.attempt(f'reading {what}', read)
  processes.agree(what, {'hashes': [part.found.digest() for part in parts]})
  return parts


def _open_part(root, base, instruction, kind, broken_boxes) -> Part:
  """Reads and checks the annotations of a part of a split."""
  place = layout.find(root, base, kind)
  if not place.name.startswith(base):
    cli.say(f"Split '{base}' of '{root}' is '{place.path}'.")
  found, shares = boxes.check(reading.read(place.path, kind), broken_boxes)
  # Sorted by a hash, so that a slice is a random sample.
  hashes = [
    index_lib.hash_name(f'/{name}'.encode(errors='surrogatepass'))
    for name in found.files
  ]
  order = np.array(sorted(range(len(hashes)), key=hashes.__getitem__))
  rows = slices.take(order, base, instruction)
  paths = {}
  for name, folders, files in (
    ('image', place.folders, found.files),
    (SEGMENTS, place.segments, found.segments),
  ):
    if files:
      where = layout.folder_of(place.path, folders, files)
      paths[name] = [os.path.join(where, files[i]) for i in rows]
  return Part(found, shares, paths, rows)


def _check_classes(found, expected):
  """Raises ValueError unless a file has the expected classes, in any order."""
  if expected is None or set(found.classes) == set(expected):
    return
  differing = {
    'has': set(found.classes) - set(expected),
    'lacks': set(expected) - set(found.classes),
  }
  faults = [f'it {k} {sorted(x)[:10]}' for k, x in differing.items() if x]
  raise ValueError(
    f"the categories of '{found.path}' are not those that the model is trained on: "
    f"{' and '.join(faults)}; give both files the same 'categories', also those of "
    'which a split has no object'
  )
