"""Computes means over a whole split, with every example counted once."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from vit_jax.evaluators import base
from vit_jax.run import config as run_config, metrics as metrics_lib


class Means(base.BatchEvaluator):
  """Computes the means of `measure` of a vit_jax.tasks.base.Task over a split."""

  @classmethod
  def metrics(
    cls, config: ml_collections.ConfigDict
  ) -> Mapping[str, metrics_lib.Metric]:
    """Returns the metrics that the task of a config measures."""
    return run_config.get_task(config.task).METRICS

  def compute(self, params: Any, extra: Any, batch: dict[str, jax.Array]) -> Any:
    """Returns {metric: (sum, weight)} over a batch."""
    return self.evaluation.task.measure(params, extra, batch)

  def finish(self, results: Sequence[Any]) -> dict[str, float]:
    """Returns the means; nan if all weights are 0."""
    means = {}
    for name, first in results[0].items():
      shapes = jax.tree.map(np.shape, first)
      if tuple(shapes) != ((), ()):
        raise ValueError(
          f"measure={{'{name}': {shapes}}}, the shapes that a task's `measure` returns, "
          'must be pairs of scalars, (sum, weight), see vit_jax/tasks/base.py (config.task)'
        )
      pairs = np.array([sums[name] for sums in results], np.float64)
      total, weight = pairs.sum(axis=0)
      means[name] = total / weight if weight else float('nan')
    return means
