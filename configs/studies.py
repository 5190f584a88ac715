"""Studies of small models on scikit-learn's digits (vit_jax/studies/study.py).

configs/position_embeddings.py and configs/pooling.py are examples.
"""

from collections.abc import Iterable

import ml_collections

from vit_jax.configs import digits


def get_config(title: str, variants: tuple) -> ml_collections.ConfigDict:
  """Returns the config of a study of small models on the digits.

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
  config.variants = variants
  config.seeds = (0, 1, 2)
  config.metric = 'accuracy_test'
  return config


def select(known: Iterable[str], names: str) -> list[str]:
  """Splits names at commas, and checks that they are known; '' stands for all."""
  chosen = [name.strip() for name in names.split(',')] if names else [*known]
  for name in chosen:
    if name not in known:
      raise ValueError(
        f"variant '{name}' is unknown: use some of {', '.join(known)}, separated "
        'by commas'
      )
  return chosen
