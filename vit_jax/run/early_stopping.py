"""Ends a run whose `best_metric` makes no more progress (config.early_stopping).

The decision is a pure function of the evaluations so far, which metrics.jsonl holds, so
that it is the same when a run resumes. As in Keras, an evaluation makes progress if it
exceeds the last one that did by more than `min_delta`.
"""

from collections.abc import Sequence
import math
import os

from vit_jax.distributed import processes
from vit_jax.run import metrics as metrics_lib


class EarlyStopping:
  """The evaluations of a run, and whether it ends early.

  Args:
    patience: evaluations without progress after which the run ends; 0: never.
    min_delta: least gain that counts as progress.
    low: whether the lowest value of the metric is the best.
    values: values of the metric in the evaluations so far.
  """

  def __init__(
    self, patience: int, min_delta: float, low: bool, values: Sequence[float] = ()
  ) -> None:
    self._patience = patience
    self._min_delta = min_delta
    self._sign = -1 if low else 1
    self._best = -math.inf  # Highest score so far.
    self._last_progress = -math.inf  # Score of the last evaluation with progress.
    self._num_stalled = 0  # Evaluations since then.
    # Whether the last evaluation is better than all before.
    self.has_improved = False
    for value in values:
      self.add(value)

  @property
  def stops(self) -> bool:
    """Whether the run ends after the last evaluation."""
    return 0 < self._patience <= self._num_stalled

  def add(self, value: float) -> None:
    """Adds an evaluation; nan does not count as progress."""
    score = self._sign * value
    self.has_improved = self._patience > 0 and score > self._best
    if self.has_improved:
      self._best = score
    if score - self._min_delta > self._last_progress:
      self._last_progress = score
      self._num_stalled = 0
    else:
      self._num_stalled += 1


@processes.by_first('reading the evaluations so far')
def evaluated(workdir: str | os.PathLike, metric: str, step: int) -> list[float]:
  """Returns the values of a metric in a run's evaluations up to a step."""
  values = {}
  for row in metrics_lib.read(workdir):
    if metric in row and row['step'] <= step:
      values[row['step']] = row[metric]
  return [values[evaluated_step] for evaluated_step in sorted(values)]
