"""Random augmentation of an image's pixels: RandAugment, colours, erasing.

All functions run in TensorFlow on one image of 3 channels or 1, and a seed, int64 [2],
determines their random numbers. Images are uint8 for RandAugment, whose operations are
defined on 256 values, and float32 in [-1, 1] for the others.
"""

from collections.abc import Callable, Iterable
import functools
import math
from typing import Any

from vit_jax.data.augmentation import geometry
from vit_jax.data.images import images
from vit_jax.data.lazy import tf

_FILL = 128  # The grey of pixels from outside and of cut-out squares.
_ATTEMPTS = 10  # Rectangles that random erasing draws before it gives up.


# --- The operations of RandAugment, each on uint8 [h, w, C] -------------------


def autocontrast(image: 'tf.Tensor') -> 'tf.Tensor':
  """Stretches each channel to 0..255, as PIL.ImageOps.autocontrast does."""
  low = tf.cast(tf.reduce_min(image, [0, 1]), tf.float64)[:, None]  # [C, 1]
  high = tf.cast(tf.reduce_max(image, [0, 1]), tf.float64)[:, None]
  values = tf.range(256, dtype=tf.float64)
  scale = 255 / tf.maximum(high - low, 1)
  table = tf.clip_by_value(values * scale - low * scale, 0, 255)  # [C, 256]
  return _look_up(tf.where(high > low, table, values), _index(image), image)


def equalize(image: 'tf.Tensor') -> 'tf.Tensor':
  """Spreads the values of each channel evenly, as PIL.ImageOps.equalize."""
  index = _index(image)
  channels = image.shape[2]
  counts = tf.math.bincount(index, minlength=256 * channels)
  counts = tf.reshape(counts, [channels, 256])
  brightest = tf.cast(tf.reduce_max(image, [0, 1]), tf.int32)  # [C]
  brightest = tf.gather(counts, brightest, batch_dims=1)[:, None]  # How often.
  step = (tf.reduce_sum(counts, 1, keepdims=True) - brightest) // 255  # [C, 1]
  below = tf.cumsum(counts, axis=1, exclusive=True)
  table = tf.minimum((below + step // 2) // tf.maximum(step, 1), 255)
  return _look_up(tf.where(step > 0, table, tf.range(256)), index, image)


def _index(image: 'tf.Tensor') -> 'tf.Tensor':
  """Returns the place of each value in a table [C, 256]: int32 [h, w * C]."""
  # Each row of pixels is flattened: TensorFlow is slow on dimensions of size 3.
  height, width, channels = image.shape
  values = tf.cast(tf.reshape(image, [height, width * channels]), tf.int32)
  return values + tf.tile(tf.range(channels) * 256, [width])


def _look_up(table: 'tf.Tensor', index: 'tf.Tensor', image: 'tf.Tensor') -> 'tf.Tensor':
  table = tf.cast(tf.reshape(table, [-1]), tf.uint8)
  return tf.reshape(tf.gather(table, index), image.shape)


def invert(image: 'tf.Tensor') -> 'tf.Tensor':
  """Makes a negative: PIL.ImageOps.invert."""
  return tf.bitwise.invert(image)


def posterize(image: 'tf.Tensor', bits: int) -> 'tf.Tensor':
  """Keeps the highest `bits` (1 to 8) of each value: PIL.ImageOps.posterize."""
  return tf.bitwise.bitwise_and(image, tf.constant(256 - 2 ** (8 - bits), 'uint8'))


def solarize(image: 'tf.Tensor', threshold: int) -> 'tf.Tensor':
  """Inverts values of `threshold` (0 to 255) or more: PIL.ImageOps.solarize."""
  bright = tf.cast(image >= threshold, tf.uint8)
  return tf.bitwise.bitwise_xor(image, 255 * bright)


def solarize_add(image: 'tf.Tensor', addition: int) -> 'tf.Tensor':
  """Adds `addition` to values below 128, up to 255."""
  dark = tf.cast(image < 128, tf.uint8)
  return image + dark * tf.minimum(255 - image, min(addition, 255))


def color(image: 'tf.Tensor', factor: float) -> 'tf.Tensor':
  """Blends with the grey image, as PIL.ImageEnhance.Color does."""
  if image.shape[-1] == 1:
    return tf.identity(image)
  return _blend(tf.cast(images.to_grey(image), tf.float32), image, factor)


def contrast(image: 'tf.Tensor', factor: float) -> 'tf.Tensor':
  """Blends with the grey min(255, h * w // 256), see `randaugment`."""
  height, width, _ = image.shape
  return _blend(float(min(255, height * width // 256)), image, factor)


def brightness(image: 'tf.Tensor', factor: float) -> 'tf.Tensor':
  """Multiplies by `factor`, up to 255, as PIL.ImageEnhance.Brightness does."""
  return _blend(0.0, image, factor)


def sharpness(image: 'tf.Tensor', factor: float) -> 'tf.Tensor':
  """Blends with a smoothed image, as PIL.ImageEnhance.Sharpness does.

  Each pixel, except the outermost, becomes the mean of 3 x 3 pixels, with a weight of
  5 for the centre.
  """
  if min(image.shape[:2]) < 3:
    return image
  values = tf.cast(image, tf.int32)
  rows = values[:-2] + values[1:-1] + values[2:]
  box = rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]
  inner = values[1:-1, 1:-1]
  smooth = (box + 4 * inner + 6) // 13  # Rounded to the nearest.
  blended = _blend(tf.cast(smooth, tf.float32), image[1:-1, 1:-1], factor)
  middle = tf.concat([image[1:-1, :1], blended, image[1:-1, -1:]], axis=1)
  return tf.concat([image[:1], middle, image[-1:]], axis=0)


def _blend(start: Any, image: 'tf.Tensor', factor: Any) -> 'tf.Tensor':
  """Interpolates (or extrapolates) from `start` (float32) to `image`."""
  values = start + factor * (tf.cast(image, tf.float32) - start)
  return tf.cast(tf.clip_by_value(values, 0.0, 255.0), tf.uint8)


def rotate(image: 'tf.Tensor', degrees: 'tf.Tensor') -> 'tf.Tensor':
  """Rotates about the centre, counter-clockwise."""
  angle = degrees * (math.pi / 180)
  return _move(image, geometry.rotation(angle, *image.shape[:2]))


def _mover(position: int) -> Callable[['tf.Tensor', Any], 'tf.Tensor']:
  """Makes a function (image, value) that sets one value of the transform."""
  identity = [1, 0, 0, 0, 1, 0, 0, 0]

  def move(image: 'tf.Tensor', value: Any) -> 'tf.Tensor':
    transform: list[Any] = list(identity)
    transform[position] = value
    return _move(image, tf.stack(transform))

  return move


shear_x = _mover(1)  # Takes row y from x + level y: lower rows move left.
shear_y = _mover(3)  # Takes column x from y + level x.
translate_x, translate_y = _mover(2), _mover(5)  # To the left, and up.


def _move(image: 'tf.Tensor', transform: 'tf.Tensor') -> 'tf.Tensor':
  """Applies `transform` [8] with nearest-neighbour interpolation."""
  return tf.raw_ops.ImageProjectiveTransformV3(
    images=image[None],
    transforms=transform[None],
    output_shape=image.shape[:2],
    interpolation='NEAREST',
    fill_mode='CONSTANT',
    fill_value=float(_FILL),
  )[0]


def cutout(image: 'tf.Tensor', seed: 'tf.Tensor', half: int) -> 'tf.Tensor':
  """Fills a square of side 2 `half` about a random pixel (arXiv 1708.04552)."""
  size = tf.constant([*image.shape[:2]], tf.float32)
  middle = tf.floor(tf.random.stateless_uniform([2], seed) * size)
  hole = _rectangle(image, middle - half, [2 * half, 2 * half])
  hole = tf.cast(hole, tf.uint8)
  return image * (1 - hole) + _FILL * hole


def _rectangle(image: 'tf.Tensor', begin: 'tf.Tensor', extent: Any) -> 'tf.Tensor':
  """Returns bool [h, w, C], True in a rectangle; (y, x) are whole floats."""
  height, width, channels = image.shape
  y = tf.range(height, dtype=tf.float32) - begin[0]
  x = tf.repeat(tf.range(width, dtype=tf.float32), channels) - begin[1]
  rows = (y >= 0) & (y < extent[0])
  columns = (x >= 0) & (x < extent[1])
  return tf.reshape(rows[:, None] & columns, image.shape)


# --- RandAugment --------------------------------------------------------------


# Function of (image, magnitude, seed).
Operation = Callable[['tf.Tensor', int, 'tf.Tensor'], 'tf.Tensor']


def _posterize_bits(magnitude: int) -> int:
  # big_vision shifts in uint8, by 7 bits at most: 0 bits mean 1, and so do more
  # than 8 bits, for which the shift is negative and wraps round.
  return 8 - min((8 - int(magnitude / 10 * 4)) % 256, 7)


def _factor(magnitude: int) -> float:
  return magnitude / 10 * 1.8 + 0.1  # .1 at magnitude 0, 1 at 5, 1.9 at 10.


def _by(function: Callable, level: Callable[[int], Any]) -> Operation:
  """Makes an operation that takes level(magnitude) as its argument."""

  def apply(image: 'tf.Tensor', magnitude: int, seed: 'tf.Tensor') -> 'tf.Tensor':
    return function(image, level(magnitude))

  return apply


def _either_way(function: Callable, unit: float) -> Operation:
  """Makes an operation by `unit` times the magnitude, with a random sign."""

  def apply(image: 'tf.Tensor', magnitude: int, seed: 'tf.Tensor') -> 'tf.Tensor':
    sign = tf.random.stateless_uniform([], seed, 0, 2, tf.int32) * 2 - 1
    return function(image, tf.cast(sign, tf.float32) * (unit * magnitude))

  return apply


# In the order of their numbers.
OPERATIONS: dict[str, Operation] = {
  'AutoContrast': lambda image, magnitude, seed: autocontrast(image),
  'Equalize': lambda image, magnitude, seed: equalize(image),
  'Invert': lambda image, magnitude, seed: invert(image),
  'Rotate': _either_way(rotate, 3.0),
  'Posterize': _by(posterize, _posterize_bits),
  'Solarize': _by(solarize, lambda magnitude: int(magnitude / 10 * 256) % 256),
  'Color': _by(color, _factor),
  'Contrast': _by(contrast, _factor),
  'Brightness': _by(brightness, _factor),
  'Sharpness': _by(sharpness, _factor),
  'ShearX': _either_way(shear_x, 0.03),
  'ShearY': _either_way(shear_y, 0.03),
  'TranslateX': _either_way(translate_x, 10.0),
  'TranslateY': _either_way(translate_y, 10.0),
  'Cutout': lambda image, magnitude, seed: cutout(image, seed, 4 * magnitude),
  'SolarizeAdd': _by(solarize_add, lambda magnitude: 11 * magnitude),
}


def randaugment(
  image: 'tf.Tensor', seed: 'tf.Tensor', layers: int, magnitude: int
) -> 'tf.Tensor':
  """Applies RandAugment as in the training of the ViTs of arXiv 2106.10270.

  Each layer applies one of the 16 OPERATIONS, all equally likely (arXiv
  1909.13719, as in big_vision's pp/autoaugment.py). At magnitude m: rotate by
  3m degrees, shear by .03m, translate by 10m pixels, each with a random sign;
  posterize to int(.4m) bits; solarize from int(25.6m) on; solarize-add 11m;
  colour, contrast, brightness and sharpness by the factor .18m + .1; cutout of
  a square whose half side is 4m pixels. Pixels from outside become 128.

  Some details are surprising. They are kept from big_vision, since the
  published settings were chosen with them:

  - The chosen operation is always applied.
  - Magnitude 0 is not the identity: it inverts, equalises, leaves a tenth of
    colour, contrast, brightness and sharpness, and solarizes from 0 on.
  - Lengths in pixels do not scale with the image. They suit images of 224
    pixels; an image of 32 pixels can be moved out of view.
  - Contrast blends not with the mean of the image but with its number of pixels
    / 256, at most 255.
  - Solarize takes its threshold as uint8: m=10 and m=20 mean 0, which inverts
    the image, and m=15 means 128.
  - Posterize keeps one bit where it should keep none (m < 3), and also where it
    should keep more than 8 (m > 22).

  Values are rounded as in Pillow, so that colour and sharpness can differ by 1
  from big_vision. `image` is uint8 [h, w, C] of known shape, and `magnitude` from
  0 to 30.
  """
  for layer in range(layers):
    seeds = tf.random.experimental.stateless_fold_in(seed, layer)
    seeds = tf.random.experimental.stateless_split(seeds, 2)
    number = tf.random.stateless_uniform([], seeds[0], 0, len(OPERATIONS), tf.int32)
    changed = _choose(number, OPERATIONS.values(), image, magnitude, seeds[1])
    image = tf.ensure_shape(changed, image.shape)
  return image


def _choose(
  number: 'tf.Tensor', functions: Iterable[Callable], *args: Any
) -> 'tf.Tensor':
  """Calls function `number` of the functions."""
  return tf.switch_case(number, [functools.partial(f, *args) for f in functions])


# --- Colours and holes, on float32 [h, w, C] in [-1, 1] -----------------------


def color_jitter(
  image: 'tf.Tensor',
  seed: 'tf.Tensor',
  brightness: float,
  contrast: float,
  saturation: float,
) -> 'tf.Tensor':
  """Changes brightness, contrast and saturation, in random order.

  The strengths are defined as in torchvision's ColorJitter: each factor is uniform in
  [max(0, 1 - strength), 1 + strength]. Brightness blends with black, contrast with the
  mean of the grey image, and saturation with the grey image; the factor is the share
  of the image, and results are clipped.
  """
  seeds = tf.random.experimental.stateless_split(seed, 4)  # [4, 2]
  changes = (
    (_black, brightness, seeds[0]),
    (_mean_grey, contrast, seeds[1]),
    (_grey, saturation, seeds[2]),
  )
  steps = []
  for start, strength, factor_seed in changes:
    if strength:
      low = max(0.0, 1.0 - strength)
      high = 1.0 + strength
      factor = tf.random.stateless_uniform([], factor_seed, low, high)
      steps.append(functools.partial(_towards, start, factor))
  order = tf.random.experimental.stateless_shuffle(tf.range(len(steps)), seeds[3])
  for turn in range(len(steps)):
    image = _choose(order[turn], steps, image)
  return image


def _black(image: 'tf.Tensor') -> float:
  return -1.0


def _mean_grey(image: 'tf.Tensor') -> 'tf.Tensor':
  return tf.reduce_mean(_grey(image))


def _towards(
  start: Callable[['tf.Tensor'], Any], factor: 'tf.Tensor', image: 'tf.Tensor'
) -> 'tf.Tensor':
  """Interpolates (or extrapolates) from start(image) to the image."""
  values = start(image)
  return tf.clip_by_value(values + factor * (image - values), -1.0, 1.0)


def _grey(image: 'tf.Tensor') -> 'tf.Tensor':
  """Returns the luma of ITU-R 601, float32 [h, w, 1]."""
  if image.shape[-1] == 1:
    return image
  return tf.tensordot(image, tf.constant([0.299, 0.587, 0.114]), 1)[..., None]


def random_erasing(
  image: 'tf.Tensor',
  seed: 'tf.Tensor',
  probability: float,
  area: tuple[float, float] = (0.02, 1 / 3),
  ratio: tuple[float, float] = (0.3, 3.3),
) -> 'tf.Tensor':
  """Erases a random rectangle that lies within the image.

  Random Erasing (arXiv 1708.04896), with the defaults of torchvision and timm.
  As in these, the logarithm of the aspect ratio is uniform (in the paper the
  ratio is), and the position is drawn after a size that fits. Erased pixels become
  0 (in the paper noise). `area` is the least and greatest share of the image's area,
  and `ratio` of the rectangle's height / width.
  """
  seeds = tf.random.experimental.stateless_split(seed, 4)  # [4, 2]
  size = tf.constant([*image.shape[:2]], tf.float32)
  areas = tf.random.stateless_uniform([_ATTEMPTS], seeds[0], *area)
  limits = math.log(ratio[0]), math.log(ratio[1])
  ratios = tf.exp(tf.random.stateless_uniform([_ATTEMPTS], seeds[1], *limits))
  areas *= size[0] * size[1]
  sizes = tf.stack([tf.sqrt(areas * ratios), tf.sqrt(areas / ratios)], axis=1)
  sizes = tf.round(sizes)  # [_ATTEMPTS, (height, width)]
  fits = tf.reduce_all(sizes <= size, axis=1)
  extent = sizes[tf.argmax(tf.cast(fits, tf.int32))]  # The first that fits.
  u = tf.random.stateless_uniform([3], seeds[2])
  erased = (u[0] < probability) & tf.reduce_any(fits)
  extent = tf.where(erased, extent, 0.0)
  begin = tf.floor(u[1:] * (size - extent + 1))
  return image * (1 - tf.cast(_rectangle(image, begin, extent), tf.float32))
