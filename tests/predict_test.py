"""Tests of prediction and of damaged checkpoints, on a run of a few steps."""

from concurrent import futures
import copy
import functools
import gc
import http.server
import io
import json
import pathlib
import pickle
import shutil
import threading
import typing
import weakref

from flax import traverse_util
import jax
import numpy as np
from PIL import Image
import pytest

from tests import processes, tiny_models, trees
from vit_jax import checkpoint, input_pipeline, predict, train
from vit_jax.commands import (
  flags,
  predict as predict_command,
  visualize as visualize_command,
)
from vit_jax.configs import models as model_configs, pretrain
from vit_jax.data import sources
from vit_jax.evaluators import evaluation
from vit_jax.figures import visualize
from vit_jax.run import checkpoints as checkpoints_lib


@pytest.fixture(scope='module')
def folder_run(image_folder, tmp_path_factory):
  """A run on the folder of images: its config and its folder."""
  config = pretrain.get_config(f'testing,{image_folder}')
  config.pp.crop = 16
  config.model = tiny_models.config()
  config.update(
    batch=16, batch_eval=8, total_epochs=12.0, warmup_epochs=1.0,
    base_lr=3e-2, checkpoint_every=24, progress_every=20, eval_every=25,
    log_images=0,
  )  # fmt: skip
  workdir = tmp_path_factory.mktemp('folder_run')
  _, metrics = train.train_and_evaluate(copy.deepcopy(config), str(workdir))
  return config, workdir, metrics


@pytest.fixture(scope='module')
def model(folder_run):
  """The model of the run, which no test changes."""
  return predict.load(str(folder_run[1]))


def test_functions_of_a_strangers_config_are_not_called(folder_run, model, tmp_path):
  workdir = tmp_path / 'run'
  shutil.copytree(folder_run[1], workdir)
  called = tmp_path / 'called'
  config = json.loads((workdir / 'config.json').read_text())
  config.update(optimizer='payload:run', decay_type='os:system')
  config['decay_args'] = {'command': f'touch {called}'}
  (workdir / 'config.json').write_text(json.dumps(config))
  facts = json.loads((workdir / 'data.json').read_text())
  del facts['config']  # A stranger would write another hash there.
  (workdir / 'data.json').write_text(json.dumps(facts))
  loaded = predict.load(str(workdir))
  trees.assert_same(loaded.params, model.params)
  loaded_metrics, metrics = (evaluation.evaluate(x, 'test') for x in (loaded, model))
  assert loaded_metrics['loss'] == metrics['loss']
  assert not called.exists()


def test_learns_a_folder_from_scratch(folder_run):
  _, _, metrics = folder_run
  assert metrics['accuracy_test'] == 1
  assert metrics['num_examples_test'] == 9


def test_returns_class_names_and_probabilities(model, image_folder):
  assert model.class_names == ('ant', 'bee', 'cow')
  paths = sorted(str(p) for p in (image_folder / 'test').glob('*/*'))
  results = model.predict(paths)
  for path, classes in zip(paths, results):
    assert classes[0][0] == pathlib.Path(path).parent.name
    assert sum(p for _, p in classes) == pytest.approx(1, abs=1e-5)
    assert [p for _, p in classes] == sorted([p for _, p in classes])[::-1]
  assert [len(r) for r in model.predict(paths[:2], top=2)] == [2, 2]
  assert model.predict([]) == []


def test_weights_without_a_run_give_the_same_predictions(model, image_folder, tmp_path):
  path = str(tmp_path / 'weights.npz')
  checkpoint.save(model.params, path)
  loaded = predict.load_weights(path, model.class_names, image_size=(16, 16))
  images = [str(next((image_folder / 'test/ant').iterdir()))]
  assert loaded.predict(images) == model.predict(images)
  assert predict.load_weights(path).class_names == ('0', '1', '2')


def test_weights_predict_at_another_image_size(
  folder_run, model, image_folder, tmp_path, capsys
):
  path = str(tmp_path / 'weights.npz')
  checkpoint.save(model.params, path)
  image = str(next((image_folder / 'test/ant').iterdir()))
  predict_command.main([f'--weights={path}', '--image_size=32', '--top=1', image])
  loaded = predict.load_weights(path, image_size=(32, 32))
  [[(name, probability)]] = loaded.predict([image], top=1)
  line = f'{100 * probability:6.2f} %  {name}'
  assert capsys.readouterr().out.splitlines()[1].strip() == line.strip()
  with pytest.raises(ValueError, match=r'image_size=32 .*--weights.*\(--image_size\)'):
    predict_command.main([f'--workdir={folder_run[1]}', '--image_size=32', image])


def test_parameters_in_bfloat16(folder_run, model, image_folder, tmp_path):
  whole, half = model, predict.load(folder_run[1], dtype='bfloat16')
  images = sorted(map(str, (image_folder / 'test').glob('*/*')))[:2]
  want, path = whole.logits(images), str(tmp_path / 'weights.npz')
  checkpoint.save(whole.params, path)
  for found in (half, predict.load_weights(path, dtype='bfloat16')):
    leaves = jax.tree.leaves(found.params)
    assert {x.dtype.name for x in leaves} == {'bfloat16'}
    jax.tree.map(
      lambda x, y: np.testing.assert_array_equal(x, y.astype(x.dtype)),
      found.params,
      whole.params,
    )
  difference = np.abs(half.logits(images) - want).max()
  assert 0 < difference < 1e-2 * np.abs(want).max()
  for load in (predict.load, predict.load_weights):
    with pytest.raises(ValueError, match="dtype='int4' .*'bfloat16', .*'int8'"):
      load('/no/where', dtype='int4')
    with pytest.raises(ValueError, match="compute_dtype='int8' .*'auto', 'float32'"):
      load('/no/where', compute_dtype='int8')


def test_computation_in_bfloat16(folder_run, model, image_folder, tmp_path, capsys):
  images = sorted(map(str, (image_folder / 'test').glob('*/*')))[:2]
  want, path = model.logits(images), str(tmp_path / 'weights.npz')
  checkpoint.save(model.params, path)
  half = predict.load(folder_run[1], compute_dtype='bfloat16')
  sized = predict.load_weights(path, image_size=(16, 16), compute_dtype='bfloat16')
  for found in (half, sized):
    assert {x.dtype.name for x in jax.tree.leaves(found.params)} == {'float32'}
    logits = found.logits(images)
    assert logits.dtype == np.float32
    assert 0 < np.abs(logits - want).max() < 3e-2 * np.abs(want).max()
  choices = flags.COMPUTE_DTYPE['choices']
  assert choices == typing.get_args(model_configs.ComputeDtype)
  arguments = [f'--workdir={folder_run[1]}', '--top=1', images[0]]
  printed = []
  for extra in ([], ['--compute_dtype=bfloat16'], ['--compute_dtype=auto']):
    predict_command.main([*arguments, *extra])
    printed.append(capsys.readouterr().out)
  assert printed[2] == printed[0]  # On CPUs, that is float32.
  (name,) = half.predict(images[:1], top=1)[0]
  assert f'{100 * name[1]:6.2f} %  {name[0]}' in printed[1]


def test_kernels_in_int8(folder_run, model, image_folder, tmp_path):
  """Rounded as in NumPy: the largest weight of an output channel becomes 127."""
  want = {}
  for path, x in traverse_util.flatten_dict(model.params, sep='/').items():
    x = want[path] = np.asarray(x)
    if path.endswith('kernel'):
      inputs = -1 if x.ndim != 3 or 'out/' in path else 1
      rows = x.reshape(int(np.prod(x.shape[:inputs])), -1)  # [inputs, outputs]
      scale = np.abs(rows).max(axis=0) / 127
      want[path] = (np.round(rows / np.where(scale, scale, 1)) * scale).reshape(x.shape)
  path = str(tmp_path / 'weights.npz')
  checkpoint.save(traverse_util.unflatten_dict(want, sep='/'), path)
  images = sorted(map(str, (image_folder / 'test').glob('*/*')))[:2]
  rounded = predict.load_weights(path, image_size=(16, 16)).logits(images)
  small = predict.load(folder_run[1], dtype='int8')
  copied = pickle.loads(pickle.dumps(small))
  np.testing.assert_allclose(copied.logits(images), rounded, rtol=1e-4, atol=1e-5)
  assert np.abs(rounded - model.logits(images)).max() > 1e-4
  with pytest.raises(ValueError, match="dtype='int8' is not for export"):
    small.export(tmp_path / 'out', 'onnx')
  with pytest.raises(ValueError, match="dtype='int8' is not for figures"):
    visualize.figures(small, images)
  weights = {x.dtype.name: x for x in jax.tree.leaves(small.params)}
  assert weights.keys() == {'int8', 'float32'}
  again = predict.load_weights(path, image_size=(16, 16), dtype='int8')
  np.testing.assert_allclose(again.logits(images), rounded, rtol=1e-3, atol=1e-4)


def test_prediction_matches_evaluation(folder_run, model):
  config, _, _ = folder_run
  source = sources.open_split(config, 'test', class_names=model.class_names)
  example = input_pipeline.labelled_example(config, len(model.class_names))
  data = input_pipeline.eval_dataset(config, source, example, np.arange(8))
  batch = next(data.as_numpy_iterator())
  want = jax.jit(model.task.outputs)(model.params, {}, batch)
  got = model.logits([source.name(i) for i in range(8)])
  np.testing.assert_allclose(got, want, atol=1e-5)
  many = [source.name(i % 9) for i in range(40)]  # More than one batch.
  np.testing.assert_allclose(model.logits(many)[36:40], got[:4], atol=1e-5)


def test_few_images_are_preprocessed_like_many(model, image_folder):
  """Up to 8 images are prepared without a TensorFlow pipeline."""
  images = [str(next((image_folder / 'test/ant').iterdir()))]
  images += varied_images(8)
  want = model.inputs(images)['image']
  for count in (1, 3, 8):
    got = model.inputs(images[:count])['image']
    np.testing.assert_array_equal(got, want[:count])


def varied_images(count):
  rng = np.random.RandomState(0)
  sizes = [(*rng.randint(8, 90, 2), 3) for _ in range(count)]
  images = [rng.randint(0, 256, size, np.uint8) for size in sizes]
  images[1::3] = map(Image.fromarray, images[1::3])
  return images


def test_threads_share_a_model(folder_run):
  """All make their first calls, which compile, at the same time."""
  model, images = predict.load(str(folder_run[1])), varied_images(12)
  calls = [images] * 2 + [[image] for image in images[:4]]

  def compute(call):
    return model.probabilities(call), model.embed(call)

  begin = threading.Barrier(4, timeout=60).wait
  with futures.ThreadPoolExecutor(4, initializer=begin) as pool:
    found = list(pool.map(compute, calls))
  for call, values in zip(calls, found):
    jax.tree.map(np.testing.assert_array_equal, values, compute(call))
  assert np.ptp(found[0][1], axis=0).min() > 1e-3  # No two images are alike.


def test_model_can_be_pickled(model):
  images = varied_images(2)
  model.probabilities(images), model.embed(images)  # Compiles functions.
  again = pickle.loads(pickle.dumps(model))
  assert repr(again) == repr(model)
  assert again.predict(images) == model.predict(images)
  np.testing.assert_array_equal(again.embed(images), model.embed(images))


@pytest.mark.parametrize(
  'args, message',
  [
    (['a.png', '--top=0'], "--top: '0' must be an integer of at least 1"),
    (['--sample=10000000'], "--sample: '10000000' must be .*4,096"),
    ([], 'pass image files, or one of --complete, --sample, --texts'),
  ],
)
def test_wrong_numbers_are_rejected_before_loading_a_model(args, message):
  with pytest.raises(ValueError, match=message):
    predict_command.main(['--workdir=/no/run', *args])


def test_unsupported_methods_of_a_classifier_are_named(folder_run, model):
  images = [np.zeros((8, 8, 3), np.uint8)]
  for name in ('detect', 'embed_texts'):
    with pytest.raises(AttributeError, match=f"'classify'.*'{name}'.*predict"):
      getattr(model, name)(images)
  for call in (model.predict, model.table):
    with pytest.raises(ValueError, match=r"classes=\['cat'\].*'classify'"):
      call(images, classes=['cat'])
    with pytest.raises(ValueError, match=r'generator.*list\(images\)'):
      call(image for image in images)
  file = str(folder_run[1] / 'config.json')
  with pytest.raises(ValueError, match=f"'{file}'.*load_weights.*--weights"):
    predict.load(file)


def test_repr_of_a_model(folder_run, model, tmp_path):
  config, workdir, _ = folder_run
  count = sum(x.size for x in jax.tree.leaves(model.params))
  for word in (
    config.model.model_name, f'{count:,} parameters', '16x16', '3 classes',
    str(workdir), f'step {model.step}',
  ):  # fmt: skip
    assert word in repr(model)

  file = tmp_path / 'model.npz'
  checkpoint.save(model.params, str(file))
  assert str(file) in repr(predict.load_weights(file))


def test_non_finite_outputs_are_rejected(folder_run, image_folder):
  _, workdir, _ = folder_run
  model = predict.load(str(workdir))
  model.params['head']['bias'] = model.params['head']['bias'].at[1].set(np.nan)
  image = str(next((image_folder / 'test' / 'bee').iterdir()))
  with pytest.raises(ValueError, match='is not finite') as error:
    model.predict([image])
  assert image in str(error.value)
  assert str(workdir) in str(error.value)


def test_images_may_be_arrays_of_any_size(model):
  red = np.full((50, 31, 3), (200, 40, 40), np.uint8)
  blue = Image.fromarray(np.full((9, 9, 3), (40, 40, 200), np.uint8))
  assert [r[0][0] for r in model.predict([red, blue])] == ['ant', 'cow']
  assert model.predict(red[None])[0][0][0] == 'ant'
  file = io.BytesIO()
  blue.save(file, 'png')  # Leaves the position at the end.
  assert model.predict([file]) == model.predict([file.getvalue()])
  assert model.predict([file]) == model.predict([blue])
  with pytest.raises(ValueError, match='must be a list'):
    model.predict('image.png')


def test_images_at_urls_are_fetched(model, image_folder, tmp_path, monkeypatch):
  folder = shutil.copytree(image_folder / 'test' / 'bee', tmp_path / 'served')
  image = next(folder.iterdir())
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f'http://127.0.0.1:{server.server_port}/{image.name}'
    with pytest.raises(ValueError, match='is not encrypted'):
      model.predict([url])
    monkeypatch.setenv('VIT_JAX_INSECURE', '1')
    assert model.predict([url]) == model.predict([str(image)])
    other = next(f for f in folder.iterdir() if f != image)
    other.rename(image)  # The image at the URL changes.
    assert model.predict([url]) == model.predict([str(image)])
    server.shutdown()


def test_the_module_and_its_parameters_give_the_logits(model):
  gray = np.full((*model.task.image_size, 3), 127, np.uint8)
  images = np.float32(gray[None] / 127.5 - 1)
  logits = model.model.apply({'params': model.params}, images, train=False)
  probabilities = jax.nn.softmax(logits)[0]
  [classes] = model.predict([gray])
  for name, probability in classes:
    index = model.class_names.index(name)
    assert probability == pytest.approx(float(probabilities[index]), abs=1e-5)


def test_command_prints_the_classes(folder_run, image_folder, capsys):
  _, workdir, _ = folder_run
  image = next((image_folder / 'test' / 'bee').iterdir())

  program = ('vit_jax', 'predict', f'--workdir={workdir}')
  status, output = processes.finish_module(*program, '--top=2', str(image))
  assert status == 0, output
  lines = output.splitlines()
  assert lines[0] == str(image)
  assert len(lines) == 3
  assert lines[1].endswith(' %  bee')
  # A pattern that matches a folder: all images below it, sorted by name.
  capsys.readouterr()
  predict_command.main([program[2], '--top=1', str(image_folder / 't*t')])
  paths = sorted(map(str, (image_folder / 'test').glob('*/*')))
  assert capsys.readouterr().out.splitlines()[::2] == paths
  with pytest.raises(FileNotFoundError, match='/no/such.png'):
    predict_command.main([program[2], '/no/such.png'])


def test_the_command_reads_all_formats_and_counts_other_files(
  folder_run, image_folder, tmp_path, capsys, caplog
):
  source = next((image_folder / 'test' / 'ant').iterdir())
  image = Image.open(source).convert('RGB')
  for name in ('a.png', 'b.tif', 'c.JP2', 'd.avif', 'e.heic'):
    image.save(tmp_path / name, quality=100)
  for name in ('f.mov', 'g.dng', 'h.dng'):
    (tmp_path / name).touch()
  predict_command.main([f'--workdir={folder_run[1]}', str(tmp_path), '--top=1'])
  lines = capsys.readouterr().out.splitlines()
  paths, classes = lines[::2], lines[1::2]
  assert [path.rpartition('/')[2] for path in paths] == sorted(
    path.name for path in tmp_path.iterdir() if path.suffix not in ('.mov', '.dng')
  )
  assert all(line.endswith('  ant') for line in classes)
  assert len(set(classes[:3])) == 1  # Without losses.
  assert "Left out 3 of 8 files in '" in caplog.text
  assert ': 2 .dng, 1 .mov, the first: ' in caplog.text


@pytest.mark.parametrize('count', [2, 9])
def test_command_skips_broken_images(
  folder_run, image_folder, tmp_path, capsys, caplog, count
):
  """With few images, and with more than one batch."""
  for i, path in enumerate(sorted((image_folder / 'test').glob('*/*'))[:count]):
    shutil.copy(path, tmp_path / f'{i}{path.suffix}')
  good = sorted(map(str, tmp_path.iterdir()))
  content = pathlib.Path(good[0]).read_bytes()
  (tmp_path / 'x_cut.png').write_bytes(content[: len(content) // 2])
  (tmp_path / 'y_text.jpg').write_text('no image')
  argv = [f'--workdir={folder_run[1]}', '--top=1', str(tmp_path)]
  with pytest.raises(ValueError, match=f'2 of {count + 2} images'):
    predict_command.main(argv)
  assert capsys.readouterr().out.splitlines()[::2] == good
  skipped = [x for x in caplog.messages if x.startswith('Skipped')]
  assert ['x_cut.png' in skipped[0], 'y_text.jpg' in skipped[1]] == [True, True]
  assert len(skipped) == 2


def test_a_limit_of_pixels(folder_run, tmp_path, image_folder):
  workdir, image = folder_run[1], tmp_path / 'large.png'
  Image.new('RGB', (60, 40)).save(image)
  message = 'large.png.*60 x 40 pixels.*max_image_pixels=2399.*--max_image_pixels'
  with pytest.raises(ValueError, match=message):
    predict.load(workdir, max_image_pixels=2399).predict([str(image)])
  argv = [f'--workdir={workdir}', '--max_image_pixels=2399']
  with pytest.raises(ValueError, match=message):
    predict_command.main([*argv, str(image)])
  figures = ['--figures=attention_rollout', '--images', str(image)]
  with pytest.raises(ValueError, match=message):
    visualize_command.main([*argv, f'--out={tmp_path}/figures', *figures])
  predict_command.main([argv[0], '--max_image_pixels=2400', str(image)])
  with pytest.raises(ValueError, match='max_image_pixels=0 must be .* at least 1'):
    predict.load(workdir, max_image_pixels=0)


def test_predicted_images_are_not_kept_in_memory(model):
  """TensorFlow keeps nothing from a call, for few images or many."""
  kept = []
  gc.freeze()  # Older objects need not be searched.
  for count in (2, 12):  # Batch sizes already compiled in this file.
    images = np.zeros((count, 20, 20, 3), np.uint8)
    kept.append(weakref.ref(images))
    model.predict(images)
    del images
    gc.collect()
  assert [ref() for ref in kept] == [None, None]


def test_evaluates_another_split_and_another_folder(folder_run, tmp_path, image_folder):
  model = predict.load(str(folder_run[1]))  # Evaluation changes its config.
  assert evaluation.evaluate(model, 'train[:7]')['num_examples'] == 7
  with pytest.raises(FileNotFoundError, match=r"'tset'.*--split='test'"):
    evaluation.evaluate(model, 'tset')
  other = tmp_path / 'other'
  shutil.copytree(image_folder / 'test', other / 'mine')
  assert evaluation.evaluate(model, 'mine', str(other))['accuracy'] == 1
  (other / 'mine' / 'cow').rename(other / 'mine' / 'yak')
  with pytest.raises(ValueError, match=r"the 3 .*\['ant', 'bee'.* has \['yak'\]"):
    evaluation.evaluate(model, 'mine', str(other))
  with pytest.raises(ValueError, match='use data with the same classes'):
    evaluation.evaluate(model, 'test', 'digits')
  with pytest.raises(FileNotFoundError, match='--dataset=FOLDER'):
    evaluation.evaluate(model, 'test', str(tmp_path / 'moved'))


# --- Damaged or missing checkpoints ---


@pytest.fixture
def damaged(folder_run, tmp_path):
  """A copy of the run, whose newest checkpoint tests may damage."""
  _, workdir, _ = folder_run
  copied = tmp_path / 'copy'
  shutil.copytree(workdir, copied)
  steps = checkpoints_lib.Checkpoints(copied, read_only=True).steps()
  assert steps[-2:] == [24, 25]
  return copied


def largest_file(folder):
  return max(
    (p for p in folder.rglob('*') if p.is_file()), key=lambda path: path.stat().st_size
  )


def test_truncated_checkpoint_falls_back_to_the_previous_one(
  damaged, folder_run, caplog
):
  config, workdir, _ = folder_run
  path = largest_file(damaged / 'checkpoints' / '25')
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  assert predict.load(str(damaged)).step == 24
  assert (damaged / 'checkpoints' / '25').exists()  # Prediction only reads.
  train.train_and_evaluate(copy.deepcopy(config), str(damaged))
  assert f"'{path}' is damaged (checksum)" in caplog.text
  assert [p.name for p in (damaged / 'damaged_checkpoints').iterdir()] == ['25']
  got, want = predict.load(str(damaged)), predict.load(str(workdir))
  assert got.step == want.step == 25
  jax.tree.map(np.testing.assert_array_equal, got.params, want.params)


def test_no_readable_checkpoint(damaged, folder_run):
  for step in checkpoints_lib.Checkpoints(damaged, read_only=True).steps():
    largest_file(damaged / 'checkpoints' / str(step)).write_bytes(b'')
  with pytest.raises(ValueError, match='no checkpoint in .* can be restored'):
    train.train_and_evaluate(copy.deepcopy(folder_run[0]), str(damaged))
  with pytest.raises(ValueError, match='step=22 is not among the checkpoints'):
    predict.load(str(damaged), step=22)
  shutil.rmtree(damaged / 'checkpoints')
  with pytest.raises(FileNotFoundError, match='has no complete checkpoint'):
    predict.load(str(damaged))
