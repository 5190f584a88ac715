"""Images with annotations in COCO's JSON format as a source of data.

The features have the names of TFDS's `coco`: 'image', 'image/id' and, for the n
objects of an image, 'objects/bbox' float32 [n, 4] (ymin, xmin, ymax, xmax as
shares of the image), 'objects/label' int64 [n], 'objects/area' float32 [n] in
pixels, 'objects/is_crowd' bool [n], 'objects/id' int64 [n]. Data for panoptic
segmentation have 'panoptic_image', a PNG whose colours R + 256 G + 65536 B are
the ids of segments, and 'panoptic_objects/...' like 'objects/...'.

Images without objects are examples like any other.
"""

from collections.abc import Sequence
import os
from typing import Any
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from vit_jax.annotations import boxes
from vit_jax.annotations import layout
from vit_jax.annotations import reading
from vit_jax.data import checking
from vit_jax.data import folder
from vit_jax.data import records
from vit_jax.files import images
from vit_jax.files import index as index_lib
from vit_jax.scale import processes

_VALUES = ('bbox', 'label', 'area', 'is_crowd', 'id')
_SEGMENTS = 'panoptic_image'
# Features by the kind of the annotation file.
_FEATURES = {
  'instances': ('image', 'image/id', *(f'objects/{x}' for x in _VALUES)),
  'panoptic': (
    'image',
    'image/id',
    _SEGMENTS,
    *(f'panoptic_objects/{x}' for x in _VALUES),
  ),
}


class AnnotatedSource(records.FolderSource):
  """Images with objects; see the top of this module.

  Args:
    columns: see records.FolderSource.
    names: likewise.
    max_pixels: likewise.
    digest: hash of the annotations and of the names of the images.
    segments: paths of the PNGs of panoptic data.
    stuff: names of classes that are no things, of panoptic data.

  Attributes:
    stuff: see above.
  """

  def __init__(
    self, columns, names, max_pixels: int, digest: str, segments=None, stuff=()
  ):
    super().__init__(columns, names, max_pixels)
    self._digest = digest
    self._segments = segments
    self.stuff = tuple(stuff)

  def fingerprint(self) -> dict[str, Any]:
    """Returns a short description of images and annotations, see Source."""
    found = records.Source.fingerprint(self)
    return {**found, 'annotations': self._digest}

  def read(self, record):
    """Returns the record of one example, with the contents of its files."""
    record = super().read(record)
    if _SEGMENTS not in record:
      return record
    return {**record, _SEGMENTS: tf.io.read_file(record[_SEGMENTS])}

  def store(self, workdir):
    """Stores the lists of the files in a workdir, see records.Source.store."""
    super().store(workdir)
    if self._segments is not None:
      self._segments.store(workdir)


class _Part(NamedTuple):
  """A part of a split: its annotations, checked, and the images taken."""

  found: reading.Annotations
  shares: np.ndarray  # float32 [m, 4], see boxes.check.
  paths: dict[str, list[str]]  # Paths of the images taken, by feature.
  rows: np.ndarray  # int64, numbers of the images taken, in order.

  def column(self, name, classes):
    """Returns a feature of the images taken, as a tensor or RaggedTensor.

    Args:
      name: its name.
      classes: names of the classes that labels count.
    """
    found = self.found
    if name == _SEGMENTS:
      return tf.constant(self.paths[name])
    if name == 'image/id':
      return tf.constant(found.image_ids[self.rows])
    numbers = {name: i for i, name in enumerate(classes)}
    table = np.array([numbers[name] for name in found.classes], np.int64)
    values = {
      'bbox': self.shares,
      'label': table[found.label],
      'area': found.area,
      'is_crowd': found.crowd,
      'id': found.ids,
    }[name.split('/')[-1]]
    ragged = tf.RaggedTensor.from_row_lengths(values, found.counts)
    return tf.gather(ragged, self.rows)


def wants(features: Sequence[str]) -> bool:
  """Returns whether some of the features come from annotations only."""
  return any(
    name.startswith(('objects', 'panoptic')) and not name.endswith('?')
    for name in features
  )


def open_split(
  config,
  root: str,
  split: str,
  features: Sequence[str],
  class_names: Sequence[str] | None = None,
  workdir=None,
) -> AnnotatedSource:
  """Opens a split of a folder of images with annotations.

  Args:
    config: reads `broken_boxes`, `broken_images`, `max_image_pixels`.
    root: the folder, local or gs://, see vit_jax/annotations/layout.py.
    split: a split or slices of splits, 'train[:90%]'.
    features: names of the wanted features, see records.resolve.
    class_names: classes of the training split; None for the training split
      itself.
    workdir: see sources.open_split.

  Raises:
    FileNotFoundError: if the folder has no annotations of the split, or no
      images.
    ValueError: if annotations, boxes, classes or images are wrong; names them
      and the remedy.
  """
  kind = 'instances'
  if any(name.startswith('panoptic') for name in features):
    kind = 'panoptic'
  where = f"split '{split}' of folder '{root}'"
  wanted = records.resolve(features, _FEATURES[kind], where)
  parts = _open_parts(root, split, kind, config.broken_boxes, class_names)
  usable, kept = _check_images(config, root, split, parts, workdir)
  classes = parts[0].found.classes if class_names is None else class_names
  columns, names = {}, {}
  for name in wanted:
    if name == 'image':
      columns[name] = usable[name]
      continue
    column = tf.concat([part.column(name, classes) for part in parts], 0)
    columns[name] = tf.gather(column, kept)
    if name.endswith('/label'):
      names[name] = tuple(classes)
  hashes = [part.found.digest().encode() for part in parts]
  digest = index_lib.digest([*hashes, *(part.rows for part in parts), kept])
  return AnnotatedSource(
    columns,
    names,
    config.max_image_pixels,
    digest,
    usable.get(_SEGMENTS),
    parts[0].found.stuff,
  )


def _open_parts(root, split, kind, broken_boxes, class_names) -> list[_Part]:
  """Reads the annotations on all processes, which compare them."""
  parts = []

  def read():
    for base, instruction in folder.parts(split):
      part = _open_part(root, base, instruction, kind, broken_boxes)
      first = parts[0].found.classes if parts else None
      _check_classes(part.found, class_names or first)
      parts.append(part)

  what = f"the annotations of '{root}', split '{split}'"
  processes.attempt(f'reading {what}', read)
  processes.agree(what, {'hashes': [part.found.digest() for part in parts]})
  return parts


def _open_part(root, base, instruction, kind, broken_boxes) -> _Part:
  """Reads and checks the annotations of a part of a split."""
  place = layout.find(root, base, kind)
  found, shares = boxes.check(
    reading.read(place.path, kind == 'panoptic'), broken_boxes
  )
  # Sorted by a hash, so that a slice is a random sample.
  hashes = [
    index_lib.hash_name(f'/{name}'.encode(errors='surrogatepass'))
    for name in found.files
  ]
  order = np.array(sorted(range(len(hashes)), key=hashes.__getitem__))
  rows = folder.take_slice(order, base, instruction)
  paths = {}
  for name, folders, files in (
    ('image', place.folders, found.files),
    (_SEGMENTS, place.segments, found.segments),
  ):
    if files:
      where = layout.folder_of(place.path, folders, files)
      paths[name] = [os.path.join(where, files[i]) for i in rows]
  return _Part(found, shares, paths, rows)


def _check_classes(found, expected):
  """Raises ValueError unless a file has the expected classes, in any order."""
  if expected is None or set(found.classes) == set(expected):
    return
  unknown = sorted(set(found.classes) - set(expected))
  missing = sorted(set(expected) - set(found.classes))
  raise ValueError(
    f"the categories of '{found.path}' are not those of the training split:"
    f'{f" it has {unknown[:10]}" if unknown else ""}'
    f'{" and" if unknown and missing else ""}'
    f'{f" it lacks {missing[:10]}" if missing else ""}; give both files the same '
    "'categories', also those of which a split has no object"
  )


def open_index(root: str, split: str):
  """Returns the index of the images of a split, and how to check an image.

  Args:
    root: see open_split.
    split: see open_split.

  Returns:
    An index.Index, and a function (path, max_pixels) -> why the image is broken
    or has another size than its annotations say, '' if it is right.
  """
  parts = _open_parts(root, split, 'instances', 'clip', None)
  return _index(root, split, parts, 'image')


def _index(root, split, parts, feature, workdir=None):
  """Returns what open_index returns, for the images of a feature."""
  ending = {'image': 'coco', _SEGMENTS: 'segments'}[feature]
  listed = [path for part in parts for path in part.paths[feature]]
  bases = [f'{base}.{ending}' for base, _ in folder.parts(split)]
  names = [f'{split}.{ending}', *bases]
  index = checking.open_listed(root, names, listed, workdir)
  # Those of the whole files, so that slices know of each other.
  every = [np.column_stack([p.found.image_ids, p.found.sizes]) for p in parts]
  index.check_anew('sizes', index_lib.digest(every))
  sizes = np.concatenate([part.found.sizes[part.rows] for part in parts])
  expected = dict(zip(index.paths(index.order), sizes))

  def why(path, max_pixels):
    return images.why_broken(path, max_pixels, expected[path])

  return index, why


def _check_images(config, root, split, parts, workdir):
  """Returns the usable images of each feature, and which images these are.

  With segments, an image is usable if its PNG is, too.
  """
  found, fine = {}, {}
  for feature in parts[0].paths:
    index, why = _index(root, split, parts, feature, workdir)
    found[feature] = checking.usable(
      [(index, index.order)],
      f'{root}/{split}',
      config.broken_images,
      config.max_image_pixels,
      workdir=workdir,
      why=why,
    )
    [(_, rows)] = found[feature].parts
    fine[feature] = np.isin(index.order, rows)
  kept = np.logical_and.reduce(list(fine.values()))
  for feature in found:
    lost = np.flatnonzero(~kept[fine[feature]])
    found[feature] = found[feature].without(lost)
  return found, np.flatnonzero(kept)
