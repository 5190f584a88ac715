"""Fine-tunes a model on the tasks of VTAB-1k, and compares with the paper.

python -m vit_jax.main --config=configs/vtab.py:b16 --workdir=/tmp/vtab
"""

from collections.abc import Sequence
import statistics
from typing import Any

import ml_collections

from vit_jax import cli
from vit_jax.configs import common
from vit_jax.configs import rules
from vit_jax.configs import vtab as vtab_config
from vit_jax.data.tfds import vtab as data
from vit_jax.data.tfds import vtab_tasks
from vit_jax.distributed import processes
from vit_jax.figures import studies
from vit_jax.run import config as run_config
from vit_jax.studies import runs as runs_lib
from vit_jax.studies import tables

say = cli.say
TASKS = vtab_tasks.TASKS
_METRIC = 'accuracy_test'
# Accuracies of the paper's models in %, by task.
PUBLISHED = {
  model: dict(zip(TASKS, accuracies, strict=True))
  for model, accuracies in vtab_config.TABLE_9.items()
}
_RULES = {
  'trainer': rules.one_of('vtab'),
  'tasks': rules.sequence,
  'seeds': rules.seeds,
  'validate': rules.flag,
  'download': rules.flag,
  'shard': rules.no_nan,  # Of older configs; has no effect.
  'checkpoints': rules.one_of(*runs_lib.CHECKPOINTS),
  'run': rules.group,
}


def vtab(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
  """Fine-tunes on each task whose data are on this machine.

  Each run has its own workdir below `workdir`; after an interruption the same
  command continues. Of machines that see the workdir each takes the next run
  that is free, of the tasks whose data it has.

  Args:
    config: see configs/vtab.py.
    workdir: folder for all runs, for vtab.json, vtab.csv and vtab.png
      (vtab_val.* if config.validate is set).

  Returns:
    `rows`, the content of vtab.json: one row for each task, each group and all
    tasks, with `mean` and `std` over the seeds of the accuracy from 0 to 1, and
    `seed_0`, ...; and `skipped`, the reason for each task without data.

  Raises:
    ValueError: if the config is wrong, before anything is trained.
    FileNotFoundError: if the data of no task are on this machine.
    runs.Failed: after the table, if runs failed.
    train.Interrupted: see train.train_and_evaluate.
  """
  runs_lib.note_shard(config.get('shard'))
  runs = _by_task(config)
  every = [run for found in runs.values() for run in found]
  runs_lib.check(every, workdir, config.checkpoints)
  done = runs_lib.collect(every, workdir).done
  skipped = _skipped(config, runs, done)
  chosen = [
    run
    for task, found in runs.items()
    for run in found
    if run.name in done or task not in skipped
  ]
  if not chosen:
    raise FileNotFoundError(
      'the data of no task of VTAB are on this machine: get them as said above, '
      'or name the folder where TFDS has its data sets '
      '(--config.run.tfds_data_dir)'
    )
  say(f'{len(chosen)} runs in {workdir}:')
  outcome = runs_lib.train_all(chosen, workdir, config.checkpoints)
  accuracies = {
    task: outcome.by_seed(found, _METRIC) for task, found in runs.items()
  }
  rows = _report(config, accuracies, workdir)
  outcome.finish()
  return {'rows': rows, 'skipped': skipped}


def make_runs(config: ml_collections.ConfigDict) -> list[runs_lib.Run]:
  """Returns the runs of all tasks and seeds.

  Raises:
    ValueError: if the config is wrong; those of the runs are not checked.
  """
  return [run for found in _by_task(config).values() for run in found]


def _by_task(config) -> dict[str, list[runs_lib.Run]]:
  """Checks the config except for that of the runs; returns the runs by task."""
  _check(config)
  return {
    task: [_run(config, task, seed) for seed in config.seeds]
    for task in _tasks(config)
  }


def _check(config):
  """Checks the keys of the config except for `run`."""
  for key, value in config.items():
    if key not in _RULES:
      rules.raise_unknown(key, _RULES, of='the config of VTAB')
    rules.check(key, value, _RULES[key])


def _tasks(config) -> list[str]:
  """Returns the names of the tasks, without 'vtab/'."""
  for task in config.tasks:
    vtab_tasks.find_task(f'{task}', 'tasks')
  names = [task.removeprefix('vtab/') for task in config.tasks or TASKS]
  return list(dict.fromkeys(names))


def _run(config, task: str, seed: int) -> runs_lib.Run:
  """Returns a run of a task."""
  run = runs_lib.seeded(config.run, seed)
  common.set_dataset(run, f'vtab/{task}')
  common.keep_labels(run.pp, task)
  if config.validate:
    run.pp.train, run.pp.test = 'train800', 'val200'
  if run.evals or _METRIC not in run_config.metrics_of(run):
    raise ValueError(
      f"evals={run.evals!r} and task='{run.task}': VTAB measures the accuracy on "
      'its own splits; leave both as they are (config.run.evals, config.run.task)'
    )
  part = '_val' if config.validate else ''
  return runs_lib.Run(f'{task}{part}_{seed}', run)


def _skipped(config, runs, done) -> dict[str, str]:
  """Finds the tasks without data on this machine, and says how to get these.

  Tasks whose runs are all done need no data.

  Returns:
    {task: how to get its data}.
  """
  needed = [
    task
    for task, found in runs.items()
    if not all(run.name in done for run in found)
  ]
  skipped = _missing(config.run, needed)
  if config.download:
    failures = {task: _download(config.run, task) for task in skipped}
    skipped = {
      task: failures[task] or reason
      for task, reason in _missing(config.run, needed).items()
    }
  if skipped:
    say(
      f'{len(skipped)} of {len(runs)} tasks are left out, since their data are not '
      'prepared on this machine:'
    )
    for reason in dict.fromkeys(skipped.values()):
      tasks = [task for task in skipped if skipped[task] == reason]
      say(f'  {", ".join(tasks)}: {reason}')
    if not config.download:
      say(
        '--config.download=True downloads what TFDS can download, and prepares what '
        'lies in the manual_dir (--config.run.tfds_manual_dir).'
      )
  return skipped


def _missing(run, tasks) -> dict[str, str]:
  """Returns how to get the data of the tasks that some process lacks."""
  found = processes.attempt(
    'looking for data sets',
    lambda: {task: data.missing(run, f'vtab/{task}') for task in tasks},
  )
  reasons = {
    task: next(filter(None, (each[task] for each in found)), '')
    for task in tasks
  }
  return {task: reason for task, reason in reasons.items() if reason}


def _download(run, task) -> str:
  """Downloads the data of a task; returns why that fails, or ''."""
  say(f'Preparing {TASKS[task].dataset} for {task} ...')
  try:
    data.prepare(run, f'vtab/{task}')
  except ValueError as e:
    return str(e)
  return ''


# --- Results ---


def _report(config, accuracies, workdir: str) -> list[dict]:
  """Prints, writes and draws the table beside that of the paper.

  Args:
    config: see configs/vtab.py.
    accuracies: {task: {seed: accuracy from 0 to 1, None if it is missing}}.
    workdir: see vtab.

  Returns:
    The content of vtab.json, see `vtab`.
  """
  rows = _rows(config, accuracies)
  name = 'vtab_val' if config.validate else 'vtab'
  models = [] if config.validate else list(PUBLISHED)
  lines = [
    (
      _title(row),
      tables.cells(_METRIC, row)[0],
      *('-' if row[m] is None else f'{100 * row[m]:.2f}' for m in models),
    )
    for row in rows
  ]
  tested = 'val200' if config.validate else 'the test images'
  beside = '' if config.validate else (
    ', beside those of the paper (table 9; its means over the same tasks)'
  )  # fmt: skip
  tables.publish(
    workdir, name, rows, f'VTAB-1k, accuracy (%) on {tested}{beside}:',
    ('task', 'this model', *models), lines,
  )  # fmt: skip
  if not config.validate:
    means = ', '.join(
      f'{name} {mean:.2f}' for name, mean in vtab_config.MEANS.items()
    )
    say(f'Table 2, mean over all {len(TASKS)} tasks: {means}.')
  _draw(config, rows, f'{workdir}/{name}.png')
  return rows


def _rows(config, accuracies) -> list[dict]:
  """Returns a row for each task, each group and all tasks."""
  rows = []
  for group in ('', *vtab_tasks.GROUPS):
    names = [name for name, task in TASKS.items() if group in ('', task.group)]
    if not any(name in accuracies for name in names):
      continue  # The config names no task of this group.
    found = {name: accuracies.get(name, {}).values() for name in names}
    there = [name for name in names if set(found[name]) - {None}]
    # A mean is over the same tasks for all seeds.
    means = {
      seed: _mean([accuracies[name].get(seed) for name in there])
      for seed in config.seeds
    }
    rows.append(
      _row(
        config, group or 'all', f'{len(there)} of {len(names)}', there, means
      )
    )
    if group:
      rows += [
        _row(config, group, name, [name], accuracies[name])
        for name in names
        if name in accuracies
      ]
  return rows


def _mean(values) -> float | None:
  """Returns the mean of values; None if there are none or one is missing."""
  return None if None in values or not values else statistics.mean(values)


def _row(config, group, task, tasks: Sequence[str], values) -> dict:
  """Returns a row of the table, for a task or the mean over several."""
  by_seed = {seed: values.get(seed) for seed in config.seeds}
  row = tables.row({'group': group, 'task': task}, by_seed)
  if not config.validate:
    for model, published in PUBLISHED.items():
      found = _mean([published[name] / 100 for name in tasks])
      row[model] = None if found is None else round(found, 5)
  return row


def _title(row) -> str:
  """Names a row in the table: a group, or below it a task."""
  if row['task'] in TASKS:
    return f'  {TASKS[row["task"]].title}'
  there, _, total = row['task'].partition(' of ')
  count = total if there == total else row['task']
  return f'{row["group"]} ({count})'


def _draw(config, rows, path):
  """Draws figure 2 of the paper: the means over all tasks and each group."""
  groups = {}
  for row in rows:
    if row['task'] in TASKS or not row['mean']:
      continue
    bars = {'this model': [100 * value for value in tables.values(row)]}
    if not config.validate:
      bars.update({model: [100 * row[model]] for model in PUBLISHED})
      if row['task'] == f'{len(TASKS)} of {len(TASKS)}':
        bars['BiT-L'] = [vtab_config.MEANS['BiT-L']]
    groups[_title(row)] = bars
  if groups:
    tables.draw(
      studies.bars, groups, 'accuracy (%)', 'VTAB-1k by group of tasks', path=path
    )  # fmt: skip
