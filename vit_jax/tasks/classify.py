"""Classification with a cross-entropy loss; measures top-1 and top-5 accuracy."""

from collections.abc import Sequence
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import console, input_pipeline, models
from vit_jax.configs import schema, task_options
from vit_jax.data.augmentation import mixing
from vit_jax.figures import drawing, gallery, grids, internals
from vit_jax.inference import tables
from vit_jax.learning import losses
from vit_jax.run import metrics as metrics_lib
from vit_jax.tasks import base

_TOP5 = 100  # Minimum number of classes for top-5 accuracy.
_SHOWN = 5  # Classes in the web demo.
_POOLING = 'MAPHead_0/'  # Attention pooling, which weights may lack.
_NAMES = 3  # Maximum number of classes in the caption of a training image.


class Task(base.Task):
  """Learns the classes of images."""

  FEATURES = ('image', 'label', 'soft_label?')
  Options = task_options.Classify
  METRICS: ClassVar = {'accuracy': metrics_lib.SHARE, 'loss': metrics_lib.LOSS}
  METADATA = ('class_names',)
  FIGURES = gallery.OF_CLASSES

  def __init__(self, config, metadata):
    super().__init__(config, metadata)
    num_classes = len(self.class_names)
    self.model = models.make_model(config.model, num_classes=num_classes)
    self._train_loss = losses.get_loss(config.loss, config.label_smoothing)
    self._eval_loss = losses.get_loss(config.loss)
    self._example = input_pipeline.labelled_example(config, num_classes)
    mixing.check(self.options.mixup, self.options.cutmix, config.batch)
    # Tracing raises errors of shape before anything is compiled.
    state = jax.eval_shape(self.init, jax.random.key(0))
    batch = {'image': self.image_spec(1)}
    shape = jax.eval_shape(self.outputs, *state, batch).shape
    if len(shape) != 2:
      raise ValueError(
        f"classifier='{config.model.classifier}' gives logits of shape {shape}, "
        "not one row per image: to train a classifier use 'token' or 'gap' "
        '(config.model.classifier)'
      )

  @classmethod
  def make_metadata(cls, config, source):
    return {'class_names': list(source.class_names)}

  @classmethod
  def planned_metadata(cls, config, num_classes):
    if num_classes is None:
      raise ValueError(
        f"the number of classes of dataset='{config.dataset}' is unknown: pass "
        '--num_classes'
      )
    return {'class_names': [str(i) for i in range(num_classes)]}

  def new_params(self, have, want, class_names):
    new = super().new_params(have, want, class_names)
    pooled = any(path.startswith(_POOLING) for path in have)
    return new if pooled else (*new, _POOLING)

  def example(self, record, seed):
    """Returns `image`, and `label`, float32 [classes], 1 for each true class.

    For a soft label, `label` is the share of each class.
    """
    return self._example(record, seed)

  def batch_spec(self, size):
    label = jax.ShapeDtypeStruct((size, len(self.class_names)), jnp.float32)
    return {'image': self.image_spec(size), 'label': label}

  def augment(self, batch, rng):
    if not (self.options.mixup or self.options.cutmix):
      return batch
    return mixing.mix(batch, rng, self.options.mixup, self.options.cutmix)

  def _counted(self, batch):
    """Returns float32 [B]: 1 for rows that count; softmax needs a label."""
    label = batch['label']
    if self.config.loss == 'sigmoid':
      return jnp.ones(label.shape[0], jnp.float32)
    return (label.sum(axis=-1) > 0).astype(jnp.float32)

  def loss(self, params, extra, batch, rng):
    """Returns the cross-entropy summed over rows, and the number of rows."""
    logits = self.model.apply(
      {'params': params}, batch['image'], train=True, rngs={'dropout': rng}
    )
    counted = self._counted(batch)  # [B]
    rows = self._train_loss(logits, batch['label'])  # [B]
    return ((rows * counted).sum(), counted.sum()), {}

  def measure(self, params, extra, batch):
    """Computes accuracy and loss, with at least 100 classes also `accuracy_top5`."""
    logits, label = self.outputs(params, extra, batch), batch['label']
    counted = self._counted(batch) * batch['mask']  # [B]
    best = jax.nn.one_hot(logits.argmax(axis=-1), logits.shape[-1])
    found = {
      'accuracy': (best * label).sum(axis=-1) > 0,
      'loss': self._eval_loss(logits, label),
    }
    if logits.shape[-1] >= _TOP5:
      _, best = jax.lax.top_k(logits, 5)  # [B, 5]
      correct = jnp.take_along_axis(label, best, axis=-1).max(axis=-1)
      found['accuracy_top5'] = correct > 0
    return {name: ((x * counted).sum(), counted.sum()) for name, x in found.items()}

  @property
  def exclusive(self) -> bool:
    """Whether the classes exclude each other: their probabilities sum to 1."""
    return self.config.loss != 'sigmoid'

  def squash(self, logits) -> jax.Array:
    """Turns logits [n, classes] into probabilities; can be jitted."""
    return (jax.nn.softmax if self.exclusive else jax.nn.sigmoid)(logits)

  def probabilities(self, logits) -> np.ndarray:
    """Turns logits [n, classes] into probabilities, float32 [n, classes]."""
    return np.asarray(self.squash(logits))

  def captions_of(self, batch, outputs=None):
    """Returns the labels in training, else the predicted class and what is true."""
    if outputs is None:
      return [self._label_caption(label) for label in batch['label']]
    return [
      self._prediction_caption(*row)
      for row in zip(self.probabilities(outputs), batch['label'])
    ]

  def _label_caption(self, label):
    """Returns the classes of a label [classes], the largest share first."""
    best = np.argsort(-label, kind='stable')[: np.count_nonzero(label)]
    words = (
      self.class_names[i] + (f': {100 * label[i]:.0f} %' if label[i] < 1 else '')
      for i in best[:_NAMES]
    )
    return grids.Caption('\n'.join(words))

  def _prediction_caption(self, probabilities, label):
    """Returns the predicted class, and the label's classes if it is not one."""
    best = probabilities.argmax()
    first = f'{self.class_names[best]}: {100 * probabilities[best]:.0f} %'
    true = ', '.join(self.class_names[i] for i in np.flatnonzero(label))
    if not true:
      return grids.Caption(f'{first}\n')
    if label[best]:
      return grids.Caption(f'{first}\n', grids.RIGHT)
    return grids.Caption(f'{first}\nis {true}', grids.WRONG)

  def labels_of(self, outputs, labels=None):
    if not self.class_names:
      return []
    rows, words = self.probabilities(outputs), []
    for row, true in zip(rows, np.zeros_like(rows) if labels is None else labels):
      best = row.argmax()
      words.append(f'{self.class_names[best]}\n{100 * row[best]:.0f} %')
      if true.any() and not true[best]:
        words[-1] += f'\ntrue: {self.class_names[true.argmax()]}'
    return words

  def exported(self, params, extra, batch):
    """Returns `logits` and `probabilities`, float32 [B, classes].

    A model without a head returns `features`, its inputs.
    """
    logits = self.outputs(params, extra, batch)
    if not self.class_names:
      return {'features': logits}
    return {'logits': logits, 'probabilities': self.squash(logits)}

  def predictor(self, params, extra, step):
    return Predictor(self, params, extra, step)

  def describe(self):
    return console.counted(len(self.class_names), 'class')


class Predictor(base.Predictor):
  """Predicts the classes of images."""

  def logits(self, images: Sequence[Any]) -> np.ndarray:
    """Computes logits, float32 [n, classes]; for `images` see `outputs`."""
    return self.outputs(images)

  def probabilities(self, images: Sequence[Any]) -> np.ndarray:
    """Computes probabilities, float32 [n, classes].

    Rows sum to 1, except after training with the sigmoid loss.
    """
    return self.task.probabilities(self.logits(images))

  def predict(
    self, images: Sequence[Any], top: int = 5, **others
  ) -> list[list[tuple[str, float]]]:
    """Returns (name, probability) of the `top` best classes of each image.

    For images and errors see `outputs`; ValueError also for a model without a head, or
    if `top` is not at least 1.
    """
    self._refuse(others)
    self._check_head()
    schema.check('top', top, schema.Count, '--')
    return list(self._best(images, top))

  @functools.cached_property
  def _shares(self):
    return jax.jit(self.task.exported)

  def _check_head(self):
    if not self.class_names:
      raise ValueError(
        'this model has no head, hence no classes: fine-tune it first '
        '(--config.pretrained), or take its features with embed(images) or as a table '
        '(--embeddings --out=table.parquet)'
      )

  def _best(self, images, top):
    """Yields the classes of each image, see `predict`."""
    for _, _, found in self.stream(images, self._shares):
      yield self._of_row(found, top)

  def _of_row(self, found, top):
    row = found['probabilities']
    best = np.argsort(-row, kind='stable')[:top]
    return [(self.class_names[i], float(row[i])) for i in best]

  def _columns(self, top=5, threshold=None, image_size=None):
    try:
      self._check_head()
    except ValueError as e:
      raise tables.NoColumns(str(e)) from e
    schema.check('top', top, schema.Count, '--')
    return tables.choices(lambda found: self._of_row(found, top), self._shares)

  def report(self, images, args):
    """Yields the path of each image, then its top predictions as lines."""
    self._check_head()
    for path, classes in zip(images, self._best(images, args.top)):
      lines = [f'  {100 * p:6.2f} %  {name}' for name, p in classes]
      yield '\n'.join([path, *lines])

  @functools.cached_property
  def _inside(self):
    """Computes `probabilities`, and a map of attention `rollout` if there is one."""
    task = self.task

    def compute(params, extra, batch):
      if internals.lacks(task.model):
        return task.exported(params, extra, batch)
      images = batch['image']
      grid = internals.patch_grid(task.model, params, images)
      found = internals.forward(task.model, params, images)
      return {
        'probabilities': task.squash(found[1]),
        'rollout': internals.rollout_maps(internals.of(task.model, *found, grid)),
      }

    return jax.jit(compute)

  def page(self):
    """Shows the top predictions, and attention rollout over the image."""
    import gradio as gr

    from vit_jax.inference import demo

    self._check_head()
    outputs = [gr.Label(label='Top predictions', num_top_classes=_SHOWN)]
    if not internals.lacks(self.task.model):
      outputs.append(demo.picture('Attention rollout'))

    def show(photo):
      ((_, inputs, found),) = self.stream([photo.path], self._inside, ['image'])
      values = [demo.confidences(self._of_row(found, _SHOWN))]
      if 'rollout' in found:
        # The model may see only a centre crop of the photo.
        is_whole = self.config.pp.resize is None
        image = photo.pixels / 127.5 - 1 if is_whole else inputs['image']
        over = drawing.overlay(drawing.as_pixels(image), found['rollout'])
        values.append(grids.to_pixels(2 * over - 1))
      return dict(zip(outputs, values))

    return show, [], outputs
