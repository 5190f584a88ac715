r"""Trains a ViT from scratch with Adam, on any TFDS data set or folder.

  python -m vit_jax.main --config=configs/pretrain.py:ti16,/path/to/folder \
    --workdir=/tmp/run
  python -m vit_jax.main --config=configs/pretrain.py:b16,imagenet2012 \
    --workdir=/tmp/run

  python -m vit_jax.main --config=configs/pretrain.py:s16,imagenet2012,light2 \
    --workdir=/tmp/run

The argument is MODEL,DATA or MODEL,DATA,AUGMENTATION: a short name from models.py
(ti16, s16, b32, l16, h14, r50_b16, ...), a TFDS name or a folder with
train/<class>/* and test/<class>/*, and a setting of RandAugment and mixup of
"How to train your ViT?" (arXiv 2106.10270): none, light1, light2, medium1,
medium2, strong1 or strong2.

Recipes are those of arXiv 2010.11929, table 3 and B.1. What to expect on the
ImageNet validation set after 300 epochs of ImageNet from scratch: B/32 69.19,
B/16 74.79, L/32 66.90, L/16 72.59 (issue #62 of the original); on
ImageNet-21k's own, after 90 epochs: B/16 47.88, B/32 44.04, L/16 49.90, L/32
45.42, H/14 49.06.
"""

from vit_jax.configs import common
from vit_jax.configs import models

# data set: what table 3 says (Adam, batch 4096, 10k warm-up, 224 px for all).
RECIPES = {
  'imagenet2012': dict(
    total_epochs=300.0,
    base_lr=3e-3,
    decay_type='cosine',
    weight_decay=0.3,
    loss='softmax',
  ),
  'imagenet21k': dict(
    total_epochs=90.0,
    base_lr=1e-3,
    decay_type='linear',
    weight_decay=0.03,
    loss='sigmoid',
  ),
}
DROPOUT = 0.1

# JFT-300M, which is not public: for plans (vit_jax.plan) and those who have it.
# Model: epochs, learning rate.
JFT = {
  'b16': (7.0, 8e-4),
  'b32': (7.0, 8e-4),
  'l32': (7.0, 6e-4),
  'l16': (14.0, 4e-4),
  'h14': (14.0, 3e-4),
  'r50_b16': (7.0, 8e-4),
  'r50_b32': (7.0, 8e-4),
  'r50_l32': (7.0, 2e-4),
  'r50_l16': (14.0, 4e-4),
}

# For data that table 3 does not know, a folder for one: no published number.
OTHER = dict(
  total_epochs=100.0,
  warmup_epochs=5.0,
  base_lr=1e-3,
  decay_type='cosine',
  weight_decay=0.1,
  loss='softmax',
  label_smoothing=0.1,
  batch=128,
  batch_eval=128,
)


def get_config(arg: str = 'b16,imagenet2012'):
  """Returns the config for 'MODEL,DATA' or 'MODEL,DATA,AUGMENTATION'.

  Raises:
    ValueError: if the argument is nothing like that, or model or augmentation are
      unknown.
  """
  model, dataset, augmentation = (*arg.split(','), '', '')[:3]
  if not dataset or arg.count(',') > 2:
    raise ValueError(
      f"'{arg}' must be MODEL,DATA or MODEL,DATA,AUGMENTATION: "
      '--config=configs/pretrain.py:ti16,/path/to/folder or '
      '--config=configs/pretrain.py:b16,imagenet2012,medium1'
    )
  config = common.set_dataset(common.get_config(), dataset)
  if augmentation:
    common.set_augmentation(config, augmentation)
  config.model = models.get_config(model)
  if 'transformer' in config.model:  # A Mixer has none.
    config.model.transformer.dropout_rate = DROPOUT
  config.optimizer = 'adam'
  config.optim_dtype = 'float32'
  config.eval_every = 1_000
  config.progress_every = 50
  recipe = RECIPES.get(dataset)
  if dataset == 'jft300m' and model in JFT:
    epochs, base_lr = JFT[model]
    recipe = dict(
      total_epochs=epochs,
      base_lr=base_lr,
      decay_type='linear',
      weight_decay=0.1,
      loss='sigmoid',
    )
    config.model.transformer.dropout_rate = 0.0
  if recipe is None:
    config.update(OTHER)
    config.eval_every = 200
    config.progress_every = 10
    config.checkpoint_every = 200
    return config
  config.update(recipe, batch=4096, batch_eval=4096, warmup_steps=10_000)
  if dataset in ('imagenet21k', 'jft300m'):
    # One hidden layer of the width before the head, whose bias starts so low
    # that all classes are improbable at first (issue #2 of the original).
    config.model.representation_size = config.model.hidden_size
    config.model.head_bias_init = -10.0
  return config
