"""Evaluates a trained model on any split, without training.

python -m vit_jax.main --workdir=/tmp/digits --evaluate=test
"""

from vit_jax import cli
from vit_jax import predict
from vit_jax.data import sources
from vit_jax.run import progress
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
    A dict with `accuracy`, `loss`, `num_examples` and `img_sec_core`.

  Raises:
    FileNotFoundError: if there is no such run or folder.
    ValueError: if split, data set or classes are not right.
  """
  mesh = sharding.make_mesh({'data': -1})
  model = predict.load(workdir, step, mesh)
  config = model.config
  if dataset is not None:
    config.dataset = dataset
  shards = sharding.batch_shards(mesh)
  config.batch_eval = -(-config.batch_eval // shards) * shards
  source = sources.open_split(config, split, model.class_names)
  if source.class_names != model.class_names:
    raise ValueError(
      f"dataset='{config.dataset}' has {len(source.class_names)} classes "
      f'{source.class_names[:5]} ..., the model {len(model.class_names)} '
      f'{model.class_names[:5]} ...: give data of the same classes'
    )
  metrics = {}
  for evaluator in model.task.evaluators(mesh, source, split):
    metrics.update(evaluator.run(model.params))
  metrics = {
    name.removesuffix(f'_{split}'): value for name, value in metrics.items()
  }
  cli.say(
    f"{workdir}, step {model.step}, split '{split}' of {config.dataset}: "
    + progress.format_metrics(metrics)
  )
  return metrics
