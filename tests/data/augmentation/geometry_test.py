"""Tests of crops, flips and rotations: boxes and masks follow the image."""

import io

import numpy as np
from PIL import Image
import pytest
import scipy.stats
import tensorflow as tf

from vit_jax import preprocess
from vit_jax.configs import common
from vit_jax.data.augmentation import geometry
from vit_jax.data.images import images

H, W = 120, 160


def to_image(image, drawn):
  """Applies a geometry to a decoded image."""
  part = tf.image.crop_to_bounding_box(image, *tf.unstack(drawn.window))
  return geometry.fit(part, drawn)


def pp(**kwargs):
  config = common.get_config().pp
  config.update(kwargs)
  return config


def seed(number):
  return tf.constant((7, number), tf.int64)


def rectangle(ymin, xmin, ymax, xmax, height=H, width=W):
  """A white rectangle on black, uint8 [height, width, 1]."""
  image = np.zeros((height, width, 1), np.uint8)
  image[ymin:ymax, xmin:xmax] = 255
  return image


def normalised(*boxes, height=H, width=W):
  return np.array(boxes, np.float32) / [height, width, height, width]


def hull(picture):
  """(ymin, xmin, ymax, xmax) of the bright pixels in [h, w]."""
  y, x = np.nonzero(picture)
  return np.array([y.min(), x.min(), y.max() + 1, x.max() + 1])


def make(**kwargs):
  fields = geometry.whole((H, W), (H, W))._asdict()
  return geometry.Geometry(**{**fields, **kwargs})


@pytest.mark.parametrize(
  'fields',
  [
    {'rotate': 25.0},
    {'crop_ratio': (0.3, 3.0), 'crop_area': (0.5, 0.9)},
  ],
)
def test_boxes_and_masks_follow_the_image(fields):
  size = (140, 180)
  config = pp(crop=size, **fields)
  box = (50, 60, 80, 110)
  image = rectangle(*box)
  mask = image[None, ..., 0] // 255
  compared = 0
  for number in range(20):
    drawn = geometry.sample((H, W), seed(number), config)
    bright = to_image(image, drawn).numpy()[..., 0] > 0
    boxes, kept = geometry.to_boxes(normalised(box), drawn)
    turned = geometry.to_masks(mask, drawn).numpy()
    assert (turned.dtype, turned.shape) == (np.uint8, (1, *size))
    begin, extent = drawn.window.numpy().reshape(2, 2)
    got = boxes.numpy()[0] * [*size, *size]
    cut = (box[:2] < begin).any() or (box[2:] > begin + extent).any()
    cut |= (got[:2] <= 0).any() or (got[2:] >= size).any()
    if drawn.angle is not None and cut:
      continue  # The image repeats its edges, a mask does not.
    assert kept.numpy()[0] == (bright.sum() > 0)
    if not kept[0]:
      assert turned.sum() == 0
      continue
    # Size of an original pixel in the new image.
    unit = 1 + max(size / extent)
    np.testing.assert_allclose(got, hull(bright), atol=unit)
    wrong = (turned[0] != bright).sum()
    assert wrong <= unit * 2 * (got[2] - got[0] + got[3] - got[1])
    compared += 1
  assert compared >= 5


def test_crop_with_image_aspect_ratio_matches_squared_image():
  """As in BiT (arXiv 1912.11370): resize to 448, crop 384 at random."""
  config = pp(crop=384, crop_area=((384 / 448) ** 2,) * 2, crop_ratio=None, flip=False)
  y, x = np.mgrid[:280, :700].astype(np.float32)
  image = np.stack([y, x, y * 0], axis=-1)
  squared = tf.image.resize(image, (448, 448)).numpy()
  begins = set()
  for number in range(30):
    drawn = geometry.sample(image.shape, seed(number), config)
    y, x, height, width = drawn.window.numpy().tolist()
    assert (height, width) == (240, 600)
    begins.add((y, x))
    got = to_image(image, drawn).numpy()
    top, left = y / 280 * 448, x / 700 * 448
    # The pixel of the squared image at the centre of the crop.
    middle = squared[round(top) + 192, round(left) + 192]
    np.testing.assert_allclose(got[192, 192], middle, atol=1)
  tops, lefts = np.array(sorted(begins)).T
  assert tops.min() <= 4
  assert 36 <= tops.max() <= 40
  assert lefts.min() <= 10
  assert 90 <= lefts.max() <= 100
  assert len(begins) > 25


def test_sizes_and_positions_of_crops_are_uniform():
  config = pp(crop=8, crop_area=(0.25, 1.0), crop_ratio=(1.0, 1.0))
  draws = tf.data.Dataset.range(3000).map(
    lambda number: geometry.sample((8, 8), tf.stack([7, number]), config).window
  )
  windows = np.stack([*draws.as_numpy_iterator()])
  sides, counts = np.unique(windows[:, 2:], axis=0, return_counts=True)
  np.testing.assert_array_equal(sides, [[x, x] for x in (4, 5, 6, 7, 8)])
  assert scipy.stats.chisquare(counts).pvalue > 1e-3
  for side in sides[:-1, 0]:
    begins = windows[windows[:, 2] == side, :2]
    known = [
      (begins == place).all(axis=1).sum() for place in np.ndindex((9 - side,) * 2)
    ]
    assert sum(known) == len(begins)  # All within the image.
    assert scipy.stats.chisquare(known).pvalue > 1e-3


def test_boxes_of_a_known_crop():
  drawn = make(window=tf.constant([30, 40, 60, 80]), size=(30, 20))
  boxes = normalised(
    (30, 40, 90, 120),  # The crop itself.
    (45, 60, 60, 100),  # Inside: a quarter from the top and from the left.
    (0, 0, 60, 80),  # Its lower right quarter is inside.
    (0, 0, 30, 160),  # Ends where the crop begins.
    (100, 130, 110, 140),  # Outside.
  )
  got, kept = geometry.to_boxes(boxes, drawn)
  want = [[0, 0, 1, 1], [0.25, 0.25, 0.5, 0.75], [0, 0, 0.5, 0.5]]
  np.testing.assert_allclose(got[:3], want, atol=1e-6)
  assert kept.numpy().tolist() == [True, True, True, False, False]
  assert got.numpy().min() >= 0
  assert got.numpy().max() <= 1
  flipped, kept = geometry.to_boxes(boxes, drawn._replace(flip=True))
  want = [[0, 0, 1, 1], [0.25, 0.25, 0.5, 0.75], [0, 0.5, 0.5, 1]]
  np.testing.assert_allclose(flipped[:3], want, atol=1e-6)
  assert kept.numpy().tolist() == [True, True, True, False, False]


def test_box_ending_at_the_crop_edge_is_dropped_despite_rounding():
  for edge in range(1, 4999, 501):
    drawn = geometry.whole((5000, 5000), (224, 224))
    drawn = drawn._replace(window=tf.constant([edge, 0, 5000 - edge, 5000]))
    boxes = (0, 0, edge, 5000), (0, 0, edge + 1, 5000)
    _, kept = geometry.to_boxes(normalised(*boxes, height=5000, width=5000), drawn)
    assert kept.numpy().tolist() == [False, True]


@pytest.mark.parametrize('angle, turns', [(np.pi / 2, 1), (np.pi, 2)])
def test_right_angles_match_numpy(angle, turns):
  rng = np.random.RandomState(1)
  image = rng.rand(32, 32, 3).astype(np.float32)
  masks = rng.randint(0, 2, (2, 32, 32)).astype(np.uint8)
  drawn = geometry.whole((32, 32), (32, 32))
  drawn = drawn._replace(angle=tf.constant(angle, tf.float32))
  np.testing.assert_allclose(to_image(image, drawn), np.rot90(image, turns), atol=1e-4)
  np.testing.assert_array_equal(
    geometry.to_masks(masks, drawn), np.rot90(masks, turns, axes=(1, 2))
  )
  box = normalised((2, 4, 8, 30), height=32, width=32)
  got, _ = geometry.to_boxes(box, drawn)
  # A quarter turn to the left: the new y is 1 - x, and the new x is y.
  want = {1: (2, 2, 28, 8), 2: (24, 2, 30, 28)}[turns]
  np.testing.assert_allclose(got[0] * 32, want, atol=1e-4)


def test_box_is_clipped_before_rotation():
  # The crop keeps the part of the box in the upper left quarter. A half turn moves it
  # to the lower right quarter, regardless of the part outside the crop.
  drawn = make(
    window=tf.constant([20, 20, 80, 80]), size=(80, 80),
    angle=tf.constant(np.pi, tf.float32),
  )  # fmt: skip
  got, _ = geometry.to_boxes(normalised((0, 0, 60, 60)), drawn)
  np.testing.assert_allclose(got[0], (0.5, 0.5, 1, 1), atol=1e-5)


def test_evaluation_uses_the_whole_image():
  rng = np.random.RandomState(2)
  image = rng.randint(0, 256, (H, W, 3), np.uint8)
  drawn = geometry.whole(image.shape, (48, 32))
  np.testing.assert_array_equal(
    to_image(image, drawn),
    preprocess.for_evaluation(image, pp(crop=(48, 32))),
  )
  boxes = normalised((10, 20, 30, 40), (0, 0, H, W))
  got, kept = geometry.to_boxes(boxes, drawn)
  np.testing.assert_allclose(got, boxes, atol=1e-6)
  assert kept.numpy().all()
  masks = geometry.to_masks(rectangle(30, 40, 60, 80)[None, ..., 0], drawn)
  want = rectangle(12, 8, 24, 16, 48, 32)[None, ..., 0]  # 2/5 and 1/5 of it.
  np.testing.assert_array_equal(masks, want)


def test_samples_cover_the_configured_ranges():
  config = pp(crop=32, crop_area=(0.2, 0.4), crop_ratio=(0.5, 2.0), rotate=30.0)
  draw = tf.function(lambda s: geometry.sample((H, W), s, config)[1:4])
  draws = [
    np.concatenate([np.atleast_1d(v) for v in draw(seed(i))]) for i in range(300)
  ]
  y, x, height, width, flip, angle = np.array(draws).T
  areas, ratios = height * width / (H * W), width / height
  assert 0.19 < areas.min() < 0.22
  assert 0.38 < areas.max() < 0.41
  assert 0.48 < ratios.min() < 0.6
  assert 1.6 < ratios.max() < 2.1
  assert (y >= 0).all()
  assert (y + height <= H).all()
  assert (x >= 0).all()
  assert (x + width <= W).all()
  assert 0.4 < flip.mean() < 0.6
  limit = np.pi / 6
  assert -limit <= angle.min() < -0.9 * limit
  assert 0.9 * limit < angle.max() <= limit


def _encode(image, fmt):
  buffer = io.BytesIO()
  Image.fromarray(image).save(buffer, fmt)
  return tf.constant(buffer.getvalue())


@pytest.mark.parametrize('fmt', ['JPEG', 'PNG'])
def test_training_images_match_tensorflow_functions(fmt):
  # Seeds and their order are fixed: a resumed run must see the same pixels.
  rng = np.random.RandomState(3)
  small = Image.fromarray(rng.randint(0, 256, (12, 16, 3), np.uint8))
  encoded = _encode(np.asarray(small.resize((W, H))), fmt)
  config = pp(crop=(40, 56), crop_area=(0.1, 0.8))
  for number in range(6):
    got, _ = preprocess.decode_with_geometry(encoded, seed(number), config)
    seeds = tf.random.experimental.stateless_split(seed(number), 3)
    _, size, _ = tf.image.stateless_sample_distorted_bounding_box(
      [H, W, 3], tf.zeros([1, 0, 4]), seeds[0], 0.0, (3 / 4, 4 / 3), (0.1, 0.8),
      100, True,
    )  # fmt: skip
    draws = tf.random.stateless_uniform(
      [2], tf.random.experimental.stateless_fold_in(seeds[0], 1)
    )
    begin = np.floor(draws * ([H + 1, W + 1] - size[:2].numpy())).astype(int)
    begin = tf.constant([*begin, 0])
    if fmt == 'JPEG':
      box = tf.concat([begin[:2], size[:2]], 0)
      image = tf.io.decode_and_crop_jpeg(
        encoded, box, channels=3, dct_method='INTEGER_FAST'
      )
    else:
      image = tf.slice(tf.io.decode_png(encoded, 3), begin, size)
    image = tf.image.stateless_random_flip_left_right(image, seeds[1])
    want = tf.image.resize(images.to_float(image), (40, 56))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(
      got, preprocess.prepare(encoded, seed(number), config)
    )


def test_geometry_matches_the_decoded_image():
  image = np.repeat(rectangle(40, 30, 70, 110), 3, axis=2)
  config = pp(crop=64, rotate=20.0)
  for number in range(5):
    got, drawn = preprocess.decode_with_geometry(
      _encode(image, 'PNG'), seed(number), config
    )
    np.testing.assert_array_equal(got, to_image(image, drawn))
