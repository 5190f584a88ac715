"""Assigns predictions to targets at the least total cost, on the device.

The Hungarian algorithm by shortest augmenting paths. All problems of a batch
advance together, each through its own sequence of steps: one loop takes as many
rounds as the longest problem needs, and a round costs a few operations on
vectors of the number of predictions. Nothing leaves the device: a callback to
SciPy would stall all devices of a host. Devices of a mesh do not wait for each
other.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.distributed import sharding


class _State(NamedTuple):
  """Where the assignment of one problem stands.

  Column Q is a root that holds the target being inserted.
  """

  target: jax.Array  # Number of the target being inserted, int32.
  column: jax.Array  # At the end of the path, int32.
  walks_back: jax.Array  # Whether a path to a free column is now applied.
  owner: jax.Array  # Target that each column holds, int32 [Q + 1]; -1: none.
  before: jax.Array  # Previous column on the shortest paths, int32 [Q].
  least: jax.Array  # Reduced costs of these paths, [Q].
  done: jax.Array  # Columns whose path is known, bool [Q + 1].
  row_price: jax.Array  # The dual variables, [N],
  column_price: jax.Array  # and [Q + 1].


def _extend(state: _State, cost, num) -> _State:
  """Extends the tree of shortest paths by the column that is nearest."""
  done = state.done.at[state.column].set(True)
  row = state.owner[state.column]
  reduced = cost[row] - state.row_price[row] - state.column_price[:num]  # [Q]
  open_ = ~done[:num]
  better = open_ & (reduced < state.least)
  least = jnp.where(better, reduced, state.least)
  before = jnp.where(better, state.column, state.before)
  nearest = jnp.where(open_, least, jnp.inf).argmin().astype(jnp.int32)
  step = least[nearest]
  paid = jnp.where(done, step, 0.0)  # [Q + 1]
  return state._replace(
    column=nearest,
    walks_back=state.owner[nearest] < 0,
    before=before,
    least=jnp.where(open_, least - step, least),
    done=done,
    # Columns that are not done may hold no target: their step is 0.
    row_price=state.row_price.at[state.owner].add(paid),
    column_price=state.column_price - paid,
  )


def _walk_back(state: _State, num) -> _State:
  """Moves one target along the path; begins the next target at its root."""
  previous = state.before[state.column]
  owner = state.owner.at[state.column].set(state.owner[previous])
  moved = state._replace(owner=owner, column=previous)
  begun = moved._replace(
    target=state.target + 1,
    column=jnp.int32(num),
    walks_back=jnp.bool_(False),
    owner=owner.at[num].set(state.target + 1),
    least=jnp.full_like(state.least, jnp.inf),
    done=jnp.zeros_like(state.done),
  )
  return jax.tree.map(
    lambda a, b: jnp.where(previous == num, a, b), begun, moved
  )


def _match(cost, count):
  """Solves one problem whose costs [N, Q] are finite; see `match`."""
  targets, num = cost.shape
  state = _State(
    target=jnp.int32(0),
    column=jnp.int32(num),
    walks_back=jnp.bool_(False),
    owner=jnp.full(num + 1, -1, jnp.int32).at[num].set(0),
    before=jnp.full(num, num, jnp.int32),
    least=jnp.full(num, jnp.inf, cost.dtype),
    done=jnp.zeros(num + 1, bool),
    row_price=jnp.zeros(targets, cost.dtype),
    column_price=jnp.zeros(num + 1, cost.dtype),
  )

  def advance(state):
    return jax.tree.map(
      lambda a, b: jnp.where(state.walks_back, a, b),
      _walk_back(state, num),
      _extend(state, cost, num),
    )

  state = jax.lax.while_loop(lambda x: x.target < count, advance, state)
  owner = jnp.where(state.owner[:num] < 0, targets, state.owner[:num])
  return (
    jnp.full(targets, -1, jnp.int32)
    .at[owner]
    .set(jnp.arange(num, dtype=jnp.int32), mode='drop')
  )


def match(cost, counts):
  """Assigns a prediction of its own to each target at the least total cost.

  Args:
    cost: float [..., B, N, Q], cost of giving target n the prediction q; N <= Q.
      A mesh may split the batch.
      A cost that is not finite is worse than any sum of others.
    counts: int [..., B], number of targets, the first ones; others are padding.

  Returns:
    int32 [..., B, N]: the prediction of each target; -1 for padding.
  """
  *batch, targets, num = cost.shape
  if targets > num:
    raise ValueError(
      f'{targets} targets cannot each have one of {num} predictions: raise the '
      'number of queries'
    )
  cost = jax.lax.stop_gradient(cost).astype(jnp.float32)
  counts = jnp.broadcast_to(counts, batch)
  return sharding.on_own_rows(_match_all, cost, counts, axis=len(batch) - 1)


def _match_all(cost, counts):
  """Solves problems [..., N, Q] together; see `match`."""
  finite = jnp.isfinite(cost)
  most = jnp.where(finite, jnp.abs(cost), 0.0).max(axis=(-2, -1), keepdims=True)
  worst = 2 * cost.shape[-2] * most + 1  # Above the sums of finite costs.
  cost = jnp.where(finite, cost, worst).reshape(-1, *cost.shape[-2:])
  found = jax.vmap(_match)(cost, counts.reshape(-1))
  return found.reshape(*counts.shape, -1)
