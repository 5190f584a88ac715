"""The task of image and text towers: training, zero-shot, retrieval, prediction."""

import json

import jax
import numpy as np
import pandas as pd
from PIL import Image
import pytest
import sentencepiece

from tests import conftest, evaluations, tiny_models
from vit_jax import predict, preprocess, train
from vit_jax.commands import predict as predict_command
from vit_jax.configs import lit_digits
from vit_jax.data import sources
from vit_jax.data.texts import tokenizers
from vit_jax.data.tfds import digit_captions as digit_captions
from vit_jax.distributed import sharding
from vit_jax.inference import engine
from vit_jax.run import config as run_config
from vit_jax.tasks.image_text import captions, image_text, precomputed, zero_shot
from vit_jax.weights import convert

WIDTH = 16
WORDS = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'a', 'cat', 'dog', 'the']


def make_config(data_dir, **changes):
  """The config of the captioned digits, with tiny towers."""
  config = lit_digits.get_config()
  config.tfds_data_dir = data_dir
  config.pp.crop = 8
  config.model.image = tiny_models.config()
  config.model.image.patches.size = (4, 4)
  config.model.image.hidden_size = WIDTH
  config.model.text.config.update(width=WIDTH, num_layers=1, num_heads=2, mlp_dim=32)
  config.model.out_dim = (None, WIDTH)
  config.pretrained = None
  config.pp.train = 'train[:64]'
  config.evals = (('test', 'test[:40]'),)
  config.update(total_epochs=None, total_steps=2, warmup_epochs=None)
  config.update(warmup_steps=0, batch=16, batch_eval=40, log_images=3)
  config.update(eval_every=2, checkpoint_every=2, progress_every=1)
  config.update(changes)
  return config


def make_task(data_dir, words=WORDS, **changes):
  config = run_config.complete(make_config(data_dir, **changes))
  return image_text.Task(config, {'vocabulary': words})


@pytest.fixture(scope='module')
def tower(data_dir, tmp_path_factory):
  """The workdir of a classifier with the image tower's sizes."""
  config = conftest.make_tiny_config(data_dir)
  config.model = make_config(data_dir).model.image
  metadata = {'class_names': [str(i) for i in range(10)]}
  config = run_config.complete(config)
  task = run_config.get_task('classify')(config, metadata)
  params = tiny_models.randomised(task.model, np.zeros((1, 8, 8, 1)), seed=3)
  folder = tmp_path_factory.mktemp('tower') / 'run'
  conftest.write_run(folder, config, metadata, params)
  return str(folder), params


@pytest.fixture(scope='module')
def run(tower, data_dir, tmp_path_factory):
  """A run of two updates with a locked tower: workdir, state and metrics."""
  workdir = str(tmp_path_factory.mktemp('run') / 'lit')
  config = make_config(data_dir, pretrained={'img': tower[0]})
  state, metrics = train.train_and_evaluate(config, workdir)
  return workdir, state, metrics


@pytest.fixture(scope='module')
def model(run):
  return predict.load(run[0])


def test_a_locked_tower_is_unchanged_and_has_no_state(run, tower, model):
  _, state, metrics = run
  for path, x in jax.tree_util.tree_leaves_with_path(state.params['img']):
    there = tower[1]
    for key in path:
      there = there[key.key]
    np.testing.assert_array_equal(x, there)
  sizes = {x.shape for x in jax.tree.leaves(state.opt_state)}
  assert tower[1]['embedding']['kernel'].shape not in sizes
  assert state.params['txt']['head']['kernel'].shape in sizes
  assert model.task.locked
  assert model.task.describe() == 'the image tower is locked'
  assert metrics['num_examples_test'] == 40
  assert metrics['num_texts_test'] == 40 * 2 * len(digit_captions.TEST)
  assert 0 <= metrics['accuracy_test'] <= 1
  assert 'accuracy_top5_test' not in metrics  # There are only ten classes.


def test_precomputed_embeddings_train_the_same(run, model, tower, data_dir, tmp_path):
  config = make_config(data_dir, pretrained={'img': tower[0]}, log_images=0)
  config.task_options.precompute = True
  workdir = str(tmp_path / 'lit')
  state, _ = train.train_and_evaluate(config, workdir)
  for x, y in zip(*map(jax.tree.leaves, (state.params, run[1].params))):
    np.testing.assert_allclose(x, y, atol=2e-3)  # Stored in float16.
  rows = np.load(f'{workdir}/{precomputed.NAME}')
  assert (rows.shape, rows.dtype) == ((64, WIDTH), np.float16)
  source = sources.open_split(config, 'train[:3]', ('image',))
  images = [source.read(source.record(i))['image'].numpy() for i in range(3)]
  np.testing.assert_allclose(rows[:3], model.embed(images), atol=1e-3)
  config.pp.flip = True
  with pytest.raises(ValueError, match='change from epoch to epoch: set .*flip'):
    image_text.Task(run_config.complete(config), {'vocabulary': WORDS})
  config.update(lr_multipliers=())
  config.pp.flip = False
  with pytest.raises(ValueError, match='needs an image tower that is locked'):
    image_text.Task(run_config.complete(config), {'vocabulary': WORDS})


class ColourTask:
  """A fake task whose tower embeds an image by its mean."""

  def __init__(self, config):
    self.config = config

  def inputs(self, record):
    return {'image': preprocess.prepare(record['image'], None, self.config.pp)}

  def outputs(self, params, extra, batch):
    return batch['image'].mean(axis=(1, 2)) @ params['img']


def test_outdated_embeddings_are_computed_again(data_dir, tmp_path):
  task = ColourTask(run_config.complete(make_config(data_dir)))
  params = {'img': np.float32([[1.0, 2.0]]), 'txt': np.float32([1.0])}
  source = sources.open_split(task.config, 'train[:20]', ('image',))
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  path = tmp_path / precomputed.NAME

  def make(task=task, params=params, source=source):
    rows = precomputed.make(task, params, {}, source, mesh, tmp_path, engine.never)
    return np.array(rows)

  want, begun = make(), path.stat().st_ino
  make(params={**params, 'txt': params['txt'] + 1})  # The text tower does not count.
  assert path.stat().st_ino == begun  # Not rewritten.
  np.save(path, np.roll(np.load(path), 1))
  np.testing.assert_array_equal(make(), want)
  # Another tower, another preparation, other images.
  other = {**params, 'img': params['img'] + 0.5}
  assert np.abs(make(params=other) - want).max() > 0.01
  config = task.config.copy_and_resolve_references()
  config.pp.resize = 9
  assert np.abs(make(task=ColourTask(config)) - want).max() > 1e-3
  made = make(source=sources.open_split(config, 'train[:19]', ('image',)))
  np.testing.assert_array_equal(made, want[:19])


def test_a_run_writes_its_vocabulary_and_similarities(run):
  workdir = run[0]
  words = json.load(open(f'{workdir}/vocabulary.json'))
  assert words[:3] == ['[PAD]', '[UNK]', '[CLS]']
  assert {'seven', 'greater', 'than'} <= set(words)
  picture = Image.open(f'{workdir}/similarities.png')
  assert picture.size == (300 + 3 * 68, 4 * 68)


def test_zero_shot_matches_numpy(run, model, monkeypatch):
  """Class embeddings are means over templates; the largest product wins."""
  source = sources.open_split(model.config, 'test[:40]', ('image', 'label'))
  records = [source.read(source.record(i)) for i in range(40)]
  images = [record['image'].numpy() for record in records]
  labels = np.array([record['label'].numpy()[0] for record in records])
  assert source.class_names == digit_captions.WORDS
  texts = [f'this digit is a {word}' for word in digit_captions.WORDS]
  products = model.embed(images) @ model.embed_texts(texts).T
  accuracy = (products.argmax(axis=1) == labels).mean()
  assert run[2]['accuracy_test'] == pytest.approx(accuracy)
  zimg = model.embed(images)
  np.testing.assert_allclose(np.linalg.norm(zimg, axis=1), 1, atol=1e-5)
  # Several templates: the mean of unit vectors, which is shorter.
  names, templates = ['one', 'two'], ['a {}', 'the digit {}']
  monkeypatch.setattr(model.task, 'templates', templates)
  means = model.embed_classes(names)
  whole = model.embed_texts(['a one', 'the digit one', 'a two', 'the digit two'])
  np.testing.assert_allclose(means, whole.reshape(2, 2, -1).mean(axis=1), atol=1e-6)


def test_top_5_of_twelve_classes_matches_a_sort():
  rng = np.random.default_rng(1)
  zimg, classes = rng.normal(size=(40, 3)), rng.normal(size=(12, 3))
  label = rng.integers(0, 12, 40)
  many_hot = np.eye(12, dtype=np.float32)[label]
  many_hot[7] = 0  # No label.
  mask = np.ones(40, np.float32)
  mask[-5:] = 0  # Padding.
  found = zero_shot.measure(zimg, classes, {'label': many_hot, 'mask': mask})
  counted = np.setdiff1d(np.arange(35), [7])
  best = np.argsort(-zimg @ classes.T, axis=1)
  for name, k in (('accuracy', 1), ('accuracy_top5', 5)):
    hits = sum(label[i] in best[i, :k] for i in counted)
    assert [float(x) for x in found[name]] == [hits, 34]


def test_recalls_of_shared_texts_and_ties():
  pairs = np.array([0, 1])
  # A text shared by two images is correct for both; ties count as wrong.
  for ztxt, texts, want in ((np.ones((1, 2)), [0, 0], 1), (np.ones((2, 2)), [0, 1], 0)):
    zimg = np.eye(2) if want else np.ones((2, 2))
    found = zero_shot.recalls(zimg, ztxt, pairs, np.array(texts))
    assert found['text_to_image_r1'] == found['image_to_text_r1'] == want


def test_recalls_match_a_sort():
  rng = np.random.default_rng(0)
  zimg, ztxt = rng.normal(size=(30, 4)), rng.normal(size=(90, 4))
  images, texts = np.arange(90) // 3, np.arange(90)
  found = zero_shot.recalls(zimg, ztxt, images, texts)
  best = np.argsort(-(zimg @ ztxt.T), axis=1)
  for k in zero_shot.RECALLS:
    hits = [(images[row[:k]] == i).any() for i, row in enumerate(best)]
    assert found[f'image_to_text_r{k}'] == pytest.approx(np.mean(hits))
  best = np.argsort(-(ztxt @ zimg.T), axis=1)
  for k in zero_shot.RECALLS:
    hits = [images[j] in row[:k] for j, row in enumerate(best)]
    assert found[f'text_to_image_r{k}'] == pytest.approx(np.mean(hits))


def test_each_epoch_draws_a_new_caption(data_dir):
  config = make_config(data_dir)
  source = sources.open_split(config, 'train[:64]', image_text.Task.FEATURES)
  words = captions.vocabulary(source)
  task = make_task(data_dir, words)
  record = source.read(source.record(0))
  texts = {text.decode() for text in captions.from_record(record).numpy()}
  label = int(record['label'][0])
  assert texts == set(digit_captions.training(label))
  seeds = np.array([[0, i] for i in range(60)])
  drawn = [
    captions.draw(captions.from_record(record), seed).numpy().decode() for seed in seeds
  ]
  assert texts >= set(drawn)
  assert len(set(drawn)) > len(texts) / 2
  tokens = task.example(record, seeds[3])['tokens'].numpy()
  np.testing.assert_array_equal(tokens, task.tokenizer([drawn[3]])[0])
  first = task.example(record, None)['tokens'].numpy()
  text = captions.from_record(record).numpy()[0].decode()
  np.testing.assert_array_equal(first, task.tokenizer([text])[0])


def test_captions_never_name_held_out_digits():
  for digit in digit_captions.HELD_OUT:
    for text in digit_captions.training(digit):
      assert digit_captions.WORDS[digit] not in text.split()
      assert str(digit) not in text
  assert 'an odd digit greater than six' in digit_captions.training(7)
  unseen = {t for d in range(10) for t in digit_captions.training(d)}
  for digit in range(10):
    tests = digit_captions.naming(digit, digit_captions.TEST)
    assert not unseen & set(tests)


def test_prediction_with_arbitrary_classes_and_texts(model):
  images = list(np.random.default_rng(0).integers(0, 255, (2, 9, 8), np.uint8))
  found = model.predict(images, texts=['a seven', 'a one', 'the number 3'])
  assert [len(row) for row in found] == [3, 3]
  for row in found:
    assert sum(p for _, p in row) == pytest.approx(1)
    assert [p for _, p in row] == sorted((p for _, p in row), reverse=True)
  zimg, ztxt = model.embed(images), model.embed_texts(['a seven', 'a one'])
  logits = np.exp(np.asarray(model.params['t'])) * zimg @ ztxt.T
  np.testing.assert_allclose(model.logits(images, ztxt), logits, rtol=1e-5)
  (row,) = model.predict(images[:1], texts=['a seven', 'a one'])
  share = 1 / (1 + np.exp(logits[0, 1] - logits[0, 0]))
  assert dict(row)['a seven'] == pytest.approx(share, rel=1e-4)
  table = model.table(images, classes=['one', 'two'], embeddings='features')
  assert table.column('embedding')[0].as_py() == pytest.approx(
    zimg[0].tolist(), abs=1e-5
  )
  assert set(table.column('class').to_pylist()) <= {'one', 'two'}
  with pytest.raises(ValueError, match='--classes=.*--texts='):
    model.predict(images)
  with pytest.raises(ValueError, match=r"classes='\\ud800' is not valid Unicode"):
    model.predict(images, classes=['cat', '\ud800'])
  with pytest.raises(ValueError, match='must be a list of texts'):
    model.embed_texts('a cat')


def test_the_command(run, model, tmp_path, capsys, monkeypatch):
  workdir, photo = f'--workdir={run[0]}', str(tmp_path / 'a.png')
  monkeypatch.setattr(predict, 'load', lambda *_, **__: model)

  def run_command(*flags):
    predict_command.main(['--nodistributed', *flags])

  Image.fromarray(np.zeros((8, 8), np.uint8)).save(photo)
  picture = tmp_path / 'matrix.png'
  run_command(workdir, photo, '--classes=one;two;a cat', f'--out={picture}')
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == photo
  assert {line.split(' %  ')[1] for line in lines[1:4]} == {'one', 'two', 'a cat'}
  assert Image.open(picture).size == (300 + 68, 4 * 68)
  texts = tmp_path / 'texts.txt'
  texts.write_text('an odd digit\n\nan even digit\n')
  table = tmp_path / 'table.csv'
  run_command(workdir, photo, f'--texts={texts}', f'--out={table}')
  assert table.read_text().splitlines()[0].startswith('path,class,probability')
  table = tmp_path / 'texts.csv'
  run_command(workdir, f'--texts={texts}', '--embeddings', f'--out={table}')
  rows = pd.read_csv(table)
  assert list(rows['text']) == ['an odd digit', 'an even digit']
  np.testing.assert_allclose(
    [json.loads(row) for row in rows['embedding']],
    model.embed_texts(list(rows['text'])),
    atol=1e-6,
  )
  with pytest.raises(ValueError, match='--top needs images: add it'):
    run_command(workdir, f'--texts={texts}', '--top=1', f'--out={tmp_path}/new.csv')
  with pytest.raises(ValueError, match='--classes=.*--texts='):
    run_command(workdir, photo)
  with pytest.raises(ValueError, match=r'for a table.*--classes='):
    run_command(workdir, photo, f'--out={tmp_path}/other.csv')


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'model.kind': 'vit'}, "task='image_text' needs an image and a"),
    ({'accum_steps': 2}, 'accum_steps=2 .*--config.accum_steps'),
    ({'label_smoothing': 0.1}, 'label_smoothing=0.1 is for classes'),
    ({'model.out_dim': (None, 8)}, r'out_dim=\(None, 8\) .*width 16'),
    ({'task_options.templates': 'a photo'}, 'needs one {} for the name'),
    ({'model.text.config.vocab_size': 4}, '9 tokens.*text tower.* 4'),
    ({'model.pp.max_len': 20}, 'has 20 tokens .*model has 16'),
  ],
)
def test_unsuitable_config_values_are_named(data_dir, changes, words):
  config = make_config(data_dir)
  with config.ignore_type():
    config.update_from_flattened_dict(changes)
  config = run_config.complete(config)
  with pytest.raises(ValueError, match=words):
    image_text.Task(config, {'vocabulary': WORDS})


def test_data_without_texts_are_named(data_dir, tmp_path):
  config = make_config(data_dir, dataset='digits')
  with pytest.raises(ValueError, match="dataset='digits' has no texts"):
    train.prepare(config, str(tmp_path))


def test_pairs_from_a_manifest(data_dir, tmp_path):
  """Lines with one text or two, in training and in retrieval."""
  rng, lines = np.random.default_rng(0), []
  for i in range(9):
    pixels = rng.integers(0, 255, (10, 12, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / f'{i}.png')
    texts = [f'picture {i}', f'the {i} photo'][: 1 + i % 2]
    lines.append(json.dumps({'image': f'{i}.png', 'texts': texts}))
  for split in ('train', 'test'):
    (tmp_path / f'{split}.jsonl').write_text('\n'.join(lines))
  config = make_config(
    data_dir, dataset=str(tmp_path), loss='sigmoid', lr_multipliers=()
  )
  config.model.bias_init = -2.0
  config = run_config.complete(config)
  source = sources.open_split(config, 'test', image_text.Task.FEATURES)
  metadata = image_text.Task.learn(config, source)
  assert {'picture', 'photo', '8'} <= set(metadata['vocabulary'])
  task = image_text.Task(config, metadata)
  assert not task.locked
  example = task.example(source.read(source.record(0)), np.array([0, 0]))
  assert example.keys() == task.batch_spec(1).keys()
  bias = jax.jit(lambda key: task.init(key)[0]['b'])(jax.random.key(0))
  assert bias == -2.0
  params, extra = tiny_models.of_task(task)
  params['b'] = bias
  mesh = sharding.mesh_of(params)
  classes, retrieval = evaluations.evaluators(task, mesh, source)
  assert (classes.metrics, classes.run(params, extra)) == ({}, {})
  metrics = retrieval.run(params, extra)
  assert metrics['num_texts'] == 9 + 4
  assert metrics.keys() - {'num_texts'} == set(zero_shot.METRICS_OF_TEXTS)
  model = task.predictor(params, extra, 0)
  photo = [str(tmp_path / '0.png')]
  (row,) = model.predict(photo, texts=['a', 'picture'])
  logits = model.logits(photo, model.embed_texts(['a', 'picture']))
  # Each text is independent: the probabilities need not sum to 1.
  assert dict(row)['a'] == pytest.approx(1 / (1 + np.exp(-logits[0, 0])), rel=1e-4)


def test_another_tokenizer_stores_its_vocabulary(data_dir, tmp_path):
  """Vocabulary files that are not word lists are stored whole."""
  words = tmp_path / 'words.txt'
  words.write_text('a photo of a cat and a dog\nthe number seven\n' * 20)
  flags = dict(vocab_size=23, minloglevel=2)
  sentencepiece.SentencePieceTrainer.Train(
    input=str(words), model_prefix=str(tmp_path / 'm'), **flags
  )
  config = make_config(data_dir)
  config.model.pp.tokenizer_name = 'sentencepiece'
  config.model.pp.vocab_path = str(tmp_path / 'm.model')
  source = sources.open_split(config, 'train', image_text.Task.FEATURES)
  metadata = image_text.Task.learn(config, source)
  (tmp_path / 'm.model').unlink()  # The run no longer needs it.
  task = image_text.Task(run_config.complete(config), metadata)
  rows = task.tokenizer(['a photo of a cat', 'a'])
  assert rows.shape == (2, 12)
  assert (rows[:, -1] == task.tokenizer.eos_token).all()


def test_a_converted_run_predicts_the_same(run, model, tmp_path):
  path, photo = str(tmp_path / 'mine.npz'), np.zeros((8, 8), np.uint8)
  _, notes = convert.convert(run[0], path)
  assert not any('vocabulary' in note for note in notes)
  words = json.load(open(f'{run[0]}/vocabulary.json'))
  assert (tmp_path / 'mine.txt').read_text().splitlines() == words
  texts = ['a one', 'a two']
  found, want = (
    dict(model.predict([photo], texts=texts)[0])
    for model in (predict.load_weights(path), model)
  )
  assert found == pytest.approx(want, abs=1e-5)
  (tmp_path / 'mine.txt').unlink()
  loaded = predict.load_weights(path)
  with pytest.raises(ValueError, match=r'the file next to its weights, .*txt'):
    loaded.embed_texts(['a one'])


def test_the_text_tower_is_exported(model, tmp_path):
  assert model.export(tmp_path / 'txt', 'onnx', texts=True) < 1e-4
  facts = json.loads((tmp_path / 'txt' / 'model.json').read_text())
  assert facts['inputs'] == {'tokens': {'shape': ['batch', 12], 'dtype': 'int32'}}
  assert facts['outputs']['embedding']['shape'] == ['batch', WIDTH]
  pp = facts['preprocessing']
  assert pp == {
    'tokenizer_name': 'bert', 'max_len': 12, 'vocab_path': 'vocabulary.txt'
  }  # fmt: skip
  tokenizer = tokenizers.BertTokenizer(tmp_path / 'txt' / pp['vocab_path'], 12)
  texts = ['a photo of a seven', 'an odd digit']
  np.testing.assert_array_equal(tokenizer(texts), model.task.tokenizer(texts))
  t = np.exp(model.params['t']).item()
  assert facts['similarity'] == {
    'scale': pytest.approx(t, rel=1e-5), 'bias': 0, 'probabilities': 'softmax'
  }  # fmt: skip
  with pytest.raises(ValueError, match='uint8=True is for images'):
    model.export(tmp_path / 'other', 'onnx', texts=True, uint8=True)
