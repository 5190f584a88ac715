"""Evaluates a trained model on any split, without training.

python -m vit_jax.main --workdir=/tmp/digits --evaluate=test
"""

from vit_jax import cli
from vit_jax import predict
from vit_jax import train
from vit_jax.configs import rules
from vit_jax.run import metrics as metrics_lib
from vit_jax.run import workdir as workdir_lib
from vit_jax.scale import sharding


def evaluate(
  workdir: str, split: str, dataset: str | None = None, step: int | None = None
) -> dict[str, float]:
  """Evaluates a checkpoint of a run, and prints the metrics.

  Args:
    workdir: folder of the run.
    split: a split in the notation of TFDS, or the name of a folder: 'test',
      'train[:10%]'.
    dataset: another data set with the same classes; by default that of the run.
    step: step of the checkpoint; by default the newest.

  Returns:
    A dict with the metrics of the task (`accuracy` and `loss`, for classes),
    `num_examples` and `img_sec_core`.

  Raises:
    FileNotFoundError: if there is no such run or folder.
    ValueError: if the split, the data set, its classes or the checkpoint are
      wrong.
    OSError: if the storage does not answer.
  """
  rules.check('split', split, rules.split)
  mesh = _mesh(workdir)
  model = predict.load(workdir, step, mesh)
  config, task = model.config, model.task
  if dataset is not None:
    with config.ignore_type():  # The data set of the run may be a mixture.
      config.dataset = dataset
  shards = sharding.batch_shards(mesh)
  config.batch_eval = -(-config.batch_eval // shards) * shards

  def open_split(wanted):
    try:
      source = train.open_for(config, type(task), model.metadata, wanted)
    except FileNotFoundError as e:
      raise FileNotFoundError(
        f'{e}; to evaluate, name the split by --evaluate=SPLIT, and data that '
        'have moved by --dataset=FOLDER'
      ) from e
    if task.class_names and source.class_names != task.class_names:
      raise ValueError(
        f"dataset='{config.dataset}' has {len(source.class_names)} classes "
        f'{source.class_names[:5]} ..., the model has {len(task.class_names)} '
        f'{task.class_names[:5]} ...: give data of the same classes'
      )
    return source

  metrics = {}
  for evaluator in task.evaluators(mesh, split, open_split):
    metrics.update(evaluator.run(model.params, model.extra))
  cli.say(
    f"{workdir}, step {model.step}, split '{split}' of {config.dataset}: "
    + metrics_lib.format_metrics(metrics)
  )
  return metrics


def _mesh(workdir):
  """Returns the mesh of a run, or a data-parallel one on other devices."""
  config, _ = workdir_lib.load(workdir)
  try:
    return sharding.make_mesh(config.mesh)
  except ValueError:
    return sharding.make_mesh({'data': -1})
