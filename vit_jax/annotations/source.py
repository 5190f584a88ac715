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


class AnnotatedSource(records.FolderSource):
  """Images with objects; see the top of this module.

  Args:
    columns: see records.FolderSource.
    names: likewise.
    max_pixels: likewise.
    digest: hash of the annotations and of the names of the images.
  """

  def __init__(self, columns, names, max_pixels: int, digest: str):
    super().__init__(columns, names, max_pixels)
    self._digest = digest

  def fingerprint(self) -> dict[str, Any]:
    """Returns a short description of images and annotations, see Source."""
    found = records.Source.fingerprint(self)
    return {**found, 'annotations': self._digest}


class _Part(NamedTuple):
  """A part of a split: its annotations, checked, and the images taken."""

  found: reading.Annotations
  shares: np.ndarray  # float32 [m, 4], see boxes.check.
  folder: str
  rows: np.ndarray  # int64, numbers of the images taken, in order.

  def paths(self) -> list[str]:
    """Returns the paths of the images taken."""
    return [os.path.join(self.folder, self.found.files[i]) for i in self.rows]

  def column(self, name):
    """Returns a feature of the images taken, as a tensor or RaggedTensor."""
    found = self.found
    if name == 'image/id':
      return tf.constant(found.image_ids[self.rows])
    values = {
      'bbox': self.shares,
      'label': found.label,
      'area': found.area,
      'is_crowd': found.crowd,
      'id': found.ids,
    }[name.split('/')[-1]]
    ragged = tf.RaggedTensor.from_row_lengths(values, found.counts)
    return tf.gather(ragged, self.rows)


OBJECTS = tuple(
  f'objects/{name}' for name in ('bbox', 'label', 'area', 'is_crowd', 'id')
)


def wants(features: Sequence[str]) -> bool:
  """Returns whether some of the features come from annotations only."""
  return any(
    name.startswith('objects') for name in features if not name.endswith('?')
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
  where = f"split '{split}' of folder '{root}'"
  wanted = records.resolve(features, ('image', 'image/id', *OBJECTS), where)
  parts = _open_parts(root, split, config.broken_boxes, class_names)
  classes = parts[0].found.classes if class_names is None else class_names
  paths, kept = _check_images(config, root, split, parts, workdir)
  columns = {'image': paths}
  for name in wanted:
    if name == 'objects/label':
      columns[name] = tf.concat([_labels(part, classes) for part in parts], 0)
    elif name != 'image':
      columns[name] = tf.concat([part.column(name) for part in parts], 0)
  columns = {
    name: paths if name == 'image' else tf.gather(columns[name], kept)
    for name in wanted
  }
  names = {'objects/label': tuple(classes)} if 'objects/label' in wanted else {}
  hashes = [part.found.digest().encode() for part in parts]
  digest = index_lib.digest([*hashes, *(part.rows for part in parts), kept])
  return AnnotatedSource(columns, names, config.max_image_pixels, digest)


def _open_parts(root, split, broken_boxes, class_names) -> list[_Part]:
  """Reads the annotations on all processes, which compare them."""
  parts = []

  def read():
    for base, instruction in folder.parts(split):
      part = _open_part(root, base, instruction, broken_boxes)
      first = parts[0].found.classes if parts else None
      _check_classes(part.found, class_names or first)
      parts.append(part)

  what = f"the annotations of '{root}', split '{split}'"
  processes.attempt(f'reading {what}', read)
  processes.agree(what, {'hashes': [part.found.digest() for part in parts]})
  return parts


def _open_part(root, base, instruction, broken_boxes) -> _Part:
  """Reads and checks the annotations of a part of a split."""
  place = layout.find(root, base)
  found, shares = boxes.check(reading.read(place.path), broken_boxes)
  images_folder = layout.folder_of(root, place, found.files)
  # Sorted by a hash, so that a slice is a random sample.
  hashes = [
    index_lib.hash_name(f'/{name}'.encode(errors='surrogatepass'))
    for name in found.files
  ]
  order = np.array(sorted(range(len(hashes)), key=hashes.__getitem__))
  rows = folder.take_slice(order, base, instruction)
  return _Part(found, shares, images_folder, rows)


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


def _labels(part, classes):
  """Returns the labels of a part as numbers of the given classes."""
  numbers = {name: i for i, name in enumerate(classes)}
  table = np.array([numbers[name] for name in part.found.classes], np.int64)
  found = part.found._replace(label=table[part.found.label])
  return part._replace(found=found).column('objects/label')


def open_index(root: str, split: str, workdir=None):
  """Returns the index of the images of a split, and how to check an image.

  Args:
    root: see open_split.
    split: see open_split.
    workdir: see open_split.

  Returns:
    An index.Index, and a function (path, max_pixels) -> why the image is broken
    or has another size than its annotations say, '' if it is right.
  """
  parts = _open_parts(root, split, 'clip', None)
  return _index(root, split, parts, workdir)


def _index(root, split, parts, workdir):
  """Returns what open_index returns."""
  listed = [path for part in parts for path in part.paths()]
  bases = [f'{base}.coco' for base, _ in folder.parts(split)]
  index = checking.open_listed(root, [f'{split}.coco', *bases], listed, workdir)
  # Those of the whole files, so that slices know of each other.
  every = [np.column_stack([p.found.image_ids, p.found.sizes]) for p in parts]
  index.check_anew('sizes', index_lib.digest(every))
  sizes = np.concatenate([part.found.sizes[part.rows] for part in parts])
  expected = dict(zip(index.paths(index.order), sizes))

  def why(path, max_pixels):
    return images.why_broken(path, max_pixels, expected[path])

  return index, why


def _check_images(config, root, split, parts, workdir):
  """Returns the paths of the usable images, and which images these are."""
  index, why = _index(root, split, parts, workdir)
  paths = checking.usable(
    [(index, index.order)],
    f'{root}/{split}',
    config.broken_images,
    config.max_image_pixels,
    workdir=workdir,
    why=why,
  )
  [(_, rows)] = paths.parts
  return paths, np.flatnonzero(np.isin(index.order, rows))
