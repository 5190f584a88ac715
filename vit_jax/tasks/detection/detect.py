"""Object detection as the prediction of a set (DETR, arXiv 2005.12872).

A fixed number of queries predict a class, or "no object", and a box each. The
loss matches predictions and objects at the least cost; it is computed after
each layer of the decoder.

Shapes: B images, Q queries, N objects of an image (padded), L layers of the
decoder, C classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax import models
from vit_jax.configs import task_options
from vit_jax.figures import grids, overlays
from vit_jax.inference import predictor as predictor_lib
from vit_jax.learning import optim
from vit_jax.tasks import base, predict_flags
from vit_jax.tasks.detection import (
  attention_figures,
  average_precision as ap,
  boxes as boxes_lib,
  detectors,
  figures,
  objects,
)

_MOST = 512  # Largest shorter side of an image in TensorBoard, in pixels.


class Task(objects.Task):
  """Learns boxes and classes of the objects of images."""

  Options = task_options.Detect
  NEW_PARAMS: ClassVar[tuple[str, ...]] = ('class_head/',)
  FIGURES = figures.FIGURES
  FLAGS = predict_flags.DETECTION.FLAGS

  def __init__(
    self, config: ml_collections.ConfigDict, metadata: dict[str, Any]
  ) -> None:
    super().__init__(config, metadata)
    if models.kind_of(config.model) == 'eomt':
      raise ValueError(
        f"task='{config.task}' learns boxes, which a model of kind='eomt' does not "
        "predict: use --config.task=segment for its masks, or a model of kind='detr'"
      )

  # --- Training ---

  def init(self, rng: jax.Array) -> tuple[Any, Any]:
    """Returns the parameters, and the constants of a frozen batch norm, if any."""
    zeros = jnp.zeros(self.image_spec(1).shape)
    variables = self.model.init(rng, zeros, train=False)
    params = variables.pop('params')
    return params, {k: v for k, v in variables.items() if k == 'frozen'}

  def new_params(
    self,
    weights: Mapping[str, Any],
    shapes: Mapping[str, Any],
    class_names: Sequence[str] | None,
  ) -> Sequence[str]:
    """Returns the heads that weights lack, or that are for other classes.

    With weights of only a backbone, everything else is new.
    """
    if 'query_embedding' not in weights:
      backbone = ('backbone/', 'frozen/')
      return [path for path in shapes if not path.startswith(backbone)]
    bias = 'class_head/bias'
    same_classes = bias in weights and weights[bias].shape == shapes[bias].shape
    if class_names is not None and tuple(class_names) != self.class_names:
      same_classes = False
    prefixes = []
    for prefix in self.NEW_PARAMS:
      is_missing = not any(path.startswith(prefix) for path in weights)
      if is_missing or (prefix == 'class_head/' and not same_classes):
        prefixes.append(prefix)
    return prefixes

  def check_weights(self, weights: Mapping[str, Any], params: Any) -> None:
    """Checks that weights include all frozen parameters: none stays random."""
    frozen = optim.frozen_sizes(self.config.lr_multipliers, params)
    missing = sorted(set(frozen) - set(weights))
    if missing:
      raise ValueError(
        f'pretrained={self.config.pretrained!r}: this config needs weights for its '
        f'frozen parameters (lr_multipliers), and {len(missing)} have none, such as '
        f"'{missing[0]}', and would stay random: pass --config.pretrained=FILE, of a "
        'detector with the same classes or, for its backbone, of a classifier; or train '
        'all parameters: --config.lr_multipliers="()", for a ResNet with '
        '--config.model.norm=group'
      )

  def _apply(
    self, params: Any, extra: Any, batch: base.Batch, **kwargs: Any
  ) -> dict[str, jax.Array]:
    variables = {'params': params, **extra}
    return self.model.apply(variables, batch['image'], batch.get('real'), **kwargs)

  def _set_losses(
    self, outputs: dict[str, jax.Array], batch: base.Batch
  ) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the weighted losses of each image by name, [L, B], and the queries.

    The batch has the factors that `augment` adds.
    """
    class_weight = self.options.class_weight
    if class_weight is None:  # The published one, see task_options.Segment.
      class_weight = boxes_lib.CLASS
    sums = boxes_lib.losses(
      outputs['logits'],
      outputs['boxes'],
      batch['class'],
      batch['box'],
      batch['count'],
      class_weight,
      self.options.no_object_weight,
    )
    losses = {
      'class': class_weight * sums['class'] * batch['class_factor'],
      'l1': boxes_lib.L1 * sums['l1'] * batch['target_factor'],
      'giou': boxes_lib.GIOU * sums['giou'] * batch['target_factor'],
    }
    return losses, sums['query']

  def loss(
    self, params: Any, extra: Any, batch: base.Batch, rng: jax.Array
  ) -> tuple[base.WeightedSum, base.WeightedSums]:
    """Returns the sum over layers of the set loss, and the number of images."""
    losses = self._losses(params, extra, batch, train=True, rngs={'dropout': rng})
    count = jnp.float32(len(batch['count']))
    total = sum(x.sum() for x in losses.values())
    last_layer = {name: (x[-1].sum(), count) for name, x in losses.items()}
    return (total, count), last_layer

  def _losses(
    self, params: Any, extra: Any, batch: base.Batch, **kwargs: Any
  ) -> dict[str, jax.Array]:
    """Returns all losses, see `_set_losses`; `kwargs` are for the model."""
    losses, _ = self._set_losses(self._apply(params, extra, batch, **kwargs), batch)
    return losses

  # --- Evaluation and prediction ---

  def outputs(self, params: Any, extra: Any, batch: base.Batch) -> dict[str, jax.Array]:
    """Computes `logits` [B, Q, C + 1] and `boxes` [B, Q, 4] (centre, size)."""
    layers = self._apply(params, extra, batch, train=False)
    return {name: x[-1] for name, x in layers.items()}

  def exported(
    self, params: Any, extra: Any, batch: base.Batch
  ) -> dict[str, jax.Array]:
    """Returns `boxes` [B, Q, 4], corners x0, y0, x1, y1 as shares of the image.

    Also `probabilities` [B, Q, C] of the classes, which leave out "no object",
    and with a mask head the logits `masks` [B, Q, H / 4, W / 4].
    """
    outputs = self.outputs(params, extra, batch)
    logits = outputs.pop('logits')
    return {
      **outputs,
      'boxes': boxes_lib.corners(outputs['boxes']),
      'probabilities': jax.nn.softmax(logits)[..., :-1],
    }

  def detections(self, outputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the most probable object of each query.

    `boxes`, float32 [B, Q, 4], corners x0, y0, x1, y1 as shares of the image;
    `labels`, int32 [B, Q]; `scores`, float32 [B, Q].
    """
    probabilities = jax.nn.softmax(outputs['logits'])[..., :-1]
    return {
      'boxes': boxes_lib.corners(outputs['boxes']),
      'labels': probabilities.argmax(axis=-1),
      'scores': probabilities.max(axis=-1),
    }

  def measure(self, params: Any, extra: Any, batch: base.Batch) -> base.WeightedSums:
    """Returns the sum of the losses of images, and the number of images."""
    factors = self.image_loss_factors(batch['count'])
    losses = self._losses(params, extra, {**batch, **factors}, train=False)
    image_losses = sum(x[-1] for x in losses.values())  # [B]
    return {'loss': ((image_losses * batch['mask']).sum(), batch['mask'].sum())}

  def check_points(self, points: Any) -> np.ndarray:
    return attention_figures.check_points(points)

  @classmethod
  def evaluators(cls, config: ml_collections.ConfigDict) -> list[type]:
    return [*super().evaluators(config), ap.AveragePrecision]

  def predictor(self, params: Any, extra: Any, step: int) -> predictor_lib.Predictor:
    return detectors.Detector(self, params, extra, step)

  def draw_evaluation(self, batch: base.Batch, outputs: Any) -> dict[str, np.ndarray]:
    """Draws test images: the objects, then the detections."""
    detections = jax.device_get(self.detections(outputs))
    filled = np.asarray(boxes_lib.filled(batch))
    pictures = []
    for i, image in enumerate(grids.to_pixels(batch['image'])):
      size = boxes_lib.shown_size(image.shape[:2], filled[i])
      is_object = batch['label'][i] >= 0
      names = [self.class_names[label] for label in batch['label'][i][is_object]]
      boxes = boxes_lib.to_pixels(batch['truth'][i][is_object], size)
      pictures.append(overlays.draw(image, boxes, names))
      scores = detections['scores'][i]
      is_detected = scores >= detectors.THRESHOLD
      labels = detections['labels'][i][is_detected]
      captions = []
      for label, score in zip(labels, scores[is_detected]):
        captions.append(f'{self.class_names[label]} {100 * score:.0f}')
      boxes = boxes_lib.to_pixels(detections['boxes'][i][is_detected], size)
      pictures.append(overlays.draw(image, boxes, captions))
    titles = ['objects', 'detected', 'objects', 'detected']
    return {'detections': grids.grid(np.stack(pictures), titles=titles, most=_MOST)}
