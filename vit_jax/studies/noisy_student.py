"""Noisy Student: self-training with unlabelled images.

python -m vit_jax.main --config=configs/noisy_student_digits.py --workdir=/tmp/ns

A teacher is trained on the labelled images and labels the others, without noise.
A student is trained on both, with noise: RandAugment, dropout, stochastic depth.
The student is then the teacher of the next student (arXiv 1911.04252, algorithm
1). Each seed has its own runs, possibly on its own draw of labels:

  workdir/teacher_0    the run of the teacher of seed 0
  workdir/pseudo_1_0   its labels, see vit_jax/data/pseudo_labels.py
  workdir/student_1_0  the run of the first student, on labels and pseudo-labels
  workdir/pseudo_2_0   the labels of the first student, and so on

After an interruption the same command resumes; interrupted labelling starts again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from vit_jax import console, predict, train
from vit_jax.configs import noisy_student as recipe
from vit_jax.data import records, sources
from vit_jax.distributed import files
from vit_jax.evaluators import evaluation
from vit_jax.run import (
  config as run_config,
  evaluators as run_evaluators,
  lock as lock_lib,
  workdir as workdir_lib,
)
from vit_jax.studies import labelling, runs as runs_lib, summaries

# Difference between the seeds of an iteration and the next.
_SEEDS = 1000


def noisy_student(config: ml_collections.ConfigDict, workdir: str) -> list:
  """Trains a teacher and its students with each seed, and compares them.

  Returns the rows of workdir/noisy_student.json, see summaries.report: the metric
  of the teacher and of the students of each iteration, and the margin over the
  teacher. A wrong config, data set or given teacher raises ValueError before
  anything is trained.
  """
  _check(config)
  workdir = files.expanded(workdir)
  counts = [_check_data(config, seed) for seed in config.seeds]
  values: dict[str, dict[int, float | None]] = {}

  def train_all(runs: Sequence[runs_lib.Run]) -> dict[int, float | None]:
    outcome = runs_lib.train_all(runs, workdir)
    outcome.finish()
    # A student's own seed differs from the seed of its teacher.
    metrics = outcome.by_seed(runs, config.metric).values()
    return dict(zip(config.seeds, metrics))

  if config.teacher_workdir is None:
    console.log('Teachers:')
    runs = runs_lib.over_seeds('teacher', config.teacher, config.seeds)
    values['teacher'] = train_all(runs)
    teachers = [f'{workdir}/{run.name}' for run in runs]
  else:
    value = _evaluate(config.teacher_workdir, config)
    values['teacher'] = dict.fromkeys(config.seeds, value)
    teachers = [config.teacher_workdir] * len(config.seeds)
  for iteration in range(1, len(config.ratios) + 1):
    console.log(f'\nStudents, iteration {iteration} of {len(config.ratios)}:')
    runs = []
    for seed, teacher, count in zip(config.seeds, teachers, counts):
      runs.append(_student(config, workdir, iteration, seed, teacher, count))
    values[f'student {iteration}'] = train_all(runs)
    teachers = [f'{workdir}/{run.name}' for run in runs]
  student = run_config.complete(config.student)
  kind = run_evaluators.metrics_of(student)[config.metric]
  return summaries.report(
    workdir,
    'noisy_student',
    config.metric,
    kind,
    values,
    'Noisy Student',
    baseline='teacher',
    x_label='iteration',
    places=[('mean over the seeds', iteration) for iteration in range(len(values))],
  )


# --- Checking ---


def _check(config: ml_collections.ConfigDict) -> None:
  """Checks the config of the study and of its runs."""
  runs_lib.complete(config, recipe.NoisyStudent, 'a Noisy Student')
  for kind, ratios in (('teacher', (0,)), ('student', config.ratios)):
    run = run_config.complete(runs_lib.seeded(config[kind], config.seeds[0]))
    metrics = run_evaluators.metrics_of(run)
    owner = f'the {kind}'
    if config.teacher_workdir is not None:
      # Few-shot probes are part of a run, not of an evaluation.
      metrics = run_evaluators.metrics_of(run, run_evaluators.task_entries(run))
      owner += ' and of a given teacher (config.teacher_workdir)'
    runs_lib.check_metric(config.metric, metrics, owner)
    size = run.batch
    for ratio in ratios:
      run.batch = round(size * (1 + ratio))
      try:
        train.check(run)
      except ValueError as e:
        raise ValueError(f'{kind}, batch={size}, ratio={ratio}: {e}') from e


def _check_data(config: ml_collections.ConfigDict, seed: int) -> int:
  """Opens the data of a seed; returns the number of labelled images."""
  run = runs_lib.seeded(config.student, seed)
  run.broken_images = 'trust'  # The runs check the images.
  labelled = sources.open_split(run, run.pp.train)
  _unlabelled(config, seed, run)
  if config.teacher_workdir is not None:
    _, metadata = workdir_lib.load(config.teacher_workdir)
    names = tuple(metadata.get('class_names', ()))
    if names != labelled.class_names:
      raise ValueError(
        f"the teacher in '{config.teacher_workdir}' has "
        f'{console.pluralize(len(names), "class")}, {list(names[:5])}, and '
        f"'{run.dataset}' has {len(labelled.class_names)}, "
        f'{list(labelled.class_names[:5])}: pseudo-labels need a teacher with the '
        'same classes (config.teacher_workdir)'
      )
  return labelled.num_examples


def _unlabelled(
  config: ml_collections.ConfigDict,
  seed: int,
  run: ml_collections.ConfigDict,
  workdir: str | None = None,
) -> records.Source:
  """Opens the unlabelled images of a seed."""
  split = runs_lib.with_seed(config.unlabelled_split, seed)
  return sources.open_split(
    run, split, ('image',), dataset=config.unlabelled, workdir=workdir
  )


# --- The runs ---


def _evaluate(teacher: str, config: ml_collections.ConfigDict) -> float:
  """Returns the metric of a given teacher on the student's data."""
  run = run_config.complete(runs_lib.seeded(config.student, config.seeds[0]))
  metrics = {}
  for name, split, dataset in run_config.evaluations(run):
    values = evaluation.evaluate(predict.load(teacher), split, dataset or run.dataset)
    for key, value in values.items():
      metrics[f'{key}_{name}'] = value
  return metrics[config.metric]


def _student(
  config: ml_collections.ConfigDict,
  workdir: str,
  iteration: int,
  seed: int,
  teacher: str,
  num_labelled: int,
) -> runs_lib.Run:
  """Labels the images of a seed; returns the run of the student."""
  run = run_config.resolve_steps(
    run_config.complete(runs_lib.seeded(config.student, seed)), num_labelled
  )
  folder = f'{workdir}/pseudo_{iteration}_{seed}'
  settings = labelling.Settings(
    teacher=teacher,
    dataset=config.unlabelled,
    split=runs_lib.with_seed(config.unlabelled_split, seed),
    confidence=config.confidence,
    per_class=config.per_class,
    soft=config.soft,
    soft_classes=config.soft_classes,
    seed=seed,
  )
  with lock_lib.Holder(folder):
    source = _unlabelled(config, seed, run, folder)
    facts = labelling.label(settings, source, folder, run.batch_eval)
  console.log(f'  {_describe(facts, folder)}')
  ratio = config.ratios[iteration - 1]
  with run.ignore_type():
    run.dataset = ((run.dataset, 1.0), (folder, ratio))
  run.batch = round(run.batch * (1 + ratio))
  run.seed = seed + _SEEDS * iteration
  return runs_lib.Run(f'student_{iteration}_{seed}', run)


def _describe(facts: Mapping[str, Any], folder: str) -> str:
  """Describes how many images were labelled, and how evenly."""
  counts = facts['counts']
  by_class = counts['by_class']
  description = (
    f'{folder}: {sum(by_class):,} of {counts["images"]:,} images labelled, '
    f'{min(by_class):,} to {max(by_class):,} per class, and {counts["examples"]:,} when '
    'balanced'
  )
  empty = [name for name, count in zip(facts['class_names'], by_class) if not count]
  if empty:
    num_empty = console.pluralize(len(empty), 'class')
    description += f'; none for {num_empty}, such as {empty[:3]}'
  return f'{description}.'
