"""Tests of reading batches."""

import tensorflow as tf

from vit_jax.data import feeding


def test_batches_left_open_close_after_python_has_cleared_the_module(monkeypatch):
  """Otherwise Python ends with `Exception ignored in: <generator object read ...>`."""
  batches = feeding.read(tf.data.Dataset.range(8).batch(2), None, None)
  assert next(batches).tolist() == [0, 1]
  monkeypatch.setattr(feeding, 'tf', None)
  batches.close()
