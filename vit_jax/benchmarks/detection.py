"""Times a detector's update, its matching and losses, and ways of matching."""

from collections.abc import Callable

import jax
import numpy as np

from vit_jax import cli
from vit_jax.benchmarks import steps as steps_lib
from vit_jax.benchmarks import timing
from vit_jax.configs import models as model_configs
from vit_jax.distributed import sharding

DETECTOR, SIZE, BATCH = 'DETR-R50', 640, 2
OBJECTS = 7  # Of an image of COCO, in the mean; at most 63.
MATCHINGS = (6, 64, 63, 100)  # Layers, images, targets, predictions.


def _set_losses(task, batch) -> Callable:
  """Returns a function that computes a detector's losses and their gradient."""
  from vit_jax.tasks.detection import boxes

  rng = np.random.RandomState(0)
  shape = (
    task.model.num_decoder_layers, len(batch['count']), task.model.num_queries,
  )  # fmt: skip
  logits = rng.randn(*shape, len(task.class_names) + 1).astype(np.float32)
  found = rng.uniform(0.1, 0.5, (*shape, 4)).astype(np.float32)

  def total(logits, found):
    targets = (batch[name] for name in ('class', 'box', 'count'))
    sums = boxes.losses(logits, found, *targets)
    return sum(x.sum() for x in sums.values())

  compute = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
  return lambda: jax.block_until_ready(compute(logits, found))


def matchings() -> dict[str, Callable]:
  """Returns functions that solve the same problems of assignment, by name."""
  import optax
  from scipy import optimize

  from vit_jax.tasks.detection import matching

  rng = np.random.RandomState(0)
  cost = rng.randn(*MATCHINGS).astype(np.float32)
  counts = np.full(MATCHINGS[1], MATCHINGS[2], np.int32)

  def callback(cost):
    def solve(cost):
      flat = np.asarray(cost).reshape(-1, *MATCHINGS[2:])
      found = [optimize.linear_sum_assignment(x)[1] for x in flat]
      return np.array(found, np.int32).reshape(MATCHINGS[:3])

    shape = jax.ShapeDtypeStruct(MATCHINGS[:3], np.int32)
    return jax.pure_callback(solve, shape, cost)

  def by_optax(cost):
    targets, chosen = optax.assignment.hungarian_algorithm(cost)
    return chosen[targets.argsort()]

  algorithms = {
    'on the device (matching.match)': lambda x: matching.match(x, counts),
    'SciPy in a host callback': callback,
    'optax.assignment': lambda x: jax.vmap(by_optax)(
      x.reshape(-1, *MATCHINGS[2:])
    ),
  }

  def run(function):
    compiled = jax.jit(function)
    return lambda: jax.block_until_ready(compiled(cost))

  return {name: run(function) for name, function in algorithms.items()}


def rows(args) -> list[dict]:
  """Times DETR's update, its matching and losses, and ways of matching."""
  cli.load_tensorflow()
  mesh = sharding.make_mesh({'data': 1}, jax.devices()[:1])
  model = model_configs.get_config(DETECTOR)
  model.dtype = args.dtype
  program = steps_lib.make_program(model, SIZE, mesh, 'detect', 91)
  batch = steps_lib.random_batch(program, BATCH)
  batch['count'] = np.full(BATCH, OBJECTS, np.int32)
  steps, losses = timing.measure(
    steps_lib.training_step(program, batch),
    _set_losses(program.task, batch),
    repeats=args.repeats,
  )
  label = f'{DETECTOR}, {SIZE} px, batch {BATCH}, {args.dtype}'
  shares = [100 * a / b for a, b in zip(losses, steps)]
  ways = matchings()
  times = timing.measure(*ways.values(), repeats=args.repeats)
  return [
    timing.row(f'training step, {label}', steps, 's'),
    timing.row('its matching and losses', [1e3 * t for t in losses], 'ms'),
    timing.row('share of the step', shares, '%'),
    *(
      timing.row(f'matching, {name}', [1e3 * t for t in seconds], 'ms')
      for name, seconds in zip(ways, times)
    ),
  ]
