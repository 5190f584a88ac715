"""Image operations in TensorFlow: decode, crop, augment, scale to [-1, 1].

Images without boxes are first turned upright by their EXIF orientation. Training
takes an Inception crop (a random area of random aspect ratio); evaluation resizes the
whole image to a square, as in the original, or takes a central crop. A seed determines
every random choice, so that example i of a run always has the same pixels.

`get_pp` and the names of tokenizers are the original's, for images with texts.
"""

from collections.abc import Callable, Sequence
import dataclasses
import io
import os
from typing import Any

import ml_collections
import numpy as np
from PIL import Image, ImageOps

from vit_jax.data.augmentation import (
  canvases,
  geometry,
  pixel_ops,
  resizing,
)
from vit_jax.data.images import image_files, images, jpeg, orientation, rgb, scaling
from vit_jax.data.lazy import no_autograph, tf
from vit_jax.data.texts import tokenizers

crop_size = geometry.crop_size
get_tokenizer = tokenizers.get_tokenizer
BertTokenizer = tokenizers.BertTokenizer
SentencepieceTokenizer = tokenizers.SentencepieceTokenizer


def image_sizes(pp: ml_collections.ConfigDict) -> list[tuple[int, int]]:
  """Returns the sizes of training images, see vit_jax.tasks.base.Task."""
  if pp.sides:
    return list(dict.fromkeys(group.canvas for group in canvases.groups(pp)))
  return [crop_size(pp)]


@no_autograph
def decode_with_geometry(
  encoded: 'tf.Tensor',
  seed: 'tf.Tensor',
  pp: ml_collections.ConfigDict,
  upright: bool = False,
  sample: Callable[..., geometry.Geometry] = geometry.sample,
) -> tuple['tf.Tensor', geometry.Geometry]:
  """Decodes and augments one image, and returns its geometry.

  Args:
    encoded: string scalar, the contents of an image file.
    seed: int64 [2].
    pp: `config.pp`.
    upright: whether to apply the EXIF orientation first; boxes and masks refer to the
      stored pixels.
    sample: draws the geometry, with the arguments and the result of geometry.sample.

  Returns:
    (image, geometry): float32 [crop height, crop width, channels] in [-1, 1], and the
    `geometry.Geometry` for boxes and masks, without the moves of RandAugment.
  """

  def draw(shape: 'tf.Tensor') -> geometry.Geometry:
    return sample(shape, seed, pp)

  crops = pp.crop_area is not None
  image, sampled = _decode(encoded, draw, pp, crops=crops, upright=upright)
  image = tf.ensure_shape(image, [*sampled.size, pp.channels])
  return _change_pixels(image, seed, pp), sampled


@no_autograph
def on_canvas_for_training(
  encoded: 'tf.Tensor',
  seed: 'tf.Tensor',
  group: 'tf.Tensor',
  pp: ml_collections.ConfigDict,
) -> tuple[dict[str, 'tf.Tensor'], geometry.Geometry]:
  """Decodes and augments one image, and puts it on the canvas of a group.

  See `decode_with_geometry`; `group` is the result of canvases.group_at. Returns
  ({image, real}, geometry), see canvases.place; the geometry maps boxes and masks to
  the image without padding.
  """

  def draw(shape: 'tf.Tensor') -> geometry.Geometry:
    return canvases.sample(shape, seed, group, pp)

  image, sampled = _decode(encoded, draw, pp)
  image = tf.ensure_shape(image, [None, None, pp.channels])
  image = _change_pixels(image, seed, pp)
  sizes = [group.canvas for group in canvases.groups(pp)]
  return canvases.place(image, tf.unstack(tf.gather(sizes, group))), sampled


@no_autograph
def on_canvas_for_evaluation(
  encoded: 'tf.Tensor',
  group: canvases.Group,
  pp: ml_collections.ConfigDict,
  upright: bool = False,
) -> tuple[dict[str, 'tf.Tensor'], geometry.Geometry]:
  """Decodes one image and puts it on the canvas of a group of one length.

  See `on_canvas_for_training`. `upright` applies the EXIF orientation first.
  """

  def draw(shape: 'tf.Tensor') -> geometry.Geometry:
    size = canvases.fitted(shape, group.sides[0], group.longest)
    return geometry.whole(shape, tf.minimum(size, max(group.canvas)))

  image, sampled = _decode(encoded, draw, pp, False, upright, antialias=True)
  tensors = canvases.place(image, group.canvas)
  shape = [*group.canvas, pp.channels]
  return {
    'image': tf.ensure_shape(tensors['image'], shape),
    'real': tf.ensure_shape(tensors['real'], shape[:2]),
  }, sampled


def _change_pixels(
  image: 'tf.Tensor', seed: 'tf.Tensor', pp: ml_collections.ConfigDict
) -> 'tf.Tensor':
  """Applies the augmentations of pixels in `pp` to float32 [h, w, C]."""
  # Each augmentation has its own seed, so that none changes the others' draws.
  fold = tf.random.experimental.stateless_fold_in
  if pp.randaugment:
    layers, magnitude = pp.randaugment
    values = tf.cast(image * 127.5 + 128, tf.uint8)  # Rounded.
    values = pixel_ops.randaugment(values, fold(seed, 1), layers, magnitude)
    image = images.to_float(values)
  if pp.color_jitter:
    image = pixel_ops.color_jitter(image, fold(seed, 2), *(pp.color_jitter,) * 3)
  image = scaling.standardize(image, pp)
  if pp.random_erasing:
    image = pixel_ops.random_erasing(image, fold(seed, 3), pp.random_erasing)
  return image


def _decode(
  encoded: 'tf.Tensor',
  draw: Callable,
  pp: ml_collections.ConfigDict,
  crops: bool = True,
  upright: bool = False,
  antialias: bool | None = None,
) -> tuple['tf.Tensor', geometry.Geometry]:
  """Decodes an image and applies the geometry that `draw` chooses; returns both.

  `draw` maps the shape of the image, int32 [2], to a geometry, both of the upright
  image if `upright`. Without `crops`, the geometry has the whole image as its window.
  """
  encoded = tf.convert_to_tensor(encoded)
  antialias = pp.antialias if antialias is None else antialias
  if pp.range is not None:
    image = scaling.decode(encoded, pp, upright)
    sampled = draw(tf.shape(image)[:2])
    if crops:
      y, x, height, width = tf.unstack(sampled.window, num=4)
      image = image[y : y + height, x : x + width]
    image = geometry.fit(image, sampled, pp.interpolation, antialias, levels=False)
    return image, sampled
  turned = orientation.read(encoded) if upright else None
  shape = tf.cast(images.shape_of(encoded), tf.int32)
  sampled = draw(orientation.turn_shape(shape, turned))
  ratio = window = None  # Decodes at full size, and the whole image.
  if pp.jpeg_shrink:
    ratio = jpeg.ratio(sampled.window[2:], sampled.size)
    ratio = tf.where(tf.io.is_jpeg(encoded), ratio, 1)
  if crops:
    window = orientation.stored_window(sampled.window, sampled.shape, turned)
  if crops and ratio is not None:
    # At 1 / ratio of the size, windows begin and end at multiples of the ratio.
    window = window // ratio
    if not upright:  # Boxes and masks follow what was decoded.
      sampled = sampled._replace(window=window * ratio)
  image = images.decode_window(
    encoded, pp.channels, turned, ratio, window, exact=pp.antialias
  )
  return geometry.fit(image, sampled, pp.interpolation, antialias), sampled


@no_autograph
def for_evaluation(image: 'tf.Tensor', pp: ml_collections.ConfigDict) -> 'tf.Tensor':
  """Resizes one decoded image, [height, width, channels], as `config.pp` says.

  The image is uint8, or float32 in [-1, 1] if `pp.range` is set. Returns float32 [crop
  height, crop width, channels] in [-1, 1], or standardised by `pp.mean` and `pp.std`.
  """
  size = crop_size(pp)
  image = _resize(image, resized_to(tf.shape(image)[:2], pp), pp)
  if pp.resize is not None:
    image = resizing.crop_centre(image, size, pp.crop_rounding)
  image = scaling.standardize(image, pp)
  return tf.ensure_shape(image, [*size, pp.channels])


def _resize(
  image: 'tf.Tensor', size: 'tf.Tensor', pp: ml_collections.ConfigDict
) -> 'tf.Tensor':
  """Resizes a decoded image for evaluation; returns float32 [*size, channels]."""
  levels = pp.range is None
  image = images.to_float(image) if levels else image
  return resizing.resize(image, size, pp.interpolation, pp.antialias, levels)


def resized_to(shape: 'tf.Tensor', pp: ml_collections.ConfigDict) -> 'tf.Tensor':
  """Returns the size of an image in evaluation before its centre is cropped.

  `shape` is height and width, int [2]. Returns int32 [2].
  """
  if pp.resize is None:
    return tf.constant(crop_size(pp))
  if not isinstance(pp.resize, int):
    size = tf.constant(tuple(pp.resize))
    return resizing.covering(shape, size) if pp.resize_mode == 'cover' else size
  return resizing.by_short_side(shape, pp.resize, truncate=pp.antialias)


@dataclasses.dataclass(frozen=True)
class PreprocessImages:
  """Resizes decoded images to squares of `size` pixels and scales them to [-1, 1].

  Computes the same as the original's class of this name. With `crop`, the short side
  is resized to `size` and the centre is cropped; else the whole image is resized.
  """

  size: int
  crop: bool = False

  def preprocess_tf(self, image: 'tf.Tensor') -> 'tf.Tensor':
    """Maps an image, uint8 [height, width, C], to float32 [size, size, C].

    ValueError if the image is not uint8.
    """
    if image.dtype != tf.uint8:
      raise ValueError(f'image is {image.dtype.name}: pass uint8, from 0 to 255')
    size = (self.size, self.size)
    target = size
    if self.crop:
      target = resizing.by_short_side(tf.shape(image)[:2], self.size)
    image = tf.image.resize(image, target)
    if self.crop:
      image = resizing.crop_centre(image, size)
    return images.to_float(tf.cast(image, tf.uint8))

  def __call__(self, images: Sequence[Any]) -> np.ndarray:
    """Maps a sequence of images to NumPy's float32 [n, size, size, C]."""
    return np.stack([self.preprocess_tf(tf.constant(x)) for x in images])


def get_pp(
  *,
  tokenizer_name: str,
  vocab_path: str,
  max_len: int,
  size: int,
  crop: bool = False,
) -> Callable[[dict[str, Any]], dict[str, Any]]:
  """Returns a function that prepares images and texts, for tf.data.Dataset.map.

  It takes a dict of tensors and returns a new one. `image`, uint8 [height, width,
  C], becomes float32 [size, size, C] in [-1, 1]; for `size` and `crop` see
  PreprocessImages. For `text`, a string scalar, `tokens`, int32 [max_len], is added;
  for `tokenizer_name`, `vocab_path` and errors see vit_jax/data/texts/tokenizers.py.
  Both are optional, and other features are passed through.
  """
  tokenizer = get_tokenizer(tokenizer_name)(vocab_path, max_len)
  preprocess_images = PreprocessImages(size, crop)

  @no_autograph
  def pp(features: dict[str, Any]) -> dict[str, Any]:
    features = dict(features)
    if 'image' in features:
      features['image'] = preprocess_images.preprocess_tf(features['image'])
    if 'text' in features:
      features['tokens'] = tokenizer.preprocess_tf(features['text'])
    return features

  return pp


@no_autograph
def prepare(
  encoded: 'tf.Tensor',
  seed: 'tf.Tensor | None',
  pp: ml_collections.ConfigDict,
  upright: bool = True,
) -> 'tf.Tensor':
  """Decodes one image and prepares it for training or evaluation.

  `encoded` is the contents of an image file, a string scalar, and `seed` int64 [2] in
  training, None in evaluation. `upright` applies the EXIF orientation. Returns float32
  [crop height, crop width, channels] in [-1, 1], or standardised by `pp.mean` and `pp.std`.
  """
  if seed is not None:
    return decode_with_geometry(encoded, seed, pp, upright=upright)[0]
  size = pp.resize or pp.crop
  size = (size, size) if isinstance(size, int) else size
  return for_evaluation(_decode_whole(encoded, size, pp, upright), pp)


@no_autograph
def at_sizes(
  encoded: 'tf.Tensor',
  sizes: Sequence[Any],
  pp: ml_collections.ConfigDict,
  upright: bool = True,
) -> list['tf.Tensor']:
  """Decodes one image for evaluation and resizes it to each of some sizes.

  Sizes are (height, width), int32 [2]. Returns float32 [*size, channels] for each, scaled as
  by `prepare`, which describes the other arguments.
  """
  largest = tf.reduce_max(tf.stack(sizes), axis=0)
  decoded = _decode_whole(encoded, largest, pp, upright)
  resized = (_resize(decoded, size, pp) for size in sizes)
  return [scaling.standardize(image, pp) for image in resized]


def _decode_whole(
  encoded: 'tf.Tensor',
  size: Any,
  pp: ml_collections.ConfigDict,
  upright: bool,
) -> 'tf.Tensor':
  """Decodes an image that will be resized to at most `size`, (height, width)."""
  if pp.range is not None:
    return scaling.decode(encoded, pp, upright)
  size = size if pp.jpeg_shrink else None
  return images.decode(encoded, pp.channels, size, upright, exact=pp.antialias)


def from_user(
  image: Any,
  function: Callable[[bytes], Any],
  max_pixels: int | None = None,
  channels: int | None = None,
) -> Any:
  """Returns the result of a function of the encoded bytes of an image in any form.

  Args:
    image: a path, the content of a file (bytes, io.BytesIO or a file opened with
      'rb'), a PIL image, an array (of NumPy, JAX, TensorFlow or PyTorch) uint8
      [height, width] or [height, width, 1, 3 or 4], or a PyTorch tensor uint8
      [1, 3 or 4, height, width], as torchvision reads images.
    function: function of the contents of an image file.
    max_pixels: files with more pixels are rejected before decoding; None: no
      limit.
    channels: number of channels of images with a range of values (`config.pp.range`),
      whose arrays, [height, width] or [height, width, channels], and PIL images of the
      modes 'I' and 'F' keep their values; None: 8-bit colour.

  Raises:
    OSError: if the file does not exist or cannot be read.
    ValueError: if the file is not an image or has too many pixels, the array has
      another shape or type, or the PIL image has the mode 'I' or 'F'.
  """
  name = 'image'
  is_pillow = isinstance(image, Image.Image)
  has_values = image.mode[0] in 'IF' if is_pillow else hasattr(image, '__array__')
  if channels is not None and has_values:
    image = _as_npy(image, channels)
    max_pixels = None
  if isinstance(image, io.BytesIO):
    image = image.getvalue()
  elif isinstance(image, io.BufferedIOBase):
    image.seek(0)
    image = image.read()
  if hasattr(image, '__array__') and not isinstance(image, Image.Image):
    image = _to_pillow(_channels_last(image))
  if isinstance(image, Image.Image):
    image = images.encode_png(rgb.to_rgb(ImageOps.exif_transpose(image)), 0)
    max_pixels = None
  if not isinstance(image, (str, bytes, os.PathLike)):
    raise ValueError(
      f'image has the type {type(image).__name__}: pass a path, an open file or its '
      'bytes, a PIL image or an array uint8 [height, width(, channels)]'
    )
  if not isinstance(image, bytes):
    name = image_files.display(image)
    image = image_files.read_file(image)
  try:
    if max_pixels is None:
      return function(image)
    height, width = images.shape_of(image).numpy()
    if height * width <= max_pixels:
      return function(image)
  except images.decode_errors() as e:
    raise ValueError(
      f"'{name}' is not an image that can be read: {image_files.first_line(e)}"
    ) from None
  raise ValueError(
    f"'{name}' has {width} x {height} pixels, more than max_image_pixels={max_pixels}: "
    'make it smaller, or pass a larger max_image_pixels (--max_image_pixels)'
  )


def _as_npy(image: Any, channels: int) -> bytes:
  """Returns an array or a PIL image as the content of a .npy file."""
  if isinstance(image, Image.Image):
    array = np.asarray(ImageOps.exif_transpose(image))
  else:
    array = _channels_last(image, (channels,))
  file = io.BytesIO()
  np.save(file, array, allow_pickle=False)
  return file.getvalue()


def _channels_last(image: Any, numbers: Sequence[int] = (1, 3, 4)) -> np.ndarray:
  """Returns an array as NumPy's; PyTorch's channels move from the first axis to the last.

  These axes are as long as one of `numbers`.
  """
  is_torch = type(image).__module__.partition('.')[0] == 'torch'
  array = np.asarray(image.cpu() if is_torch else image)
  if is_torch and array.ndim == 3 and array.shape[0] in numbers:
    return np.moveaxis(array, 0, -1)
  return array


def _to_pillow(image: np.ndarray) -> Image.Image:
  shape = image.shape if image.ndim == 3 else (*image.shape, 1)
  fits = len(shape) == 3 and shape[2] in (1, 3, 4)
  if not fits or not image.size or image.dtype != np.uint8:
    raise ValueError(
      f'image is an array {image.dtype}{list(image.shape)}: pass uint8 [height, '
      'width] or [height, width, 1, 3 or 4], with values 0 to 255, and a batch as a '
      'list of images'
    )
  return Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image)
