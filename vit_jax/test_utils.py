"""Helpers for tests of other code: writes weights of a small model."""

import jax
import jax.numpy as jnp

from vit_jax import checkpoint, models


def create_checkpoint(model_config, path: str):
  """Writes an .npz of a model's initial weights.

  Args:
    model_config: fields of the model without `num_classes`, which is 1; for
      images of 16 x 16 pixels.
    path: path of the file.
  """
  model = models.make_model(model_config, num_classes=1)
  variables = model.init(jax.random.key(0), jnp.ones((1, 16, 16, 3)), train=False)
  checkpoint.save(variables['params'], path)
