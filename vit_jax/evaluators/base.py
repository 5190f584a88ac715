"""The interface of an evaluator: how a trained model is measured.

An evaluator is a class, which need not inherit from `Evaluator`. A task names its own
(Task.evaluators), and `config.evaluators` adds further ones; docs/extend.md has an
example.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
from typing import Any, ClassVar, Protocol

from etils import epath
import jax

from vit_jax.data import records
from vit_jax.inference import engine
from vit_jax.run import metrics as metrics_lib


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
