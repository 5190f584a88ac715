r"""Trains small models from scratch on Fashion-MNIST or MNIST: 28 px, 10 classes.

  vit_jax train --config=configs/fashion_mnist.py --workdir=/tmp/fashion
  vit_jax train --config=configs/fashion_mnist.py:hybrid,mnist --workdir=/tmp/mnist

The models are vit, hybrid, bit and mixer; the data sets fashion_mnist (arXiv
1708.07747) and mnist. TFDS downloads them, 30 and 11 MB; without a network: `python -m
benchmarks.mnist --help`.

On one core, a run takes 9 to 14 (hybrid; bit on MNIST) or 24 to 45 minutes (others).
Expected on Fashion-MNIST over three seeds, in percent: vit 89.33 ± 0.31, hybrid 89.89 ±
0.17, bit 92.37 ± 0.17, mixer 90.52 ± 0.16, and on MNIST vit 98.85 ± 0.26, hybrid
99.18 ± 0.04, bit 99.41 ± 0.08. With --config.optimizer=muon and --config.momentum=0.95,
vit reaches 91.49 ± 0.18 on Fashion-MNIST, and 93.1 after 36 epochs with
--config.pp.crop_area="(0.8, 1.0)", one seed; more in docs/benchmarks.md.
"""

import ml_collections

from vit_jax.configs import common, data_scaling, digits, models, studies


def _model(name: str) -> ml_collections.ConfigDict:
  """Returns the config of a model for 28x28 pixels; patches have 4x4 pixels."""
  if name == 'vit':
    return digits.get_config().model
  if name == 'mixer':
    config = models.get_config('mixer_b32')
    config.patches.size = (4, 4)
    config.update(hidden_dim=96, num_blocks=4, tokens_mlp_dim=48, channels_mlp_dim=384)
    return config
  config = data_scaling.families()[{'bit': 'BiT'}.get(name, name)]
  if name == 'hybrid':
    config.patches.size = (1, 1)  # Cells of 4x4 pixels.
  return config


def get_config(model_and_dataset: str = 'vit') -> ml_collections.ConfigDict:
  """Returns the config of a run, for MODEL or MODEL,DATASET."""
  forms, example = 'MODEL or MODEL,DATASET', 'fashion_mnist.py:hybrid,mnist'
  model, dataset = common.split_argument(model_and_dataset, forms, example)
  dataset = dataset or 'fashion_mnist'
  for value, choices in (
    (model, ('vit', 'hybrid', 'bit', 'mixer')),
    (dataset, ('fashion_mnist', 'mnist')),
  ):
    if value not in choices:
      raise ValueError(
        f"'{value}' of configs/fashion_mnist.py:{model_and_dataset} is unknown: use "
        f'one of {", ".join(choices)}'
      )
  config = digits.get_config()
  studies.change_dataset(config, dataset)
  config.model = _model(model)
  config.model.model_name = f'{model}-{dataset}'
  # After three epochs (on `train[90%:]`, one seed), random crops cost the ViT 2.6 points
  # on Fashion-MNIST, and gave the ResNet 0.2 points on MNIST.
  config.pp.update(crop=28, crop_area=(0.7, 1.0) if dataset == 'mnist' else None)
  if (model, dataset) == ('bit', 'fashion_mnist'):
    config.pp.crop = 56  # With 28 px: 90.55 ± 0.25 %.
  config.update(batch=64, base_lr=2e-3)
  # Convolutions learn faster.
  epochs = 6.0 if model in ('hybrid', 'bit') else 12.0
  config.update(total_epochs=epochs, warmup_epochs=epochs / 12)
  config.update(eval_every=2000, checkpoint_every=2000)
  return config
