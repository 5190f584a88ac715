"""Tests of means over a split: how far the host runs ahead."""

import types

import jax
import numpy as np

from vit_jax import input_pipeline
from vit_jax.evaluators import means


def test_the_host_runs_two_batches_ahead_at_most(monkeypatch):
  begun, waited = [], []
  monkeypatch.setattr(
    input_pipeline, 'task_batches', lambda *_: iter(range(10))
  )

  def wait(found):
    every = found if isinstance(found, list) else [found]
    waited.extend(int(count) for _, count in every)

  monkeypatch.setattr(jax, 'block_until_ready', wait)

  def sums(params, extra, batch):
    assert not [i for i in begun if i < batch - 2 and i not in waited]
    begun.append(batch)
    return {'loss': (np.float32(batch), np.float32(1))}, np.int32(batch)

  task = types.SimpleNamespace(
    config=types.SimpleNamespace(batch_eval=8), example=None
  )
  source = types.SimpleNamespace(num_examples=8)
  mesh = jax.make_mesh((8,), ('data',))
  evaluator = means.Means(task, mesh, source)
  evaluator._sums = sums
  assert evaluator.run({}, {})['loss'] == 4.5
  assert waited == [0, *range(8)]  # The first compiles, and is not timed.
