"""Measures how many images per second a model classifies.

python -m vit_jax.main --config=configs/inference_time.py --workdir=/tmp/inference
"""

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from vit_jax import console, models
from vit_jax.configs import inference_time as default_config, schema
from vit_jax.distributed import sharding
from vit_jax.run import metrics as metrics_lib

# Types of the keys of the config.
TYPES = {
  **dict.fromkeys(('model_name', 'dtype'), schema.Text),
  **dict.fromkeys(('steps', 'batch', 'num_classes', 'image_size'), schema.Count),
  'initial_steps': schema.Natural,
}


def inference_time(config: ml_collections.ConfigDict, workdir: str) -> dict[str, float]:
  """Times the forward pass, step by step, on all devices.

  Takes a config as in vit_jax/configs/inference_time.py. Returns, and logs in
  `workdir`, `imgs_sec_core_min`, `_max`, `_mean` and `_std`: images per second and
  device over the `config.steps` measured steps.

  Raises ValueError if a number is not positive, the devices do not divide the batch,
  or the model is unknown.
  """
  complete = default_config.get_config()
  with complete.ignore_type():
    complete.update(config)
  config = complete
  for key, value in config.items():
    schema.check(key, value, TYPES.get(key, Any))
  log = metrics_lib.MetricsLog(workdir, 0)  # Fails early if it cannot write.
  mesh = sharding.make_mesh({'data': -1})
  sharding.local_rows(mesh, config.batch)  # Raises if nothing divides it.
  model = models.get_model(
    config.model_name, num_classes=config.num_classes, dtype=config.dtype
  )
  size = (config.image_size, config.image_size, 3)
  init = jax.jit(functools.partial(model.init, train=False))
  params = init(jax.random.key(0), jnp.zeros((1, *size)))['params']
  forward = jax.jit(lambda p, x: model.apply({'params': p}, x, train=False))

  seconds = []
  with jax.set_mesh(mesh):
    params = jax.device_put(params, sharding.replicated(mesh))
    images = jnp.ones((config.batch, *size), device=sharding.batch_sharding(mesh))
    console.log(
      f'{config.model_name}, {size[0]}x{size[1]} pixels, {config.batch} images per '
      f'step, mesh of {mesh.size} x {mesh.devices.flat[0].platform}, {config.dtype}. '
      'Compiling ...'
    )
    forward(params, images).block_until_ready()
    for step in range(config.initial_steps + config.steps):
      start = time.perf_counter()
      forward(params, images).block_until_ready()
      if step >= config.initial_steps:
        seconds.append(time.perf_counter() - start)
  speeds = [config.batch / mesh.size / elapsed for elapsed in seconds]
  result = {
    'imgs_sec_core_min': min(speeds),
    'imgs_sec_core_max': max(speeds),
    'imgs_sec_core_mean': statistics.mean(speeds),
    'imgs_sec_core_std': statistics.pstdev(speeds),
  }
  log.write(0, result)
  log.close()
  console.log(
    f'{console.pluralize(len(seconds), "step")}: {result["imgs_sec_core_mean"]:,.2f} images '
    f'per second and device (std {result["imgs_sec_core_std"]:,.2f}, '
    f'{result["imgs_sec_core_min"]:,.2f} to {result["imgs_sec_core_max"]:,.2f}).'
  )
  return result
