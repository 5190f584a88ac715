"""Noisy Student: self-training with images that have no labels.

python -m vit_jax.main --config=configs/noisy_student_digits.py --workdir=/tmp/ns

A teacher learns from the labelled images, and labels the others, without noise.
A student learns from both, with noise: RandAugment, dropout, stochastic depth.
Then the student is the teacher of the next student (arXiv 1911.04252, algorithm
1). Each seed has runs of its own, possibly on its own draw of labels:

  workdir/teacher_0    the run of the teacher of seed 0
  workdir/pseudo_1_0   its labels, see vit_jax/data/pseudo_labels.py
  workdir/student_1_0  the run of the first student, on labels and pseudo-labels
  workdir/pseudo_2_0   the labels of the first student, and so on

After an interruption the same command continues where it was stopped.
"""

import copy
from typing import Any

import ml_collections

from vit_jax import cli
from vit_jax import evaluate
from vit_jax import train
from vit_jax.configs import rules
from vit_jax.data import sources
from vit_jax.figures import studies
from vit_jax.run import config as run_config
from vit_jax.run import metrics as metrics_lib
from vit_jax.run import workdir as workdir_lib
from vit_jax.studies import labelling
from vit_jax.studies import runs as runs_lib
from vit_jax.studies import tables

say = cli.say
# Between the seeds of the runs of an iteration and the next.
_SEEDS = 1000

# Rules for the keys of the config, beside `teacher` and `student`.
KEYS: dict[str, rules.Rule] = {
  'trainer': rules.text,
  'seeds': rules.several(rules.whole(0)),
  'teacher_workdir': rules.optional(rules.text),
  'unlabelled': rules.text,
  'unlabelled_split': rules.text,
  'confidence': rules.number(0, 1),
  'per_class': rules.optional(rules.whole(1)),
  'soft': rules.flag,
  'soft_classes': rules.optional(rules.whole(1)),
  'ratios': rules.several(rules.positive),
  'metric': rules.text,
}


def noisy_student(config: ml_collections.ConfigDict, workdir: str) -> list:
  """Trains a teacher and its students for each seed, and compares them.

  Args:
    config: see configs/noisy_student.py.
    workdir: folder for all runs and their labels.

  Returns:
    The content of workdir/noisy_student.json: for the teacher and for the
    students of each iteration the metric of each seed, its mean and standard
    deviation, and those of the margin over the teacher of the same seed.

  Raises:
    ValueError, FileNotFoundError: if the config, the data or a given teacher
      are wrong, before anything is trained.
    train.Interrupted: see train.train_and_evaluate.
  """
  _check(config)
  counts = [_check_data(config, seed) for seed in config.seeds]
  teachers, values = _teachers(config, workdir)
  found = [values]
  for iteration in range(1, len(config.ratios) + 1):
    say(f'\nStudents, iteration {iteration} of {len(config.ratios)}:')
    students = [
      _student(config, workdir, iteration, *each)
      for each in zip(config.seeds, teachers, counts)
    ]
    results = runs_lib.train_all(students, workdir)
    found.append([results[run.name][config.metric] for run in students])
    teachers = [f'{workdir}/{run.name}' for run in students]
  rows = _rows(config.seeds, found)
  _show(config, rows, found, workdir)
  return rows


# --- Checking ---


def _check(config):
  """Checks the config, and those of the runs."""
  for name, rule in KEYS.items():
    rules.check(name, config.get(name), rule)
  for name in config:
    if name not in (*KEYS, 'teacher', 'student'):
      rules.raise_unknown(name, (*KEYS, 'teacher', 'student'))
  if len(set(config.seeds)) < len(config.seeds):
    raise ValueError(f'seeds={config.seeds} must differ (config.seeds)')
  for kind, ratios in (('teacher', [0]), ('student', set(config.ratios))):
    run = run_config.complete(_run(config, kind, config.seeds[0]))
    known = run_config.metrics_of(run)
    whose = kind
    if config.teacher_workdir is not None:
      # Its run may have been without them, and an evaluation leaves them out.
      known = run_config.metrics_of_task(run)
      whose = f'{kind} that a given teacher has too (config.teacher_workdir)'
    if config.metric not in known:
      raise ValueError(
        f"metric='{config.metric}' is not among the metrics of the {whose}: use "
        f'one of {known} (config.metric)'
      )
    size = run.batch
    for ratio in ratios:
      run.batch = _with_unlabelled(size, ratio)
      try:
        train.check(run)
      except ValueError as e:
        raise ValueError(f'{kind}, batch={size}, ratio={ratio}: {e}') from e


def _check_data(config, seed) -> int:
  """Opens the data of a seed; returns the number of labelled images.

  Raises:
    ValueError: if the unlabelled images have no random access, or the given
      teacher has other classes than the labelled images.
  """
  run = _run(config, 'student', seed)
  run.broken_images = 'trust'  # The runs check the images.
  labelled = sources.open_split(run, run.pp.train)
  _unlabelled(config, seed, run)
  if config.teacher_workdir is not None:
    _, metadata = workdir_lib.load(config.teacher_workdir)
    names = tuple(metadata.get('class_names', ()))
    if names != labelled.class_names:
      raise ValueError(
        f"the teacher in '{config.teacher_workdir}' has {len(names)} classes, "
        f"{list(names[:5])}, and '{run.dataset}' has {len(labelled.class_names)}, "
        f'{list(labelled.class_names[:5])}: pseudo-labels need a teacher of the '
        'same classes (config.teacher_workdir)'
      )
  return labelled.num_examples


def _unlabelled(config, seed, run, workdir=None):
  """Opens the unlabelled images of a seed; run has the other keys of the data."""
  split = _with_seed(config.unlabelled_split, seed)
  return sources.open_split(
    run, split, ('image',), dataset=config.unlabelled, workdir=workdir
  )


# --- The runs ---


def _with_seed(split: str, seed: int) -> str:
  """Returns the split of a seed: 'few_1' for 'few_{seed}'."""
  return split.replace('{seed}', str(seed))


def _with_unlabelled(batch: int, ratio: float) -> int:
  """Returns the size of a batch, with the unlabelled images."""
  return round(batch * (1 + ratio))


def _run(config, kind, seed):
  """Returns the config of the teacher or of the student of a seed."""
  run = copy.deepcopy(config[kind])
  run.seed = seed
  run.pp.train = _with_seed(run.pp.train, seed)
  run.pp.test = _with_seed(run.pp.test, seed)
  return run


def _teachers(config, workdir) -> tuple[list[str], list[float]]:
  """Trains the first teachers, or evaluates the given one."""
  if config.teacher_workdir is not None:
    value = _evaluate(config.teacher_workdir, config)
    return [[x] * len(config.seeds) for x in (config.teacher_workdir, value)]
  say('Teachers:')
  teachers = [
    runs_lib.Run(f'teacher_{seed}', _run(config, 'teacher', seed))
    for seed in config.seeds
  ]
  results = runs_lib.train_all(teachers, workdir)
  return (
    [f'{workdir}/{run.name}' for run in teachers],
    [results[run.name][config.metric] for run in teachers],
  )


def _evaluate(teacher, config) -> float:
  """Returns the metric of a given teacher on the student's data."""
  run = run_config.complete(_run(config, 'student', config.seeds[0]))
  metrics = {}
  for name, split, dataset in run_config.evaluations(run):
    found = evaluate.evaluate(teacher, split, dataset or run.dataset)
    metrics.update({f'{key}_{name}': value for key, value in found.items()})
  return metrics[config.metric]


def _student(config, workdir, iteration, seed, teacher, num_labelled):
  """Labels the images of a seed; returns the run of the student."""
  run = run_config.resolve_steps(
    run_config.complete(_run(config, 'student', seed)), num_labelled
  )
  folder = f'{workdir}/pseudo_{iteration}_{seed}'
  settings = labelling.Settings(
    teacher=teacher,
    dataset=config.unlabelled,
    split=_with_seed(config.unlabelled_split, seed),
    confidence=config.confidence,
    per_class=config.per_class,
    soft=config.soft,
    soft_classes=config.soft_classes,
    seed=seed,
  )
  source = _unlabelled(config, seed, run, folder)
  facts = labelling.label(settings, source, folder, run.batch_eval)
  say(f'  {_describe(facts, folder)}')
  ratio = config.ratios[iteration - 1]
  with run.ignore_type():
    run.dataset = ((run.dataset, 1.0), (folder, ratio))
  run.batch = _with_unlabelled(run.batch, ratio)
  run.seed = seed + _SEEDS * iteration
  return runs_lib.Run(f'student_{iteration}_{seed}', run)


def _describe(facts, folder) -> str:
  """Says how many images were labelled, and how evenly."""
  counts = facts['counts']
  empty = [
    name
    for name, count in zip(facts['class_names'], counts['by_class'])
    if not count
  ]
  text = (
    f'{folder}: {sum(counts["by_class"]):,} of {counts["images"]:,} images labelled, '
    f'{min(counts["by_class"]):,} to {max(counts["by_class"]):,} a class, and '
    f'{counts["examples"]:,} when balanced'
  )
  if empty:
    text += f'; none for {len(empty)} classes, such as {empty[:3]}'
  return f'{text}.'


# --- The result ---


def _rows(seeds, found) -> list[dict[str, Any]]:
  """Returns the rows of the result: the teacher, then each iteration."""
  rows = []
  for iteration, values in enumerate(found):
    margins = [value - first for value, first in zip(values, found[0])]
    mean, std = tables.mean_std(values)
    margin, margin_std = tables.mean_std(margins)
    rows.append(
      {
        'model': f'student {iteration}' if iteration else 'teacher',
        'mean': mean,
        'std': std,
        'margin': margin,
        'margin_std': margin_std,
        **{f'seed_{seed}': value for seed, value in zip(seeds, values)},
      }
    )
  return rows


def _show(config, rows, found, workdir):
  """Prints and stores the table, and draws the plot."""
  say(
    f'\n{config.metric}, mean and standard deviation over {len(config.seeds)} '
    'seed(s), and the margin over the teacher of the same seed:'
  )
  cells = [
    (
      row['model'],
      *(
        tables.format_values(config.metric, some)
        for some in (
          values,
          [value - first for value, first in zip(values, found[0])],
          *([value] for value in values),
        )
      ),
    )
    for row, values in zip(rows, found)
  ]
  seeds = [f'seed {seed}' for seed in config.seeds]
  say(cli.table(('model', 'mean', 'margin', *seeds), cells))
  tables.write_table(workdir, 'noisy_student', rows)
  say(f'  table  {workdir}/noisy_student.csv, {workdir}/noisy_student.json')
  share = metrics_lib.is_share(config.metric)
  scale, unit = (100, ' (%)') if share else (1, '')
  lines = {
    seed: (range(len(found)), [[scale * values[i]] for values in found])
    for i, seed in enumerate(seeds)
  }
  tables.draw(
    studies.curves, lines, 'iteration (0: the teacher)', config.metric + unit,
    'Noisy Student', path=f'{workdir}/noisy_student.png',
  )  # fmt: skip
