"""Tests of the Python code in README.md and docs/, and of the examples.

The examples in docs/extend.md are trained together in one small run, which the
code on the other pages loads.
"""

from concurrent import futures
import contextlib
import http.server
import io
import json
import runpy
import sys
import threading
import time
from unittest import mock
import urllib.error
import urllib.request

import jax
import numpy as np
import pandas as pd
from PIL import Image
import pyarrow as pa
from pycocotools import mask
import pytest
from safetensors import numpy as safetensors
from sklearn import datasets
import tensorflow as tf
import uvicorn

from tests import commands, conftest, looked_up, markdown, tiny_models, tiny_towers
from vit_jax import checkpoint, models, predict
from vit_jax.commands import export
from vit_jax.configs import common, detr_scenes, igpt_digits, models as model_configs
from vit_jax.data import registry, sources
from vit_jax.evaluators import evaluation
from vit_jax.learning import optim, rate_factors, schedules
from vit_jax.run import config as run_config, evaluators as run_evaluators
from vit_jax.studies import study

DOCS = markdown.ROOT / 'docs'


@pytest.fixture(scope='module', autouse=True)
def where():
  """The working directory of the pages' commands."""
  with contextlib.chdir(markdown.ROOT):
    yield


@pytest.fixture(scope='module')
def examples(tmp_path_factory):
  """The folder of the modules in docs/extend.md, added to the import path."""
  folder = tmp_path_factory.mktemp('examples')
  markdown.write_modules(DOCS / 'extend.md', folder, '/tmp/parity')
  sys.path.insert(0, str(folder))
  yield folder
  sys.path.remove(str(folder))
  sys.modules.pop('prompts', None)
  sys.modules.pop('calibration', None)
  for name in ('squares', 'rezero', 'noise', 'signum'):
    sys.modules.pop(name, None)


@pytest.fixture(scope='module')
def trained(examples):
  """A run of the examples' model on the examples' data, and its results.

  The code in docs/notebooks.md trains it, with a smaller config.
  """
  runpy.run_path(str(examples / 'parity.py'))
  (args,) = (
    args for _, _, args in markdown.commands() if '--config.task=prompts' in args
  )
  folder = str(examples / 'parity')
  args = [arg.replace('/path/to/folder', folder) for arg in args]
  config = commands.parse('train', args).config
  config.pp.update(crop=16, channels=1)
  config.model.update(hidden_size=24)
  config.model.transformer.update(num_layers=1, mlp_dim=24)
  config.update(warmup_epochs=0.5, batch_eval=304)
  config.update(progress_every=0, eval_every=0, checkpoint_every=0, log_images=0)
  config.evaluators = {'ece': {'type': 'calibration:Calibration', 'bins': 1}}
  config.best_metric = 'ece_test'
  (code,) = markdown.blocks(DOCS / 'notebooks.md', 'python')
  assert 'digits.get_config()' in code
  code = code.replace('digits.get_config()', 'small')
  names = {'small': config}
  exec(code.replace('/tmp/notebook', str(examples / 'run')), names)
  return examples / 'run', names['state'], names['metrics']


def test_examples_train_together(examples, trained):
  rows = (examples / 'parity' / 'train.jsonl').read_text().splitlines()
  assert len(rows) == 1500
  assert json.loads(rows[1]) == {'image': '1.png', 'label': 'odd'}
  workdir, state, metrics = trained
  assert int(state.step) == 23  # Two epochs of 1,500 images in batches of 128.
  assert state.params['prompts'].shape == (1, 4, 24)
  assert metrics['num_examples_test'] == 297
  model = predict.load(str(workdir))
  assert model.class_names == ('even', 'odd')
  assert type(model.task.model).__name__ == 'PromptViT'


def test_the_example_of_an_evaluator_measures_a_run(examples, trained, capsys):
  """With one bin, the error is the mean confidence less the accuracy."""
  workdir, _, metrics = trained
  model = predict.load(str(workdir))
  lines = (examples / 'parity' / 'test.jsonl').read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  paths = [str(examples / 'parity' / row['image']) for row in rows]
  top = [first for [first] in model.predict(paths, top=1)]
  correct = np.mean([name == row['label'] for (name, _), row in zip(top, rows)])
  confidence = np.mean([probability for _, probability in top])
  assert metrics['ece_test'] == pytest.approx(abs(confidence - correct), abs=1e-4)
  again = evaluation.evaluate(
    model, 'test', evaluators={'ece': {'type': 'calibration:Calibration', 'bins': 1}}
  )
  assert again['ece'] == pytest.approx(metrics['ece_test'], abs=1e-6)
  assert f'ece {100 * again["ece"]:.2f} %' in capsys.readouterr().out
  [best] = (workdir / 'checkpoints').glob('[0-9]*')
  assert best.name == '23'


def task_of(config, module):
  """Returns the task of an example, with two classes."""
  config.task = module
  config = run_config.complete(config)
  return run_config.get_task(module)(config, {'class_names': ['even', 'odd']})


def test_the_example_of_a_layer_changes_tokens_by_its_factor(examples, tiny_config):
  task = task_of(tiny_config, 'rezero')
  plain = models.make_model(tiny_config.model, num_classes=2, classifier='unpooled')
  model = task.model.clone(classifier='unpooled')
  images = jax.random.normal(jax.random.key(1), task.image_spec(2).shape)
  params = tiny_models.numbers(plain, images.shape[1], channels=1)
  layer = params['Transformer']['encoderblock_0']
  for factor in (0.0, 1.0):
    layer['factor'] = np.float32(factor)
    logits = model.apply({'params': params}, images, train=False)
    without = {name: x for name, x in layer.items() if name != 'factor'}
    if not factor:  # Branches of zeros change nothing either.
      without = jax.tree.map(np.zeros_like, without)
    encoder = {**params['Transformer'], 'encoderblock_0': without}
    expected = plain.apply(
      {'params': {**params, 'Transformer': encoder}}, images, train=False
    )
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_the_example_of_an_augmentation_adds_noise_in_training(examples, tiny_config):
  tiny_config.pp.update(crop_area=None, crop_ratio=None)
  task = task_of(tiny_config, 'noise')
  pixels = np.full((8, 8, 1), 255, np.uint8)
  record = {'image': tf.io.encode_png(pixels), 'label': tf.constant([1], tf.int64)}
  evaluated = task.example(record, None)['image']
  assert set(np.unique(evaluated)) == {1.0}
  [first, again, other] = (
    task.example(record, tf.constant(seed, tf.int64))['image'] - evaluated
    for seed in ([0, 1], [0, 1], [0, 2])
  )
  np.testing.assert_array_equal(first, again)
  assert 0.05 < np.std(first) < 0.15
  assert np.abs(first - other).max() > 0.05


def test_the_example_of_an_optimiser_takes_steps_of_equal_length(examples, tiny_config):
  tiny_config.update(optimizer='signum:signum', grad_norm_clip=0.0)
  schedule = schedules.create_learning_rate_schedule(
    9, 0.5, 'signum:stairs', 0, decay_args={'number': 3}
  )
  rates = [float(schedule(step)) for step in range(10)]
  expected = [0.5] * 3 + [1 / 3] * 3 + [1 / 6] * 3 + [0]
  np.testing.assert_allclose(rates, expected, atol=1e-6)
  tx = optim.get_optimizer(run_config.complete(tiny_config), schedule)
  grads = {'kernel': np.array([3.0, -0.1, 0.0], np.float32)}
  updates, _ = tx.update(grads, tx.init(grads), grads)
  np.testing.assert_allclose(updates['kernel'], [-0.5, 0.5, 0.0])


def test_the_example_of_renamed_weights_reads_them(examples, tmp_path):
  arrays = {'stem.weight': np.ones(2), 'body.3.mix.out.bias': np.zeros(3)}
  arrays |= {'body.0.norm1.bias': np.zeros(1)}
  safetensors.save_file(arrays, tmp_path / 'other.safetensors')
  names = runpy.run_path(str(examples / 'rename_weights.py'))
  names['rename'](tmp_path / 'other.safetensors', tmp_path / 'timm.safetensors')
  assert sorted(safetensors.load_file(tmp_path / 'timm.safetensors')) == [
    'blocks.0.norm1.bias', 'blocks.3.attn.proj.bias', 'patch_embed.proj.weight'
  ]  # fmt: skip


def test_the_example_of_a_study_lists_its_runs(examples):
  config = runpy.run_path(str(examples / 'activations.py'))['get_config']()
  runs = study.make_runs(config)
  assert [(run.config.model.transformer.gelu, run.config.seed) for run in runs] == [
    ('tanh', 0), ('tanh', 1), ('quick', 0), ('quick', 1)
  ]  # fmt: skip
  run_evaluators.check(run_config.complete(runs[0].config))


def test_the_example_of_a_folder_format_opens_a_folder(
  examples, tiny_config, tmp_path, monkeypatch
):
  monkeypatch.setattr(sources, 'FORMATS', [*sources.FORMATS])
  runpy.run_path(str(examples / 'arrays.py'))
  images = np.arange(10 * 4 * 5 * 3, dtype=np.uint8).reshape(10, 4, 5, 3)
  np.savez(tmp_path / 'train.npz', image=images, label=np.arange(10) % 3)
  tiny_config.dataset = str(tmp_path)
  source = sources.open_split(tiny_config, 'train[2:]')
  assert source.class_names == ('0', '1', '2')
  records = looked_up.features(source)
  pixels = [tf.io.decode_png(image).numpy() for image in records['image']]
  np.testing.assert_array_equal(pixels, images[2:])
  assert np.concatenate(records['label']).tolist() == [2, 0, 1, 2, 0, 1, 2, 0]
  with pytest.raises(FileNotFoundError, match="no split 'val'"):
    sources.open_split(tiny_config, 'val')


def test_the_example_of_a_source_opens_a_name(examples, tiny_config, monkeypatch):
  monkeypatch.setattr(registry, 'SOURCES', {**registry.SOURCES})
  runpy.run_path(str(examples / 'squares.py'))
  tiny_config.dataset = 'squares://9'
  source = sources.open_split(tiny_config, 'test[3:]')
  assert source.class_names == ('small', 'medium', 'large')
  records = looked_up.features(source)
  assert np.concatenate(records['label']).tolist() == [0, 1, 2, 0, 1, 2]
  areas = [np.sum(tf.io.decode_png(image) == 255) for image in records['image']]
  assert areas == [16, 64, 144] * 2
  assert sources.has_split(tiny_config, 'test')
  with pytest.raises(ValueError, match="squares://9' has no split 'val'"):
    sources.open_split(tiny_config, 'val')


def untrained(config, workdir, **metadata):
  """Writes a run of one step with random parameters; returns its folder."""
  config = run_config.complete(config)
  task = run_config.get_task(config.task)(config, metadata)
  params, extra = tiny_models.of_task(task)
  return str(conftest.write_run(workdir, config, metadata, params, extra))


def detector(workdir):
  """Writes a run of a narrow detector; returns its folder."""
  config = detr_scenes.get_config()
  config.total_steps = 1
  config.model.update(backbone_width=8, hidden_size=16, mlp_dim=8)
  config.model.num_decoder_layers = 1
  return untrained(config, workdir, class_names=['ant', 'bee'])


def igpt(workdir):
  """Writes a run of a narrow iGPT with 16 positions; returns its folder."""
  config = igpt_digits.get_config()
  config.total_steps = 1
  config.pp.crop = 4
  config.model.update(num_positions=16, hidden_size=16, num_layers=1)
  palette = [[-1.0], [-0.5], [0.5], [1.0]]
  return untrained(config, workdir, palette=palette)


def table_of_masks(path):
  """Writes a table of one image with one mask; returns its path."""
  counts = mask.encode(np.asfortranarray(np.eye(3, dtype=np.uint8)))['counts']
  pd.DataFrame({'masks': [[counts.decode()]], 'size': [[3, 3]]}).to_parquet(path)
  return str(path)


@pytest.fixture(scope='module')
def stand_ins(examples, trained, tmp_path_factory):
  """Names in the pages, and their replacements."""
  folder = tmp_path_factory.mktemp('pages')
  registry.register('digits')
  params = tiny_models.numbers(tiny_models.tiny(), 16)
  checkpoint.save(params, str(folder / 'ViT.npz'))
  tiny_towers.write(folder / 'LiT.npz')
  photo = str(examples / 'parity' / '0.png')
  return {
    '/tmp/street': detector(folder / 'street'),
    '/tmp/igpt32': igpt(folder / 'igpt32'),
    'street.jpg': photo,
    'half.png': photo,
    'photo.png': photo,
    'photo.jpg': photo,
    'LiT-B16B.npz': str(folder / 'LiT.npz'),
    'table.parquet': table_of_masks(folder / 'table.parquet'),
    'rows=16': 'rows=2',
    'image_size=800': 'image_size=48',
    '/tmp/digits/example.png': str(examples / 'parity' / '0.png'),
    '/tmp/digits': str(trained[0]),
    'ViT-B_16.npz': str(folder / 'ViT.npz'),
    '/tmp/copy.npz': str(folder / 'copy.npz'),
    "get_model('ViT-B_16'": "get_model('testing'",
    '224, 224': '32, 32',
    "'imagenet2012'": "'digits'",
    '/data/tfds': str(folder / 'tfds'),
    '/data/tars': str(folder),
  }


_WITH_OWN_TESTS = (
  'coming_from_timm.md', 'extend.md', 'interop.md', 'notebooks.md', 'serve.md',
  'serve_texts.md',
)  # fmt: skip


@pytest.mark.parametrize(
  'page',
  [
    page
    for page in markdown.PAGES
    if markdown.blocks(page, 'python') and page.name not in _WITH_OWN_TESTS
  ],
  ids=lambda page: page.name,
)
def test_python_runs(page, stand_ins):
  run_page(page, stand_ins)


def test_the_loop_for_users_of_timm_trains(tmp_path):
  config = model_configs.get_config('testing')
  weights = tiny_models.numbers(models.make_model(config, num_classes=5), 32)
  checkpoint.save(weights, str(tmp_path / 'weights.npz'))
  stand_ins = {
    'ViT-B_16.npz': str(tmp_path / 'weights.npz'),
    'ViT-B_16': 'testing',
    '224, 224': '32, 32',
    '/tmp/copy.npz': str(tmp_path / 'copy.npz'),
  }
  names = run_page(DOCS / 'coming_from_timm.md', stand_ins)
  assert names['features'].shape == (2, config.hidden_size)
  np.testing.assert_allclose(names['features'], names['tokens'][:, 0], atol=1e-5)
  # The rates are what config.layer_decay gives, which is compared with timm's.
  run = common.get_config()
  run.update(model=config, layer_decay=0.75)
  factors = rate_factors.make(run_config.complete(run), lambda: names['pretrained'])
  factors['embedding'] = names['groups']['embedding']
  want = jax.tree.map(
    lambda x: 'frozen' if x == 'frozen' else 0.75 ** int(x), names['groups']
  )
  assert jax.tree.all(jax.tree.map(lambda x, y: x == y, factors, want))
  tuned, pretrained = names['tuned'], names['pretrained']
  np.testing.assert_array_equal(
    pretrained['embedding']['kernel'], weights['embedding']['kernel']
  )
  same = jax.tree.map(np.array_equal, tuned, pretrained)
  assert same.pop('embedding') == {'kernel': True, 'bias': True}
  assert not same['head']['kernel']
  assert not all(jax.tree.leaves(same['Transformer']['encoderblock_0']))
  stored = checkpoint.load(str(tmp_path / 'copy.npz'))['head']['kernel']
  np.testing.assert_array_equal(stored, names['average']['head']['kernel'])


def test_the_examples_with_other_libraries_agree(tmp_path):
  stand_ins = {'/tmp/interop_checkpoint': str(tmp_path / 'checkpoint')}
  names = run_page(DOCS / 'interop.md', stand_ins)
  gradients = names['gradients']  # Of the whole batch, on a mesh.
  by_example = jax.tree.map(lambda x: x.mean(axis=0), names['gradients_by_example'])
  for other in (by_example, names['classifier_gradients'].params):
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), other, gradients
    )
  losses = names['losses']
  np.testing.assert_allclose(
    [losses[0]] * 2, [names['value'], names['classifier_value']], rtol=1e-6
  )
  assert losses[0] > losses[1] > losses[2]
  trained = names['trained'].params
  jax.tree.map(np.testing.assert_array_equal, names['restored'], trained)
  kernels = names['members']['embedding']['kernel']
  assert len(kernels) == 3
  assert not np.array_equal(kernels[0], kernels[1])
  np.testing.assert_allclose(names['probabilities'].sum(axis=-1), 1, rtol=1e-6)
  scores = names['scores']
  assert scores.shape == (8, 10)
  want = names['ensemble'](names['members'], np.asarray(names['photos']))
  np.testing.assert_allclose(scores.numpy(), want, rtol=1e-6)


def run_page(page, stand_ins):
  """Runs the Python blocks of a page in order; returns the variables."""
  names = {}
  for code in markdown.blocks(page, 'python'):
    if code.startswith('# ray_table.py'):  # Has its own test.
      continue
    exec(replaced(code, stand_ins), names)
  return names


def replaced(text, stand_ins):
  for name, stand_in in stand_ins.items():
    text = text.replace(name, stand_in)
  return text


# --- docs/serve.md ---


@pytest.fixture(scope='module')
def served(examples, trained, stand_ins, tmp_path_factory):
  """The page's variables, the model, and the folder of its SavedModel."""
  folder = tmp_path_factory.mktemp('served')
  stand_ins = {
    '/tmp/digits_onnx': str(folder / 'onnx'),
    '/tmp/digits_tf': str(folder / 'tf'),
    '/tmp/photos/*': str(examples / 'parity' / '?.png'),
    **stand_ins,
  }
  names = run_server_page('serve.md', stand_ins)
  return names, predict.load(str(trained[0])), folder / 'tf'


def run_server_page(name, stand_ins):
  """Runs a page's exports and its Python code; returns the variables."""
  for page, command, args in markdown.commands():
    if page == name and args:
      assert command == 'export'
      export.main([replaced(arg, stand_ins) for arg in args])
  return run_page(DOCS / name, stand_ins)


def encoded(pixels, kind='PNG'):
  """Returns the bytes of an image file."""
  buffer = io.BytesIO()
  Image.fromarray(pixels).save(buffer, kind)
  return buffer.getvalue()


def photographs(count):
  """Returns crops of photographs, of different sizes, as files."""
  photos = datasets.load_sample_images().images
  return [encoded(photos[i % 2][9 * i :, : 600 - 7 * i]) for i in range(count)]


@contextlib.contextmanager
def running(app):
  """Serves a FastAPI app on loopback; yields its URL."""
  server = uvicorn.Server(uvicorn.Config(app, port=0, log_level='warning'))
  thread = threading.Thread(target=server.run)
  thread.start()
  while not server.started:
    time.sleep(0.01)
  yield 'http://{}:{}'.format(*server.servers[0].sockets[0].getsockname())
  server.should_exit = True
  thread.join()


def post(url, data):
  with urllib.request.urlopen(url, data, timeout=60) as answer:
    return json.load(answer)


class Slow:
  """An ONNX Runtime session that records batch sizes.

  The first batch is computed when all other requests wait.
  """

  def __init__(self, session, waiting, others):
    self.session, self.waiting, self.others, self.sizes = session, waiting, others, []

  def run(self, names, inputs):
    self.sizes.append(len(inputs['image']))
    deadline = time.monotonic() + 60
    while len(self.sizes) == 1 and len(self.waiting) < self.others:
      assert time.monotonic() < deadline
      time.sleep(0.01)
    return self.session.run(names, inputs)


def test_fastapi_batches_concurrent_requests(served):
  names, model, _ = served
  files = [*photographs(12), *map(encoded, np.eye(4, dtype=np.uint8)[:, None] * 90)]
  names['session'] = slow = Slow(names['session'], names['waiting'], len(files))
  jpeg = encoded(datasets.load_sample_images().images[1], 'JPEG')
  with running(names['app']) as url:
    with futures.ThreadPoolExecutor(32) as pool:
      answers = list(pool.map(lambda file: post(url, file), [*files, jpeg]))
    for file, status in (
      (jpeg[:2000], 400), (b'GIF89', 400), (b'', 400), (bytes(10_000_001), 413)
    ):  # fmt: skip
      with pytest.raises(urllib.error.HTTPError) as error:
        post(url, file)
      assert error.value.code == status
      assert json.load(error.value)['detail'].endswith('.')
  assert slow.sizes == [1, 16]
  want = model.probabilities([*files, jpeg])
  got = [{x['label']: x['probability'] for x in answer} for answer in answers]
  got = np.array([[row[name] for name in ('even', 'odd')] for row in got])
  assert np.ptp(got[:, 0]) > 0.01
  np.testing.assert_allclose(got[:-1], want[:-1], atol=1e-5)
  np.testing.assert_allclose(got[-1], want[-1], atol=1e-3)


class Rows(http.server.BaseHTTPRequestHandler):
  """Answers requests in row format like TensorFlow Serving."""

  def do_POST(self):
    body = self.rfile.read(int(self.headers['Content-Length']))
    request = json.loads(body)
    assert list(request) == ['instances']
    [spec] = self.server.serve.structured_input_signature[1].values()
    found = self.server.serve(image=tf.constant(request['instances'], spec.dtype))
    rows = [
      {name: x[i].numpy().tolist() for name, x in found.items()}
      for i in range(len(request['instances']))
    ]
    self.send_response(200)
    self.end_headers()
    self.wfile.write(json.dumps({'predictions': rows}).encode())


def test_tensorflow_serving_layout(served):
  names, model, folder = served
  versions = [path.name for path in folder.iterdir() if path.name.isdigit()]
  assert versions == ['1']
  assert (folder / '1' / 'saved_model.pb').exists()
  loaded = tf.saved_model.load(str(folder / '1'), tags='serve')
  serve = loaded.signatures['serving_default']
  [spec] = serve.structured_input_signature[1].values()
  assert spec.shape.as_list() == [None, 16, 16, 1]
  server = http.server.HTTPServer(('127.0.0.1', 0), Rows)
  server.serve = serve
  threading.Thread(target=server.serve_forever, daemon=True).start()
  [file] = photographs(1)
  row = names['ask'](file, 'http://{}:{}'.format(*server.server_address))
  server.shutdown()
  server.server_close()
  [want] = model.probabilities([file])
  np.testing.assert_allclose(row['probabilities'], want, atol=1e-5)
  assert set(row) == {'logits', 'probabilities'}


def test_exported_towers_match_predicted_probabilities(stand_ins, tmp_path):
  folders = {f'/tmp/lit_{x}': str(tmp_path / x) for x in ('images', 'texts')}
  names = run_server_page('serve_texts.md', {**folders, **stand_ins})
  model = predict.load_weights(stand_ins['LiT-B16B.npz'])
  sentences = ['a cat on a sofa', 'two dogs']
  want = model.predict([stand_ins['photo.jpg']], texts=sentences)[0]
  got = dict(zip(sentences, names['shares']))
  assert got == pytest.approx(dict(want), abs=1e-5)
  assert abs(want[0][1] - want[1][1]) > 1e-3


def test_threads_match_a_single_thread(served):
  names, model, _ = served
  assert len(names['paths']) == 10
  assert names['predictions'] == [model.predict([path])[0] for path in names['paths']]


def test_ray_workers_compute_the_prediction_table(
  tmp_path, trained, served, monkeypatch
):
  """Each gets batches in Ray's format: a table of the files' bytes and paths."""
  photos = photographs(8)
  photos[7] = b'no image'
  paths = [tmp_path / f'{i:02}.png' for i in range(len(photos))]
  for path, photo in zip(paths, photos):
    path.write_bytes(photo)
  [code] = [
    code
    for code in markdown.blocks(DOCS / 'serve.md', 'python')
    if code.startswith('# ray_table.py')
  ]
  ray = mock.MagicMock()
  monkeypatch.setitem(sys.modules, 'ray', ray)
  exec(replaced(code, {'/tmp/digits': str(trained[0])}), {})
  [worker] = ray.data.read_binary_files.return_value.map_batches.call_args.args
  table = pa.table({'bytes': photos, 'path': list(map(str, paths))})
  worker = worker()
  got = pa.concat_tables([worker(table[:3]), worker(table[3:])]).to_pandas()
  want = served[1].table(list(map(str, paths))).to_pandas()
  assert list(got) == list(want)
  for name in ('path', 'class'):
    assert list(got[name].fillna('')) == list(want[name].fillna('')), name
  np.testing.assert_allclose(got['probability'], want['probability'], atol=1e-5)
  assert list(np.flatnonzero(got['error'].notna())) == [7]


def test_task_in_the_docs_matches_the_tested_one():
  """The tested task is in tests/tasks/toy_test.py; the page leaves some of it out."""
  source = (markdown.ROOT / 'tests' / 'toy_task.py').read_text().splitlines()
  lines = iter([line.partition('  #')[0].rstrip() for line in source])
  (code,) = [
    code
    for code in markdown.blocks(DOCS / 'extend.md', 'python')
    if code.startswith('class Task')
  ]
  for line in code.splitlines():
    line = line.partition('  #')[0].rstrip()
    if line:
      assert line in lines, line  # In this order.
