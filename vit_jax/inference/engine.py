"""Computes arrays for every example of a split: the inference loop.

It is shared by evaluations, probes, pseudo-labels, figures and predictions. Images are
decoded in parallel, all devices of all processes compute, and only a few batches are
in flight, so that memory does not grow with the number of images.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from vit_jax import console, input_pipeline
from vit_jax.distributed import sharding
from vit_jax.run import stopping

# Batches by which the devices may lag behind the host.
_AHEAD = 2
_SAY_EVERY = 60  # Seconds between progress lines in a log.
Stopped = stopping.Stopped


def never() -> bool:
  """Returns False; the default of `stop`."""
  return False


def run(
  compute: Callable[[dict], Any],
  batches: Iterable[dict],
  mesh: jax.sharding.Mesh,
  stop: Callable[[], bool] = never,
  what: str = '',
  total: int | None = None,
  at_once: int = 1,
) -> Iterator[Any]:
  """Yields the results for batches, in order, as NumPy arrays.

  Replicated arrays are yielded whole, others as the rows of this process. All
  processes of the mesh must make the same calls.

  Args:
    compute: compiled function from a batch to a tree of arrays.
    batches: dicts of global arrays [B, ...], see input_pipeline.eval_batches.
    mesh: the mesh.
    stop: called between batches; if it returns True, Stopped is raised.
    what: label of the progress bar.
    total: number of examples, for the bar; None for no bar.
    at_once: number of batches computed concurrently by threads, to keep all cores of
      a single CPU device busy.
  """
  waiting, begun, compiled = collections.deque(), 0, set()

  def begin(batch):
    with jax.set_mesh(mesh):
      return compute(batch)

  def finish(batch):  # In a thread; JAX's own dispatch is sequential.
    return jax.block_until_ready(begin(batch))

  said = started = time.monotonic()
  # Work of a few seconds shows no bar.
  kwargs = dict(total=total, unit='image', delay=3, leave=False)
  if total is None:
    kwargs['disable'] = True
  with (
    console.bar(desc=what, **kwargs) as bar,
    futures.ThreadPoolExecutor(at_once) as pool,
  ):
    for batch in batches:
      if stop():
        raise Stopped(what)
      count = len(next(iter(batch.values())))
      shapes = tuple(x.shape for x in batch.values())
      if at_once > 1 and shapes in compiled:
        waiting.append((count, pool.submit(finish, batch)))
      else:  # The first batch of a shape, which compiles, is not overlapped.
        waiting.append((count, begin(batch)))
        compiled.add(shapes)
      if len(waiting) > _AHEAD:
        yield _fetch(waiting[0][1], mesh)
        bar.update(waiting.popleft()[0])
      begun += count
      if total and bar.disable and time.monotonic() > said + _SAY_EVERY:
        said = time.monotonic()
        rate = begun / (said - started)
        left = console.duration(max(0, total - begun) / rate)
        console.say(
          f'{what}: {min(begun, total):,} of {console.counted(total, "image")}, '
          f'{rate:.1f} per second, {left} left.'
        )
    while waiting:
      yield _fetch(waiting.popleft()[1], mesh)


def _fetch(results, mesh):
  """Returns results as NumPy arrays, see `run`."""
  axes = jax.P(sharding.batch_axes(mesh))
  if isinstance(results, futures.Future):
    results = results.result()

  def local(x):
    if getattr(x, 'is_fully_addressable', True) or x.is_fully_replicated:
      return x
    return multihost_utils.global_array_to_host_local_array(x, mesh, axes)

  return jax.device_get(jax.tree.map(local, results))


def rows(found: Any) -> Iterator[tuple[int, Any]]:
  """Yields number and results of each example of a batch, without padding.

  `found` is a dict of arrays [B, ...], including `index` and `mask`.
  """
  for i in np.flatnonzero(found['mask']):
    yield int(found['index'][i]), jax.tree.map(lambda x, i=i: x[i], found)


def split(task, source, mesh, compute, stop=never, what='Evaluating') -> Iterator[Any]:
  """Yields the results for a split, in the parts of its task; see `run`."""
  batches = input_pipeline.task_batches(task, source, mesh)
  total = source.evaluated.num_examples
  return run(compute, batches, mesh, stop, what, total)


def collect(
  config, mesh, source, example, compute, stop=never, what=''
) -> dict[str, np.ndarray]:
  """Returns a dict of arrays [n, ...] for all examples of a split, in order.

  The result is the same on all processes. `compute` is a function from a batch to a
  dict of arrays, see `everywhere`; for the other arguments see `run` and
  vit_jax.input_pipeline.eval_batches.
  """
  total, found = source.num_examples, {}
  batches = input_pipeline.eval_batches(config, source, example, mesh)
  for batch in run(compute, batches, mesh, stop, what, total):
    real = batch.pop('mask') > 0
    numbers = batch.pop('index')[real]
    for name, value in batch.items():
      if name not in found:
        found[name] = np.empty((total, *value.shape[1:]), value.dtype)
      found[name][numbers] = value[real]
  return found


def everywhere(mesh, compute: Callable) -> Callable:
  """Compiles a function for `collect`; its last argument is the batch.

  Adds `index` and `mask` of the batch to its dict of arrays, and replicates them.
  """

  def whole(*args):
    kept = {name: args[-1][name] for name in ('index', 'mask')}
    return {**compute(*args), **kept}

  return jax.jit(whole, out_shardings=sharding.replicated(mesh))


def limited(config, mesh, most: int):
  """Returns a config with a `batch_eval` of at most about `most` rows."""
  shards = sharding.batch_shards(mesh)
  config = config.copy_and_resolve_references()
  config.batch_eval = -(-min(config.batch_eval, most) // shards) * shards
  return config


def by_parts(compute: Callable, batch, size: int):
  """Computes a function of a batch `size` rows at a time, to save memory.

  Takes a tree of arrays [B, ...] and returns a tree of NumPy arrays [B, ...].
  """
  count, parts = len(jax.tree.leaves(batch)[0]), []
  for start in range(0, count, size):
    # Pads the last part, so that only one shape is compiled.
    rows = np.arange(start, start + size).clip(max=count - 1)
    part = compute(jax.tree.map(lambda x, rows=rows: x[rows], batch))
    kept = min(size, count - start)
    parts.append(jax.tree.map(lambda x, n=kept: np.asarray(x)[:n], part))
  return jax.tree.map(lambda *x: np.concatenate(x), *parts)
