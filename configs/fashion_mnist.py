"""Trains a small ViT from scratch on Fashion-MNIST (arXiv 1708.07747): 28 px, 10 classes.

  vit_jax train --config=configs/fashion_mnist.py --workdir=/tmp/fashion

TFDS downloads the data, 30 MB; without a network: `python -m benchmarks.mnist --help`.
"""

from vit_jax.configs import common, models


def get_config():
  config = common.set_dataset(common.get_config(), 'fashion_mnist')
  config.pretrained_dir = None  # Random initial weights.
  config.pp.crop = 28  # 49 patches of 4x4.
  config.pp.channels = 1
  config.pp.crop_area = (0.8, 1.0)
  config.pp.crop_ratio = (0.9, 1.1)
  config.pp.flip = True

  config.model = models.get_config('ti16')
  config.model.model_name = 'ViT-fashion_mnist'
  config.model.patches.size = (4, 4)
  config.model.hidden_size = 96
  config.model.transformer.num_layers = 4
  config.model.transformer.mlp_dim = 384

  config.update(batch=128, batch_eval=500)
  config.update(total_epochs=15.0, warmup_epochs=1.0)
  config.update(optimizer='adam', optim_dtype='float32', base_lr=1e-3)
  config.update(weight_decay=0.05, label_smoothing=0.1)
  config.update(progress_every=50, eval_every=1000, checkpoint_every=1000)
  return config
