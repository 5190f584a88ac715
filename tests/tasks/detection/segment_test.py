"""Tests of panoptic segmentation with a model that recognises colours."""

import io
import types

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest
from sklearn import datasets
import tensorflow as tf

from tests import evaluations
from vit_jax.configs import common, detr_panoptic_scenes
from vit_jax.data import records
from vit_jax.data.tfds import scenes
from vit_jax.distributed import sharding
from vit_jax.inference import engine
from vit_jax.run import config as run_config, evaluators as run_evaluators
from vit_jax.tasks.detection import (
  mask_losses as masks_lib,
  panoptic_quality as pq,
  segment,
)

NAMES = ['cat', 'dog', 'grass', 'sky']
# A colour for each class; class 3 covers the remaining pixels.
COLOURS = np.array([(255, 0, 0), (0, 255, 0), (0, 0, 255), (0, 0, 0)])
METADATA = {'class_names': NAMES, 'isthing': [True, True, False, False]}


class Reader:
  """A fake DETR: query k finds all pixels of the colour of class k."""

  num_queries = 4
  mask_head = True

  def apply(self, variables, *args, method=None, draw=True, train=False, **_):
    """Computes the outputs of `models_detr.Detr` or of its `draw_masks`."""
    del variables, train
    if method == 'draw_masks':
      masks, queries = args
      return jnp.take_along_axis(masks, queries[..., None, None], axis=1)
    images = (args[0] + 1) / 2 * 255
    near = jnp.abs(images[:, None] - COLOURS[:, None, None]).max(axis=-1) < 99
    near = near.astype(jnp.float32)  # [B, Q, H, W]
    b, q, h, w = near.shape
    masks = near.reshape(b, q, h // 4, 4, w // 4, 4).mean(axis=(3, 5))
    found = near.any(axis=(2, 3))[..., None]  # [B, Q, 1]
    logits = 20 * jnp.eye(4, 5) * found + 10 * jnp.eye(1, 5, 4)
    outputs = {'logits': logits[None], 'boxes': jnp.full((1, b, q, 4), 0.5)}
    masks = 40 * (masks - 0.5)
    return {**outputs, **({'masks': masks} if draw else {'features': masks})}


def make_config(**options):
  config = common.get_config()
  config.task = 'segment'
  config.dataset = 'x'
  config.pp.update(crop=32, flip=False)
  config.pp.crop_area = None
  config.model = detr_panoptic_scenes.get_config().model
  config.model.update(num_queries=4, num_encoder_layers=0, num_decoder_layers=1)
  config.task_options.update({'max_objects': 4, 'truth_size': 64, **options})
  config.update(batch_eval=2, total_steps=1, best_metric='PQ_test')
  return run_config.complete(config)


def make_task(**options):
  task = segment.Task(make_config(**options), METADATA)
  task.model = Reader()
  return task


def png(pixels):
  buffer = io.BytesIO()
  Image.fromarray(pixels.astype(np.uint8)).save(buffer, 'PNG')
  return buffer.getvalue()


def record(classes, crowd=()):
  """A record of an image; `classes` [H, W] is the class of each pixel.

  Each class is one segment; ids need all three bytes and have another order.
  """
  labels = np.unique(classes)
  ids = 70_000 - 300 * labels
  numbers = (70_000 - 300 * classes)[..., None]
  boxes = []
  for label in labels:
    rows, columns = np.nonzero(classes == label)
    box = (rows.min(), columns.min(), rows.max() + 1, columns.max() + 1)
    boxes.append(np.array(box) / np.tile(classes.shape, 2))
  return {
    'image': png(COLOURS[classes]),
    'panoptic_image': png(numbers // np.array([1, 256, 65_536]) % 256),
    'panoptic_objects/id': ids,
    'panoptic_objects/bbox': np.array(boxes, np.float32),
    'panoptic_objects/label': labels,
    'panoptic_objects/is_crowd': np.isin(labels, crowd),
  }


def make_classes():
  """The class of each pixel of a 48 x 64 image."""
  found = np.full((48, 64), 3)
  found[24:] = 2
  found[12:36, 16:32] = 0
  found[36:48, 48:64] = 1
  return found


@pytest.fixture(scope='module')
def classes():
  return make_classes()


def tensors(record):
  return {name: tf.convert_to_tensor(value) for name, value in record.items()}


def test_segments_follow_the_geometry_of_the_image(classes):
  task = make_task()
  task.config.pp.flip = True
  seen = set()
  for seed in range(6):
    made = task.example(tensors(record(classes, crowd=[1])), tf.constant([0, seed], tf.int64))  # fmt: skip
    # Pixels with the number of an object have the colour of its class.
    assert made['count'] == 3
    numbers = made['segments'].numpy()
    assert numbers.shape == (32, 32)
    colours = (made['image'].numpy() + 1) / 2 * 255
    nearest = np.abs(colours[..., None, :] - COLOURS).max(-1).argmin(-1)
    labels = np.array([1, *made['class'].numpy()[:3]])  # Crowds have none.
    assert (labels[numbers] == nearest).mean() > 0.95
    seen.add(int(numbers[20, 10] == 1))
  assert seen == {0, 1}  # Mirrored or not.


def test_evaluation_uses_the_original_segments(classes):
  row = record(classes, crowd=[1])
  made = make_task().example(tensors(row), None)
  assert list(made['truth_size']) == [48, 64]
  truth = made['truth_segments'].numpy()
  np.testing.assert_array_equal(truth[:48], classes + 1)
  assert not truth[48:].any()
  targets = np.array([0, 1, 0, 2, 3])  # Without the crowd.
  np.testing.assert_array_equal(np.unique(made['segments']), np.unique(targets))
  # A larger image is downscaled.
  row = {**row, **record(classes.repeat(2, 0).repeat(2, 1))}
  made = make_task().example(tensors(row), None)
  assert list(made['truth_size']) == [48, 64]
  np.testing.assert_array_equal(made['truth_segments'][:48], classes + 1)


def test_a_map_of_another_size_is_rejected(classes):
  row = {**record(classes), 'panoptic_image': record(classes[1:])['panoptic_image']}
  for seed in (None, tf.constant([0, 0], tf.int64)):
    with pytest.raises(tf.errors.InvalidArgumentError, match='another height'):
      make_task().example(tensors(row), seed)


def source_of(rows):
  """A source of records."""
  columns = {
    name: tf.ragged.constant([row[name] for row in rows], ragged_rank=1)
    if np.ndim(rows[0][name])
    else [row[name] for row in rows]
    for name in rows[0]
  }
  return records.MemorySource(columns, {'panoptic_objects/label': NAMES})


def test_quality_counts_every_image_once(classes):
  plain = np.full((64, 48), 2)
  wrong = record(np.full((48, 64), 1))
  wrong['image'] = png(COLOURS[np.full((48, 64), 0)])  # A cat, not a dog.
  task = make_task()
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  source = source_of([record(classes), record(plain), wrong])
  evaluator = pq.PanopticQuality(evaluations.evaluation(task, mesh, source))
  got = evaluator.run({}, {'frozen': {}})
  assert got['num_examples'] == 3
  # Cat: one of two found segments is right. Dog: one of two is missed.
  assert got['RQ_things'] == pytest.approx(1 / (1 + 1 / 2))
  assert got['RQ_stuff'] == 1
  # The masks have a quarter of the resolution of the model's small images.
  assert 0.75 < got['SQ'] < 1
  with pytest.raises(engine.Stopped):
    evaluator.run({}, {'frozen': {}}, lambda: True)


def test_loss_uses_the_masks_of_matched_queries(classes):
  task = make_task()
  made = task.example(tensors(record(classes)), None)
  batch = {name: jnp.asarray(value)[None] for name, value in made.items()}
  factors = {'class_factor': jnp.ones(1), 'target_factor': jnp.full(1, 0.5)}

  @jax.jit  # Compiles the matching once.
  def compute(batch):
    extra = {'frozen': {}}
    terms = task._losses({}, extra, {**batch, **factors}, train=True)
    loss = task.measure({}, extra, {**batch, 'mask': jnp.ones(1)})['loss']
    masks = task.outputs({}, extra, batch)['masks']
    # Object n is of class n, which query n finds.
    return (terms, loss, masks_lib.losses(masks, batch['segments'], batch['count']))

  terms, (value, weight), want = compute(batch)
  for name in ('focal', 'dice'):
    np.testing.assert_allclose(terms[name], want[name][None] / 2, rtol=1e-6)
  assert want['dice'][0] < 0.5
  # Evaluation divides by the four objects and their class weights.
  others = ('l1', 'giou', 'focal', 'dice')
  loss = sum(terms[name].sum() for name in others) / 2 + terms['class'].sum() / 4
  assert weight == 1
  np.testing.assert_allclose(value, loss, rtol=1e-5)


def test_predicts_segments_of_the_original_image(classes, tmp_path):
  predictor = make_task().predictor({}, {'frozen': {}}, 0)
  image = COLOURS[classes].astype(np.uint8)
  [(numbers, found)] = predictor.segment([image])
  assert numbers.shape == (48, 64)
  assert sorted(name for name, *_ in found) == NAMES
  for number, (name, score, is_thing, area) in enumerate(found, start=1):
    label = NAMES.index(name)
    assert is_thing == (label < 2)
    assert score > 0.99
    assert area == (numbers == number).sum()
    true = classes == label
    mine = numbers == number
    assert (true & mine).sum() / (true | mine).sum() > 0.75
  path = str(tmp_path / 'image.png')
  Image.fromarray(image).save(path)
  out = str(tmp_path / 'out.png')
  lines = predictor.report([path], out=out)
  assert lines[0] == path
  assert 'grass  stuff' in ' '.join(lines)
  assert lines[-1] == f'picture: {out}'
  assert Image.open(out).size == (384, 288)  # Enlarged by six.
  with pytest.raises(ValueError, match=r'threshold=2 .*\(--threshold\)'):
    predictor.segment([image], threshold=2)
  with pytest.raises(ValueError, match="kind='eomt'.*leave out --instances"):
    predictor.parse_flags({'instances': True})
  task = predictor.task
  task.model.mask_head = False
  with pytest.raises(ValueError, match='no mask head'):
    task.predictor({}, {'frozen': {}}, 0).segment([image])


def test_things_and_stuff_are_known_or_configured():
  source = types.SimpleNamespace(
    origin={'dataset': 'coco/2017_panoptic/1.1.0'},
    names={'panoptic_objects/label': [str(i) for i in range(133)]},
    stuff=(),
  )
  config = make_config()
  found = segment.Task.make_metadata(config, source)
  assert found['class_names'] == [str(i) for i in range(133)]
  assert found['isthing'] == [True] * 80 + [False] * 53
  source.origin = {}
  assert all(segment.Task.make_metadata(config, source)['isthing'])
  source.names['panoptic_objects/label'][6] = '7'
  source.stuff = (7,)
  assert segment.Task.make_metadata(config, source)['isthing'].count(False) == 1
  assert not segment.Task.make_metadata(config, source)['isthing'][7]
  config = make_config(stuff=('131', '5'))
  found = segment.Task.make_metadata(config, source)['isthing']
  assert [i for i, is_thing in enumerate(found) if not is_thing] == [5, 131]
  with pytest.raises(ValueError, match=r"stuff=\['sea'\] are"):
    segment.Task.make_metadata(make_config(stuff=('sea',)), source)


def test_a_detector_has_no_panoptic_quality():
  config = make_config()
  config.model.mask_head = False
  with pytest.raises(ValueError, match="best_metric='PQ_test' is not among"):
    run_evaluators.check(config)


def test_frozen_parameters_need_weights():
  task = make_task()
  weights = dict.fromkeys(('query_embedding', 'class_head/bias'), np.zeros(5))
  shapes = {**weights, 'segmentation/x': np.zeros(1)}
  kwargs = dict(weights=weights, shapes=shapes)
  assert task.new_params(**kwargs, class_names=NAMES) == ['segmentation/']
  new = task.new_params(**kwargs, class_names=NAMES[::-1])
  assert new == ['class_head/', 'segmentation/']

  params = {'class_head': {'bias': np.zeros(5)}, 'segmentation': np.zeros(1)}
  task.check_weights({}, params)  # Nothing is frozen.
  task.config.lr_multipliers = (('segmentation', 1.0), ('', 0.0))
  task.check_weights({'class_head/bias': np.zeros(5)}, params)
  with pytest.raises(ValueError, match="needs weights.*1 .*'class_head/bias'"):
    task.check_weights({}, params)


def test_segments_of_scenes_have_numbers_and_boxes(tmp_path):
  digits = datasets.load_digits()
  builder = scenes.Scenes(data_dir=tmp_path, config='panoptic')
  assert builder.info.features['panoptic_objects']['label'].names == [
    *map(str, range(10)), *scenes.TEXTURES
  ]  # fmt: skip
  scene = scenes.compose(np.random.RandomState(0), digits.images, digits.target)
  made = builder._example(scene, 0)
  numbers = made['panoptic_image'].astype(int) @ [1, 256, 65_536]
  assert numbers.min() > 0  # 0 is void.
  objects = made['panoptic_objects']
  assert [x['label'] for x in objects[2:]] == scene.labels
  for found in objects:
    mask = numbers == found['id']
    assert found['area'] == mask.sum() > 0
    rows = np.flatnonzero(mask.any(axis=1))
    np.testing.assert_allclose(
      (found['bbox'].ymin, found['bbox'].ymax),
      (rows[0] / scenes.SIZE, (rows[-1] + 1) / scenes.SIZE),
    )
  assert sum(x['area'] for x in objects) == numbers.size
