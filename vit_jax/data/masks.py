"""Masks of semantic segmentation: images whose pixels are numbers of classes.

A mask is a lossless image of the height and width of its image: grey of 8 or 16 bits or a
palette, whose indices are the numbers, or colours that `classes.json` lists. That file
names the classes,

  ["road", "car"]

numbered from 0; or gives numbers, which may have gaps, and colours. Pixels of classes to
`ignore` do not count:

  [{"name": "road", "id": 7, "color": [128, 64, 128]},
   {"name": "void", "id": 0, "color": [0, 0, 0], "ignore": true}]
"""

from collections.abc import Mapping, Sequence
import json
import os
from typing import Any

import ml_collections
import msgspec
import numpy as np
from PIL import Image

from vit_jax.data import records, typed_json
from vit_jax.data.images import image_files, images, multichannel, png_checks
from vit_jax.data.lazy import no_autograph, tf
from vit_jax.distributed import files

FEATURE = 'segmentation_mask'
CLASSES = 'classes.json'
IGNORED = -1  # Class of pixels that do not count.
_UNKNOWN = -2
_NUMBERS = 65_536  # Masks have at most 16 bits.
_EXAMPLE = '["road", "car"], or [{"name": "road", "id": 7, "color": [128, 64, 128]}]'
_JPEG = b'\xff\xd8'
# Pillow's names of other formats whose compression may change the numbers.
_LOSSY = ('AVIF', 'HEIF', 'JPEG2000')


class MaskClass(  # type: ignore[call-arg]
  msgspec.Struct, frozen=True, forbid_unknown_fields=True
):
  """A class of pixels."""

  name: str
  id: int
  color: tuple[int, int, int] | None = None
  ignore: bool = False


def read_classes(root: str) -> tuple[MaskClass, ...]:
  """Reads the classes of a folder from classes.json, see the top.

  Raises FileNotFoundError if there is no such file, ValueError if it is wrong.
  """
  path = os.path.join(root, CLASSES)
  if not tf.io.gfile.exists(path):
    raise FileNotFoundError(
      f"folder '{root}' has masks, and no '{CLASSES}' that names their classes: write it, as "
      f'in {_EXAMPLE}'
    )
  return _read_classes_file(path)


def _read_classes_file(path: str) -> tuple[MaskClass, ...]:
  """Reads a file like classes.json."""
  content = image_files.read_file(path)
  try:
    entries = typed_json.decode(content, list[str | dict], unique=True)
    classes = []
    for number, entry in enumerate(entries):
      classes.append(_read_class(number, entry))
    _check_classes(classes)
  except ValueError as e:
    raise ValueError(
      f"'{path}' must be a list of classes, as in {_EXAMPLE}: {e}"
    ) from None
  return tuple(classes)


def _read_class(number: int, entry: str | dict[str, Any]) -> MaskClass:
  """Returns the class of an entry of classes.json; `number` counts them from 0."""
  if isinstance(entry, str):
    return MaskClass(entry, number)
  try:
    return msgspec.convert(entry, MaskClass)
  except msgspec.ValidationError as e:
    raise ValueError(f'entry {number + 1}: {e}') from None


def classes_for(
  config: ml_collections.ConfigDict, root: str | None, names: Sequence[str] = ()
) -> tuple[MaskClass, ...]:
  """Returns the classes of a data set.

  They are those of `config.task_options.classes`, or of classes.json in the folder `root`,
  or `names`, which the data have. ValueError or FileNotFoundError without any.
  """
  path = (config.get('task_options') or {}).get('classes')
  if path:
    if not tf.io.gfile.exists(os.path.expanduser(path)):
      raise FileNotFoundError(
        f"classes='{path}' does not exist: write the names of the classes there, as in "
        f'{_EXAMPLE}, or change --config.task_options.classes'
      )
    return _read_classes_file(path)
  has_file = root is not None and tf.io.gfile.exists(os.path.join(root, CLASSES))
  if names and not has_file:
    return numbered(names)
  if root is None:
    raise ValueError(
      'the data do not name the classes of the pixels: write their names to a file, as in '
      f'{_EXAMPLE}, and pass it (--config.task_options.classes=FILE)'
    )
  return read_classes(root)


def _check_classes(classes: Sequence[MaskClass]) -> None:
  """Raises ValueError for classes that contradict each other."""
  if all(x.ignore for x in classes):
    raise ValueError('it has no class to learn')
  for field in ('id', 'color', 'name'):
    values: set[Any] = set()
    for x in classes:
      value = getattr(x, field)
      if value is not None and value in values:
        raise ValueError(f'two classes have the {field} {value!r}')
      values.add(value)
  for x in classes:
    if not x.name.strip():
      raise ValueError(f'the class of id {x.id} has no name')
    if not 0 <= x.id < _NUMBERS:
      raise ValueError(f"class '{x.name}' has the id {x.id}: use 0 to {_NUMBERS - 1}")
    if x.color is not None and not all(0 <= value < 256 for value in x.color):
      raise ValueError(f"class '{x.name}' has the color {list(x.color)}: use 0 to 255")


def classes_of(source: records.Source) -> tuple[MaskClass, ...]:
  """Returns the classes of a source, whose masks by default count them from 0."""
  if source.mask_classes:
    return tuple(source.mask_classes)
  return numbered(source.names.get(FEATURE, ()))


def numbered(names: Sequence[str]) -> tuple[MaskClass, ...]:
  """Returns classes that are numbered from 0."""
  return tuple(MaskClass(name, number) for number, name in enumerate(names))


def from_json(rows: Sequence[Mapping[str, Any]]) -> tuple[MaskClass, ...]:
  """Returns the classes of the rows of `to_json`."""
  return msgspec.convert(rows, tuple[MaskClass, ...])


def to_json(classes: Sequence[MaskClass]) -> list[dict[str, Any]]:
  """Returns classes as values for JSON."""
  return json.loads(msgspec.json.encode(classes))


def learned(classes: Sequence[MaskClass]) -> tuple[MaskClass, ...]:
  """Returns the classes that are not ignored, in the order of the logits."""
  return tuple(x for x in classes if not x.ignore)


def reader(config: ml_collections.ConfigDict, classes: Sequence[MaskClass]) -> 'Reader':
  """Returns the reader of the masks of a run."""
  options = config.get('task_options') or {}
  ignore = options.get('ignore', (255,))
  return Reader(classes, ignore, options.get('reduce_zero_label', False))


class Reader:
  """Reads masks as classes.

  Args:
    classes: the classes of the data.
    ignore: further numbers to ignore.
    reduce_zero_label: whether number 0 is ignored, and 1 is the first class.

  Raises:
    ValueError: if a number to ignore is that of a class, or a number is above 65,535.
  """

  def __init__(
    self,
    classes: Sequence[MaskClass],
    ignore: Sequence[int] = (),
    reduce_zero_label: bool = False,
  ) -> None:
    shift = int(reduce_zero_label)
    self.ids = [x.id + shift for x in learned(classes)]
    shifted_ids = [x.id + shift for x in classes]
    for number in (*ignore, *shifted_ids):
      if number >= _NUMBERS:
        raise ValueError(
          f'masks have numbers up to {_NUMBERS - 1}, not {number}: change '
          f"config.task_options.ignore, or the id in '{CLASSES}'"
        )
    for x in learned(classes):
      if x.id + shift in ignore:
        raise ValueError(
          f"ignore={tuple(ignore)} has the number of the class '{x.name}': leave out "
          f'{x.id + shift} (config.task_options.ignore), or write "ignore": true for this '
          f"class in '{CLASSES}'"
        )
    self._colors = {x.color: x.id + shift for x in classes if x.color is not None}
    self._table = np.full(_NUMBERS, _UNKNOWN, np.int32)
    self._table[list(ignore)] = IGNORED
    self._table[[x.id + shift for x in classes if x.ignore]] = IGNORED
    if reduce_zero_label:
      self._table[0] = IGNORED
    self._table[self.ids] = np.arange(len(self.ids))

  def digest(self) -> str:
    """Returns a hash of what the result depends on."""
    return files.digest([self._table, repr(self._colors).encode()])

  def decode(self, encoded: bytes, shape: Sequence[int] | None = None) -> np.ndarray:
    """Returns the class of each pixel of an encoded mask, IGNORED for none.

    int32 [height, width]. Raises ValueError if it is not a mask, is not of a `shape`, or
    has a number or colour of no class.
    """
    if encoded.startswith(_JPEG):
      raise ValueError('it is a JPEG, which changes the numbers of classes: use PNG')
    if encoded.startswith(multichannel.NPY):
      raise ValueError('it is an array (.npy): use PNG')
    if encoded[8:12] == b'WEBP' and b'VP8L' not in encoded:
      raise ValueError(
        'it is a lossy WebP, which changes the numbers of classes: use PNG'
      )
    if shape is not None:
      _check_shape(encoded, shape)
    fault, mode, pixels = images.from_pillow(encoded, _pixels)
    if fault:
      raise ValueError(fault)
    png_checks.check(encoded, pixels)
    numbers = _numbers(mode, pixels, self._colors)
    classes = self._table[numbers]
    if (classes == _UNKNOWN).any():
      number = int(numbers[classes == _UNKNOWN][0])
      raise ValueError(
        f"it has pixels of {number}, which '{CLASSES}' does not have: add it there, or to "
        'the numbers to ignore (config.task_options.ignore)'
      )
    return classes

  @no_autograph
  def read(self, encoded: 'tf.Tensor', shape: 'tf.Tensor') -> 'tf.Tensor':
    """Returns the result of `decode` in a TensorFlow graph, int32 of a shape [2].

    Raises InvalidArgumentError if the mask has another shape, and as `decode`.
    """

    def decode(encoded: bytes | np.ndarray, shape: np.ndarray) -> np.ndarray:
      try:
        return self.decode(np.asarray(encoded).item(), shape.tolist())
      except images.decode_errors() as e:
        raise ValueError(f'a mask cannot be read: {e}') from None

    classes = tf.numpy_function(decode, [encoded, shape], tf.int32, stateful=False)
    return tf.ensure_shape(classes, [None, None])


def _check_shape(encoded: bytes, shape: Sequence[int]) -> None:
  """Raises ValueError unless a mask has the height and width of its image."""
  size = images.from_pillow(encoded, lambda image: image.size)
  if size != (shape[1], shape[0]):
    raise ValueError(
      f'it has {size[0]} x {size[1]} pixels, and its image {shape[1]} x {shape[0]}: '
      'write a mask of the size of its image'
    )


def _pixels(image: Image.Image) -> tuple[str, str, np.ndarray]:
  """Returns why values are not the stored ones, '' if they are, Pillow's mode, values."""
  fault = ''
  if image.format in _LOSSY or image.info.get('compression') == 'jpeg':
    fault = (
      f'it is {image.format} with a compression that may change the numbers of classes: '
      'use PNG'
    )
  # Pillow scales grey of 2 or 4 bits, and colours of 16 bits, to 8 bits.
  is_scaled = image.mode in ('L', 'LA', 'RGB', 'RGBA') and ';' in _raw_mode(image)
  if is_scaled:
    fault = (
      f"it has values of the form '{_raw_mode(image)}', which Pillow scales to 8 bits: use "
      'grey of 8 or 16 bits without transparency, or a palette'
    )
  return fault, image.mode, np.asarray(image)


def _raw_mode(image: Image.Image) -> str:
  """Returns Pillow's name of the form of values in a file, '' if it is unknown."""
  if not image.tile:
    return ''
  args = image.tile[0].args
  return str(args[0]) if isinstance(args, tuple) else str(args)


def _numbers(
  mode: str, pixels: np.ndarray, colors: Mapping[tuple[int, int, int], int]
) -> np.ndarray:
  """Returns the number of each pixel of a mask, int64 [height, width]."""
  if mode in ('1', 'L', 'P') or mode.startswith('I'):
    numbers = pixels.astype(np.int64)
    for number in (numbers.min(), numbers.max()):
      if not 0 <= number < _NUMBERS:
        raise ValueError(f'it has the number {number}: use masks of 8 or 16 bits')
    return numbers
  if mode in ('LA', 'PA'):
    return pixels[..., 0].astype(np.int64)
  if mode not in ('RGB', 'RGBA'):
    raise ValueError(f"it has Pillow's mode '{mode}': use grey or a palette")
  pixels = pixels[..., :3]
  if colors:
    return _by_color(pixels, colors)
  if (pixels == pixels[..., :1]).all():
    return pixels[..., 0].astype(np.int64)
  raise ValueError(
    f"it is a colour image, and '{CLASSES}' has no colours: add them, as in {_EXAMPLE}, "
    'or use masks of grey or of a palette'
  )


def _by_color(
  pixels: np.ndarray, colors: Mapping[tuple[int, int, int], int]
) -> np.ndarray:
  """Returns the number of the class of each colour [height, width, 3]."""
  places = np.array([65_536, 256, 1])
  keys = np.array(list(colors)) @ places
  order = np.argsort(keys)
  packed = pixels @ places
  position = np.searchsorted(keys[order], packed).clip(max=len(keys) - 1)
  is_known = keys[order][position] == packed
  if not is_known.all():
    color = pixels[~is_known][0].tolist()
    raise ValueError(f"it has the colour {color}, of no class in '{CLASSES}': add it")
  return np.array(list(colors.values()))[order][position]
