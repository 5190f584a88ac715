"""Tests of detection on annotated images: batches, checks, average precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tests import evaluations
from tests.data.coco import drawn
from vit_jax import input_pipeline, train
from vit_jax.configs import common, detr_scenes
from vit_jax.data import records, sources
from vit_jax.data.images import images
from vit_jax.data.tfds import parsing
from vit_jax.distributed import sharding
from vit_jax.run import config as run_config
from vit_jax.tasks.detection import detect


def tiny(root):
  """A config that trains a tiny detector on a folder."""
  config = detr_scenes.get_config()
  config.dataset = str(root)
  config.pp.crop = 16
  config.pp.crop_area = None  # Whole images.
  config.model.update(
    units=(1,),
    backbone_width=8,
    hidden_size=8,
    num_queries=4,
    num_encoder_layers=1,
    num_decoder_layers=1,
    num_heads=2,
    mlp_dim=8,
  )
  config.task_options.max_objects = 3
  config.update(batch=8, batch_eval=8, total_steps=2, warmup_steps=1)
  config.log_images = 0
  return config


def on_canvases(root):
  """The same on canvases, of 16 x 24 or 24 x 16 pixels in evaluation."""
  config = tiny(root)
  config.pp.crop, config.pp.resize = 224, None
  config.pp.update(
    sides=(16,), eval_side=16, longest_side=24, canvas_multiple=8,
    crop_sides=(),
  )  # fmt: skip
  config.task_options.tight = 8
  return config


def test_batches_with_grey_images_crowds_and_images_without_objects(tmp_path):
  things = [
    drawn.thing(1, 0),
    drawn.thing(2, 1, (0, 0, 20, 20), 7),
    drawn.thing(3, 1, (20, 10, 40, 30), 90, iscrowd=1),
  ]
  root = drawn.make(tmp_path / 'own', 4, things, grey=(0, 1))
  prepared = train.prepare(tiny(root), tmp_path / 'run')
  task = prepared.program.task
  batch = next(
    input_pipeline.train_batches(
      prepared.config, prepared.train, task.example, prepared.mesh
    )
  )
  # Two epochs of four images: two without objects, and one whose crowd is dropped.
  np.testing.assert_array_equal(np.sort(batch['count']), 4 * [0] + 4 * [1])
  assert set(batch['class'][batch['count'] == 1, 0].tolist()) == {0, 1}
  grey = np.ptp(batch['image'], axis=-1).max(axis=(1, 2)) == 0
  np.testing.assert_array_equal(grey, batch['count'] == 1)


def test_randomly_initialised_backbone_cannot_be_frozen(tmp_path):
  root = drawn.make(tmp_path / 'own', 2, [drawn.thing(1, 0)])
  config = tiny(root)
  config.lr_multipliers = (('^backbone/conv_root/', 0.0),)
  with pytest.raises(
    ValueError, match="needs weights.*frozen.* 1 .*'backbone/conv_root/kernel'"
  ):
    train.check_start(train.prepare(config), tmp_path / 'run')


def test_more_objects_than_queries_is_an_error(tmp_path):
  things = [drawn.thing(i, 2) for i in range(5)]
  root = drawn.make(tmp_path / 'own', 3, things)
  with pytest.raises(ValueError, match="train2017/2.jpg': 5, and max_objects=3"):
    train.prepare(tiny(root))


BOX = [0.1, 0.2, 0.3, 0.4]


def test_objects_are_checked_when_read(tmp_path):
  task = detect.Task(run_config.complete(tiny(tmp_path)), {'class_names': 'ab'})
  for boxes, message in (
    ([BOX, [0.3, 0.2, 0.1, 0.4]], 'must be .ymin, xm'),
    ([BOX, [0.1, 0.2, 0.3, 1.4]], 'must be .ymin, xm'),
    (4 * [BOX], 'more objects than max_objects=3: ra'),
  ):
    record = {
      'image': images.encode_png(np.zeros((8, 8, 3), np.uint8)),
      'objects/label': np.zeros(len(boxes), np.int64),
      'objects/bbox': np.array(boxes, np.float32),
    }
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
      task.example(record, None)


def test_tfds_coco_has_the_features(tmp_path):
  info = tfds.builder('coco/2017', data_dir=tmp_path).info
  found = records.resolve(detect.Task.FEATURES, parsing.features(info), 'coco')
  assert found == tuple(x.removesuffix('?') for x in detect.Task.FEATURES)
  config = common.set_dataset(common.get_config(), 'coco/2017')
  assert (config.pp.train, config.pp.test) == ('train', 'validation')


class Known(detect.Task):
  """A detector with known outputs: `extra` holds the answers by image."""

  def outputs(self, params, extra, batch):
    return {name: x[batch['index']] for name, x in extra.items()}


def evaluate(root, answers):
  """Returns the average precision of detections.

  Args:
    root: the folder.
    answers: {id of an image: [(class, score, (x0, y0, x1, y1) in pixels)]}.
  """
  config = run_config.complete(tiny(root))
  names = ['cat', 'dog', 'cup']
  source = sources.open_split(config, 'val', (*Known.FEATURES, 'image/id'), names)
  ids = source.lookup(np.arange(source.num_examples))['image/id'].numpy()
  logits = np.full((len(ids), 4, 4), -20.0, np.float32)
  logits[..., -1] = 0  # No object.
  boxes = np.full((len(ids), 4, 4), 0.5, np.float32)
  for i, name in enumerate(ids):
    for query, (label, score, corners) in enumerate(answers.get(name, ())):
      logits[i, query, label] = np.log(score / (1 - score))
      x0, y0, x1, y1 = np.array(corners) / (60, 40, 60, 40)
      boxes[i, query] = (x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0
  extra = {'logits': jnp.asarray(logits), 'boxes': jnp.asarray(boxes)}
  mesh = sharding.make_mesh({'data': -1})
  task = Known(config, {'class_names': names})
  _, precision = evaluations.evaluators(task, mesh, source, 'val')
  return precision.run({}, jax.device_put(extra, jax.NamedSharding(mesh, jax.P())))


def test_detections_with_equal_scores_rank_by_image_id(tmp_path):
  """As in pycocotools; images in a folder are in a different order."""
  root = drawn.make(tmp_path, 4, [drawn.thing(1, 2, (10, 4, 30, 20))])
  answers = {100 + i: [(0, 0.9, (10, 4, 40, 24))] for i in range(4)}
  # The only object is in the third image, so it is found at rank 3.
  assert evaluate(root, answers)['AP'] == pytest.approx(1 / 3)


def test_average_precision_with_a_crowd_and_an_empty_image(tmp_path):
  """Cats only: two objects, a crowd, and detections with known ranks.

  Ranks: 1 (.9) finds the cat in image 100; 2 (.8) is inside the crowd in image 102,
  so it does not count; 3 (.7) is a false positive in image 101, which has no cats; 4
  (.6) finds the cat in image 102. The precision is 1 at recall 1/2 and 2/3 at recall
  1: of the 101 recalls 0, .01, ..., 1 the first 51 have 1, the other 50 have 2/3.
  """
  things = [
    drawn.thing(1, 0, (10, 4, 30, 20)),
    drawn.thing(2, 2, (0, 0, 10, 10)),
    drawn.thing(3, 2, (20, 0, 40, 40), iscrowd=1),
  ]
  root = drawn.make(tmp_path / 'own', 3, things)
  answers = {
    100: [(0, 0.9, (10, 4, 40, 24))],
    101: [(0, 0.7, (10, 4, 40, 24))],
    102: [(0, 0.8, (30, 10, 50, 30)), (0, 0.6, (0, 0, 10, 10))],
  }
  found = evaluate(root, answers)
  expected = (51 + 50 * 2 / 3) / 101
  for name in ('AP', 'AP50', 'AP75', 'AP_small'):
    assert found[name] == pytest.approx(expected, abs=1e-6), name
  assert np.isnan(found['AP_large'])
  assert found['num_examples'] == 3
