"""Computes means over a whole split, with every example counted once."""

from collections.abc import Callable, Mapping
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from vit_jax.evaluators import base
from vit_jax.inference import engine
from vit_jax.run import config as run_config, metrics as metrics_lib


class Means:
  """Computes the means of `measure` of a vit_jax.tasks.base.Task over a split."""

  @classmethod
  def metrics(
    cls, config: ml_collections.ConfigDict
  ) -> Mapping[str, metrics_lib.Metric]:
    """Returns the metrics that the task of a config measures."""
    return run_config.get_task(config.task).METRICS

  def __init__(self, evaluation: base.Evaluation):
    self._evaluation = evaluation

    def sums(params: Any, extra: Any, batch: dict[str, Any]) -> Any:
      count = (batch['mask'] > 0).sum()
      return evaluation.task.measure(params, extra, batch), count

    self._sums = jax.jit(sums)

  def run(
    self, params: Any, extra: Any, stop: Callable[[], bool] = engine.never
  ) -> dict[str, float]:
    """Returns the means of `measure`, `num_examples`, and `img_sec_core`.

    `img_sec_core` is images per second and device.
    """
    start_time = time.perf_counter()
    first_end = None

    def compute(batch: dict[str, Any]) -> Any:
      nonlocal first_end
      sums = self._sums(params, extra, batch)
      if first_end is None:  # The first batch may compile, so it is not timed.
        jax.block_until_ready(sums)
        first_end = time.perf_counter()
      return sums

    totals = list(self._evaluation.compute(compute, stop))
    end_time = time.perf_counter()
    metrics = {}
    for name in totals[0][0]:
      shapes = jax.tree.map(np.shape, totals[0][0][name])
      if tuple(shapes) != ((), ()):
        raise ValueError(
          f"measure={{'{name}': {shapes}}}, the shapes that a task's `measure` returns, "
          'must be pairs of scalars, (sum, weight), see vit_jax/tasks/base.py (config.task)'
        )
      pairs = np.array([sums[name] for sums, _ in totals], np.float64)
      total, weight = pairs.sum(axis=0)
      metrics[name] = total / weight if weight else float('nan')
    counts = [int(count) for _, count in totals]
    count = sum(counts)
    timed = sum(counts[1:])
    speed = count / (end_time - start_time)
    if timed:
      speed = timed / (end_time - first_end)
    return {
      **metrics,
      'num_examples': count,
      'img_sec_core': speed / self._evaluation.mesh.size,
    }
