"""Trains a small ViT to segment scenes of digits, without a download.

  vit_jax train --config=configs/segment_scenes.py --workdir=/tmp/scenes

Each pixel is of one of ten digits or of three textures of the ground. Expected on the 400
test scenes: mIoU 45.2 ± 1.4 %, 85.6 ± .7 % of the pixels, after under six minutes of
processor time; 60.3 ± 2.1 % with an encoder that has predicted masked patches first
(docs/segmentation.md). `python -m benchmarks.fashion segmentation_scenes /tmp/clothes`
writes scenes of clothes, on which it reaches 37.5 ± .3 %: --config.dataset=/tmp/clothes.
"""

import ml_collections

from vit_jax.configs import common, models


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = common.set_dataset(common.get_config(), 'scenes/semantic')
  config.pretrained_dir = None  # Random initial weights.
  config.task = 'segment_semantic'
  config.pp.crop = 48
  config.pp.crop_area = (0.3, 1.0)
  # Mirroring would change the meaning of digits.
  config.pp.flip = False

  config.model = models.get_config('ti16')
  config.model.model_name = 'ViT-scenes'
  config.model.patches.size = (4, 4)
  config.model.hidden_size = 64
  config.model.transformer.update(num_layers=3, num_heads=4, mlp_dim=256)

  config.update(batch=16, batch_eval=50, total_steps=2_000, warmup_steps=100)
  config.update(optimizer='muon', momentum=0.95, optim_dtype='float32', base_lr=4e-3)
  config.weight_decay = 0.05
  config.update(progress_every=100, eval_every=1_000, checkpoint_every=1_000)
  return config
