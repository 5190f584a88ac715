"""Tests of RandAugment against Pillow, of colour jitter and erasing in closed form."""

import io
import itertools

import numpy as np
from PIL import Image, ImageEnhance, ImageOps
import pytest
from scipy import stats
import tensorflow as tf

from vit_jax import preprocess
from vit_jax.configs import common
from vit_jax.data.augmentation import pixel_ops
from vit_jax.data.images import images


def picture(height=60, width=80, seed=0):
  """A smooth colour picture with a little noise, uint8 [height, width, 3]."""
  rng = np.random.RandomState(seed)
  small = Image.fromarray(rng.randint(0, 256, (6, 8, 3), np.uint8))
  large = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))
  noise = rng.randint(-9, 10, large.shape)
  return np.clip(large + noise, 10, 240).astype(np.uint8)


IMAGE = picture()
PIL = Image.fromarray(IMAGE)
FACTORS = (0.1, 1.0, 5.5)


def seed(number):
  return tf.constant((3, number), tf.int64)


def many(function, count, dtype=tf.float32):
  """Returns a function's values for the seeds 0 to `count` - 1, in one batch."""
  seeds = tf.constant([(3, number) for number in range(count)], tf.int64)
  return tf.function(lambda seeds: tf.map_fn(function, seeds, dtype))(seeds).numpy()


def pp(**kwargs):
  config = common.get_config().pp
  config.update(kwargs)
  return config


@pytest.mark.parametrize('name', ['autocontrast', 'equalize'])
def test_histogram_operations_match_pillow(name):
  for image in (
    IMAGE,
    np.full((20, 20, 3), 77, np.uint8),  # Nothing to stretch.
    np.arange(3 * 7 * 9, dtype=np.uint8).reshape(7, 9, 3),  # Few of each value.
    np.where(np.arange(600).reshape(20, 10, 3) < 598, 5, 9).astype(np.uint8),
    np.minimum(picture(), 40),  # Many pixels are the brightest.
  ):
    want = getattr(ImageOps, name)(Image.fromarray(image))
    np.testing.assert_array_equal(getattr(pixel_ops, name)(image), want)


@pytest.mark.parametrize('name, arguments', [
  ('invert', [()]),
  ('posterize', [(bits,) for bits in (1, 4, 8)]),
  ('solarize', [(threshold,) for threshold in (0, 1, 128, 255)]),
])  # fmt: skip
def test_point_operations_match_pillow(name, arguments):
  for args in arguments:
    want = getattr(ImageOps, name)(PIL, *args)
    np.testing.assert_array_equal(getattr(pixel_ops, name)(IMAGE, *args), want)


@pytest.mark.parametrize('addition', [0, 110, 330])
def test_solarize_add_in_closed_form(addition):
  wide = IMAGE.astype(int)
  want = np.where(wide < 128, np.minimum(wide + addition, 255), wide)
  np.testing.assert_array_equal(pixel_ops.solarize_add(IMAGE, addition), want)


@pytest.mark.parametrize('name', ['color', 'brightness', 'sharpness'])
def test_enhancements_match_pillow(name):
  enhance = getattr(ImageEnhance, name.capitalize())(PIL).enhance
  for factor in FACTORS:
    got = getattr(pixel_ops, name)(IMAGE, factor)
    np.testing.assert_array_equal(got, enhance(factor))


@pytest.mark.parametrize('shape, grey', [((224, 224), 196), ((60, 80), 18)])
def test_contrast_blends_with_a_grey_that_depends_on_the_size(shape, grey):
  image = picture(*shape)
  flat = Image.new('RGB', shape[::-1], (grey,) * 3)
  for factor in FACTORS:
    want = Image.blend(flat, Image.fromarray(image), factor)
    np.testing.assert_array_equal(pixel_ops.contrast(image, factor), want)


@pytest.mark.parametrize('degrees', [-60.0, -7.0, 45.0])
def test_rotate_matches_pillow(degrees):
  want = np.asarray(PIL.rotate(degrees, fillcolor=(128,) * 3))
  got = pixel_ops.rotate(IMAGE, degrees).numpy()
  # Either pixel may be taken at a position halfway between two.
  assert (got != want).any(-1).mean() < 0.02
  if abs(degrees) > 10:
    assert got[0, 0].tolist() == [128] * 3


@pytest.mark.parametrize('level', [-0.3123, 0.4567])
def test_shears_match_pillow(level):
  for function, data in (
    # Pillow measures from the edge of the image, not the centre of a pixel.
    (pixel_ops.shear_x, (1, level, -level / 2, 0, 1, 0)),
    (pixel_ops.shear_y, (1, 0, 0, level, 1, -level / 2)),
  ):
    want = PIL.transform(PIL.size, Image.Transform.AFFINE, data, fillcolor=(128,) * 3)
    np.testing.assert_array_equal(function(IMAGE, level), want)


@pytest.mark.parametrize('shift', [-50.0, 0.0, 150.0])
def test_translations_in_closed_form(shift):
  padded = np.pad(IMAGE, ((200, 200), (200, 200), (0, 0)), constant_values=128)
  begin = 200 + int(shift)
  for function, want in (
    (pixel_ops.translate_x, padded[200:260, begin : begin + 80]),
    (pixel_ops.translate_y, padded[begin : begin + 60, 200:280]),
  ):
    np.testing.assert_array_equal(function(IMAGE, shift), want)


def test_cutout_is_a_square_around_any_pixel():
  black = np.zeros((6, 8, 3), np.uint8)
  seen = set()
  for holes in many(lambda s: pixel_ops.cutout(black, s, 2), 400, tf.uint8):
    assert (holes == holes[..., :1]).all()
    assert set(np.unique(holes)) <= {0, 128}
    y, x = np.nonzero(holes[..., 0])
    box = (y.min(), x.min(), y.max() + 1, x.max() + 1)
    assert len(y) == (box[2] - box[0]) * (box[3] - box[1])
    seen.add(tuple(int(v) for v in box))
  # Every pixel of the image was the centre once, including the first and the last.
  assert seen == {
    (max(0, y - 2), max(0, x - 2), min(6, y + 2), min(8, x + 2))
    for y in range(6)
    for x in range(8)
  }
  np.testing.assert_array_equal(pixel_ops.cutout(IMAGE, seed(0), 0), IMAGE)


@pytest.mark.parametrize('name', pixel_ops.OPERATIONS)
def test_grey_images_match_colour_images_with_equal_channels(name):
  grey = IMAGE[..., :1]
  operation = pixel_ops.OPERATIONS[name]
  one = operation(grey, 7, seed(1)).numpy()
  three = operation(np.repeat(grey, 3, 2), 7, seed(1)).numpy()
  assert one.shape == grey.shape
  for channel in range(3):
    np.testing.assert_array_equal(three[..., channel], one[..., 0])


# Operations of arXiv 2106.10270's code at some magnitudes. Thresholds and shifts are
# int(25.6m) and int(.4m) in its uint8 arithmetic.
ONE_WAY = {
  'AutoContrast': (pixel_ops.autocontrast, {0: (), 10: (), 15: ()}),
  'Equalize': (pixel_ops.equalize, {0: (), 10: (), 15: ()}),
  'Invert': (pixel_ops.invert, {0: (), 10: (), 15: ()}),
  'Posterize': (
    pixel_ops.posterize,
    {0: 1, 2: 1, 5: 2, 10: 4, 15: 6, 20: 8, 22: 8, 23: 1, 30: 1},
  ),
  'Solarize': (
    pixel_ops.solarize, {0: 0, 5: 128, 9: 230, 10: 0, 15: 128, 20: 0},
  ),
  'SolarizeAdd': (pixel_ops.solarize_add, {0: 0, 10: 110, 15: 165, 20: 220}),
  'Color': (pixel_ops.color, {0: 0.1, 5: 1, 10: 1.9, 15: 2.8, 20: 3.7}),
  'Contrast': (pixel_ops.contrast, {0: 0.1, 5: 1, 10: 1.9, 15: 2.8, 20: 3.7}),
  'Brightness': (pixel_ops.brightness, {0: 0.1, 5: 1, 10: 1.9, 15: 2.8, 20: 3.7}),
  'Sharpness': (pixel_ops.sharpness, {0: 0.1, 5: 1, 10: 1.9, 15: 2.8, 20: 3.7}),
}  # fmt: skip
EITHER_WAY = {
  'Rotate': (pixel_ops.rotate, {0: 0.0, 10: 30.0, 15: 45.0, 20: 60.0}),
  'ShearX': (pixel_ops.shear_x, {0: 0.0, 10: 0.3, 15: 0.45, 20: 0.6}),
  'ShearY': (pixel_ops.shear_y, {0: 0.0, 10: 0.3, 15: 0.45, 20: 0.6}),
  'TranslateX': (pixel_ops.translate_x, {0: 0.0, 2: 20.0, 5: 50.0}),
  'TranslateY': (pixel_ops.translate_y, {0: 0.0, 2: 20.0, 5: 50.0}),
}


@pytest.mark.parametrize('name', ONE_WAY)
def test_magnitudes(name):
  function, arguments = ONE_WAY[name]
  for magnitude, argument in arguments.items():
    got = pixel_ops.OPERATIONS[name](IMAGE, magnitude, seed(0)).numpy()
    args = argument if isinstance(argument, tuple) else (argument,)
    # A factor may differ in its last bit, and so may the rounded pixels.
    want = function(IMAGE, *args).numpy().astype(int)
    assert np.abs(got - want).max() <= isinstance(argument, float)


@pytest.mark.parametrize('name', EITHER_WAY)
def test_magnitudes_in_either_direction(name):
  function, arguments = EITHER_WAY[name]
  operation = pixel_ops.OPERATIONS[name]
  for magnitude, argument in arguments.items():
    ways = [function(IMAGE, way * argument).numpy() for way in (1, -1)]
    got = operation(IMAGE, magnitude, seed(0))
    same = [(got != way).numpy().any(-1).mean() < 0.02 for way in ways]
    assert sum(same) == (1 if argument else 2)
  drawn = many(lambda s: operation(IMAGE, magnitude, s), 40, tf.uint8)
  counts = [((drawn != way).any(-1).mean((1, 2)) < 0.02).sum() for way in ways]
  assert sum(counts) == 40
  assert min(counts) >= 10


def test_cutout_magnitudes():
  image = np.zeros((400, 400, 1), np.uint8)
  for magnitude, side in {0: 0, 1: 8, 10: 80, 15: 120}.items():
    for number in range(100):
      hole = pixel_ops.OPERATIONS['Cutout'](image, magnitude, seed(number))
      hole = hole.numpy()[..., 0] > 0
      if not (hole[0].any() | hole[-1].any() | hole[:, [0, -1]].any()):
        break
    assert hole.sum() == side**2


def test_all_operations_are_equally_likely(monkeypatch):
  marks = {
    str(i): lambda image, magnitude, seed, i=i: image * 16 + i for i in range(16)
  }
  monkeypatch.setattr(pixel_ops, 'OPERATIONS', marks)
  black = tf.zeros([1, 1, 1], tf.uint8)
  drawn = many(lambda s: pixel_ops.randaugment(black, s, 2, 5), 2000, tf.uint8)
  first, second = drawn.flatten() // 16, drawn.flatten() % 16
  for numbers in (first, second, (second - first) % 16):
    assert stats.chisquare(np.bincount(numbers, minlength=16)).pvalue > 0.001


# --- Colours ------------------------------------------------------------------


def towards(start, image, factor):
  return np.clip(start + factor * (image - start), -1, 1)


def luma(image):
  return (image @ [0.299, 0.587, 0.114])[..., None]


STEPS = [
  lambda image, factor: np.clip((image + 1) * factor - 1, -1, 1),
  lambda image, factor: towards(luma(image).mean(), image, factor),
  lambda image, factor: towards(luma(image), image, factor),
]


def jitter_factors(strength, count):
  """Recovers factors [count, 3] of brightness, contrast, saturation from pixels."""
  # All values are near the middle, so that nothing is clipped; black is -1.
  image = np.array([[[-0.2, 0.0, 0.1], [0.05, 0.2, -0.1]]], np.float32)
  factors = []
  for i in range(3):
    strengths = [0.0] * 3
    strengths[i] = strength
    out = many(
      lambda s, strengths=strengths: pixel_ops.color_jitter(image, s, *strengths),
      count,
    )
    factor = (out[:, 0, 0, 2] - out[:, 0, 0, 0]) / 0.3
    want = STEPS[i](image, factor[:, None, None, None])
    np.testing.assert_allclose(out, want, atol=1e-5)
    factors.append(factor)
  return np.transpose(factors)


def test_jitter_factors_are_uniform_and_order_is_random():
  image = (picture(6, 8) / 127.5 - 1).astype(np.float32)
  factors = jitter_factors(0.8, 200)
  for row in factors.T:
    assert stats.kstest(row, stats.uniform(0.2, 1.6).cdf).pvalue > 0.01
  assert np.abs(np.corrcoef(factors.T) - np.eye(3)).max() < 0.25
  jittered = many(lambda s: pixel_ops.color_jitter(image, s, 0.8, 0.8, 0.8), 60)
  orders = list(itertools.permutations(range(3)))
  counts = np.zeros(6, int)
  for got, row in zip(jittered, factors):
    errors = []
    for order in orders:
      want = image.astype(np.float64)
      for i in order:
        want = STEPS[i](want, row[i])
      errors.append(np.abs(got - want).max())
    assert min(errors) < 1e-4
    counts[int(np.argmin(errors))] += 1
  assert counts.min() >= 3


def test_jitter_of_a_grey_image_ignores_saturation():
  image = (picture()[..., :1] / 127.5 - 1).astype(np.float32)
  got = pixel_ops.color_jitter(image, seed(0), 0.0, 0.0, 0.9)
  np.testing.assert_allclose(got, image, atol=1e-6)
  got = pixel_ops.color_jitter(image, seed(0), 0.5, 0.5, 0.0)
  assert np.abs(got - image).max() > 0.01


# --- Erasing ------------------------------------------------------------------


def test_random_erasing():
  image = np.full((100, 120, 3), 0.5, np.float32)

  def erase(seed):
    return pixel_ops.random_erasing(image, seed, 0.25, (0.1, 0.3), (0.5, 2.0))

  areas, ratios, tops, lefts = [], [], [], []
  for got in many(erase, 800):
    y, x = np.nonzero(got[..., 0] == 0)
    if not len(y):
      np.testing.assert_array_equal(got, image)
      continue
    height, width = np.ptp(y) + 1, np.ptp(x) + 1
    want = image.copy()
    want[y.min() : y.max() + 1, x.min() : x.max() + 1] = 0
    np.testing.assert_array_equal(got, want)
    areas.append(height * width / 12_000)
    ratios.append(height / width)
    tops.append(y.min() / (100 - height))
    lefts.append(x.min() / (120 - width))
  assert 163 < len(areas) < 237  # 200 +- 3 standard deviations of 12.
  for values, low, high in (
    (areas, 0.1, 0.3),
    (np.log(ratios), np.log(0.5), np.log(2)),
    (tops, 0, 1),
    (lefts, 0, 1),
  ):
    uniform = stats.uniform(low, high - low)
    assert stats.kstest(values, uniform.cdf).pvalue > 0.001


def test_erased_rectangle_always_fits():
  image = np.ones((20, 60, 1), np.float32)

  def erase(seed):
    return pixel_ops.random_erasing(image, seed, 1.0, (0.3, 0.5), (0.3, 3.3))

  shares = 1 - many(erase, 100).mean(axis=(1, 2, 3))
  erased = shares[shares > 0]
  assert len(erased) >= 95  # For the others, none of ten sampled sizes fits.
  assert 0.27 < erased.min()
  assert erased.max() < 0.53
  never = pixel_ops.random_erasing(image, seed(0), 1.0, (0.9, 0.9), (3.3, 3.3))
  np.testing.assert_array_equal(never, image)


# --- As part of the training images -------------------------------------------


def train(number, **kwargs):
  buffer = io.BytesIO()
  PIL.save(buffer, 'PNG')
  fields = {'crop': (60, 80), 'crop_area': None, 'flip': False, **kwargs}
  return preprocess.prepare(
    tf.constant(buffer.getvalue()), seed(number), pp(**fields)
  ).numpy()


def test_each_augmentation_has_its_own_seed():
  plain = images.to_float(tf.constant(IMAGE)).numpy()
  fold = tf.random.experimental.stateless_fold_in
  for number in range(3):
    np.testing.assert_array_equal(train(number), plain)
    want = pixel_ops.randaugment(IMAGE, fold(seed(number), 1), 2, 15)
    got = train(number, randaugment=(2, 15))
    np.testing.assert_array_equal(got, images.to_float(want))
    np.testing.assert_array_equal(got, train(number, randaugment=[2, 15]))
    got = train(number, color_jitter=0.4)
    want = pixel_ops.color_jitter(plain, fold(seed(number), 2), 0.4, 0.4, 0.4)
    np.testing.assert_allclose(got, want, atol=1e-6)
    got = train(number, random_erasing=1.0)
    assert (got == 0).all(-1).mean() > 0.015
    np.testing.assert_array_equal(got[got != 0], plain[got != 0])


def test_augmentation_leaves_crop_and_flip_unchanged():
  fields = dict(crop=32, crop_area=(0.1, 0.5), flip=True)
  for number in range(3):
    plain = train(number, **fields)
    erased = train(number, random_erasing=1.0, **fields)
    np.testing.assert_array_equal(erased[erased != 0], plain[erased != 0])


def test_all_augmentations_on_grey_images():
  got = train(0, channels=1, randaugment=(3, 10), color_jitter=0.4, random_erasing=1.0)
  assert got.shape == (60, 80, 1)
  assert np.abs(got).max() <= 1
