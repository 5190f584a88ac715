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
    per_process: whether the results of `compute` are large arrays [B, ...], of which each
      process gets the rows of its own images. By default, all processes get everything.
  """

  metrics: Any  # See Evaluator.
  final: ClassVar[bool] = False
  per_process: ClassVar[bool] = False

  def __init__(self, evaluation: Evaluation) -> None:
    self.evaluation = evaluation

  @abc.abstractmethod
  def compute(self, params: Any, extra: Any, batch: dict[str, jax.Array]) -> Any:
    """Returns what is measured on a batch, a tree of arrays; JAX traces it.

    `batch` has the arrays [B, ...] of the task's `example`; `index`, int32 [B], the number
    of the image in the split; and `mask`, float32 [B], which is 0 for padding.
    """

  def reduce(self, results: Any) -> Any:
    """Returns what to keep of the results for a batch, NumPy arrays, until `finish`."""
    return results

  @abc.abstractmethod
  def finish(self, results: Sequence[Any]) -> Mapping[str, float]:
    """Returns the metrics from what `reduce` has returned for all batches.

    With `per_process`, it merges the results of all processes, several of which may have
    the same image.
    """

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

  One `program` measures a batch for all of them, so that XLA computes the outputs of the
  model once.
  """

  def __init__(
    self, evaluation: Evaluation, evaluators: Sequence[BatchEvaluator]
  ) -> None:
    self._evaluation = evaluation
    self._evaluators = evaluators
    self.final = all(evaluator.final for evaluator in evaluators)
    replicated = sharding.replicated(evaluation.mesh)
    rows = sharding.batch_sharding(evaluation.mesh)

    def program(params: Any, extra: Any, batch: dict[str, jax.Array]) -> Any:
      count = (batch['mask'] > 0).sum()
      return count, [x.compute(params, extra, dict(batch)) for x in evaluators]

    shardings = [rows if x.per_process else replicated for x in evaluators]
    self.program = jax.jit(program, out_shardings=(replicated, shardings))

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
    """Returns the values of all evaluators, `num_examples` and `img_sec_core`.

    `img_sec_core` is images per second and device, without the first batch of each shape.
    Raises ValueError if the split has no images, or an evaluator returns other values than
    its metrics.
    """
    speed = _Speed()

    def timed(batch: dict[str, jax.Array]) -> Any:
      return speed.note(batch, lambda: self.program(params, extra, batch))

    count = 0
    reduced: list[list[Any]] = [[] for _ in self._evaluators]
    for batch_count, results in self._evaluation.compute(timed, stop):
      count += int(batch_count)
      for evaluator, kept, part in zip(self._evaluators, reduced, results):
        kept.append(evaluator.reduce(part))
    per_second = speed.per_second(count)
    if not count:
      raise ValueError(
        f"split='{self._evaluation.split}' has no images: evaluate another split (--split)"
      )
    values: dict[str, float] = {}
    for evaluator, kept in zip(self._evaluators, reduced):
      finished = evaluator.finish(kept)
      run_evaluators.check_values(evaluator, 'finish', finished, values)
      values.update(finished)
    if not self.final:  # The other evaluators of the split have measured these.
      values['num_examples'] = count
      values['img_sec_core'] = per_second / self._evaluation.mesh.size
    return values


class _Speed:
  """Measures images per second, without the first batches of a shape, which compile."""

  def __init__(self) -> None:
    self._start_time = time.perf_counter()
    self._shapes: set[tuple] = set()
    self._first_seconds = 0.0
    self._first_counts: list[jax.Array] = []

  def note(self, batch: Mapping[str, jax.Array], compute: Callable[[], Any]) -> Any:
    """Returns compute(), whose first element is the number of images."""
    shapes = tuple(x.shape for x in batch.values())
    if shapes in self._shapes:
      return compute()
    self._shapes.add(shapes)
    start_time = time.perf_counter()
    results = jax.block_until_ready(compute())
    self._first_seconds += time.perf_counter() - start_time
    self._first_counts.append(results[0])
    return results

  def per_second(self, count: int) -> float:
    """Returns the speed until now, for `count` images; with compilation if no batch is left."""
    seconds = time.perf_counter() - self._start_time
    timed = count - sum(map(int, self._first_counts))
    if timed:
      return timed / (seconds - self._first_seconds)
    return count / seconds


def sharing_passes(evaluation: Evaluation, evaluators: Iterable[Any]) -> list[Any]:
  """Returns evaluators with one Pass, the first, for all BatchEvaluators of a split.

  Evaluators with a `run` of their own, or of another split, remain.
  """
  shared, others = [], []
  for evaluator in evaluators:
    if not isinstance(evaluator, BatchEvaluator):
      others.append(evaluator)
      continue
    if not hasattr(evaluator, 'evaluation'):
      name = type(evaluator).__name__
      raise ValueError(
        f'{name} has no `evaluation`: call super().__init__(evaluation) in its __init__'
      )
    runs_alone = type(evaluator).run is not BatchEvaluator.run
    if runs_alone or evaluator.evaluation is not evaluation:
      others.append(evaluator)
    else:
      shared.append(evaluator)
  return [Pass(evaluation, shared), *others] if shared else others


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
