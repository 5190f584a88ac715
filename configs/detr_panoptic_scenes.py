r"""Trains a small DETR to segment scenes of digits, without a download.

As in configs/detr_panoptic.py, first the detector, then the mask head while the
detector is frozen:

  python -m vit_jax.main --config=configs/detr_panoptic_scenes.py:boxes \
    --workdir=/tmp/boxes
  python -m vit_jax.main --config=configs/detr_panoptic_scenes.py:masks \
    --config.pretrained=/tmp/boxes --workdir=/tmp/masks

Digits are things, and the textures of the ground are stuff.
"""

from vit_jax.configs import common
from vit_jax.configs import detr_scenes

PARTS = ('boxes', 'masks')


def get_config(arg: str = 'boxes'):
  """Returns the config for 'boxes' or 'masks'.

  Raises:
    ValueError: if the argument is another one.
  """
  if arg not in PARTS:
    raise ValueError(
      f"'{arg}' must be one of {', '.join(PARTS)}, as in "
      '--config=configs/detr_panoptic_scenes.py:boxes'
    )
  config = detr_scenes.get_config()
  common.set_dataset(config, 'scenes/panoptic')
  config.task = 'segment'
  config.model.model_name = 'DETR-scenes-panoptic'
  config.task_options.truth_size = 128
  if arg == 'boxes':
    return config
  config.model.mask_head = True
  config.model.masks_at_a_time = 0
  config.lr_multipliers = (('^segmentation/', 1.0), ('', 0.0))
  config.best_metric = 'PQ_test'
  config.total_steps = 1_200
  config.eval_every = 400
  config.checkpoint_every = 400
  return config
