r"""Trains DETR as published, on COCO or on a folder (arXiv 2005.12872).

  vit_jax train --config=configs/detr.py:r50,coco/2017 \
    --config.pretrained=resnet50.safetensors --workdir=/tmp/detr
  vit_jax train --config=configs/detr.py:r50,/path/to/folder \
    --config.pretrained=detr-resnet-50.safetensors \
    --config.total_epochs=50 --workdir=/tmp/own
  vit_jax train --config=configs/detr.py:vit_s16,coco/2017 \
    --config.pretrained=ViT-S_16.npz --config.model.dtype=bfloat16 \
    --workdir=/tmp/detr_vit

The argument is MODEL,DATA or MODEL,DATA,LENGTH. MODEL is r50, r50_dc5, r101,
r101_dc5, or vit_NAME for a Vision Transformer of models.py as the backbone. DATA is a
TFDS name with the features of coco/2017, or a folder. LENGTH is 300ep (the default,
with a tenth of the learning rate after 200 epochs) or 500ep (after 400);
--config.total_epochs=N sets any other length, with the drop at the same share of the
run.

Expected on COCO's validation images (table 1: AP, AP50, AP75, AP of small, medium
and large objects), after 500ep, evaluated with no or little padding
(--config.task_options.tight=1, see docs/detection.md):

  r50       42.0  62.4  44.2  20.5  45.8  61.1
  r50_dc5   43.3  63.1  45.9  22.5  47.3  61.1
  r101      43.5  63.8  46.4  21.9  48.0  61.8
  r101_dc5  44.9  64.7  47.7  23.7  49.5  62.3

As published, the backbone starts from weights trained on ImageNet, has a tenth of the
learning rate, and its root, its first stage and its batch norm are frozen. To train
from scratch, set --config.lr_multipliers="()" and --config.model.norm=group. All
layers of a Vision Transformer are trained, at a tenth of the learning rate, and
recomputed in the backward pass; no results are published for these models.

On TPUs and GPUs set --config.model.dtype=bfloat16. In a folder whose images are
smaller than COCO's, all lengths in pixels are reduced in proportion. The augmentation
is from appendix A.4, except that long images may be smaller than published:
docs/detection.md describes the canvases.
"""

import contextlib
import math
import os

import ml_collections
from PIL import Image

from vit_jax.configs import common, models

# Length -> (epochs, epoch after which the learning rate drops to a tenth).
LENGTHS = {'300ep': (300, 200), '500ep': (500, 400)}
# Lengths of the shorter side of training images in pixels (appendix A.4).
SIDES = tuple(range(480, 801, 32))
_ENDINGS = ('.jpg', '.jpeg', '.png', '.webp', '.bmp', '.gif')
_SAMPLE = 200  # Images of a folder whose size is looked up.


def get_config(arg: str = 'r50,coco/2017') -> ml_collections.ConfigDict:
  """Returns the config for 'MODEL,DATA' or 'MODEL,DATA,LENGTH'."""
  model, dataset, length = common.split_argument(
    arg, 'MODEL,DATA or MODEL,DATA,LENGTH', 'detr.py:r50,coco/2017'
  )
  length = length or '300ep'
  if length not in LENGTHS:
    raise ValueError(
      f"'{length}' is unknown: use one of {', '.join(LENGTHS)}, or set "
      '--config.total_epochs'
    )
  config = common.set_dataset(common.get_config(), dataset)
  config.pretrained_dir = None
  config.task = 'detect'
  config.model = _model(model)
  config.pp.sides = SIDES
  _suit(config.pp, dataset)
  epochs, drop = LENGTHS[length]
  config.update(total_epochs=float(epochs), warmup_steps=0)
  config.update(decay_type='staircase', decay_at=(drop / epochs,))
  config.update(batch=64, batch_eval=64, base_lr=1e-4, grad_norm_clip=0.1)
  # With decoupled weight decay: AdamW.
  config.update(optimizer='adam', optim_dtype='float32')
  config.update(weight_decay=1e-4, weight_decay_on='all')
  config.lr_multipliers = (
    ('^backbone/(conv_root|block1)/', 0.0),
    ('^backbone/', 0.1),
  )
  if 'vit' in config.model:
    config.lr_multipliers = config.lr_multipliers[1:]
    # The least multiple of a patch's side that is at least 28 pixels.
    patch = _patch(config.model.vit)
    config.pp.canvas_multiple = -(-28 // patch) * patch
  config.progress_every = 50
  # 118,287 images: an epoch is 1,848 steps.
  config.eval_every = 10_000
  config.checkpoint_every = 2_000
  return config


def _suit(pp: ml_collections.ConfigDict, folder: str) -> None:
  """Reduces the lengths in pixels for a folder of images smaller than COCO's."""
  paths = []
  for parent, _, names in os.walk(folder):
    for name in names:
      if name.lower().endswith(_ENDINGS):
        paths.append(os.path.join(parent, name))
  paths.sort()
  interval = max(1, math.ceil(len(paths) / _SAMPLE))
  shorter = []
  for path in filter(os.path.isfile, paths[::interval]):
    # Opening the data reports broken images.
    with contextlib.suppress(OSError, Image.DecompressionBombError):
      with Image.open(path) as image:
        shorter.append(min(image.size))
  if not shorter:
    return
  shorter.sort()
  factor = shorter[len(shorter) * 9 // 10] / SIDES[0]
  if factor >= 1:
    return
  for key in ('sides', 'crop_sides', 'crop_range'):
    pp[key] = tuple(max(1, round(factor * length)) for length in pp[key])
  pp.eval_side = max(pp.sides)
  pp.longest_side = math.ceil(factor * pp.longest_side)


def _model(name: str) -> ml_collections.ConfigDict:
  """Returns the config of a model, such as 'r50_dc5' or 'vit_s16'."""
  if name.startswith('vit_'):
    return _vit_model(name.removeprefix('vit_'))
  names = [models.short_name(x).removeprefix('detr_') for x in models.DETRS]
  if name not in names:
    raise ValueError(
      f"model '{name}' is unknown: use one of {', '.join(names)}, or vit_NAME "
      'with the name of a Vision Transformer, such as vit_s16'
    )
  return models.get_config(f'detr_{name}')


def _vit_model(name: str) -> ml_collections.ConfigDict:
  config = models.get_config('detr_r50')
  del config.units, config.dilate_last
  config.backbone = 'vit'
  config.vit = models.with_options(models.get_config(name))
  if 'transformer' not in config.vit:
    raise ValueError(
      f"'{name}' is not a Vision Transformer, and cannot be the backbone of a DETR: "
      "use for example 's16' or 'r50_b32'"
    )
  config.model_name = f'DETR-{config.vit.model_name}'
  # Positions of a square of 800 pixels.
  side = 800 // _patch(config.vit)
  config.vit.transformer.update(position_grid=(side, side), remat='full')
  return config


def _patch(vit: ml_collections.ConfigDict) -> int:
  """Returns the side in pixels of what becomes a token."""
  side = vit.patches.size[0]
  if 'resnet' not in vit:
    return side
  # The root of a hybrid's ResNet divides by 4, each stage but the first by 2.
  return side * 4 * 2 ** max(0, len(vit.resnet.num_layers) - 1)
