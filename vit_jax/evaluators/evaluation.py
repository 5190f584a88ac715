"""Evaluates a trained model on any split, without training."""

from collections.abc import Mapping, Sequence
import copy
import functools
from typing import Any

import jax
import ml_collections

from vit_jax import console
from vit_jax.configs import common, schema
from vit_jax.data import slices, sources
from vit_jax.distributed import processes, sharding
from vit_jax.evaluators import base, calibration, report as report_lib, report_files
from vit_jax.inference import engine
from vit_jax.run import (
  config as run_config,
  evaluators as run_evaluators,
  metrics as metrics_lib,
  workdir as workdir_lib,
)


def evaluate(
  model: Any,
  split: str,
  dataset: str | None = None,
  real_labels: str | None = None,
  options: Mapping[str, Any] | None = None,
  evaluators: Mapping[str, Any] | None = None,
  report: str | None = None,
  predictions: str | None = None,
) -> dict[str, float]:
  """Evaluates a trained model, the result of `predict.load`, and prints the metrics.

  The task and `config.evaluators` list the evaluators.

  Args:
    model: the model, which has the config of its run.
    split: a split in the notation of TFDS, such as 'train[:10%]'; or the name of an
      evaluation of the run, such as 'test', if its data have no split of that name.
    dataset: another data set than the run's, with the same classes.
    real_labels: a file of ImageNet ReaL labels, see real.py.
    options: replace values of `config.task_options`, as {'tight': 1} for a detector.
    evaluators: are added to `config.evaluators`, and have its form.
    report: folder for the report of the task (Task.REPORT), which is also printed.
    predictions: table to write, with a row per image: .csv, .jsonl or .parquet.

  Returns:
    The metrics of the evaluators (`accuracy` and `loss`, for classes), `num_examples`
    and `img_sec_core`; with `real_labels` also `accuracy_real` and `num_real`.
  """
  schema.check('split', split, schema.Split, '--')
  mesh = sharding.mesh_of(model.params)
  task = with_own_config(model.task)
  config = task.config
  if predictions is not None:
    report_files.check_predictions(predictions)
  if report is not None:
    report_files.check_report(report)
  is_report = report is not None or predictions is not None
  reporter_class = run_evaluators.report(config).cls if is_report else None
  entries = _entries(config, split, evaluators, real_labels, reporter_class)
  run_splits = []
  if dataset is None:
    for run_evaluation in run_config.evaluations(config):
      if not run_evaluation.dataset:
        run_splits.append(run_evaluation.split)
    split, dataset = _by_name(config, split)
  if dataset is not None:
    with config.ignore_type():  # The data set of the run may be a mixture.
      config.dataset = dataset
  fit_batches(config, mesh)
  if options:
    run_config.replace_options(config, options)
    task = type(task)(config, model.metadata)
  open_split = functools.partial(_open_split, task, run_splits)
  evaluation = base.Evaluation(task, mesh, split, open_split)
  # All data are opened before anything is computed.
  source = evaluation.source
  instances = [entry.make(evaluation) for entry in entries]
  values: dict[str, float] = {}
  metrics: dict[str, metrics_lib.Metric] = {}
  for evaluator in base.sharing_passes(evaluation, instances):
    values.update(
      run_evaluators.run(evaluator, model.params, model.extra, engine.never)
    )
    metrics.update(evaluator.metrics)
  console.log(
    f"{model.workdir}, step {model.step}, split '{split}' of {config.dataset}: "
    + metrics_lib.format_metrics(values, metrics)
  )
  if reporter_class is not None:
    [reporter] = [x for x in instances if type(x) is reporter_class]
    facts = {
      'workdir': str(model.workdir),
      'step': model.step,
      'dataset': config.dataset,
      'split': split,
    }
    _write_report(reporter, facts, source, report, predictions)
  return values


def _write_report(
  reporter: base.Reporter,
  facts: Mapping[str, Any],
  source: Any,
  report: str | None,
  predictions: str | None,
) -> None:
  """Prints and writes what an evaluation has measured, on process 0."""
  if jax.process_index():
    return
  if report is not None:
    console.log('\n'.join(reporter.lines()))
    reporter.write(report, facts)
    console.log(f'  report {report}')
  if predictions is not None:
    reporter.write_predictions(predictions, source)
    console.log(f'  table  {predictions}')


def calibrated(model: Any, split: str) -> Any:
  """Calibrates a classifier by temperature scaling, and stores it with the run.

  `split` has images that the model was not trained on. Returns the model with calibrated
  probabilities; for errors see `evaluate` and calibration.fit.
  """
  schema.check('calibrate', split, schema.Split, '--')
  task = with_own_config(model.task)
  mesh = sharding.mesh_of(model.params)
  report_lib.Report.metrics(task.config)  # Classifiers only.
  train = model.config.pp.train
  if slices.overlap(split, train):
    raise ValueError(
      f"calibrate='{split}' overlaps with pp.train='{train}', for whose images the run is "
      "too confident: use others, such as --calibrate='train[90%:]' after training with "
      "--config.pp.train='train[:90%]'"
    )
  fit_batches(task.config, mesh)
  open_split = functools.partial(_open_split, task, [])
  evaluation = base.Evaluation(task, mesh, split, open_split)
  collector = report_lib.Collector(evaluation)
  collector.run(model.params, model.extra)
  outputs = collector.outputs
  result = calibration.Calibration(
    calibration.fit(outputs.logits, outputs.labels, task.exclusive),
    model.step,
    split,
    len(outputs.labels),
  )
  calibration.store(model.workdir, result)
  console.log(f'Calibrated {model.workdir}: {result}.')
  task = calibration.with_temperature(model.task, result.temperature)
  calibrated_model = task.predictor(model.params, model.extra, model.step)
  calibrated_model.workdir = calibrated_model.origin = model.workdir
  return calibrated_model


def _open_split(
  task: Any,
  run_splits: Sequence[str],
  split: str,
  more_features: Sequence[str] = (),
  dataset: str | None = None,
) -> Any:
  """Opens a split of the evaluation's data set, with its classes, or of another one.

  `run_splits` are the splits to name in an error, `more_features` names of features.
  """
  config = task.config
  metadata = {} if dataset else task.metadata
  try:
    source = sources.open_for(
      config, type(task), metadata, split, dataset, more_features=more_features
    )
  except FileNotFoundError as e:
    message = e.message if isinstance(e, slices.NoSplitError) else e
    remedy = ' or '.join(f"--split='{x}'" for x in run_splits) or '--split=SPLIT'
    raise FileNotFoundError(
      f'{message}; pass the split as {remedy}, and data that have moved as '
      '--dataset=FOLDER'
    ) from e
  names = task.class_names_of(source)
  if not dataset and task.class_names and names != task.class_names:
    raise ValueError(
      f"dataset='{config.dataset}' has {console.pluralize(len(names), 'class')} "
      f'{names[:5]}, and the model has {len(task.class_names)} '
      f'{task.class_names[:5]}: use data with the same classes'
    )
  return source


def _entries(
  config: ml_collections.ConfigDict,
  name: str,
  evaluators: Mapping[str, Any] | None,
  real_labels: str | None,
  reporter_class: type | None = None,
) -> list[run_evaluators.Entry]:
  """Returns the evaluators of the evaluation of a name or split."""
  added = evaluators or {}
  schema.check('evaluators', added, common.Evaluators, '--')
  stored = {key: x for key, x in config.evaluators.items() if key not in added}
  run_evaluators.check_trusted(stored)
  with config.unlocked():
    config.evaluators = ml_collections.ConfigDict({**stored, **added})
  names = {name}
  for evaluation in run_config.evaluations(config):
    if evaluation.split == name:
      names.add(evaluation.name)
  entries = []
  for entry in run_evaluators.config_entries(config):
    if entry.evals is None or names.intersection(entry.evals):
      entries.append(entry)
  if real_labels is not None:
    entries.append(run_evaluators.real_labels(real_labels))
  entries = [*run_evaluators.task_entries(config), *entries]
  if reporter_class and all(entry.cls is not reporter_class for entry in entries):
    entries.append(run_evaluators.report(config))
  run_evaluators.check_entries(entries, config)
  return entries


def _by_name(config: ml_collections.ConfigDict, name: str) -> tuple[str, str | None]:
  """Returns split and data set of a name: a split, or else an evaluation of the run."""
  split, dataset = name, None
  for evaluation in run_config.evaluations(config):
    if evaluation.name == name:
      split, dataset = evaluation.split, evaluation.dataset
  if split == name and dataset is None:
    return name, None
  has_split = functools.partial(sources.has_split, config, name)
  try:
    is_split = processes.from_first('looking for a split', has_split)
  except FileNotFoundError:  # The data have moved, which is reported later.
    is_split = True
  return (name, None) if is_split else (split, dataset)


def parse_options(texts: Sequence[str]) -> dict[str, str]:
  """Splits options of the form 'NAME=VALUE'."""
  options = {}
  for text in texts:
    name, equals, value = text.partition('=')
    if not name or not equals:
      raise ValueError(f'--option={text} must be NAME=VALUE, such as tight=1')
    options[name] = value  # The task parses it by its own types.
  return options


def with_own_config(task: Any) -> Any:
  """Returns a task whose config can be changed; the model keeps its own."""
  task = copy.copy(task)
  task.config = task.config.copy_and_resolve_references()
  return task


def fit_batches(config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh) -> None:
  """Rounds the batch sizes up, in place, to multiples of the devices."""
  shards = sharding.batch_shards(mesh)
  for key in ('batch', 'batch_eval'):
    config[key] = -(-config[key] // shards) * shards


def run_mesh(workdir: str) -> jax.sharding.Mesh:
  """Returns the mesh of a run, or a data-parallel one on other devices."""
  config, _ = workdir_lib.load(workdir)
  try:
    return sharding.make_mesh(config.mesh)
  except ValueError:
    return sharding.make_mesh({'data': -1})
