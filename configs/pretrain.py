r"""Trains a ViT from scratch with Adam, on any TFDS data set or folder.

  python -m vit_jax.main --config=configs/pretrain.py:ti16,/path/to/folder \
    --workdir=/tmp/run
  python -m vit_jax.main --config=configs/pretrain.py:b16,imagenet2012 \
    --workdir=/tmp/run

  python -m vit_jax.main --config=configs/pretrain.py:s16,imagenet2012,light2 \
    --workdir=/tmp/run

  python -m vit_jax.main --config=configs/pretrain.py:b16,/data/21k,imagenet21k \
    --workdir=/tmp/run

The argument is MODEL,DATA, optionally followed by RECIPE and AUGMENTATION in
any order. MODEL is a short name from models.py (ti16, s16, b32, l16, h14,
r50_b16, ...). DATA is a TFDS name, or a folder with train/<class>/* and
test/<class>/*. RECIPE is imagenet2012, imagenet21k, jft300m or other; by
default the recipe of the data set's name. AUGMENTATION is a setting of
RandAugment and mixup from "How to train your ViT?" (arXiv 2106.10270): none,
light1, light2, medium1, medium2, strong1 or strong2.

The recipes are those of arXiv 2010.11929, table 3 and B.1. Expected on the
ImageNet validation set, after 300 epochs of ImageNet from scratch: B/32 69.19,
B/16 74.79, L/32 66.90, L/16 72.59 (issue #62 of the original); on the
validation data of ImageNet-21k, after 90 epochs: B/16 47.88, B/32 44.04, L/16
49.90, L/32 45.42, H/14 49.06.
"""

from vit_jax.configs import common
from vit_jax.configs import models

# Recipes of table 3 (all with Adam, batch 4096, 10k warm-up, 224 px).
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

# JFT-300M, which is not public: for plans (vit_jax.plan), and for its owners.
# Model -> (epochs, learning rate).
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

# For data that table 3 does not have, such as a folder: not a published recipe.
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
  """Returns the config for 'MODEL,DATA', with ',RECIPE' and ',AUGMENTATION'.

  Raises:
    ValueError: if the argument has another form, or the model, the recipe or
      the augmentation is unknown.
  """
  model, _, rest = arg.partition(',')
  dataset, *names = rest.split(',')
  if not dataset:
    raise ValueError(
      f"'{arg}' must be MODEL,DATA, MODEL,DATA,RECIPE, MODEL,DATA,AUGMENTATION or "
      'both: --config=configs/pretrain.py:ti16,/path/to/folder or '
      '--config=configs/pretrain.py:b16,/path/to/folder,imagenet21k,medium1'
    )
  config = common.set_dataset(common.get_config(), dataset)
  config.pretrained_dir = None  # From random weights.
  config.model = models.get_config(model)
  if 'transformer' in config.model:  # A Mixer has none.
    config.model.transformer.dropout_rate = DROPOUT
  config.optimizer = 'adam'
  config.optim_dtype = 'float32'
  recipe, augmentation = _chosen(names)
  if augmentation:
    common.set_augmentation(config, augmentation)
  return _set_recipe(config, recipe or _usual_recipe(dataset, model), model)


def _chosen(names):
  """Returns (recipe, augmentation) among the names, None for a missing one."""
  chosen = {}
  for name in names:
    kind = 'augmentation' if name in common.AUGREG else 'recipe'
    if kind == 'recipe' and name not in (*RECIPES, 'jft300m', 'other'):
      raise ValueError(
        f"'{name}' is neither a recipe, {', '.join(RECIPES)}, jft300m or other, nor "
        f'an augmentation, {", ".join(common.AUGREG)} '
        '(--config=configs/pretrain.py:MODEL,DATA,RECIPE,AUGMENTATION)'
      )
    if kind in chosen:
      raise ValueError(f"'{chosen[kind]}' and '{name}': give one {kind}")
    chosen[kind] = name
  return chosen.get('recipe'), chosen.get('augmentation')


def _usual_recipe(dataset, model):
  """Returns the name of a data set's default recipe."""
  known = dataset in RECIPES or (dataset == 'jft300m' and model in JFT)
  return dataset if known else 'other'


def _set_recipe(config, name, model):
  """Applies a recipe to the config; returns the config."""
  if name == 'other':
    config.update(OTHER)
    config.update(eval_every=200, progress_every=10, checkpoint_every=200)
    return config
  if name == 'jft300m':
    if model not in JFT:
      raise ValueError(
        f"recipe 'jft300m' has no settings for the model '{model}': use one of "
        f'{", ".join(JFT)}'
      )
    epochs, base_lr = JFT[model]
    config.update(
      total_epochs=epochs,
      base_lr=base_lr,
      decay_type='linear',
      weight_decay=0.1,
      loss='sigmoid',
    )
    config.model.transformer.dropout_rate = 0.0
  else:
    config.update(RECIPES[name])
  config.update(batch=4096, batch_eval=4096, warmup_steps=10_000)
  config.update(eval_every=1_000, progress_every=50)
  if name in ('imagenet21k', 'jft300m'):
    # The paper's head has a hidden layer of the model's width. The low bias
    # makes all classes improbable at first (issue #2 of the original).
    config.model.representation_size = config.model.hidden_size
    config.model.head_bias_init = -10.0
  return config
