"""Trains many runs in one workdir, on any number of machines that see it.

Each run has a folder of its own, workdir/<name>, as if it had been started
alone: vit_jax.predict and vit_jax.figures.visualize read it. A run that is done has a
file result.json, and is not trained again; a run that was interrupted goes on.
Each machine takes the next run that no other one holds (vit_jax/run/lock.py).
"""

import collections
from collections.abc import Mapping, Sequence
import contextlib
import copy
import json
import re
import statistics
import time
from typing import Any, NamedTuple

import jax
import ml_collections

from vit_jax import checkpoint, console, train
from vit_jax.configs import schema
from vit_jax.distributed import processes
from vit_jax.run import (
  checkpoints as checkpoints_lib,
  config as run_config,
  lock as lock_lib,
  metrics as metrics_lib,
  workdir as workdir_lib,
)
from vit_jax.studies import summaries

say = console.say
# Which checkpoints of a run are kept when the run is done, and how many of them.
CHECKPOINTS = {'all': None, 'newest': 1, 'none': 0}
_RESULT = 'result.json'
_PAUSE = 5.0  # Seconds between two looks at runs that others hold.
# Keys that may change while a run goes on, but not after it is done: how long it
# is, and what is measured.
_FIXED = (
  'total_steps', 'total_epochs', 'warmup_steps', 'warmup_epochs', 'evals',
  'fewshot', 'real_labels',
)  # fmt: skip
# Errors of one run that leave the others possible.
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
  """Some runs failed; it is raised when all others are done."""


class Outcome(NamedTuple):
  """What has become of runs, by name."""

  workdir: Any  # Their folder.
  # Metrics of the last evaluation of those that are done.
  results: dict[str, dict[str, float]]
  failed: dict[str, str]  # Why others failed; the same command tries again.
  # What was said of those whose loss was not finite; they are not tried again.
  diverged: dict[str, str]

  @property
  def done(self) -> set[str]:
    """Names of the runs that are not to be trained any more."""
    return {*self.results, *self.diverged}

  def by_seed(self, runs: Sequence[Run], metric: str) -> dict[int, float | None]:
    """Returns a metric by the seeds of runs; None where it is missing."""
    return {run.config.seed: self.results.get(run.name, {}).get(metric) for run in runs}

  def finish(self, allow_diverged: bool = False):
    """Raises Failed if runs failed; to be called when the table is printed."""
    reasons = {**self.failed, **({} if allow_diverged else self.diverged)}
    if not reasons:
      return
    remedy = 'The same command tries again' if self.failed else (
      'To train such a run again, delete its folder'
    )  # fmt: skip
    raise Failed(
      f"{len(reasons)} runs in workdir='{self.workdir}' failed:\n"
      + '\n'.join(f'  {name}: {reason}' for name, reason in reasons.items())
      + f'\nAll others of this command are done. {remedy}'
    )


def train_all(runs: Sequence[Run], workdir, checkpoints: str = 'newest') -> Outcome:
  """Trains runs one after the other, each in workdir/<name>.

  A run that is done is not trained again, and one that was interrupted goes on.
  All that `check` checks is checked before the first run begins. If a run
  fails, the others are trained all the same, see Outcome.finish; but of several
  processes the error of one that fails alone ends all. A run that another
  machine holds is passed over, and waited for at the end: when that machine has
  ended or is lost, the run goes on here unless it is done. `checkpoints`, a key
  of CHECKPOINTS, are those to keep of a run that is done.
  """
  check(runs, workdir, checkpoints)
  width = max((len(run.name) for run in runs), default=0)
  heads = {
    run.name: f'  {i:>{len(str(len(runs)))}}/{len(runs)}  {run.name:<{width}}'
    for i, run in enumerate(runs, 1)
  }
  failed, seconds, left, held, waiting = {}, [], list(runs), {}, False
  while left:
    tried, before, held = left, held, {}
    for number, run in enumerate(tried, 1):
      head, began = heads[run.name], time.perf_counter()
      found = _read(workdir, run)
      if found is not None:
        done = 'by another machine' if run.name in before else 'before'
        say(f'{head}  {_describe(found)}, done {done}')
        continue
      lock = lock_lib.Holder(f'{workdir}/{run.name}')
      try:
        with console.muted():
          other = lock.take()
        if other:
          held[run.name] = other
          continue
        found = _train(run, workdir, checkpoints, head.strip(), lock)
      except _OWN_ERRORS as e:
        # Only if it is the error of all processes, they all go on together. The
        # loss, which FloatingPointError is about, is the same on all of them.
        if not processes.is_common(e) and not isinstance(e, FloatingPointError):
          raise
        failed[run.name] = str(e)
        say(f'{head}  failed: {str(e).splitlines()[0]}')
        continue
      finally:
        lock.release()
      seconds.append(time.perf_counter() - began)
      rest = len(tried) - number + len(held)
      more = f', at most {console.duration(rest * statistics.mean(seconds))} left'
      say(
        f'{head}  {_describe(found)}, {console.duration(seconds[-1])}'
        f'{more if rest else ""}'
      )
    left = [run for run in tried if run.name in held]
    if left and len(left) == len(tried):
      if not waiting:
        others = ''.join(f'  {name}: {other}\n' for name, other in held.items())
        say(
          f'{len(held)} of the runs are held by other machines:\n{others}'
          'Waiting for them: a run whose machine is lost goes on here. Ctrl-C '
          'ends the waiting; the same command shows the table when they are done.'
        )
      waiting = True
      time.sleep(_PAUSE)
  return collect(runs, workdir, failed)


def _train(run, workdir, checkpoints, title, held) -> dict:
  """Trains a run; returns and stores the content of its result.json."""
  folder = f'{workdir}/{run.name}'
  found = _read(workdir, run)
  if found is not None:
    return found  # Another machine has just ended it.
  live = contextlib.nullcontext()
  if console.kind_of_output() != 'log':
    live = console.waiting(title, leave=False)
  with live, console.muted():
    try:
      _, metrics = train.train_and_evaluate(run.config, folder, held)
      metrics = {k: float(v) for k, v in metrics.items() if k != 'step'}
      found = {'metrics': metrics}
    except FloatingPointError as e:
      found = {'diverged': str(e)}
  found['config'] = _fixed(run_config.complete(run.config))
  held.check()
  summaries.write(workdir, f'{run.name}/{_RESULT}', json.dumps(found, indent=1))
  if CHECKPOINTS[checkpoints] is not None:
    checkpoints_lib.delete_but_newest(folder, CHECKPOINTS[checkpoints])
  return found


@contextlib.contextmanager
def alone(folder):
  """Holds a folder inside a `with` block; waits while another machine does."""
  lock = lock_lib.Holder(folder)
  while other := lock.take():
    say(f'Waiting for {other}, which works in {folder} ...')
    time.sleep(60)
  try:
    yield
  finally:
    lock.release()


def _describe(found) -> str:
  if 'diverged' in found:
    return f'diverged: {found["diverged"].partition(". ")[0]}'
  hidden = ('num_examples', 'img_sec')
  metrics = found['metrics'].items()
  shown = {k: v for k, v in metrics if not k.startswith(hidden)}
  return metrics_lib.format_metrics(shown)


def _fixed(config) -> dict:
  """Returns the values of _FIXED in a complete config, as JSON has them."""
  plain = workdir_lib.to_plain(config)
  return {key: plain[key] for key in _FIXED if key in plain}


def collect(
  runs: Sequence[Run], workdir, failed: Mapping[str, str] | None = None
) -> Outcome:
  """Returns what has become of runs, on this and on other machines.

  `failed` says why runs failed on this machine; another may have been luckier.
  """
  found = {run.name: _read(workdir, run) for run in runs}
  found = {name: result for name, result in found.items() if result is not None}
  return Outcome(
    workdir,
    {k: x['metrics'] for k, x in found.items() if 'diverged' not in x},
    {k: why for k, why in (failed or {}).items() if k not in found},
    {k: x['diverged'] for k, x in found.items() if 'diverged' in x},
  )


def _read(workdir, run) -> dict | None:
  """Returns the content of a run's result.json; None if the run is not done."""

  def read():
    file = workdir_lib.folder(workdir) / run.name / _RESULT
    try:
      found = json.loads(file.read_text())
      _check_result(found, run.config.get('best_metric'))
      return found
    except (FileNotFoundError, NotADirectoryError):
      return None
    except (ValueError, RecursionError, IsADirectoryError) as e:
      raise ValueError(
        f"'{file}' is damaged: {e}; delete it, and the same command reads the "
        "run's metrics anew"
      ) from e

  return processes.from_first(f'reading the result of {run.name}', read)


def _check_result(found, best):
  """Raises ValueError if this is not what `_train` has stored of a run."""
  if not isinstance(found, dict) or not isinstance(found.get('config', {}), dict):
    raise ValueError(f'{found!r:.50} is not of a run')
  if isinstance(found.get('diverged'), str):
    return
  if not isinstance(found.get('metrics'), dict):
    raise ValueError('it has no metrics')
  for name, value in found['metrics'].items():
    fits = type(value) in (int, float)
    if fits and metrics_lib.is_share(name):
      fits = 0 <= value <= 1
    if not fits or (name == best and not schema.is_number(value)):
      raise ValueError(f'{name} is {value!r:.50}')


# --- Checking ---


def check_keys(config, known: Mapping[str, Any], of: str):
  """Checks the keys of the config of a study; `of` names it.

  Raises ValueError for an unknown key, one that is missing, or a wrong value.
  """
  for key in config:
    if key not in (*known, 'trainer'):
      schema.raise_unknown(key, known, of=f'the config of {of}')
  for key, kind in known.items():
    if key not in config:
      raise ValueError(f'{of} needs config.{key}')
    schema.check(key, config[key], kind)


def check(runs: Sequence[Run], workdir, checkpoints: str = 'newest'):
  """Checks all that can be checked before the first run begins; writes nothing."""
  if checkpoints not in CHECKPOINTS:
    raise ValueError(
      f'checkpoints={checkpoints!r} is unknown: use one of {list(CHECKPOINTS)}'
    )
  names = collections.Counter(run.name for run in runs)
  for name, count in names.items():
    if not re.fullmatch(r'[\w=+,@-][\w.=+,@-]*', name):
      raise ValueError(
        f"run '{name}': the name of a run is that of a folder, of letters, digits "
        'and ._-+=,@'
      )
    if count > 1:
      raise ValueError(
        f"run '{name}' occurs {count} times: the names of runs must differ"
      )
  for run in runs:
    try:
      _check_run(run, f'{workdir}/{run.name}', _read(workdir, run))
    except (ValueError, FileNotFoundError) as e:
      raise type(e)(f"run '{run.name}': {e}") from e


def _check_run(run, folder, found):
  """Checks a run's config, and its folder if it was begun."""
  config = run_config.complete(run.config)
  workdir_lib.keep_dtype(folder, config)
  train.check(config)
  workdir_lib.check_config(folder, config, moved=found is None)
  if found is None:
    checkpoint.check_exists(config)
    return
  before = found.get('config', {})
  if differing := workdir_lib.differences(before, _fixed(config), common=True):
    raise ValueError(
      f"workdir='{folder}' holds a run that is done with another config:\n  "
      + '\n  '.join(differing)
      + '\nUse another --workdir, or delete that folder to train the run anew'
    )
  if 'metrics' in found and config.best_metric not in found['metrics']:
    raise ValueError(
      f"'{folder}/{_RESULT}' has no {config.best_metric}, but "
      f'{list(found["metrics"])}: delete it, and the same command reads the '
      "run's metrics anew"
    )


# --- Other values ---


def named(runs: Sequence[Run], name: str) -> list[Run]:
  """Returns the run of a name; raises ValueError if there is none."""
  found = [run for run in runs if run.name == name]
  if not found:
    names = ', '.join(run.name for run in runs)
    raise ValueError(f"run='{name}' is none of the runs {names} (--run)")
  return found


def seeded(config: ml_collections.ConfigDict, seed: int):
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
  A whole group, such as `model`, is replaced. A length in steps takes the place
  of one in epochs, and vice versa.
  """
  config = run_config.complete(config)
  for key, value in changes.items():
    inside, prefix = config, ''
    for name in key.split('.'):
      holder = inside
      if not isinstance(holder, ml_collections.ConfigDict):
        raise ValueError(f"'{prefix.rstrip('.')}' is no group of keys")
      if name not in holder:
        schema.raise_unknown(name, holder.keys(), prefix)
      inside, prefix = holder[name], f'{prefix}{name}.'
    with holder.unlocked(), holder.ignore_type():
      holder[name] = value
      length, _, unit = name.rpartition('_')
      other = f'{length}_{({"steps": "epochs", "epochs": "steps"}).get(unit)}'
      if other in holder and other not in changes:
        holder[other] = None
    if key == 'model':
      config = run_config.complete(config)  # With the options of the model.
  return config
