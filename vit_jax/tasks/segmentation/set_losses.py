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

from vit_jax.layers import xla_hints
from vit_jax.tasks.detection import mask_losses, matching

# The backward pass computes everything again but the points, which take long to choose,
# and the targets at them.
_POINTS, _TARGETS = 'points', 'targets'
_SAVE_POINTS = jax.checkpoint_policies.save_only_these_names(_POINTS, _TARGETS)
# Number of targets of each image whose losses are computed at once.
_CHUNK = 4


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


def _corners(
  size: tuple[int, int], points: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the first row and column of the 2 x 2 pixels around points, and weights.

  Maps points [..., P, 2] to int32 [..., P] twice, from -1, and float32 [..., P, 4], for
  maps of a size (h, w).
  """
  height, width = size
  positions = points * jnp.array([width, height]) - 0.5
  first = jnp.floor(positions)
  x, y = jnp.moveaxis(positions - first, -1, 0)
  weights = (1 - x) * (1 - y), x * (1 - y), (1 - x) * y, x * y
  column, row = jnp.moveaxis(first.astype(jnp.int32), -1, 0)
  return row, column, jnp.stack(weights, axis=-1)


def _read(maps: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
  """Returns the 2 x 2 pixels of maps [N, h, w] from rows and columns [N, P]: [N, P, 4].

  Pixels outside are 0. A point reads its four pixels at once, as a row of a table.
  """
  num_maps, _, width = maps.shape
  padded = jnp.pad(maps, ((0, 0), (1, 1), (1, 1)))
  upper, lower = padded[:, :-1], padded[:, 1:]
  pixels = upper[..., :-1], upper[..., 1:], lower[..., :-1], lower[..., 1:]
  table = jnp.stack(pixels, axis=-1).reshape(num_maps, -1, 4)
  index = (row + 1) * (width + 1) + column + 1
  return jax.vmap(lambda rows, index: rows[index])(table, index)


# XLA sums slowly over short axes on CPUs. The gradient of an index would be an array of
# zeros but for one place.
@jax.custom_jvp
def _sum_of_four(x: jax.Array) -> jax.Array:
  """Sums [..., 4] over the last axis."""
  return x[..., 0] + x[..., 1] + x[..., 2] + x[..., 3]


@_sum_of_four.defjvp
def _sum_of_four_jvp(
  primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  return _sum_of_four(*primals), tangents[0].sum(axis=-1)


# TPUs read single elements slowly. The next functions multiply by weights of all pixels
# of a row and of a column, which XLA computes inside the product.


def _hats(positions: jax.Array, size: int) -> jax.Array:
  """Returns weights of the pixels of an axis, float32 [..., P, size], at most two not 0.

  Positions [..., P] are from 0 to 1.
  """
  distances = positions[..., None] * size - 0.5 - jnp.arange(size)
  return jnp.maximum(0.0, 1.0 - jnp.abs(distances))


def _sample_by_products(maps: jax.Array, points: jax.Array) -> jax.Array:
  height, width = maps.shape[1:]
  points = jnp.broadcast_to(points, (len(maps), *points.shape[1:]))
  columns, rows = _hats(points[..., 0], width), _hats(points[..., 1], height)
  precision = jax.lax.Precision.HIGH
  values = jnp.einsum('nph,nhw->npw', rows, maps, precision=precision)
  return (values * columns).sum(axis=-1)


def _read_by_products(
  segments: jax.Array, row: jax.Array, column: jax.Array, largest: int
) -> jax.Array:
  """Returns pixels of segments [H, W], integers up to `largest`: [P, 4], see `_read`."""
  height, width = segments.shape
  offsets = jnp.arange(2)
  rows = jax.nn.one_hot(row[:, None] + offsets, height)  # [P, 2, H]
  columns = jax.nn.one_hot(column[:, None] + offsets, width)
  # bfloat16, in which TPUs multiply by default, is exact up to 256.
  precision = jax.lax.Precision.DEFAULT
  if largest > 256:
    precision = jax.lax.Precision.HIGHEST
  values = segments.astype(jnp.float32)
  lines = jnp.einsum('pih,hw->piw', rows, values, precision=precision)
  pixels = (lines[:, :, None] * columns[:, None]).sum(axis=-1)  # [P, 2, 2]
  return pixels.reshape(-1, 4)


def sample(maps: jax.Array, points: jax.Array) -> jax.Array:
  """Interpolates maps [N, h, w] at points bilinearly; outside of them is 0.

  Points are [N, P, 2], or [1, P, 2] for the same points, from 0 to 1. Returns float32 [N,
  P].
  """
  if xla_hints.on_tpus():
    return _sample_by_products(maps, points)
  row, column, weights = _corners(maps.shape[1:], points)
  shape = len(maps), row.shape[1]
  pixels = _read(maps, jnp.broadcast_to(row, shape), jnp.broadcast_to(column, shape))
  return _sum_of_four(pixels * weights)


def sample_objects(
  segments: jax.Array, objects: jax.Array, points: jax.Array
) -> jax.Array:
  """Interpolates the masks of objects at points.

  Args:
    segments: int [H, W], number of the object of each pixel, from 1; 0 for none.
    objects: int [N], numbers of objects, from 0.
    points: [N, P, 2], or [1, P, 2] for the same points, from 0 to 1.

  Returns:
    float32 [N, P], from 0 to 1.
  """
  is_shared = len(points) == 1
  if xla_hints.on_tpus() and not is_shared:
    masks = segments == objects[:, None, None] + 1
    return sample(masks.astype(jnp.float32), points)
  row, column, weights = _corners(segments.shape, points)
  if xla_hints.on_tpus():
    numbers = _read_by_products(segments, row[0], column[0], len(objects))
  else:
    flat = row.reshape(1, -1), column.reshape(1, -1)
    numbers = _read(segments[None], *flat).reshape(*row.shape, 4)
  is_inside = numbers == objects[:, None, None] + 1
  return _sum_of_four(is_inside * weights)


def random_points(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns random points [*shape, 2], see `_from_bits`."""
  return _from_bits(jax.random.bits(key, shape, jnp.uint32))


def _from_bits(bits: jax.Array) -> jax.Array:
  """Returns points [..., 2]; each uint32 number yields both coordinates."""
  return jnp.stack([bits >> 16, bits & 0xFFFF], axis=-1) / 2**16


def _uncertain_points(key: jax.Array, mask: jax.Array, options: Options) -> jax.Array:
  """Samples points for a mask [h, w], mostly where it is near 0: [P, 2]."""
  num_points = options.num_points
  num_candidates = int(num_points * options.oversample)
  num_uncertain = int(num_points * options.importance)
  candidates_key, random_key = jax.random.split(key)
  candidates = jax.random.bits(candidates_key, (num_candidates,), jnp.uint32)
  certainty = jnp.abs(sample(mask[None], _from_bits(candidates)[None])[0])
  if xla_hints.on_tpus():  # Sorts the candidates too, which TPUs read slowly.
    _, candidates = jax.lax.sort((certainty, candidates), num_keys=1)
    uncertain = candidates[:num_uncertain]
  else:
    _, indices = jax.lax.top_k(-certainty, num_uncertain)
    uncertain = candidates[indices]
  random = random_points(random_key, (num_points - num_uncertain,))
  return jnp.concatenate([_from_bits(uncertain), random])


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
  keys: jax.Array,
  masks: jax.Array,
  numbers: jax.Array,
  count: jax.Array,
  segments: jax.Array,
  options: Options,
) -> dict[str, jax.Array]:
  """Returns the losses of some masks of an image, summed over its targets.

  Args:
    keys: [n].
    masks: logits of the queries matched with n targets, [n, h, w].
    numbers: those of the targets, int [n]; from `count` on, they are padding.
    count: number of targets of the image.
    segments: int [H, W].
    options: of the losses.
  """
  choose_points = functools.partial(_uncertain_points, options=options)
  points = jax.vmap(choose_points)(keys, jax.lax.stop_gradient(masks))
  points = ad_checkpoint.checkpoint_name(points, _POINTS)
  targets = sample_objects(segments, numbers, points)
  targets = ad_checkpoint.checkpoint_name(targets, _TARGETS)
  logits = sample(masks, points)  # [n, P]
  losses = {
    'mask': mask_losses.cross_entropy(logits, targets),
    'dice': mask_losses.dice(logits[..., None], targets[..., None]),
  }
  return {k: jnp.where(numbers < count, x, 0.0).sum() for k, x in losses.items()}


def _in_chunks(x: jax.Array) -> jax.Array:
  """Maps an array of targets of images [B, chunks * n, ...] to [chunks, B, n, ...]."""
  return x.reshape(len(x), -1, _CHUNK, *x.shape[2:]).swapaxes(0, 1)


def _mask_losses_of_layer(
  keys: jax.Array,
  masks: jax.Array,
  query: jax.Array,
  segments: jax.Array,
  counts: jax.Array,
  options: Options,
) -> dict[str, jax.Array]:
  """Returns the losses of the masks of images, summed over their targets, [B].

  Targets are padded to the most that an image may have. Only as many are computed as an
  image of the batch has, in whole chunks.
  """
  query = jnp.pad(query, ((0, 0), (0, -query.shape[1] % _CHUNK)))
  matched = jnp.take_along_axis(masks, jnp.maximum(query, 0)[..., None, None], axis=1)
  num_targets = query.shape[1]
  keys = jax.vmap(functools.partial(jax.random.split, num=num_targets))(keys)
  numbers = jnp.arange(num_targets).reshape(-1, _CHUNK)
  of_image = functools.partial(_mask_losses, options=options)

  @functools.partial(jax.checkpoint, policy=_SAVE_POINTS)
  def compute(*chunk: jax.Array) -> dict[str, jax.Array]:
    return jax.vmap(of_image, (0, 0, None, 0, 0))(*chunk, counts, segments)

  def skip(*chunk: jax.Array) -> dict[str, jax.Array]:
    zeros = jnp.zeros_like(counts, jnp.float32)
    return {'mask': zeros, 'dice': zeros}

  def of_chunk(chunk: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
    _, _, (first, *_) = chunk
    return jax.lax.cond(first < counts.max(), compute, skip, *chunk)

  sums = jax.lax.map(of_chunk, (_in_chunks(keys), _in_chunks(matched), numbers))
  return jax.tree.map(lambda x: x.sum(axis=0), sums)


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

  def of_masks(layer: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
    keys, masks, query = layer
    return _mask_losses_of_layer(keys, masks, query, segments, counts, options)

  return {
    'class': matching.class_loss(
      outputs['logits'], labels, query, options.no_object_weight
    ),
    **jax.lax.map(of_masks, (keys[:, :, 1], outputs['masks'], query)),
    'query': query,
  }
