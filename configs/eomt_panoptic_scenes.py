"""Trains a small EoMT to segment things and stuff of scenes, without a download.

vit_jax train --config=configs/eomt_panoptic_scenes.py --workdir=/tmp/eomt_panoptic

Digits are things, and the textures of the ground are stuff. The encoder is a small hybrid:
from random weights, convolutions learn the digits in fewer updates.
"""

import ml_collections

from vit_jax.configs import common, segment_scenes_eomt


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = common.set_dataset(segment_scenes_eomt.get_config(), 'scenes/panoptic')
  config.task = 'segment'
  config.pp.crop_area = (0.7, 1.0)
  config.model.model_name = 'EoMT-scenes-panoptic'
  # 8 x 8 tokens of an image of 64 x 64 pixels, and masks of 32 x 32 cells.
  config.model.resnet = {'num_layers': (1, 1), 'width_factor': 0.5}
  config.model.patches.size = (1, 1)
  config.model.num_upscales = 2
  # Scenes have 128 x 128 pixels, and at most seven segments.
  config.task_options = {'num_points': 512, 'max_objects': 8, 'truth_size': 128}
  config.update(batch=16, best_metric='PQ_test', total_steps=1_000, warmup_steps=100)
  config.update(eval_every=500, checkpoint_every=500)
  return config
