"""Fine-tunes an iGPT to classify images while it still predicts pixels.

"Generative Pretraining from Pixels" (Chen et al., ICML 2020), section 2.3: the
loss is the sum of the cross-entropies of the classes and of the pixels. A linear
head reads the mean of the normalised tokens.
"""

from typing import ClassVar

from vit_jax.configs import task_options
from vit_jax.tasks import classify
from vit_jax.tasks.pixels import pixels, sampling


class Task(pixels.Task, classify.Task):
  """Learns the classes of images, and their pixels."""

  FEATURES = classify.Task.FEATURES
  Options = task_options.PixelsFinetune
  METRICS: ClassVar = {**classify.Task.METRICS, **pixels.Task.METRICS}
  METADATA = (*classify.Task.METADATA, *pixels.Task.METADATA)
  NEW_PARAMS = ('class_head/',)

  def loss(self, params, extra, batch, rng):
    """Returns the sum of both losses over images, and the number of images.

    The loss of the pixels of an image is their mean. An image without a label
    does not count.
    """
    inputs = {k: batch[k] for k in ('colors', 'masked') if k in batch}
    logits, class_logits = self.model.apply({'params': params}, **inputs, train=True)
    nats, _ = self._means(*self._scores(logits, inputs))  # [B]
    classes = self._train_loss(class_logits, batch['label'])  # [B]
    rows = self._counted(batch)  # [B]
    count = rows.sum()
    generation, classes = (nats * rows).sum(), (classes * rows).sum()
    total = classes + self.options.generation * generation
    return (total, count), {
      'generation': (generation, count), 'classes': (classes, count)
    }  # fmt: skip

  def outputs(self, params, extra, batch):
    """Returns the logits of the classes, float32 [B, classes]."""
    return self._read(params, batch)[1][1]

  exported = classify.Task.exported

  def measure(self, params, extra, batch):
    return {
      **classify.Task.measure(self, params, extra, batch),
      **pixels.Task.measure(self, params, extra, batch),
    }

  def drawn_outputs(self, params, extra, batch):
    found = super().drawn_outputs(params, extra, batch)
    return {**found, 'logits': self.outputs(params, extra, batch)}

  def draw_evaluation(self, batch, outputs):
    return {
      **self._draw('test_images', batch, outputs['logits']),
      **super().draw_evaluation(batch, outputs),
    }

  def predictor(self, params, extra, step):
    return Predictor(self, params, extra, step)

  def describe(self):
    return f'{classify.Task.describe(self)}, {super().describe()}'


class Predictor(sampling.Predictor, classify.Predictor):
  """Predicts classes, and draws images."""

  predict = classify.Predictor.predict
  describe = classify.Predictor.report
  _columns = classify.Predictor._columns

  def page(self):
    """Shows classes, and completions if the model can draw."""
    show, inputs, outputs = classify.Predictor.page(self)
    if not self.task.model.causal:
      return show, inputs, outputs
    complete, *more = sampling.Predictor.page(self)

    def both(photo, *values):
      return {**show(photo), **complete(photo, *values)}

    return both, [*inputs, *more[0]], [*outputs, *more[1]]
