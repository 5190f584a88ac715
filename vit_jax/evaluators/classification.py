"""Top-1 accuracy and loss over a whole split, every example counted once."""

from collections.abc import Callable
import time

import jax
import numpy as np

from vit_jax import input_pipeline


class Evaluator:
  """Evaluates parameters on one split.

  Args:
    config: reads `batch_eval`, `pp`, `prefetch`.
    mesh: the mesh.
    source: the split.
    predict: (parameters, images) -> logits [B, C].
    loss: (logits, labels) -> [B].
    suffix: ends the metrics' names, '_test' for one.
  """

  def __init__(
    self, config, mesh, source, predict: Callable, loss: Callable, suffix: str
  ):
    self._config = config
    self._mesh = mesh
    self._source = source
    self._suffix = suffix

    def sums(params, batch):
      logits = predict(params, batch['image'])
      best = jax.nn.one_hot(logits.argmax(axis=-1), logits.shape[-1])
      correct = (best * batch['label']).sum(axis=-1) > 0  # [B]
      real = batch['mask'] > 0
      return {
        'correct': (correct & real).sum(),
        'loss': (loss(logits, batch['label']) * batch['mask']).sum(),
        'count': real.sum(),
      }

    self._sums = jax.jit(sums)

  def run(self, params, stop: Callable[[], bool] = lambda: False):
    """Evaluates.

    Args:
      params: the parameters.
      stop: is asked between batches whether to break off.

    Returns:
      A dict with `accuracy`, `loss`, `num_examples` and `img_sec_core`, each
      name with the suffix; None if it was broken off.
    """
    start, first_timed = time.perf_counter(), 0
    totals = []
    for batch in input_pipeline.eval_batches(
      self._config, self._source, self._mesh
    ):
      if stop():
        return None
      with jax.set_mesh(self._mesh):
        totals.append(self._sums(params, batch))
      if (
        len(totals) == 1 and self._source.num_examples > self._config.batch_eval
      ):
        # The first batch may compile: the speed is that of the others.
        jax.block_until_ready(totals)
        start, first_timed = time.perf_counter(), 1
    totals = jax.device_get(totals)
    total = {
      key: np.sum([t[key] for t in totals], dtype=np.float64)
      for key in totals[0]
    }
    seconds = time.perf_counter() - start
    timed = sum(int(t['count']) for t in totals[first_timed:])
    metrics = {
      'accuracy': total['correct'] / total['count'],
      'loss': total['loss'] / total['count'],
      'num_examples': int(total['count']),
      'img_sec_core': timed / seconds / self._mesh.size,
    }
    return {name + self._suffix: value for name, value in metrics.items()}
