"""Tests of the iGPT task, on a tiny model."""

import copy
import json
import math

import jax
import ml_collections
import numpy as np
from PIL import Image
import pytest
from scipy import special

from tests import conftest, looked_up, tiny_models
from vit_jax import models_igpt, predict, train
from vit_jax.commands import predict as predict_command
from vit_jax.configs import igpt_finetune
from vit_jax.data import sources
from vit_jax.run import config as run_config
from vit_jax.tasks.pixels import finetune as pixels_finetune, pixels

MODEL = dict(
  kind='igpt', num_colors=4, num_positions=64, hidden_size=16, num_layers=1,
  num_heads=2,
)  # fmt: skip
GREYS = [[-1.0], [-0.4], [0.3], [1.0]]


def make_config(data_dir, **model):
  config = conftest.make_tiny_config(data_dir)
  config.pp.crop_area = None
  config.task = 'pixels'
  config.model = ml_collections.ConfigDict({**MODEL, **model})
  config.best_metric = 'bits_per_dim_test'
  config.pp.train = 'train[:120]'
  config.evals = (('test', 'test[:40]'),)
  config.update(batch_eval=40, log_images=3, total_steps=4, eval_every=2)
  return config


def make_task(data_dir, cls=pixels.Task, metadata=None, **model):
  config = make_config(data_dir, **model)
  if cls is pixels_finetune.Task:
    config.task = 'pixels_finetune'
  metadata = metadata or {'palette': GREYS, 'class_names': ['a', 'b', 'c']}
  if cls is pixels.Task:
    metadata.pop('class_names', None)
  return cls(run_config.complete(config), metadata)


def images(count=3):
  shape = count, 8, 8, 1
  return np.random.RandomState(1).uniform(-1, 1, shape).astype(np.float32)


def nats_of(logits, colors):
  """The cross-entropy of each pixel, in float64."""
  log_p = special.log_softmax(np.asarray(logits, np.float64), axis=-1)
  return -np.take_along_axis(log_p, np.asarray(colors)[..., None], axis=-1)[..., 0]


def test_bits_match_the_logits(data_dir):
  task = make_task(data_dir)
  params, _ = tiny_models.of_task(task)
  batch = {'image': images(), 'mask': np.float32([1, 0, 1])}

  @jax.jit
  def compute(batch, key):
    made = task.augment({'image': batch['image']}, key)
    logits = task.model.apply({'params': params}, made['colors'])
    loss = task.loss(params, {}, made, key)
    measured = task.measure(params, {}, batch)['bits_per_dim']
    return made, logits, loss, measured, task.read(params, {}, batch)['likely']

  made, logits, loss, (total, count), likely = compute(batch, jax.random.key(0))
  assert set(made) == {'colors'}
  nats = nats_of(logits, jax.jit(task.colors)(batch['image']))
  want = nats[[0, 2]].mean() / math.log(2)
  assert float(total / count) == pytest.approx(want, rel=1e-5)
  (total, count), metrics = loss
  assert float(total / count) == pytest.approx(nats.mean(), rel=1e-5)
  bits, _ = metrics['bits_per_dim']
  assert float(bits / count) == pytest.approx(nats.mean() / math.log(2), rel=1e-5)
  np.testing.assert_array_equal(likely, np.argmax(logits, axis=-1))


def test_bert_counts_only_masked_pixels(data_dir):
  task = make_task(data_dir, causal=False)
  params, _ = tiny_models.of_task(task)
  made = jax.jit(task.augment)({'image': images(40)}, jax.random.key(0))
  assert made['masked'].dtype == bool
  # 2,560 draws: four standard deviations.
  assert float(made['masked'].mean()) == pytest.approx(0.15, abs=0.03)
  # Image 0 has no masked pixel and does not count; image 1 has one.
  masked = np.array(made['masked'])
  masked[:2] = False
  masked[1, 5] = True
  made = {**made, 'masked': masked}
  batch = {
    'image': images(4), 'index': np.arange(4), 'mask': np.float32([1, 1, 1, 0])
  }  # fmt: skip

  @jax.jit
  def compute(made, batch):
    (total, count), _ = task.loss(params, {}, made, jax.random.key(0))
    logits = task.model.apply({'params': params}, **made)
    reversed_batch = {name: x[::-1] for name, x in batch.items()}
    both = [task.read(params, {}, x) for x in (batch, reversed_batch)]
    return total / count, logits, both, task.measure(params, {}, batch)

  loss, logits, (read, again), measured = compute(made, batch)
  # As released: the mean within each image, then the mean over images.
  nats = nats_of(logits, made['colors'])
  want = [nats[i, row].mean() for i, row in enumerate(masked) if row.any()]
  assert len(want) == 39
  assert float(loss) == pytest.approx(np.mean(want), rel=1e-5)
  # Padding images have no weight in an evaluation.
  want = [
    bits[counted > 0].mean()
    for bits, counted in zip(read['bits'][:3], read['counted'][:3])
  ]
  total, count = measured['bits_per_dim']
  assert float(total / count) == pytest.approx(np.mean(want), rel=1e-5)
  # Test images have the same masks in any batch.
  for name, value in read.items():
    np.testing.assert_allclose(again[name][::-1], value, atol=1e-5)
  assert not (read['counted'][0] == read['counted'][1]).all()
  drawn = task.draw_evaluation({}, jax.device_get(read))
  assert drawn['masked_pixels'].shape == (4 * 104 + 20, 3 * 104 + 8, 3)


@pytest.fixture(scope='module')
def finished(data_dir, tmp_path_factory):
  """A finished run: config, workdir and metrics."""
  config = make_config(data_dir)
  workdir = tmp_path_factory.mktemp('pixels')
  _, metrics = train.train_and_evaluate(copy.deepcopy(config), str(workdir))
  return config, workdir, metrics


def test_a_run_ends_with_pictures(finished):
  _, workdir, metrics = finished
  assert metrics['num_examples_test'] == 40
  for name, size in (('samples', (3, 1)), ('completions', (3, 3))):
    with Image.open(workdir / f'{name}.png') as picture:
      top = 20 if name == 'completions' else 8
      assert picture.size == (size[0] * 104 + 8, size[1] * 104 + top)
  palette = json.loads((workdir / 'palette.json').read_text())
  assert np.shape(palette) == (4, 1)
  assert palette == sorted(palette)


def test_a_resumed_run_keeps_its_palette(finished, monkeypatch):
  config, workdir, metrics = finished
  monkeypatch.setattr(pixels, '_find_palette', None)  # Must not be called.
  _, again = train.train_and_evaluate(copy.deepcopy(config), str(workdir))
  assert again['bits_per_dim_test'] == metrics['bits_per_dim_test']


@pytest.fixture(scope='module')
def model(finished):
  return predict.load(str(finished[1]))


def test_samples_use_only_palette_colours(model):
  drawn = model.sample(3, seed=3)
  assert (drawn.shape, drawn.dtype) == ((3, 8, 8, 3), np.uint8)
  greys = np.round((np.ravel(model.metadata['palette']) + 1) * 127.5)
  assert set(np.unique(drawn)) <= set(greys.astype(int))
  np.testing.assert_array_equal(model.sample(3, seed=3), drawn)
  assert (model.sample(3, seed=4) != drawn).any()
  likely = model.sample(3, top_k=1)
  np.testing.assert_array_equal(likely[0], likely[1])


def test_completions_keep_the_upper_rows(model):
  pictures = np.zeros((3, 8, 8), np.uint8)
  pictures[1] = 255
  colors = jax.jit(model.task.colors)
  for rows, kept in ((None, 4), (3, 3)):
    completed = model.complete(pictures, rows=rows)
    assert completed.shape == (3, 8, 8, 3)
    for image, completion in zip(pictures, completed):
      color = colors(image[None, ..., None] / 127.5 - 1)
      want = np.ravel(model.metadata['palette'])[np.asarray(color)[0, 0]]
      np.testing.assert_array_equal(completion[:kept], np.round((want + 1) * 127.5))


def test_a_wide_image_is_completed_as_an_upper_part(model):
  whole = np.random.RandomState(0).randint(0, 256, (8, 8), np.uint8)
  larger = whole[:3].repeat(4, axis=0).repeat(4, axis=1)
  completed = model.complete([whole[:3], larger, larger])
  want = model.complete([whole] * 3, rows=3)
  np.testing.assert_array_equal(completed, want)


def test_likelihoods_match_the_evaluation(finished, model):
  _, _, metrics = finished
  source = sources.open_for(model.config, type(model.task), {}, 'test[:40]')
  encoded = looked_up.features(source)['image']
  bits = model.log_likelihood(encoded)
  assert bits.shape == (40,)
  assert bits.mean() == pytest.approx(metrics['bits_per_dim_test'], rel=1e-5)


def test_wrong_sampling_arguments_are_named(model):
  for call, message in (
    (lambda: model.complete([], rows=8), 'rows=8 leaves nothing to complete'),
    (lambda: model.complete([]), 'need at least one'),
    (lambda: model.sample(0), r'sample=0 must be .* least 1 \(--sample\)'),
    (lambda: model.sample(1, temperature=0), 'temperature=0 must be positive'),
    (lambda: model.sample(1, seed=2**32), 'seed=4294967296 must be'),
    (lambda: model.sample(1, top_k=5), 'top_k=5 must be from 1 to the number'),
  ):
    with pytest.raises(ValueError, match=message):
      call()


def test_bert_draws_no_images(data_dir):
  task = make_task(data_dir, causal=False)
  model = task.predictor(None, {}, 1)
  for call in (lambda: model.sample(1), lambda: model.complete(['a.png'])):
    with pytest.raises(ValueError, match=r"masked pixels .*'ar'"):
      call()


def test_the_command_samples_completes_and_measures(
  finished, model, tmp_path, monkeypatch, capsys
):
  _, workdir, _ = finished
  image, out = str(workdir / 'example.png'), tmp_path / 'out.png'
  monkeypatch.setattr(predict, 'load', lambda *_, **__: model)

  def run(*args):
    predict_command.main([f'--workdir={workdir}', *args])
    return capsys.readouterr().out

  assert run('--sample=3', f'--out={out}') == f'Wrote 3 samples to {out}\n'
  with Image.open(out) as picture:
    assert picture.size == (3 * 104 + 8, 112)
    first = np.asarray(picture)[8:104:12, 8:104:12]  # Pixels are enlarged 12 times.
  np.testing.assert_array_equal(first, model.sample(3)[0])
  # Three images, for which the program is already compiled.
  assert '4 of 8 rows kept' in run('--complete', *3 * [image], f'--out={out}')
  with Image.open(out) as picture:
    assert picture.size == (2 * 104 + 8, 3 * 104 + 20)
  lines = run(image).splitlines()
  assert lines[0] == image
  [bits] = model.log_likelihood([image])
  assert lines[1].split()[0] == f'{bits:.4f}'
  for args, message in (
    (('--sample=3',), 'out=None .*picture: pass --out'),
    ((image, f'--out={out}'), 'leave out --out'),
    ((), 'pass image files, or one of --complete, --sample'),
    ((image, '--sample=2'), 'images and --sample'),
    (('--sample=2', '--rows=3', f'--out={out}'), '--rows needs --complete: add it'),
    ((image, '--seed=1'), '--seed needs --sample or --complete'),
    ((image, '--top=1'), "'pixels' has no --top: leave it out"),
    (('--sample=2', f'--out={out}.csv'), 'out=.*path of a picture'),
  ):
    with pytest.raises(ValueError, match=message):
      run(*args)


def test_joint_fine_tuning_adds_the_losses(data_dir):
  task = make_task(data_dir, pixels_finetune.Task)
  params, _ = tiny_models.of_task(task)
  assert params['class_head']['kernel'].shape == (16, 3)
  label = np.eye(3, dtype=np.float32)
  label[1] = 0  # The second image has no label.
  batch = {'image': images(), 'label': label, 'mask': np.ones(3, np.float32)}

  @jax.jit
  def compute(key):
    made = task.augment({'image': images(), 'label': label}, key)
    loss = task.loss(params, {}, made, key)
    logits, classes = task.model.apply({'params': params}, made['colors'])
    nats = -models_igpt.log_likelihood(logits, made['colors']) / 64
    return loss, nats, jax.nn.log_softmax(classes), task.measure(params, {}, batch)

  ((total, count), metrics), nats, log_p, found = compute(jax.random.key(0))
  want = nats[0] + nats[2] - log_p[0, 0] - log_p[2, 2]
  assert count == 2
  assert float(total) == pytest.approx(float(want), rel=1e-5)
  assert float(metrics['generation'][0]) == pytest.approx(
    float(nats[0] + nats[2]), rel=1e-5
  )
  assert set(found) >= {'accuracy', 'loss', 'bits_per_dim'}


def test_fine_tuning_starts_from_a_run_and_its_palette(
  finished, model, data_dir, tmp_path
):
  _, workdir, _ = finished
  config = make_config(data_dir)
  config.task = 'pixels_finetune'
  config.best_metric = 'accuracy_test'
  config.pretrained = str(workdir)
  config.update(total_steps=1, warmup_steps=0, base_lr=0.0)
  state, metrics = train.train_and_evaluate(config, str(tmp_path / 'tuned'))
  for name in model.params:
    jax.tree.map(np.testing.assert_array_equal, state.params[name], model.params[name])
  tuned = predict.load(str(tmp_path / 'tuned'))
  assert tuned.metadata['palette'] == model.metadata['palette']
  assert len(tuned.class_names) == 10
  image = np.zeros((8, 8, 3), np.uint8)
  [classes] = tuned.predict([image])
  assert len(classes) == 5
  assert metrics['bits_per_dim_test'] == pytest.approx(
    finished[2]['bits_per_dim_test'], rel=1e-5
  )
  assert (tmp_path / 'tuned' / 'test_images.png').exists()
  assert igpt_finetune.get_config('digits').task == config.task


@pytest.mark.parametrize(
  'change, message',
  [
    ({'num_positions': 49}, 'crop=8x8 .* 64 pixels, .*num_positions=49'),
    ({'num_colors': 5}, '4 colours, .*num_colors=5'),
    ({'kind': 'vit'}, "task='pixels' needs an iGPT"),
  ],
)
def test_models_that_do_not_fit_are_named(data_dir, change, message):
  with pytest.raises(ValueError, match=message):
    make_task(data_dir, **change)


def test_palettes_that_do_not_fit_are_named(data_dir, tmp_path):
  np.save(tmp_path / 'greys.npy', np.array(GREYS))
  config = run_config.complete(make_config(data_dir, num_colors=5))
  config.task_options.palette = str(tmp_path / 'greys.npy')
  with pytest.raises(ValueError, match=r"greys\.npy' has 4 colours"):
    pixels.Task.learn(config, None)
  config.model.num_colors = 4
  assert np.allclose(pixels.Task.learn(config, None)['palette'], GREYS)
  config.pp.channels = 3
  with pytest.raises(ValueError, match=r'has 1 channels, .*pp\.channels=3'):
    pixels.Task.learn(config, None)
  config.task_options.masked = 0.0
  with pytest.raises(ValueError, match='masked=0.0 .*above 0'):
    run_config.complete(config)
