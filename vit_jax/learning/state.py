"""The training state and its update."""

from collections.abc import Callable, Mapping, Sequence
import inspect
from typing import Any

import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import optax

from vit_jax.distributed import sharding
from vit_jax.learning import optim

# Number of the random key of `augment`; keys of dropout use the numbers of
# micro-batches.
_AUGMENT = 2**31 - 1


class TrainState(flax.struct.PyTreeNode):
  """State of a training."""

  step: jax.Array  # int32 scalar, number of updates so far.
  params: Any
  opt_state: Any  # With the averaged parameters, if there are any.
  # Other state of the task, see Task.init; {} for most tasks.
  extra: Any = flax.struct.field(default_factory=dict)


def best_params(state: TrainState) -> Any:
  """Returns the parameters to evaluate: the averaged ones if they are kept."""
  averaged = optim.get_ema(state.opt_state)
  return state.params if averaged is None else averaged


def abstract_state(
  init: Callable[[jax.Array], tuple[Any, Any]],
  tx: optax.GradientTransformation,
  rng: jax.Array,
  mesh: jax.sharding.Mesh,
  rules: Sequence[Any],
) -> tuple[Callable[[Mapping[str, Any]], TrainState], TrainState]:
  """Returns functions and shapes of the initial state: (create, abstract).

  Args:
    init: function from a random key to (parameters, extra).
    tx: the optimiser.
    rng: the random key.
    mesh: the mesh.
    rules: `config.sharding_rules`.

  Returns:
    `create` computes the state; it takes weights, {'/'-joined path: array}, that
    replace random parameters, and arrays of the extra state. `abstract` is the
    TrainState of jax.ShapeDtypeStruct with shardings.
  """

  def create(weights: Any) -> TrainState:
    params, extra = init(rng)
    params, remaining = _replaced(params, weights)
    if remaining:
      extra, remaining = _replaced(extra, remaining)
    if remaining:
      raise ValueError(f'the state has no arrays {sorted(remaining)[:10]}')
    return TrainState(jnp.int32(0), params, tx.init(params), extra)

  shapes = jax.eval_shape(create, {})
  shardings = sharding.tree_shardings(shapes, rules, mesh)
  abstract = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )
  return jax.jit(create, out_shardings=shardings), abstract


def _replaced(
  tree: Any, weights: Mapping[str, jax.Array]
) -> tuple[Any, dict[str, jax.Array]]:
  """Returns a tree with arrays replaced by path, and the weights that it lacks."""
  flat = flax.traverse_util.flatten_dict(tree, keep_empty_nodes=True, sep='/')
  remaining = {}
  for path, value in weights.items():
    if path in flat:
      flat[path] = value.astype(flat[path].dtype)
    else:
      remaining[path] = value
  return flax.traverse_util.unflatten_dict(flat, sep='/'), remaining


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
  """Divides a sum by its weight; returns 0 for a weight of 0."""
  return total / jnp.where(weight > 0, weight, 1)


def step_key(seed: int, step: jax.Array | int) -> jax.Array:
  """Returns the random key of the update number `step`."""
  return jax.random.fold_in(jax.random.key(seed), step)


def with_step(method: Callable[..., Any]) -> Callable[..., Any]:
  """Returns `loss` or `update_extra` of a task with an argument `step`."""
  if 'step' in inspect.signature(method).parameters:
    return method
  return lambda *args, step: method(*args)


def augment(
  task: Any, batch: dict[str, jax.Array], rng: jax.Array
) -> dict[str, jax.Array]:
  """Returns a global batch as an update sees it; `rng` is the `step_key`."""
  return task.augment(batch, jax.random.fold_in(rng, _AUGMENT))


def _checked_loss(result: Any) -> Any:
  """Returns what a task's `loss` has returned; ValueError if it has another form."""
  match result:
    case ((total, weight), Mapping()) if jnp.ndim(total) == jnp.ndim(weight) == 0:
      return result
  shapes = jax.tree.map(jnp.shape, result)
  raise ValueError(
    f"loss={shapes}, the shapes that a task's `loss` returns, must be ((sum, weight), "
    'metrics): two scalars and a dict, see vit_jax/tasks/base.py (config.task)'
  )


def _identity(params: Any) -> Any:
  return params


def make_update(
  task: Any,
  tx: optax.GradientTransformation,
  schedule: optax.Schedule,
  seed: int,
  accum_steps: int,
  factors: Any = None,
  merge: Callable[[Any], Any] = _identity,
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, Any]]]:
  """Returns the update function, (state, batch) -> (state, metrics).

  Loss and gradient are means over the whole batch, across devices and the
  `accum_steps` micro-batches: sums and weights are added up first, then
  divided once. Dropout depends on (seed, step), and with accumulation also on
  the number of the micro-batch.

  Args:
    task: the objective, a vit_jax.tasks.base.Task.
    tx: the optimiser.
    schedule: its learning rate, for the metrics.
    seed: seed of dropout and augmentation.
    accum_steps: number of micro-batches.
    factors: result of optim.multipliers.
    merge: turns the parameters of the state into the task's, see
      vit_jax.learning.lora.
  """
  tx = optax.with_extra_args_support(tx)
  loss_of, update_extra = map(with_step, (task.loss, task.update_extra))

  def update(state: Any, batch: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
    rng = step_key(seed, state.step)
    batch = augment(task, batch, rng)

    def compute(rows: Any, number: Any) -> tuple[Any, Any]:
      key = rng
      if accum_steps > 1:
        key = jax.random.fold_in(rng, number)

      def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        params = merge(optim.stop_frozen(params, factors))
        result = loss_of(params, state.extra, rows, key, step=state.step)
        (total, weight), metrics = _checked_loss(result)
        # The mean for a whole batch, the sum for a micro-batch.
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
    extra = update_extra(state.extra, merge(params), means, step=state.step)
    metrics = {'train_loss': mean(*loss)}
    for name, value in means.items():
      if jnp.ndim(value) == 0:
        metrics[f'train_{name}'] = value
    metrics['grad_norm'] = optax.tree.norm(grads)
    metrics['lr'] = schedule(state.step)
    state = TrainState(state.step + 1, params, opt_state, extra)
    return state, metrics

  return update
