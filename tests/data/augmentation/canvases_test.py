"""Tests of images on canvases: sizes, sampling, and boxes and masks."""

import fractions
import io

import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from vit_jax import preprocess
from vit_jax.configs import common, detr
from vit_jax.data.augmentation import canvases, geometry


def pp(**kwargs):
  """A config with canvases of 9 and 16 pixels."""
  config = common.get_config().pp
  fields = dict(
    sides=(4, 6, 8, 9), eval_side=6, longest_side=15, canvases=2,
    canvas_multiple=8, crop_sides=(), crop_range=(4, 8), flip=False,
  )  # fmt: skip
  with config.ignore_type():
    config.update({**fields, **kwargs})
  return config


def seed(number):
  return tf.constant((7, number), tf.int64)


def png(pixels):
  buffer = io.BytesIO()
  Image.fromarray(pixels).save(buffer, 'PNG')
  return buffer.getvalue()


def trained(encoded, config):
  """Returns a function that maps a seed to an image and its geometry."""
  graph = tf.function(
    lambda key: preprocess.on_canvas_for_training(encoded, key, 0, config)
  )
  return lambda number: graph(seed(number))


def noise(height, width):
  rng = np.random.RandomState(0)
  return rng.randint(0, 256, (height, width, 3)).astype(np.uint8)


def test_published_side_lengths_use_three_canvases():
  found = canvases.groups(detr.get_config().pp)
  assert found == (
    ((480, 512, 544, 576), 959, (960, 960)),
    ((608, 640, 672, 704), 1173, (1184, 1184)),
    ((736, 768, 800), 1333, (1344, 1344)),
  )
  evaluated = canvases.evaluation(detr.get_config().pp)
  assert evaluated == ((800,), 1333, (1344, 1344))
  half = canvases.evaluation(detr.get_config().pp, 400)
  assert half == ((400,), 666, (672, 672))


def published(height, width, side, longest):
  """The resizing rule of the released DETR, in integer arithmetic."""
  least, most = min(height, width), max(height, width)
  if most * side > longest * least:
    side = round(fractions.Fraction(longest * least, most))
  return tuple(side * x // least for x in (height, width))


# Common widths and heights in COCO.
USUAL = (
  (640, 480), (480, 640), (640, 427), (427, 640), (640, 426), (426, 640),
  (640, 425), (640, 428), (500, 375), (375, 500), (640, 360), (612, 612),
  (640, 640), (500, 333), (333, 500), (640, 200), (200, 640),
)  # fmt: skip


def test_image_sizes_match_released_code():
  shapes = np.array(USUAL)[:, ::-1]
  # Recorded from the released code.
  assert published(480, 640, 800, 1333) == (800, 1066)
  assert published(333, 500, 800, 1333) == (800, 1201)
  assert published(200, 640, 800, 1333) == (417, 1334)  # One above 1333.
  for side in (800, *range(480, 801, 32), 400, 500, 600):
    got = canvases.fitted(shapes, side, 1333).numpy()
    want = [published(*shape, side, 1333) for shape in shapes.tolist()]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize('longest', [16, 640])
def test_images_fill_a_square_as_in_the_released_code_of_eomt(longest):
  shapes = np.array([*USUAL, (500, 334), (500, 50), (13, 10), (40, 300), (7, 7)])
  factor = longest / shapes.max(axis=1, keepdims=True)
  # scale_img_size_instance_panoptic of training/lightning_module.py.
  expected = np.round(shapes * factor)
  np.testing.assert_array_equal(canvases.fitted(shapes, longest, longest), expected)


def test_smallest_canvas_for_an_image():
  group = canvases.evaluation(detr.get_config().pp)
  shapes = [(480, 640), (640, 480), (612, 612), (100, 900)]
  found = canvases.smallest(shapes, group, 64)
  assert found.tolist() == [[832, 1088], [1088, 832], [832, 832], [192, 1344]]


def test_each_side_length_is_equally_likely():
  config = detr.get_config().pp
  config.crop_sides = ()

  @tf.function
  def draw(steps, run):
    def one(step):
      group = canvases.group_at(step, run, config)
      key = tf.stack([tf.constant(0, tf.int64), step])
      return group, canvases.sample((100, 160, 3), key, group, config).size

    return tf.map_fn(one, steps, fn_output_signature=(tf.int32, tf.int32))

  count = 550
  steps = tf.range(count, dtype=tf.int64)
  groups, sizes = (x.numpy() for x in draw(steps, 0))
  found, counts = np.unique(sizes[:, 0], return_counts=True)
  assert found.tolist() == list(range(480, 801, 32))
  # Binomial: mean 50, standard deviation 6.7.
  assert abs(counts - count / 11).max() < 4 * 6.7
  for group, size in zip(groups, sizes):
    assert size[0] in canvases.groups(config)[group].sides
  # A draw depends only on the step and the run's seed.
  np.testing.assert_array_equal(draw(steps[300:400], 0)[0], groups[300:400])
  assert (draw(steps[:100], 1)[0].numpy() != groups[:100]).mean() > 0.5


def test_image_is_at_the_top_left_of_its_canvas():
  pixels = noise(6, 11)
  group = canvases.evaluation(pp())
  inputs, drawn = preprocess.on_canvas_for_evaluation(png(pixels), group, pp())
  want = np.zeros((16, 16, 3))
  want[:6, :11] = pixels / 127.5 - 1
  np.testing.assert_allclose(inputs['image'], want, atol=1e-6)
  real = np.zeros((16, 16), bool)
  real[:6, :11] = True
  np.testing.assert_array_equal(inputs['real'], real)
  assert drawn.shape.numpy().tolist() == [6, 11]
  with pytest.raises(tf.errors.InvalidArgumentError, match='another size than'):
    preprocess.on_canvas_for_evaluation(
      png(pixels), group._replace(canvas=(5, 16)), pp()
    )


def test_crop_size_matches_the_published_range():
  config = detr.get_config().pp
  draw = tf.function(lambda key: canvases.sample((480, 640, 3), key, 2, config))
  whole, mirrored, widths = 0, 0, []
  for number in range(120):
    drawn = draw(seed(number))
    y, x, height, width = drawn.window.numpy()
    size = drawn.size.numpy()
    mirrored += bool(drawn.flip)
    if (height, width) == (480, 640):
      whole += 1
      continue
    assert min(y, x) >= 0
    assert y + height <= 480
    assert x + width <= 640
    assert min(size) in (736, 768, 800) or max(size) == 1333
    # The aspect ratio is kept, to within one pixel.
    assert size[0] / size[1] == pytest.approx(height / width, rel=0.01)
    widths.append(width)
  assert 40 < whole < 80
  assert 40 < mirrored < 80
  # From 384 of 800 pixels to all of them: the first resize gives 600 x 800,
  # 500 x 667 or 400 x 533 pixels, of which at most 600 are kept.
  assert min(widths) >= 0.99 * 384 / 800 * 640
  assert min(widths) < 0.55 * 640
  assert max(widths) > 600


def test_boxes_and_masks_follow_the_image():
  box = (50, 60, 80, 110)
  pixels = np.zeros((120, 160, 3), np.uint8)
  pixels[50:80, 60:110] = 255
  mask = pixels[None, ..., 0] // 255
  config = pp(
    sides=(80, 96), longest_side=160, crop_sides=(90, 110), canvases=1,
    crop_range=(60, 100), flip=True,
  )  # fmt: skip
  shares = np.array([box], np.float32) / [120, 160, 120, 160]
  seen = 0
  decode = trained(png(pixels), config)
  for number in range(20):
    inputs, drawn = decode(number)
    found, kept = geometry.to_boxes(shares, drawn)
    if not kept[0]:
      continue
    seen += 1
    size = drawn.size.numpy()
    moved = found[0].numpy() * np.tile(size, 2)
    for picture in (
      inputs['image'].numpy()[..., 0] * inputs['real'].numpy() > 0,
      canvases.pad(geometry.to_masks(mask, drawn), (160, 160), 1)[0].numpy(),
    ):
      y, x = np.nonzero(picture)
      hull = (y.min(), x.min(), y.max() + 1, x.max() + 1)
      np.testing.assert_allclose(moved, hull, atol=1.6)
  assert seen > 12


def test_jpeg_crop_matches_crop_of_the_decoded_image():
  """Only the crop is decoded, at reduced size if that suffices."""
  y, x = np.mgrid[:240, :320]
  pixels = np.stack([y, x / 2, (y + x) / 3], -1).astype(np.uint8)
  buffer = io.BytesIO()
  Image.fromarray(pixels).save(buffer, 'JPEG', quality=98, subsampling=0)
  config = pp(
    sides=(40, 48), longest_side=80, crop_sides=(100,), crop_range=(60, 90),
    canvases=1,
  )  # fmt: skip
  decode = trained(buffer.getvalue(), config)
  for number in range(8):
    inputs, drawn = decode(number)
    part = tf.image.crop_to_bounding_box(pixels, *tf.unstack(drawn.window))
    want = geometry.fit(part, drawn, antialias=True)
    height, width = drawn.size.numpy()
    got = inputs['image'][:height, :width]
    np.testing.assert_allclose(got, want, atol=0.06)
