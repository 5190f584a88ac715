"""Heads of semantic segmentation: what the kind of a model brings to the task."""

from collections.abc import Mapping
import importlib
from typing import Any, Protocol

import jax
import ml_collections

from vit_jax import models
from vit_jax.tasks import base


class Head(Protocol):
  """What the kind of a model brings: its parameters, its loss and its scores.

  The constructor gets the config, the number of classes, and weights of the classes,
  float32 [C], or None.

  Attributes:
    model: the Flax module.
  """

  model: Any

  def init(self, rng: jax.Array, images: jax.Array) -> tuple[Any, Any]:
    """Returns parameters and extra state, see Task.init; images are zeros [1, H, W, 3]."""

  def new_params(
    self, weights: Mapping[str, Any], shapes: Mapping[str, Any]
  ) -> tuple[str, ...]:
    """Returns what does not come from `config.pretrained`, see Task.new_params."""

  def augment(self, batch: base.Batch) -> base.Batch:
    """Adds to a global batch what the loss needs, see Task.augment."""

  def loss(
    self,
    params: Any,
    extra: Any,
    batch: base.Batch,
    rng: jax.Array,
    step: jax.Array,
  ) -> tuple[base.WeightedSum, base.WeightedSums]:
    """Returns the loss of a training batch, see Task.loss.

    `batch` has `image`, float32 [B, H, W, 3], `segmentation`, int32 [B, H, W]: classes of
    the pixels, negative for pixels that do not count; and what `augment` adds.
    """

  def update_extra(self, extra: Any, means: dict[str, jax.Array]) -> Any:
    """Returns the extra state after an update, see Task.update_extra."""

  def outputs(self, params: Any, extra: Any, images: jax.Array) -> Any:
    """Returns what the model predicts for images, a tree of arrays [B, ...]."""

  def scores(self, outputs: Any, size: tuple[int, int]) -> jax.Array:
    """Returns scores of the classes, float32 [B, h, w, C], on any grid over the images.

    Takes the result of `outputs` for images of a size. The class of a pixel is that of the
    greatest score after bilinear resizing.
    """

  def logits(self, scores: jax.Array) -> jax.Array:
    """Returns logits of the classes, whose cross-entropy is the loss of evaluation."""


# Kind of the model (config.model.kind) -> 'module:class' of its head.
HEADS = {
  'eomt': 'vit_jax.tasks.segmentation.eomt:Eomt',
  'vit': 'vit_jax.tasks.segmentation.linear:Linear',
}


def class_of(config: ml_collections.ConfigDict) -> Any:
  """Returns the class of the head for `config.model`; ValueError if there is none."""
  kind = models.kind_of(config.model)
  if kind not in HEADS:
    raise ValueError(
      f"task='{config.task}' has no head for a model of kind='{kind}': use one of "
      f'{sorted(HEADS)} (config.model)'
    )
  module, name = HEADS[kind].split(':')
  return getattr(importlib.import_module(module), name)
