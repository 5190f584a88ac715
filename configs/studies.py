"""Studies of small models (vit_jax/studies/study.py) on digits, MNIST or Fashion-MNIST.

configs/position_embeddings.py and configs/pooling.py are examples.
"""

from collections.abc import Iterable

import ml_collections

from vit_jax.configs import common, digits

DATASETS = ('digits', 'fashion_mnist', 'mnist')


def check_dataset(dataset: str, datasets: Iterable[str], name: str) -> None:
  """Raises ValueError if the config `name` does not know a data set."""
  if dataset not in datasets:
    raise ValueError(
      f'configs/{name}.py:{dataset} is not a data set of this config: use one of '
      + ', '.join(datasets)
    )


def change_dataset(config: ml_collections.ConfigDict, dataset: str) -> None:
  """Changes a config made from configs/digits.py to a data set of DATASETS."""
  common.set_dataset(config, dataset)
  if dataset != 'digits':
    config.batch_eval = 80  # Divides 10,000. Small batches are faster on CPUs.
  if dataset == 'fashion_mnist':
    config.pp.update(flip=True, rotate=0.0)


def get_config(
  title: str, variants: tuple, dataset: str = 'digits'
) -> ml_collections.ConfigDict:
  """Returns the config of a study of small models on a data set of DATASETS.

  `title` is the title of the plot, and `variants` is ((name, {key: value, ...}), ...).
  """
  config = ml_collections.ConfigDict()
  config.trainer = 'study'
  config.title = title
  config.base = digits.get_config()
  config.base.model.hidden_size = 48
  config.base.model.transformer.mlp_dim = 192
  config.base.total_epochs = 20.0
  config.base.warmup_epochs = 2.0
  config.base.base_lr = 2e-3
  config.base.update(eval_every=0, checkpoint_every=0, log_images=0)
  change_dataset(config.base, dataset)
  if dataset != 'digits':  # 60,000 images of 28x28 pixels, not 1,437 of 8x8.
    config.base.pp.update(crop=28, crop_area=None)
    config.base.update(batch=64, total_epochs=2.0, warmup_epochs=0.2)
  config.variants = variants
  config.seeds = (0, 1, 2)
  config.metric = 'accuracy_test'
  return config


def select(variants: Iterable[str], arg: str) -> tuple[list[str], str]:
  """Splits an argument at its commas into variants, by default all, and a data set."""
  selected = [name.strip() for name in arg.split(',')] if arg else []
  dataset_names = [name for name in selected if name in DATASETS]
  variant_names = [name for name in selected if name not in DATASETS]
  for name in variant_names:
    if name not in variants:
      raise ValueError(
        f"variant '{name}' is unknown: use some of {', '.join(variants)}, and one of "
        f'{", ".join(DATASETS)}, separated by commas'
      )
  if len(dataset_names) > 1:
    raise ValueError(f"'{arg}' names {len(dataset_names)} data sets: use one")
  dataset = dataset_names[0] if dataset_names else 'digits'
  return variant_names or list(variants), dataset
