"""Computes arrays for every example of a split: the inference loop.

It is shared by evaluations, probes, pseudo-labels, figures and predictions. Images are
decoded in parallel, all devices of all processes compute, and only a few batches are
in flight, so that memory does not grow with the number of images.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
import contextlib
import threading
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import ml_collections
import numpy as np
import tqdm

from vit_jax import console, input_pipeline
from vit_jax.data import records
from vit_jax.distributed import sharding
from vit_jax.run import stopping

# Batches by which the devices may lag behind the host.
_AHEAD = 2
_LOG_EVERY = 60  # Seconds between progress lines in a log.
_ANNOUNCED_AFTER = 10  # Seconds of compilation.
Stopped = stopping.Stopped


def never() -> bool:
  """Returns False; the default of `stop`."""
  return False


def run(
  compute: Callable[[dict], Any],
  batches: Iterable[dict],
  mesh: jax.sharding.Mesh,
  stop: Callable[[], bool] = never,
  label: str = '',
  total: int | None = None,
  concurrency: int = 1,
) -> Iterator[Any]:
  """Yields the results for batches, in order, as NumPy arrays.

  Replicated arrays are yielded whole, others as the rows of this process. All
  processes of the mesh must make the same calls.

  Args:
    compute: compiled function from a batch to a tree of arrays.
    batches: dicts of global arrays [B, ...], see input_pipeline.eval_batches.
    mesh: the mesh.
    stop: called between batches; if it returns True, Stopped is raised.
    label: label of the progress bar.
    total: number of examples, for the bar; None for no bar.
    concurrency: number of batches computed at the same time by threads, to keep all
      cores of a single CPU device busy.
  """
  pending: collections.deque[tuple[int, Any]] = collections.deque()
  compiled_shapes = set()
  progress = _Progress(label, total)

  def dispatch(batch: input_pipeline.Batch) -> Any:
    with jax.set_mesh(mesh):
      return compute(batch)

  def wait(batch: input_pipeline.Batch) -> Any:
    return jax.block_until_ready(dispatch(batch))

  with (
    _bar(label, total) as bar,
    futures.ThreadPoolExecutor(concurrency) as pool,
  ):
    for batch in batches:
      if stop():
        raise Stopped(label)
      count = len(next(iter(batch.values())))
      shapes = tuple(x.shape for x in batch.values())
      if concurrency > 1 and shapes in compiled_shapes:
        # JAX's own dispatch on CPUs is sequential: threads wait for the results.
        pending.append((count, pool.submit(wait, batch)))
      else:  # The first batch of a shape, which compiles, is not overlapped.
        with _announcing_compilation(label):
          pending.append((count, dispatch(batch)))
        compiled_shapes.add(shapes)
      if len(pending) > _AHEAD:
        oldest_count, results = pending[0]
        yield _fetch(results, mesh)
        pending.popleft()
        bar.update(oldest_count)
      progress.add(count)
      if bar.disable:
        progress.log()
    while pending:
      _, results = pending.popleft()
      yield _fetch(results, mesh)


@contextlib.contextmanager
def _announcing_compilation(label: str) -> Iterator[None]:
  """Says on stderr after a while that a batch is compiled, without progress to show."""
  text = f'{label or "Computing"}: compiling for a new size, which may take minutes ...'
  timer = threading.Timer(_ANNOUNCED_AFTER, console.notify, [text])
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def _bar(label: str, total: int | None) -> tqdm.tqdm:
  """Returns a progress bar; work of a few seconds shows none."""
  if total is None:
    return console.bar(disable=True)
  return console.bar(desc=label, total=total, unit='image', delay=3, leave=False)


class _Progress:
  """Logs progress once a minute, where there is no bar."""

  def __init__(self, label: str, total: int | None) -> None:
    self._label = label
    self._total = total
    self._count = 0
    self._start_time = self._log_time = time.monotonic()

  def add(self, count: int) -> None:
    self._count += count

  def log(self) -> None:
    """Logs rate and remaining time, unless that was done within the last minute."""
    total = self._total
    now = time.monotonic()
    if not total or now <= self._log_time + _LOG_EVERY:
      return
    self._log_time = now
    rate = self._count / (now - self._start_time)
    remaining = console.duration(max(0, total - self._count) / rate)
    console.log(
      f'{self._label}: {min(self._count, total):,} of '
      f'{console.pluralize(total, "image")}, {rate:.1f} per second, {remaining} left.'
    )


def _fetch(results: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns results as NumPy arrays, see `run`."""
  axes = jax.P(sharding.batch_axes(mesh))
  if isinstance(results, futures.Future):
    results = results.result()

  def local(x: Any) -> Any:
    if getattr(x, 'is_fully_addressable', True) or x.is_fully_replicated:
      return x
    return multihost_utils.global_array_to_host_local_array(x, mesh, axes)

  return jax.device_get(jax.tree.map(local, results))


def rows(results: Any) -> Iterator[tuple[int, Any]]:
  """Yields number and results of each example of a batch, without padding.

  `results` is a dict of arrays [B, ...], including `index` and `mask`.
  """
  for i in np.flatnonzero(results['mask']):
    yield int(results['index'][i]), take(results, i)


def positions(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns `index` and `mask` of a batch, for `rows`."""
  return {'index': batch['index'], 'mask': batch['mask']}


def in_order(batches: Iterable[Mapping[str, Any]]) -> dict[str, np.ndarray]:
  """Returns arrays [n, ...] of all images, in the order of their numbers.

  `batches` are dicts of arrays [B, ...], with `index` and `mask`; images with a mask of 0
  are left out, and of several with the same number, only the first is kept.
  """
  parts = [take(batch, batch['mask'] > 0) for batch in batches]
  columns = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
  _, first_rows = np.unique(columns['index'], return_index=True)
  return take(columns, first_rows)


def split(
  task: Any,
  source: records.Source,
  mesh: jax.sharding.Mesh,
  compute: Callable[[dict], Any],
  stop: Callable[[], bool] = never,
) -> Iterator[Any]:
  """Yields the results for a split, in the parts of its task; see `run`."""
  batches = input_pipeline.task_batches(task, source, mesh)
  total = source.evaluated.num_examples
  return run(compute, batches, mesh, stop, 'Evaluating', total)


def collect(
  config: ml_collections.ConfigDict,
  mesh: jax.sharding.Mesh,
  source: records.Source,
  example: Callable[..., dict],
  compute: Callable[[dict], dict],
  stop: Callable[[], bool] = never,
  label: str = '',
) -> dict[str, np.ndarray]:
  """Returns a dict of arrays [n, ...] for all examples of a split, in order.

  The result is the same on all processes. `compute` is a function from a batch to a
  dict of arrays, see `on_all_hosts`; for the other arguments see `run` and
  vit_jax.input_pipeline.eval_batches.
  """
  total = source.num_examples
  arrays: dict[str, np.ndarray] = {}
  batches = input_pipeline.eval_batches(config, source, example, mesh)
  for batch in run(compute, batches, mesh, stop, label, total):
    mask = batch.pop('mask') > 0
    indices = batch.pop('index')[mask]
    for name, value in batch.items():
      if name not in arrays:
        arrays[name] = np.empty((total, *value.shape[1:]), value.dtype)
      arrays[name][indices] = value[mask]
  return arrays


def on_all_hosts(mesh: jax.sharding.Mesh, compute: Callable) -> Callable:
  """Compiles a function for `collect`; its last argument is the batch.

  Adds `index` and `mask` of the batch to its dict of arrays, and replicates them.
  """

  def compute_with_positions(*args: Any) -> dict[str, jax.Array]:
    return {**compute(*args), **positions(args[-1])}

  replicated = sharding.replicated(mesh)
  return jax.jit(compute_with_positions, out_shardings=replicated)


def limited(
  config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh, limit: int
) -> ml_collections.ConfigDict:
  """Returns a config whose `batch_eval` is at most `limit`, rounded up for all shards."""
  shards = sharding.batch_shards(mesh)
  config = config.copy_and_resolve_references()
  config.batch_eval = -(-min(config.batch_eval, limit) // shards) * shards
  return config


def take(tree: Any, rows: Any) -> Any:
  """Returns rows of each array of a tree, by number, mask or slice."""
  return jax.tree.map(lambda x: x[rows], tree)


def by_parts(compute: Callable[[Any], Any], batch: Any, size: int) -> Any:
  """Computes a function of a batch `size` rows at a time, to save memory.

  Args:
    compute: function of a tree of arrays [size, ...].
    batch: tree of arrays [B, ...].
    size: number of rows.

  Returns:
    The results, a tree of NumPy arrays [B, ...].
  """
  count = len(jax.tree.leaves(batch)[0])
  results = []
  for start in range(0, count, size):
    # The last part is padded, so that only one shape is compiled.
    rows = np.arange(start, start + size).clip(max=count - 1)
    part = jax.device_get(compute(take(batch, rows)))
    num_real = min(size, count - start)
    results.append(take(part, slice(num_real)))
  return jax.tree.map(lambda *x: np.concatenate(x), *results)
