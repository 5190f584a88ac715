"""Folders of images and masks, for semantic segmentation.

  train/images/1.jpg       images/train/1.jpg        images/training/1.jpg
  train/masks/1.png        masks/train/1.png         annotations/training/1.png
  classes.json             classes.json              classes.json

The third is the layout of ADE20K; LAYOUTS has those of Cityscapes, COCO-Stuff and Pascal
VOC, too. A mask has the name of its image, apart from the ending, and may be in a folder of
the same name. For masks and classes.json see vit_jax/data/masks.py.

A manifest (vit_jax/data/manifest.py) may name the mask of each image, `segmentation_mask`
or `mask`, a path relative to the same folder.
"""

from collections.abc import Iterator, Mapping, Sequence
import os
from typing import Any, NamedTuple

from absl import logging
import numpy as np

from vit_jax import console
from vit_jax.data import (
  checking,
  folder_formats,
  manifest,
  manifest_files,
  masks,
  records,
  slices,
)
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

  The suffixes are parts of the names of images and masks before their endings; `list` is
  a file with the names of the images of the split, '' for all in the folder.
  """

  images: str
  masks: str
  image_suffix: str = ''
  mask_suffix: str = ''
  list: str = ''


LAYOUTS = (
  Layout('{}/images', '{}/masks'),
  Layout('images/{}', 'masks/{}'),
  Layout('images/{}', 'annotations/{}'),
  Layout('leftImg8bit/{}', 'gtFine/{}', '_leftImg8bit', '_gtFine_labelTrainIds'),
  Layout('leftImg8bit/{}', 'gtFine/{}', '_leftImg8bit', '_gtFine_labelIds'),
  Layout('{}2017', 'stuffthingmaps/{}2017'),
  Layout('JPEGImages', 'SegmentationClass', list='ImageSets/Segmentation/{}.txt'),
)
# The classes of Pascal VOC, whose archives do not list them, by their numbers.
_VOC = (
  'background', 'aeroplane', 'bicycle', 'bird', 'boat', 'bottle', 'bus', 'car', 'cat',
  'chair', 'cow', 'diningtable', 'dog', 'horse', 'motorbike', 'person', 'pottedplant',
  'sheep', 'sofa', 'train', 'tvmonitor',
)  # fmt: skip
# Names of the column of masks in a manifest.
_COLUMNS = (masks.FEATURE, 'mask')
# Name of a split -> its names in published data.
_SPLIT_NAMES = {
  'train': ('train', 'training'),
  'validation': ('validation', 'val'),
  'val': ('val', 'validation'),
}


class Place(NamedTuple):
  """Where a split is stored."""

  layout: Layout
  images: str  # Folder, relative to the data set's.
  masks: str
  list: str  # File, likewise; '' for all images.


def find(root: str, base: str) -> Place | None:
  """Returns the place of a part of a split; None if a folder has no such part."""
  for layout in LAYOUTS:
    for name in _SPLIT_NAMES.get(base, (base,)):
      place = Place(
        layout,
        layout.images.format(name),
        layout.masks.format(name),
        layout.list.format(name),
      )
      if _exists(root, place):
        return place
  return None


def _exists(root: str, place: Place) -> bool:
  """Returns whether a folder has the images, the masks and the list of a place."""
  image_folder = os.path.join(root, place.images)
  mask_folder = os.path.join(root, place.masks)
  if not tf.io.gfile.isdir(image_folder) or not tf.io.gfile.isdir(mask_folder):
    return False
  if place.list and not tf.io.gfile.exists(os.path.join(root, place.list)):
    return False
  suffix = place.layout.mask_suffix
  return not suffix or bool(tf.io.gfile.glob(f'{mask_folder}/*/*{suffix}.png'))


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

  def read(self, record: records.Record) -> records.Record:
    """Reads the image, and the content of its mask."""
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
    views = []
    for base, instruction in slices.parts(request.split):
      views.append(_open_part(request, base, instruction))
    return _open_views(request, where, views)

  def list_images(self, root: str, split: str) -> folder_formats.Listing | None:
    place = find(root, split)
    if place is None:
      return None
    return folder_formats.Listing(checking.renew_index(root, place.images))


class ManifestFormat(folder_formats.FolderFormat):
  """Manifests with a column of masks."""

  title = 'a manifest of images and masks'

  def recognizes(self, root: str, split: str, features: Sequence[str] = ()) -> bool:
    return masks.FEATURE in features and manifest.exists(root, split)

  def open(self, request: folder_formats.Request) -> MaskedSource:
    views = []
    for base, instruction in slices.parts(request.split):
      lines = manifest.select_lines(request.root, base, instruction)
      image_index = index_lib.from_paths(
        request.root, f'{base}.jsonl', [line.image for line in lines]
      )
      mask_index = index_lib.from_paths(
        request.root, f'{base}.masks.jsonl', list(map(_mask_of, lines))
      )
      views.append(_View(image_index, image_index.order, mask_index, mask_index.order))
    where = f"split '{request.split}' of folder '{request.root}'"
    return _open_views(request, where, views)


def _mask_of(line: manifest_files.Line) -> str:
  """Returns the path of the mask of a line."""
  names = [name for name in _COLUMNS if line.get(name) is not None]
  if len(names) > 1:
    raise ValueError(
      f"{line.where}: there are '{names[0]}' and '{names[1]}': keep one of them, the path "
      "of the image's mask"
    )
  if not names:
    raise ValueError(
      f"{line.where}: there is no '{masks.FEATURE}', the path of the image's mask: add it"
    )
  path = line.get(names[0])
  if not isinstance(path, str) or not path:
    raise ValueError(
      f"{line.where}: '{names[0]}' is {manifest_files.short(path)}: write the path of a "
      'mask'
    )
  return path if '://' in path else os.path.join(line.folder, path)


def _open_views(
  request: folder_formats.Request, where: str, views: 'Sequence[_View]'
) -> MaskedSource:
  """Checks images and masks, and returns their source."""
  names = records.resolve(request.features, ('image', masks.FEATURE), where)
  classes = _read_classes(request)
  if request.class_names is not None:
    names_of_folder = [x.name for x in masks.learned(classes)]
    if names_of_folder != list(request.class_names):
      records.class_numbers(request.root, names_of_folder, request.class_names)
      raise ValueError(
        f"'{request.root}/{masks.CLASSES}' lists the classes of the training data in "
        'another order: list them in the same order'
      )
  image_paths, mask_paths = _usable(request, where, views, classes)
  columns: dict[str, Any] = {'image': image_paths}
  if masks.FEATURE in names:
    columns[masks.FEATURE] = tf.constant(mask_paths.encoded(range(len(mask_paths))))
  limit = request.config.max_image_pixels
  return MaskedSource(columns, limit, classes, mask_paths)


def _read_classes(request: folder_formats.Request) -> tuple[masks.MaskClass, ...]:
  """Returns the classes of a folder."""
  base = slices.bases(request.split)[0]
  place = find(request.root, base)
  is_voc = place is not None and place.layout.masks == 'SegmentationClass'
  names = _VOC if is_voc else ()
  return masks.classes_for(request.config, request.root, names)


class _View(NamedTuple):
  """Images and masks of a part of a split: their indices, and rows in the same order."""

  image_index: index_lib.Index
  rows: np.ndarray
  mask_index: index_lib.Index
  mask_rows: np.ndarray

  def pairs(self) -> Iterator[tuple[bytes, bytes]]:
    """Yields the paths of each mask and its image."""
    masks_of_rows = self.mask_index.paths(self.mask_rows)
    yield from zip(masks_of_rows, self.image_index.paths(self.rows))


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
  order = _listed(request.root, place, index) if place.list else index.order
  rows = slices.take(order, base, instruction)
  mask_row_of_stem = _mask_rows(mask_index, place.layout.mask_suffix)
  if len(mask_row_of_stem) > len(index) and not place.list:
    _warn_of_masks(mask_row_of_stem, index, mask_index, place.layout)
  mask_rows, missing = [], []
  for name in index.names(rows):
    mask_row = mask_row_of_stem.get(_stem(name, place.layout.image_suffix))
    if mask_row is None:
      missing.append(image_files.display(name))
    else:
      mask_rows.append(mask_row)
  if missing:
    raise ValueError(
      f"{console.pluralize(len(missing), 'image')} of '{index.top}' without a mask in "
      f"'{mask_index.top}', such as {missing[:_SHOWN]}: add masks of the same names, or "
      'move these images elsewhere'
    )
  return _View(index, rows, mask_index, np.array(mask_rows))


def _mask_rows(mask_index: index_lib.Index, suffix: str) -> dict[bytes, int]:
  """Returns the rows of masks by stem; ValueError if two masks have the same one."""
  row_of_stem: dict[bytes, int] = {}
  rows = np.arange(len(mask_index))
  for row, name in zip(rows, mask_index.names(rows)):
    if not os.path.splitext(name)[0].endswith(suffix.encode()):
      continue  # Another file of the data set, such as a picture of the classes.
    stem = _stem(name, suffix)
    if stem in row_of_stem:
      raise ValueError(
        f"two masks in '{mask_index.top}' have the name '{image_files.display(stem)}', "
        'apart from their endings: keep one of them'
      )
    row_of_stem[stem] = row
  return row_of_stem


def _listed(root: str, place: Place, index: index_lib.Index) -> np.ndarray:
  """Returns the rows of the images in a layout's list, in the order of the index."""
  path = os.path.join(root, place.list)
  names = set(image_files.read_file(path).split())
  stems = [_stem(name, '') for name in index.names(index.order)]
  if missing := names - set(stems):
    raise ValueError(
      f"'{path}' lists '{image_files.display(min(missing))}', which is not in "
      f"'{index.top}': add this image, or delete the line"
    )
  return index.order[[stem in names for stem in stems]]


def _warn_of_masks(
  mask_row_of_stem: Mapping[bytes, int],
  index: index_lib.Index,
  mask_index: index_lib.Index,
  layout: Layout,
) -> None:
  """Warns of masks without an image."""
  without_image = set(mask_row_of_stem)
  for name in index.names(np.arange(len(index))):
    without_image.discard(_stem(name, layout.image_suffix))
  logging.warning(
    "Left out %s without an image in '%s', such as '%s' in '%s'",
    console.pluralize(len(without_image), 'mask'),
    index.top,
    image_files.display(min(without_image)),
    mask_index.top,
  )


def _stem(name: bytes, suffix: str) -> bytes:
  """Returns the name of a file without a suffix and its ending."""
  return os.path.splitext(name)[0].removesuffix(suffix.encode())


def _images_of_masks(views: Sequence[_View]) -> dict[bytes, list[bytes]]:
  """Returns the paths of the images by the path of their mask."""
  images_of_mask: dict[bytes, list[bytes]] = {}
  for view in views:
    for mask_path, image_path in view.pairs():
      images_of_mask.setdefault(mask_path, []).append(image_path)
  return images_of_mask


def _usable(
  request: folder_formats.Request,
  where: str,
  views: Sequence[_View],
  classes: Sequence[masks.MaskClass],
) -> tuple[index_lib.Paths, index_lib.Paths]:
  """Returns the images and masks that can be read, in the same order."""
  config = request.config
  reader = masks.reader(config, classes)
  for view in views:
    view.mask_index.check_anew('masks', reader.digest())
  images_of_mask = _images_of_masks(views)

  def explain(path: bytes, max_pixels: int) -> str:
    return _fault(reader, path, images_of_mask[path], max_pixels)

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
  for view, (_, rows), (_, mask_rows) in zip(
    views, image_paths.parts, mask_paths.parts
  ):
    is_usable = np.isin(view.rows, rows) & np.isin(view.mask_rows, mask_rows)
    image_parts.append((view.image_index, view.rows[is_usable]))
    mask_parts.append((view.mask_index, view.mask_rows[is_usable]))
  return index_lib.Paths(image_parts), index_lib.Paths(mask_parts)


def _fault(
  reader: masks.Reader, path: bytes, image_paths: Sequence[bytes], max_pixels: int
) -> str:
  """Returns why a mask of some images cannot be used, '' if it can."""
  read_errors: tuple[type[Exception], ...] = (
    FileNotFoundError,
    *images.decode_errors(),
  )
  try:
    encoded = image_files.read_file(path)
    images.bounded(tf.constant(encoded), tf.constant(max_pixels, tf.int64))
    height, width = reader.decode(encoded).shape
    for image_path in image_paths:
      image = image_files.read_file(image_path)
      shape = images.shape_of(image).numpy().tolist()
      if shape != [height, width]:
        fault = (
          f'it has {width} x {height} pixels, and its image {shape[1]} x {shape[0]}'
        )
        if images.upright_shape_of(image).numpy().tolist() != [height, width]:
          return fault
        return f'{fault} before it is rotated by its EXIF orientation: store the image upright'
  except read_errors as e:
    return image_files.first_line(e)
  return ''
