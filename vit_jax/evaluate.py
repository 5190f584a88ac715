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
  """Evaluates the newest checkpoint of a run, and prints the numbers.

  Args:
    workdir: folder of the run.
    split: as TFDS writes it, or the name of a folder: 'test', 'train[:10%]'.
    dataset: another data set of the same classes, by default that of the run.
    step: the checkpoint to take, by default the newest.

  Returns:
    A dict with what the task measures (`accuracy` and `loss`, for classes),
    `num_examples` and `img_sec_core`.

  Raises:
    FileNotFoundError: if there is no such run or folder.
    ValueError: if split, data set or classes are not right, or no checkpoint is.
    OSError: if the storage does not answer.
  """
  rules.check('split', split, rules.split)
  mesh = _mesh(workdir)
  model = predict.load(workdir, step, mesh)
  config, task = model.config, model.task
  if dataset is not None:
    with config.ignore_type():  # That of the run may be a mixture.
      config.dataset = dataset
  shards = sharding.batch_shards(mesh)
  config.batch_eval = -(-config.batch_eval // shards) * shards

  def open_split(wanted):
    source = train.open_for(config, type(task), model.metadata, wanted)
    if task.class_names and source.class_names != task.class_names:
      raise ValueError(
        f"dataset='{config.dataset}' has {len(source.class_names)} classes "
        f'{source.class_names[:5]} ..., the model {len(task.class_names)} '
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
  """Returns the mesh of a run; copies on all devices where these are others."""
  config, _ = workdir_lib.load(workdir)
  try:
    return sharding.make_mesh(config.mesh)
  except ValueError:
    return sharding.make_mesh({'data': -1})
