"""Tests of the inference loop."""

import time

import jax
import numpy as np

from vit_jax.distributed import sharding
from vit_jax.inference import engine


def test_compilation_of_new_sizes_is_announced(monkeypatch, capsys):
  monkeypatch.setattr(engine, '_ANNOUNCED_AFTER', 0.1)
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  new_sizes = [2, 3]

  def compute(batch):
    size = batch['image'].shape[1]
    if size in new_sizes:  # As if compiled.
      new_sizes.remove(size)
      time.sleep(0.5)
    return batch['image'].sum(axis=1)

  batches = [{'image': np.ones([4, size])} for size in (2, 2, 3, 2)]
  results = list(engine.run(compute, batches, mesh, label='Evaluating'))
  np.testing.assert_array_equal(results, np.array([2, 2, 3, 2])[:, None] * np.ones(4))
  output = capsys.readouterr()
  assert output.err.count('Evaluating: compiling') == 2
  assert not output.out  # Results may be piped.
