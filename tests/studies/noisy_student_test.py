"""Tests of self-training: the runs, resuming, and wrong configs."""

import copy
import json

import numpy as np
import pytest
from sklearn import datasets as sklearn_datasets

from tests import conftest, looked_up
from vit_jax import predict, train
from vit_jax.configs import common, noisy_student as recipe, noisy_student_digits
from vit_jax.data import pseudo_labels, sources
from vit_jax.data.tfds import digits
from vit_jax.studies import labelling, noisy_student, runs as runs_lib


def make_config(data_dir):
  """The example config, reduced to two updates of a tiny model."""
  config = noisy_student_digits.get_config()
  tiny = conftest.make_tiny_config(data_dir)
  for run in (config.teacher, config.student):
    run.tfds_data_dir = data_dir
    run.model = copy.deepcopy(tiny.model)
    run.pp.update(crop=8, rotate=0.0, randaugment=())
    run.update(total_steps=2, warmup_steps=1, batch=8, batch_eval=104)
    run.update(log_images=0, eval_every=0, checkpoint_every=0)
  config.seeds = (1,)
  config.unlabelled_split = 'unlabelled_{seed}[:300]'
  config.confidence = 0.0
  config.soft_classes = 4
  config.ratios = (1.0,)
  config.per_class = 50
  return config


@pytest.fixture(scope='module', autouse=True)
def _three_draws():
  """Prepares three draws of few labels instead of six."""
  assert digits.FEW['few10'] == (10, 6)
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(digits.FEW, 'few10', (10, 3))
    yield


@pytest.fixture(scope='module')
def finished(data_dir, tmp_path_factory):
  """A student of an untrained teacher, with labelling interrupted once."""
  config, workdir = make_config(data_dir), tmp_path_factory.mktemp('student')
  really = train.train_and_evaluate

  def train_student(run, folder, held):
    if not folder.endswith('teacher_1'):
      return really(run, folder, held)
    conftest.write_classifier(folder, run, '0123456789')
    return None, {'accuracy_test': 0.25}

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(train, 'train_and_evaluate', train_student)

    def stop(*args):
      raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as interrupted:
      interrupted.setattr(labelling, '_predict', stop)
      with pytest.raises(KeyboardInterrupt):
        noisy_student.noisy_student(config, str(workdir))
    rows = noisy_student.noisy_student(config, str(workdir))
  return config, workdir, rows


def test_pseudo_labels_match_the_teacher(finished):
  config, workdir, _ = finished
  run = copy.deepcopy(config.student)
  run.pp.train = 'unlabelled_1[:300]'
  images = sources.open_split(run, run.pp.train, ('image',))
  source = sources.open_split(
    run, run.pp.train, ('image', 'label', 'soft_label?'),
    dataset=str(workdir / 'pseudo_1_1'),
  )  # fmt: skip
  with np.load(workdir / 'pseudo_1_1' / pseudo_labels.ARRAYS) as file:
    arrays = dict(file)
  np.testing.assert_array_equal(arrays['images'], np.arange(300))
  chosen = np.arange(0, source.num_examples, 20)
  rows = arrays['images'][arrays['rows'][chosen]]
  encoded = looked_up.features(images, rows)['image']
  model = predict.load(str(workdir / 'teacher_1'))
  want = model.probabilities(encoded)
  got = looked_up.features(source, chosen)
  assert got['image'] == encoded
  # The top four classes; the remaining probability is spread evenly.
  best = -np.sort(-want)
  best[:, 4:] = best[:, 4:].mean(1, keepdims=True)
  np.testing.assert_allclose(-np.sort(-np.array(got['soft_label'])), best, atol=1e-5)
  np.testing.assert_array_equal(np.concatenate(got['label']), want.argmax(1))
  classes = np.bincount(arrays['classes'][arrays['rows'], 0], minlength=10)
  assert set(classes) <= {0, 50}


def test_the_table_matches_the_runs(finished):
  _, workdir, rows = finished
  assert json.loads((workdir / 'noisy_student.json').read_text()) == rows
  assert [row['variant'] for row in rows] == ['teacher', 'student 1']
  for row, name in zip(rows, ('teacher_1', 'student_1_1')):
    result = json.loads((workdir / name / 'result.json').read_text())
    assert row['seed_1'] == row['mean'] == result['metrics']['accuracy_test']


def test_finished_work_is_not_repeated(finished, monkeypatch, capsys):
  config, workdir, rows = finished
  monkeypatch.setattr(labelling, 'load_teacher', None)
  monkeypatch.setattr('vit_jax.train.train_and_evaluate', None)
  assert noisy_student.noisy_student(config, str(workdir)) == rows
  out = capsys.readouterr().out
  assert 'already done' in out
  assert '300 of 300 images labelled' in out


def test_other_settings_are_rejected(finished):
  config, workdir, _ = finished
  config = copy.deepcopy(config)
  config.update(confidence=0.5, soft_classes=None)
  with pytest.raises(
    ValueError, match=r'(?s)confidence: 0.0 there, 0.5 here.*soft_classes: 4 t'
  ):
    noisy_student.noisy_student(config, str(workdir))


def test_a_teacher_of_other_classes_is_rejected(finished, image_folder, tmp_path):
  config, workdir, _ = finished
  config = copy.deepcopy(config)
  config.teacher_workdir = str(workdir / 'teacher_1')
  config.student.dataset = str(image_folder)
  config.student.pp.train = 'train'
  with pytest.raises(ValueError, match='has 10 classes.*config.teacher_workdir'):
    noisy_student.noisy_student(config, str(tmp_path))
  assert not list(tmp_path.iterdir())


@pytest.fixture
def recorded(monkeypatch, data_dir, tmp_path):
  """Records the runs to train and the images to label."""
  trained, labelled = {}, []

  def train_all(runs, workdir):
    assert workdir == str(tmp_path)
    trained.update({run.name: run.config for run in runs})
    metrics = {'accuracy_test': len(trained) / 10}
    results = {run.name: metrics for run in runs}
    return runs_lib.Outcome(workdir, results, {}, {})

  def label(settings, source, folder, batch):
    labelled.append((settings.teacher, settings.split, folder))
    assert source.num_examples == 300
    counts = {'images': 300, 'by_class': [0, 1], 'examples': 2}
    return {'counts': counts, 'class_names': ['a', 'b']}

  monkeypatch.setattr(runs_lib, 'train_all', train_all)
  monkeypatch.setattr(noisy_student.summaries, 'plot', lambda *_, **__: None)
  monkeypatch.setattr(labelling, 'label', label)
  config = make_config(data_dir)
  config.ratios = (1.0, 3.0)
  return config, trained, labelled


def test_a_student_becomes_the_next_teacher(recorded, tmp_path, capsys):
  config, trained, labelled = recorded
  config.seeds = (0, 2)
  config.student.update(total_steps=None, total_epochs=4.0)
  noisy_student.noisy_student(config, str(tmp_path))
  names = [
    f'{kind}_{seed}'
    for kind in ('teacher', 'student_1', 'student_2')
    for seed in (0, 2)
  ]
  assert list(trained) == names
  at = str(tmp_path)
  assert labelled == [
    (f'{at}/teacher_0', 'unlabelled_0[:300]', f'{at}/pseudo_1_0'),
    (f'{at}/teacher_2', 'unlabelled_2[:300]', f'{at}/pseudo_1_2'),
    (f'{at}/student_1_0', 'unlabelled_0[:300]', f'{at}/pseudo_2_0'),
    (f'{at}/student_1_2', 'unlabelled_2[:300]', f'{at}/pseudo_2_2'),
  ]
  for name, ratio in (('student_1_2', 1.0), ('student_2_2', 3.0)):
    run = trained[name]
    folder = f'{at}/{name.replace("student", "pseudo")}'
    assert run.dataset == (('digits/few10', 1.0), (folder, ratio))
    assert run.batch == 8 * (1 + ratio)
    assert run.total_steps == 4 * 100 / 8  # Epochs of the labelled images.
    assert run.pp.train == trained['teacher_2'].pp.train == 'few_2'
  assert len({run.seed for run in trained.values()}) == 6
  assert 'none for 1 class, such' in capsys.readouterr().out


def test_an_existing_teacher_is_not_trained(recorded, tmp_path, monkeypatch):
  config, trained, labelled = recorded
  config.teacher_workdir = '/runs/big'
  names = [str(i) for i in range(10)]
  monkeypatch.setattr(
    'vit_jax.run.workdir.load', lambda _: (None, {'class_names': names})
  )
  monkeypatch.setattr(predict, 'load', lambda workdir: workdir)
  monkeypatch.setattr(
    'vit_jax.evaluators.evaluation.evaluate',
    lambda *args: {'accuracy': {('/runs/big', 'test', 'digits/few10'): 0.25}[args]},
  )
  rows = noisy_student.noisy_student(config, str(tmp_path))
  assert list(trained) == ['student_1_1', 'student_2_1']
  assert labelled[0][0] == '/runs/big'
  assert rows[0]['mean'] == 0.25


@pytest.mark.parametrize(
  'key, value, message',
  [
    ('ratios', (3.0, 0.0), 'ratios=.* above 0'),
    ('confidence', 30, 'confidence=30.* at most 1'),
    ('ratios', (1.5,), 'student, batch=8, ratio=1.5: batch=20 is not a multiple'),
    ('unlabelled', 'digitz', "neither a folder nor known to TFDS"),
  ],
)  # fmt: skip
def test_wrong_values_are_named(data_dir, tmp_path, key, value, message):
  config = make_config(data_dir)
  with config.ignore_type():
    config[key] = value
  with pytest.raises(ValueError, match=message):
    noisy_student.noisy_student(config, str(tmp_path))
  assert not list(tmp_path.iterdir())


def test_draws_ten_labels_per_class(data_dir):
  config = common.set_dataset(common.get_config(), 'digits/few10')
  config.tfds_data_dir = data_dir
  target = sklearn_datasets.load_digits().target
  sizes = {}
  for name in ('test', 'few_0', 'few_2', 'unlabelled_2'):
    source = sources.open_split(config, name, ('label',))
    labels = np.concatenate(looked_up.features(source)['label'])
    sizes[name] = np.bincount(labels).tolist()
  assert sizes['few_0'] == sizes['few_2'] == [10] * 10
  total = np.array(sizes['unlabelled_2']) + sizes['few_2'] + sizes['test']
  np.testing.assert_array_equal(total, np.bincount(target))


def test_recipe_matches_the_paper():
  """arXiv 1911.04252 and its code."""
  config = recipe.get_config('s16,imagenet2012,/data/photos,b16')
  assert (config.confidence, config.per_class) == (0.3, 130_000)
  assert config.soft is True
  assert config.ratios == (14.0, 14.0, 28.0)
  assert config.student.total_epochs == 350
  for run, name in ((config.teacher, 'ViT-S_16'), (config.student, 'ViT-B_16')):
    assert run.model.model_name == name
    assert run.pp.randaugment == (2, 27)
    assert run.model.transformer.stochastic_depth == 0.2
    assert run.model.transformer.dropout_rate > 0
    assert (run.dataset, run.pp.train) == ('imagenet2012', 'train[:99%]')
  assert (config.unlabelled, config.unlabelled_split) == ('/data/photos', 'train')
  other = recipe.get_config('s16,imagenet2012,imagenet21k')
  assert other.unlabelled_split == 'full[102400:]'
  assert other.student.model.model_name == 'ViT-S_16'
  with pytest.raises(ValueError, match="'b16,cifar10' must be MODEL,LABELLED,UN"):
    recipe.get_config('b16,cifar10')
