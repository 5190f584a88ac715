"""Geometry of boxes, and the losses of a detector (arXiv 2005.12872).

A box is (centre x, centre y, width, height) or (x0, y0, x1, y1), its corners,
as shares of the image. `to_pixels`, `filled` and `shown_size` map boxes and maps
between an image and the canvas on which it lies, at the top left.

Shapes: B images, L layers of the decoder, Q queries, N targets of an image
(padded), C classes without "no object".
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.configs import task_options
from vit_jax.tasks.detection import matching

# Weights of the class, of the distance and of the overlap, in the matching and
# in the loss (section 4, "Technical details"; appendix A.4).
CLASS = task_options.Detect.class_weight
L1 = 5.0
GIOU = 2.0
# Weight of a query without an object in the loss of the classes, as published.
NO_OBJECT = task_options.Detect.no_object_weight


def corners(boxes: jax.Array) -> jax.Array:
  """Turns boxes of centre and size [..., 4] into corners."""
  centre, size = boxes[..., :2], boxes[..., 2:]
  return jnp.concatenate([centre - size / 2, centre + size / 2], axis=-1)


def to_pixels(boxes: np.ndarray, size: Any) -> np.ndarray:
  """Scales corners [..., 4] from shares of an image to pixels.

  `size` is the (height, width) of the image, [..., 2].
  """
  return boxes * np.asarray(size)[..., [1, 0, 1, 0]]


def shown_size(canvas: Sequence[int], fractions: Sequence[float]) -> tuple[int, int]:
  """Returns the size of an image on a canvas of (height, width), in pixels.

  `fractions` are a row of the result of `filled`.
  """
  height, width = np.round(np.multiply(canvas, fractions)).astype(int).tolist()
  return max(1, height), max(1, width)


def filled(batch: dict[str, jax.Array]) -> jax.Array:
  """Returns the fractions of the canvas that images fill, down and across.

  Args:
    batch: `image`, [B, H, W, C], and where there is padding `real`, bool [B, H, W].

  Returns:
    float32 [B, 2], 1 without padding.
  """
  real = batch.get('real')
  if real is None:
    return jnp.ones((len(batch['image']), 2))
  down = jnp.any(real, axis=2).mean(axis=-1)  # [B]
  across = jnp.any(real, axis=1).mean(axis=-1)
  return jnp.stack([down, across], axis=-1)


def _area(boxes: jax.Array) -> jax.Array:
  size = jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0)
  return size[..., 0] * size[..., 1]


def _ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
  """Returns the quotient, 0 where the denominator is 0, with finite gradients."""
  is_positive = denominator > 0
  return jnp.where(
    is_positive, numerator / jnp.where(is_positive, denominator, 1.0), 0.0
  )


def giou(first: jax.Array, second: jax.Array) -> jax.Array:
  """Computes the generalised intersection over union (arXiv 1902.09630).

  Args:
    first: corners [..., 4].
    second: corners [..., 4]; both are broadcast against each other.

  Returns:
    [...], from -1 to 1. Ratios to an area of 0 count as 0.
  """
  high, low = jnp.maximum(first, second), jnp.minimum(first, second)
  intersection = _area(jnp.concatenate([high[..., :2], low[..., 2:]], axis=-1))
  union = _area(first) + _area(second) - intersection
  hull = _area(jnp.concatenate([low[..., :2], high[..., 2:]], axis=-1))
  return _ratio(intersection, union) - _ratio(hull - union, hull)


def matching_cost(
  logits: jax.Array,
  boxes: jax.Array,
  labels: jax.Array,
  targets: jax.Array,
  class_weight: float = CLASS,
) -> jax.Array:
  """Computes the cost of giving each target each prediction (section 3.1).

  Args:
    logits: of predictions, [..., Q, C + 1].
    boxes: of predictions, centre and size, [..., Q, 4].
    labels: classes of targets, [..., N].
    targets: boxes of targets, [..., N, 4].
    class_weight: weight of the probability of the class.

  Returns:
    float32 [..., N, Q].
  """
  probability = matching.class_probabilities(logits, labels)  # [..., N, Q]
  targets = targets[..., :, None, :]
  boxes = boxes[..., None, :, :]
  distance = jnp.abs(targets - boxes).sum(axis=-1)
  overlap = giou(corners(targets), corners(boxes))
  return L1 * distance - class_weight * probability - GIOU * overlap


def losses(
  logits: jax.Array,
  boxes: jax.Array,
  labels: jax.Array,
  targets: jax.Array,
  counts: jax.Array,
  class_weight: float = CLASS,
  no_object: float = NO_OBJECT,
) -> dict[str, jax.Array]:
  """Computes the losses of a set prediction after an optimal matching.

  Args:
    logits: of predictions, [L, B, Q, C + 1]; the last class is "no object".
    boxes: of predictions, centre and size, [L, B, Q, 4].
    labels: classes of targets, int [B, N].
    targets: boxes of targets, [B, N, 4].
    counts: number of targets, int [B].
    class_weight: weight of the class in the matching.
    no_object: weight of a query without an object in the cross-entropy.

  Returns:
    Sums, float32 [L, B]: `class`, the cross-entropy, over queries; `l1` and `giou`
    over targets. And `query`, the query of each target, int32 [L, B, N], -1 for
    padding.
  """
  is_target = jnp.arange(labels.shape[-1]) < counts[:, None]  # [B, N]
  cost = matching_cost(logits, boxes, labels[None], targets[None], class_weight)
  query = matching.match(cost, counts)  # [L, B, N]
  matches = jax.nn.one_hot(query, logits.shape[-2])  # [L, B, N, Q], zeros for padding.
  matched_boxes = jnp.einsum(
    'lbnq,lbqk->lbnk', matches, boxes, precision=jax.lax.Precision.HIGHEST
  )
  l1 = jnp.abs(matched_boxes - targets).sum(axis=-1)  # [L, B, N]
  giou_loss = 1 - giou(corners(matched_boxes), corners(targets))
  return {
    'class': matching.class_loss(logits, labels, query, no_object),
    'l1': jnp.where(is_target, l1, 0.0).sum(axis=-1),
    'giou': jnp.where(is_target, giou_loss, 0.0).sum(axis=-1),
    'query': query,
  }
