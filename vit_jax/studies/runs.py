"""Trains many runs in one workdir.

Each run has a folder of its own, workdir/<name>, as if it had been started
alone: vit_jax.predict and vit_jax.visualize read it. A run that is done has a
file result.json, and is not trained again; a run that was interrupted goes on.
Several machines may share the workdir, each with a part (a shard) of the runs.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import json
import re
import statistics
import time
from typing import Any
from typing import NamedTuple

import jax
import ml_collections

from vit_jax import checkpoint
from vit_jax import cli
from vit_jax import train
from vit_jax.configs import rules
from vit_jax.distributed import processes
from vit_jax.run import checkpoints as checkpoints_lib
from vit_jax.run import config as run_config
from vit_jax.run import metrics as metrics_lib
from vit_jax.run import workdir as workdir_lib
from vit_jax.studies import tables

say = cli.say
# Which checkpoints of a run are kept when the run is done, and how many of them.
CHECKPOINTS = {'all': None, 'newest': 1, 'none': 0}
_RESULT = 'result.json'
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
  """A run among others.

  Attributes:
    name: name of its folder in the workdir.
    config: its config, see vit_jax/configs/common.py.
  """

  name: str
  config: ml_collections.ConfigDict


class Failed(ValueError):
  """Some runs failed; it is raised when all others are done.

  Attributes:
    results: metrics of the runs that are done, by name of the run.
    reasons: why the others failed, by name of the run.
    diverged: names of those whose loss was not finite, which are not tried
      again.
  """

  def __init__(self, workdir, results, reasons, diverged):
    lines = [f'  {name}: {reason}' for name, reason in reasons.items()]
    again = [name for name in reasons if name not in diverged]
    remedy = 'The same command tries again' if again else (
      'To train such a run again, delete its folder'
    )  # fmt: skip
    super().__init__(
      f"{len(reasons)} runs in workdir='{workdir}' failed:\n"
      + '\n'.join(lines)
      + f'\nAll others of this command are done. {remedy}'
    )
    self.results = results
    self.reasons = reasons
    self.diverged = diverged


def train_all(
  runs: Sequence[Run],
  workdir,
  shard: tuple[int, int] = (0, 1),
  checkpoints: str = 'newest',
) -> dict[str, dict[str, float]]:
  """Trains runs one after the other, each in workdir/<name>.

  A run that is done is not trained again, and one that was interrupted goes on.
  All configs are checked before the first run begins. If a run fails, the
  others are trained all the same.

  Args:
    runs: the runs; their names differ.
    workdir: folder for all runs, which several machines may share.
    shard: (i, n): of n machines this one, number i from 0 on, trains every n-th
      run.
    checkpoints: which checkpoints of a run to keep when it is done, a key of
      CHECKPOINTS.

  Returns:
    The metrics of the last evaluation of all runs that are done, also of those
    of other shards, by name, in the order of `runs`.

  Raises:
    ValueError: if a name, a config, the shard or `checkpoints` is wrong, or if
      a folder holds a run of another config; before anything is trained.
    Failed: when all other runs are done, if some failed.
    Exception: of several processes, at once, the error of one that fails alone.
    train.Interrupted: see train.train_and_evaluate.
  """
  check(runs, workdir, shard, checkpoints)
  reasons, seconds = {}, []
  own = runs[shard[0] :: shard[1]]
  width = max((len(run.name) for run in own), default=0)
  for number, run in enumerate(own, 1):
    head = f'  {number:>{len(str(len(own)))}}/{len(own)}  {run.name:<{width}}'
    found, began = _read(workdir, run), time.perf_counter()
    if found is not None:
      say(f'{head}  {_describe(found)}, done before')
      continue
    try:
      found = _train(run, workdir, checkpoints, head.strip())
    except _OWN_ERRORS as e:
      # Only if it is the error of all processes, they all go on together. The
      # loss, which FloatingPointError is about, is the same on all of them.
      if not processes.is_common(e) and not isinstance(e, FloatingPointError):
        raise
      reasons[run.name] = str(e)
      say(f'{head}  failed: {str(e).splitlines()[0]}')
      continue
    seconds.append(time.perf_counter() - began)
    left = len(own) - number
    more = f', at most {cli.duration(left * statistics.mean(seconds))} left'
    say(
      f'{head}  {_describe(found)}, {cli.duration(seconds[-1])}{more * bool(left)}'
    )
  return _collect(runs, workdir, reasons)


def _train(run, workdir, checkpoints, title) -> dict:
  """Trains a run; returns and stores the content of its result.json."""
  folder = f'{workdir}/{run.name}'
  live = contextlib.nullcontext()
  if cli.kind_of_output() != 'log':
    live = cli.waiting(title, leave=False)
  with live, cli.muted():
    try:
      _, metrics = train.train_and_evaluate(run.config, folder)
      found = {
        'metrics': {k: float(v) for k, v in metrics.items() if k != 'step'}
      }
    except FloatingPointError as e:
      found = {'diverged': str(e)}
  found['config'] = _fixed(run_config.complete(run.config))
  tables.write(workdir, f'{run.name}/{_RESULT}', json.dumps(found, indent=1))
  if CHECKPOINTS[checkpoints] is not None:
    checkpoints_lib.delete_but_newest(folder, CHECKPOINTS[checkpoints])
  return found


def done(runs: Sequence[Run], workdir) -> set[str]:
  """Returns the names of the runs that are done, also on other machines."""
  return {run.name for run in runs if _read(workdir, run) is not None}


def _describe(found) -> str:
  if 'diverged' in found:
    return f'diverged: {found["diverged"].partition(". ")[0]}'
  return metrics_lib.format_metrics(
    {
      name: value
      for name, value in found['metrics'].items()
      if not name.startswith(('num_examples', 'img_sec'))
    }
  )


def _fixed(config) -> dict:
  """Returns the values of _FIXED in a complete config, as JSON has them."""
  plain = workdir_lib.to_plain(config)
  return {key: plain[key] for key in _FIXED if key in plain}


def _collect(runs, workdir, reasons) -> dict:
  """Returns the metrics of all runs that are done; raises Failed if some failed."""
  results, diverged = {}, {}
  for run in runs:
    found = _read(workdir, run)
    if found is None:
      continue
    reasons.pop(run.name, None)  # Another machine was luckier.
    if 'diverged' in found:
      diverged[run.name] = found['diverged']
    else:
      results[run.name] = found['metrics']
  if reasons or diverged:
    raise Failed(workdir, results, {**reasons, **diverged}, set(diverged))
  return results


def _read(workdir, run) -> dict | None:
  """Returns the content of a run's result.json; None if the run is not done."""

  def read():
    file = workdir_lib.folder(workdir) / run.name / _RESULT
    try:
      found = json.loads(file.read_text())
      _check_result(found, run.config)
      return found
    except (FileNotFoundError, NotADirectoryError):
      return None
    except (ValueError, RecursionError, IsADirectoryError) as e:
      raise ValueError(
        f"'{file}' is damaged: {e}; delete it, and the same command reads the "
        "run's metrics anew"
      ) from e

  return processes.from_first(f'reading the result of {run.name}', read)


def _check_result(found, config):
  """Raises ValueError if this is not what `_train` has stored of a run."""
  if not isinstance(found, dict) or not {'metrics', 'diverged'} & set(found):
    raise ValueError('it has no metrics')
  if not isinstance(found.get('config', {}), dict):
    raise ValueError(f"'config' is {found['config']!r:.50}, not an object")
  if 'diverged' in found:
    if not isinstance(found['diverged'], str):
      raise ValueError(f"'diverged' is {found['diverged']!r:.50}, not a text")
    return
  metrics = found['metrics']
  if not isinstance(metrics, dict):
    raise ValueError(f"'metrics' is {metrics!r:.50}, not an object")
  for name, value in metrics.items():
    if type(value) not in (int, float):
      raise ValueError(f'{name} is {value!r:.50}, not a number')
    if metrics_lib.is_share(name) and not 0 <= value <= 1:
      raise ValueError(f'{name} is {value}, not a share from 0 to 1')
  best = config.get('best_metric')
  if best in metrics and not rules.is_number(metrics[best]):
    raise ValueError(f'{best} is {metrics[best]}, not a number')


# --- Checking ---


def check(
  runs: Sequence[Run], workdir, shard=(0, 1), checkpoints: str = 'newest'
):
  """Checks all that can be checked before the first run begins; writes nothing.

  See train_all for the arguments and errors.
  """
  _check_shard(shard)
  if checkpoints not in CHECKPOINTS:
    raise ValueError(
      f'checkpoints={checkpoints!r} is unknown: use one of {list(CHECKPOINTS)}'
    )
  names = [run.name for run in runs]
  for name in names:
    if not re.fullmatch(r'[\w=+,@-][\w.=+,@-]*', name):
      raise ValueError(
        f"run '{name}': the name of a run is that of a folder, of letters, digits "
        'and ._-+=,@'
      )
    if names.count(name) > 1:
      raise ValueError(
        f"run '{name}' occurs {names.count(name)} times: the names of runs must "
        'differ'
      )
  for run in runs:
    try:
      _check_run(run, f'{workdir}/{run.name}', _read(workdir, run))
    except (ValueError, FileNotFoundError) as e:
      raise type(e)(f"run '{run.name}': {e}") from e


def _check_run(run, folder, found):
  """Checks a run's config, and its folder if it was begun."""
  config = run_config.complete(run.config)
  workdir_lib.as_begun(folder, config)
  train.check(config)
  workdir_lib.check_config(folder, config, moved=found is None)
  if found is None:
    checkpoint.check_exists(config)
    return
  before, now = found.get('config', {}), _fixed(config)
  differing = workdir_lib.differences(
    {key: value for key, value in before.items() if key in now},
    {key: value for key, value in now.items() if key in before},
  )
  if differing:
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


def _check_shard(shard):
  pair = tuple(shard) if isinstance(shard, tuple | list) else ()
  fits = len(pair) == 2 and all(type(number) is int for number in pair)
  if not fits or not 0 <= pair[0] < pair[1]:
    raise ValueError(
      f'shard={shard!r} must be (i, n): number i from 0 to n - 1 of n machines'
    )


# --- Other values ---


def changed(
  config: ml_collections.ConfigDict, changes: Mapping[str, Any]
) -> ml_collections.ConfigDict:
  """Returns a complete copy of a run's config with other values.

  Args:
    config: config of a run.
    changes: values by dotted key: {'base_lr': 0.01,
      'model.transformer.num_layers': 2}. A whole group, such as `model`, is
      replaced. A length in steps takes the place of one in epochs, and vice
      versa.

  Raises:
    ValueError: if the config has no such key; names the nearest one. The values
      are not checked.
  """
  config = run_config.complete(config)
  for key, value in changes.items():
    *groups, name = key.split('.')
    holder, prefix = config, ''
    for group in groups:
      _check_key(holder, group, prefix)
      holder, prefix = holder[group], f'{prefix}{group}.'
    _check_key(holder, name, prefix)
    with holder.unlocked(), holder.ignore_type():
      holder[name] = value
      length, _, unit = name.rpartition('_')
      other = f'{length}_{({"steps": "epochs", "epochs": "steps"}).get(unit)}'
      if other in holder and other not in changes:
        holder[other] = None
    if key == 'model':
      config = run_config.complete(config)  # With the options of the model.
  return config


def _check_key(holder, name, prefix):
  if not isinstance(holder, ml_collections.ConfigDict):
    raise ValueError(f"'{prefix.rstrip('.')}' is no group of keys")
  if name not in holder:
    rules.raise_unknown(name, holder.keys(), prefix)
