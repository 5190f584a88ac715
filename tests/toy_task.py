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
  """Learns the mean of every colour channel."""

  METRICS = ('loss',)

  @dataclasses.dataclass
  class Options:
    power: float = 2.0

  def __init__(self, config, metadata):
    super().__init__(config, metadata)
    channels = config.pp.channels
    self.model = models.make_model(config.model, num_classes=channels)

  def example(self, record, seed):
    """Adds the colour to the image."""
    inputs = self.inputs(record, seed)
    return {**inputs, 'color': tf.reduce_mean(inputs['image'], axis=(0, 1))}

  def batch_spec(self, size):
    """Returns shapes of images and colours."""
    color = jax.ShapeDtypeStruct((size, self.config.pp.channels), jnp.float32)
    return {**super().batch_spec(size), 'color': color}

  def loss(self, params, extra, batch, rng):
    """Returns the sum of the errors, and the number of images."""
    count = jnp.float32(len(batch['image']))
    return (self._errors(params, extra, batch).sum(), count), {}

  def measure(self, params, extra, batch):
    """Returns the same of the rows that count."""
    errors = self._errors(params, extra, batch) * batch['mask']
    return {'loss': (errors.sum(), batch['mask'].sum())}

  def _errors(self, params, extra, batch):
    error = abs(self.outputs(params, extra, batch) - batch['color'])
    return (error**self.options.power).sum(axis=-1)  # [B]
