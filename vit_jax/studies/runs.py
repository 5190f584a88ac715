"""Trains many runs in one workdir, on any number of machines that see it.

Each run has its own folder, workdir/<name>, which vit_jax.predict and
vit_jax.figures.visualize read as that of any run. A finished run has a file
result.json and is not trained again; an interrupted run resumes. Each machine
takes the next run whose folder no other machine has locked (vit_jax/run/lock.py).
"""

import collections
from collections.abc import Mapping, Sequence
import contextlib
import copy
import json
import re
import time
from typing import Any, NamedTuple

import jax
import ml_collections
import msgspec

from vit_jax import checkpoint, console, train
from vit_jax.configs import schema
from vit_jax.distributed import processes
from vit_jax.run import (
  checkpoints as checkpoints_lib,
  config as run_config,
  lock as lock_lib,
  metrics as metrics_lib,
  overrides,
  workdir as workdir_lib,
)
from vit_jax.studies import summaries

say = console.say
# Which checkpoints of a finished run are kept, and how many of them.
CHECKPOINTS = {'all': None, 'newest': 1, 'none': 0}
_RESULT = 'result.json'
_PAUSE = 5.0  # Seconds between two looks at runs that other machines train.
# Keys that may change while a run is trained, but not when it is finished: its
# length, and what is measured.
_FIXED = (
  'total_steps', 'total_epochs', 'warmup_steps', 'warmup_epochs', 'evals',
  'fewshot', 'real_labels',
)  # fmt: skip
# Errors of a single run: the others are trained all the same.
_OWN_ERRORS = (
  ValueError,
  FloatingPointError,
  OSError,
  jax.errors.JaxRuntimeError,
)


class Run(NamedTuple):
  """A run among others: the name of its folder in the workdir, and its config."""

  name: str
  config: ml_collections.ConfigDict


class Failed(ValueError):
  """Some runs failed; raised when all others are finished."""


class _Result(msgspec.Struct, omit_defaults=True):
  """Content of the result.json of a finished run."""

  config: dict[str, Any]  # The keys of _FIXED.
  metrics: dict[str, float] | None = None  # Of the last evaluation.
  diverged: str | None = None  # Error message, if the loss was not finite.

  def describe(self) -> str:
    if self.diverged is not None:
      return f'diverged: {self.diverged.partition(". ")[0]}'
    hidden = ('num_examples', 'img_sec')
    metrics = self.metrics.items()
    shown = {k: v for k, v in metrics if not k.startswith(hidden)}
    return metrics_lib.format_metrics(shown)


class Outcome(NamedTuple):
  """The outcome of runs, by name."""

  workdir: Any  # Folder of the runs.
  # Metrics of the last evaluation of the finished runs.
  results: dict[str, dict[str, float]]
  failed: dict[str, str]  # Errors of runs that the same command tries again.
  # Errors of runs whose loss was not finite; they are not tried again.
  diverged: dict[str, str]

  @property
  def done(self) -> set[str]:
    """Names of the runs that are not trained any more."""
    return {*self.results, *self.diverged}

  def by_seed(self, runs: Sequence[Run], metric: str) -> dict[int, float | None]:
    """Returns a metric by the seeds of runs; None where it is missing."""
    return {run.config.seed: self.results.get(run.name, {}).get(metric) for run in runs}

  def finish(self, allow_diverged: bool = False):
    """Raises Failed if runs failed; to be called after printing the table."""
    reasons = {**self.failed, **({} if allow_diverged else self.diverged)}
    if not reasons:
      return
    remedy = (
      'Run the same command again to retry'
      if self.failed
      else 'To train such a run again, delete its folder'
    )
    raise Failed(
      f"{len(reasons)} runs in workdir='{self.workdir}' failed:\n"
      + '\n'.join(f'  {name}: {reason}' for name, reason in reasons.items())
      + f'\nAll other runs are finished. {remedy}'
    )


def train_all(runs: Sequence[Run], workdir, checkpoints: str = 'newest') -> Outcome:
  """Trains runs one after the other, each in workdir/<name>.

  Finished runs are skipped, interrupted ones resume. Everything that `check`
  checks is checked before the first run starts. If a run fails, the others are
  still trained, see Outcome.finish; but an error of only some of the processes
  ends them all. A run that another machine has locked comes last: it is trained
  here if that machine stops without finishing it.

  Args:
    runs: the runs.
    workdir: folder of all runs.
    checkpoints: a key of CHECKPOINTS: which ones to keep of a finished run.
  """
  check(runs, workdir, checkpoints)
  width = max((len(run.name) for run in runs), default=0)
  heads = {
    run.name: f'  {i:>{len(str(len(runs)))}}/{len(runs)}  {run.name:<{width}}'
    for i, run in enumerate(runs, 1)
  }
  failed, left, waiting = {}, list(runs), False
  while left:
    locked = {}  # Names of runs -> who has locked them.
    for run in left:
      head, began = heads[run.name], time.perf_counter()
      if (result := _read(workdir, run)) is not None:
        say(f'{head}  {result.describe()}, already done')
        continue
      lock = lock_lib.Holder(f'{workdir}/{run.name}')
      try:
        with console.muted():
          other = lock.take()
        if other:
          locked[run.name] = other
          continue
        result = _train(run, workdir, checkpoints, head.strip(), lock)
        say(
          f'{head}  {result.describe()}, {console.duration(time.perf_counter() - began)}'
        )
      except _OWN_ERRORS as e:
        # Processes continue together only if all have the same error. The loss,
        # which FloatingPointError is about, is the same on all of them.
        if not processes.is_common(e) and not isinstance(e, FloatingPointError):
          raise
        failed[run.name] = str(e)
        say(f'{head}  failed: {str(e).splitlines()[0]}')
      finally:
        lock.release()
    if len(locked) == len(left) and not waiting:
      others = ''.join(f'  {name}: {other}\n' for name, other in locked.items())
      say(
        f'Waiting for {len(locked)} runs on other machines:\n{others}'
        'A run whose machine stops resumes here. Ctrl-C stops waiting; run the same '
        'command later to see the table.'
      )
      waiting = True
    left = [run for run in left if run.name in locked]
    if left:
      time.sleep(_PAUSE)
  return collect(runs, workdir, failed)


def _train(run, workdir, checkpoints, title, lock) -> _Result:
  """Trains a run; returns and stores the content of its result.json."""
  folder = f'{workdir}/{run.name}'
  if (result := _read(workdir, run)) is not None:
    return result  # Another machine has just finished it.
  live = contextlib.nullcontext()
  if console.kind_of_output() != 'log':
    live = console.waiting(title, leave=False)
  result = _Result(_fixed(run_config.complete(run.config)))
  with live, console.muted():
    try:
      _, metrics = train.train_and_evaluate(run.config, folder, lock)
      result.metrics = {k: float(v) for k, v in metrics.items() if k != 'step'}
    except FloatingPointError as e:
      result.diverged = str(e)
  lock.check()
  text = json.dumps(msgspec.to_builtins(result), indent=1)
  summaries.write(workdir, f'{run.name}/{_RESULT}', text)
  if CHECKPOINTS[checkpoints] is not None:
    checkpoints_lib.delete_but_newest(folder, CHECKPOINTS[checkpoints])
  return result


@contextlib.contextmanager
def alone(folder):
  """Locks a folder inside a `with` block; waits while another machine has it."""
  lock = lock_lib.Holder(folder)
  while other := lock.take():
    say(f'Waiting for {other}, which works in {folder} ...')
    time.sleep(60)
  try:
    yield
  finally:
    lock.release()


def _fixed(config) -> dict:
  """Returns the values of _FIXED in a complete config, as JSON has them."""
  plain = workdir_lib.to_plain(config)
  return {key: plain[key] for key in _FIXED if key in plain}


def collect(
  runs: Sequence[Run], workdir, failed: Mapping[str, str] | None = None
) -> Outcome:
  """Returns the outcome of runs on this and on other machines.

  `failed` has the errors of this machine; another one may have succeeded.
  """
  found = {run.name: _read(workdir, run) for run in runs}
  found = {name: result for name, result in found.items() if result is not None}
  return Outcome(
    workdir,
    {k: x.metrics for k, x in found.items() if x.metrics is not None},
    {k: why for k, why in (failed or {}).items() if k not in found},
    {k: x.diverged for k, x in found.items() if x.diverged is not None},
  )


def _read(workdir, run) -> _Result | None:
  """Returns the content of a run's result.json; None if the run is not finished."""

  def read():
    file = workdir_lib.folder(workdir) / run.name / _RESULT
    if not file.exists():
      return None
    try:
      found = msgspec.convert(json.loads(file.read_text()), _Result)
      if (found.metrics is None) == (found.diverged is None):
        raise ValueError('it must have either `metrics` or `diverged`')
      return msgspec.to_builtins(found)
    except ValueError as e:
      raise ValueError(
        f"'{file}' is damaged: {e}; delete it and run the same command again to "
        'evaluate the run anew'
      ) from e

  found = processes.from_first(f'reading the result of {run.name}', read)
  return None if found is None else msgspec.convert(found, _Result)


# --- Checking ---


def check_keys(config, known: Mapping[str, Any], of: str):
  """Checks the keys of the config of a study; `of` names it.

  Raises ValueError for an unknown or missing key, or a wrong value.
  """
  for key in config:
    if key not in (*known, 'trainer'):
      schema.raise_unknown(key, known, of=f'the config of {of}')
  for key, kind in known.items():
    if key not in config:
      raise ValueError(f'{of} needs config.{key}')
    schema.check(key, config[key], kind)


def check(runs: Sequence[Run], workdir, checkpoints: str = 'newest'):
  """Checks all that can be checked before the first run starts; writes nothing."""
  if checkpoints not in CHECKPOINTS:
    raise ValueError(
      f'checkpoints={checkpoints!r} is unknown: use one of {list(CHECKPOINTS)}'
    )
  names = collections.Counter(run.name for run in runs)
  for name, count in names.items():
    if not re.fullmatch(r'[\w=+,@-][\w.=+,@-]*', name):
      raise ValueError(
        f"run '{name}': the name of a run must be that of a folder, of letters, digits "
        'and ._-+=,@'
      )
    if count > 1:
      raise ValueError(f"run '{name}' occurs {count} times: names of runs must differ")
  for run in runs:
    try:
      _check_run(run, f'{workdir}/{run.name}', _read(workdir, run))
    except (ValueError, FileNotFoundError) as e:
      raise type(e)(f"run '{run.name}': {e}") from e


def _check_run(run, folder, result):
  """Checks a run's config, and its folder if the run was started."""
  config = run_config.complete(run.config)
  workdir_lib.keep_dtype(folder, config)
  train.check(config)
  workdir_lib.check_config(folder, config, moved=result is None)
  if result is None:
    checkpoint.check_exists(config)
    return
  fixed = _fixed(config)
  if differing := workdir_lib.differences(result.config, fixed, common=True):
    raise ValueError(
      f"workdir='{folder}' holds a finished run with another config:\n  "
      + '\n  '.join(differing)
      + '\nUse another --workdir, or delete that folder to train the run anew'
    )
  if result.metrics is not None and config.best_metric not in result.metrics:
    raise ValueError(
      f"'{folder}/{_RESULT}' has no {config.best_metric}, but "
      f'{list(result.metrics)}: delete it and run the same command again to '
      'evaluate the run anew'
    )


# --- Variants and seeds ---


def named(runs: Sequence[Run], name: str) -> list[Run]:
  """Returns the run with a name; raises ValueError if there is none."""
  found = [run for run in runs if run.name == name]
  if not found:
    names = ', '.join(run.name for run in runs)
    raise ValueError(f"run='{name}' is not one of the runs {names} (--run)")
  return found


def over_seeds(
  name: str, config: ml_collections.ConfigDict, seeds: Sequence[int]
) -> list[Run]:
  """Returns a run of a config for each seed, NAME_0, NAME_1, ..."""
  return [Run(f'{name}_{seed}', seeded(config, seed)) for seed in seeds]


def seeded(config: ml_collections.ConfigDict, seed: int) -> ml_collections.ConfigDict:
  """Returns a copy of a run's config with a seed, also in its splits.

  The seed replaces '{seed}' in pp.train and pp.test, for draws of labels.
  """
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
  """Returns a complete copy of a run's config with other values.

  `changes` are values by dotted key: {'base_lr': 0.01,
  'model.transformer.num_layers': 2}. The keys are checked, the values are not.
  A whole group, such as `model`, is replaced. A length in steps replaces the
  length in epochs, and vice versa.
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
      inside, prefix = group[name], f'{prefix}{name}.'
    with group.unlocked(), group.ignore_type():
      group[name] = value
      other = overrides.other_length(key)
      if other and other not in changes:
        config[other] = None
    if key == 'model':
      config = run_config.complete(config)  # With the options of the model.
  return config
