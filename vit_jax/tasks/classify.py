"""Classification with a cross-entropy loss; measures top-1 and top-5 accuracy."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
from typing import Any, ClassVar

from etils import epath
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax import console, input_pipeline, models
from vit_jax.configs import schema, task_options
from vit_jax.data import records
from vit_jax.data.augmentation import mixing
from vit_jax.data.lazy import tf
from vit_jax.evaluators import report
from vit_jax.figures import gallery, grids
from vit_jax.inference import predictor as predictor_lib, tables
from vit_jax.learning import losses
from vit_jax.run import metrics as metrics_lib
from vit_jax.tasks import base, predict_flags

_TOP5 = 100  # Minimum number of classes for top-5 accuracy.
_POOLING = 'MAPHead_0/'  # Attention pooling, which weights may lack.
_NAMES = 3  # Maximum number of classes in the caption of a training image.


class Task(base.Task):
  """Learns the classes of images."""

  FEATURES: ClassVar[tuple[str, ...]] = ('image', 'label', 'soft_label?')
  Options = task_options.Classify
  METRICS: ClassVar = {'accuracy': metrics_lib.SHARE, 'loss': metrics_lib.LOSS}
  METADATA: ClassVar[tuple[str, ...]] = ('class_names',)
  REPORT = report.Report
  FIGURES = gallery.OF_CLASSES
  MULTICHANNEL = True
  CLASS_WEIGHTS = True
  FLAGS = predict_flags.CLASSIFY.FLAGS

  def __init__(
    self, config: ml_collections.ConfigDict, metadata: dict[str, Any]
  ) -> None:
    super().__init__(config, metadata)
    num_classes = len(self.class_names)
    # Divides logits before they become probabilities, see evaluators/calibration.py.
    self.temperature = metadata.get('temperature', 1.0)
    self.model = models.make_model(config.model, num_classes=num_classes)
    self._class_weights = self._make_class_weights()
    self._train_loss = self._make_train_loss()
    self._eval_loss = losses.get_loss(config.loss)
    self._example = input_pipeline.labelled_example(config, num_classes)
    mixing.check(self.options.mixup, self.options.cutmix, config.batch)
    base.check_is_pooled(config.model)

  @classmethod
  def make_metadata(
    cls, config: ml_collections.ConfigDict, source: records.Source
  ) -> dict[str, Any]:
    """Returns the names of the classes; ValueError for a softmax over one class."""
    class_names = list(source.class_names)
    if len(class_names) == 1 and config.loss == 'softmax':
      raise ValueError(
        f"the training data have only the class '{class_names[0]}', which a softmax "
        'predicts for any image: add images of another class, or set '
        '--config.loss=sigmoid (config.dataset, config.loss)'
      )
    return {'class_names': class_names}

  @classmethod
  def planned_metadata(
    cls, config: ml_collections.ConfigDict, num_classes: int | None
  ) -> dict[str, Any]:
    if num_classes is None:
      raise ValueError(
        f"the number of classes of dataset='{config.dataset}' is unknown: pass "
        '--num_classes'
      )
    return {
      'class_names': [str(i) for i in range(num_classes)],
      'class_counts': num_classes * [1],
    }

  @classmethod
  def needs_class_counts(cls, config: ml_collections.ConfigDict) -> bool:
    """Returns whether logits are adjusted, or classes weighted, by their counts."""
    adjusts = config.task_options.logit_adjustment > 0
    return adjusts or config.class_weights == 'balanced'

  def _make_class_weights(self) -> np.ndarray | None:
    """Returns the weights of the classes, float32 [classes]; None for equal ones."""
    class_weights = self.config.class_weights
    counts = self.metadata.get('class_counts')
    if class_weights == 'balanced':
      # A trained model, without counts, computes no training loss.
      return None if counts is None else losses.balanced_weights(np.array(counts))
    if class_weights is None:
      return None
    return losses.named_weights(class_weights.to_dict(), self.class_names)

  def _make_train_loss(self) -> losses.Loss:
    """Returns the loss of training, a function (logits, labels) -> [B]."""
    config, options = self.config, self.options
    _check_objective(config, options)
    offsets = None
    counts = self.metadata.get('class_counts')
    if options.logit_adjustment and counts is not None:
      offsets = losses.logit_adjustment(np.array(counts), options.logit_adjustment)
    arguments: dict[str, Any] = {
      'class_weights': self._class_weights,
      'gamma': options.focal_gamma,
    }
    if config.loss == 'sigmoid':
      arguments['alpha'] = options.focal_alpha
    return losses.get_loss(config.loss, config.label_smoothing, offsets, **arguments)

  def new_params(
    self,
    weights: Mapping[str, Any],
    shapes: Mapping[str, Any],
    class_names: Sequence[str] | None,
  ) -> Sequence[str]:
    """Returns the head and, unless the weights have it, the attention pooling."""
    prefixes = super().new_params(weights, shapes, class_names)
    has_pooling = any(path.startswith(_POOLING) for path in weights)
    return prefixes if has_pooling else (*prefixes, _POOLING)

  def example(
    self, record: records.Record, seed: 'tf.Tensor | None'
  ) -> dict[str, 'tf.Tensor']:
    """Returns `image`, and `label`, float32 [classes], 1 for each true class.

    A soft label is the share of each class.
    """
    return self._example(record, seed)

  def batch_spec(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns `image`, and `label`, float32 [size, C]."""
    label = jax.ShapeDtypeStruct((size, len(self.class_names)), jnp.float32)
    return {'image': self.image_spec(size), 'label': label}

  def augment(self, batch: base.Batch, rng: jax.Array) -> base.Batch:
    """Applies Mixup or CutMix to a global batch, see mixing.mix."""
    if not (self.options.mixup or self.options.cutmix):
      return batch
    return mixing.mix(batch, rng, self.options.mixup, self.options.cutmix)

  def _row_weights(self, batch: base.Batch) -> jax.Array:
    """Returns float32 [B]: 1 for rows that count; softmax needs a label."""
    label = batch['label']
    if self.config.loss == 'sigmoid':
      return jnp.ones(label.shape[0], jnp.float32)
    return (label.sum(axis=-1) > 0).astype(jnp.float32)

  def loss(
    self, params: Any, extra: Any, batch: base.Batch, rng: jax.Array
  ) -> tuple[base.WeightedSum, base.WeightedSums]:
    """Returns the cross-entropy summed over rows, and the sum of their weights."""
    logits = self.model.apply(
      {'params': params}, batch['image'], train=True, rngs={'dropout': rng}
    )
    if logits.shape != batch['label'].shape:
      raise ValueError(
        f'logits={logits.shape} of the model must have the shape of the labels, '
        f'{batch["label"].shape}: return [images, classes] from its `__call__` '
        '(config.model)'
      )
    mask = self._row_weights(batch)  # [B]
    total = (self._train_loss(logits, batch['label']) * mask).sum()
    if self._class_weights is None or self.config.loss == 'sigmoid':
      return (total, mask.sum()), {}
    weights = losses.label_weights(batch['label'], self._class_weights)  # [B]
    return (total, weights.sum()), {}

  def measure(self, params: Any, extra: Any, batch: base.Batch) -> base.WeightedSums:
    """Computes accuracy and loss, with at least 100 classes also `accuracy_top5`."""
    logits = self.outputs(params, extra, batch)
    label = batch['label']
    best = jax.nn.one_hot(logits.argmax(axis=-1), logits.shape[-1])
    values = {
      'accuracy': (best * label).sum(axis=-1) > 0,
      'loss': self._eval_loss(logits, label),
    }
    if logits.shape[-1] >= _TOP5:
      _, best = jax.lax.top_k(logits, 5)  # [B, 5]
      correct = jnp.take_along_axis(label, best, axis=-1).max(axis=-1)
      values['accuracy_top5'] = correct > 0
    weights = self._row_weights(batch) * batch['mask']  # [B]
    return {name: ((x * weights).sum(), weights.sum()) for name, x in values.items()}

  @property
  def exclusive(self) -> bool:
    """Whether the classes exclude each other: their probabilities sum to 1."""
    return self.config.loss != 'sigmoid'

  def squash(self, logits: jax.Array) -> jax.Array:
    """Turns logits [n, classes] into probabilities; can be jitted."""
    if self.temperature != 1:
      logits = logits / self.temperature
    if self.exclusive:
      return jax.nn.softmax(logits)
    return jax.nn.sigmoid(logits)

  def probabilities(self, logits: jax.Array) -> np.ndarray:
    """Turns logits [n, classes] into probabilities, float32 [n, classes]."""
    return np.asarray(self.squash(logits))

  def captions_of(
    self, batch: base.Batch, outputs: Any = None
  ) -> Sequence[grids.Caption]:
    """Returns the labels in training, else the predicted class and what is true."""
    if outputs is None:
      return [self._label_caption(label) for label in batch['label']]
    return [
      self._prediction_caption(*row)
      for row in zip(self.probabilities(outputs), batch['label'])
    ]

  def _label_caption(self, label: np.ndarray) -> grids.Caption:
    """Returns the classes of a label [classes], the largest share first."""
    best = np.argsort(-label, kind='stable')[: np.count_nonzero(label)]
    lines = []
    for i in best[:_NAMES]:
      share = f': {100 * label[i]:.0f} %' if label[i] < 1 else ''
      lines.append(f'{self.class_names[i]}{share}')
    return grids.Caption('\n'.join(lines))

  def _prediction_caption(
    self, probabilities: np.ndarray, label: np.ndarray
  ) -> grids.Caption:
    """Returns the predicted class, and the label's classes if it is not one."""
    best = probabilities.argmax()
    first = f'{self.class_names[best]}: {100 * probabilities[best]:.0f} %'
    true = ', '.join(self.class_names[i] for i in np.flatnonzero(label))
    if not true:
      return grids.Caption(f'{first}\n')
    if label[best]:
      return grids.Caption(f'{first}\n', grids.RIGHT)
    return grids.Caption(f'{first}\nis {true}', grids.WRONG)

  def labels_of(self, outputs: Any, labels: np.ndarray | None = None) -> list[str]:
    """Returns the best class of each image with its probability, and the true one."""
    if not self.class_names:
      return []
    texts = []
    for i, probabilities in enumerate(self.probabilities(outputs)):
      best = probabilities.argmax()
      text = f'{self.class_names[best]}\n{100 * probabilities[best]:.0f} %'
      if labels is not None and labels[i].any() and not labels[i][best]:
        text += f'\ntrue: {self.class_names[labels[i].argmax()]}'
      texts.append(text)
    return texts

  def exported(
    self, params: Any, extra: Any, batch: base.Batch
  ) -> dict[str, jax.Array]:
    """Returns `logits` and `probabilities`, float32 [B, classes].

    A model without a head returns `features`, its inputs.
    """
    logits = self.outputs(params, extra, batch)
    if not self.class_names:
      return {'features': logits}
    return {'logits': logits, 'probabilities': self.squash(logits)}

  def predictor(self, params: Any, extra: Any, step: int) -> predictor_lib.Predictor:
    return Predictor(self, params, extra, step)

  def describe(self) -> str:
    return console.pluralize(len(self.class_names), 'class')


def _check_objective(config: ml_collections.ConfigDict, options: Any) -> None:
  """Raises ValueError if keys of the loss exclude each other."""
  corrections = []
  if config.class_weights == 'balanced':
    corrections.append("class_weights='balanced'")
  if config.sampling == 'balanced':
    corrections.append("sampling='balanced'")
  if options.logit_adjustment:
    corrections.append(f'logit_adjustment={options.logit_adjustment}')
  if len(corrections) > 1:
    raise ValueError(
      f'{" and ".join(corrections)} correct for the same imbalance: set only one of them'
    )
  if options.logit_adjustment and config.label_smoothing:
    raise ValueError(
      f'label_smoothing={config.label_smoothing} gives rare classes more than their '
      'frequency, which logit_adjustment would amplify: set --config.label_smoothing=0 '
      'or --config.task_options.logit_adjustment=0'
    )
  if config.loss == 'sigmoid':
    is_focal = options.focal_gamma or options.focal_alpha is not None
    if is_focal and config.class_weights is not None:
      raise ValueError(
        'class_weights cannot be combined with the focal '
        "loss of loss='sigmoid', which weights positive labels by "
        'task_options.focal_alpha: leave out --config.class_weights'
      )
    if options.logit_adjustment:
      raise ValueError(
        f'logit_adjustment={options.logit_adjustment} is for classes that exclude each '
        "other, and loss='sigmoid' is for several per image: set "
        '--config.loss=softmax or --config.task_options.logit_adjustment=0'
      )
  elif options.focal_alpha is not None:
    raise ValueError(
      f'focal_alpha={options.focal_alpha} weights the positive labels of '
      f"loss='sigmoid', not of loss='{config.loss}': use --config.class_weights, or "
      '--config.task_options.focal_alpha=None'
    )


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
    self, images: Sequence[Any], top: int = 5, **options: Any
  ) -> list[list[tuple[str, float]]]:
    """Returns (name, probability) of the `top` best classes of each image.

    For images and errors see `outputs`; ValueError also for a model without a head, or
    if `top` is not at least 1.
    """
    self._refuse(options)
    self._check_head()
    schema.check('top', top, schema.Count, '--')
    return list(self._best(images, top))

  @functools.cached_property
  def _exported(self) -> Callable[..., dict[str, jax.Array]]:
    return jax.jit(self.task.exported)

  def _check_head(self) -> None:
    if not self.class_names:
      raise ValueError(
        'this model has no head, hence no classes: fine-tune it first '
        '(--config.pretrained), or take its features with embed(images) or as a table '
        '(--embeddings --out=table.parquet)'
      )

  def _best(self, images: Sequence[Any], top: int) -> Iterator[list[tuple[str, float]]]:
    """Yields the classes of each image, see `predict`."""
    for _, _, outputs in self.stream(images, self._exported):
      yield self._top_classes(outputs, top)

  def _top_classes(
    self, outputs: Mapping[str, np.ndarray], top: int
  ) -> list[tuple[str, float]]:
    probabilities = outputs['probabilities']
    best = np.argsort(-probabilities, kind='stable')[:top]
    return [(self.class_names[i], float(probabilities[i])) for i in best]

  def _columns(self, top: int = 5) -> tables.Columns:
    try:
      self._check_head()
    except ValueError as e:
      raise tables.NoColumns(str(e)) from e
    schema.check('top', top, schema.Count, '--')
    return tables.choices(
      lambda outputs: self._top_classes(outputs, top), self._exported
    )

  def report(
    self,
    images: Sequence[str],
    *,
    top: int = 5,
    out: epath.PathLike | None = None,
  ) -> Iterable[str]:
    """Yields the path of each image, then its top predictions as lines."""
    self._check_head()
    for path, classes in zip(images, self._best(images, top)):
      lines = [f'  {100 * p:6.2f} %  {name}' for name, p in classes]
      yield '\n'.join([path, *lines])

  def page(self) -> tuple[Callable[..., dict], list, list]:
    """Shows the top predictions, and explanations of them over the image."""
    from vit_jax.tasks import classify_page

    self._check_head()
    return classify_page.make(self, self._exported)
