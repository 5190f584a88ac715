"""Tests of a detector on canvases: training, resuming, other image sizes."""

import copy
import functools
import io
import json
import pathlib
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from PIL import Image
import pytest

from tests import evaluations, processes, trees
from tests.train_test import StopAfter
from vit_jax import input_pipeline, models, predict, train
from vit_jax.configs import common
from vit_jax.data import sources
from vit_jax.distributed import sharding
from vit_jax.evaluators import base
from vit_jax.run import config as run_config, evaluators as run_evaluators, stopping
from vit_jax.tasks.detection import detect

SHAPES = ((48, 30), (30, 50), (40, 40), (60, 36))


class TinyDetector(nn.Module):
  """Detects by the mean of an image's real pixels; compiles very fast."""

  num_classes: int
  num_queries: int = 5
  dtype: Any = 'float32'
  param_dtype: Any = 'float32'

  @nn.compact
  def __call__(self, images, mask=None, *, train):
    """Returns what vit_jax.models_detr.Detr returns."""
    if mask is None:
      mask = jnp.ones(images.shape[:3], bool)
    count = jnp.maximum(mask.sum((1, 2)), 1)
    x = (images * mask[..., None]).sum((1, 2)) / count[:, None]
    x = nn.Dense(self.num_queries * 8)(x).reshape(-1, self.num_queries, 8)
    x = nn.Dropout(0.1)(x, deterministic=not train)[None]
    boxes = nn.sigmoid(nn.Dense(4)(x))
    return {'logits': nn.Dense(self.num_classes + 1)(x), 'boxes': boxes}


def write_split(root, split, count):
  """Writes grey images of several shapes with one white box each."""
  lines = []
  for i in range(count):
    height, width = SHAPES[i % len(SHAPES)]
    pixels = np.full((height, width, 3), 90, np.uint8)
    pixels[10 : 20 + i % 3, 5:20] = 255
    name = f'{split}{i}.png'
    Image.fromarray(pixels).save(root / name)
    box = [10 / height, 5 / width, (20 + i % 3) / height, 20 / width]
    objects = {'bbox': [box], 'label': [i % 2]}
    lines.append(json.dumps({'image': name, 'objects': objects}))
  (root / f'{split}.jsonl').write_text('\n'.join(lines))


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  """A tiny detector with two canvases."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(models.KINDS, 'tiny_detector', TinyDetector)
    root = tmp_path_factory.mktemp('boxes')
    write_images(root)
    yield make_config(root)


def write_images(root):
  """Writes the splits of a folder of images; only one process may do so."""
  (root / 'classes.json').write_text('{"objects/label": ["even", "odd"]}')
  write_split(root, 'train', 9)
  write_split(root, 'test', 5)


def make_config(root):
  """Returns a config on a folder that `write_images` has filled."""
  config = common.set_dataset(common.get_config(), str(root))
  config.task = 'detect'
  config.pretrained_dir = None
  config.model = ml_collections.ConfigDict({'kind': 'tiny_detector'})
  config.task_options.update(max_objects=3, tight=16)
  config.pp.update(
    sides=(24, 32), eval_side=32, longest_side=54, canvases=2, canvas_multiple=16,
    crop_sides=(28, 36), crop_range=(20, 30),
  )  # fmt: skip
  config.update(
    batch=8, batch_eval=8, total_steps=4, warmup_steps=0, optimizer='sgd',
    base_lr=1e-3, eval_every=4, checkpoint_every=4, progress_every=2,
    log_images=0, seed=3,
  )  # fmt: skip
  return config


def train_to(step, config, workdir):
  """Trains to a step and stops there, without an evaluation."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(stopping, 'StopRequest', lambda: StopAfter(step))
    with pytest.raises(train.Interrupted, match=f'Saved step {step} '):
      train.train_and_evaluate(copy.deepcopy(config), str(workdir))


@pytest.fixture(scope='module')
def model(config, tmp_path_factory):
  """The predictor of a run of two steps."""
  workdir = tmp_path_factory.mktemp('run')
  train_to(2, config, workdir)
  model = predict.load(str(workdir))
  model.BATCH = 2
  return model


@pytest.fixture(scope='module')
def task(config):
  """The complete config, and the task without parameters."""
  config = run_config.complete(config)
  source = sources.open_split(config, 'train', detect.Task.FEATURES)
  return detect.Task(config, detect.Task.make_metadata(config, source)), source


def test_all_processes_use_the_same_canvas_at_a_step(task):
  task, source = task

  def batches(rows, start=0):
    data = input_pipeline.train_dataset(
      task.config, source, task.example, np.array(rows), start
    )
    return list(data.take(4 - start).as_numpy_iterator())

  whole = batches(range(8))
  assert [x['image'].shape[1] for x in whole] == [48, 64, 48, 64]
  for got, want in zip(batches(range(4, 8), start=2), whole[2:], strict=True):
    trees.assert_same(got, {name: value[4:] for name, value in want.items()})


def test_boxes_are_relative_to_the_image_without_padding(config, task):
  task, _ = task
  source = sources.open_split(task.config, 'test', task.FEATURES)
  high = (pathlib.Path(config.dataset) / 'test0.png').read_bytes()
  records = [source.read(source.record(i)) for i in range(5)]
  record = next(r for r in records if r['image'] == high)
  evaluated = task.example(record, None)
  # 48 x 30 pixels become 51 x 32.
  assert evaluated['size'].numpy().tolist() == [48, 30]
  assert np.nonzero(evaluated['real'])[0].max() == 50
  want = [12.5 / 30, 15 / 48, 15 / 30, 10 / 48]
  np.testing.assert_allclose(evaluated['box'][0], want, atol=1e-6)
  spec = task.batch_spec(7)
  for name, value in task.example(record, np.array([1, 0], np.int64)).items():
    assert spec[name].dtype == value.dtype.as_numpy_dtype
  assert spec['real'].shape == spec['image'].shape[:3] == (7, 64, 64)


@pytest.mark.parametrize(
  'sides, fmt', [((24, 32), 'JPEG'), ((24, 32), 'PNG'), ((), 'JPEG')]
)
def test_boxes_refer_to_the_stored_pixels(task, sides, fmt):
  """An EXIF orientation only rotates images without boxes."""
  task = task[0]
  config = task.config.copy_and_resolve_references()
  config.pp.update(sides=sides, crop_sides=())
  config.pp.update(crop=48, crop_area=(0.9, 1.0), crop_ratio=None)
  task = detect.Task(config, task.metadata)
  pixels = np.zeros((48, 96, 3), np.uint8)
  pixels[6:42, 12:36] = 255  # On the left; at the bottom of the upright image.
  exif = Image.Exif()
  exif[0x0112] = 8
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, fmt, exif=exif)
  record = {
    'image': file.getvalue(),
    'objects/bbox': np.array([[6 / 48, 12 / 96, 42 / 48, 36 / 96]], np.float32),
    'objects/label': np.array([1]),
  }
  for seed in (None, (1, 0), (1, 8), (1, 16)):
    seed = seed and np.array(seed, np.int64)
    found = task.example(record, seed)
    image = found['image'].numpy().mean(axis=-1) > 0
    extent = np.array(image.shape)
    if sides:
      image &= found['real'].numpy()
      extent = [found['real'].numpy().any(axis=1 - a).sum() for a in (0, 1)]
    box = found['box'][0].numpy().reshape(2, 2)[:, ::-1]  # In (y, x) order.
    corners = np.array([box[0] - box[1] / 2, box[0] + box[1] / 2]) * extent
    want = [[i.min(), i.max() + 1] for i in np.nonzero(image)]
    np.testing.assert_allclose(corners.T, want, atol=1.5)
  upright = task.inputs({'image': record['image']})
  assert upright['size'].numpy().tolist() == [96, 48]
  rows = np.nonzero(upright['image'].numpy().mean(axis=-1) > 0)[0]
  length = 54 if sides else 48  # For 96 pixels.
  want = [60 * length / 96, 84 * length / 96]
  np.testing.assert_allclose([rows.min(), rows.max() + 1], want, atol=1.5)


def test_padding_has_no_influence_for_any_image_shape(model):
  parts = functools.partial(model.task.parts_at, image_size=None)
  rng = np.random.RandomState(0)
  images = [
    rng.randint(0, 256, shape).astype(np.uint8)
    for shape in ((30, 70, 3), (90, 40), (33, 40, 4), (20, 50, 3), (64, 64, 1))
  ]
  images.append(Image.fromarray(images[1]))
  found = model.detect(images, threshold=0)
  # Canvases of 32 x 64, 64 x 32, 32 x 48 and 32 x 32 pixels.
  assert model._outputs._cache_size() == 4
  assert [len(objects) for objects in found] == 6 * [5]
  assert found[5] == found[1]
  for image, objects in zip(images, found):
    height, width = np.shape(image)[:2]
    for name, score, (x0, y0, x1, y1) in objects:
      assert name in ('even', 'odd')
      assert 0 <= score <= 1
      assert 0 <= x0 <= x1 <= width
      assert 0 <= y0 <= y1 <= height
  [(_, inputs, outputs)] = model.stream(images[:1], keep=('image', 'real'), parts=parts)
  assert inputs['image'].shape == (32, 64, 3)
  real = np.stack([inputs['real'], np.zeros_like(inputs['real'])])
  garbage = np.where(real[..., None], inputs['image'], 0.7)
  again = model._outputs(
    model.params,
    model.extra,
    {'image': garbage, 'real': real, 'size': np.zeros((2, 2), np.int32)},
  )
  for name, value in again.items():
    np.testing.assert_allclose(value[0], outputs[name], atol=1e-5)


def evaluation(model, tight, devices, split='test'):
  """Returns task, test split and mesh of an evaluation."""
  config = model.config.copy_and_resolve_references()
  config.task_options.tight = tight
  config.batch_eval = 4
  task = detect.Task(config, model.metadata)
  source = sources.open_split(config, split, task.FEATURES)
  return task, source, sharding.make_mesh({'data': devices}, jax.devices()[:devices])


# Images of the test split, 48 x 30 (two of them), 30 x 50, 40 x 40 and 60 x 36
# pixels, become 51 x 32, 32 x 53, 32 x 32 and 53 x 32.
def test_each_image_appears_once_on_its_smallest_canvas(model):
  found, indices = {}, []
  for batch in input_pipeline.task_batches(*evaluation(model, 1, 2)):
    kept = np.asarray(batch['mask']) > 0
    shape = batch['image'].shape[1:3]
    found[shape] = found.get(shape, 0) + int(kept.sum())
    indices += np.asarray(batch['index'])[kept].tolist()
    assert len(kept) in (2, 4)  # Both devices have rows, and no more than needed.
  assert found == {(51, 32): 2, (53, 32): 1, (32, 53): 1, (32, 32): 1}
  assert sorted(indices) == [0, 1, 2, 3, 4]


def test_the_loss_does_not_depend_on_the_canvases(model):
  """The tiny model ignores padding."""
  params = jax.device_get(model.params)

  def run(tight):
    task, source, mesh = evaluation(model, tight, 1, 'test[:1]')
    return evaluations.evaluators(task, mesh, source)[0].run(params, {})

  found, square = run(tight=16), run(tight=0)
  assert found['loss'] == pytest.approx(square['loss'], rel=1e-5)


_EVALUATE = """
import json, sys
import jax
address, process, folder = sys.argv[1:]
jax.distributed.initialize(address, 2, int(process))
assert len(jax.devices()) == 4  # Before the tests set their flags.
from tests.tasks.detection import detect_canvases_test
print('SAID', json.dumps(detect_canvases_test.evaluate(folder)))
"""


def evaluate(folder, devices=None):
  """Evaluates random parameters on the training images of a folder."""
  models.KINDS['tiny_detector'] = TinyDetector
  config = run_config.complete(make_config(folder))
  config.batch_eval = 4
  task = detect.Task(config, {'class_names': ['even', 'odd']})
  source = sources.open_split(config, 'train', task.FEATURES)
  mesh = sharding.make_mesh({'data': -1}, devices)
  params = jax.jit(
    lambda: task.init(jax.random.key(0))[0],
    out_shardings=jax.NamedSharding(mesh, jax.P()),
  )()
  sizes = []

  class NotingEvaluation(base.Evaluation):
    def compute(self, function, stop):
      def compute_and_note(batch):
        sizes.append(batch['image'].shape)
        return function(batch)

      return super().compute(compute_and_note, stop)

  evaluation = NotingEvaluation(task, mesh, 'train', lambda *_: source)
  instances = [entry.make(evaluation) for entry in run_evaluators.task_entries(config)]
  [shared] = base.sharing_passes(evaluation, instances)
  found = shared.run(params, {})
  del found['img_sec_core']
  return {**found, 'sizes': sizes}


def test_two_processes_run_the_same_programs_in_the_same_order(tmp_path):
  """Images of four shapes need three canvases; neither process has all of them."""
  write_images(tmp_path)
  statuses, outputs = processes.run_two(_EVALUATE, tmp_path, devices=2)
  assert statuses == [0, 0], outputs
  first, second = processes.said(outputs)
  # As text, where NaN equals NaN.
  assert json.dumps(first) == json.dumps(second)
  assert {tuple(x[1:3]) for x in first['sizes']} == {(64, 32), (32, 64), (32, 32)}
  assert first['num_examples'] == 9
  assert not np.isnan(first['AP'])
  single = evaluate(tmp_path, jax.devices()[:1])
  del first['sizes'], single['sizes']
  assert first == pytest.approx(single, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize(
  'image_size, shape', [(40, (48, 80, 3)), ((24, 56), (24, 56, 3)), (None, (32, 64, 3))]
)
def test_the_network_gets_the_requested_image_size(model, image_size, shape):
  image = np.zeros((30, 50, 3), np.uint8)
  parts = functools.partial(model.task.parts_at, image_size=image_size)
  [(_, inputs, _)] = model.stream([image], keep=('image', 'size'), parts=parts)
  assert inputs['image'].shape == shape
  assert inputs['size'].tolist() == [30, 50]


def test_the_command_prints_and_draws_boxes(model, tmp_path):
  paths = [str(tmp_path / name) for name in ('rgb.png', 'see_through.png')]
  for path, channels in zip(paths, (3, 4)):
    pixels = np.full((300, 600, channels), 40, np.uint8)
    Image.fromarray(pixels).save(path)
  out = str(tmp_path / 'boxes.png')
  lines = model.report(paths, threshold=0.0, out=out)
  assert lines[::6] == [*paths, f'picture: {out}']
  for line in lines[1:6]:
    assert re.fullmatch(r'  +\d+\.\d\d %  (even|odd)(  \d+)( \d+){3}', line)
  with Image.open(out) as picture:
    assert picture.size == (600, 600)  # Stacked at their own sizes.
  nothing = '  no object with a score of at least 100 % (lower it: --threshold)'
  assert model.report(paths, threshold=1.0) == [paths[0], nothing, paths[1], nothing]


def test_wrong_sizes_are_named(model, config):
  with pytest.raises(ValueError, match='image_size=.*integer'):
    model.detect([np.zeros((8, 8, 3), np.uint8)], image_size=0)
  config = copy.deepcopy(config)
  config.pp.rotate = 10.0
  with pytest.raises(ValueError, match=r'rotate=10.0 is not possible for imag'):
    run_config.check_values(config)
  config.pp.rotate = 0.0
  config.pp.longest_side = 31
  with pytest.raises(ValueError, match='longest_side=31 is shorter than the'):
    run_config.check_values(config)
