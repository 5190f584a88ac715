"""Tests of panoptic segmentation with EoMT, from COCO's files to the table."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from PIL import Image
from pycocotools import coco, cocoeval, mask as coco_mask
import pytest
import torch

from tests import conftest, evaluations, tiny_models
from tests.tasks.detection import panoptic_quality_test
from vit_jax import predict, train
from vit_jax.commands import predict as predict_command
from vit_jax.data import sources
from vit_jax.distributed import sharding
from vit_jax.evaluators import base
from vit_jax.run import config as run_config
from vit_jax.tasks.detection import (
  average_precision as ap,
  detect,
  mask_average_precision as mask_ap,
  panoptic_quality as pq,
  segment,
)
from vit_jax.tasks.segmentation import segment_masks

# Things, and stuff; a colour for each class.
NAMES = ['cat', 'dog', 'sand', 'sky']
COLORS = np.array([(250, 0, 0), (0, 250, 0), (0, 0, 250), (90, 90, 90)], np.uint8)
SIZES = ((24, 32), (40, 20), (33, 47))
CROWD = 1  # Number of a thing that is a crowd, in images of the third size.


def make_scene(number):
  """Returns the segment of each pixel, [H, W], the classes of segments, and crowds."""
  rng = np.random.default_rng(number)
  height, width = SIZES[number % len(SIZES)]
  segments = np.zeros((height, width), int)
  segments[height // 2 :] = 1
  labels = [3, 2]
  for _ in range(3):
    y, x = rng.integers(0, (height - 8, width - 8))
    segments[y : y + 12, x : x + 10] = len(labels)
    labels.append(int(rng.integers(0, 2)))
  crowds = [k == 2 + CROWD and number % len(SIZES) == 2 for k in range(5)]
  return segments, labels, crowds


def write_split(root, split, numbers):
  """Writes images, whose colours are those of classes, and COCO's panoptic files."""
  folder = root / 'annotations' / f'panoptic_{split}'
  folder.mkdir(parents=True)
  (root / split).mkdir()
  images, annotations = [], []
  for number in numbers:
    segments, labels, crowds = make_scene(number)
    name = f'{number}.png'
    Image.fromarray(COLORS[np.array(labels)[segments]]).save(root / split / name)
    ids = 300 * segments + 7
    id_pixels = ids[..., None] // np.array([1, 256, 65_536]) % 256
    Image.fromarray(id_pixels.astype(np.uint8)).save(folder / name)
    height, width = segments.shape
    images.append({'id': number, 'file_name': name, 'height': height, 'width': width})
    info = []
    for k, (label, crowd) in enumerate(zip(labels, crowds)):
      rows, columns = np.nonzero(segments == k)
      if not len(rows):
        continue
      x, y = int(columns.min()), int(rows.min())
      box = [x, y, int(columns.max()) + 1 - x, int(rows.max()) + 1 - y]
      info.append(
        {
          'id': 300 * k + 7, 'category_id': label, 'bbox': box,
          'area': len(rows), 'iscrowd': int(crowd),
        }
      )  # fmt: skip
    annotations.append({'image_id': number, 'file_name': name, 'segments_info': info})
  categories = [
    {'id': i, 'name': name, 'isthing': int(i < 2)} for i, name in enumerate(NAMES)
  ]
  content = {'images': images, 'annotations': annotations, 'categories': categories}
  folder.with_suffix('.json').write_text(json.dumps(content))


def write_data(root):
  write_split(root, 'train', range(8))
  write_split(root, 'val', range(8, 13))
  return root


def make_config(root, **options):
  config = conftest.make_tiny_config(None)
  config.update(task='segment', dataset=str(root), batch_eval=8)
  config.pp.update(crop=16, channels=3, train='train', test='validation')
  config.eval_every = 6
  config.model.update(kind='eomt', num_queries=8, num_query_layers=1, num_upscales=1)
  config.task_options = dict(max_objects=5, num_points=16, truth_size=64, **options)
  return run_config.complete(config)


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  root = tmp_path_factory.mktemp('panoptic') / 'data'
  root.mkdir()
  return write_data(root)


@pytest.fixture(scope='module')
def workdir(data):
  """A finished run."""
  folder = data.parent / 'run'
  train.train_and_evaluate(make_config(data), str(folder))
  return folder


def test_targets_are_visible_things_and_merged_stuff():
  # Objects: stuff 3, thing 0, stuff 3, thing 1 without pixels, thing 0; then padding.
  labels = jnp.array([[3, 0, 3, 1, 0, 0]])
  segments = jnp.array([[[1, 1, 2], [3, 0, 5]]], jnp.uint8)
  targets = jax.jit(functools.partial(segment_masks.targets, stuff={3}))
  labels, numbers, counts = targets(labels, segments, jnp.array([5]))
  assert counts.tolist() == [3]
  assert labels[0, :3].tolist() == [3, 0, 0]
  assert numbers[0].tolist() == [[1, 1, 2], [1, 0, 3]]


class ColorModel:
  """A fake EoMT: query k finds all pixels of the colour of class k, the last one none."""

  num_queries = 5

  def apply(self, variables, images, **_):
    pixels = (images + 1) / 2 * 255
    colors = np.array([*COLORS.tolist(), [-99] * 3], np.float32)[:, None, None]
    is_near = jnp.abs(pixels[:, None] - colors).max(axis=-1) < 60  # [B, 5, H, W]
    b, q, h, w = is_near.shape
    blocks = is_near.reshape(b, q, h // 2, 2, w // 2, 2).mean(axis=(3, 5))
    occurs = is_near.any(axis=(2, 3))[..., None]
    logits = 5 * jnp.eye(5) * occurs + 2 * jnp.eye(1, 5, 4)
    logits += 0.1 * jnp.arange(5) * jnp.eye(5)
    return {'logits': logits[None], 'masks': 8 * (blocks[None] - 0.5)}


def make_task(config):
  """Returns the task of a config on the folder."""
  source = sources.open_split(config, 'train', segment.Task.FEATURES)
  return segment.Task(config, segment.Task.make_metadata(config, source))


@pytest.fixture(scope='module')
def color_task(data):
  """The task with a model that knows colours, and its predictor."""
  config = make_config(data)
  config.pp.crop = 32
  task = make_task(config)
  task.model = ColorModel()
  return task, task.predictor({}, {}, 0)


def evaluate(task, *evaluators):
  """Returns the metrics of the validation split."""
  source = sources.open_split(task.config, 'validation', task.FEATURES)
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  data = evaluations.evaluation(task, mesh, source)
  [shared] = base.sharing_passes(data, [evaluator(data) for evaluator in evaluators])
  return shared.run({}, {})


def paths_of(data):
  return [str(data / 'val' / f'{i}.png') for i in range(8, 13)]


def test_quality_and_precision_match_the_definition_and_pycocotools(data, color_task):
  task, predictor = color_task
  metrics = evaluate(task, mask_ap.PanopticQualityAndPrecision)
  assert metrics['num_examples'] == 5

  images = []
  for number, (predicted, predictions) in zip(
    range(8, 13), predictor.segment(paths_of(data)), strict=True
  ):
    segments, labels, crowds = make_scene(number)
    predicted_labels = [NAMES.index(name) for name, *_ in predictions]
    images.append((segments + 1, labels, crowds, predicted, predicted_labels))
  quality = panoptic_quality_test.by_definition(images, 4)
  assert 0.2 < metrics['PQ'] < 0.9
  assert metrics['PQ'] == pytest.approx(np.mean(list(quality.values())))
  assert metrics['PQ_stuff'] == pytest.approx((quality[2] + quality[3]) / 2)

  expected = by_pycocotools(data, task, predictor)
  assert 0.05 < expected[0] < 0.9
  precisions = [metrics[f'mask_{name}'] for name in ap.NAMES]
  np.testing.assert_allclose(precisions, np.where(expected < 0, np.nan, expected))


def test_images_of_any_shape_lie_on_canvases(data):
  config = make_config(data, tight=64)
  config.pp.update(
    sides=(24, 32), eval_side=32, longest_side=64, canvases=2, canvas_multiple=16,
    crop_sides=(),
  )  # fmt: skip
  with pytest.raises(ValueError, match='position_grid'):
    make_task(config)
  config.model.transformer.position_grid = (4, 4)
  task = make_task(config)
  params, _ = jax.eval_shape(task.init, jax.random.key(0))
  for canvas in ((32, 48), (64, 64)):
    spec = task.input_spec(canvas, batch=2)
    outputs = jax.eval_shape(task.outputs, params, {}, spec)
    assert outputs['masks'].shape == (2, 8, canvas[0] // 2, canvas[1] // 2)
  config.pp.canvas_multiple = 18
  with pytest.raises(ValueError, match='canvas_multiple=18 must be a multiple'):
    make_task(config)
  config.pp.canvas_multiple = 16
  task = make_task(config)
  task.model = ColorModel()
  assert evaluate(task, pq.PanopticQuality)['PQ_stuff'] > 0.9


def test_models_without_masks_or_boxes_are_named(data):
  config = make_config(data)
  config.task = 'detect'
  config.task_options = {'max_objects': 5}
  with pytest.raises(ValueError, match='--config.task=segment for its masks'):
    detect.Task(run_config.complete(config), {'class_names': NAMES})
  config = make_config(data)
  config.model = tiny_models.config()
  with pytest.raises(ValueError, match="models with queries.*kind='vit'"):
    segment.Task(config, {'class_names': NAMES, 'isthing': [True] * 4})


def by_pycocotools(data, task, predictor):
  """Computes the average precision of masks with the original library."""
  truth, results = [], []
  images, masks = [], predictor.outputs(paths_of(data))
  masks['extent'] = np.ones((5, 2))
  for row, number in enumerate(range(8, 13)):
    segments, labels, crowds = make_scene(number)
    height, width = segments.shape
    images.append({'id': number, 'height': height, 'width': width})
    for k, label in enumerate(labels):
      if label < 2 and (segments == k).any():
        line = {'image_id': number, 'category_id': label, 'iscrowd': int(crowds[k])}
        truth.append({**line, **as_runs(segments == k), 'id': len(truth) + 1})
    for mask, label, score in task.candidates(masks, row, segments.shape):
      line = {'image_id': number, 'category_id': label, 'score': score}
      if mask.any():
        results.append({**line, 'segmentation': as_runs(mask)['segmentation']})
  reference = coco.COCO()
  reference.dataset = {
    'info': {},
    'images': images,
    'categories': [{'id': i} for i in range(2)],
    'annotations': truth,
  }
  reference.createIndex()
  measure = cocoeval.COCOeval(reference, reference.loadRes(results), 'segm')
  measure.evaluate()
  measure.accumulate()
  measure.summarize()
  return measure.stats


def as_runs(mask):
  """Returns COCO's segmentation and area of a mask."""
  runs = coco_mask.encode(np.asfortranarray(mask, np.uint8))
  return {'segmentation': runs, 'area': float(mask.sum())}


def test_candidates_are_those_of_the_released_code():
  """The best pairs of a query and a class, of which things remain."""
  rng = np.random.default_rng(0)
  logits = torch.tensor(rng.normal(0, 2, (40, 5)), dtype=torch.float32)
  masks = torch.tensor(rng.normal(0, 2, (40, 6, 5)), dtype=torch.float32)
  scores, indices = logits.softmax(-1)[:, :-1].flatten().topk(100)
  queries, labels = indices // 4, indices % 4
  pair_masks = masks[queries]
  inside = pair_masks > 0
  quality = (pair_masks.sigmoid() * inside).sum((1, 2)) / (inside.sum((1, 2)) + 1e-6)
  expected = [
    (label, score, pixels)
    for label, score, pixels in zip(
      labels.tolist(), (scores * quality).tolist(), inside.sum((1, 2)).tolist()
    )
    if label < 2
  ]
  task = types.SimpleNamespace(is_thing=(True, True, False, False))
  row = {'logits': logits[None].numpy(), 'masks': masks[None].numpy()}
  row['extent'] = np.ones((1, 2))
  candidates = []
  for mask, label, score in segment_masks.Task.candidates(task, row, 0, (6, 5)):
    candidates.append((label, score, int(mask.sum())))
  assert 30 < len(candidates) < 70
  order = lambda rows: sorted(rows, key=lambda x: -x[1])
  for candidate, reference in zip(order(candidates), order(expected), strict=True):
    assert candidate == pytest.approx(reference, rel=1e-5)


def test_predicts_segments_and_instances(data, color_task, tmp_path):
  _, predictor = color_task
  [path, *_] = paths_of(data)
  segments, labels, _ = make_scene(8)
  classes = np.array(labels)[segments]
  [(regions, instances)] = predictor.instances([path])
  assert sorted(name for name, *_ in instances) == ['cat', 'dog']
  assert instances[0][1] > instances[1][1]
  for region, (name, score, box, area) in zip(regions, instances):
    is_class = classes == NAMES.index(name)
    assert (region & is_class).sum() / (region | is_class).sum() > 0.7
    rows, columns = np.nonzero(region)
    edges = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    assert box == edges
    assert area == region.sum()
    assert 0.8 < score < 1
  out = str(tmp_path / 'out.png')
  lines = list(predictor.report([path], out=out, instances=True))
  assert lines[0] == path
  assert lines[1].endswith(f'{instances[0][3]:,} pixels')
  assert lines[-1] == f'picture: {out}'
  lines = list(predictor.report([path]))
  assert 'stuff' in ' '.join(lines)
  scores = [float(line.split(' %')[0]) for line in lines[1:]]
  assert scores == sorted(scores, reverse=True)

  import gradio as gr  # Takes seconds.

  with gr.Blocks():
    show, controls, (_, picture, summary) = predictor.page()
  photo = types.SimpleNamespace(path=path, pixels=np.asarray(Image.open(path)))
  assert len(controls) == 2
  for choice, count in (('segments', 4), ('instances', 2)):
    shown = show(photo, 0.7, choice)
    assert shown[summary].startswith(f'{count} {choice} with')
    assert min(shown[picture].shape[:2]) >= 256


def test_trains_evaluates_and_writes_a_table(workdir, data, tmp_path):
  records = [
    json.loads(x) for x in (workdir / 'metrics.jsonl').read_text().splitlines()
  ]
  assert np.isfinite(records[-1]['loss_test'])
  assert {'PQ_test', 'mask_AP_test'} <= records[-1].keys()
  flags = [f'--workdir={workdir}', '--threshold=0', '--nodistributed']
  model = predict.load(str(workdir))
  assert model.export(tmp_path / 'onnx', 'onnx') < 1e-4
  for flag, results in (
    ([], model.segment(paths_of(data), 0.0)),
    (['--instances'], model.instances(paths_of(data), 0.0)),
  ):
    out = tmp_path / f'{len(flag)}.parquet'
    predict_command.main([*flags, *flag, f'--out={out}', *paths_of(data)])
    for row, (shapes, predictions) in zip(
      pd.read_parquet(out).to_dict('records'), results, strict=True
    ):
      assert row['classes'].tolist() == [name for name, *_ in predictions]
      scores = [x[1] for x in predictions]
      np.testing.assert_allclose(row['scores'], scores, atol=1e-5)
      for k, counts in enumerate(row['masks']):
        runs = {'size': row['size'].tolist(), 'counts': counts}
        mask = shapes[k] if flag else shapes == k + 1
        np.testing.assert_array_equal(coco_mask.decode(runs), mask)
        x, y, width, height = coco_mask.toBbox(runs)
        assert row['boxes'][k].tolist() == [x, y, x + width, y + height]
        assert row['areas'][k] == mask.sum()
