"""Trains a small ViT from scratch on Fashion-MNIST (arXiv 1708.07747): 28 px, 10 classes.

  vit_jax train --config=configs/fashion_mnist.py --workdir=/tmp/fashion

TFDS downloads the data, 30 MB; without a network: `python -m benchmarks.mnist --help`.
The model and optimiser come from configs/digits.py.
"""

from vit_jax.configs import common, digits


def get_config():
  """Returns the config of a run; no recipe was tuned for this data set."""
  config = common.set_dataset(digits.get_config(), 'fashion_mnist')
  config.model.model_name = 'ViT-fashion_mnist'
  config.pp.update(crop=28, flip=True, rotate=0.0)  # 49 patches of 4x4.
  config.update(batch_eval=500, total_epochs=15.0, warmup_epochs=1.0)
  config.update(eval_every=1000, checkpoint_every=1000)
  return config
