"""Times updates of the trainer and the logits of a model.

The share of the peak is relative to a large float32 matrix product, which is
timed in turn with them.
"""

from collections.abc import Callable
import statistics

import jax
import numpy as np

from vit_jax import cli
from vit_jax import models
from vit_jax.benchmarks import timing
from vit_jax.configs import common
from vit_jax.configs import models as model_configs
from vit_jax.distributed import sharding
from vit_jax.planning import flops


def make_program(model, image_size: int, mesh, task: str, num_classes: int):
  """Returns the program that trains a model, of a config, with Adam."""
  from vit_jax import train as train_lib
  from vit_jax.run import config as run_config

  config = common.get_config()
  config.model, config.task = model, task
  config.pp.crop = image_size
  config.update(
    optimizer='adam', optim_dtype='float32', total_steps=10, warmup_steps=1,
    weight_decay=0.1,
  )  # fmt: skip
  config = run_config.complete(config)
  metadata = run_config.get_task(task).planned_metadata(config, num_classes)
  return train_lib.make_program(config, metadata, mesh)


def random_batch(program, size: int) -> dict:
  """Returns a batch of random numbers from 0 to 1."""
  rng = np.random.RandomState(0)
  return {
    name: rng.uniform(size=spec.shape).astype(spec.dtype)
    for name, spec in program.task.batch_spec(size).items()
  }


def training_step(program, batch) -> Callable:
  """Returns a function that makes one update."""
  holder = [program.create_state({})]
  update = jax.jit(program.update, donate_argnums=0)

  def step():
    holder[0], metrics = update(holder[0], batch)
    jax.block_until_ready(metrics)

  return step


def _model_step(args, mesh, train: bool, attention: str | None) -> Callable:
  """Returns a function that makes one update of a model, or computes logits."""
  model = model_configs.get_config(args.model)
  model.dtype = args.dtype
  if attention:
    model.transformer.attention = attention
  program = make_program(model, args.image_size, mesh, 'classify', 1000)
  batch = random_batch(program, args.batch)
  batch = jax.device_put(batch, sharding.batch_sharding(mesh))
  if train:
    return training_step(program, batch)
  state = program.create_state({})
  predict = jax.jit(program.task.outputs)
  return lambda: predict(state.params, {}, batch).block_until_ready()


def _rows(args, train: bool) -> list[dict]:
  cli.load_tensorflow()
  mesh = sharding.make_mesh({'data': -1})
  sharding.local_rows(mesh, args.batch)
  attends = 'transformer' in model_configs.get_config(args.model)
  kinds = ('default', 'xla') if attends else (None,)
  steps = [_model_step(args, mesh, train, kind) for kind in kinds]
  with jax.set_mesh(mesh):
    ours, *others, products = timing.measure(
      *steps, timing.matrix_product(), repeats=args.repeats
    )
  model = models.get_model(args.model, num_classes=1000)
  work = args.batch * flops.forward_flops(model, 2 * (args.image_size,))
  work = flops.training_flops(work) if train else work
  peak = [2 * timing.PRODUCT_SIZE**3 / t * mesh.size for t in products]
  kind = 'training step' if train else 'inference'
  label = f'{kind}, {args.model}, batch {args.batch}, {args.dtype}'
  share = statistics.median(work / t for t in ours) / statistics.median(peak)
  return [
    timing.row(
      label, [args.batch / t for t in ours], 'img/s', share_of_peak=share
    ),
    *(
      timing.row(
        'ratio to attention=xla', [b / a for a, b in zip(ours, xla)], 'x'
      )
      for xla in others
    ),
    timing.row(
      'matrix product, float32, beside it',
      [p / 1e9 for p in peak],
      'GFLOP/s',
    ),
  ]


def train_rows(args) -> list[dict]:
  """Times the training step of the trainer, with Adam."""
  return _rows(args, train=True)


def inference_rows(args) -> list[dict]:
  """Times the logits of a batch of images."""
  return _rows(args, train=False)
