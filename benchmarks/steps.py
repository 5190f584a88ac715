"""Times updates of the trainer and the logits of a model.

A large matrix product of the same type takes turns with them and, if requested, timm's
models.
"""

import argparse
from collections.abc import Callable
import contextlib
import functools
import statistics
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from benchmarks import timing, timm_steps
from vit_jax import console, models
from vit_jax.configs import common, models as model_configs
from vit_jax.distributed import sharding
from vit_jax.planning import flops


def _config(args: argparse.Namespace) -> ml_collections.ConfigDict:
  """Returns the config of a run with the model that is timed."""
  config = common.get_config()
  config.pp.crop = args.image_size
  if args.config:
    config.model = ml_collections.ConfigDict(args.config.model.to_dict())
    config.pp.channels = args.config.pp.channels
  else:
    config.model = model_configs.get_config(args.model)
  config.model.dtype = args.dtype
  return config


def check(args: argparse.Namespace) -> None:
  """Checks --beside before anything is timed."""
  if not args.beside:
    return
  config = _config(args)
  timm_steps.arguments(config.model, config.pp.channels)
  console.require('timm', 'test', f'--beside={args.beside}')
  if not set(args.only or ('train',)) & {'train', 'inference'}:
    raise ValueError(
      f"beside='{args.beside}' applies only to the sections train and inference: add "
      'one of them (--only)'
    )


def make_step(
  args: argparse.Namespace,
  mesh: jax.sharding.Mesh,
  train: bool,
  attention: str | None = None,
) -> Callable:
  """Returns a function that makes `count` updates, or computes logits."""
  from vit_jax import train as train_lib
  from vit_jax.run import config as run_config

  config = _config(args)
  if attention:
    config.model.transformer.attention = attention
  if args.beside:  # timm's models have no dropout.
    config.model.transformer.dropout_rate = 0.0
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
  predict = jax.jit(program.task.outputs)
  update = jax.jit(program.update, donate_argnums=0)

  def step(count: int) -> None:
    nonlocal state
    for _ in range(count):
      if train:
        state, out = update(state, batch)
      else:
        out = predict(state.params, {}, batch)
    jax.block_until_ready(out)

  return step


def _seconds(step: Callable, count: int) -> float:
  """Returns the seconds of one of `count` calls."""
  start = time.perf_counter()
  seconds = step(count)  # Another process times itself.
  return (seconds or time.perf_counter() - start) / count


def _peak_bytes(device: Any) -> int:
  """Returns the most memory that JAX has had on a device, 0 if unknown."""
  return (device.memory_stats() or {}).get('peak_bytes_in_use', 0)


def _first_call_cost(step: Callable, device: Any) -> dict[str, float]:
  """Makes the first call of a step, which compiles it; returns its cost."""
  before = _peak_bytes(device)
  cost = {'first_call_seconds': _seconds(step, 1)}
  # The peak is per process: it counts if this program has raised it.
  if _peak_bytes(device) > before:
    cost['peak_bytes'] = _peak_bytes(device)
  return cost


def _start_timm(
  args: argparse.Namespace, config: ml_collections.ConfigDict, train: bool
) -> tuple[timm_steps.TimmProcess, dict[str, float]]:
  """Returns the process that runs timm's model, and the cost of its first call."""
  process = timm_steps.TimmProcess(
    model=timm_steps.arguments(config.model, config.pp.channels),
    batch=args.batch,
    image_size=args.image_size,
    dtype=args.dtype,
    train=train,
    compiled=args.beside == 'timm',
  )
  cost = dict(process.first)
  cost['first_call_seconds'] = cost.pop('seconds')
  return process, cost


def _flops_per_image(
  args: argparse.Namespace, config: ml_collections.ConfigDict, train: bool
) -> int:
  """Returns the FLOPs of an update or of logits; a backward pass counts as two."""
  model = models.make_model(config.model, num_classes=1000)
  image_size = (args.image_size, args.image_size)
  forward = flops.forward_flops(model, image_size, config.pp.channels)
  return 3 * forward if train else forward


def _rows(args: argparse.Namespace, train: bool) -> list[dict]:
  """Times updates, or logits, in turn with a reference and a matrix product."""
  mesh = sharding.make_mesh({'data': -1})
  sharding.local_rows(mesh, args.batch)
  device = mesh.devices.flat[0]
  config = _config(args)
  reference = args.beside
  reference_cost = {}
  with jax.set_mesh(mesh), contextlib.ExitStack() as stack:
    steps = [make_step(args, mesh, train)]
    cost = _first_call_cost(steps[0], device)
    if args.beside:
      process, reference_cost = _start_timm(args, config, train)
      stack.callback(process.close)
      steps.append(process)
    elif 'transformer' in config.model:
      reference = 'attention=xla'
      steps.append(make_step(args, mesh, train, 'xla'))
    count = 10
    side = 4 * timing.PRODUCT_SIZE
    if device.platform == 'cpu':
      count = max(1, round(timing.TURN_SECONDS / _seconds(steps[0], 1)))
      side = timing.PRODUCT_SIZE
    turns = [functools.partial(_seconds, step, count) for step in steps]
    turns.append(timing.matrix_product(args.dtype, side))
    *times, product_times = timing.measure(*turns, repeats=args.repeats)
  speeds = []
  for step_times in times:
    speeds.append([args.batch / seconds for seconds in step_times])
  peaks = [2 * side**3 / seconds * mesh.size for seconds in product_times]
  achieved = _flops_per_image(args, config, train) * statistics.median(speeds[0])
  cost['share_of_peak'] = achieved / statistics.median(peaks)
  kind = 'training step' if train else 'inference'
  name = f'{kind}, {config.model.model_name}, batch {args.batch}, {args.dtype}'
  if reference:
    rows = timing.compared(name, speeds[0], reference, speeds[1], 'img/s')
    rows[1] |= reference_cost
  else:
    rows = [timing.row(name, speeds[0], 'img/s')]
  rows[0] |= cost
  gigaflops = [peak / 1e9 for peak in peaks]
  return [*rows, timing.row(f'matrix product, {args.dtype}', gigaflops, 'GFLOP/s')]


train_rows = functools.partial(_rows, train=True)
inference_rows = functools.partial(_rows, train=False)
