"""Tests of windows against mmsegmentation's slide_inference, written in PyTorch."""

import jax
import numpy as np
from PIL import Image
import pytest
from sklearn import metrics
import tensorflow as tf
import torch

from tests import tiny_models
from tests.tasks.segmentation import segment_semantic_test
from vit_jax.data import masks, sources
from vit_jax.evaluators import evaluation
from vit_jax.run import config as run_config
from vit_jax.tasks.segmentation import class_maps, views

WINDOW = 16
interpolate = torch.nn.functional.interpolate


def slide(model, image, window, stride):
  """Averages the scores of windows of an image [h, w, C]: [1, C, h, w]."""
  height, width = image.shape[:2]
  total, count = 0, 0
  for i in range(max(height - window + stride - 1, 0) // stride + 1):
    for j in range(max(width - window + stride - 1, 0) // stride + 1):
      bottom, right = min(i * stride + window, height), min(j * stride + window, width)
      top, left = max(bottom - window, 0), max(right - window, 0)
      scores = model(image[top:bottom, left:right])
      scores = torch.tensor(np.array(scores)).permute(2, 0, 1)[None]
      scores = interpolate(scores, (bottom - top, right - left), mode='bilinear')
      padding = left, width - right, top, height - bottom
      total = total + torch.nn.functional.pad(scores, padding)
      count = count + torch.nn.functional.pad(torch.ones_like(scores), padding)
  assert count.min() > 0
  return total / count


class Identity:
  """A head whose scores are the pixels."""

  def scores(self, outputs, size):
    return outputs


@pytest.mark.parametrize('stride', [1, 5])
def test_scores_of_pixels_do_not_depend_on_the_stride(stride):
  sizes = np.array([[8, 19], [14, 8], [8, 8]])
  originals = np.array([[11, 27], [33, 20], [6, 6]])
  rng = np.random.default_rng(0)
  images = rng.normal(size=(3, 8 + 2 * stride * 6, 8 + 3 * stride * 6, 4))
  images = images.astype(np.float32)
  view = views.View((8, 8), (8, 8), (stride, stride), False)

  @jax.jit
  def compute(images, sizes, originals):
    [outputs] = views.outputs(lambda x: x, images, sizes, view, False)
    view_outputs = class_maps.ViewOutputs(outputs, sizes, view, False)
    return class_maps.class_maps(Identity(), [view_outputs], originals, (40, 30))

  maps = compute(images, sizes, originals)
  for image, (h, w), size, class_map in zip(images, sizes, originals.tolist(), maps):
    pixels = torch.tensor(image[:h, :w]).permute(2, 0, 1)[None]
    expected = interpolate(pixels, size, mode='bilinear')[0].argmax(dim=0)
    np.testing.assert_array_equal(class_map[: size[0], : size[1]], expected)


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  root = tmp_path_factory.mktemp('views') / 'data'
  return segment_semantic_test.write_data(root)


def make_model(data, **options):
  """Returns a predictor with random parameters."""
  config = segment_semantic_test.make_config(data, layers=(), **options)
  config.model.transformer.num_layers = 1
  source = sources.open_split(config, 'train', ('image', masks.FEATURE))
  cls = run_config.get_task(config.task)
  task = cls(config, cls.make_metadata(config, source))
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  params, extra = (tiny_models.drawn(x) for x in shapes)
  return task.predictor(params, extra, 0)


def read(data, number):
  """Returns a test image, float32 [H, W, 3], and the classes of its pixels."""
  pixels = np.asarray(Image.open(data / 'test/images' / f'{number}.png'))
  true = segment_semantic_test.read_mask(data / 'test/masks' / f'{number}.png')
  return pixels / np.float32(127.5) - 1, true


def resize(image, side):
  """Resizes an image so that its shorter side has a length."""
  size = [round(side * length / min(image.shape[:2])) for length in image.shape[:2]]
  return tf.image.resize(image, size).numpy()


def test_windows_from_files_to_the_report(data):
  model = make_model(data, window=WINDOW, stride=5)
  outputs = jax.jit(model.task.head.outputs)
  compute = lambda x: outputs(model.params, model.extra, x[None])[0]
  paths = [str(data / 'test/images' / f'{i}.png') for i in range(5)]
  all_true, all_predicted = [], []
  for number, class_map in enumerate(model.predict(paths)):
    image, true = read(data, number)
    scores = slide(compute, resize(image, WINDOW), WINDOW, 5)
    expected = interpolate(scores, true.shape, mode='bilinear')[0].argmax(dim=0)
    assert np.mean(class_map != expected.numpy()) < 0.002  # Ties.
    all_true.append(true[true >= 0])
    all_predicted.append(class_map[true >= 0])
  values = evaluation.evaluate(model, 'test', report=str(data.parent / 'report'))
  true, predicted = np.concatenate(all_true), np.concatenate(all_predicted)
  iou = metrics.jaccard_score(true, predicted, average='macro')
  assert values['miou'] == pytest.approx(iou)
  assert (data.parent / 'report/report.json').exists()


def probabilities(compute, image, size, window, stride):
  """Returns the mean over an image and its mirror image, [1, C, *size]."""
  total = 0
  for step in (1, -1):
    scores = slide(compute, image[:, ::step], window, stride).double()
    pixels = interpolate(scores, size, mode='bilinear').softmax(dim=1)
    total = total + (pixels if step == 1 else pixels.flip(3))
  return total / 2


@pytest.mark.parametrize('scales', [(1e9,), (1.0, 17.0)])
def test_scales_of_absurd_sizes_are_rejected(data, scales):
  with pytest.raises(ValueError, match='numbers above 0, at most 16'):
    segment_semantic_test.make_config(data, scales=scales)


def test_flips_and_scales_from_files_to_the_report(data):
  """Of patches of 4 pixels; 0.7 of a window of 16 pixels are 11.2, so 12."""
  model = make_model(data, window=WINDOW, stride=8, flips=True, scales=(0.7, 1.25))
  outputs = jax.jit(model.task.head.outputs)
  compute = lambda x: outputs(model.params, model.extra, x[None])[0]
  all_true, all_means = [], []
  for number in range(5):
    image, true = read(data, number)
    small = probabilities(compute, resize(image, 12), true.shape, 12, 6)
    large = probabilities(compute, resize(image, 20), true.shape, WINDOW, 8)
    means = ((small + large) / 2)[0].permute(1, 2, 0).numpy()
    all_true.append(true[true >= 0])
    all_means.append(means[true >= 0])
  true, means = np.concatenate(all_true), np.concatenate(all_means)
  values = evaluation.evaluate(model, 'test')
  loss = -np.log(means[np.arange(len(true)), true]).mean()
  assert values['loss'] == pytest.approx(loss, rel=1e-4)
  iou = metrics.jaccard_score(true, means.argmax(axis=-1), average='macro')
  assert values['miou'] == pytest.approx(iou, abs=2e-3)  # Ties.


def test_upright_images_have_maps_of_their_shape(data, tmp_path):
  """A camera held sideways stores 20 x 40 pixels of an image of 40 x 20."""
  image = Image.open(data / 'test/images/1.png')
  exif = Image.Exif()
  exif[0x0112] = 6
  path = tmp_path / 'turned.png'
  image.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
  model = make_model(data, window=WINDOW, tight=1)
  turned, upright = model.predict([str(path), str(data / 'test/images/1.png')])
  np.testing.assert_array_equal(turned, upright)


@pytest.mark.parametrize(
  'options, error',
  [
    ({'stride': 8}, 'stride=8 needs windows: set --config.task_options.window'),
    ({'window': 16, 'stride': 17}, 'stride=17 leaves gaps between windows'),
    ({'window': 18}, 'window=18 must be a multiple of the patch size'),
    ({'window': 4000}, 'window=4000 is more than 8 times .*use at most'),
  ],
)
def test_wrong_windows_are_named(data, options, error):
  with pytest.raises(ValueError, match=error):
    make_model(data, **options)
