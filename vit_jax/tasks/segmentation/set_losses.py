"""Losses of a set of classes and masks, on sampled points (arXiv 2503.19108).

As in Mask2Former (arXiv 2112.01527, section 3.3): predictions are matched with targets
at points that are the same for all masks of an image; the losses of a mask are computed
at points of its own, most of which are where the prediction is least certain (PointRend,
arXiv 1912.08193, section 3.1).

Shapes: L layers with a prediction, B images, Q queries, N objects of an image (padded),
h x w cells of a predicted mask, H x W pixels, P points. Points are (x, y), as
fractions of width and height.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from vit_jax.tasks.detection import mask_losses, matching

# The backward pass computes everything again but the points, which take long to choose.
_POINTS = 'points'
_SAVE_POINTS = jax.checkpoint_policies.save_only_these_names(_POINTS)


class Options(NamedTuple):
  """Weights of the losses, also in the matching, and the sampling of points."""

  class_weight: float = 2.0
  mask_weight: float = 5.0  # Weight of the cross-entropy of points.
  dice_weight: float = 5.0
  no_object_weight: float = 0.1
  num_points: int = 12_544  # P.
  # Number of points per point of P from which the least certain ones are taken.
  oversample: float = 3.0
  importance: float = 0.75  # Fraction of P that these are; the rest are random.


def _squares(maps: jax.Array) -> jax.Array:
  """Returns the 2 x 2 pixels around each corner of a pixel, [N, (h + 1) * (w + 1), 4].

  Maps are [N, h, w], and 0 outside. A point reads its four pixels at once, as a row.
  """
  padded = jnp.pad(maps, ((0, 0), (1, 1), (1, 1)))
  upper, lower = padded[:, :-1], padded[:, 1:]
  pixels = upper[..., :-1], upper[..., 1:], lower[..., :-1], lower[..., 1:]
  return jnp.stack(pixels, axis=-1).reshape(len(maps), -1, 4)


def _rows_and_weights(
  size: tuple[int, int], points: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the rows of `_squares` that points [..., P, 2] read, and their weights.

  These are int32 [..., P] and float32 [..., P, 4], for maps of a size (h, w).
  """
  height, width = size
  positions = points * jnp.array([width, height]) - 0.5
  first = jnp.floor(positions)
  x, y = jnp.moveaxis(positions - first, -1, 0)
  weights = (1 - x) * (1 - y), x * (1 - y), (1 - x) * y, x * y
  column, row = jnp.moveaxis(first.astype(jnp.int32) + 1, -1, 0)
  return row * (width + 1) + column, jnp.stack(weights, axis=-1)


def sample(maps: jax.Array, points: jax.Array) -> jax.Array:
  """Interpolates maps [N, h, w] at points bilinearly; outside of them is 0.

  Points are [N, P, 2], or [1, P, 2] for the same points, from 0 to 1. Returns float32 [N,
  P].
  """
  rows, weights = _rows_and_weights(maps.shape[1:], points)
  rows = jnp.broadcast_to(rows, (len(maps), rows.shape[1]))
  values = jax.vmap(lambda squares, rows: squares[rows])(_squares(maps), rows)
  return (values * weights).sum(axis=-1)


def sample_objects(
  segments: jax.Array, objects: jax.Array, points: jax.Array
) -> jax.Array:
  """Interpolates the masks of objects at points, without making the masks.

  Args:
    segments: int [H, W], number of the object of each pixel, from 1; 0 for none.
    objects: int [N], numbers of objects, from 0.
    points: [N, P, 2], or [1, P, 2] for the same points, from 0 to 1.

  Returns:
    float32 [N, P], from 0 to 1.
  """
  rows, weights = _rows_and_weights(segments.shape, points)
  numbers = _squares(segments[None])[0, rows]  # [N, P, 4]
  is_inside = numbers == objects[:, None, None] + 1
  return (is_inside * weights).sum(axis=-1)


def random_points(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
  """Returns random points [*shape, 2]; one number yields both coordinates."""
  bits = jax.random.bits(key, shape, jnp.uint32)
  return jnp.stack([bits >> 16, bits & 0xFFFF], axis=-1) / 2**16


def _uncertain_points(key: jax.Array, masks: jax.Array, options: Options) -> jax.Array:
  """Samples points for masks [N, h, w], mostly where they are near 0: [N, P, 2]."""
  num_points = options.num_points
  num_candidates = int(num_points * options.oversample)
  num_uncertain = int(num_points * options.importance)
  candidates_key, random_key = jax.random.split(key)
  num_masks = len(masks)
  candidates = random_points(candidates_key, (num_masks, num_candidates))
  certainty = jnp.abs(sample(masks, candidates))
  _, indices = jax.lax.top_k(-certainty, num_uncertain)
  uncertain = jnp.take_along_axis(candidates, indices[..., None], axis=1)
  num_random = num_points - num_uncertain
  random = random_points(random_key, (num_masks, num_random))
  return jnp.concatenate([uncertain, random], axis=1)


def _matching_cost(
  key: jax.Array,
  logits: jax.Array,
  masks: jax.Array,
  labels: jax.Array,
  segments: jax.Array,
  options: Options,
) -> jax.Array:
  """Returns the costs of matching the targets of an image with queries, [N, Q]."""
  points = random_points(key, (1, options.num_points))
  targets = sample_objects(segments, jnp.arange(len(labels)), points)  # [N, P]
  cross_entropy, dice = mask_losses.pairwise(sample(masks, points), targets)
  return (
    options.mask_weight * cross_entropy
    + options.dice_weight * dice
    - options.class_weight * matching.class_probabilities(logits, labels)
  )


def _mask_losses(
  key: jax.Array,
  masks: jax.Array,
  query: jax.Array,
  segments: jax.Array,
  options: Options,
) -> dict[str, jax.Array]:
  """Returns the losses of the masks of an image, summed over its targets."""
  matched = masks[jnp.maximum(query, 0)]  # [N, h, w]
  points = _uncertain_points(key, jax.lax.stop_gradient(matched), options)
  points = ad_checkpoint.checkpoint_name(points, _POINTS)
  targets = sample_objects(segments, jnp.arange(len(query)), points)
  logits = sample(matched, points)  # [N, P]
  is_target = query >= 0
  losses = {
    'mask': mask_losses.cross_entropy(logits, targets),
    'dice': mask_losses.dice(logits[..., None], targets[..., None]),
  }
  return {k: jnp.where(is_target, x, 0.0).sum() for k, x in losses.items()}


def losses(
  outputs: dict[str, jax.Array],
  labels: jax.Array,
  segments: jax.Array,
  counts: jax.Array,
  key: jax.Array,
  options: Options = Options(),  # noqa: B008
) -> dict[str, Any]:
  """Computes the losses of a set prediction after an optimal matching.

  One layer after the other: the points of all layers take gigabytes.

  Args:
    outputs: `logits`, float [L, B, Q, C + 1], the last class being "no object", and
      `masks`, logits [L, B, Q, h, w].
    labels: classes of targets, int [B, N].
    segments: int [B, H, W], number of the target of each pixel, from 1; 0 for none.
    counts: number of targets, int [B], the first ones.
    key: key of the points; or one per image [B], so that its points depend on nothing
      else.
    options: weights and numbers.

  Returns:
    Sums, float32 [L, B], without the weights: `class`, the cross-entropy over queries,
    `mask` and `dice` over targets. And `query`, the query of each target, int32 [L, B,
    N], -1 for padding.
  """
  num_layers, num_images = outputs['logits'].shape[:2]
  if key.ndim:
    split = functools.partial(jax.random.split, num=(num_layers, 2))
    keys = jax.vmap(split, out_axes=1)(key)
  else:
    keys = jax.random.split(key, (num_layers, num_images, 2))

  def costs(layer: tuple[jax.Array, ...]) -> jax.Array:
    cost = functools.partial(_matching_cost, options=options)
    return jax.vmap(cost)(*layer, labels, segments)

  detached = jax.lax.stop_gradient(outputs)
  layers = keys[:, :, 0], detached['logits'], detached['masks']
  query = matching.match(jax.lax.map(costs, layers), counts)  # [L, B, N]

  @functools.partial(jax.checkpoint, policy=_SAVE_POINTS)
  def of_masks(layer: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
    of_image = functools.partial(_mask_losses, options=options)
    return jax.vmap(of_image)(*layer, segments)

  return {
    'class': matching.class_loss(
      outputs['logits'], labels, query, options.no_object_weight
    ),
    **jax.lax.map(of_masks, (keys[:, :, 1], outputs['masks'], query)),
    'query': query,
  }
