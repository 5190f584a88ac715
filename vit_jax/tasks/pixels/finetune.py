"""Fine-tunes an iGPT to classify images while it still predicts pixels.

"Generative Pretraining from Pixels" (Chen et al., ICML 2020), section 2.3: the
loss is the sum of the cross-entropies of the classes and of the pixels. A linear
head reads the mean of the normalised tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from vit_jax.configs import task_options
from vit_jax.inference import predictor as predictor_lib
from vit_jax.tasks import base, classify, predict_flags
from vit_jax.tasks.pixels import pixels, sampling


class Task(pixels.Task, classify.Task):
  """Learns the classes of images, and their pixels."""

  FEATURES = classify.Task.FEATURES
  Options = task_options.PixelsFinetune
  METRICS: ClassVar = {**classify.Task.METRICS, **pixels.Task.METRICS}
  METADATA = (*classify.Task.METADATA, *pixels.Task.METADATA)
  NEW_PARAMS = ('class_head/',)
  CLASS_WEIGHTS = False
  FLAGS, IMAGELESS, NEEDS = predict_flags.PIXELS_FINETUNE

  def loss(
    self, params: Any, extra: Any, batch: base.Batch, rng: jax.Array
  ) -> tuple[base.WeightedSum, base.WeightedSums]:
    """Returns the sum of both losses over images, and the number of images.

    The loss of the pixels of an image is their mean. An image without a label
    does not count.
    """
    inputs = {'colors': batch['colors']}
    if 'masked' in batch:
      inputs['masked'] = batch['masked']
    logits, class_logits = self.model.apply({'params': params}, **inputs, train=True)
    pixel_losses, _ = self._means(*self._scores(logits, inputs))  # [B]
    class_losses = self._train_loss(class_logits, batch['label'])  # [B]
    weights = self._row_weights(batch)  # [B]
    generation = (pixel_losses * weights).sum()
    classes = (class_losses * weights).sum()
    total = classes + self.options.generation * generation
    count = weights.sum()
    metrics = {'generation': (generation, count), 'classes': (classes, count)}
    return (total, count), metrics

  def outputs(self, params: Any, extra: Any, batch: base.Batch) -> Any:
    """Returns the logits of the classes, float32 [B, classes]."""
    _, (_, class_logits) = self._read(params, batch)
    return class_logits

  exported = classify.Task.exported

  def measure(self, params: Any, extra: Any, batch: base.Batch) -> base.WeightedSums:
    """Returns the metrics of the classes and of the pixels."""
    return {
      **classify.Task.measure(self, params, extra, batch),
      **pixels.Task.measure(self, params, extra, batch),
    }

  def drawn_outputs(self, params: Any, extra: Any, batch: base.Batch) -> Any:
    """Returns the `logits` of the classes too, [B, C]."""
    outputs = super().drawn_outputs(params, extra, batch)
    return {**outputs, 'logits': self.outputs(params, extra, batch)}

  def draw_evaluation(self, batch: base.Batch, outputs: Any) -> dict[str, np.ndarray]:
    return {
      **self._draw('test_images', batch, outputs['logits']),
      **super().draw_evaluation(batch, outputs),
    }

  def predictor(self, params: Any, extra: Any, step: int) -> predictor_lib.Predictor:
    return Predictor(self, params, extra, step)

  def describe(self) -> str:
    return f'{classify.Task.describe(self)}, {super().describe()}'


class Predictor(sampling.Predictor, classify.Predictor):
  """Predicts classes, and draws images."""

  predict = classify.Predictor.predict
  _columns = classify.Predictor._columns

  def describe(self, images: Sequence[str], **options: Any) -> Iterable[str]:
    """Returns what `report` prints for each image: its classes."""
    return classify.Predictor.report(self, images, **options)

  def page(self) -> tuple[Callable[..., dict], list, list]:
    """Shows classes, and completions if the model can draw."""
    show_classes, class_inputs, class_outputs = classify.Predictor.page(self)
    if not self.task.model.causal:
      return show_classes, class_inputs, class_outputs
    complete, inputs, outputs = sampling.Predictor.page(self)

    def show(photo: Any, *values: Any) -> dict:
      return {**show_classes(photo), **complete(photo, *values)}

    return show, [*class_inputs, *inputs], [*class_outputs, *outputs]
