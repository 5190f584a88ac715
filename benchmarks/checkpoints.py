"""Times saving and restoring a checkpoint of a model with the moments of Adam."""

import functools
import os
import pathlib
import tempfile
import time

import jax
import numpy as np
import optax

from benchmarks import timing
from vit_jax import models
from vit_jax.configs import models as model_configs
from vit_jax.learning import state as state_lib
from vit_jax.run import checkpoints as checkpoints_lib


def _state(args):
  """Returns a state of random numbers."""
  config = model_configs.get_config(args.model)
  model = models.make_model(config, num_classes=1000)
  images = np.zeros((1, args.image_size, args.image_size, 3))
  init = functools.partial(model.init, train=False)
  shapes = jax.eval_shape(init, jax.random.key(0), images)['params']
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: rng.random(x.shape, np.float32), shapes)
  moments = jax.jit(optax.adam(1e-3).init)(params)
  return state_lib.TrainState(np.int32(0), jax.device_put(params), moments, {})


def rows(args) -> list[dict]:
  """Times a save, until training goes on and until it is complete, and a restore.

  Writing the same bytes to a file takes turns with them.
  """
  state = _state(args)
  arrays = [np.asarray(x) for x in jax.tree.leaves(state)]
  blocked = []
  with tempfile.TemporaryDirectory() as folder:
    checkpoints = checkpoints_lib.Checkpoints(folder, keep=1)

    def save():
      start = time.perf_counter()
      checkpoints.save(len(blocked), state)
      blocked.append(time.perf_counter() - start)
      checkpoints.wait()

    def restore():
      found, _ = checkpoints.restore(jax.tree.map(_like, state))
      jax.block_until_ready(found)

    def write():
      with (pathlib.Path(folder) / 'bytes').open('wb') as file:
        for array in arrays:
          file.write(array)
        os.fsync(file.fileno())

    saved, restored, plain = timing.measure(save, restore, write, repeats=args.repeats)
    checkpoints.close()
  size = sum(x.nbytes for x in arrays) / 2**20
  name = f'checkpoint, {args.model}, {size:,.0f} MiB'
  return [
    timing.row(f'{name}: training waits', blocked[1:], 's'),
    *timing.compared(f'{name}: complete', saved, 'a file of its bytes', plain, 's'),
    timing.row(f'{name}: restored', restored, 's'),
  ]


def _like(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, 'sharding', None))
