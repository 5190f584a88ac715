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


def _step(args, mesh, train: bool, attention: str | None) -> Callable:
  """Returns a function that makes one update of a model, or computes logits."""
  from vit_jax import train as train_lib
  from vit_jax.run import config as run_config

  config = common.get_config()
  config.model = model_configs.get_config(args.model)
  config.model.dtype = args.dtype
  if attention:
    config.model.transformer.attention = attention
  config.pp.crop = args.image_size
  config.update(
    optimizer='adam', optim_dtype='float32', total_steps=10, warmup_steps=1,
    weight_decay=0.1,
  )  # fmt: skip
  config = run_config.complete(config)
  metadata = run_config.get_task(config.task).planned_metadata(config, 1000)
  program = train_lib.make_program(config, metadata, mesh)
  rng = np.random.RandomState(0)
  batch = {
    name: rng.uniform(size=spec.shape).astype(spec.dtype)
    for name, spec in program.task.batch_spec(args.batch).items()
  }
  batch = jax.device_put(batch, sharding.batch_sharding(mesh))
  state = program.create_state({})
  if not train:
    predict = jax.jit(program.task.outputs)
    return lambda: predict(state.params, {}, batch).block_until_ready()
  update = jax.jit(program.update, donate_argnums=0)

  def step():
    nonlocal state
    state, metrics = update(state, batch)
    jax.block_until_ready(metrics)

  return step


def _rows(args, train: bool) -> list[dict]:
  cli.load_tensorflow()
  mesh = sharding.make_mesh({'data': -1})
  sharding.local_rows(mesh, args.batch)
  attends = 'transformer' in model_configs.get_config(args.model)
  kinds = ('default', 'xla') if attends else (None,)
  steps = [_step(args, mesh, train, kind) for kind in kinds]
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
  speeds = [args.batch / t for t in ours]
  return [
    timing.row(label, speeds, 'img/s', share_of_peak=share),
    *(
      timing.row(
        'ratio to attention=xla', [b / a for a, b in zip(ours, xla)], 'x'
      )
      for xla in others
    ),
    timing.row(
      'matrix product, float32, beside it', [p / 1e9 for p in peak], 'GFLOP/s'
    ),
  ]


def train_rows(args) -> list[dict]:
  """Times the training step of the trainer, with Adam."""
  return _rows(args, train=True)


def inference_rows(args) -> list[dict]:
  """Times the logits of a batch of images."""
  return _rows(args, train=False)
