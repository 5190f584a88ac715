"""Tests of what TensorBoard shows of a run apart from its curves."""

import copy
import io
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image
import pytest
from tensorboard.backend.event_processing import event_accumulator
import tensorflow as tf

from tests import conftest, looked_up, trees
from vit_jax import input_pipeline, predict, train
from vit_jax.configs import models as model_configs
from vit_jax.data import sources
from vit_jax.distributed import sharding
from vit_jax.figures import grids, internals, pictures
from vit_jax.learning import state as state_lib
from vit_jax.run import config as run_config, metrics as metrics_lib
from vit_jax.tasks import classify


def fit(config, workdir):
  return train.train_and_evaluate(copy.deepcopy(config), str(workdir))


class Shown:
  """The TensorBoard events of a run."""

  def __init__(self, workdir):
    self._events = event_accumulator.EventAccumulator(
      str(workdir), size_guidance={'tensors': 0}
    )
    self._events.Reload()

  def tags(self, plugin):
    """Returns the tags of a TensorBoard plugin."""
    return sorted(self._events.PluginTagToContent(plugin))

  def values(self, tag):
    """Returns (step, value) pairs of a tag."""
    return [
      (x.step, tf.make_ndarray(x.tensor_proto)) for x in self._events.Tensors(tag)
    ]

  def pictures(self, tag):
    """Returns pictures by step."""
    return {
      step: np.asarray(Image.open(io.BytesIO(png)))
      for step, (_, _, png) in self.values(tag)
    }


@pytest.fixture(scope='module')
def config(data_dir):
  config = conftest.make_tiny_config(data_dir)
  config.update(log_images=8, log_attention=True, checkpoint_every=6)
  return config


@pytest.fixture(scope='module')
def run(config, tmp_path_factory):
  """A run of six steps: its folder and its state."""
  workdir = tmp_path_factory.mktemp('run')
  return workdir, fit(config, workdir)[0]


@pytest.fixture(scope='module')
def shown(run):
  return Shown(run[0])


def cells(picture, rows, columns, below):
  """Returns the images of a grid of images of 8 x 8, [n, 8, 8, 3]."""
  return np.stack(
    [
      picture[top : top + 96 : 12, left : left + 96 : 12]
      for top in 8 + (96 + 8 + below) * np.arange(rows)
      for left in 8 + (96 + 8) * np.arange(columns)
    ]
  )


def test_config_is_shown_as_a_table(shown, run):
  assert shown.tags('text') == ['config']
  [(step, text)] = shown.values('config')
  assert step == 0
  lines = text.item().decode().splitlines()
  assert lines[:2] == ['| key | value |', '|---|---|']
  assert '| model.patches.size | `[4, 4]` |' in lines
  assert '| dataset | `"digits"` |' in lines
  assert '| total_steps | `6` |' in lines
  stored = json.loads((run[0] / 'config.json').read_text())
  names = {name for name, value in stored.items() if value != {}}
  assert names <= {line.split()[1].split('.')[0] for line in lines[2:]}


def test_training_images_are_those_of_the_first_update(shown, config):
  config = run_config.complete(config)
  source = sources.open_split(config, 'train')
  example = input_pipeline.labelled_example(config, 10)
  data = input_pipeline.train_dataset(config, source, example, np.arange(16))
  batch = next(data.as_numpy_iterator())
  [(step, picture)] = shown.pictures('training_images').items()
  assert step == 1
  want = ((batch['image'][:8] + 1) / 2 * 255).round()
  got = cells(picture, 2, 4, below=15)
  np.testing.assert_allclose(got[..., :1], want, atol=1)


def first_test_images(config):
  """Returns the first eight test images, uint8 [8, 8], and their classes."""
  source = sources.open_split(run_config.complete(config), 'test')
  found = looked_up.features(source, range(8))
  images = [
    np.asarray(Image.open(io.BytesIO(png)).convert('L')) for png in found['image']
  ]
  return images, np.concatenate(found['label'])


def test_test_images_show_the_predictions_of_their_step(shown, run, config):
  found = shown.pictures('test_images')
  assert list(found) == [3, 6]
  images, labels = first_test_images(config)
  for picture in found.values():
    got = cells(picture, 2, 4, below=30)
    np.testing.assert_allclose(got[..., 0], images, atol=1)
  with Image.open(run[0] / 'test_images.png') as picture:
    np.testing.assert_array_equal(picture, found[6])
  model = predict.load(str(run[0]))
  inputs, logits = model.run(images)
  batch = {'image': inputs['image'], 'label': np.eye(10)[labels]}
  [want] = model.task.draw_evaluation(batch, logits).values()
  # Rounding may change the last digit of a caption.
  assert (abs(found[6].astype(int) - want) <= 3).mean() > 0.998


def test_attention_maps_match_the_weights(shown, run, config):
  found = shown.pictures('attention')
  assert list(found) == [3, 6]
  model = predict.load(str(run[0]))
  inputs, _ = model.run(first_test_images(config)[0])
  seen = internals.attention(model.task.model, model.params, inputs['image'])
  want = pictures.draw_attention(
    model.task.model, inputs['image'], seen.weights, seen.grid
  )
  assert want.shape == found[6].shape
  # Rounding may move a colour, or the last digit of a caption.
  assert (abs(found[6].astype(int) - want) <= 3).mean() > 0.99


def test_pictures_do_not_affect_training(run, config, tmp_path):
  config = copy.deepcopy(config)
  config.update(log_images=0, log_attention=False)
  state, _ = fit(config, tmp_path)
  trees.assert_same(state, run[1])
  ours, theirs = (
    [
      {k: v for k, v in line.items() if not k.startswith('img_sec_core')}
      for line in metrics_lib.read(workdir)
    ]
    for workdir in (tmp_path, run[0])
  )
  assert ours == theirs
  assert Shown(tmp_path).tags('text') == ['config']
  with pytest.raises(KeyError):
    Shown(tmp_path).tags('images')
  assert not list(tmp_path.glob('*_images.png'))


class Probe:
  """A task with augmentation, whose loss reports the batch that the update sees."""

  config = types.SimpleNamespace(log_images=2, log_attention=False, seed=5)

  def augment(self, batch, rng):
    return {'x': batch['x'] * jax.random.uniform(rng, batch['x'].shape)}

  def draw_training(self, batch):
    return batch

  def loss(self, params, extra, batch, rng):
    return (params.sum(), 1.0), {f'{i}': (batch['x'][i], 1.0) for i in range(4)}

  def update_extra(self, extra, params, metrics):
    return extra


def test_training_pictures_use_the_updates_augmentation():
  task, batch = Probe(), {'x': jnp.arange(1.0, 5.0)}
  drawn = pictures.Pictures(task, sharding.make_mesh({'data': -1}), None)
  update = state_lib.make_update(
    task, optax.sgd(0.1), lambda step: 0.1, task.config.seed, 1
  )
  params = jnp.ones(1)
  state = state_lib.TrainState(jnp.int32(7), params, optax.sgd(0.1).init(params))
  _, metrics = jax.jit(update)(state, batch)
  got = drawn.training(batch, 7)['x']
  np.testing.assert_array_equal(got, [metrics['train_0'], metrics['train_1']])
  assert (drawn.training(batch, 8)['x'] != got).all()


def test_failing_pictures_do_not_stop_a_run(caplog):
  task, batch = Probe(), {'x': jnp.arange(1.0, 5.0)}
  task.draw_training = lambda batch: 1 / 0
  drawn = pictures.Pictures(task, sharding.make_mesh({'data': -1}), None)
  assert drawn.training(batch, 7) == {}
  assert 'pictures cannot be drawn: ZeroDivisionError: ' in caplog.text


def make_task(data_dir, names=('ant', 'bee', 'cow'), **changes):
  config = conftest.make_tiny_config(data_dir)
  config.update(changes)
  return classify.Task(run_config.complete(config), {'class_names': list(names)})


def test_captions_name_the_predicted_and_the_true_class(data_dir):
  task = make_task(data_dir)
  logits = np.log([[0.02, 0.97, 0.01], [0.3, 0.09, 0.61], [0.2, 0.3, 0.5]])
  label = np.float32([[0, 1, 0], [0, 1, 0], [0, 0, 0]])
  assert task.captions_of({'label': label}, np.float32(logits)) == [
    ('bee: 97 %\n', grids.RIGHT),
    ('cow: 61 %\nis bee', grids.WRONG),
    ('cow: 50 %\n', 'black'),  # Unlabelled.
  ]
  label = np.float32([[0, 1, 0], [0.25, 0.75, 0], [1, 0, 1], [0, 0, 0]])
  texts = [caption.text for caption in task.captions_of({'label': label})]
  assert texts == ['bee', 'bee: 75 %\nant: 25 %', 'ant\ncow', '']


def test_any_of_several_labels_is_right(data_dir):
  task = make_task(data_dir, loss='sigmoid')
  label = np.float32([[1, 0, 1], [1, 0, 1]])
  logits = np.float32([[-1, -2, np.log(3)], [-1, 0, -2]])
  assert task.captions_of({'label': label}, logits) == [
    ('cow: 75 %\n', grids.RIGHT),
    ('bee: 50 %\nis ant, cow', grids.WRONG),
  ]


def test_rejects_models_without_attention_before_writing(config, tmp_path):
  config = copy.deepcopy(config)
  config.model = model_configs.get_config('mixer_b16')
  config.model.num_blocks = 1
  config.model.patches.size = (4, 4)
  message = 'log_attention=True .*MlpMixer.*--config.log_attention=False'
  with pytest.raises(ValueError, match=message):
    fit(config, tmp_path / 'run')
  config.log_images = 0
  with pytest.raises(ValueError, match='log_attention=True .*log_images=0'):
    fit(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
