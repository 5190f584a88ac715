"""Tests of ReaL accuracy on hand-made labels."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
import pytest

from vit_jax.data import records, sources
from vit_jax.data.images import images
from vit_jax.distributed import sharding
from vit_jax.evaluators import base, real
from vit_jax.inference import engine
from vit_jax.run import config as run_config

# Labels of files 1 to 6; files 2 and 5 do not count.
LABELS = [[0, 2], [], [1], [2, 1], [], [0]]
# Predictions of `task` for images 1 to 6, encoded in their grey values.
PREDICTED = [2, 0, 0, 1, 1, 0]
ORDER = [4, 1, 6, 3, 2, 5]  # The data have another order.


def png(number):
  grey = PREDICTED[number - 1] * 100
  return images.encode_png(np.full((8, 8, 3), grey, np.uint8))


def source(names=None):
  names = names or [f'ILSVRC2012_val_{i:08}.JPEG' for i in ORDER]
  columns = {
    'image': [png(i) for i in ORDER],
    'label': np.zeros((6, 1), np.int64),
    'file_name': names,
  }
  return records.MemorySource(columns, {'label': tuple('abc')})


@pytest.fixture
def task(tiny_config):
  """A classifier of three shades of grey, without a model."""
  tiny_config.pp.channels = 3
  tiny_config.batch_eval = 8
  config = run_config.complete(tiny_config)
  cls = run_config.get_task('classify')
  task = cls(config, {'class_names': ['a', 'b', 'c']})

  def outputs(params, extra, batch):
    shade = (batch['image'].mean(axis=(1, 2, 3)) + 1) * 1.275
    return -jnp.abs(shade[:, None] - jnp.arange(3))

  task.outputs = outputs
  return task


def make(task, labels, path, open_split=lambda split, further=(): source()):
  path.write_text(labels if isinstance(labels, str) else json.dumps(labels))
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  evaluation = base.Evaluation(task, mesh, 'validation', open_split)
  return real.Real(evaluation, str(path))


def test_sets_of_labels_are_matched_by_file_name(task, tmp_path):
  """Right: 1, 4 and 6; wrong: 3; the empty sets of 2 and 5 do not count."""
  evaluator = make(task, LABELS, tmp_path / 'real.json')
  found = evaluator.run({}, {})
  assert (found['accuracy_real'], found['num_real']) == (0.75, 4)
  with pytest.raises(engine.Stopped):
    evaluator.run({}, {}, lambda: True)


def test_image_folders_provide_file_names(task, tmp_path):
  for i in ORDER:
    folder = tmp_path / 'validation' / 'abc'[i % 3]
    folder.mkdir(parents=True, exist_ok=True)
    name = folder / f'ILSVRC2012_val_{i:08}.JPEG'
    Image.fromarray(
      np.full((8, 8, 3), PREDICTED[i - 1] * 100, np.uint8)
    ).save(name)  # fmt: skip
  task.config.dataset = str(tmp_path)

  def open_split(split, further=()):
    return sources.open_split(task.config, split, ('image', 'label', *further))

  evaluator = make(task, LABELS, tmp_path / 'real.json', open_split)
  found = evaluator.run({}, {})
  assert (found['accuracy_real'], found['num_real']) == (0.75, 4)


@pytest.mark.parametrize(
  ('labels', 'message'),
  [
    (LABELS[:5], "5 images.*'validation'.* 6 images"),
    ([*LABELS[:5], [3]], 'classes .* 0 to 2'),
    ('[[1', 'list of lists'),
  ],
)
def test_unsuitable_labels_are_named(task, tmp_path, labels, message):
  with pytest.raises(ValueError, match=f'real.json.*{message}'):
    make(task, labels, tmp_path / 'real.json')


def test_a_missing_file_is_named(task, tmp_path):
  with pytest.raises(FileNotFoundError, match='no/real.json'):
    real.Real(base.Evaluation(task, None, 'validation'), 'no/real.json')


def test_images_without_imagenet_file_names_are_named(task, tmp_path):
  names = ['ILSVRC2012_val_00000007.JPEG', *['n015_54.JPEG'] * 5]
  with pytest.raises(ValueError, match="'example 0' and 5 more"):  # fmt: skip
    make(task, LABELS, tmp_path / 'real.json', lambda *_: source(names))
