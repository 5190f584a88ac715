"""Prepares images for an exported model, with only NumPy and Pillow.

A server imports neither JAX nor TensorFlow:

  facts = serving.read_facts(folder)
  image = serving.prepare(content, facts['preprocessing'])

See docs/serve.md for complete servers.
"""

from collections.abc import Mapping, Sequence
import hashlib
import io
import json
import os
import pathlib
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from vit_jax.data.images import multichannel, rgb

_CHECKSUM = 'sha256'  # Key of the checksum of all other keys of model.json.
# Keys of `preprocessing` besides 'resize'.
_KEYS = {
  'size',
  'channels',
  'range',
  'jpeg_shrink',
  'resize_mode',
  'interpolation',
  'antialias',
  'crop_rounding',
}


def read_facts(folder: str | os.PathLike) -> dict[str, Any]:
  """Returns the content of the `model.json` that `vit_jax export` wrote to a folder.

  Compares the SHA-256 of this file and of all others of the export first: runtimes load
  many damaged models, which then compute other numbers. Raises ValueError if a file is
  missing, damaged or of another export.
  """
  folder = pathlib.Path(folder)
  file = folder / 'model.json'
  try:
    facts = json.loads(file.read_text())
  except ValueError as e:
    raise ValueError(f"'{file}' is damaged: {e}; copy the whole export again") from e
  checksums = facts.get('files') if isinstance(facts, dict) else None
  if not isinstance(checksums, dict):
    raise ValueError(f"'{file}' has no checksums in 'files': export the model again")
  content = {name: value for name, value in facts.items() if name != _CHECKSUM}
  if facts.get(_CHECKSUM) != with_checksum(content)[_CHECKSUM]:
    raise ValueError(
      f"'{file}' differs from what `vit_jax export` wrote: copy the whole export again, "
      'or export the model again'
    )
  for name, expected in checksums.items():
    path = folder / name
    if not path.is_file():
      raise ValueError(f"'{path}' is missing or not a file: copy the whole export")
    if (digest := sha256(path)) != expected:
      raise ValueError(
        f"'{path}' is damaged or of another export: its SHA-256 is {digest}, and "
        f'{expected} in model.json: copy the whole export again'
      )
  return facts


def with_checksum(facts: Mapping[str, Any]) -> dict[str, Any]:
  """Returns facts of an export with their own SHA-256."""
  content = json.dumps(facts, sort_keys=True).encode()
  return {**facts, _CHECKSUM: hashlib.sha256(content).hexdigest()}


def sha256(path: pathlib.Path) -> str:
  """Returns the SHA-256 of a file, as 64 digits."""
  with open(path, 'rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def prepare(file: bytes, preprocessing: Mapping[str, Any]) -> np.ndarray:
  """Decodes an image to the input of a model, like `vit_jax predict`.

  The image is rotated according to its EXIF orientation, transparent pixels become
  white, and 16 bits become 8. If the model reads other images than 8-bit colour
  ('value_range'), values are read as stored; TIFF then needs tifffile. The image is
  resized by Pillow's `resize` if the model's images are antialiased, else like
  tf.image.resize, which does not average when it shrinks.

  Args:
    file: content of an image file.
    preprocessing: as in the model.json that `vit_jax export` writes.

  Returns:
    float32 [height, width, channels].

  Raises:
    ValueError: if the model reads canvases or images of any size, or images of other
      channels.
    OSError: Pillow's, for a file that is not an image.
  """
  pp = preprocessing
  if 'preprocessing' in pp:
    raise ValueError(
      "preprocessing is the whole model.json: pass its value of 'preprocessing'"
    )
  if 'resize' not in pp or not all(isinstance(n, int) for n in pp.get('size', ())):
    raise ValueError(
      f'preprocessing={dict(pp)} is for canvases or images of any size: '
      'export the model with --image_size=HEIGHT,WIDTH'
    )
  if missing := _KEYS - pp.keys():
    raise ValueError(
      f'preprocessing={dict(pp)} lacks {", ".join(sorted(missing))}: pass it as in the '
      'model.json that `vit_jax export` wrote'
    )
  height, width = pp['size']
  resize = pp['resize'] or pp['size']
  has_values = pp.get('value_range') is not None
  bands = _scaled_bands(file, pp) if has_values else _colour_bands(file, resize, pp)
  shape = bands[0].size[::-1]
  resized_height, resized_width = _resized_shape(shape, resize, pp)
  top = _margin(resized_height - height, pp['crop_rounding'])
  left = _margin(resized_width - width, pp['crop_rounding'])
  y, x = shape[0] / resized_height, shape[1] / resized_width
  arrays = []
  for band in bands:
    if pp['antialias']:
      filter_ = Image.Resampling[pp['interpolation'].upper()]
      cropped = band.resize((resized_width, resized_height), filter_)
      cropped = cropped.crop((left, top, left + width, top + height))
    else:
      cropped = band.convert('F').transform(
        (width, height),
        Image.Transform.AFFINE,
        (x, 0, left * x, 0, y, top * y),
        Image.Resampling.BILINEAR,
      )
    arrays.append(np.asarray(cropped, np.float32))
  pixels = np.stack(arrays, -1)
  if has_values:
    return _standardized(pixels, pp)
  low, high = pp['range']
  return pixels * ((high - low) / 255) + low


def _colour_bands(
  file: bytes, resize: int | Sequence[int], pp: Mapping[str, Any]
) -> Sequence[Image.Image]:
  """Returns the channels of an image of 8-bit colour."""
  image = Image.open(io.BytesIO(file))
  if pp['jpeg_shrink']:  # Decodes a large JPEG at 1/2, 1/4 or 1/8.
    image.draft(None, (resize, resize) if isinstance(resize, int) else resize[::-1])
  image = Image.fromarray(rgb.to_rgb(ImageOps.exif_transpose(image)))
  return image.convert('RGB' if pp['channels'] == 3 else 'L').split()


def _scaled_bands(file: bytes, pp: Mapping[str, Any]) -> Sequence[Image.Image]:
  """Returns the channels of other images, of which `value_range` is scaled to [-1, 1]."""
  values = _values(file, pp['channels'])
  if values.shape[2] != pp['channels']:
    raise ValueError(
      f'the image has {values.shape[2]} channels, and the model reads {pp["channels"]}: '
      'pass another image'
    )
  low, high = (np.asarray(bound, np.float32) for bound in pp['value_range'])
  scaled = (values.astype(np.float32) - low) * (2 / (high - low)) - 1
  scaled = scaled.clip(-1, 1)
  return [Image.fromarray(np.ascontiguousarray(x)) for x in np.moveaxis(scaled, 2, 0)]


def _values(file: bytes, channels: int) -> np.ndarray:
  """Returns the values in a file as stored, [height, width, C]."""
  if multichannel.is_array(file):
    return multichannel.read(file)
  image = Image.open(io.BytesIO(file))
  is_deep = image.format == 'PNG' and file[24] == 16
  image = ImageOps.exif_transpose(image)
  if image.mode.startswith('I'):  # 16 bits, grey.
    return np.asarray(image)[..., None]
  if is_deep:
    raise ValueError(
      'the image is a PNG of 16 bits with colours, of which Pillow reads 8: pass it as '
      '.npy or TIFF'
    )
  pixels = rgb.to_rgb(image)
  if channels == 1:
    return np.asarray(Image.fromarray(pixels).convert('L'))[..., None]
  return pixels


def _standardized(pixels: np.ndarray, pp: Mapping[str, Any]) -> np.ndarray:
  """Subtracts mean and deviation of the values, if there are any."""
  if pp.get('value_mean') is None:
    return pixels
  low, high = (np.asarray(bound, np.float64) for bound in pp['value_range'])
  values = (pixels + 1) / 2 * (high - low) + low
  mean, std = (np.asarray(pp[f'value_{name}'], np.float64) for name in ('mean', 'std'))
  return ((values - mean) / std).astype(np.float32)


def _resized_shape(
  shape: Sequence[int], resize: int | Sequence[int], pp: Mapping[str, Any]
) -> Sequence[int]:
  """Returns (height, width) of a resized image; `resize`: its shorter side, or both."""
  if isinstance(resize, int):
    sides = [n * resize / min(shape) for n in shape]
    return [int(side) if pp['antialias'] else round(side) for side in sides]
  if pp['resize_mode'] == 'cover':
    ratio = min(n / side for n, side in zip(shape, resize))
    return [round(n / ratio) for n in shape]
  return resize


def _margin(excess: int, rounding: str) -> int:
  """Returns how many pixels a central crop cuts off at the top, or on the left."""
  return excess // 2 if rounding == 'down' else round(excess / 2)
