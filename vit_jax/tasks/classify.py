"""Classification: a Vision Transformer, a cross-entropy, top-1 accuracy."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vit_jax import models
from vit_jax import preprocess
from vit_jax.evaluators import classification
from vit_jax.run import losses

# By which a checkpoint can be the best.
METRICS = ('accuracy_test', 'loss_test')


class Task(NamedTuple):
  """What the training loop knows of an objective.

  Attributes:
    init: (random key) -> parameters.
    loss: (parameters, batch, random key for dropout) -> scalar, the mean over
      the batch.
    evaluators: (mesh, source, split name) -> list of objects whose
      `run(parameters, stop)` returns a dict of numbers.
    predict: (parameters, images) -> logits [B, classes].
    batch_spec: number of rows -> shapes and types of a training batch.
  """

  init: Callable
  loss: Callable
  evaluators: Callable
  predict: Callable
  batch_spec: Callable


def make(config, class_names: Sequence[str]) -> Task:
  """Returns the task of a config.

  Args:
    config: reads `model`, `loss`, `label_smoothing`, `pp`, `batch_eval`.
    class_names: the classes of the training data.

  Raises:
    ValueError: on an unknown loss or metric, or unknown fields of the model.
  """
  if config.best_metric not in METRICS:
    raise ValueError(
      f"best_metric='{config.best_metric}' is not among the metrics of this "
      f'task: use one of {METRICS} (config.best_metric)'
    )
  model = models.make_model(config.model, num_classes=len(class_names))
  train_loss = losses.get_loss(config.loss, config.label_smoothing)
  eval_loss = losses.get_loss(config.loss)
  height, width = preprocess.crop_size(config.pp)

  def init(rng):
    images = jnp.zeros((1, height, width, config.pp.channels))
    return model.init(rng, images, train=False)['params']

  def loss(params, batch, rng):
    logits = model.apply(
      {'params': params}, batch['image'], train=True, rngs={'dropout': rng}
    )
    return train_loss(logits, batch['label']).mean()

  def predict(params, images):
    return model.apply({'params': params}, images, train=False)

  def evaluators(mesh, source, split='test'):
    return [
      classification.Evaluator(
        config, mesh, source, predict, eval_loss, suffix=f'_{split}'
      )
    ]

  def batch_spec(size):
    image = (size, height, width, config.pp.channels)
    return {
      'image': jax.ShapeDtypeStruct(image, jnp.float32),
      'label': jax.ShapeDtypeStruct((size, len(class_names)), jnp.float32),
    }

  # Traces the model, which finds what does not fit before anything is compiled.
  shape = jax.eval_shape(
    lambda: predict(
      init(jax.random.key(0)),
      jnp.zeros((1, height, width, config.pp.channels)),
    )
  ).shape
  if len(shape) != 2:
    raise ValueError(
      f"classifier='{config.model.classifier}' gives logits {shape}, not one row "
      "an image: to train a classifier use 'token' or 'gap' "
      '(config.model.classifier)'
    )
  return Task(init, loss, evaluators, predict, batch_spec)
