"""Panoptic segmentation with a detector (DETR, arXiv 2005.12872, section 4.4).

The detector finds the boxes of things and of stuff, and a mask head computes a mask for
each query. The detector is trained first, by a model without a mask head, and then only
the mask head:

  --config.model.mask_head=True --config.pretrained=WORKDIR_OF_THE_DETECTOR
  --config.lr_multipliers="(('segmentation/', 1.0), ('', 0.0))"

or both at once.

Shapes: B images, Q queries.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from vit_jax.inference import predictor as predictor_lib
from vit_jax.tasks.detection import (
  boxes as boxes_lib,
  detect,
  detectors,
  mask_losses as masks_lib,
  panoptic_quality as pq,
  segment,
  segments as segments_lib,
)


class Task(segment.Task, detect.Task):
  """Learns boxes, classes and masks of things and stuff."""

  Options = segment.Task.Options
  FLAGS = segment.Task.FLAGS
  NEW_PARAMS = (*detect.Task.NEW_PARAMS, 'segmentation/')

  # --- Training ---

  def _losses(
    self, params: Any, extra: Any, batch: dict[str, jax.Array], **kwargs: Any
  ) -> dict[str, jax.Array]:
    """Adds the losses of the masks of the last layer's matched queries."""
    if not self.model.mask_head:
      return super()._losses(params, extra, batch, **kwargs)
    outputs = self._apply(params, extra, batch, draw=False, **kwargs)
    losses, query = self._set_losses(outputs, batch)
    queries = jnp.maximum(query[-1], 0)
    masks = self.model.apply(
      {'params': params}, outputs['features'], queries, method='draw_masks'
    )
    mask_losses = masks_lib.losses(masks, batch['segments'], batch['count'])
    factor = batch['target_factor']
    return {
      **losses,
      'focal': masks_lib.FOCAL * mask_losses['focal'][None] * factor,
      'dice': masks_lib.DICE * mask_losses['dice'][None] * factor,
    }

  # --- Evaluation and prediction ---

  def outputs(
    self, params: Any, extra: Any, batch: dict[str, jax.Array]
  ) -> dict[str, jax.Array]:
    """Computes a detector's outputs, and `masks` [B, Q, H / 4, W / 4], logits."""
    outputs = self._apply(params, extra, batch, train=False)
    masks = outputs.pop('masks') if self.model.mask_head else None
    last_layer = {name: x[-1] for name, x in outputs.items()}
    return last_layer if masks is None else {**last_layer, 'masks': masks}

  def masks(self, outputs: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns `masks`, `extent`, and `labels` and `scores` [B, Q] of the queries."""
    detections = self.detections(outputs)
    del detections['boxes']
    return {**detections, 'masks': outputs['masks'], 'extent': boxes_lib.filled(batch)}

  def assemble(
    self,
    masks: Mapping[str, np.ndarray],
    row: int,
    size: tuple[int, int],
    threshold: float = segments_lib.THRESHOLD,
  ) -> segments_lib.Segments:
    """Returns the segments of an image, see vit_jax.tasks.detection.segments.assemble."""
    image_masks = {name: x[row] for name, x in masks.items()}
    return segments_lib.assemble(
      **image_masks,
      is_thing=self.is_thing,
      size=size,
      threshold=threshold,
      merge_stuff=self.options.merge_stuff,
    )

  @classmethod
  def evaluators(cls, config: ml_collections.ConfigDict) -> list[type]:
    evaluators = super().evaluators(config)
    if config.model.get('mask_head'):
      evaluators.append(pq.PanopticQuality)
    return evaluators

  def describe(self) -> str:
    head = 'with' if self.model.mask_head else 'without'
    return f'{super().describe()}; {head} masks'

  def predictor(self, params: Any, extra: Any, step: int) -> predictor_lib.Predictor:
    cls = detectors.Segmenter if self.model.mask_head else detectors.Detector
    return cls(self, params, extra, step)

  def draw_evaluation(
    self, batch: dict[str, jax.Array], outputs: Any
  ) -> dict[str, np.ndarray]:
    detections = detect.Task.draw_evaluation(self, batch, outputs)
    if not self.model.mask_head:
      return detections
    return {**detections, **super().draw_evaluation(batch, outputs)}
