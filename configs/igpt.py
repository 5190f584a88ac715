r"""Trains iGPT to predict the pixels of images, without labels.

  vit_jax train --config=configs/igpt.py:s,imagenet2012,32 \
    --workdir=/tmp/igpt
  vit_jax train --config=configs/igpt.py:l,/path/to/folder,48,bert \
    --workdir=/tmp/igpt

The argument is SIZE,DATA,SIDE or SIZE,DATA,SIDE,OBJECTIVE: s, m, l or xl; a
TFDS name or a folder, with or without classes; 32, 48 or 64 pixels; ar (each
pixel from those before it) or bert (15 % of the pixels from the others). The
palette is learned from the training images, or the released one:
--config.task_options.palette=kmeans_centers.npy.

The recipe follows "Generative Pretraining from Pixels" (Chen et al., ICML
2020). Expected at 32 px on the test images of ImageNet: 3.01, 2.97 and 2.95 bits per
dimension for s, m and l (2.0895, 2.0614 and 2.0466 nats of the released weights).
iGPT-L, 32 px, reaches 96.3 % on CIFAR-10 by a linear probe of its best layer, and
99.0 % fine-tuned.
"""

import ml_collections

from vit_jax.configs import common, models

SIDES = (32, 48, 64)
OBJECTIVES = ('ar', 'bert')
# From memory of table 5 of the paper: our reference does not have them.
LEARNING_RATES = {'s': 3e-3, 'm': 3e-3, 'l': 1e-3, 'xl': 3e-4}
# Short sides from 256 to 384 pixels, of which 224 x 224 are cropped: shares of
# the area of a photograph of 4:3.
_CROP_AREA = tuple(3 / 4 * (224 / side) ** 2 for side in (384, 256))


def get_config(arg: str = 's,imagenet2012,32') -> ml_collections.ConfigDict:
  """Returns the config for 'SIZE,DATA,SIDE' or 'SIZE,DATA,SIDE,OBJECTIVE'."""
  size, dataset, side, objective = parse(arg)
  config = common.set_dataset(common.get_config(), dataset)
  config.pretrained_dir = None  # From random weights.
  config.task = 'pixels'
  set_model(config, size, side)
  config.model.causal = objective == 'ar'
  config.update(batch=128, total_steps=1_000_000)
  if size == 'xl':
    config.update(batch=64, total_steps=2_000_000)
  config.update(batch_eval=128, warmup_epochs=1.0)
  set_adam(config)
  config.update(base_lr=LEARNING_RATES[size], decay_type='cosine')
  config.update(eval_every=10_000, checkpoint_every=5_000, progress_every=50)
  return config


def parse(arg: str) -> tuple[str, str, int, str]:
  """Returns size, data set, side and objective of an argument."""
  size, dataset, side, objective = (*arg.split(','), '', '', '', '')[:4]
  objective = objective or 'ar'
  is_known = dataset and size in LEARNING_RATES and objective in OBJECTIVES
  if not is_known or side not in map(str, SIDES) or arg.count(',') > 3:
    raise ValueError(
      f"'{arg}' must be SIZE,DATA,SIDE or SIZE,DATA,SIDE,OBJECTIVE, with a size "
      f'of {", ".join(LEARNING_RATES)}, a side of 32, 48 or 64 pixels, and the '
      'objective ar or bert: --config=configs/igpt.py:s,imagenet2012,32'
    )
  return size, dataset, int(side), objective


def set_model(config: ml_collections.ConfigDict, size: str, side: int) -> None:
  """Sets the model, the side of its images in pixels, and how they are cropped."""
  config.model = models.get_config(f'igpt_{size}')
  config.model.dtype = 'auto'  # bfloat16, except on CPUs.
  config.model.num_positions = side**2
  # Evaluation: the square in the centre.
  config.pp.update(crop=side, resize=side, flip=False)
  config.pp.update(crop_area=_CROP_AREA, crop_ratio=(1.0, 1.0))


def set_adam(config: ml_collections.ConfigDict) -> None:
  """Sets the paper's optimiser: Adam without weight decay."""
  config.update(optimizer='adam', b2=0.95, optim_dtype='float32')
  config.grad_norm_clip = 0.0
