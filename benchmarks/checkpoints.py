"""Times saving and restoring a checkpoint of a model with the moments of Adam."""

import argparse
import os
import pathlib
import tempfile
import time
from typing import Any

import jax
import numpy as np
import optax

from benchmarks import start, timing
from vit_jax.learning import state as state_lib
from vit_jax.run import checkpoints as checkpoints_lib


def rows(args: argparse.Namespace) -> list[dict]:
  """Times a save, until training continues and until it is complete, and a restore.

  Writing the same bytes to a file takes turns with them.
  """
  _, params = start.random_params(args.model, args.image_size)
  moments = jax.jit(optax.adam(1e-3).init)(params)
  state = state_lib.TrainState(np.int32(0), jax.device_put(params), moments, {})
  arrays = [np.asarray(x) for x in jax.tree.leaves(state)]
  blocked = []
  with tempfile.TemporaryDirectory() as folder:
    checkpoints = checkpoints_lib.Checkpoints(folder, keep=1)

    def save() -> None:
      begin = time.perf_counter()
      step = len(blocked)
      checkpoints.save(step, state.replace(step=np.int32(step)))
      blocked.append(time.perf_counter() - begin)
      checkpoints.wait()

    def restore() -> None:
      restored, _ = checkpoints.restore(jax.tree.map(_like, state))
      jax.block_until_ready(restored)

    def write() -> None:
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


def _like(x: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, 'sharding', None))
