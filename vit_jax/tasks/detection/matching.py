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

  Column Q is a root that holds the target being inserted. Costs have K levels,
  [K, ...]: the first level decides, the second where the first is equal.
  """

  target: jax.Array  # Number of the target being inserted, int32.
  column: jax.Array  # At the end of the path, int32.
  walks_back: jax.Array  # Whether a path to a free column is now applied.
  owner: jax.Array  # Target that each column holds, int32 [Q + 1]; -1: none.
  before: jax.Array  # Previous column on the shortest paths, int32 [Q].
  least: jax.Array  # Reduced costs of these paths, [K, Q].
  done: jax.Array  # Columns whose path is known, bool [Q + 1].
  row_price: jax.Array  # The dual variables, [K, N],
  column_price: jax.Array  # and [K, Q + 1].


def _begin(state: _State, target, num) -> _State:
  """Begins the search for a path from a target."""
  return state._replace(
    target=target,
    column=jnp.int32(num),
    walks_back=jnp.bool_(False),
    owner=state.owner.at[num].set(target),
    least=jnp.full_like(state.least, jnp.inf),
    done=jnp.zeros_like(state.done),
  )


def _below(a, b):
  """Returns where costs [K, Q] are below others, level by level, bool [Q]."""
  below = a[-1] < b[-1]
  for x, y in zip(a[-2::-1], b[-2::-1]):
    below = (x < y) | ((x == y) & below)
  return below


def _nearest(least, open_):
  """Returns the column of the least cost [K, Q] among the open ones."""
  for level in least:
    level = jnp.where(open_, level, jnp.inf)
    open_ &= level == level.min()
  return jnp.argmax(open_).astype(jnp.int32)


def _extend(state: _State, cost, num) -> _State:
  """Extends the tree of shortest paths by the column that is nearest."""
  done = state.done.at[state.column].set(True)
  row = state.owner[state.column]
  reduced = (
    cost[:, row] - state.row_price[:, row, None] - state.column_price[:, :num]
  )  # [K, Q]
  open_ = ~done[:num]
  better = open_ & _below(reduced, state.least)
  least = jnp.where(better, reduced, state.least)
  before = jnp.where(better, state.column, state.before)
  nearest = _nearest(least, open_)
  step = least[:, nearest, None]  # [K, 1]
  paid = jnp.where(done, step, 0.0)  # [K, Q + 1]
  return state._replace(
    column=nearest,
    walks_back=state.owner[nearest] < 0,
    before=before,
    least=jnp.where(open_, least - step, least),
    done=done,
    # Columns that are not done may hold no target: their step is 0.
    row_price=state.row_price.at[:, state.owner].add(paid),
    column_price=state.column_price - paid,
  )


def _walk_back(state: _State, num) -> _State:
  """Moves one target along the path; begins the next target at its root."""
  previous = state.before[state.column]
  owner = state.owner.at[state.column].set(state.owner[previous])
  moved = state._replace(owner=owner, column=previous)
  begun = _begin(moved, state.target + 1, num)
  return jax.tree.map(lambda a, b: jnp.where(previous == num, a, b), begun, moved)


def _match(cost, count):
  """Solves one problem whose costs [K, N, Q] are finite; see `match`."""
  levels, targets, num = cost.shape
  state = _State(
    target=jnp.int32(0),
    column=jnp.int32(num),
    walks_back=jnp.bool_(False),
    owner=jnp.full(num + 1, -1, jnp.int32),
    before=jnp.full(num, num, jnp.int32),
    least=jnp.full((levels, num), jnp.inf, cost.dtype),
    done=jnp.zeros(num + 1, bool),
    row_price=jnp.zeros((levels, targets), cost.dtype),
    column_price=jnp.zeros((levels, num + 1), cost.dtype),
  )

  def advance(state):
    return jax.tree.map(
      lambda a, b: jnp.where(state.walks_back, a, b),
      _walk_back(state, num),
      _extend(state, cost, num),
    )

  state = jax.lax.while_loop(
    lambda state: state.target < count,
    advance,
    _begin(state, jnp.int32(0), num),
  )
  owner = jnp.where(state.owner[:num] < 0, targets, state.owner[:num])
  return (
    jnp.full(targets, -1, jnp.int32)
    .at[owner]
    .set(jnp.arange(num, dtype=jnp.int32), mode='drop')
  )


def match(cost, counts):
  """Assigns a prediction of its own to each target at the least total cost.

  Args:
    cost: float [..., N, Q], cost of giving target n the prediction q; N <= Q.
      With a batch that a mesh splits, [..., B, N, Q].
      A cost that is not finite is worse than any sum of others: as few of them
      as possible are chosen, and then the least sum of the others.
    counts: int [...], number of targets, the first ones; others are padding.

  Returns:
    int32 [..., N]: the prediction of each target; -1 for padding.
  """
  *batch, targets, num = cost.shape
  if targets > num:
    raise ValueError(
      f'{targets} targets cannot each have one of {num} predictions: raise the '
      'number of queries'
    )
  cost = jax.lax.stop_gradient(cost).astype(jnp.float32)
  counts = jnp.broadcast_to(counts, batch)
  if not batch:
    return match(cost[None], counts[None])[0]
  return sharding.on_own_rows(_match_all, cost, counts, axis=len(batch) - 1)


def _match_all(cost, counts):
  """Solves problems [..., N, Q] together; see `match`."""
  *batch, targets, num = cost.shape
  cost = cost.reshape(-1, 1, targets, num)
  finite = jnp.isfinite(cost)
  # The number of costs that are not finite, and the sum of the others.
  levels = jnp.concatenate(
    [jnp.where(finite, 0.0, 1.0), jnp.where(finite, cost, 0.0)], axis=1
  )
  # A second level takes time, which most problems do not need.
  found = jax.lax.cond(
    finite.all(),
    lambda: jax.vmap(_match)(cost, counts.reshape(-1)),
    lambda: jax.vmap(_match)(levels, counts.reshape(-1)),
  )
  return found.reshape(*batch, targets)
