"""Trains a small ViT from scratch on scikit-learn's digits, without a download.

python -m vit_jax.main --config=configs/digits.py --workdir=/tmp/digits
"""

from vit_jax.configs import common
from vit_jax.configs import models


def get_config():
  """Returns the config."""
  config = common.set_dataset(common.get_config(), 'digits')
  config.pp.crop = 16
  config.pp.channels = 1
  config.pp.crop_area = (0.6, 1.0)
  config.pp.flip = False
  config.pp.rotate = 10.0

  config.model = models.get_config('ti16')
  config.model.model_name = 'ViT-digits'
  config.model.patches.size = (4, 4)
  config.model.hidden_size = 96
  config.model.transformer.update(num_layers=6, mlp_dim=192, num_heads=3)
  config.model.transformer.dropout_rate = 0.0

  config.batch = 128
  config.batch_eval = 120
  config.total_epochs = 60.0
  config.warmup_epochs = 5.0
  config.optimizer = 'adam'
  config.optim_dtype = 'float32'
  config.base_lr = 2e-3
  config.weight_decay = 0.05
  config.label_smoothing = 0.1
  config.progress_every = 50
  config.eval_every = 100
  config.checkpoint_every = 100
  return config
