"""Tests of the metrics of a classifier, on hand-made logits."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.run import config as run_config


@pytest.mark.parametrize('classes', [99, 100])
def test_top_5_accuracy_needs_at_least_100_classes(tiny_config, classes):
  cls = run_config.get_task('classify')
  names = [str(i) for i in range(classes)]
  task = cls(run_config.complete(tiny_config), {'class_names': names})
  # The logits decrease from the first class to the last.
  logits = jnp.tile(-jnp.arange(classes, dtype=jnp.float32), (6, 1))
  task.outputs = lambda *_: logits
  label = np.zeros((6, classes), np.float32)
  for row, place in enumerate((0, 4, 5, 3, 1)):  # The last row has no label.
    label[row, place] = 1
  label[2, 50] = 1  # A second label, also wrong.
  mask = np.array([1, 1, 1, 1, 0, 1], np.float32)
  found = task.measure({}, {}, {'label': label, 'mask': mask})
  assert tuple(map(float, found['accuracy'])) == (1, 4)
  if classes < 100:
    assert 'accuracy_top5' not in found
  else:
    assert tuple(map(float, found['accuracy_top5'])) == (3, 4)


def make_task(config, loss='softmax', metadata=(), **options):
  """Returns a task of the classes 'ant', 'bee' and 'cat'."""
  config = config.copy_and_resolve_references()
  config.loss = loss
  config.task_options = options
  metadata = {'class_names': ['ant', 'bee', 'cat'], **dict(metadata)}
  return run_config.get_task('classify')(run_config.complete(config), metadata)


def test_the_loss_of_weighted_classes_is_divided_by_their_weights(tiny_config):
  tiny_config.class_weights = {'bee': 3.0}
  task = make_task(tiny_config)
  task.model = types.SimpleNamespace(apply=lambda *args, **kwargs: jnp.zeros((3, 3)))
  label = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 0]], np.float32)  # The last has none.
  (total, weight), _ = task.loss({}, {}, {'image': None, 'label': label}, None)
  assert float(weight) == 1 + 3
  np.testing.assert_allclose(total, 4 * np.log(3), rtol=1e-6)


@pytest.mark.parametrize(
  'keys, options, message',
  [
    ({'class_weights': {'dog': 2.0}}, {}, "class_weights has 'dog'.*3 classes"),
    ({'class_weights': 'balanced', 'sampling': 'balanced'}, {}, 'same imbalance'),
    ({'class_weights': 'balanced'}, {'logit_adjustment': 1}, 'same imbalance'),
    ({'sampling': 'balanced'}, {'logit_adjustment': 1}, 'same imbalance'),
    ({'label_smoothing': 0.1}, {'logit_adjustment': 1}, 'label_smoothing=0.1 '),
    ({'loss': 'sigmoid'}, {'logit_adjustment': 1}, 'logit_adjustment=1.*softmax'),
    ({'loss': 'softmax'}, {'focal_alpha': 0.25}, 'focal_alpha=0.25.*class_weights'),
    (
      {'loss': 'sigmoid', 'class_weights': {'bee': 2.0}},
      {'focal_gamma': 2},
      'class_weights .*focal_alpha',
    ),
  ],
)
def test_contradicting_losses_are_rejected(tiny_config, keys, options, message):
  tiny_config.update({key: keys[key] for key in keys if key != 'class_weights'})
  tiny_config.class_weights = keys.get('class_weights')
  with pytest.raises(ValueError, match=message):
    make_task(tiny_config, tiny_config.loss, **options)


def test_only_classifiers_weight_classes(tiny_config):
  tiny_config.update(task='masked_patches', class_weights='balanced')
  config = run_config.complete(tiny_config)
  with pytest.raises(ValueError, match="class_weights is set.*'masked_patches'"):
    run_config.get_task('masked_patches')(config, {})
