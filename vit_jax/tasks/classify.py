"""Classification: a Vision Transformer, a cross-entropy, top-1 accuracy."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import input_pipeline
from vit_jax import models
from vit_jax.augmentation import mixing
from vit_jax.configs import rules
from vit_jax.learning import losses
from vit_jax.tasks import base


class Task(base.Task):
  """Learns the classes of images."""

  FEATURES = ('image', 'label')
  OPTIONS = {  # noqa: RUF012
    # Mixes pairs of images and their labels: the parameter of the Beta
    # distribution that the shares come from (arXiv 1710.09412); 0 does not.
    'mixup': 0.0,
    # Pastes a box of another image into each, likewise (arXiv 1905.04899).
    'cutmix': 0.0,
  }
  OPTION_RULES = {  # noqa: RUF012
    'mixup': rules.number(),
    'cutmix': rules.number(),
  }
  METRICS = ('accuracy', 'loss')
  METADATA = ('class_names',)
  METADATA_RULES = {'class_names': rules.names}  # noqa: RUF012
  NEXT = 'the classes of an image'

  def __init__(self, config, metadata):
    super().__init__(config, metadata)
    num_classes = len(self.class_names)
    self.model = models.make_model(config.model, num_classes=num_classes)
    self._train_loss = losses.get_loss(config.loss, config.label_smoothing)
    self._eval_loss = losses.get_loss(config.loss)
    self._example = input_pipeline.labelled_example(config, num_classes)
    mixing.check(self.options.mixup, self.options.cutmix, config.batch)
    # Traces the model, which finds what does not fit before anything is compiled.
    shape = jax.eval_shape(
      lambda: self.outputs(
        self.init(jax.random.key(0))[0],
        {},
        {'image': jnp.zeros(self.image_spec(1).shape)},
      )
    ).shape
    if len(shape) != 2:
      raise ValueError(
        f"classifier='{config.model.classifier}' gives logits {shape}, not one "
        "row an image: to train a classifier use 'token' or 'gap' "
        '(config.model.classifier)'
      )

  @classmethod
  def make_metadata(cls, config, source):
    """Returns the names of the classes."""
    del config
    return {'class_names': list(source.class_names)}

  @classmethod
  def planned_metadata(cls, config, num_classes):
    """Returns numbers for names."""
    if num_classes is None:
      raise ValueError(
        f"dataset='{config.dataset}' has a number of classes that is not known "
        'here: give --num_classes'
      )
    return {'class_names': [str(i) for i in range(num_classes)]}

  def example(self, record, seed):
    """Returns `image`, and `label`, float32 [classes] with a one for each class."""
    return self._example(record, seed)

  def batch_spec(self, size):
    """Returns shapes of images and of labels, one float for each class."""
    label = jax.ShapeDtypeStruct((size, len(self.class_names)), jnp.float32)
    return {'image': self.image_spec(size), 'label': label}

  def augment(self, batch, rng):
    """Mixes images and labels, where the options say so."""
    if not (self.options.mixup or self.options.cutmix):
      return batch
    return mixing.mix(batch, rng, self.options.mixup, self.options.cutmix)

  def _counted(self, batch):
    """1 for the rows that count: with softmax those that have a label."""
    label = batch['label']
    if self.config.loss == 'sigmoid':
      return jnp.ones(label.shape[0], jnp.float32)
    return (label.sum(axis=-1) > 0).astype(jnp.float32)

  def loss(self, params, extra, batch, rng):
    """Returns the cross-entropy's sum over the rows, and their number."""
    del extra
    logits = self.model.apply(
      {'params': params}, batch['image'], train=True, rngs={'dropout': rng}
    )
    counted = self._counted(batch)  # [B]
    losses_ = self._train_loss(logits, batch['label'])  # [B]
    return ((losses_ * counted).sum(), counted.sum()), {}

  def measure(self, params, extra, batch):
    """Returns how many are right, and the loss."""
    logits = self.outputs(params, extra, batch)
    best = jax.nn.one_hot(logits.argmax(axis=-1), logits.shape[-1])
    correct = (best * batch['label']).sum(axis=-1) > 0  # [B]
    counted = self._counted(batch) * batch['mask']
    loss = self._eval_loss(logits, batch['label']) * counted
    count = counted.sum()
    return {
      'accuracy': ((correct * counted).sum(), count),
      'loss': (loss.sum(), count),
    }

  def predictor(self, params, extra, step):
    """Returns a predictor that names classes."""
    return Predictor(self, params, extra, step)

  def describe(self):
    """Says how many classes there are."""
    return f'{len(self.class_names):,} classes'


class Predictor(base.Predictor):
  """Names the classes of images."""

  def logits(self, images: Sequence[Any]) -> np.ndarray:
    """Computes logits, float32 [n, classes]; see `outputs` for the arguments."""
    return self.outputs(images)

  def probabilities(self, images: Sequence[Any]) -> np.ndarray:
    """Computes probabilities, float32 [n, classes].

    Rows sum to 1, but for a model trained with the sigmoid loss, whose classes
    do not exclude each other.
    """
    activate = (
      jax.nn.sigmoid if self.config.loss == 'sigmoid' else jax.nn.softmax
    )
    return np.asarray(activate(self.logits(images)))

  def predict(
    self, images: Sequence[Any], top: int = 5
  ) -> list[list[tuple[str, float]]]:
    """Returns the most probable classes of each image.

    Args:
      images: see `outputs`.
      top: how many classes to return at most.

    Returns:
      For each image a list of (class name, probability), the best first.

    Raises:
      FileNotFoundError, ValueError: if an image does not exist or cannot be read,
        or the model has no head.
    """
    if not self.class_names:
      raise ValueError(
        'this model has no head, hence no classes: fine-tune it first '
        '(--config.pretrained), or take its features from .logits(images)'
      )
    results = []
    for row in self.probabilities(images):
      best = np.argsort(-row, kind='stable')[:top]
      results.append([(self.class_names[i], float(row[i])) for i in best])
    return results

  def report(self, images, args):
    """Lists the most probable classes below the name of each image."""
    lines = []
    for path, classes in zip(images, self.predict(images, args.top)):
      lines.append(path)
      lines += [f'  {100 * p:6.2f} %  {name}' for name, p in classes]
    return lines
