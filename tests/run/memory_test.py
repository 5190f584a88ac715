"""Tests of the memory that an update takes."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tasks.detection import detect_canvases_test
from vit_jax import console, models, train
from vit_jax.run import loop, memory


def test_peak_counts_donated_arguments_once():
  update = jax.jit(lambda state, batch: (state + batch.sum(), {}), donate_argnums=0)
  state = jnp.zeros((256, 256))
  compiled = update.lower(state, np.zeros((8, 8), np.float32)).compile()
  state_bytes = 4 * 256 * 256
  assert state_bytes <= memory.peak_bytes(compiled) < 1.5 * state_bytes


def test_oversized_update_is_rejected_before_writing(
  tiny_config, tmp_path, monkeypatch
):
  monkeypatch.setattr(console, 'machine_memory', lambda: 2**17)
  with pytest.raises(ValueError, match='batch=16.*0.0 MiB') as error:
    train.train_and_evaluate(tiny_config, tmp_path / 'run')
  for key in ('batch', 'accum_steps', 'pp.crop', 'model.transformer.remat'):
    assert f'--config.{key}' in str(error.value)
  assert not (tmp_path / 'run/config.json').exists()


class Detector(detect_canvases_test.TinyDetector):
  """Keeps 32 float32 features per pixel for the backward pass."""

  @nn.compact
  def __call__(self, images, mask=None, *, train):
    features = jnp.tanh(nn.Dense(32)(images))
    return super().__call__(nn.Dense(3)(features), mask, train=train)


def test_detector_on_small_photographs_is_checked_for_its_largest_canvas(
  tmp_path, monkeypatch
):
  """Photographs of 30 x 50 pixels are enlarged to canvases of 32 or 640 pixels."""
  monkeypatch.setitem(models.KINDS, 'tiny_detector', Detector)
  monkeypatch.setattr(console, 'machine_memory', lambda: jax.device_count() * 2**25)
  detect_canvases_test.write_images(tmp_path)
  config = detect_canvases_test.make_config(tmp_path)
  config.pp.update(sides=(24, 600), eval_side=32, longest_side=640)
  with pytest.raises(ValueError, match='batch=8.* update.*longest_side.*640x640'):
    train.train_and_evaluate(config, tmp_path / 'run')


def test_update_is_compiled_once(tiny_config, tmp_path, capsys, caplog):
  tiny_config.update(total_steps=1, warmup_steps=0, eval_every=0)
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    train.train_and_evaluate(tiny_config, tmp_path / 'run')
  compilations = [x for x in caplog.messages if 'compilation of jit(update)' in x]
  assert len(compilations) == 1
  assert capsys.readouterr().out.count('Compiling ...') == 1


def test_out_of_memory_error_suggests_flags(tiny_config, tmp_path, monkeypatch):
  def fail(state, batch):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory')

  class Failing(loop.Run):
    def __init__(self, *args):
      super().__init__(*args)
      self._update = fail

  monkeypatch.setattr(loop, 'Run', Failing)
  with pytest.raises(ValueError, match='batch=16.*memory.*--config.accum_steps'):
    train.train_and_evaluate(tiny_config, tmp_path / 'run')
