"""Images with annotations in COCO's JSON format as a source of data.

The features have the names of TFDS's `coco`: 'image', 'image/id' and, for the n
objects of an image, 'objects/bbox' float32 [n, 4] (ymin, xmin, ymax, xmax as
shares of the image), 'objects/label' int64 [n], 'objects/area' float32 [n] in
pixels, 'objects/is_crowd' bool [n], 'objects/id' int64 [n]. Data for panoptic
segmentation have 'panoptic_image', a PNG whose colours R + 256 G + 65536 B are
the ids of segments, and 'panoptic_objects/...' like 'objects/...'. Where there
is no panoptic file, the segments are painted from the outlines of the objects.

Images without objects are examples like any other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from vit_jax.data import checking
from vit_jax.data import records
from vit_jax.data import slices
from vit_jax.data.coco import layout
from vit_jax.data.coco import masks
from vit_jax.data.coco import parts as parts_lib
from vit_jax.data.images import images
from vit_jax.data.images import index as index_lib

_VALUES = ('bbox', 'label', 'area', 'is_crowd', 'id')
# Features of objects, and of segments.
_FEATURES = {
  'objects': ('image', 'image/id', *(f'objects/{x}' for x in _VALUES)),
  'panoptic': (
    'image',
    'image/id',
    parts_lib.SEGMENTS,
    *(f'panoptic_objects/{x}' for x in _VALUES),
  ),
}


class AnnotatedSource(records.FolderSource):
  """Images with objects; see the top of this module.

  Args:
    columns: see records.FolderSource, as for the next two.
    names: names of classes.
    max_pixels: limit of an image.
    digest: hash of the annotations and of the names of the images.
    shapes: see records.Source.shapes.
    segments: paths of the PNGs of panoptic data.
    stuff: names of classes that are no things, of panoptic data.
  """

  def __init__(
    self,
    columns,
    names,
    max_pixels: int,
    digest: str,
    shapes: np.ndarray,
    segments=None,
    stuff=(),
  ):
    super().__init__(columns, names, max_pixels)
    self._shapes = shapes
    self._digest = digest
    self._segments = segments
    self.stuff = tuple(stuff)

  def fingerprint(self) -> dict[str, Any]:
    found = records.Source.fingerprint(self)
    return {**found, 'annotations': self._digest}

  def shapes(self):
    return self._shapes

  def read(self, record):
    record = super().read(record)
    if parts_lib.SEGMENTS not in record:
      return record
    segments = record[parts_lib.SEGMENTS]
    if segments.shape.rank == 0:  # A path.
      segments = tf.io.read_file(segments)
    else:
      segments = tf.numpy_function(
        masks.paint, [segments], tf.string, stateful=False
      )
    return {**record, parts_lib.SEGMENTS: tf.ensure_shape(segments, [])}

  def store(self, workdir):
    super().store(workdir)
    if self._segments is not None:
      self._segments.store(workdir)


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

  See sources.open_split; `root` is laid out as vit_jax/data/coco/layout.py says.

  Raises:
    FileNotFoundError: if the folder has no annotations of the split, or no
      images.
    ValueError: if annotations, boxes, classes or images are wrong; names them
      and the remedy.
  """
  prefix, kind = 'objects', 'instances'
  if any(name.startswith('panoptic') for name in features):
    prefix = 'panoptic'
    kind = layout.kind_of_segments(root, split)
  where = f"split '{split}' of folder '{root}'"
  wanted = records.resolve(features, _FEATURES[prefix], where)
  parts = parts_lib.open_parts(
    root, split, kind, config.broken_boxes, class_names
  )
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
    np.concatenate([part.found.sizes[part.rows] for part in parts])[kept],
    usable.get(parts_lib.SEGMENTS),
    parts[0].found.stuff,
  )


def open_index(root: str, split: str):
  """Returns the index of the images of a split, and how to check an image.

  The latter is a function (path, max_pixels) -> why the image is broken or has
  another size than its annotations say, '' if it is right.
  """
  parts = parts_lib.open_parts(root, split, 'instances', 'clip')
  return _index(root, split, parts, 'image')


def _index(root, split, parts, feature, workdir=None):
  """Returns what open_index returns, for the images of a feature."""
  ending = {'image': 'coco', parts_lib.SEGMENTS: 'segments'}[feature]
  listed = [path for part in parts for path in part.paths[feature]]
  bases = [f'{base}.{ending}' for base, _ in slices.parts(split)]
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
