"""Folders of images and masks, for semantic segmentation.

  train/images/1.jpg       images/train/1.jpg        images/training/1.jpg
  train/masks/1.png        masks/train/1.png         annotations/training/1.png
  classes.json             classes.json              classes.json

The third is the layout of ADE20K; LAYOUTS has those of Cityscapes and COCO-Stuff, too. A
mask has the name of its image, apart from the ending, and may be in a folder of the same
name. For masks and classes.json see vit_jax/data/masks.py.
"""

from collections.abc import Mapping, Sequence
import os
from typing import Any, NamedTuple

from absl import logging
import numpy as np

from vit_jax import console
from vit_jax.data import checking, folder_formats, masks, records, slices
from vit_jax.data.images import (
  image_files,
  images,
  index as index_lib,
  listing,
  multichannel,
)
from vit_jax.data.lazy import tf

_SHOWN = 5  # Images without a mask that a message names.


class Layout(NamedTuple):
  """Where images and masks are; {} is the name of the split.

  The suffixes are parts of the names of images and masks before their endings.
  """

  images: str
  masks: str
  image_suffix: str = ''
  mask_suffix: str = ''


LAYOUTS = (
  Layout('{}/images', '{}/masks'),
  Layout('images/{}', 'masks/{}'),
  Layout('images/{}', 'annotations/{}'),
  Layout('leftImg8bit/{}', 'gtFine/{}', '_leftImg8bit', '_gtFine_labelTrainIds'),
  Layout('leftImg8bit/{}', 'gtFine/{}', '_leftImg8bit', '_gtFine_labelIds'),
  Layout('{}2017', 'stuffthingmaps/{}2017'),
)
# Name of a split -> other names of it in published data.
_NAMES = {
  'train': ('train', 'training'),
  'validation': ('validation', 'val'),
  'val': ('val', 'validation'),
}


class Place(NamedTuple):
  """Where a split is stored."""

  layout: Layout
  images: str  # Folder, relative to the data set's.
  masks: str


def find(root: str, base: str) -> Place | None:
  """Returns the place of a part of a split; None if a folder has no such part."""
  for layout in LAYOUTS:
    for name in _NAMES.get(base, (base,)):
      place = Place(layout, layout.images.format(name), layout.masks.format(name))
      folders = [os.path.join(root, x) for x in (place.images, place.masks)]
      if all(map(tf.io.gfile.isdir, folders)) and _has_suffix(folders[1], layout):
        return place
  return None


def _has_suffix(folder: str, layout: Layout) -> bool:
  """Returns whether a folder has masks with the suffix of a layout."""
  if not layout.mask_suffix:
    return True
  return bool(tf.io.gfile.glob(f'{folder}/*/*{layout.mask_suffix}.png'))


class MaskedSource(records.FolderSource):
  """Images with masks in files; see the top of this module, and records.FolderSource."""

  def __init__(
    self,
    columns: dict[str, Any],
    max_pixels: int,
    mask_classes: Sequence[masks.MaskClass],
    mask_paths: index_lib.Paths,
  ) -> None:
    names = [x.name for x in masks.learned(mask_classes)]
    super().__init__(columns, {masks.FEATURE: names}, max_pixels)
    self.mask_classes = mask_classes
    self._mask_paths = mask_paths

  def fingerprint(self) -> dict[str, Any]:
    values = super().fingerprint()
    values[masks.FEATURE] = self._mask_paths.digest()  # Wherever the folder is.
    return values

  def read(self, record: dict[str, 'tf.Tensor']) -> dict[str, 'tf.Tensor']:
    record = super().read(record)
    if masks.FEATURE not in record:
      return record
    return {**record, masks.FEATURE: tf.io.read_file(record[masks.FEATURE])}

  def store(self, workdir: str | None) -> None:
    super().store(workdir)
    self._mask_paths.store(workdir)


class Format(folder_formats.FolderFormat):
  """The folder format of this module."""

  title = 'images and masks'
  is_listed = True

  def recognizes(self, root: str, split: str, features: Sequence[str] = ()) -> bool:
    if masks.FEATURE in features:
      return True  # `open` names what is missing.
    if set(features) - {'image'}:
      return False
    return any(find(root, base) for base in slices.bases(split))

  def open(self, request: folder_formats.Request) -> MaskedSource:
    where = f"split '{request.split}' of folder '{request.root}'"
    names = records.resolve(request.features, ('image', masks.FEATURE), where)
    classes = masks.read_classes(request.root)
    if request.class_names is not None:
      known = [x.name for x in masks.learned(classes)]
      if known != list(request.class_names):
        records.class_numbers(request.root, known, request.class_names)
        raise ValueError(
          f"'{request.root}/{masks.CLASSES}' lists the classes of the training data in "
          'another order: list them in the same order'
        )
    views = []
    for base, instruction in slices.parts(request.split):
      views.append(_open_part(request, base, instruction))
    image_paths, mask_paths = _usable(request, where, views, classes)
    columns: dict[str, Any] = {'image': image_paths}
    if masks.FEATURE in names:
      columns[masks.FEATURE] = tf.constant(mask_paths.encoded(range(len(mask_paths))))
    limit = request.config.max_image_pixels
    return MaskedSource(columns, limit, classes, mask_paths)

  def list_images(self, root: str, split: str) -> folder_formats.Listing | None:
    place = find(root, split)
    if place is None:
      return None
    return folder_formats.Listing(checking.renew_index(root, place.images))


class _View(NamedTuple):
  """Images and masks of a part of a split: their indices, and rows in the same order."""

  image_index: index_lib.Index
  rows: np.ndarray
  mask_index: index_lib.Index
  mask_rows: np.ndarray

  def image_of_mask(self) -> dict[bytes, bytes]:
    """Returns the path of the image of each mask, by its path."""
    return dict(
      zip(self.mask_index.paths(self.mask_rows), self.image_index.paths(self.rows))
    )


def _open_part(request: folder_formats.Request, base: str, instruction: str) -> _View:
  """Lists a part of a split; ValueError names images without a mask."""
  place = find(request.root, base)
  if place is None:
    available = sorted(x.rstrip('/') for x in tf.io.gfile.listdir(request.root))
    raise slices.NoSplitError(
      f"folder '{request.root}' has no split '{base}' with masks: put images into "
      f"'{base}/images/' and masks of the same names into '{base}/masks/'; it holds "
      f'{available[:10]}',
      'Or name other splits (config.pp.train, config.pp.test)',
    )
  index = checking.open_index(request.root, place.images, request.workdir)
  listing.warn_of_ignored(index)
  mask_index = checking.open_index(request.root, place.masks, request.workdir)
  rows = slices.take(index.order, base, instruction)
  row_of_name = {}
  every_row = np.arange(len(mask_index))
  for row, name in zip(every_row, mask_index.names(every_row)):
    if not _has_ending(name, place.layout.mask_suffix):
      continue  # Another file of the data set, such as a picture of the classes.
    stem = _stem(name, place.layout.mask_suffix)
    if stem in row_of_name:
      raise ValueError(
        f"two masks in '{mask_index.top}' have the name '{image_files.display(stem)}', "
        'apart from their endings: keep one of them'
      )
    row_of_name[stem] = row
  if len(row_of_name) > len(index):
    _warn_of_masks(row_of_name, index, mask_index, place.layout)
  mask_rows, missing = [], []
  for name in index.names(rows):
    row = row_of_name.get(_stem(name, place.layout.image_suffix))
    if row is None:
      missing.append(image_files.display(name))
    else:
      mask_rows.append(row)
  if missing:
    raise ValueError(
      f"{console.pluralize(len(missing), 'image')} of '{index.top}' without a mask in "
      f"'{mask_index.top}', such as {missing[:_SHOWN]}: add masks of the same names, or "
      'move these images elsewhere'
    )
  return _View(index, rows, mask_index, np.array(mask_rows))


def _warn_of_masks(
  row_of_name: Mapping[bytes, int],
  index: index_lib.Index,
  mask_index: index_lib.Index,
  layout: Layout,
) -> None:
  """Warns of masks without an image."""
  without_image = set(row_of_name)
  for name in index.names(np.arange(len(index))):
    without_image.discard(_stem(name, layout.image_suffix))
  logging.warning(
    "Left out %s without an image in '%s', such as '%s' in '%s'",
    console.pluralize(len(without_image), 'mask'),
    index.top,
    image_files.display(min(without_image)),
    mask_index.top,
  )


def _has_ending(name: bytes, suffix: str) -> bool:
  return os.path.splitext(name)[0].endswith(suffix.encode())


def _stem(name: bytes, suffix: str) -> bytes:
  """Returns the name of a file without a suffix and its ending."""
  return os.path.splitext(name)[0].removesuffix(suffix.encode())


def _usable(
  request: folder_formats.Request,
  where: str,
  views: Sequence[_View],
  classes: Sequence[masks.MaskClass],
) -> tuple[index_lib.Paths, index_lib.Paths]:
  """Returns the images and masks that can be read, in the same order."""
  config = request.config
  reader = masks.reader(config, classes)
  image_of_mask: dict[bytes, bytes] = {}
  for view in views:
    view.mask_index.check_anew('masks', reader.digest())
    image_of_mask |= view.image_of_mask()

  def explain(path: bytes, max_pixels: int) -> str:
    return _fault(reader, path, image_of_mask[path], max_pixels)

  checks = {
    'broken': config.broken_images,
    'max_pixels': config.max_image_pixels,
    'workdir': request.workdir,
  }
  image_paths = checking.usable(
    [(view.image_index, view.rows) for view in views],
    where,
    channels=multichannel.stored_channels(config.pp),
    **checks,
  )
  mask_paths = checking.usable(
    [(view.mask_index, view.mask_rows) for view in views],
    f'{where}, masks',
    explain=explain,
    **checks,
  )
  image_parts, mask_parts = [], []
  for number, view in enumerate(views):
    is_usable = np.isin(view.rows, image_paths.parts[number][1])
    is_usable &= np.isin(view.mask_rows, mask_paths.parts[number][1])
    image_parts.append((view.image_index, view.rows[is_usable]))
    mask_parts.append((view.mask_index, view.mask_rows[is_usable]))
  return index_lib.Paths(image_parts), index_lib.Paths(mask_parts)


def _fault(
  reader: masks.Reader, path: bytes, image_path: bytes, max_pixels: int
) -> str:
  """Returns why a mask cannot be used, '' if it can."""
  try:
    encoded = image_files.read_file(path)
    images.bounded(tf.constant(encoded), tf.constant(max_pixels, tf.int64))
    height, width = reader.decode(encoded).shape
    shape = images.shape_of(image_files.read_file(image_path)).numpy().tolist()
  except FileNotFoundError as e:
    return image_files.first_line(e)
  except images.decode_errors() as e:
    return image_files.first_line(e)
  if shape == [height, width]:
    return ''
  return f'it has {width} x {height} pixels, and its image {shape[1]} x {shape[0]}'
