r"""Regression: predicts numbers, such as an age or the corners of a shape.

  vit_jax train --config=configs/vit.py:b16,/path/to/folder \
    --config.pretrained=ViT-B_16.npz --config.task=regress \
    --config.task_options.targets=age --workdir=/tmp/ages

The targets are columns of the data. The model predicts them in standard deviations from
their means in the training data, which are stored with the run in targets.json;
metrics, predictions and exports are in the units of the data.

Shapes: B images, K targets.
"""

from collections.abc import Callable, Iterable, Sequence
import functools
from typing import Any, ClassVar

from etils import epath
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from vit_jax import models
from vit_jax.configs import task_options
from vit_jax.data import records
from vit_jax.data.lazy import no_autograph, tf
from vit_jax.figures import grids
from vit_jax.inference import predictor as predictor_lib, tables
from vit_jax.tasks import base
from vit_jax.tasks.regression import scores, targets as targets_lib

_LINES = 3  # Maximum number of targets in the caption of an image.


class Task(base.Task):
  """Learns numbers that are columns of the data."""

  MULTICHANNEL = True
  Options = task_options.Regress
  METADATA: ClassVar[tuple[str, ...]] = ('targets',)
  OWN_PARAMS = ('head',)
  REPORT = scores.Report

  def __init__(
    self, config: ml_collections.ConfigDict, metadata: dict[str, Any]
  ) -> None:
    super().__init__(config, metadata)
    _check_keys(config)
    self.targets = [targets_lib.Target(**fields) for fields in metadata['targets']]
    self._means = np.array([target.mean for target in self.targets])  # [K]
    self._stds = np.array([target.std for target in self.targets])
    self.model = models.make_model(config.model, num_classes=len(self.targets))
    base.check_is_pooled(config.model)

  @classmethod
  def record_features(cls, config: ml_collections.ConfigDict) -> tuple[str, ...]:
    return ('image', *config.task_options.targets)

  @classmethod
  def make_metadata(
    cls, config: ml_collections.ConfigDict, source: records.Source
  ) -> dict[str, Any]:
    """Returns the targets with their means and standard deviations."""
    names = config.task_options.targets
    return {'targets': targets_lib.measure(config, source, names)}

  @classmethod
  def planned_metadata(
    cls, config: ml_collections.ConfigDict, num_classes: int | None
  ) -> dict[str, Any]:
    targets = []
    for name in config.task_options.targets:
      target = targets_lib.Target(name, name, mean=0.0, std=1.0)
      targets.append(target._asdict())
    return {'targets': targets}

  @property
  def output_names(self) -> tuple[str, ...]:
    return tuple(target.name for target in self.targets)

  @no_autograph
  def example(
    self, record: records.Record, seed: 'tf.Tensor | None'
  ) -> dict[str, 'tf.Tensor']:
    """Returns `image`, and the standardised `target`, float32 [K]."""
    columns = []
    for name in self.options.targets:
      columns.append(tf.reshape(targets_lib.numbers(record, name), [-1]))
    values = tf.ensure_shape(tf.concat(columns, axis=0), [len(self.targets)])
    target = tf.cast((values - self._means) / self._stds, tf.float32)
    return {**self.inputs(record, seed), 'target': target}

  def batch_spec(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns `image`, and `target`, float32 [size, K]."""
    target = jax.ShapeDtypeStruct((size, len(self.targets)), jnp.float32)
    return {'image': self.image_spec(size), 'target': target}

  def losses(self, outputs: jax.Array, target: jax.Array) -> jax.Array:
    """Returns the mean loss over the targets, float32 [B], of outputs [B, K]."""
    functions: dict[str, Callable[..., jax.Array]] = {
      'squared': optax.squared_error,
      'absolute': lambda outputs, target: abs(outputs - target),
      'huber': functools.partial(optax.huber_loss, delta=self.options.huber_delta),
    }
    outputs = outputs.astype(jnp.float32)
    return functions[self.options.loss](outputs, target).mean(axis=-1)

  def loss(
    self, params: Any, extra: Any, batch: base.Batch, rng: jax.Array
  ) -> tuple[base.WeightedSum, base.WeightedSums]:
    """Returns the mean loss over targets, summed over images."""
    outputs = self.model.apply(
      {'params': params}, batch['image'], train=True, rngs={'dropout': rng}
    )
    losses = self.losses(outputs, batch['target'])
    return (losses.sum(), jnp.float32(len(losses))), {}

  def measure(self, params: Any, extra: Any, batch: base.Batch) -> base.WeightedSums:
    """Returns the loss, in which padding does not count."""
    losses = self.losses(self.outputs(params, extra, batch), batch['target'])
    mask = batch['mask']
    return {'loss': ((losses * mask).sum(), mask.sum())}

  @classmethod
  def evaluators(cls, config: ml_collections.ConfigDict) -> list[type]:
    return [scores.Report]

  def values(self, outputs: Any) -> np.ndarray:
    """Returns outputs [B, K] in the units of the data, float64."""
    return np.asarray(outputs, np.float64) * self._stds + self._means

  def exported(
    self, params: Any, extra: Any, batch: base.Batch
  ) -> dict[str, jax.Array]:
    """Returns `values`, float32 [B, K], in the units of the data."""
    outputs = self.outputs(params, extra, batch).astype(jnp.float32)
    means, stds = jnp.float32(self._means), jnp.float32(self._stds)
    return {'values': outputs * stds + means}

  def captions_of(
    self, batch: base.Batch, outputs: Any = None
  ) -> Sequence[grids.Caption]:
    """Returns the targets in training, else what is predicted and what is true."""
    true = self.values(batch['target'])
    if outputs is None:
      return [grids.Caption(text) for text in self._texts(true)]
    predicted = self.values(outputs)
    captions = []
    for predicted_text, true_text in zip(self._texts(predicted), self._texts(true)):
      captions.append(grids.Caption(f'{predicted_text}\ntrue: {true_text}'))
    return captions

  def labels_of(self, outputs: Any, labels: np.ndarray | None = None) -> list[str]:
    """Returns the predicted targets of each image, a line each."""
    return self._texts(self.values(outputs))

  def _texts(self, values: np.ndarray) -> list[str]:
    """Returns the first targets of each image, a line each."""
    names = [target.name for target in self.targets[:_LINES]]
    texts = []
    for row in values:
      lines = [f'{name} {value:.4g}' for name, value in zip(names, row)]
      texts.append('\n'.join(lines))
    return texts

  def predictor(self, params: Any, extra: Any, step: int) -> predictor_lib.Predictor:
    return Predictor(self, params, extra, step)

  def describe(self) -> str:
    texts = [f'{x.name} {x.mean:.4g} ± {x.std:.4g}' for x in self.targets[:_LINES]]
    ellipsis = ', ...' if len(self.targets) > _LINES else ''
    return f'to predict {", ".join(texts)}{ellipsis} (mean and standard deviation)'


def _check_keys(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError if keys are set that only classification reads."""
  if config.loss != 'softmax':
    raise ValueError(
      f"loss='{config.loss}' is for classes: choose the loss of a regression by "
      '--config.task_options.loss'
    )
  if config.label_smoothing:
    raise ValueError(
      f'label_smoothing={config.label_smoothing} is for classes: set '
      '--config.label_smoothing=0'
    )


class Predictor(base.Predictor):
  """Predicts the targets of images."""

  def values(self, images: Sequence[Any]) -> np.ndarray:
    """Returns the targets in the units of the data, float64 [n, K]; see `outputs`."""
    return self.task.values(self.outputs(images))

  def predict(self, images: Sequence[Any], **options: Any) -> list[dict[str, float]]:
    """Returns the targets of each image by name; for images and errors see `outputs`."""
    self._refuse(options)
    return [self._named(row) for row in self.outputs(images)]

  def _named(self, outputs: np.ndarray) -> dict[str, float]:
    """Returns the targets of an image by name."""
    return dict(zip(self.task.output_names, self.task.values(outputs).tolist()))

  def _columns(self) -> tables.Columns:
    return tables.Columns(
      dict.fromkeys(self.task.output_names, float),
      lambda inputs, outputs: self._named(outputs),
    )

  def report(
    self,
    images: Sequence[str],
    *,
    out: epath.PathLike | None = None,
  ) -> Iterable[str]:
    """Yields the path of each image, then its targets as lines."""
    for number, _, outputs in self.stream(images):
      lines = [f'  {name}  {value:.6g}' for name, value in self._named(outputs).items()]
      yield '\n'.join([images[number], *lines])

  def page(self) -> tuple[Callable[..., dict], list, list]:
    """Shows a table of the targets."""
    import gradio as gr

    table = gr.Dataframe(
      headers=['target', 'value'], label='Predictions', interactive=False
    )

    def show(photo: Any) -> dict:
      [values] = self.predict([photo.path])
      return {table: [[name, f'{value:.6g}'] for name, value in values.items()]}

    return show, [], [table]
