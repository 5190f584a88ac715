"""Images with annotations in COCO's JSON format as a source of data.

The features have the names of TFDS's `coco`: 'image', 'image/id' and, for the n
objects of an image, 'objects/bbox' float32 [n, 4] (ymin, xmin, ymax, xmax as
shares of the image), 'objects/label' int64 [n], 'objects/area' float32 [n] in
pixels, 'objects/is_crowd' bool [n], 'objects/id' int64 [n]. Data for panoptic
segmentation have 'panoptic_image', see panoptic.py, and 'panoptic_objects/...'.
Without a panoptic file, segments are painted from the outlines of the objects.
"""

from collections.abc import Sequence
import os
from typing import NamedTuple

import numpy as np

from vit_jax import console
from vit_jax.data import checking, records, slices
from vit_jax.data.coco import annotation_files, box_checks, layout, segmentations
from vit_jax.data.images import image_files, images, index as index_lib
from vit_jax.data.lazy import tf
from vit_jax.distributed import files, processes

SEGMENTS = 'panoptic_image'
_VALUES = ('bbox', 'label', 'area', 'is_crowd', 'id')
_OBJECTS = ('image', 'image/id', *(f'objects/{x}' for x in _VALUES))
_PANOPTIC = (
  'image', 'image/id', SEGMENTS, *(f'panoptic_objects/{x}' for x in _VALUES)
)  # fmt: skip


class AnnotatedSource(records.FolderSource):
  """Images with objects; see the top of this module, and records.FolderSource."""

  def __init__(self, columns, names, max_pixels, *, digest, shapes, segments, stuff):
    super().__init__(columns, names, max_pixels)
    self._digest = digest  # Hash of the annotations and the names of the images.
    self._shapes = shapes  # Heights and widths.
    self._segments = segments  # Paths of panoptic PNGs, or None.
    self.stuff = stuff

  def fingerprint(self) -> dict:
    return {**records.Source.fingerprint(self), 'annotations': self._digest}

  def shapes(self):
    return self._shapes

  def read(self, record):
    record = super().read(record)
    if SEGMENTS not in record:
      return record
    if self._segments is not None:
      segments = tf.io.read_file(record[SEGMENTS])
    else:
      paint = segmentations.paint
      segments = image_files.in_python(paint, record[SEGMENTS], tf.string, [])
    return {**record, SEGMENTS: segments}

  def store(self, workdir):
    super().store(workdir)
    if self._segments is not None:
      self._segments.store(workdir)


def open_split(
  config, root: str, split: str, features: Sequence[str], class_names=None, workdir=None
) -> AnnotatedSource:
  """Opens a split of a folder laid out as in layout.py; see sources.open_split."""
  available, kind = _OBJECTS, 'instances'
  if any(name.startswith('panoptic') for name in features):
    available, kind = _PANOPTIC, layout.kind_of_segments(root, split)
  where = f"split '{split}' of folder '{root}'"
  wanted = records.resolve(features, available, where)
  parts = open_parts(root, split, kind, config.broken_boxes, class_names)
  usable, kept = _check_images(config, root, split, parts, workdir)
  classes = parts[0].found.classes if class_names is None else class_names
  columns = {name: usable.get('image') for name in wanted}
  for name in columns.keys() - {'image'}:
    column = tf.concat([part.column(name, classes) for part in parts], 0)
    columns[name] = tf.gather(column, kept)
  first = parts[0].found
  numbers = records.class_numbers(first.path, first.classes, classes)
  hashes = [part.found.digest().encode() for part in parts]
  return AnnotatedSource(
    columns,
    {name: tuple(classes) for name in wanted if name.endswith('/label')},
    config.max_image_pixels,
    digest=files.digest([*hashes, *(part.rows for part in parts), kept]),
    shapes=_sizes(parts)[kept],
    segments=usable.get(SEGMENTS),
    stuff=numbers[list(first.stuff)].tolist(),
  )


def _sizes(parts):
  return np.concatenate([part.found.sizes[part.rows] for part in parts])


class Part(NamedTuple):
  """A part of a split: its annotations, checked, and the images taken."""

  found: annotation_files.Annotations
  shares: np.ndarray  # float32 [m, 4], see box_checks.check.
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
      # As `segmentations.paint` numbers the objects of each image.
      ids = np.concatenate([np.arange(n) + 1 for n in found.counts])
    table = records.class_numbers(found.path, found.classes, classes)
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
    found, ends = self.found, np.cumsum(self.found.counts)
    objects = [
      (*found.sizes[i], zip(found.ids[a:b], found.outlines[a:b]))
      for i, a, b in zip(self.rows, (ends - found.counts)[self.rows], ends[self.rows])
    ]
    return tf.constant([segmentations.encode_image(*x) for x in objects])


def open_parts(
  root: str, split: str, kind: str, broken_boxes: str, class_names=None
) -> list[Part]:
  """Reads the annotations, see annotation_files.read, on all processes."""
  parts = []

  def read():
    for base, instruction in slices.parts(split):
      part = _open_part(root, base, instruction, kind, broken_boxes)
      parts.append(part)
      expected = class_names or parts[0].found.classes
      records.class_numbers(part.found.path, part.found.classes, expected)

  what = f"the annotations of '{root}', split '{split}'"
  processes.attempt(f'reading {what}', read)
  processes.agree(what, {'hashes': [part.found.digest() for part in parts]})
  return parts


def _open_part(root, base, instruction, kind, broken_boxes) -> Part:
  """Reads and checks the annotations of a part of a split."""
  place = layout.find(root, base, kind)
  if not place.name.startswith(base):
    console.say(f"Split '{base}' of '{root}' is '{place.path}'.")
  found, shares = box_checks.check(
    annotation_files.read(place.path, kind), broken_boxes
  )
  order = index_lib.hash_order(f'/{name}' for name in found.files)
  rows = slices.take(np.array(order), base, instruction)
  paths = {}
  for name, folders, names in (
    ('image', place.folders, found.files),
    (SEGMENTS, place.segments, found.segments),
  ):
    if names:
      where = layout.folder_of(place.path, folders, names)
      paths[name] = [os.path.join(where, names[i]) for i in rows]
  return Part(found, shares, paths, rows)


def open_index(root, split, parts=None, feature='image', workdir=None):
  """Returns the index of the images of a split, and a function to check an image.

  The function takes (path, max_pixels) and returns why the image is broken or of
  another size than in its annotations, or ''. `parts` is the result of open_parts,
  and `feature` is 'image' or SEGMENTS.
  """
  parts = parts or open_parts(root, split, 'instances', 'clip')
  ending = {'image': 'coco', SEGMENTS: 'segments'}[feature]
  listed = [path for part in parts for path in part.paths[feature]]
  index = checking.open_listed(root, split, ending, listed, workdir)
  # All images of the files, so that slices share results.
  every = [np.column_stack([p.found.image_ids, p.found.sizes]) for p in parts]
  index.check_anew('sizes', files.digest(every))
  expected = dict(zip(index.paths(index.order), _sizes(parts)))

  def why(path, max_pixels):
    return images.why_broken(path, max_pixels, expected[path])

  return index, why


def _check_images(config, root, split, parts, workdir):
  """Returns the images usable with all their features, by feature, and their numbers."""
  indices, fine = {}, []
  where, keys = f'{root}/{split}', (config.broken_images, config.max_image_pixels)
  for feature in parts[0].paths:
    index, why = open_index(root, split, parts, feature, workdir)
    views = [(index, index.order)]
    found = checking.usable(views, where, *keys, workdir=workdir, why=why)
    [(_, rows)] = found.parts
    fine.append(np.isin(index.order, rows))
    indices[feature] = index
  kept = np.logical_and.reduce(fine)
  paths = {k: index_lib.Paths([(x, x.order[kept])]) for k, x in indices.items()}
  return paths, np.flatnonzero(kept)
