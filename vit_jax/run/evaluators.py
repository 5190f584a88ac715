"""The evaluators of a run, from its task and its config.

All are entries of the same form. `config.evaluators` has entries by name, such as
{'ece': {'type': 'my_module:Calibration', 'bins': 10}}; `config.fewshot`,
`config.layer_probe` and `config.real_labels` are short for entries of evaluators of this
package. vit_jax/evaluators/base.py describes the classes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import inspect
from typing import Any

import ml_collections
import numpy as np

from vit_jax import user_code
from vit_jax.configs import schema
from vit_jax.run import config as run_config, metrics as metrics_lib

Metrics = Mapping[str, metrics_lib.Metric]
# Method of an evaluator, see vit_jax/evaluators/base.py -> its arguments.
_METHODS = {
  'run': ('self', 'params', 'extra', 'stop'),
  'compute': ('self', 'params', 'extra', 'batch'),
  'reduce': ('self', 'results'),
  'finish': ('self', 'results'),
}
# Values that every evaluation has.
_RESERVED = ('num_examples', 'img_sec_core')
# Evaluators that have keys of their own.
_FEW_SHOT = 'vit_jax.evaluators.probes:FewShot'
_LAYER_PROBE = 'vit_jax.evaluators.probes:LayerProbe'
_REAL = 'vit_jax.evaluators.real:Real'


@dataclasses.dataclass(frozen=True)
class Entry:
  """An evaluator of a run.

  Attributes:
    key: names the entry in errors, such as 'evaluators.ece'.
    cls: the class, see vit_jax/evaluators/base.py.
    arguments: keyword arguments of the class.
    evals: names of the evaluations that have it; None for all.
  """

  key: str
  cls: type[Any]
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  evals: tuple[str, ...] | None = None

  def metrics(self, config: ml_collections.ConfigDict) -> Metrics:
    """Returns the metrics by name, without the name of an evaluation."""
    metrics = self.cls.metrics
    return metrics(config, **self.arguments) if callable(metrics) else metrics

  def make(self, evaluation: Any) -> Any:
    """Makes the evaluator of an evaluation, a vit_jax.evaluators.base.Evaluation."""
    evaluator = self.cls(evaluation, **self.arguments)
    if callable(evaluator.metrics):
      evaluator.metrics = self.metrics(evaluation.task.config)
    return evaluator

  def is_in(self, evaluation: str) -> bool:
    """Returns whether an evaluation has this evaluator."""
    return self.evals is None or evaluation in self.evals


def task_entries(config: ml_collections.ConfigDict) -> list[Entry]:
  """Returns the evaluators of the task of a complete config."""
  task_class = run_config.get_task(config.task)
  return [Entry(f"task '{config.task}'", cls) for cls in task_class.evaluators(config)]


def config_entries(
  config: ml_collections.ConfigDict, trusted: bool = True
) -> list[Entry]:
  """Returns the evaluators in `config.evaluators`; ValueError for a wrong entry.

  Of a stored config, which is not `trusted`, only evaluators whose modules may be
  imported are returned.
  """
  entries = []
  for name, fields in config.evaluators.items():
    module = fields['type'].partition(':')[0]
    if trusted or user_code.is_trusted(module):
      entries.append(_parse(f'evaluators.{name}', fields))
  return entries


def check_trusted(stored: Mapping[str, Any]) -> None:
  """Raises ValueError if a stored `config.evaluators` has code of a stranger."""
  for name, fields in stored.items():
    user_code.check_trusted(fields['type'].partition(':')[0], f"its evaluator '{name}'")


def run_entries(config: ml_collections.ConfigDict, trusted: bool = True) -> list[Entry]:
  """Returns all evaluators of a run; for `trusted` see `config_entries`."""
  entries = task_entries(config)
  for key, fields in _of_keys(config).items():
    entries.append(_parse(key, fields))
  return entries + config_entries(config, trusted)


def real_labels(path: str) -> Entry:
  """Returns the evaluator for a file of ImageNet ReaL labels."""
  return _parse('real_labels', {'type': _REAL, 'path': path})


def report(config: ml_collections.ConfigDict) -> Entry:
  """Returns the evaluator of the report of a config's task; ValueError if it has none."""
  reporter_class = run_config.get_task(config.task).REPORT
  if reporter_class is None:
    raise ValueError(
      f"the task '{config.task}' has no report: leave out --report and --predictions"
    )
  return Entry('report', reporter_class)


def _of_keys(config: ml_collections.ConfigDict) -> dict[str, dict[str, Any]]:
  """Returns the entries that keys of their own stand for, of the first evaluation."""
  first = run_config.evaluations(config)[0].name
  entries: dict[str, dict[str, Any]] = {}
  if config.fewshot.shots or config.fewshot.knn:
    entries['fewshot'] = {'type': _FEW_SHOT, **config.fewshot}
  if config.layer_probe:
    entries['layer_probe'] = {'type': _LAYER_PROBE, 'images': config.layer_probe}
  if config.real_labels is not None:
    entries['real_labels'] = {'type': _REAL, 'path': config.real_labels}
  for fields in entries.values():
    fields['evals'] = (first,)
  return entries


def _parse(key: str, fields: Mapping[str, Any]) -> Entry:
  """Returns the entry of a key; ValueError if class or arguments are wrong."""
  arguments = {name: _plain(value) for name, value in fields.items()}
  setting = f"{key}.type='{fields['type']}'"
  cls = run_config.get_evaluator(key, arguments.pop('type'))
  lacking = {name for name in ('metrics', 'run') if not hasattr(cls, name)}
  lacking |= getattr(cls, '__abstractmethods__', frozenset())
  if lacking:
    raise ValueError(
      f'{setting} lacks {", ".join(sorted(lacking))}: an evaluator needs `metrics`, and '
      '`compute` and `finish` of vit_jax.evaluators.base.BatchEvaluator, from which it '
      f'inherits, or `run` (config.{key}.type)'
    )
  for name, names in _METHODS.items():
    try:
      if hasattr(cls, name):
        inspect.signature(getattr(cls, name)).bind(*names)
    except TypeError as e:
      raise ValueError(
        f'{setting}: its method must be {name}({", ".join(names)}): {e} '
        f'(config.{key}.type)'
      ) from e
  evals = arguments.pop('evals', None)
  schema.check(f'{key}.evals', evals, tuple[str, ...] | None)
  _check_arguments(key, setting, cls, arguments)
  return Entry(key, cls, arguments, evals)


def _plain(value: Any) -> Any:
  """Returns an argument as the user wrote it: stored tuples are lists."""
  if isinstance(value, ml_collections.ConfigDict):
    return value.to_dict()
  return tuple(value) if isinstance(value, list) else value


def _check_arguments(
  key: str, setting: str, cls: type, arguments: Mapping[str, Any]
) -> None:
  """Raises ValueError unless a class takes the arguments of an entry."""
  signature = inspect.signature(cls)
  try:
    signature.bind(None, **arguments)
  except TypeError as e:
    names = [*signature.parameters][1:]
    raise ValueError(
      f'{setting}: {e}; its arguments are {", ".join(names) or "none"} (config.{key})'
    ) from e
  for name, parameter in signature.parameters.items():
    if name in arguments and schema.is_kind(parameter.annotation):
      schema.check(f'{key}.{name}', arguments[name], parameter.annotation)


# --- Metrics ---


def run(
  evaluator: Any, params: Any, extra: Any, stop: Callable[[], bool]
) -> Mapping[str, Any]:
  """Runs an evaluator; ValueError unless it returns a number for each metric."""
  values = evaluator.run(params, extra, stop)
  check_values(evaluator, 'run', values)
  return values


def check_values(
  evaluator: Any, method: str, values: Any, others: Collection[str] = ()
) -> None:
  """Raises ValueError unless the result of a method has a number for each metric.

  `others` are names of values that other evaluators have returned. The metrics of an
  evaluator that no Entry has made may be unknown, a function.
  """
  metrics = [] if callable(evaluator.metrics) else [*evaluator.metrics]
  form = f'return a dict with a number for each of {metrics} (a task: from `measure`)'
  name = f'{type(evaluator).__name__}.{method}'
  if not isinstance(values, Mapping) or any(map(np.ndim, values.values())):
    raise ValueError(f'{method}={values!r:.200}, the result of {name}: {form}')
  if missing := sorted(set(metrics) - values.keys()):
    raise ValueError(
      f'{method}={[*values]}, the result of {name}, lacks {missing}: {form}'
    )
  if repeated := sorted(values.keys() & set(others)):
    raise ValueError(
      f'{method}={[*values]}, the result of {name}: another evaluator returns '
      f'{repeated} too, use other names'
    )


def measures(entries: Sequence[Entry], config: ml_collections.ConfigDict) -> Metrics:
  """Returns the metrics of evaluators by name, without names of evaluations."""
  measured: dict[str, metrics_lib.Metric] = {}
  for entry in entries:
    measured |= entry.metrics(config)
  return measured


def metrics_of(
  config: ml_collections.ConfigDict, entries: Sequence[Entry] | None = None
) -> Metrics:
  """Returns the metrics of a run by name, such as 'accuracy_test'.

  `entries` are the evaluators, by default all of the run.
  """
  entries = run_entries(config) if entries is None else entries
  metrics: dict[str, metrics_lib.Metric] = {}
  for evaluation in run_config.evaluations(config):
    for entry in entries:
      if entry.is_in(evaluation.name):
        for name, metric in entry.metrics(config).items():
          metrics[f'{name}_{evaluation.name}'] = metric
  return metrics


def is_low(config: ml_collections.ConfigDict) -> bool:
  """Returns whether the best checkpoint has the lowest `best_metric`."""
  return metrics_of(config)[config.best_metric].low


def check(config: ml_collections.ConfigDict) -> None:
  """Checks a complete config, its evaluators and its best metric.

  Raises ValueError for a wrong value.
  """
  run_config.check_values(config)
  entries = run_entries(config)
  for entry in entries:
    _check_evals(entry, config)
  for evaluation in run_config.evaluations(config):
    entries_of_split = [entry for entry in entries if entry.is_in(evaluation.name)]
    check_entries(entries_of_split, config)
  # Metrics of the last step cannot compare checkpoints.
  repeated = [entry for entry in entries if not getattr(entry.cls, 'final', False)]
  metrics = [*metrics_of(config, repeated)]
  if config.best_metric not in metrics:
    raise ValueError(
      f"best_metric='{config.best_metric}' is not among the metrics of this "
      f'run: use one of {metrics} (config.best_metric)'
    )


def _check_evals(entry: Entry, config: ml_collections.ConfigDict) -> None:
  """Raises ValueError if an entry is for an evaluation that the run lacks."""
  names = [evaluation.name for evaluation in run_config.evaluations(config)]
  if unknown := sorted(set(entry.evals or ()) - set(names)):
    raise ValueError(
      f"{entry.key}.evals={entry.evals}: this run has no evaluation '{unknown[0]}', "
      f'use {", ".join(names)} (config.{entry.key}.evals, config.evals)'
    )


def check_entries(entries: Sequence[Entry], config: ml_collections.ConfigDict) -> None:
  """Raises ValueError unless the evaluators of an evaluation have different metrics."""
  measured_by: dict[str, str] = {}
  for entry in entries:
    for metric in _checked_metrics(entry, config):
      if metric in _RESERVED:
        raise ValueError(
          f"{entry.key} measures '{metric}', which every evaluation has: choose another "
          f'name (config.{entry.key})'
        )
      if metric in measured_by:
        raise ValueError(
          f"{measured_by[metric]} and {entry.key} measure the same metric '{metric}': "
          'leave out one of them, or name their metrics by an argument of the class '
          f'(config.{entry.key})'
        )
      measured_by[metric] = entry.key


def _checked_metrics(entry: Entry, config: ml_collections.ConfigDict) -> Metrics:
  """Returns the metrics of an entry; ValueError if its class does not define them."""
  try:
    metrics = entry.metrics(config)
  except ValueError as e:
    raise ValueError(f'{entry.key}: {e}') from e
  is_mapping = isinstance(metrics, Mapping)
  if not is_mapping or not all(
    isinstance(kind, metrics_lib.Metric) for kind in metrics.values()
  ):
    raise ValueError(
      f'{entry.key}: metrics={metrics!r} of {entry.cls.__name__} must be a dict such '
      "as {'ece': metrics.Metric('%', low=True)}, see vit_jax/run/metrics.py"
    )
  return metrics
