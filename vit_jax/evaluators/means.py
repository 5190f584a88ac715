"""Computes means over a whole split, with every example counted once."""

import time

import jax
import numpy as np

from vit_jax.inference import engine


class Means:
  """Computes the means of `measure` of a vit_jax.tasks.base.Task over a split."""

  def __init__(self, task, mesh, source):
    self._task, self._mesh, self._source = task, mesh, source

    def sums(params, extra, batch):
      count = (batch['mask'] > 0).sum()
      return task.measure(params, extra, batch), count

    self._sums = jax.jit(sums)

  def run(self, params, extra, stop=engine.never):
    """Returns the means of `measure`, `num_examples`, and `img_sec_core`.

    The last are images a second and device.
    """
    began, compiling = time.perf_counter(), 0.0
    timed, shapes, last = [], set(), None

    def compute(batch):
      nonlocal compiling, last
      shape = str(jax.tree.map(np.shape, batch))
      timed.append(shape in shapes)
      shapes.add(shape)
      if timed[-1]:
        last = self._sums(params, extra, batch)
        return last
      # The first batch of a shape may compile, so it is not timed.
      jax.block_until_ready(last)
      first = time.perf_counter()
      last = jax.block_until_ready(self._sums(params, extra, batch))
      compiling += time.perf_counter() - first
      return last

    totals = list(
      engine.split(self._task, self._source, self._mesh, compute, stop)
    )
    seconds = time.perf_counter() - began
    if any(timed):
      seconds -= compiling
    else:
      timed = [True] * len(timed)
    metrics = {}
    for name in totals[0][0]:
      pairs = np.array([sums[name] for sums, _ in totals], np.float64)
      total, weight = pairs.sum(axis=0)
      metrics[name] = total / weight if weight else float('nan')
    counts = [int(count) for _, count in totals]
    return {
      **metrics,
      'num_examples': sum(counts),
      'img_sec_core': np.dot(counts, timed) / seconds / self._mesh.size,
    }
