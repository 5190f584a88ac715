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
Machines that see the workdir share the runs; one labels the images of a seed while
the others wait.
"""

import ml_collections

from vit_jax import console, predict, train
from vit_jax.configs import noisy_student as recipe
from vit_jax.data import sources
from vit_jax.distributed import files
from vit_jax.evaluators import evaluation
from vit_jax.run import (
  config as run_config,
  evaluators as run_evaluators,
  workdir as workdir_lib,
)
from vit_jax.studies import labelling, runs as runs_lib, summaries

say = console.say
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
  found, given = {}, config.teacher_workdir

  def train_all(variant, runs):
    outcome = runs_lib.train_all(runs, workdir)
    outcome.finish()
    # A student's own seed differs from the seed of its teacher.
    metrics = outcome.by_seed(runs, config.metric).values()
    found[variant] = dict(zip(config.seeds, metrics))
    return [f'{workdir}/{run.name}' for run in runs]

  if given is None:
    say('Teachers:')
    runs = runs_lib.over_seeds('teacher', config.teacher, config.seeds)
    teachers = train_all('teacher', runs)
  else:
    found['teacher'] = dict.fromkeys(config.seeds, _evaluate(given, config))
    teachers = [given] * len(config.seeds)
  for iteration in range(1, len(config.ratios) + 1):
    say(f'\nStudents, iteration {iteration} of {len(config.ratios)}:')
    runs = [
      _student(config, workdir, iteration, *each)
      for each in zip(config.seeds, teachers, counts)
    ]
    teachers = train_all(f'student {iteration}', runs)
  student = run_config.complete(config.student)
  kind = run_evaluators.metrics_of(student)[config.metric]
  return summaries.report(
    workdir, 'noisy_student', config.metric, kind, found, 'Noisy Student',
    baseline='teacher', x_label='iteration',
    places=[('mean over the seeds', iteration) for iteration in range(len(found))],
  )  # fmt: skip


# --- Checking ---


def _check(config):
  """Checks the config of the study and of its runs."""
  runs_lib.complete(config, recipe.NoisyStudent, 'a Noisy Student')
  for kind, ratios in (('teacher', (0,)), ('student', config.ratios)):
    run = run_config.complete(runs_lib.seeded(config[kind], config.seeds[0]))
    known, whose = run_evaluators.metrics_of(run), f'the {kind}'
    if config.teacher_workdir is not None:
      # Few-shot probes are part of a run, not of an evaluation.
      known = run_evaluators.metrics_of(run, run_evaluators.of_task(run))
      whose += ' and of a given teacher (config.teacher_workdir)'
    runs_lib.check_metric(config.metric, known, whose)
    size = run.batch
    for ratio in ratios:
      run.batch = round(size * (1 + ratio))
      try:
        train.check(run)
      except ValueError as e:
        raise ValueError(f'{kind}, batch={size}, ratio={ratio}: {e}') from e


def _check_data(config, seed) -> int:
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
        f"{console.counted(len(names), 'class')}, {list(names[:5])}, and '{run.dataset}' has {len(labelled.class_names)}, "
        f'{list(labelled.class_names[:5])}: pseudo-labels need a teacher with the '
        'same classes (config.teacher_workdir)'
      )
  return labelled.num_examples


def _unlabelled(config, seed, run, workdir=None):
  """Opens the unlabelled images of a seed."""
  split = runs_lib.with_seed(config.unlabelled_split, seed)
  return sources.open_split(
    run, split, ('image',), dataset=config.unlabelled, workdir=workdir
  )


# --- The runs ---


def _evaluate(teacher, config) -> float:
  """Returns the metric of a given teacher on the student's data."""
  run = run_config.complete(runs_lib.seeded(config.student, config.seeds[0]))
  metrics = {}
  for name, split, dataset in run_config.evaluations(run):
    found = evaluation.evaluate(predict.load(teacher), split, dataset or run.dataset)
    metrics.update({f'{key}_{name}': value for key, value in found.items()})
  return metrics[config.metric]


def _student(config, workdir, iteration, seed, teacher, num_labelled):
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
  with runs_lib.alone(folder):
    source = _unlabelled(config, seed, run, folder)
    facts = labelling.label(settings, source, folder, run.batch_eval)
  say(f'  {_describe(facts, folder)}')
  ratio = config.ratios[iteration - 1]
  with run.ignore_type():
    run.dataset = ((run.dataset, 1.0), (folder, ratio))
  run.batch = round(run.batch * (1 + ratio))
  run.seed = seed + _SEEDS * iteration
  return runs_lib.Run(f'student_{iteration}_{seed}', run)


def _describe(facts, folder) -> str:
  """Describes how many images were labelled, and how evenly."""
  counts = facts['counts']
  each = counts['by_class']
  empty = [x for x, count in zip(facts['class_names'], each) if not count]
  lacking = console.counted(len(empty), 'class')
  none = f'; none for {lacking}, such as {empty[:3]}'
  return (
    f'{folder}: {sum(each):,} of {counts["images"]:,} images labelled, '
    f'{min(each):,} to {max(each):,} per class, and {counts["examples"]:,} when '
    f'balanced{none if empty else ""}.'
  )
