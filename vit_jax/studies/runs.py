"""Trains many runs in one workdir.

Each run has its own folder, workdir/<name>, which `vit_jax predict` and other
commands read like any other run. A finished run has a file result.json and is not
trained again; an interrupted run resumes. A scheduler may train each run by a process
of its own (vit_jax/commands/run_flags.py).
"""

import collections
from collections.abc import Collection, Mapping, Sequence
import contextlib
import copy
import json
import re
import time
from typing import Any, NamedTuple

from etils import epath
import jax
import ml_collections
import msgspec

from vit_jax import checkpoint, console, train
from vit_jax.configs import schema
from vit_jax.distributed import files, processes
from vit_jax.run import (
  checkpoints as checkpoints_lib,
  config as run_config,
  evaluators as run_evaluators,
  lock as lock_lib,
  metrics as metrics_lib,
  overrides,
  workdir as workdir_lib,
)
from vit_jax.studies import summaries

_RESULT = 'result.json'
_AGAIN = 'delete it and run the same command again to evaluate the run anew'
# Errors of a single run, which do not stop the others.
_RUN_ERRORS = (ValueError, FloatingPointError, OSError, jax.errors.JaxRuntimeError)


class Run(NamedTuple):
  """The name of a run, which is also its folder in the workdir, and its config."""

  name: str
  config: ml_collections.ConfigDict


class Failed(ValueError):
  """Some runs failed; raised once all others are finished."""


class _Result(msgspec.Struct, omit_defaults=True):  # type: ignore[call-arg]
  """Content of the result.json of a finished run."""

  config: dict[str, Any]  # Lengths and what was measured, see `_measured`.
  metrics: dict[str, float] | None = None  # Metrics of the last evaluation.
  diverged: str | None = None  # Error message, if the loss was not finite.

  def describe(self, kinds: Mapping[str, metrics_lib.Metric]) -> str:
    """Formats the result of a run with these metrics."""
    if self.diverged is not None:
      return f'diverged: {self.diverged.partition(". ")[0]}'
    hidden = ('num_examples', 'img_sec')
    metrics = self.metrics or {}
    values = {k: v for k, v in metrics.items() if not k.startswith(hidden)}
    return metrics_lib.format_metrics(values, kinds)


class Outcome(NamedTuple):
  """The outcome of the runs in a workdir, by name."""

  workdir: Any
  results: dict[str, dict[str, float]]  # Metrics of the last evaluation.
  failed: dict[str, str]  # Errors of runs that the same command trains again.
  diverged: dict[str, str]  # Errors of runs whose loss was not finite.

  @property
  def done(self) -> set[str]:
    """Names of the runs that are not trained again."""
    return {*self.results, *self.diverged}

  def by_seed(self, runs: Sequence[Run], metric: str) -> dict[int, float | None]:
    """Returns a metric by the seeds of runs; None where it is missing."""
    values = {}
    for run in runs:
      metrics = self.results.get(run.name, {})
      values[run.config.seed] = metrics.get(metric)
    return values

  def finish(self, allow_diverged: bool = False) -> None:
    """Raises Failed if runs failed; call it after printing the table."""
    reasons = dict(self.failed)
    if not allow_diverged:
      reasons.update(self.diverged)
    if not reasons:
      return
    remedy = 'To train such a run again, delete its folder'
    if self.failed:
      remedy = 'Run the same command again to retry'
    lines = '\n'.join(f'  {name}: {reason}' for name, reason in reasons.items())
    raise Failed(
      f"{console.pluralize(len(reasons), 'run')} in workdir='{self.workdir}' failed:\n{lines}\n"
      f'All other runs are finished. {remedy}'
    )


def train_all(
  runs: Sequence[Run], workdir: epath.PathLike, checkpoints: schema.Kept = 'newest'
) -> Outcome:
  """Trains runs one after the other, each in workdir/<name>.

  Finished runs are skipped, interrupted ones resume. Calls `check` first. If a run
  fails, or another process is training it, the others are still trained, see
  Outcome.finish; but an error of only some of the processes ends them all.
  `checkpoints` says which ones to keep of a finished run.
  """
  check(runs, workdir, checkpoints)
  width = max((len(run.name) for run in runs), default=0)
  failed: dict[str, str] = {}
  logged: set[str] = set()  # Lines of the runs that are printed once.
  for i, run in enumerate(runs, 1):
    title = f'{i:>{len(str(len(runs)))}}/{len(runs)}  {run.name:<{width}}'
    try:
      _train(run, workdir, checkpoints, title, logged)
    except _RUN_ERRORS as e:
      # Processes continue together only if all have the same error. The loss,
      # which FloatingPointError is about, is the same on all of them.
      if not processes.is_common(e) and not isinstance(e, FloatingPointError):
        raise
      failed[run.name] = str(e)
      console.log(f'  {title}  failed: {str(e).splitlines()[0]}')
  return collect(runs, workdir, failed)


def _train(
  run: Run,
  workdir: epath.PathLike,
  checkpoints: schema.Kept,
  title: str,
  logged: set[str],
) -> None:
  """Trains a run unless it is finished."""
  start_time = time.perf_counter()
  kinds = run_evaluators.metrics_of(run_config.complete(run.config))
  if (result := _read(workdir, run)) is not None:
    console.log(f'  {title}  {result.describe(kinds)}, already done')
    return
  with lock_lib.Holder(f'{workdir}/{run.name}') as lock:
    # Another process may have just finished it.
    if (result := _read(workdir, run)) is None:
      result = _train_locked(run, workdir, checkpoints, title, lock, logged)
  duration = console.duration(time.perf_counter() - start_time)
  console.log(f'  {title}  {result.describe(kinds)}, {duration}')


def _train_locked(
  run: Run,
  workdir: epath.PathLike,
  checkpoints: schema.Kept,
  title: str,
  lock: lock_lib.Holder,
  logged: set[str],
) -> _Result:
  """Trains a run; returns and writes its result. For `logged` see console.muted."""
  folder = f'{workdir}/{run.name}'
  live: contextlib.AbstractContextManager = contextlib.nullcontext()
  if console.kind_of_output() != 'log':
    live = console.status(title, leave=False)
  result = _Result(_measured(run_config.complete(run.config)))
  with live, console.muted(logged):
    try:
      _, metrics = train.train_and_evaluate(run.config, folder, lock)
      values = metrics or {}
      result.metrics = {k: float(v) for k, v in values.items() if k != 'step'}
    except FloatingPointError as e:
      result.diverged = str(e)
  lock.check()
  text = json.dumps(msgspec.to_builtins(result), indent=1)
  summaries.write(workdir, f'{run.name}/{_RESULT}', text)
  if checkpoints != 'all':
    checkpoints_lib.delete_but_newest(folder, 1 if checkpoints == 'newest' else 0)
  return result


def _measured(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns the keys that may not change once a run is finished, in types of JSON."""
  plain = workdir_lib.to_plain(config)
  keys = run_config.marked_keys(config, schema.LENGTH, schema.MEASURED)
  return {key: plain[key] for key in keys if key in plain}


def collect(
  runs: Sequence[Run], workdir: epath.PathLike, failed: Mapping[str, str] | None = None
) -> Outcome:
  """Returns the outcome of runs.

  `failed` are errors by name; another process may have finished such a run since.
  """
  outcome = Outcome(workdir, {}, dict(failed or {}), {})
  for run in runs:
    result = _read(workdir, run)
    if result is None:
      continue
    outcome.failed.pop(run.name, None)
    if result.metrics is not None:
      outcome.results[run.name] = result.metrics
    if result.diverged is not None:
      outcome.diverged[run.name] = result.diverged
  return outcome


def _read(workdir: epath.PathLike, run: Run) -> _Result | None:
  """Returns the result of a run; None if the run is not finished."""

  def read() -> dict[str, Any] | None:
    file = workdir_lib.folder(workdir) / run.name / _RESULT
    if not file.exists():
      return None
    try:
      result = msgspec.convert(files.read_json(file), _Result)
      if (result.metrics is None) == (result.diverged is None):
        raise ValueError('it must have either `metrics` or `diverged`')
      return msgspec.to_builtins(result)
    except ValueError as e:
      raise ValueError(f"'{file}' is damaged: {e}; {_AGAIN}") from e

  fields = processes.from_first(f'reading the result of {run.name}', read)
  return msgspec.convert(fields, _Result | None)


# --- Checking ---


def complete(
  config: ml_collections.ConfigDict, group: type, of: str
) -> ml_collections.ConfigDict:
  """Returns a copy of a study's config, checked and completed by a dataclass.

  `of` names the study. Raises ValueError for an unknown or missing key, or a wrong
  value.
  """
  config = copy.deepcopy(config)
  schema.fill(config, group)
  schema.check_group(config, group)
  for key in schema.fields(group):
    if key not in config:
      raise ValueError(f'{of} needs config.{key}')
  return config


def check_metric(metric: str, metrics: Collection[str], owner: str) -> None:
  """Raises ValueError if a metric is not among the metrics of `owner`."""
  if metric not in metrics:
    raise ValueError(
      f"metric='{metric}' is not among the metrics of {owner}: use one of {[*metrics]} "
      '(config.metric)'
    )


def check(
  runs: Sequence[Run], workdir: epath.PathLike, checkpoints: schema.Kept = 'newest'
) -> None:
  """Checks all that can be checked before the first run starts; writes nothing."""
  schema.check('checkpoints', checkpoints, schema.Kept, '--')
  names = collections.Counter(run.name for run in runs)
  for run in runs:
    if not re.fullmatch(r'[\w=+,@-][\w.=+,@-]*', run.name):
      raise ValueError(
        f"run '{run.name}': the name of a run must be a valid folder name, of letters, "
        'digits and ._-+=,@'
      )
    if (count := names[run.name]) > 1:
      raise ValueError(
        f"run '{run.name}' occurs {count} times: names of runs must differ"
      )
    try:
      _check_run(run, f'{workdir}/{run.name}', _read(workdir, run))
    except (ValueError, FileNotFoundError) as e:
      raise type(e)(f"run '{run.name}': {e}") from e


def _check_run(run: Run, folder: epath.PathLike, result: _Result | None) -> None:
  """Checks a run's config, and its folder if the run was started."""
  config = run_config.complete(run.config)
  workdir_lib.keep_dtype(workdir_lib.stored_config(folder), config)
  train.check(config)
  workdir_lib.check_config(folder, config, finished=result is not None)
  if result is None:
    checkpoint.check_exists(config)
    return
  if differing := workdir_lib.differences(
    result.config, _measured(config), common=True
  ):
    raise ValueError(
      f"workdir='{folder}' holds a finished run with another config:\n  "
      + '\n  '.join(differing)
      + '\nUse another --workdir, or delete that folder to train the run again'
    )
  if result.metrics is not None and config.best_metric not in result.metrics:
    raise ValueError(
      f"'{folder}/{_RESULT}' has no {config.best_metric}, but "
      f'{list(result.metrics)}: {_AGAIN}'
    )


# --- Variants and seeds ---


def select(runs: Sequence[Run], name: str) -> list[Run]:
  """Returns the run with a name; raises ValueError if there is none."""
  matches = [run for run in runs if run.name == name]
  if not matches:
    names = ', '.join(run.name for run in runs)
    raise ValueError(f"run='{name}' is not one of the runs {names} (--run)")
  return matches


def over_seeds(
  name: str, config: ml_collections.ConfigDict, seeds: Sequence[int]
) -> list[Run]:
  """Returns a run of a config for each seed: NAME_0, NAME_1, ..."""
  return [Run(f'{name}_{seed}', seeded(config, seed)) for seed in seeds]


def seeded(config: ml_collections.ConfigDict, seed: int) -> ml_collections.ConfigDict:
  """Returns a copy of a run's config with a seed, see common.Seeded."""
  config = copy.deepcopy(config)
  config.seed = seed
  for split in ('train', 'test'):
    config.pp[split] = with_seed(config.pp[split], seed)
  return config


def with_seed(split: str, seed: int) -> str:
  """Returns the split of a seed: 'few_1' for 'few_{seed}'."""
  return split.replace('{seed}', str(seed))


def changed(
  config: ml_collections.ConfigDict, changes: Mapping[str, Any]
) -> ml_collections.ConfigDict:
  """Returns a complete copy of a run's config with changed values, by dotted key.

  The keys are checked, the values are not. A whole group, such as `model`, is
  replaced. A length in steps replaces the length in epochs, and vice versa.
  """
  config = run_config.complete(config)
  for key, value in changes.items():
    inside, prefix = config, ''
    for name in key.split('.'):
      group = inside
      if not isinstance(group, ml_collections.ConfigDict):
        raise ValueError(f"'{prefix.rstrip('.')}' is not a group of keys")
      if name not in group:
        schema.raise_unknown(name, group.keys(), prefix)
      inside = group[name]
      prefix = f'{prefix}{name}.'
    with group.unlocked(), group.ignore_type():
      group[name] = value
      length = overrides.other_length(key)
      if length and length not in changes:
        config[length] = None
    if key == 'model':
      config = run_config.complete(config)  # With the options of the model.
  return config
