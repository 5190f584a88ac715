"""Images that are not 8-bit colour: arrays of NumPy (.npy) and TIFF files.

Values are read as they are stored, with NumPy only, and tifffile for TIFF. An array is
[height, width] or [height, width, channels]. The channels of a TIFF are the samples of
its pixels, its planes, or its pages.
"""

import io
import math
from typing import TYPE_CHECKING, Any
import zlib

import numpy as np

from vit_jax import console

if TYPE_CHECKING:
  import ml_collections

MOST_CHANNELS = 64
NPY_ENDING = '.npy'
NPY = b'\x93NUMPY'
TIFF = (b'II*\0', b'MM\0*', b'II+\0', b'MM\0+')  # The last two are BigTIFF.

# Limit per image: as many as three channels of the default of config.max_image_pixels.
_MOST_VALUES = 2**28
_VERSIONS = {
  (1, 0): np.lib.format.read_array_header_1_0,
  (2, 0): np.lib.format.read_array_header_2_0,
}
_ORIENTATION = 274  # The number of a TIFF tag, see orientation.py.
_DEFLATE = (8, 32946)  # Numbers of compressions of TIFF.


def stored_channels(pp: 'ml_collections.ConfigDict') -> int | None:
  """Returns `pp.channels` if `pp.range` is set; None for images of 8-bit colour."""
  return None if pp.range is None else pp.channels


def is_array(encoded: bytes) -> bool:
  """Returns whether a file is a .npy or TIFF file, by its content."""
  return encoded.startswith((NPY, *TIFF))


def shape(encoded: bytes) -> tuple[int, int, int]:
  """Returns height, width and channels of a .npy or TIFF file; see `read` for errors."""
  return _open_npy(encoded)[0] if encoded.startswith(NPY) else _read_tiff(encoded)[0]


def read(encoded: bytes) -> np.ndarray:
  """Returns the values in a .npy or TIFF file, [height, width, channels] as stored.

  The orientation of a TIFF is applied. ValueError if the file is damaged or too large,
  or holds anything else than 1 to 64 channels of real, finite numbers in the range of float32.
  """
  if encoded.startswith(NPY):
    image_shape, is_fortran, dtype, begin = _open_npy(encoded)
    order = 'F' if is_fortran else 'C'
    count = math.prod(image_shape)
    values = np.frombuffer(encoded, dtype, count, begin)
    stored_shape = image_shape[:2] if image_shape[2] == 1 else image_shape
    values = values.reshape(stored_shape, order=order).reshape(image_shape)
  else:
    _, values = _read_tiff(encoded, with_values=True)
    assert values is not None  # Since they are requested.
  largest = np.finfo(np.float32).max
  if values.dtype.kind == 'f' and not (abs(values) <= largest).all():
    raise ValueError(
      'it has values that are not finite or beyond the range of float32: replace them'
    )
  return values


def _open_npy(
  encoded: bytes,
) -> tuple[tuple[int, int, int], bool, np.dtype, int]:
  """Returns shape, order, dtype, and where the values begin."""
  file = io.BytesIO(encoded)
  try:
    read_header = _VERSIONS[np.lib.format.read_magic(file)]
    stored_shape, is_fortran, dtype = read_header(file)
  except Exception as e:  # NumPy does not document the errors for damaged files.
    raise ValueError('its .npy header is damaged: save it with numpy.save') from e
  image_shape = _checked(stored_shape, dtype)
  size = math.prod(image_shape) * dtype.itemsize
  if len(encoded) - file.tell() != size:
    raise ValueError(
      f'its .npy header says {dtype}{list(stored_shape)}, but {len(encoded):,} bytes are '
      'more or less than that: it is truncated or damaged'
    )
  return image_shape, is_fortran, dtype, file.tell()


def _checked(stored_shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, int, int]:
  """Returns a shape as (height, width, channels), if an image can have it."""
  if dtype.kind not in 'buif' or len(stored_shape) not in (2, 3):
    raise ValueError(
      f'it is an array {dtype}{list(stored_shape)}: save real numbers [height, width] or '
      '[height, width, channels]'
    )
  height, width, channels = (*stored_shape, 1)[:3]
  if min(height, width) < 1 or not 1 <= channels <= MOST_CHANNELS:
    raise ValueError(
      f'it is an array {list(stored_shape)}, [height, width, channels]: an image has 1 to '
      f'{MOST_CHANNELS} channels and at least one pixel'
    )
  if height * width * channels > _MOST_VALUES:
    raise ValueError(
      f'it has {height} x {width} x {channels} values, more than {_MOST_VALUES:,}: cut it '
      'into smaller images'
    )
  return height, width, channels


def _read_tiff(
  encoded: bytes, with_values: bool = False
) -> tuple[tuple[int, int, int], np.ndarray | None]:
  """Returns the shape of a TIFF, and its values if `with_values`."""
  try:
    import tifffile
  except ImportError as e:
    remedy = console.install('tifffile', 'tiff', 'TIFF that is not 8-bit colour')
    raise ValueError(remedy) from e
  try:
    with tifffile.TiffFile(io.BytesIO(encoded)) as file:
      height, width, channels = _tiff_shape(file)
      orientation = file.pages.first.tags.valueof(_ORIENTATION, 1)
      is_swapped = orientation in (5, 6, 7, 8)
      image_shape = (
        (width, height, channels) if is_swapped else (height, width, channels)
      )
      if not with_values:
        return image_shape, None
      arrays = []
      for series in file.series:
        for page in series.pages:
          _check_segments(encoded, page)
        axes = [series.axes.index(axis) for axis in 'YX']
        arrays.append(np.moveaxis(series.asarray(), axes, (0, 1)))
      values = arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=-1)
      return image_shape, _turned(values.reshape(height, width, channels), orientation)
  except ValueError:
    raise
  except Exception as e:  # tifffile does not document its readers' errors.
    raise ValueError(f'it is not a TIFF, or damaged: {e}') from e


def _tiff_shape(file: Any) -> tuple[int, int, int]:
  """Returns the shape of an open TIFF as stored; ValueError if it is not one image."""
  remedy = 'save one image, with channels as the only further axis'
  series = file.series
  # Pages that were written one by one are images of their own.
  kinds = dict.fromkeys(f'{x.dtype}{list(x.shape)}' for x in series)
  if len(kinds) > 1:
    first, second, *_ = kinds
    raise ValueError(f'its {len(series)} pages differ: {first} and {second}: {remedy}')
  axes = list(zip(series[0].axes, series[0].shape))  # A letter may be repeated.
  channel_sizes = [size for axis, size in axes if axis not in 'YX' and size > 1]
  if len(series) > 1:
    channel_sizes.append(len(series))
  sizes = dict(axes)
  if not {'Y', 'X'} <= sizes.keys() or len(channel_sizes) > 1:
    pages = f'{len(series)} pages with ' if len(series) > 1 else ''
    raise ValueError(f'it has {pages}the axes {series[0].axes}: {remedy}')
  for image in series:
    photometric = image.keyframe.photometric.name
    if photometric not in ('MINISBLACK', 'RGB'):
      raise ValueError(f'its values are {photometric}: save them as MINISBLACK or RGB')
  return _checked((sizes['Y'], sizes['X'], *channel_sizes), np.dtype(series[0].dtype))


def _check_segments(encoded: bytes, page: Any) -> None:
  """Raises ValueError if a strip or tile is missing, or grows beyond its size.

  zlib would expand a strip of 1 MB to 1 GB, whatever the header says. The other
  compressions are decoded by imagecodecs, which checks that.
  """
  limit = math.prod(page.chunks) * page.dtype.itemsize
  is_deflate = page.compression in _DEFLATE
  for offset, count in zip(page.dataoffsets, page.databytecounts):
    if offset + count > len(encoded) or not count:
      raise ValueError('its strips or tiles are truncated')
    if is_deflate:
      inflate = zlib.decompressobj()
      inflate.decompress(encoded[offset : offset + count], limit)
      if inflate.unconsumed_tail:
        raise ValueError('its strips or tiles are larger than it says')


def _turned(values: np.ndarray, orientation: int) -> np.ndarray:
  """Returns stored pixels [height, width, C] upright, see orientation.py."""
  if orientation in (5, 6, 7, 8):
    values = values.swapaxes(0, 1)
  if orientation in (3, 4, 7, 8):
    values = values[::-1]
  if orientation in (2, 3, 6, 7):
    values = values[:, ::-1]
  return values
