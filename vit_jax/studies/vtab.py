"""Fine-tunes a model on the tasks of VTAB-1k, and compares with the paper.

python -m vit_jax.main --config=configs/vtab.py:b16 --workdir=/tmp/vtab
"""

from collections.abc import Collection, Mapping, Sequence
import copy
import functools
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

TASKS = vtab_tasks.TASKS
_METRIC = 'accuracy_test'
# Task -> seed -> accuracy from 0 to 1; None if it is missing.
Accuracies = Mapping[str, Mapping[int, float | None]]
# Accuracies of the paper's models in %, by task.
PUBLISHED = {
  model: dict(zip(TASKS, accuracies, strict=True))
  for model, accuracies in vtab_config.TABLE_9.items()
}


def vtab(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
  """Fine-tunes on each task whose data are on this machine.

  The workdir holds all runs and vtab.json (vtab_val.json with config.validate).

  Returns `rows`, the content of vtab.json: one per task, per group and for all tasks, see
  summaries.row, with the accuracy from 0 to 1; and `skipped`, the reason for each task
  without data. Raises as study.study does, and FileNotFoundError if no task has data on
  this machine.
  """
  runs = _by_task(config)
  workdir = files.expanded(workdir)
  all_runs = list(itertools.chain.from_iterable(runs.values()))
  runs_lib.check(all_runs, workdir, config.checkpoints)
  done = runs_lib.collect(all_runs, workdir).done
  skipped = skipped_tasks(config, runs, done)
  unavailable: set[str] = set()
  for task in skipped:
    unavailable |= {run.name for run in runs[task]}
  to_train = [run for run in all_runs if run.name not in unavailable - done]
  if not to_train:
    raise FileNotFoundError(
      'no task of VTAB has data on this machine: get them as described above, or '
      'name the folder of the TFDS data sets (--config.run.tfds_data_dir)'
    )
  console.log(f'{console.pluralize(len(to_train), "run")} in {workdir}:')
  outcome = runs_lib.train_all(to_train, workdir, config.checkpoints)
  accuracies = {}
  for task, task_runs in runs.items():
    accuracies[task] = outcome.by_seed(task_runs, _METRIC)
  rows = report(config, accuracies, workdir)
  outcome.finish()
  return {'rows': rows, 'skipped': skipped}


def make_runs(config: ml_collections.ConfigDict) -> list[runs_lib.Run]:
  """Returns the runs of all tasks and seeds; their configs are not checked."""
  return list(itertools.chain.from_iterable(_by_task(config).values()))


def _by_task(config: ml_collections.ConfigDict) -> dict[str, list[runs_lib.Run]]:
  """Checks the study's config, but not its runs; returns the runs by task."""
  runs_lib.complete(config, vtab_config.Vtab, 'VTAB')
  for task in config.tasks:
    vtab_tasks.find_task(f'{task}', 'tasks')
  names = [task.removeprefix('vtab/') for task in config.tasks or TASKS]
  return {task: runs_of(config, task) for task in names}


def runs_of(config: ml_collections.ConfigDict, task: str) -> list[runs_lib.Run]:
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
  suffix = '_val' if config.validate else ''
  return runs_lib.over_seeds(f'{task}{suffix}', run, config.seeds)


def skipped_tasks(
  config: ml_collections.ConfigDict,
  runs: Mapping[str, Sequence[runs_lib.Run]],
  done: Collection[str],
) -> dict[str, str]:
  """Returns and prints how to get the data of each task that lacks them.

  Tasks whose runs are all finished need no data.
  """
  unfinished = []
  for task, task_runs in runs.items():
    run_names = {run.name for run in task_runs}
    if not run_names.issubset(done):
      unfinished.append(task)
  skipped = _missing(config.run, unfinished)
  failures = {}
  if config.download:
    for task in skipped:
      # TFDS would fail only after the download.
      lacking = functools.partial(data.lacking, TASKS[task])
      if any(processes.attempt('the packages', lacking)):
        continue
      console.log(f'Preparing {TASKS[task].dataset} for {task} ...')
      try:
        builders.get_builder(config.run, TASKS[task].dataset)
      except ValueError as e:
        failures[task] = str(e)
    skipped = {**_missing(config.run, unfinished), **failures}
  if not skipped:
    return {}
  console.log(
    f'{len(skipped)} of {len(runs)} tasks are left out because their data are not '
    'prepared on this machine:'
  )
  for reason in dict.fromkeys(skipped.values()):
    names = ', '.join(task for task in skipped if skipped[task] == reason)
    console.log(f'  {names}: {reason}')
  if not config.download:
    console.log(
      '--config.download=True downloads what TFDS can download, and prepares the '
      'files in the manual_dir (--config.run.tfds_manual_dir).'
    )
  return skipped


def _missing(run: ml_collections.ConfigDict, tasks: Sequence[str]) -> dict[str, str]:
  """Returns how to get the data of the tasks that any process lacks."""

  def remedies_here() -> dict[str, str | None]:
    return {task: data.missing(run, f'vtab/{task}') for task in tasks}

  remedies: dict[str, str] = {}
  by_process = processes.attempt('looking for data sets', remedies_here)
  for remedies_of_process in reversed(by_process):
    for task, remedy in remedies_of_process.items():
      if remedy:
        remedies[task] = remedy
  return remedies


# --- Results ---


def report(
  config: ml_collections.ConfigDict, accuracies: Accuracies, workdir: str
) -> list[dict]:
  """Prints and writes the table next to the paper's; returns its rows.

  `accuracies` are {task: {seed: accuracy from 0 to 1, None if it is missing}}.
  """
  rows = _rows(config, accuracies)
  if config.validate:  # The paper has no accuracies on these.
    name = 'vtab_val'
    models = []
    images = 'val200'
  else:
    name = 'vtab'
    models = list(PUBLISHED)
    images = "the test images, and the paper's (table 9, means over the same tasks)"
  lines = []
  for row in rows:
    mean, _ = summaries.cells(metrics_lib.SHARE, row)
    line = [_title(row), mean]
    for model in models:
      line.append('-' if row[model] is None else f'{100 * row[model]:.2f}')
    lines.append(line)
  heading = f'VTAB-1k, accuracy (%) on {images}:'
  header = ('task', 'this model', *models)
  summaries.publish(workdir, name, rows, heading, header, lines)
  if not config.validate:
    means = ', '.join(f'{name} {mean:.2f}' for name, mean in vtab_config.MEANS.items())
    console.log(f'Table 2, mean over all {len(TASKS)} tasks: {means}.')
  return rows


def _rows(config: ml_collections.ConfigDict, accuracies: Accuracies) -> list[dict]:
  """Returns a row for each task, each group and all tasks."""

  def row(group: str, title: str, tasks: Sequence[str]) -> dict[str, Any]:
    by_seed = {}
    for seed in config.seeds:
      by_seed[seed] = _mean([accuracies[task].get(seed) for task in tasks])
    fields = summaries.row({'group': group, 'task': title}, by_seed)
    if not config.validate:
      for model, published in PUBLISHED.items():
        mean = _mean([published[task] / 100 for task in tasks])
        fields[model] = None if mean is None else round(mean, 5)
    return fields

  rows = []
  for group in ('all', *vtab_tasks.GROUPS):
    names = [name for name, task in TASKS.items() if group in ('all', task.group)]
    requested = [name for name in names if name in accuracies]
    if not requested:
      continue  # The config names no task of this group.
    # A mean is over the same tasks for all seeds.
    trained = [name for name in requested if set(accuracies[name].values()) - {None}]
    rows.append(row(group, f'{len(trained)} of {len(names)}', trained))
    if group != 'all':
      rows += [row(group, name, [name]) for name in requested]
  return rows


def _mean(values: Sequence[float | None]) -> float | None:
  """Returns the mean of values; None if there are none or one is missing."""
  known_values = [value for value in values if value is not None]
  if not values or len(known_values) < len(values):
    return None
  return statistics.mean(known_values)


def _title(row: Mapping[str, Any]) -> str:
  """Returns the title of a row: a group, or indented a task."""
  if row['task'] in TASKS:
    return f'  {TASKS[row["task"]].title}'
  trained, _, total = row['task'].partition(' of ')
  count = total if trained == total else row['task']
  return f'{row["group"]} ({count})'
