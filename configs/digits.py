"""Trains a small ViT from scratch on scikit-learn's digits, without a download.

  vit_jax train --config=configs/digits.py --workdir=/tmp/digits

Takes about one and a half minutes on two cores, and reaches 99.2 % on the 360 test images.
"""

import ml_collections

from vit_jax.configs import common, models


def get_config() -> ml_collections.ConfigDict:
  """Returns the config, see the top of this file."""
  config = common.set_dataset(common.get_config(), 'digits')
  config.pretrained_dir = None  # Random initial weights.
  # 8x8 pixels, grey, enlarged to 16x16: 16 patches of 4x4.
  config.pp.crop = 16
  config.pp.channels = 1
  # Slight shifts, stretches and rotations; a flip would change the digit.
  config.pp.crop_area = (0.8, 1.0)
  config.pp.crop_ratio = (0.9, 1.1)
  config.pp.flip = False
  config.pp.rotate = 10.0

  config.model = models.get_config('ti16')
  config.model.model_name = 'ViT-digits'
  config.model.patches.size = (4, 4)
  config.model.hidden_size = 96
  config.model.transformer.num_layers = 4
  config.model.transformer.mlp_dim = 384

  config.update(batch=128, batch_eval=120)
  config.update(total_epochs=80.0, warmup_epochs=5.0)
  config.update(optimizer='adam', optim_dtype='float32', base_lr=1e-3)
  config.update(weight_decay=0.05, label_smoothing=0.1)
  config.update(progress_every=50, eval_every=200, checkpoint_every=200)
  return config
