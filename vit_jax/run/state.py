"""The state of a run: all that it carries from one step to the next."""

from collections.abc import Callable
from typing import Any

import flax.struct
import flax.traverse_util
import jax

from vit_jax.run import optim
from vit_jax.scale import sharding


@flax.struct.dataclass
class TrainState:
  """All that a run carries from one step to the next.

  Attributes:
    step: int32 scalar, number of updates made.
    params: the parameters.
    opt_state: the optimiser's state, averaged weights included.
  """

  step: jax.Array
  params: Any
  opt_state: Any


def best_params(state: TrainState):
  """Returns the weights to evaluate: their average where one is kept."""
  averaged = optim.get_ema(state.opt_state)
  return state.params if averaged is None else averaged


def abstract_state(init: Callable, tx, rng, mesh, rules):
  """Returns shapes, types and shardings of the state; computes nothing.

  Args:
    init: function from a random key to the parameters.
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
    flat = flax.traverse_util.flatten_dict(init(rng), sep='/')
    for path, value in weights.items():
      flat[path] = value.astype(flat[path].dtype)
    params = flax.traverse_util.unflatten_dict(flat, sep='/')
    return TrainState(jax.numpy.int32(0), params, tx.init(params))

  shapes = jax.eval_shape(create, {})
  shardings = sharding.tree_shardings(shapes, rules, mesh)
  abstract = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )
  return jax.jit(create, out_shardings=shardings), abstract
