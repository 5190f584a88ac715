"""Tests of the memory estimate against XLA's analysis of compiled programs."""

import jax
import jax.numpy as jnp
import pytest

from vit_jax import console, train
from vit_jax.run import loop, memory

ROWS, WIDTH, DEPTH = 512, 64, 8
SIZE = 4 * ROWS * WIDTH  # Bytes of a layer's output.


def layer(x, weight):
  return jax.nn.gelu(x @ weight), None


def written_out(weights, x):
  for i in range(DEPTH):
    x, _ = layer(x, weights[i])
  return x.sum()


def recomputed(weights, x):
  for i in range(DEPTH):
    x, _ = jax.checkpoint(layer)(x, weights[i])
  return x.sum()


def looped(weights, x):
  return jax.lax.scan(layer, x, weights)[0].sum()


@pytest.mark.parametrize('function', [written_out, recomputed, looped])
def test_estimate_is_a_tight_lower_bound(function):
  x = jnp.zeros((ROWS, WIDTH))
  weights = jnp.zeros((DEPTH, WIDTH, WIDTH))
  traced = jax.jit(jax.grad(function)).trace(weights, x)
  found = memory.least_bytes(traced.jaxpr)
  # The backward pass reads an array of `SIZE` bytes per layer.
  assert found > DEPTH * SIZE
  compiled = traced.lower().compile().memory_analysis()
  total = sum(
    getattr(compiled, f'{name}_size_in_bytes')
    for name in ('argument', 'output', 'temp')
  )
  assert total / 2.5 < found < total


def test_oversized_program_is_reported_before_writing(
  tiny_config, tmp_path, monkeypatch
):
  monkeypatch.setattr(console, 'machine_memory', lambda: 2**17)
  with pytest.raises(ValueError, match='batch=16.*0.0 MiB') as error:
    train.train_and_evaluate(tiny_config, tmp_path / 'run')
  for key in ('batch', 'accum_steps', 'pp.crop', 'model.transformer.remat'):
    assert f'--config.{key}' in str(error.value)
  assert not (tmp_path / 'run').exists()


def test_out_of_memory_error_suggests_flags(tiny_config, tmp_path, monkeypatch):
  def fail(self, batch):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory')

  monkeypatch.setattr(loop.Run, '_update_once', fail)
  with pytest.raises(ValueError, match='batch=16.*memory.*--config.accum_steps'):
    train.train_and_evaluate(tiny_config, tmp_path / 'run')
