"""A complete task: the mean colour of an image, by regression.

python -m vit_jax.main --config=tests/toy_config.py --workdir=/tmp/toy
"""

import dataclasses

import jax
import jax.numpy as jnp
import tensorflow as tf

from vit_jax import models
from vit_jax.tasks import base


class Task(base.Task):
  """Learns the mean of each colour channel."""

  @dataclasses.dataclass
  class Options:
    power: float = 2.0  # --config.task_options.power=1.5

  def __init__(self, config, metadata):
    super().__init__(config, metadata)
    self.model = models.make_model(config.model, num_classes=config.pp.channels)

  def example(self, record, seed):  # TensorFlow; seed is None in evaluation
    image = self.inputs(record, seed)['image']
    return {'image': image, 'color': tf.reduce_mean(image, axis=(0, 1))}

  def batch_spec(self, size):
    color = jax.ShapeDtypeStruct((size, self.config.pp.channels), jnp.float32)
    return {'image': self.image_spec(size), 'color': color}

  def loss(self, params, extra, batch, rng):
    errors = self._errors(params, extra, batch)
    return (errors.sum(), jnp.float32(len(errors))), {}

  def measure(self, params, extra, batch):
    errors = self._errors(params, extra, batch) * batch['mask']
    return {'loss': (errors.sum(), batch['mask'].sum())}

  def _errors(self, params, extra, batch):
    error = abs(self.outputs(params, extra, batch) - batch['color'])
    return (error**self.options.power).sum(axis=-1)  # [B]
