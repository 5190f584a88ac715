r"""Trains a ViT on ImageNet from scratch, by the recipe `vit_i1k` of big_vision.

  vit_jax train --config=configs/vit_i1k.py:b16 --workdir=/tmp/run
  vit_jax train --config=configs/vit_i1k.py:b32,imagenet2012,light1 \
    --workdir=/tmp/run

The argument is MODEL, MODEL,DATA or MODEL,DATA,AUGMENTATION. DATA is by default
imagenet2012. AUGMENTATION is a setting of AUGREG in common.py, by default the choice
of big_vision for the model.

Expected on the ImageNet validation set after 300 epochs: B/16 about 79 % (issue
#7 of big_vision), compared with 74.79 % for the paper's recipe
(configs/pretrain.py:b16,imagenet2012).

The loss is a sigmoid per class although each image has one class. The head's bias
starts at -6.9, the logarithm of 1/1000: with other data, set
--config.model.head_bias_init to the logarithm of 1/classes. Weight decay of 1e-4 is
multiplied by the schedule only, not by the learning rate. Training leaves out 1 % of
the images.
big_vision adds position embeddings to the patches only, initialised with standard
deviation 1/sqrt(D); here the class token has one too, and the standard deviation is
0.02, as in the original.
"""

import ml_collections

from vit_jax.configs import common, models

# Model -> augmentation, a key of common.AUGREG.
AUGMENTATIONS = {
  'ti16': 'light1',
  **dict.fromkeys(('s16', 'b32', 'b16', 'l16'), 'medium2'),
  's32': 'medium1',
}


def get_config(arg: str = 'b16') -> ml_collections.ConfigDict:
  """Returns the config for 'MODEL', 'MODEL,DATA' or 'MODEL,DATA,AUGMENTATION'."""
  model, dataset, augmentation = common.split_argument(
    arg if ',' in arg else f'{arg},imagenet2012',
    'MODEL,DATA or MODEL,DATA,AUGMENTATION',
    'vit_i1k.py:b16,/path/to/folder,medium1',
  )
  config = common.set_dataset(common.get_config(), dataset)
  config.model = models.get_config(model)
  config.model.dtype = 'auto'  # bfloat16, except on CPUs.
  if 'transformer' not in config.model:
    raise ValueError(
      f"model '{model}' is not a Vision Transformer, and the recipe is for these: use "
      f'one of {", ".join(AUGMENTATIONS)}'
    )
  set_optimization(config)
  config.update(total_epochs=300.0, batch=4096, batch_eval=4096)
  config.loss = 'sigmoid'
  config.model.head_bias_init = -6.9
  config.model.representation_size = config.model.hidden_size
  config.model.transformer.dropout_rate = 0.0
  return common.set_augmentation(
    config, augmentation or augmentation_of(config.model, AUGMENTATIONS)
  )


def set_optimization(config: ml_collections.ConfigDict) -> None:
  """Sets what the recipes of big_vision share, in place."""
  config.pretrained_dir = None  # From random weights.
  config.update(optimizer='adam', optim_dtype='bfloat16', grad_norm_clip=1.0)
  config.update(base_lr=1e-3, decay_type='cosine', warmup_steps=10_000)
  config.update(weight_decay=1e-4, independent_weight_decay=True)
  config.update(eval_every=2_500, progress_every=50)
  config.pp.update(crop=224, resize=256)


def augmentation_of(
  model: ml_collections.ConfigDict, augmentations: dict[str, str]
) -> str:
  """Returns the augmentation that is published for a model, by its short name."""
  name = models.short_name(model.model_name)
  if name not in augmentations:
    raise ValueError(
      f"no augmentation is published for the model '{name}', only for "
      f'{", ".join(augmentations)}: pass one after the data set, as in {name},'
      'imagenet2012,medium1'
    )
  return augmentations[name]
