"""Tests of the metrics of a classifier, on hand-made logits."""

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
