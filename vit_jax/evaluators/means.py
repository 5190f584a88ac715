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

    `img_sec_core` is images per second and device.
    """
    start, began = time.perf_counter(), None

    def compute(batch):
      nonlocal began
      found = self._sums(params, extra, batch)
      if began is None:  # The first batch may compile, so it is not timed.
        jax.block_until_ready(found)
        began = time.perf_counter()
      return found

    totals = list(engine.split(self._task, self._source, self._mesh, compute, stop))
    end = time.perf_counter()
    metrics = {}
    for name in totals[0][0]:
      pairs = np.array([sums[name] for sums, _ in totals], np.float64)
      total, weight = pairs.sum(axis=0)
      metrics[name] = total / weight if weight else float('nan')
    counts = [int(count) for _, count in totals]
    count, timed = sum(counts), sum(counts[1:])
    speed = timed / (end - began) if timed else count / (end - start)
    return {
      **metrics,
      'num_examples': count,
      'img_sec_core': speed / self._mesh.size,
    }
