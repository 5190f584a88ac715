"""Fine-tunes a model on the tasks of VTAB-1k, and compares with the paper.

python -m vit_jax.main --config=configs/vtab.py:b16 --workdir=/tmp/vtab
"""

import copy
import itertools
import statistics
from typing import Any

import ml_collections

from vit_jax import console
from vit_jax.configs import common, vtab as vtab_config
from vit_jax.data.tfds import builders, vtab as data, vtab_tasks
from vit_jax.distributed import files, processes
from vit_jax.run import (
  config as run_config,
  evaluators as run_evaluators,
  metrics as metrics_lib,
)
from vit_jax.studies import runs as runs_lib, summaries

say = console.say
TASKS = vtab_tasks.TASKS
_METRIC = 'accuracy_test'
# Accuracies of the paper's models in %, by task.
PUBLISHED = {
  model: dict(zip(TASKS, accuracies, strict=True))
  for model, accuracies in vtab_config.TABLE_9.items()
}


def vtab(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
  """Fine-tunes on each task whose data are on this machine.

  The workdir holds all runs and vtab.json (vtab_val.json with config.validate). Each
  machine that shares it trains on the tasks whose data it has.

  Returns `rows`, the content of vtab.json: one per task, per group and for all tasks, see
  summaries.row, with the accuracy from 0 to 1; and `skipped`, the reason for each task
  without data. Raises as study.study does, and FileNotFoundError if no task has data on
  this machine.
  """
  runs, workdir = _by_task(config), files.expanded(workdir)
  every = [*itertools.chain(*runs.values())]
  runs_lib.check(every, workdir, config.checkpoints)
  done = runs_lib.collect(every, workdir).done
  skipped = _skipped(config, runs, done)
  left_out = {run.name for task in skipped for run in runs[task]} - done
  chosen = [run for run in every if run.name not in left_out]
  if not chosen:
    raise FileNotFoundError(
      'no task of VTAB has data on this machine: get them as described above, or '
      'name the folder of the TFDS data sets (--config.run.tfds_data_dir)'
    )
  say(f'{console.counted(len(chosen), "run")} in {workdir}:')
  outcome = runs_lib.train_all(chosen, workdir, config.checkpoints)
  accuracies = {task: outcome.by_seed(found, _METRIC) for task, found in runs.items()}
  rows = _report(config, accuracies, workdir)
  outcome.finish()
  return {'rows': rows, 'skipped': skipped}


def make_runs(config: ml_collections.ConfigDict) -> list[runs_lib.Run]:
  """Returns the runs of all tasks and seeds; their configs are not checked."""
  return [*itertools.chain(*_by_task(config).values())]


def _by_task(config) -> dict[str, list[runs_lib.Run]]:
  """Checks the study's config, but not its runs; returns the runs by task."""
  runs_lib.complete(config, vtab_config.Vtab, 'VTAB')
  for task in config.tasks:
    vtab_tasks.find_task(f'{task}', 'tasks')
  names = [task.removeprefix('vtab/') for task in config.tasks or TASKS]
  return {task: _runs(config, task) for task in names}


def _runs(config, task: str) -> list[runs_lib.Run]:
  """Returns the runs of a task, one per seed."""
  run = copy.deepcopy(config.run)
  common.set_dataset(run, f'vtab/{task}')
  common.keep_labels(run.pp, task)
  if config.validate:
    run.pp.train, run.pp.test = 'train800', 'val200'
  if run.evals or _METRIC not in run_evaluators.metrics_of(run_config.complete(run)):
    raise ValueError(
      f"evals={run.evals!r} and task='{run.task}': VTAB measures the accuracy on "
      'its own splits; leave both unchanged (config.run.evals, config.run.task)'
    )
  part = '_val' if config.validate else ''
  return runs_lib.over_seeds(f'{task}{part}', run, config.seeds)


def _skipped(config, runs, done) -> dict[str, str]:
  """Returns and prints how to get the data of each task that lacks them.

  Tasks whose runs are all finished need no data.
  """
  needed = [task for task, found in runs.items() if {x.name for x in found} - done]
  skipped, failures = _missing(config.run, needed), {}
  if config.download:
    for task in skipped:
      # TFDS would fail only after the download.
      if any(processes.attempt('the packages', lambda t=task: data.lacking(TASKS[t]))):
        continue
      say(f'Preparing {TASKS[task].dataset} for {task} ...')
      try:
        builders.get_builder(config.run, TASKS[task].dataset)
      except ValueError as e:
        failures[task] = str(e)
    skipped = {**_missing(config.run, needed), **failures}
  if not skipped:
    return {}
  say(
    f'{len(skipped)} of {len(runs)} tasks are left out because their data are not '
    'prepared on this machine:'
  )
  for reason in dict.fromkeys(skipped.values()):
    say(f'  {", ".join(x for x in skipped if skipped[x] == reason)}: {reason}')
  if not config.download:
    say(
      '--config.download=True downloads what TFDS can download, and prepares the '
      'files in the manual_dir (--config.run.tfds_manual_dir).'
    )
  return skipped


def _missing(run, tasks) -> dict[str, str]:
  """Returns how to get the data of the tasks that any process lacks."""
  found = processes.attempt(
    'looking for data sets',
    lambda: {task: data.missing(run, f'vtab/{task}') for task in tasks},
  )
  return {task: how for each in reversed(found) for task, how in each.items() if how}


# --- Results ---


def _report(config, accuracies, workdir: str) -> list[dict]:
  """Prints and writes the table next to the paper's; returns its rows.

  `accuracies` are {task: {seed: accuracy from 0 to 1, None if it is missing}}.
  """
  rows = _rows(config, accuracies)
  name, models = 'vtab', list(PUBLISHED)
  tested = "the test images, and the paper's (table 9, means over the same tasks)"
  if config.validate:  # The paper has no accuracies on these.
    name, models, tested = 'vtab_val', [], 'val200'
  lines = [
    (
      _title(row),
      summaries.cells(metrics_lib.SHARE, row)[0],
      *('-' if row[m] is None else f'{100 * row[m]:.2f}' for m in models),
    )
    for row in rows
  ]
  heading = f'VTAB-1k, accuracy (%) on {tested}:'
  header = ('task', 'this model', *models)
  summaries.publish(workdir, name, rows, heading, header, lines)
  if not config.validate:
    means = (f'{name} {mean:.2f}' for name, mean in vtab_config.MEANS.items())
    say(f'Table 2, mean over all {len(TASKS)} tasks: {", ".join(means)}.')
  return rows


def _rows(config, accuracies) -> list[dict]:
  """Returns a row for each task, each group and all tasks."""

  def row(group, title, tasks):
    by_seed = {
      seed: _mean([accuracies[task].get(seed) for task in tasks])
      for seed in config.seeds
    }
    found = summaries.row({'group': group, 'task': title}, by_seed)
    if not config.validate:
      for model, published in PUBLISHED.items():
        mean = _mean([published[task] / 100 for task in tasks])
        found[model] = None if mean is None else round(mean, 5)
    return found

  rows = []
  for group in ('all', *vtab_tasks.GROUPS):
    names = [name for name, task in TASKS.items() if group in ('all', task.group)]
    if not (here := [name for name in names if name in accuracies]):
      continue  # The config names no task of this group.
    # A mean is over the same tasks for all seeds.
    there = [name for name in here if set(accuracies[name].values()) - {None}]
    rows.append(row(group, f'{len(there)} of {len(names)}', there))
    rows += [row(group, name, [name]) for name in here if group != 'all']
  return rows


def _mean(values) -> float | None:
  """Returns the mean of values; None if there are none or one is missing."""
  return None if None in values or not values else statistics.mean(values)


def _title(row) -> str:
  """Returns the title of a row: a group, or indented a task."""
  if row['task'] in TASKS:
    return f'  {TASKS[row["task"]].title}'
  there, _, total = row['task'].partition(' of ')
  count = total if there == total else row['task']
  return f'{row["group"]} ({count})'
