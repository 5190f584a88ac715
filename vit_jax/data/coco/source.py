"""Images with annotations in COCO's JSON format as a source of data.

The features have the names of TFDS's `coco`: 'image', 'image/id' and, for the n
objects of an image, 'objects/bbox' float32 [n, 4] (ymin, xmin, ymax, xmax as
shares of the image), 'objects/label' int64 [n], 'objects/area' float32 [n] in
pixels, 'objects/is_crowd' bool [n], 'objects/id' int64 [n]. Data for panoptic
segmentation have 'panoptic_image', see panoptic.py, and 'panoptic_objects/...'.
Without a panoptic file, segments are painted from the outlines of the objects.
"""

from collections.abc import Callable, Sequence
import os
from typing import Any, NamedTuple

from etils import epath
import numpy as np

from vit_jax import console
from vit_jax.data import checking, folder_formats, folder_layout, records, slices
from vit_jax.data.coco import annotation_files, box_checks, layout, segmentations
from vit_jax.data.images import image_files, images, index as index_lib
from vit_jax.data.lazy import tf
from vit_jax.distributed import files, processes

SEGMENTS = 'panoptic_image'
_VALUES = ('bbox', 'label', 'area', 'is_crowd', 'id')
_OBJECTS = ('image', 'image/id', *(f'objects/{x}' for x in _VALUES))
_PANOPTIC = (
  'image',
  'image/id',
  SEGMENTS,
  *(f'panoptic_objects/{x}' for x in _VALUES),
)


class AnnotatedSource(records.FolderSource):
  """Images with objects; see the top of this module, and records.FolderSource."""

  def __init__(
    self,
    columns: dict[str, Any],
    names: dict[str, tuple[str, ...]],
    max_pixels: int,
    *,
    digest: str,
    shapes: np.ndarray,
    segments: index_lib.Paths | None,
    stuff: list[int],
  ) -> None:
    super().__init__(columns, names, max_pixels)
    self._digest = digest  # Hash of the annotations and the names of the images.
    self._shapes = shapes  # Heights and widths.
    self._segments = segments  # Paths of panoptic PNGs, or None.
    self.stuff = stuff

  def fingerprint(self) -> dict:
    return {**records.Source.fingerprint(self), 'annotations': self._digest}

  def shapes(self, upright: bool = False) -> np.ndarray | None:
    return None if upright else self._shapes

  def read(self, record: records.Record) -> records.Record:
    """Reads the image, and its map of segments: a PNG, or painted from outlines."""
    record = super().read(record)
    if SEGMENTS not in record:
      return record
    if self._segments is not None:
      segments = tf.io.read_file(record[SEGMENTS])
    else:
      segments = image_files.call_python(
        segmentations.paint, record[SEGMENTS], tf.string, []
      )
    return {**record, SEGMENTS: segments}

  def store(self, workdir: epath.PathLike) -> None:
    super().store(workdir)
    if self._segments is not None:
      self._segments.store(workdir)


class Format(folder_formats.FolderFormat):
  """The folder format of this module."""

  is_listed = True

  def recognizes(self, root: str, split: str, features: Sequence[str] = ()) -> bool:
    required = [name for name in features if not name.endswith('?')]
    if any(name.startswith(('objects', 'panoptic')) for name in required):
      return True  # `open` names the files that are missing.
    # COCO's images are in train2017 etc., which only its annotation files tell.
    has_folders = folder_layout.has_split_folders(root, split)
    return not has_folders and layout.exists(root, split)

  def open(self, request: folder_formats.Request) -> AnnotatedSource:
    return _open_split(request)

  def list_images(self, root: str, split: str) -> folder_formats.Listing | None:
    if not layout.exists(root, split):
      return None
    return folder_formats.Listing(*open_index(root, split))


def _open_split(request: folder_formats.Request) -> AnnotatedSource:
  """Opens a split of a folder laid out as in layout.py."""
  config, root, split = request.config, request.root, request.split
  available, kind = _OBJECTS, 'instances'
  if any(name.startswith('panoptic') for name in request.features):
    available = _PANOPTIC
    kind = layout.kind_of_segments(root, split)
  origin = f"split '{split}' of folder '{root}'"
  names = records.resolve(request.features, available, origin)
  parts = open_parts(root, split, kind, config.broken_boxes, request.class_names)
  paths, usable_rows = _check_images(request, parts)
  first = parts[0].annotations
  classes = first.classes if request.class_names is None else request.class_names
  columns = {name: paths.get('image') for name in names}
  for name in columns.keys() - {'image'}:
    column = tf.concat([part.column(name, classes) for part in parts], 0)
    columns[name] = tf.gather(column, usable_rows)
  class_numbers = records.class_numbers(first.path, first.classes, classes)
  hashes = [part.annotations.digest().encode() for part in parts]
  rows = [part.rows for part in parts]
  return AnnotatedSource(
    columns,
    {name: tuple(classes) for name in names if name.endswith('/label')},
    config.max_image_pixels,
    digest=files.digest([*hashes, *rows, usable_rows]),
    shapes=_sizes(parts)[usable_rows],
    segments=paths.get(SEGMENTS),
    stuff=class_numbers[list(first.stuff)].tolist(),
  )


def _sizes(parts: Sequence['Part']) -> np.ndarray:
  return np.concatenate([part.annotations.sizes[part.rows] for part in parts])


class Part(NamedTuple):
  """A part of a split: its annotations, checked, and which of its images belong to it."""

  annotations: annotation_files.Annotations
  boxes: np.ndarray  # float32 [m, 4], see box_checks.check.
  paths: dict[str, list[str]]  # Paths of the images, by feature.
  rows: np.ndarray  # int64, numbers of the images in the annotations, in order.

  def column(self, name: str, classes: Sequence[str]) -> 'tf.Tensor':
    """Returns a feature of the images; labels count `classes`."""
    annotations = self.annotations
    if name == SEGMENTS:
      return self._segments()
    if name == 'image/id':
      return tf.constant(annotations.image_ids[self.rows])
    ids = annotations.ids
    if annotations.outlines is not None and name.startswith('panoptic'):
      # As `segmentations.paint` numbers the objects of each image.
      ids = np.concatenate([np.arange(n) + 1 for n in annotations.counts])
    table = records.class_numbers(annotations.path, annotations.classes, classes)
    values = {
      'bbox': self.boxes,
      'label': table[annotations.label],
      'area': annotations.area,
      'is_crowd': annotations.crowd,
      'id': ids,
    }[name.split('/')[-1]]
    ragged = tf.RaggedTensor.from_row_lengths(values, annotations.counts)
    return tf.gather(ragged, self.rows)

  def _segments(self) -> 'tf.Tensor':
    """Returns paths of PNGs, or the objects to paint for each image."""
    if SEGMENTS in self.paths:
      return tf.constant(self.paths[SEGMENTS])
    annotations = self.annotations
    assert annotations.outlines is not None  # The file is of the kind 'outlines'.
    ends = np.cumsum(annotations.counts)
    starts = ends - annotations.counts
    images = []
    for i in self.rows:
      height, width = annotations.sizes[i]
      objects = slice(starts[i], ends[i])
      outlines = zip(annotations.ids[objects], annotations.outlines[objects])
      images.append(segmentations.encode_image(height, width, outlines))
    return tf.constant(images)


def open_parts(
  root: str,
  split: str,
  kind: str,
  broken_boxes: str,
  class_names: Sequence[str] | None = None,
) -> list[Part]:
  """Reads the annotations, see annotation_files.read, on all processes."""

  def read() -> list[Part]:
    parts: list[Part] = []
    for base, instruction in slices.parts(split):
      part = _open_part(root, base, instruction, kind, broken_boxes)
      parts.append(part)
      annotations = part.annotations
      expected = class_names or parts[0].annotations.classes
      records.class_numbers(annotations.path, annotations.classes, expected)
    return parts

  description = f"the annotations of '{root}', split '{split}'"
  parts = processes.attempt_local(f'reading {description}', read)
  hashes = [part.annotations.digest() for part in parts]
  processes.agree(description, {'hashes': hashes})
  return parts


def _open_part(
  root: str, base: str, instruction: Any, kind: str, broken_boxes: str
) -> Part:
  """Reads and checks the annotations of a part of a split."""
  place = layout.find(root, base, kind)
  if not place.name.startswith(base):
    console.log(f"Split '{base}' of '{root}' is '{place.path}'.")
  annotations = annotation_files.read(place.path, kind)
  annotations, boxes = box_checks.check(annotations, broken_boxes)
  order = index_lib.hash_order(f'/{name}' for name in annotations.files)
  rows = slices.take(np.array(order), base, instruction)
  paths = {}
  for feature, folders, names in (
    ('image', place.folders, annotations.files),
    (SEGMENTS, place.segments, annotations.segments),
  ):
    if names:
      folder = layout.folder_of(place.path, folders, names)
      paths[feature] = [os.path.join(folder, names[i]) for i in rows]
  return Part(annotations, boxes, paths, rows)


def open_index(
  root: str,
  split: str,
  parts: list[Part] | None = None,
  feature: str = 'image',
  workdir: epath.PathLike | None = None,
) -> tuple[index_lib.Index, Callable[[bytes, int], str]]:
  """Returns the index of the images of a split, and a function to check an image.

  Args:
    root: the folder.
    split: the split.
    parts: result of `open_parts`.
    feature: 'image' or SEGMENTS.
    workdir: see checking.open_listed.

  Returns:
    The index, and a function (path, max_pixels) -> why the image is broken or of
    another size than in its annotations, or ''.
  """
  parts = parts or open_parts(root, split, 'instances', 'clip')
  name = {'image': 'coco', SEGMENTS: 'segments'}[feature]
  paths = []
  for part in parts:
    paths += part.paths[feature]
  index = checking.open_listed(root, split, name, paths, workdir)
  # All images of the files, so that slices share results.
  sizes = [
    np.column_stack([part.annotations.image_ids, part.annotations.sizes])
    for part in parts
  ]
  index.check_anew('sizes', files.digest(sizes))
  expected_sizes = dict(zip(index.paths(index.order), _sizes(parts)))

  def broken_reason(path: bytes, max_pixels: int) -> str:
    return images.broken_reason(path, max_pixels, expected_sizes[path])

  return index, broken_reason


def _check_images(
  request: folder_formats.Request, parts: list[Part]
) -> tuple[dict[str, index_lib.Paths], np.ndarray]:
  """Returns the images usable with all their features, by feature, and their numbers."""
  indices, masks = {}, []
  for feature in parts[0].paths:
    index, broken_reason = open_index(
      request.root, request.split, parts, feature, request.workdir
    )
    usable = checking.usable(
      [(index, index.order)],
      f'{request.root}/{request.split}',
      request.config.broken_images,
      request.config.max_image_pixels,
      workdir=request.workdir,
      explain=broken_reason,
    )
    [(_, rows)] = usable.parts
    masks.append(np.isin(index.order, rows))
    indices[feature] = index
  mask = np.logical_and.reduce(masks)
  paths = {}
  for feature, index in indices.items():
    paths[feature] = index_lib.Paths([(index, index.order[mask])])
  return paths, np.flatnonzero(mask)
