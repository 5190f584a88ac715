r"""Trains DETR to segment images as published (arXiv 2005.12872, section 4.4).

The detector learns the boxes of things and of stuff, and then a mask head is
trained while the detector is frozen:

  vit_jax train \
    --config=configs/detr_panoptic.py:r50,coco/2017_panoptic,boxes \
    --config.pretrained=resnet50.safetensors --workdir=/tmp/boxes
  vit_jax train \
    --config=configs/detr_panoptic.py:r50,coco/2017_panoptic,masks \
    --config.pretrained=/tmp/boxes --workdir=/tmp/masks

The argument is MODEL,DATA,PART. MODEL and DATA are as in configs/detr.py, with the
features of coco/2017_panoptic. PART is boxes, masks, or both for all at once.

Expected on COCO's validation images (table 5: PQ, SQ, RQ; PQ of things, of
stuff):

  r50       43.4  79.3  53.8   48.2  36.3
  r50_dc5   44.6  79.8  55.0   49.4  37.3
  r101      45.1  79.9  55.5   50.5  37.0
"""

import ml_collections

from vit_jax.configs import detr

PARTS = ('boxes', 'masks', 'both')


def get_config(arg: str = 'r50,coco/2017_panoptic,boxes') -> ml_collections.ConfigDict:
  """Returns the config for 'MODEL,DATA,PART'."""
  detr_arg, _, part = arg.rpartition(',')
  if part not in PARTS:
    raise ValueError(
      f"'{arg}' must be MODEL,DATA,PART, with one of {', '.join(PARTS)} for the "
      'last, as in --config=configs/detr_panoptic.py:r50,coco/2017_panoptic,boxes'
    )
  config = detr.get_config(detr_arg)
  config.task = 'segment'
  if part == 'boxes':
    config.best_metric = 'AP_test'
    return config
  config.model.mask_head = True
  if part == 'masks':
    config.lr_multipliers = (('^segmentation/', 1.0), ('', 0.0))
    config.total_epochs = 25.0
    config.decay_at = (15 / 25,)
    config.batch = 16
  return config
