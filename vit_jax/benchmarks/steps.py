"""Times updates of the trainer and the logits of a model.

The share of the peak is relative to a large matrix product of the same type,
which is timed in turn with them; and so are, if asked for, timm's models.
"""

from collections.abc import Callable
import contextlib
import statistics
import time

import jax
import numpy as np

from vit_jax import cli
from vit_jax import models
from vit_jax.benchmarks import timing
from vit_jax.benchmarks import timm_steps
from vit_jax.configs import common
from vit_jax.configs import models as model_configs
from vit_jax.distributed import sharding
from vit_jax.planning import flops


def check(args):
  """Raises what is wrong with --beside, before anything is timed."""
  if not args.beside:
    return
  name = model_configs.get_config(args.model).model_name
  if name not in timm_steps.NAMES:
    raise ValueError(
      f"model='{args.model}' has no twin in timm here: give one of "
      f'{", ".join(timm_steps.NAMES)}, or leave out --beside (--model)'
    )
  cli.needed('torch', 'torch', f'--beside={args.beside}')
  if not set(args.only or ('train',)) & {'train', 'inference'}:
    raise ValueError(
      f"beside='{args.beside}' is for the sections train and inference: add one "
      'of them to --only'
    )


def _make_step(args, mesh, train: bool, attention: str | None) -> Callable:
  """Returns a function that makes so many updates, or computes logits."""
  from vit_jax import train as train_lib
  from vit_jax.run import config as run_config

  config = common.get_config()
  config.model = model_configs.get_config(args.model)
  config.model.dtype = args.dtype
  if attention:
    config.model.transformer.attention = attention
  if args.beside:  # timm's have no dropout.
    config.model.transformer.dropout_rate = 0.0
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
  predict = jax.jit(program.task.outputs)
  update = jax.jit(program.update, donate_argnums=0)

  def step(count):
    nonlocal state
    for _ in range(count):
      if train:
        state, out = update(state, batch)
      else:
        out = predict(state.params, {}, batch)
    jax.block_until_ready(out)

  return step


def _seconds(step, count) -> float:
  """Returns the seconds of one of `count` calls."""
  start = time.perf_counter()
  own = step(count)  # Another process times itself.
  return (own or time.perf_counter() - start) / count


def _peak_bytes(device) -> int:
  """Returns the most memory that JAX has had on a device, 0 where it is unknown."""
  return (device.memory_stats() or {}).get('peak_bytes_in_use', 0)


def _rows(args, train: bool) -> list[dict]:
  cli.load_tensorflow()
  mesh = sharding.make_mesh({'data': -1})
  sharding.local_rows(mesh, args.batch)
  device = mesh.devices.flat[0]
  cpu = device.platform == 'cpu'
  count = 1 if cpu else 10
  model_config = model_configs.get_config(args.model)
  kind = 'training step' if train else 'inference'
  label = f'{kind}, {args.model}, batch {args.batch}, {args.dtype}'
  with jax.set_mesh(mesh), contextlib.ExitStack() as stack:
    steps = [_make_step(args, mesh, train, None)]
    before = _peak_bytes(device)
    facts = {'first_call_seconds': _seconds(steps[0], 1)}
    # The peak is that of the process: it counts if this program has raised it.
    if _peak_bytes(device) > before:
      facts['peak_bytes'] = _peak_bytes(device)
    if args.beside:
      options = dict(
        model=model_config.model_name, batch=args.batch,
        image_size=args.image_size, dtype=args.dtype, train=train,
        compiled=args.beside == 'timm',
      )  # fmt: skip
      other = timm_steps.Beside(**options)
      stack.callback(other.close)
      theirs = {
        'first_call_seconds': other.first['seconds'],
        'peak_bytes': other.first.get('peak_bytes'),
      }
      steps.append(other)
    elif 'transformer' in model_config:
      steps.append(_make_step(args, mesh, train, 'xla'))
    size = timing.product_size(device.platform)
    functions = [lambda step=step: _seconds(step, count) for step in steps]
    ours, *others, products = timing.measure(
      *functions, timing.matrix_product(args.dtype, size), repeats=args.repeats
    )
  model = models.get_model(args.model, num_classes=1000)
  work = args.batch * flops.forward_flops(model, 2 * (args.image_size,))
  work = flops.training_flops(work) if train else work
  peak = [2 * size**3 / t * mesh.size for t in products]
  share = statistics.median(work / t for t in ours) / statistics.median(peak)
  speeds = [args.batch / t for t in ours]
  rows = [timing.row(label, speeds, 'img/s', share_of_peak=share, **facts)]
  name = 'attention=xla'
  if args.beside:
    name = args.beside
    speeds = [args.batch / t for t in others[0]]
    rows.append(timing.row(f'{name} beside it', speeds, 'img/s', **theirs))
  rows += [
    timing.row(f'ratio to {name}', [b / a for a, b in zip(ours, times)], 'x')
    for times in others
  ]
  products = [p / 1e9 for p in peak]
  label = f'matrix product, {args.dtype}, beside it'
  return [*rows, timing.row(label, products, 'GFLOP/s')]


def train_rows(args) -> list[dict]:
  """Times the training step of the trainer, with Adam."""
  return _rows(args, train=True)


def inference_rows(args) -> list[dict]:
  """Times the logits of a batch of images."""
  return _rows(args, train=False)
