"""Trains a small EoMT to segment scenes of digits, without a download.

  vit_jax train --config=configs/segment_scenes_eomt.py --workdir=/tmp/eomt

The encoder, data and recipe are those of segment_scenes.py, whose head is linear and
reaches 45.2 %. Expected on the 400 test scenes: mIoU 31.6 ± .4 %, 67.8 ± 2.2 % of the
pixels, after 11 to 18 minutes on one core. EoMT is meant for pre-trained encoders:
docs/segmentation.md shows what it reaches from masked patches.
"""

import ml_collections

from vit_jax.configs import segment_scenes


def get_config() -> ml_collections.ConfigDict:
  """Returns the config."""
  config = segment_scenes.get_config()
  config.model.update(kind='eomt', model_name='EoMT-scenes', num_queries=20)
  config.model.update(num_query_layers=2, num_upscales=1)
  # Images have 48 x 48 pixels, and at most seven classes.
  config.task_options.update(num_points=512, max_classes=8)
  return config
