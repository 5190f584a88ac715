"""Tests of a model's results on a split, against scikit-learn."""

import io
import json
import pathlib

import jax
import numpy as np
from PIL import Image
import pytest
from scipy import special
from sklearn import metrics
import tensorflow as tf

from tests import tiny_models
from vit_jax import input_pipeline
from vit_jax.configs import pretrain
from vit_jax.data import records, sources
from vit_jax.figures import results
from vit_jax.run import config as run_config, workdir as workdir_lib
from vit_jax.tasks import classify


@pytest.fixture(scope='module')
def model(image_folder):
  """A classifier of three classes with random parameters."""
  config = pretrain.get_config(f'testing,{image_folder}')
  config.pp.crop = 8
  config.batch = config.batch_eval = 12
  config.model = tiny_models.config()
  config.model.patches.size = (4, 4)
  config = run_config.complete(config)
  task = classify.Task(config, {'class_names': ['ant', 'bee', 'cow']})
  params = tiny_models.numbers(task.model, 8)
  return task.predictor(params, {}, 0)


@pytest.fixture(scope='module')
def source(model):
  return sources.open_split(model.config, 'train', class_names=model.class_names)


@pytest.fixture(scope='module')
def batch(model, source):
  """All images of the split at once."""
  data = input_pipeline.eval_dataset(
    model.config, source, model.task.example, np.arange(33)
  )
  return {k: v[:33] for k, v in next(data.as_numpy_iterator()).items()}


def test_confusion_and_worst_mistakes(model, source, batch):
  found = results.classify(model, source, num_mistakes=5)  # In three batches.
  logits = jax.jit(model.task.outputs)(model.params, {}, batch)
  true, predicted = batch['label'].argmax(-1), np.argmax(logits, -1)
  np.testing.assert_array_equal(
    found.confusion, metrics.confusion_matrix(true, predicted, labels=range(3))
  )
  confidence = special.softmax(logits, axis=-1).max(-1)
  wrong = np.flatnonzero(predicted != true)
  worst = wrong[np.argsort(-confidence[wrong])][:5]
  assert len(worst) == 5
  assert [m.name for m in found.mistakes] == [source.name(i) for i in worst]
  for mistake, i in zip(found.mistakes, worst):
    assert (mistake.true, mistake.predicted) == (true[i], predicted[i])
    assert mistake.probability == pytest.approx(confidence[i], rel=1e-4)
    np.testing.assert_array_equal(mistake.image, batch['image'][i])


def test_images_without_a_single_class_are_not_counted(model):
  buffer = io.BytesIO()
  Image.new('RGB', (8, 8), 'red').save(buffer, 'PNG')
  labels = tf.constant([[0, -1], [1, 2], [-1, -1], [2, 2]], tf.int64)
  source = records.MemorySource(
    {'image': [buffer.getvalue()] * 4, 'label': labels}, {'label': model.class_names}
  )
  found = results.classify(model, source)
  assert found.confusion.sum(axis=1).tolist() == [1, 0, 1]


def test_most_confused_pairs_of_classes():
  confusion = np.array([[9, 0, 2], [5, 0, 0], [0, 1, 7]])
  assert results.most_confused(confusion, 5) == [(1, 0, 5), (0, 2, 2), (2, 1, 1)]
  assert results.most_confused(confusion, 1) == [(1, 0, 5)]
  assert results.most_confused(np.eye(3, dtype=int), 5) == []


def test_learning_curves(tmp_path, model):
  lines = [
    {'step': 2, 'train_loss': 3.0, 'lr': 0.1},
    {'step': 2, 'accuracy_test': 0.5},
    {'step': 4, 'train_loss': 1.0, 'lr': 0.0},
  ]
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  workdir_lib.create(tmp_path, model.config, model.task.metadata, {})
  (tmp_path / 'metrics.jsonl').write_text(text + '{"step": 6, "tra')
  curves = results.learning_curves(tmp_path)
  assert {k: (list(x), list(y), z.unit) for k, (x, y, z) in curves.items()} == {
    'train_loss': ([2, 4], [3.0, 1.0], ''),
    'lr': ([2, 4], [0.1, 0.0], ''),
    'accuracy_test': ([2], [0.5], '%'),
  }


def test_labels_of_images(model, source):
  subject = results.Subject(model, source=source, split='train', count=4)
  assert subject.names == [pathlib.Path(source.name(i)).name for i in range(4)]
  rows = special.softmax(subject.attention.outputs, axis=-1)
  labels, title = subject.labels
  assert title == 'predicted class, probability'
  for label, row, one_hot in zip(labels, rows, subject.batch['label'], strict=True):
    name, probability, *rest = label.split('\n')
    best, true = (model.class_names[x.argmax()] for x in (row, one_hot))
    assert (name, probability) == (best, f'{100 * row.max():.0f} %')
    assert rest == ([f'true: {true}'] if best != true else [])
