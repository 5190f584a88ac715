"""Tests of masked patch prediction: corruption, targets, loss and runs."""

import copy
import json
import math

import jax
import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from tests import conftest, evaluations, tiny_models
from vit_jax import predict, train
from vit_jax.commands import predict as predict_command
from vit_jax.configs import common, masked_patches as config_lib
from vit_jax.data import sources
from vit_jax.distributed import sharding
from vit_jax.layers import patches as patches_lib
from vit_jax.run import config as run_config, metrics as metrics_lib
from vit_jax.tasks import masked_patches
from vit_jax.weights import convert

# Compiled once for each shape.
colors = jax.jit(masked_patches.colors)
mean_colors = jax.jit(masked_patches.mean_colors, static_argnums=1)


def options(**kwargs):
  return masked_patches.Task.Options(**kwargs)


def draw(n, patches=50, **kwargs):
  """Fates and replacement patches of n images, int [n, patches]."""
  corrupt = tf.function(
    lambda seeds: tf.map_fn(
      lambda s: masked_patches.corrupt(s, patches, options(**kwargs)),
      seeds,
      fn_output_signature=(tf.int32, tf.int32),
    )
  )
  fate, other = corrupt(tf.constant(np.arange(4 * n).reshape(n, 2, 2), tf.int64))
  return fate.numpy(), other.numpy()


def test_half_are_corrupted_and_split_80_10_10():
  fate, other = draw(2000)
  shares = np.bincount(fate.reshape(-1), minlength=4) / fate.size
  want = [0.5, 0.4, 0.05, 0.05]
  # 100,000 independent draws: five standard deviations.
  for share, p in zip(shares, want):
    assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / fate.size)
  # A patch is never swapped with itself; all others are equally likely.
  offset = (other - np.arange(50)) % 50
  counts = np.bincount(offset.reshape(-1), minlength=50)
  assert counts[0] == 0
  assert abs(counts[1:] / other.size - 1 / 49).max() < 5 * math.sqrt(
    1 / 49 / other.size
  )


def test_patches_are_cut_in_token_order_and_pasted_back():
  image = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
  patches = patches_lib.cut(image, (2, 3))
  assert patches.shape == (2, 6, 2, 2, 3)
  np.testing.assert_array_equal(patches[1, 4], image[1, 2:4, 2:4])
  np.testing.assert_array_equal(patches_lib.paste(patches, (2, 3)), image)


def test_colours_have_three_bits_per_channel():
  numbers = np.arange(8**3)
  np.testing.assert_array_equal(colors(masked_patches.middle(numbers, 3)), numbers)
  # -1, just below and at 0, 1: the bins 0, 3, 4, 7 of 8.
  values = np.array([[-1.0, -1e-3, 0.0], [1.0, 1.0, 1.0], [-1, -1, -1]])
  np.testing.assert_array_equal(colors(values), [0 * 64 + 3 * 8 + 4, 511, 0])
  grey = np.array([[-0.76], [-0.74]])  # 0.12 and 0.13 on [0, 1]: around 1/8.
  np.testing.assert_array_equal(colors(grey), [0, 1])


def test_targets_are_means_over_the_patch_or_its_cells():
  rng = np.random.RandomState(0)
  patches = rng.uniform(-1, 1, (2, 3, 8, 4, 3)).astype(np.float32)
  got = mean_colors(patches)[..., 0]
  want = np.floor((patches.mean(axis=(2, 3)) + 1) * 4) @ [64, 8, 1]
  np.testing.assert_array_equal(got, want)
  cells = mean_colors(patches, 4)  # Cells of 2 x 1 pixels.
  assert cells.shape == (2, 3, 16)
  cell = patches[1, 2, 4:6, 3]  # The third row, the last column.
  want = np.floor((cell.mean(axis=0) + 1) * 4) @ [64, 8, 1]
  assert cells[1, 2, 2 * 4 + 3] == want


def make_task(data_dir, target='mean', channels=1, **kwargs):
  config = conftest.make_tiny_config(data_dir)
  config.task = 'masked_patches'
  config.pp.channels = channels
  config.update(**kwargs)
  config.task_options = {'target': target}
  config = run_config.complete(config)
  return masked_patches.Task(config, {})


def make_batch(task, n=4):
  rng = np.random.RandomState(0)
  fate, other = draw(n, task.num_patches)
  shape = (n, *task.image_size, task.config.pp.channels)
  image = rng.uniform(-1, 1, shape).astype(np.float32)
  return {'image': image, 'fate': fate, 'other': other}


@pytest.mark.parametrize('target, channels', [('mean', 3), ('4x4', 1), ('l2', 3)])
def test_only_corrupted_patches_count_in_the_loss(data_dir, target, channels):
  """For zero outputs, as of a new head, every loss has a closed form."""
  task = make_task(data_dir, target, channels)
  batch = make_batch(task)
  outputs = np.zeros((*batch['fate'].shape, task.model.num_classes), np.float32)
  sums = jax.jit(task._sums)(outputs, batch)
  total, weight = sums['loss']
  corrupted = batch['fate'] != masked_patches.KEPT
  assert weight == corrupted.sum()
  patches = patches_lib.cut(batch['image'], task.grid)
  if target == 'l2':
    want = (patches**2).mean(axis=(2, 3, 4))[corrupted].sum()
  else:
    want = math.log(8**channels) * corrupted.sum()
  np.testing.assert_allclose(total, want, rtol=1e-5)
  right, count = sums['accuracy']
  assert count == weight
  # The prediction is colour 0, or mid-grey for pixels.
  target_colors = mean_colors(patches, 4 if target == '4x4' else 1)
  guess = colors(np.zeros(channels)) if target == 'l2' else 0
  hits = (np.asarray(target_colors) == guess).mean(axis=-1)[corrupted].sum()
  np.testing.assert_allclose(right, hits, rtol=1e-6)
  # Padding rows do not count.
  batch['mask'] = np.float32([1, 0, 0, 0])
  assert jax.jit(task._sums)(outputs, batch)['loss'][1] == corrupted[0].sum()


def test_tokens_are_masked_swapped_or_left(data_dir):
  task = make_task(data_dir)
  params, _ = tiny_models.of_task(task)
  batch = make_batch(task, n=1)
  image = batch['image']
  n = task.num_patches
  outputs = jax.jit(lambda **batch: task.outputs(params, {}, batch))

  def predict_with(image, fate, other=None):
    other = np.zeros((1, n), np.int32) if other is None else other
    fate = np.array([fate], np.int32)
    return np.asarray(outputs(image=image, fate=fate, other=other))

  kept = predict_with(image, [0, 0, 0, 0])
  unchanged = predict_with(image, [masked_patches.UNCHANGED] * n)
  np.testing.assert_array_equal(kept, unchanged)
  # A masked patch has no influence.
  fate = [masked_patches.MASKED, 0, 0, 0]
  other_image = image.copy()
  other_image[:, :4, :4] = 0.5
  np.testing.assert_array_equal(
    predict_with(image, fate), predict_with(other_image, fate)
  )
  assert abs(predict_with(image, fate) - kept).max() > 1e-4
  # A swapped patch has the content of the other one at its own position.
  copied = image.copy()
  copied[:, :4, :4] = image[:, 4:, :4]
  np.testing.assert_allclose(
    predict_with(
      image, [masked_patches.SWAPPED, 0, 0, 0], np.array([[2, 0, 0, 0]], np.int32)
    ),
    predict_with(copied, [0, 0, 0, 0]),
    atol=1e-6,
  )


@pytest.fixture(scope='module')
def finished(data_dir, tmp_path_factory):
  """A run of masked patches: config, workdir and metrics."""
  config = conftest.make_tiny_config(data_dir)
  config.update(task='masked_patches', log_images=8, batch_eval=40)
  config.update(total_steps=2, eval_every=2, evals=(('test', 'test[:40]'),))
  workdir = tmp_path_factory.mktemp('masked')
  _, metrics = train.train_and_evaluate(copy.deepcopy(config), str(workdir))
  return config, workdir, metrics


def test_a_run_logs_accuracy_and_ends_with_a_picture(finished):
  _, workdir, metrics = finished
  assert metrics['num_examples_test'] == 40
  lines = metrics_lib.read(workdir)
  assert all('train_accuracy' in x for x in lines if 'train_loss' in x)
  assert 0 <= metrics['accuracy_test'] <= 1
  # A uniform guess among 8 greys has a loss of ln 8.
  assert metrics['loss_test'] < math.log(8) + 0.1
  with Image.open(workdir / 'masked_patches.png') as picture:
    assert picture.size == (3 * (96 + 8) + 8, 8 * (96 + 8) + 20)
  assert not (workdir / 'class_names.json').exists()
  stored = json.loads((workdir / 'config.json').read_text())
  assert stored['task_options']['corruption'] == 0.5


@pytest.fixture(scope='module')
def model(finished):
  return predict.load(str(finished[1]))


def test_evaluation_masks_the_same_patches_in_any_batch(finished):
  _, workdir, metrics = finished
  mesh = sharding.make_mesh({'data': 8})
  model = predict.load(str(workdir), mesh=mesh)
  source = sources.open_for(model.config, type(model.task), {}, 'test[:40]')
  model.config.batch_eval = 16
  [evaluator] = evaluations.evaluators(model.task, mesh, source)
  again = evaluator.run(model.params, model.extra)
  assert again['accuracy'] == pytest.approx(metrics['accuracy_test'])
  assert again['loss'] == pytest.approx(metrics['loss_test'], rel=1e-5)


def test_prediction_returns_masked_and_predicted_images(model):
  images = [np.full((8, 8), value, np.uint8) for value in (0, 255)]
  pictures = model.predict(images)
  assert [p.shape for p in pictures] == [(3, 8, 8, 1)] * 2
  image, seen, guessed = pictures[1]
  assert (image == 1).all()
  assert set(np.unique(seen)) <= {0.0, 1.0}
  kept = seen == 1
  np.testing.assert_array_equal(guessed[kept], image[kept])
  assert model.predict([]) == []


def test_the_command_writes_a_picture(finished, tmp_path, monkeypatch, capsys):
  _, workdir, _ = finished
  image = str(workdir / 'example.png')
  out = tmp_path / 'out.png'

  def run(*args):
    predict_command.main([f'--workdir={workdir}', *args])
    return capsys.readouterr().out

  assert f'1 image, masked and predicted, to {out}' in run(image, f'--out={out}')
  with Image.open(out) as picture:
    assert picture.size == (3 * (96 + 8) + 8, 96 + 8 + 20)
  with pytest.raises(ValueError, match="out='/no/where.png'.*--out"):
    run(image, '--out=/no/where.png')


def test_fine_tuning_restores_all_but_head_and_mask_token(
  finished, model, data_dir, tmp_path
):
  _, workdir, _ = finished
  config = conftest.make_tiny_config(data_dir)
  config.pretrained = str(workdir)
  prepared = train.prepare(config, str(tmp_path / 'tuned'))
  weights = train.check_start(prepared, str(tmp_path / 'tuned'))
  checkpoints, state, _ = train.start(prepared, str(tmp_path / 'tuned'), weights)
  checkpoints.close()
  pretrained = model.params
  assert 'mask_token' in pretrained
  assert 'mask_token' not in state.params
  assert state.params['head']['kernel'].shape == (16, 10)
  for key in ('Transformer', 'embedding', 'cls'):
    jax.tree.map(np.testing.assert_array_equal, state.params[key], pretrained[key])
  converted, _ = convert.convert(str(workdir), str(tmp_path / 'masked.npz'))
  assert converted.num_classes == 0
  with np.load(tmp_path / 'masked.npz') as arrays:
    assert not {'mask_token', 'head/kernel'} & set(arrays.files)


def test_recipe_matches_the_paper():
  config = config_lib.get_config('b16,imagenet2012')
  assert (config.optimizer, config.base_lr, config.decay_type) == (
    'adam', 2e-4, 'cosine',
  )  # fmt: skip
  assert (config.batch, config.total_steps, config.warmup_steps) == (
    4096, 1_000_000, 10_000,
  )  # fmt: skip
  # 512 colours per patch, and the parameters of B/16 without its classifier.
  config = run_config.complete(config)
  task = masked_patches.Task(config, {})
  params, _ = jax.eval_shape(task.init, jax.random.key(0))
  count = sum(x.size for x in jax.tree.leaves(params))
  assert count == 86_567_656 - 769 * 1000 + 769 * 512 + 768


@pytest.mark.parametrize(
  'change, message',
  [
    ({'corruption': 0.0}, 'corruption=0.0 .*above 0 and at most 1'),
    ({'masked': 0.9, 'swapped': 0.2}, 'must not sum to more than 1'),
    ({'target': 'hog'}, "target='hog' .*'mean', '4x4', 'l2'"),
  ],
)
def test_wrong_options_are_named(data_dir, change, message):
  config = conftest.make_tiny_config(data_dir)
  config.task = 'masked_patches'
  config.task_options = change
  with pytest.raises(ValueError, match=message):
    masked_patches.Task(run_config.complete(config), {})


def test_a_model_without_tokens_is_named():
  config = common.get_config()
  config.task = 'masked_patches'
  config = run_config.complete(config)
  config.model = config_lib.models.get_config('mixer_b16')
  with pytest.raises(ValueError, match='no tokens to mask'):
    masked_patches.Task(config, {})
