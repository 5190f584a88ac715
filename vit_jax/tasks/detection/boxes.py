"""Geometry of boxes, and the losses of a detector (arXiv 2005.12872).

A box is (centre x, centre y, width, height) or (x0, y0, x1, y1), its corners,
as shares of the image. `to_pixels`, `filled` and `shown_size` map boxes and maps
between an image and the canvas on which it lies, at the top left.

Shapes: B images, L layers of the decoder, Q queries, N targets of an image
(padded), C classes without "no object".
"""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.configs import task_options
from vit_jax.tasks.detection import matching

# Weights of the class, of the distance and of the overlap, in the matching and
# in the loss (section 4, "Technical details"; appendix A.4).
CLASS, L1, GIOU = task_options.Detect.class_weight, 5.0, 2.0
# Weight of a query without an object in the loss of the classes, as published.
NO_OBJECT = task_options.Detect.no_object_weight


def corners(boxes):
  """Turns boxes of centre and size [..., 4] into corners."""
  centre, size = boxes[..., :2], boxes[..., 2:]
  return jnp.concatenate([centre - size / 2, centre + size / 2], axis=-1)


def to_pixels(boxes, size) -> np.ndarray:
  """Scales corners [..., 4] from shares of an image to pixels.

  `size` is the (height, width) of the image, [..., 2].
  """
  return boxes * np.asarray(size)[..., [1, 0, 1, 0]]


def shown_size(canvas, share) -> tuple[int, int]:
  """Returns the size of an image on a canvas of (height, width), in pixels.

  For `share`, of the height and of the width, see `filled`.
  """
  height, width = np.round(np.multiply(canvas, share)).astype(int).tolist()
  return max(1, height), max(1, width)


def filled(batch):
  """Returns the shares of the canvas that images fill, down and across.

  Takes `image`, [B, H, W, C], and where there is padding `real`, bool [B, H,
  W]; returns float32 [B, 2], 1 without padding.
  """
  real = batch.get('real')
  if real is None:
    return jnp.ones((len(batch['image']), 2))
  return jnp.stack([jnp.any(real, axis).mean(-1) for axis in (2, 1)], axis=-1)


def _area(boxes):
  size = jnp.maximum(boxes[..., 2:] - boxes[..., :2], 0)
  return size[..., 0] * size[..., 1]


def _ratio(part, whole):
  """Returns part / whole, 0 where whole is 0, with finite gradients."""
  is_positive = whole > 0
  return jnp.where(is_positive, part / jnp.where(is_positive, whole, 1.0), 0.0)


def giou(first, second):
  """Computes the generalised intersection over union (arXiv 1902.09630).

  Takes corners [..., 4], broadcastable; returns [...], from -1 to 1. Ratios
  to an area of 0 count as 0.
  """
  high, low = jnp.maximum(first, second), jnp.minimum(first, second)
  inside = jnp.concatenate([high[..., :2], low[..., 2:]], axis=-1)
  around = jnp.concatenate([low[..., :2], high[..., 2:]], axis=-1)
  shared = _area(inside)
  union = _area(first) + _area(second) - shared
  hull = _area(around)
  return _ratio(shared, union) - _ratio(hull - union, hull)


def matching_cost(logits, boxes, labels, targets, class_weight: float = CLASS):
  """Computes the cost of giving each target each prediction (section 3.1).

  Takes logits [..., Q, C + 1], boxes [..., Q, 4], labels [..., N] and targets
  [..., N, 4], boxes of centre and size; returns float32 [..., N, Q].
  """
  probabilities = jax.nn.softmax(logits.astype(jnp.float32))  # [..., Q, C + 1]
  one_hot = jax.nn.one_hot(labels, logits.shape[-1])  # [..., N, C + 1]
  probable = jnp.einsum('...nc,...qc->...nq', one_hot, probabilities)
  pairs = targets[..., :, None, :], boxes[..., None, :, :]
  distance = jnp.abs(pairs[0] - pairs[1]).sum(axis=-1)
  overlap = giou(*map(corners, pairs))
  return L1 * distance - class_weight * probable - GIOU * overlap


def losses(
  logits, boxes, labels, targets, counts, class_weight=CLASS, no_object=NO_OBJECT
) -> dict:
  """Computes the losses of a set prediction after an optimal matching.

  Takes predicted logits [L, B, Q, C + 1], the last class being "no object", and boxes
  [L, B, Q, 4]; the classes of the targets, int [B, N], their boxes [B, N, 4] and
  number, int [B]. Boxes have centre and size. The weights are of the class in the
  matching, and of a query without an object in the cross-entropy.

  Returns:
    Sums, float32 [L, B]: `class`, the cross-entropy, over queries; `l1` and `giou`
    over targets. And `query`, the query of each target, int32 [L, B, N], -1 for
    padding.
  """
  logits = logits.astype(jnp.float32)
  nothing = logits.shape[-1] - 1
  queries = logits.shape[-2]
  exists = jnp.arange(labels.shape[-1]) < counts[:, None]  # [B, N]
  cost = matching_cost(logits, boxes, labels[None], targets[None], class_weight)
  chosen = matching.match(cost, counts)  # [L, B, N]
  picked = jax.nn.one_hot(chosen, queries)  # [L, B, N, Q]; padding has no one.

  is_matched = picked.sum(axis=-2) > 0  # [L, B, Q]
  wanted = jnp.einsum('lbnq,bn->lbq', picked, labels.astype(jnp.float32))
  wanted = jnp.where(is_matched, wanted.round().astype(jnp.int32), nothing)
  weight = jnp.where(is_matched, 1.0, no_object)
  log_probabilities = jax.nn.log_softmax(logits)
  cross_entropy = -jnp.take_along_axis(log_probabilities, wanted[..., None], axis=-1)

  matched = jnp.einsum(
    'lbnq,lbqk->lbnk', picked, boxes, precision=jax.lax.Precision.HIGHEST
  )
  l1 = jnp.abs(matched - targets).sum(axis=-1)  # [L, B, N]
  giou_loss = 1 - giou(corners(matched), corners(targets))
  return {
    'class': (cross_entropy[..., 0] * weight).sum(axis=-1),
    'l1': jnp.where(exists, l1, 0.0).sum(axis=-1),
    'giou': jnp.where(exists, giou_loss, 0.0).sum(axis=-1),
    'query': chosen,
  }
