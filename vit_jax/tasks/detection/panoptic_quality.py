"""Panoptic quality (arXiv 1801.00868), as COCO's evaluation computes it.

A found segment matches a true one of the same class if their overlap (IoU) is
above 1/2; at most one can. For each class,

  PQ = sum of the IoU of matches / (matches + unmatched, true and found, / 2),

which is the product of SQ, the mean IoU of matches, and RQ, the F1 score. The
figures are means over classes. Pixels without a true segment are void: they do
not count in the IoU, and a found segment more than half of which is void, or
lies in a crowd of its class, is not counted as unmatched.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence

import jax
import numpy as np

from vit_jax.distributed import sharding
from vit_jax.inference import engine
from vit_jax.tasks.detection import gather
from vit_jax.tasks.detection import segments as segments_lib

NAMES = tuple(
  figure + group
  for group in ('', '_things', '_stuff')
  for figure in ('PQ', 'SQ', 'RQ')
)


class PanopticQuality:
  """Computes the panoptic quality of a model over a split.

  Args:
    task: has `config`, `example`, `outputs`, `masks`, `assemble`,
      `is_thing` and `class_names`, see vit_jax.tasks.detection.segment.Task.
    mesh: the mesh.
    source: the split.
  """

  def __init__(self, task, mesh, source):
    self._task = task
    self._mesh = mesh
    self._source = source
    # Masks are large: each process gets those of its own images.
    self._found = jax.jit(
      self._compute, out_shardings=sharding.batch_sharding(mesh)
    )

  def _compute(self, params, extra, batch):
    found = self._task.masks(self._task.outputs(params, extra, batch), batch)
    truth = {
      name: batch[name]
      for name in (
        'index', 'mask', 'label', 'crowd', 'truth_size', 'truth_segments'
      )
    }  # fmt: skip
    return found, truth

  def run(self, params, extra, stop: Callable[[], bool] = engine.never):
    """Evaluates parameters.

    Args:
      params: the parameters.
      extra: other state of the task.
      stop: called between batches; returns whether to stop the evaluation.

    Returns:
      NAMES from 0 to 1 (NaN where no class of a group occurs), and
      `num_examples`.

    Raises:
      engine.Stopped: if `stop` became true.
    """
    counts = {}
    for results in engine.split(
      self._task,
      self._source,
      self._mesh,
      lambda batch: self._found(params, extra, batch),
      stop,
    ):
      counts |= self._compare(*results)
    everything = gather.gather(counts)
    metrics = panoptic_quality(
      (row['counts'] for row in everything), self._task.is_thing
    )
    return {**metrics, 'num_examples': len(everything)}

  def _compare(self, found, truth) -> dict[int, dict]:
    """Compares the images of this process in a batch, by their index."""
    counts = {}
    for i in np.flatnonzero(truth['mask']):
      row = {name: x[i] for name, x in truth.items()}
      height, width = row['truth_size']
      made = self._task.assemble(found, i, (height, width))
      exists = row['label'] >= 0
      counts[int(row['index'])] = {
        'counts': compare(
          row['truth_segments'][:height, :width],
          row['label'][exists],
          row['crowd'][exists],
          made,
          len(self._task.class_names),
        )
      }
    return counts


def compare(
  numbers: np.ndarray,
  labels: np.ndarray,
  crowd: np.ndarray,
  found: segments_lib.Segments,
  num_classes: int,
) -> np.ndarray:
  """Compares the true segments of an image with those found.

  Args:
    numbers: int [H, W], number of the true segment of each pixel, from 1; 0 for
      void.
    labels: int [n], classes of the segments 1, 2, ...
    crowd: [n], whether a segment is a crowd; crowds are not to be found.
    found: the segments found, of the same size.
    num_classes: number of classes C.

  Returns:
    float64 [4, C]: by class the sum of the IoU of matches, and the numbers of
    matches, of unmatched found segments, and of unmatched true segments.
  """
  n, m = len(labels), len(found.labels)
  both = numbers.astype(np.int64) * (m + 1) + found.numbers
  shared = np.bincount(both.ravel(), minlength=(n + 1) * (m + 1))
  shared = shared.reshape(n + 1, m + 1)  # Pixels; row and column 0 are void.
  true_area, found_area = shared.sum(axis=1)[1:], shared.sum(axis=0)[1:]
  void, inside = shared[0, 1:], shared[1:, 1:]
  union = true_area[:, None] + (found_area - void)[None] - inside
  overlap = inside / np.maximum(union, 1)
  same = labels[:, None] == found.labels[None]
  is_crowd = np.asarray(crowd, bool)
  matches = (overlap > 0.5) & same & ~is_crowd[:, None]  # [n, m]

  hidden = void + (inside * (same & is_crowd[:, None])).sum(axis=0)
  extra = ~matches.any(axis=0) & (2 * hidden <= found_area)
  missed = ~matches.any(axis=1) & ~is_crowd & (true_area > 0)

  def by_class(classes, weights=None):
    return np.bincount(classes, weights, minlength=num_classes)

  rows, columns = np.nonzero(matches)
  return np.stack(
    [
      by_class(labels[rows], overlap[rows, columns]),
      by_class(labels[rows]),
      by_class(found.labels[extra]),
      by_class(labels[missed]),
    ]
  ).astype(np.float64)


def panoptic_quality(
  counts: Iterable[np.ndarray], is_thing: Sequence[bool]
) -> dict[str, float]:
  """Computes the figures of a split.

  Args:
    counts: results of `compare`, one for each image.
    is_thing: whether a class is of things, by class.

  Returns:
    NAMES, each from 0 to 1: means over the classes that occur or are found; NaN
    where a group has none.
  """
  is_thing = np.asarray(is_thing, bool)
  total = sum(counts, np.zeros((4, len(is_thing))))
  overlap, matches, extra, missed = total
  weight = matches + (extra + missed) / 2
  figures = {
    'PQ': overlap / np.maximum(weight, 1e-9),
    'SQ': overlap / np.maximum(matches, 1),
    'RQ': matches / np.maximum(weight, 1e-9),
  }
  groups = {'': is_thing | True, '_things': is_thing, '_stuff': ~is_thing}
  return {
    name + group: _mean(values[(weight > 0) & members])
    for group, members in groups.items()
    for name, values in figures.items()
  }


def _mean(values) -> float:
  return float(values.mean()) if len(values) else float('nan')
