"""Assigns predictions to targets at the least total cost, and learns their classes.

The Hungarian algorithm with shortest augmenting paths, on the device. Targets are
inserted one after the other. For each, a tree of shortest paths grows column by column
until it reaches a free column (`_extend`); then the targets on that path move one
column further (`_walk_back`).

All problems of a batch advance together, each in its own phase: one loop takes as
many rounds as the longest problem needs, and a round costs a few operations on
vectors of the number of predictions. Nothing leaves the device: a callback to SciPy
would stall all devices of a host. Devices of a mesh do not wait for each other.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.distributed import sharding


class _State(NamedTuple):
  """One problem with N targets and Q columns; column Q is the root of the paths."""

  target: jax.Array  # The target being inserted, which the root holds, int32.
  column: jax.Array  # The end of the path, int32.
  walks_back: jax.Array  # Whether `column` is free, or its target has moved on.
  owner: jax.Array  # The target that each column holds, int32 [Q + 1]; -1: none.
  before: jax.Array  # Previous column on the shortest path, int32 [Q].
  length: jax.Array  # Length of this path in reduced costs, [Q].
  done: jax.Array  # Columns whose shortest path is known, bool [Q + 1].
  target_price: jax.Array  # The dual variables, [N],
  column_price: jax.Array  # and [Q + 1].


def _extend(state: _State, cost: jax.Array) -> _State:
  """Adds the nearest open column to the tree of shortest paths."""
  done = state.done.at[state.column].set(True)
  target = state.owner[state.column]
  reduced = cost[target] - state.target_price[target] - state.column_price[:-1]
  is_open = ~done[:-1]
  is_shorter = is_open & (reduced < state.length)
  length = jnp.where(is_shorter, reduced, state.length)
  open_length = jnp.where(is_open, length, jnp.inf)
  step = open_length.min()
  # The first column at this length; argmin is slower.
  columns = jnp.arange(len(length), dtype=jnp.int32)
  nearest = jnp.where(open_length == step, columns, len(columns)).min()
  paid = jnp.where(done, step, 0.0)  # [Q + 1]
  return state._replace(
    column=nearest,
    walks_back=state.owner[nearest] < 0,
    before=jnp.where(is_shorter, state.column, state.before),
    length=jnp.where(is_open, length - step, length),
    done=done,
    # Columns that are not done may hold no target: they pay 0.
    target_price=state.target_price.at[state.owner].add(paid),
    column_price=state.column_price - paid,
  )


def _walk_back(state: _State) -> _State:
  """Moves a target one column along the path; at the root, the next one begins."""
  previous = state.before[state.column]
  root = len(state.before)
  at_root = previous == root
  target = state.target + at_root
  owner = state.owner.at[state.column].set(state.owner[previous])
  return state._replace(
    target=target,
    column=previous,
    walks_back=~at_root,
    owner=owner.at[root].set(target),
    length=jnp.where(at_root, jnp.inf, state.length),
    done=state.done & ~at_root,
  )


def _solve(cost: jax.Array, count: jax.Array) -> jax.Array:
  """Solves one problem of finite costs [N, Q]; see `match`."""
  num_targets, num_columns = cost.shape
  root = num_columns
  state = _State(
    target=jnp.int32(0),
    column=jnp.int32(root),
    walks_back=jnp.bool_(False),
    owner=jnp.full(num_columns + 1, -1, jnp.int32).at[root].set(0),
    before=jnp.full(num_columns, root, jnp.int32),
    length=jnp.full(num_columns, jnp.inf, cost.dtype),
    done=jnp.zeros(num_columns + 1, bool),
    target_price=jnp.zeros(num_targets, cost.dtype),
    column_price=jnp.zeros(num_columns + 1, cost.dtype),
  )

  def advance(state: _State) -> _State:
    walked = _walk_back(state)
    extended = _extend(state, cost)
    return jax.tree.map(
      lambda a, b: jnp.where(state.walks_back, a, b), walked, extended
    )

  state = jax.lax.while_loop(lambda state: state.target < count, advance, state)
  owner = jnp.where(state.owner[:-1] < 0, num_targets, state.owner[:-1])
  column_of_target = jnp.full(num_targets, -1, jnp.int32)
  columns = jnp.arange(num_columns, dtype=jnp.int32)
  return column_of_target.at[owner].set(columns, mode='drop')


def match(cost: jax.Array, counts: jax.Array) -> jax.Array:
  """Assigns each target a different prediction at the least total cost.

  Args:
    cost: float [..., N, Q], cost of giving target n the prediction q; N <= Q.
      With a batch that a mesh splits, [..., B, N, Q]. A cost that is not finite
      counts as more than any sum of the others.
    counts: int [...], number of targets, the first ones; others are padding.

  Returns:
    int32 [..., N]: the prediction of each target; -1 for padding.
  """
  *batch, num_targets, num_queries = cost.shape
  if num_targets > num_queries:
    raise ValueError(
      f'{num_targets} targets cannot each have one of {num_queries} predictions: raise the '
      'number of queries'
    )
  cost = jax.lax.stop_gradient(cost).astype(jnp.float32)
  counts = jnp.broadcast_to(counts, batch)
  if not batch:
    return match(cost[None], counts[None])[0]
  return sharding.shard_map_rows(_match_all, cost, counts, axis=len(batch) - 1)


def _match_all(cost: jax.Array, counts: jax.Array) -> jax.Array:
  """Solves problems [..., N, Q] together; see `match`."""
  *batch, num_targets, num_queries = cost.shape
  cost = cost.reshape(-1, num_targets, num_queries)
  is_finite = jnp.isfinite(cost)
  largest = jnp.abs(jnp.where(is_finite, cost, 0.0)).max(axis=(1, 2), keepdims=True)
  cost = jnp.where(is_finite, cost, 1 + 2 * num_targets * largest)
  columns = jax.vmap(_solve)(cost, counts.reshape(-1))
  return columns.reshape(*batch, num_targets)


def class_probabilities(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns by prediction the probabilities of the classes of targets.

  Maps logits [..., Q, C + 1] and classes, int [..., N], to float32 [..., N, Q].
  """
  probabilities = jax.nn.softmax(logits.astype(jnp.float32))  # [..., Q, C + 1]
  one_hot = jax.nn.one_hot(labels, logits.shape[-1])  # [..., N, C + 1]
  return jnp.einsum('...nc,...qc->...nq', one_hot, probabilities)


def class_loss(
  logits: jax.Array, labels: jax.Array, query: jax.Array, no_object: float
) -> jax.Array:
  """Computes the cross-entropy of matched predictions; the others have no object.

  Args:
    logits: float [..., Q, C + 1]; the last class is "no object".
    labels: int, broadcastable to [..., N], classes of targets.
    query: int [..., N], the prediction of each target, see `match`.
    no_object: weight of a prediction without an object.

  Returns:
    Sums over predictions, float32 [...].
  """
  logits = logits.astype(jnp.float32)
  num_queries, num_outputs = logits.shape[-2:]
  matches = jax.nn.one_hot(query, num_queries)  # [..., N, Q], zeros for padding.
  is_matched = matches.sum(axis=-2) > 0  # [..., Q]
  labels = jnp.broadcast_to(labels, query.shape).astype(jnp.float32)
  target = jnp.einsum('...nq,...n->...q', matches, labels)
  target = jnp.where(is_matched, target.round().astype(jnp.int32), num_outputs - 1)
  weight = jnp.where(is_matched, 1.0, no_object)
  log_probabilities = jax.nn.log_softmax(logits)
  cross_entropy = -jnp.take_along_axis(log_probabilities, target[..., None], axis=-1)
  return (cross_entropy[..., 0] * weight).sum(axis=-1)


def class_weights(counts: jax.Array, num_queries: int, no_object: float) -> jax.Array:
  """Returns the sum of the weights of an image's predictions in `class_loss`, [B]."""
  return counts + no_object * (num_queries - counts)


def loss_factors(
  counts: jax.Array, num_queries: int, no_object: float
) -> dict[str, jax.Array]:
  """Returns the factors of the losses of images, which depend on the global batch.

  With `class_factor` as a factor, the mean of `class_loss` over images is the sum divided
  by the weights of all predictions; with `target_factor`, the mean of a loss of targets is
  the sum divided by the number of targets. Both are over all devices.

  Args:
    counts: number of targets, int [B].
    num_queries: number of predictions of an image.
    no_object: weight of a prediction without an object.

  Returns:
    `class_factor` and `target_factor`, float32 [B].
  """
  counts = counts.astype(jnp.float32)
  weights = class_weights(counts, num_queries, no_object)
  num_images = len(counts)
  return {
    'class_factor': jnp.full(num_images, num_images / weights.sum()),
    'target_factor': jnp.full(num_images, num_images / jnp.maximum(counts.sum(), 1.0)),
  }
