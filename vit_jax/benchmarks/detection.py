"""Times a detector's update, and its matching and losses."""

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


def rows(args) -> list[dict]:
  """Times DETR's update, and its matching and losses."""
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
  return [
    timing.row(f'training step, {label}', steps, 's'),
    timing.row('its matching and losses', [1e3 * t for t in losses], 'ms'),
    timing.row('share of the step', shares, '%'),
  ]
