"""Helpers for tests of other code: writes weights of a small model."""

import functools

import jax
import jax.numpy as jnp
import ml_collections

from vit_jax import checkpoint, models


def create_checkpoint(model_config: ml_collections.ConfigDict, path: str) -> None:
  """Writes an .npz of initial weights, for one class and images of 16 x 16 pixels."""
  model = models.make_model(model_config, num_classes=1)
  init = jax.jit(functools.partial(model.init, train=False))
  variables = init(jax.random.key(0), jnp.ones((1, 16, 16, 3)))
  checkpoint.save(variables['params'], path)
