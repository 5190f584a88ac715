r"""Trains a BiT ResNet from scratch (arXiv 1912.11370, section 3.2).

  vit_jax train --config=configs/bit_pretrain.py:bit_r50x1,imagenet2012 \
    --workdir=/tmp/bit
  vit_jax train --workdir=/tmp/bit \
    --config=configs/bit_pretrain.py:bit_r101x3,/data/21k,imagenet21k

The argument is MODEL,DATA or MODEL,DATA,RECIPE. RECIPE is imagenet2012 (BiT-S),
imagenet21k (BiT-M) or jft300m (BiT-L); the default follows the data set's name.
Expected after fine-tuning: see configs/bit_hyperrule.py.

The learning rate is 0.03 for 256 images: with another --config.batch, also set
--config.base_lr. Weight decay goes through the momentum (`l2_decay`). For several
labels per image, the sigmoid and the low head bias follow big_vision's bit_i21k.
"""

import ml_collections

from vit_jax.configs import common, models

BATCH = 4096
# Recipe -> (epochs, epochs after which the learning rate is divided by 10).
RECIPES = {
  'imagenet2012': (90, (30, 60, 80)),
  'imagenet21k': (90, (30, 60, 80)),
  'jft300m': (40, (10, 23, 30, 37)),
}
# Recipes for several labels per image.
SIGMOID = ('imagenet21k', 'jft300m')


def get_config(arg: str = 'bit_r50x1,imagenet2012') -> ml_collections.ConfigDict:
  """Returns the config for 'MODEL,DATA' or 'MODEL,DATA,RECIPE'."""
  model, dataset, recipe = common.split_argument(
    arg,
    'MODEL,DATA or MODEL,DATA,RECIPE',
    'bit_pretrain.py:bit_r50x1,/path/to/folder,imagenet2012',
  )
  recipe = recipe or dataset
  if recipe not in RECIPES:
    raise ValueError(
      f"recipe '{recipe}' is unknown: use one of {', '.join(RECIPES)} "
      '(--config=configs/bit_pretrain.py:MODEL,DATA,RECIPE)'
    )
  config = common.set_dataset(common.get_config(), dataset)
  config.pretrained_dir = None  # From random weights.
  config.model = models.get_config(model)
  config.model.dtype = 'auto'  # bfloat16, except on CPUs.
  epochs, drops = RECIPES[recipe]
  config.update(batch=BATCH, batch_eval=BATCH, base_lr=0.03 * BATCH / 256)
  config.update(total_epochs=float(epochs), warmup_steps=5_000)
  config.update(optimizer='sgd', momentum=0.9, optim_dtype='float32')
  config.decay_type = 'staircase'
  config.decay_at = tuple(epoch / epochs for epoch in drops)
  config.update(l2_decay=1e-4, grad_norm_clip=0.0)
  config.update(eval_every=1_000, progress_every=50)
  config.pp.resize = 256  # Evaluation: the central crop.
  if recipe in SIGMOID:
    config.loss = 'sigmoid'
    config.model.head_bias_init = -10.0
  return config
