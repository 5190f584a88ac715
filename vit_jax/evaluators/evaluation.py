"""Evaluates a trained model on any split, without training."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from vit_jax import console
from vit_jax.configs import schema
from vit_jax.data import slices, sources
from vit_jax.distributed import processes, sharding
from vit_jax.evaluators import real
from vit_jax.run import (
  config as run_config,
  metrics as metrics_lib,
  workdir as workdir_lib,
)


def evaluate(
  model,
  split: str,
  dataset: str | None = None,
  real_labels: str | None = None,
  options: Mapping[str, Any] | None = None,
) -> dict[str, float]:
  """Evaluates a trained model, the result of `predict.load`, and prints the metrics.

  `split` is in the notation of TFDS, such as 'train[:10%]', of the run's data set or of
  a `dataset` with the same classes; or the name of an evaluation of the run, such as
  'test', if its data have no split of that name. `real_labels` is a file, see real.py; `options`
  replace values of the run's `config.task_options`, as {'tight': 1} for a detector.

  Returns the metrics of the task (`accuracy` and `loss`, for classes), `num_examples`
  and `img_sec_core`; with `real_labels` also `accuracy_real` and `num_real`.
  """
  schema.check('split', split, schema.Split, '--')
  mesh = sharding.mesh_of(model.params)
  config, task = model.config, model.task
  run_splits = []
  if dataset is None:
    run_splits = [x for _, x, other in run_config.evaluations(config) if not other]
    split, dataset = _by_name(config, split)
  if dataset is not None:
    with config.ignore_type():  # The data set of the run may be a mixture.
      config.dataset = dataset
  fit_batches(config, mesh)
  if options:
    with config.unlocked(), config.ignore_type():
      config.task_options.update(options)
    task = type(task)(config, model.metadata)

  def open_split(wanted, further=(), other=None):
    metadata = {} if other else model.metadata
    try:
      source = sources.open_for(
        config, type(task), metadata, wanted, other, further=further
      )
    except FileNotFoundError as e:
      message = e.message if isinstance(e, slices.NoSplitError) else e
      remedy = ' or '.join(f"--split='{x}'" for x in run_splits) or '--split=SPLIT'
      raise FileNotFoundError(
        f'{message}; pass the split as {remedy}, and data that have moved as '
        '--dataset=FOLDER'
      ) from e
    names = task.class_names_of(source)
    if not other and task.class_names and names != task.class_names:
      raise ValueError(
        f"dataset='{config.dataset}' has {console.counted(len(names), 'class')} "
        f'{names[:5]}, and the '
        f'model has {len(task.class_names)} {task.class_names[:5]}: use data with '
        'the same classes'
      )
    return source

  evaluators = task.evaluators(mesh, split, open_split)
  if real_labels is not None:
    evaluators = [*evaluators, real.Real(task, mesh, open_split, split, real_labels)]
  metrics = {}
  for evaluator in evaluators:
    metrics.update(evaluator.run(model.params, model.extra))
  console.say(
    f"{model.workdir}, step {model.step}, split '{split}' of {config.dataset}: "
    + metrics_lib.format_metrics(metrics)
  )
  return metrics


def _by_name(config, name: str) -> tuple[str, str | None]:
  """Returns split and data set of a name: a split, or else an evaluation of the run."""
  evaluations = {
    x: (split, other) for x, split, other in run_config.evaluations(config)
  }
  split, dataset = evaluations.get(name, (name, None))
  if split == name and dataset is None:
    return name, None
  look = lambda: sources.has_split(config, name)
  try:
    if processes.from_first('looking for a split', look):
      return name, None
  except FileNotFoundError:  # The data have moved, which is reported later.
    return name, None
  return split, dataset


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
  """Parses options of the form 'NAME=VALUE'."""
  found = {}
  for text in texts:
    name, equals, value = text.partition('=')
    if not name or not equals:
      raise ValueError(f'--option={text} must be NAME=VALUE, such as tight=1')
    found[name] = schema.literal(value)
  return found


def fit_batches(config, mesh):
  """Rounds the batch sizes up, in place, to multiples of the devices."""
  shards = sharding.batch_shards(mesh)
  for key in ('batch', 'batch_eval'):
    config[key] = -(-config[key] // shards) * shards


def run_mesh(workdir) -> jax.sharding.Mesh:
  """Returns the mesh of a run, or a data-parallel one on other devices."""
  config, _ = workdir_lib.load(workdir)
  try:
    return sharding.make_mesh(config.mesh)
  except ValueError:
    return sharding.make_mesh({'data': -1})
