r"""Trains a ViT from scratch with Adam on a TFDS data set or a folder.

  vit_jax train --config=configs/pretrain.py:ti16,/path/to/folder \
    --workdir=/tmp/run
  vit_jax train --config=configs/pretrain.py:s16,imagenet2012,light2 \
    --workdir=/tmp/run
  vit_jax train --config=configs/pretrain.py:l16,/data/21k,imagenet21k,30ep \
    --workdir=/tmp/run

The argument is MODEL,DATA, optionally followed by RECIPE, EPOCHS and
AUGMENTATION in any order. RECIPE is imagenet2012, imagenet21k, jft300m or other; the
default follows the data set's name. EPOCHS is one of the paper's training lengths
(see below), by default the longest. AUGMENTATION is a setting of AUGREG in common.py.

The recipes follow arXiv 2010.11929, table 3 and B.1. Expected on the
ImageNet validation set, after 300 epochs of ImageNet from scratch: B/32 69.19,
B/16 74.79, L/32 66.90, L/16 72.59 (issue #62 of the original); on the
validation data of ImageNet-21k, after 90 epochs: B/16 47.88, B/32 44.04, L/16
49.90, L/32 45.42, H/14 49.06; on ImageNet, after JFT-300M and fine-tuning
(configs/vit.py) at 512 and 518 pixels: L/16 87.76, H/14 88.55 (table 2).

Peculiarities of the published recipes:

- The gradient is clipped for ImageNet only (caption of table 3). If another run
  diverges, set --config.grad_norm_clip=1.
- Weight decay is multiplied by the learning rate.
- Linear decay ends at 1e-5 rather than 0 (issue #2).
- ImageNet-21k and JFT-300M have a sigmoid per class, summed over classes (issue
  #34), and a head with a hidden layer. On ImageNet the head here is linear;
  --config.model.representation_size=768 adds the hidden layer of section 3.1.
- ResNets (bit_*) train on JFT-300M with Adam (D.1). configs/bit_pretrain.py has the
  recipe of BiT.
"""

import ml_collections

from vit_jax.configs import common, models

# Recipes of table 3 (all with Adam, batch 4096, 10k warm-up, 224 px), and the
# dropout of their Transformers.
RECIPES = {
  'imagenet2012': dict(
    base_lr=3e-3, decay_type='cosine', weight_decay=0.3, grad_norm_clip=1.0,
    loss='softmax',
  ),
  'imagenet21k': dict(
    base_lr=1e-3, decay_type='linear', weight_decay=0.03, grad_norm_clip=0.0,
    loss='sigmoid',
  ),
  # JFT-300M is not public: for plans (vit_jax.planning.plan), and for its owners. The
  # learning rate depends on the model.
  'jft300m': dict(
    decay_type='linear', weight_decay=0.1, grad_norm_clip=0.0, loss='sigmoid'
  ),
}  # fmt: skip
DROPOUT = {'imagenet2012': 0.1, 'imagenet21k': 0.1, 'jft300m': 0.0}

# Model -> learning rate on JFT-300M.
JFT = {
  **dict.fromkeys(('b16', 'b32', 'r50_b16', 'r50_b32', 'bit_r101x1'), 8e-4),
  **dict.fromkeys(('l32', 'bit_r152x1', 'bit_r152x2'), 6e-4),
  **dict.fromkeys(('l16', 'r50_l16'), 4e-4),
  **dict.fromkeys(('bit_r50x1', 'bit_r50x2'), 1e-3),
  'h14': 3e-4,
  'r50_l32': 2e-4,
}

# Recipe, or recipe and model -> lengths in epochs, the default first.
EPOCHS = {
  'imagenet2012': (300,),
  'imagenet21k': (90,),
  ('imagenet21k', 'l16'): (90, 30),
  ('imagenet21k', 'l32'): (90, 30),
  'jft300m': (7,),
  ('jft300m', 'l16'): (14, 7),
  ('jft300m', 'h14'): (14,),
  ('jft300m', 'r50_l16'): (14, 7),
}
LENGTHS = ('7ep', '14ep', '30ep', '90ep', '300ep')

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
  eval_every=200,
  progress_every=10,
  checkpoint_every=200,
)


def get_config(arg: str = 'b16,imagenet2012') -> ml_collections.ConfigDict:
  """Returns the config for 'MODEL,DATA', with ',RECIPE' and so on."""
  model, dataset, settings = common.choose(
    arg,
    {
      'recipe': (*RECIPES, 'other'),
      'augmentation': tuple(common.AUGREG),
      'length': LENGTHS,
    },
    'pretrain.py:b16,/path/to/folder,imagenet21k,medium1',
  )
  config = common.set_dataset(common.get_config(), dataset)
  config.pretrained_dir = None  # From random weights.
  config.model = models.get_config(model)
  config.optimizer = 'adam'
  config.model.dtype = 'auto'  # bfloat16, except on CPUs.
  config.optim_dtype = 'float32'
  if settings['augmentation']:
    common.set_augmentation(config, settings['augmentation'])
  model = models.short_name(config.model.model_name)
  usual = dataset in RECIPES and (dataset != 'jft300m' or model in JFT)
  recipe = settings['recipe'] or (dataset if usual else 'other')
  if recipe == 'other':
    return _set_other(config, settings['length'])
  return _set_recipe(config, recipe, model, settings['length'])


def _set_other(
  config: ml_collections.ConfigDict, length: str | None
) -> ml_collections.ConfigDict:
  if length is not None:
    raise ValueError(
      f"'{length}' chooses a length of a published recipe, and the recipe here is "
      f"'other': set --config.total_epochs={length.removesuffix('ep')}"
    )
  config.update(OTHER)
  if 'transformer' in config.model:
    config.model.transformer.dropout_rate = DROPOUT['imagenet2012']
  return config


def _set_recipe(
  config: ml_collections.ConfigDict, name: str, model: str, length: str | None
) -> ml_collections.ConfigDict:
  if name == 'jft300m':
    if model not in JFT:
      raise ValueError(
        f"recipe 'jft300m' has no settings for the model '{model}': use one of "
        f'{", ".join(JFT)}'
      )
    config.base_lr = JFT[model]
  config.update(RECIPES[name])
  config.total_epochs = _epochs(name, model, length)
  config.update(batch=4096, batch_eval=4096, warmup_steps=10_000)
  config.update(eval_every=1_000, progress_every=50)
  if 'transformer' in config.model:  # A Mixer and a ResNet have none.
    config.model.transformer.dropout_rate = DROPOUT[name]
  if name in ('imagenet21k', 'jft300m'):
    if 'transformer' in config.model:  # A hidden layer of the model's width.
      config.model.representation_size = config.model.hidden_size
    if 'head_bias_init' in models.with_options(config.model):
      # A low bias makes all classes improbable at first (issue #2).
      config.model.head_bias_init = -10.0
  return config


def _epochs(recipe: str, model: str, length: str | None) -> float:
  published = EPOCHS.get((recipe, model), EPOCHS[recipe])
  epochs = published[0] if length is None else int(length.removesuffix('ep'))
  if epochs not in published:
    raise ValueError(
      f"recipe '{recipe}' trains '{model}' for {' or '.join(map(str, published))} "
      f"epochs, not '{length}': for another length set "
      f'--config.total_epochs={epochs}'
    )
  return float(epochs)
