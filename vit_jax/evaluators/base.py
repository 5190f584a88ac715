"""The interface of an evaluator: how a trained model is measured.

An evaluator is a class. Most look at each batch of a split once: these inherit from
`BatchEvaluator`, and those of a split share a pass over its images. Others, such as
probes, have the attributes of `Evaluator`. A task names its own (Task.evaluators), and
`config.evaluators` adds further ones; docs/extend.md has an example.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import functools
import time
from typing import Any, ClassVar, Protocol

from etils import epath
import jax

from vit_jax.data import records
from vit_jax.distributed import sharding
from vit_jax.inference import engine
from vit_jax.run import evaluators as run_evaluators, metrics as metrics_lib


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """What the evaluators of a split share.

  Attributes:
    task: the task of the model, a vit_jax.tasks.base.Task.
    mesh: the mesh of its parameters.
    split: name of the split, such as 'test' or 'train[:10%]'.
    open_split: function (split, further features, data set) -> source. An evaluator may
      open further splits, such as the training data for a probe; another data set than
      the evaluation's has its own classes.
    workdir: folder of the run in training, else None.
  """

  task: Any
  mesh: jax.sharding.Mesh
  split: str = ''
  open_split: Callable[..., Any] | None = None
  workdir: Any = None

  @functools.cached_property
  def source(self) -> Any:
    """The images of the split, a vit_jax.data.sources.Source; all processes open it."""
    assert self.open_split is not None
    return self.open_split(self.split)

  def compute(
    self, function: Callable[[dict], Any], stop: Callable[[], bool] = engine.never
  ) -> Iterator[Any]:
    """Yields what a compiled function returns for each batch, as NumPy arrays.

    Batches have the arrays [B, ...] of the task's `example`, and `mask`, float32 [B],
    which is 0 for the rows that pad the last batch. All processes get replicated results
    whole, and of others their own rows.
    """
    return engine.split(self.task, self.source, self.mesh, function, stop)


class Evaluator(Protocol):
  """Measures a model on a split.

  The constructor gets the Evaluation and the further keys of the entry of
  `config.evaluators` as keyword arguments; their annotations are checked as types of
  configs/schema.py. It checks the data, and computes nothing.

  Attributes:
    metrics: the metrics by name. If they depend on the config or on arguments, a class
      method (config, **arguments) that returns them. An instance can replace it if the
      data decide which metrics there are.
    final: whether to run only after the last update.
  """

  metrics: Mapping[str, metrics_lib.Metric] | Callable[..., Any]
  final: ClassVar[bool] = False

  def run(
    self, params: Any, extra: Any, stop: Callable[[], bool]
  ) -> Mapping[str, float]:
    """Returns the value of each metric, and further numbers, by name.

    All processes of the mesh make the same calls. `stop` is called between batches; once
    it returns True, vit_jax.inference.engine.Stopped is raised.
    """


class BatchEvaluator(abc.ABC):
  """An evaluator that looks at each batch of a split once, see `Evaluator`.

  Attributes:
    evaluation: the Evaluation.
    per_process: whether each process gets only the results of its own images, since they
      are large, instead of those of all images.
  """

  metrics: Any  # See Evaluator.
  final: ClassVar[bool] = False
  per_process: ClassVar[bool] = False

  def __init__(self, evaluation: Evaluation) -> None:
    self.evaluation = evaluation

  @abc.abstractmethod
  def compute(self, params: Any, extra: Any, batch: Mapping[str, jax.Array]) -> Any:
    """Returns what is measured on a batch, a tree of arrays; JAX traces it.

    Rows whose `mask` is 0 pad the last batch.
    """

  def reduce(self, results: Any) -> Any:
    """Returns what to keep of `compute`'s results for a batch, NumPy arrays."""
    return results

  @abc.abstractmethod
  def finish(self, results: Sequence[Any]) -> Mapping[str, float]:
    """Returns the metrics from what `reduce` has returned for all batches."""

  @functools.cached_property
  def _alone(self) -> 'Pass':
    return Pass(self.evaluation, [self])

  def run(
    self, params: Any, extra: Any, stop: Callable[[], bool] = engine.never
  ) -> dict[str, float]:
    """Evaluates alone, see `Pass.run`."""
    return self._alone.run(params, extra, stop)


class Pass:
  """Evaluates a split by several BatchEvaluators of it, in one pass over its images.

  One program, `compute`, measures a batch for all of them, so that XLA computes the outputs
  of the model once.
  """

  def __init__(
    self, evaluation: Evaluation, evaluators: Sequence[BatchEvaluator]
  ) -> None:
    self._evaluation = evaluation
    self._evaluators = evaluators
    self.final = evaluators[0].final
    replicated = sharding.replicated(evaluation.mesh)
    rows = sharding.batch_sharding(evaluation.mesh)

    def compute(params: Any, extra: Any, batch: dict[str, jax.Array]) -> Any:
      count = (batch['mask'] > 0).sum()
      return count, [x.compute(params, extra, batch) for x in evaluators]

    shardings = [rows if x.per_process else replicated for x in evaluators]
    self.compute = jax.jit(compute, out_shardings=(replicated, shardings))

  @property
  def metrics(self) -> Mapping[str, metrics_lib.Metric]:
    """The metrics of all evaluators by name."""
    metrics: dict[str, metrics_lib.Metric] = {}
    for evaluator in self._evaluators:
      metrics |= evaluator.metrics
    return metrics

  def run(
    self, params: Any, extra: Any, stop: Callable[[], bool] = engine.never
  ) -> dict[str, float]:
    """Returns what the evaluators do, `num_examples` and `img_sec_core`.

    `img_sec_core` is images per second and device.
    """
    start_time = time.perf_counter()
    first_end = None

    def compute(batch: dict[str, jax.Array]) -> Any:
      nonlocal first_end
      results = self.compute(params, extra, batch)
      if first_end is None:  # The first batch may compile, so it is not timed.
        jax.block_until_ready(results)
        first_end = time.perf_counter()
      return results

    counts = []
    kept: list[list[Any]] = [[] for _ in self._evaluators]
    for count, results in self._evaluation.compute(compute, stop):
      counts.append(int(count))
      for evaluator, parts, part in zip(self._evaluators, kept, results):
        parts.append(evaluator.reduce(part))
    end_time = time.perf_counter()
    speed = sum(counts) / (end_time - start_time)
    if timed := sum(counts[1:]):
      speed = timed / (end_time - first_end)
    values: dict[str, float] = {}
    for evaluator, parts in zip(self._evaluators, kept):
      finished = evaluator.finish(parts)
      run_evaluators.check_values(evaluator, 'finish', finished)
      values.update(finished)
    values['num_examples'] = sum(counts)
    values['img_sec_core'] = speed / self._evaluation.mesh.size
    return values


def sharing_passes(evaluation: Evaluation, evaluators: Iterable[Any]) -> list[Any]:
  """Returns evaluators of a split, with a Pass in place of the BatchEvaluators."""
  shared: dict[bool, list[BatchEvaluator]] = {}
  others = []
  for evaluator in evaluators:
    if isinstance(evaluator, BatchEvaluator):
      shared.setdefault(evaluator.final, []).append(evaluator)
    else:
      others.append(evaluator)
  return [*(Pass(evaluation, group) for group in shared.values()), *others]


class Reporter(Evaluator, Protocol):
  """An evaluator with a report of its last run, which `vit_jax evaluate --report` writes.

  A task names its class, Task.REPORT.
  """

  def lines(self) -> list[str]:
    """Returns the report as lines to print."""

  def write(self, folder: epath.PathLike, facts: Mapping[str, Any]) -> None:
    """Writes the report to a folder; `facts` about the run are for report.json."""

  def write_predictions(self, path: epath.PathLike, source: records.Source) -> None:
    """Writes a table with a row per image of the source; the ending is its format."""
