"""Tests of means over a split: how far the host runs ahead."""

import types

import jax
import numpy as np

from vit_jax import input_pipeline
from vit_jax.evaluators import means
from vit_jax.inference import engine


def test_the_host_runs_two_batches_ahead_at_most(monkeypatch):
  begun, waited, timed = [], [], []
  monkeypatch.setattr(
    input_pipeline,
    'task_batches',
    lambda *_: ({'index': np.array(i)[None]} for i in range(10)),
  )
  fetch = engine._fetch

  def wait(found, mesh):
    waited.append(int(found[1]))
    return fetch(found, mesh)

  monkeypatch.setattr(engine, '_fetch', wait)
  block = jax.block_until_ready
  monkeypatch.setattr(jax, 'block_until_ready', lambda x: timed.append(x) or block(x))

  def sums(params, extra, batch):
    number = int(batch['index'][0])
    assert not [i for i in begun if i < number - 2 and i not in waited]
    begun.append(number)
    return {'loss': (np.float32(number), np.float32(1))}, np.int32(number)

  task = types.SimpleNamespace(config=types.SimpleNamespace(batch_eval=8), example=None)
  source = types.SimpleNamespace(num_examples=10)
  source.evaluated = source
  mesh = jax.make_mesh((8,), ('data',))
  evaluator = means.Means(task, mesh, source)
  evaluator._sums = sums
  assert evaluator.run({}, {})['loss'] == 4.5
  assert waited == list(range(10))
  assert timed == [sums({}, {}, {'index': [0]})]  # The first compiles.
