"""The state of a run, and the update that brings it from one step to the next."""

from collections.abc import Callable
from typing import Any

import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import optax

from vit_jax.learning import optim
from vit_jax.scale import sharding

# Sets the random numbers of a task's `augment` apart from those of dropout, whose
# keys come from the numbers of micro-batches.
_AUGMENT = 2**31 - 1


@flax.struct.dataclass
class TrainState:
  """All that a run carries from one step to the next.

  Attributes:
    step: int32 scalar, number of updates made.
    params: the parameters.
    opt_state: the optimiser's state, averaged weights included.
    extra: what a task keeps that is neither: a teacher, a codebook, statistics;
      an empty dict for most tasks.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  extra: Any = flax.struct.field(default_factory=dict)


def best_params(state: TrainState):
  """Returns the weights to evaluate: their average where one is kept."""
  averaged = optim.get_ema(state.opt_state)
  return state.params if averaged is None else averaged


def abstract_state(init: Callable, tx, rng, mesh, rules):
  """Returns shapes, types and shardings of the state; computes nothing.

  Args:
    init: function from a random key to (parameters, extra).
    tx: the optimiser.
    rng: the random key.
    mesh: the mesh.
    rules: sharding rules, see vit_jax.scale.sharding.tree_shardings.

  Returns:
    A function that computes the initial state, and the TrainState of
    jax.ShapeDtypeStruct that describes what it returns. The function takes
    weights, {'/'-joined path: array}, that stand in for the random ones.

  Raises:
    ValueError: if model or rules do not fit; see there.
  """

  def create(weights):
    params, extra = init(rng)
    flat = flax.traverse_util.flatten_dict(params, sep='/')
    for path, value in weights.items():
      flat[path] = value.astype(flat[path].dtype)
    params = flax.traverse_util.unflatten_dict(flat, sep='/')
    return TrainState(jnp.int32(0), params, tx.init(params), extra)

  shapes = jax.eval_shape(create, {})
  shardings = sharding.tree_shardings(shapes, rules, mesh)
  abstract = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )
  return jax.jit(create, out_shardings=shardings), abstract


def mean(total, weight):
  """Divides a sum by its weight; 0 where there is no weight."""
  return total / jnp.where(weight > 0, weight, 1)


def make_update(
  task, tx, schedule: optax.Schedule, seed: int, accum_steps: int, factors=None
) -> Callable:
  """Returns one update: (state, batch) -> (state, metrics).

  The loss and its gradient are means over the whole batch, over all devices and
  micro-batches: sums and weights are added up first, and divided once.

  Args:
    task: has `loss`, `augment` and `update_extra`, see vit_jax.tasks.base.Task.
    tx: the optimiser.
    schedule: learning rate by step.
    seed: seed of the run; dropout's noise follows from (seed, step), and with
      accumulation from the number of the micro-batch too.
    accum_steps: number of micro-batches that a batch is computed in.
    factors: of the learning rate, see vit_jax.learning.optim.multipliers.
  """

  tx = optax.with_extra_args_support(tx)

  def update(state, batch):
    rng = jax.random.fold_in(jax.random.key(seed), state.step)
    batch = task.augment(batch, jax.random.fold_in(rng, _AUGMENT))

    def compute(rows, number):
      key = jax.random.fold_in(rng, number) if accum_steps > 1 else rng

      def loss_fn(params):
        params = optim.stop_frozen(params, factors)
        (total, weight), metrics = task.loss(params, state.extra, rows, key)
        # Of a whole batch the mean itself, of a part the sum.
        value = mean(total, weight) if accum_steps == 1 else total
        return value, ((total, weight), metrics)

      (_, sums), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
      return sums, grads

    (loss, sums), grads = optim.accumulate(compute, batch, accum_steps)
    if accum_steps > 1:
      grads = jax.tree.map(lambda g: mean(g, loss[1]).astype(g.dtype), grads)
    updates, opt_state = tx.update(
      grads, state.opt_state, state.params, step=state.step
    )
    params = optax.apply_updates(state.params, updates)
    means = {name: mean(*pair) for name, pair in sums.items()}
    extra = task.update_extra(state.extra, params, means)
    metrics = {
      'train_loss': mean(*loss),
      **{f'train_{k}': v for k, v in means.items() if jnp.ndim(v) == 0},
      'grad_norm': optax.tree.norm(grads),
      'lr': schedule(state.step),
    }
    state = TrainState(state.step + 1, params, opt_state, extra)
    return state, metrics

  return update
