r"""Pre-trains a ViT as in "How to train your ViT?" (arXiv 2106.10270), AugReg.

  vit_jax train --config=configs/augreg_pretrain.py:b16,imagenet21k \
    --workdir=/tmp/run
  vit_jax train \
    --config=configs/augreg_pretrain.py:b16,imagenet2012,strong2,wd_0.1,do_0.1 \
    --workdir=/tmp/run

The argument is MODEL,DATA, optionally followed, in any order, by

  AUGMENTATION    a setting of AUGREG in common.py; by default the choice of
                  big_vision for the model
  WEIGHT DECAY    wd_0.03 or wd_0.1, the default
  REGULARISATION  do_0.0, the default, or do_0.1: dropout and stochastic depth
  LENGTH          300ep, the default, or 30ep (ImageNet-21k only in the paper)

`grid` yields the arguments of the 7 x 2 x 2 settings of the paper. The best ones for
ImageNet-21k, and the accuracy on ImageNet that they reach when fine-tuned at 384 px
(configs/augreg.py), from the original's README:

  L/16      strong1,wd_0.1,do_0.0    85.59    B/32     light1,wd_0.1,do_0.0  83.59
  B/16      medium1,wd_0.1,do_0.0    85.49    S/32     none,wd_0.1,do_0.0    79.58
  S/16      light1,wd_0.03,do_0.0    83.73    R+Ti/16  none,wd_0.03,do_0.0   75.40
  R50+L/32  medium1,wd_0.1,do_0.1    85.99    Ti/16    none,wd_0.03,do_0.0   78.22
  R26+S/32  light1,wd_0.1,do_0.0     83.85

The loss is a sigmoid per class, also on ImageNet. The head is linear, on the class
token; big_vision's `vit_i21k` has mean pooling (--config.model.classifier=gap).
Weight decay is multiplied by the learning rate; big_vision's 1e-4 is not, and equals
wd_0.1. Validation and test images are 102,400 of ImageNet-21k, as for the models of
the first paper; big_vision holds out 51,200.
"""

from collections.abc import Iterator
import itertools

import ml_collections

from vit_jax.configs import common, vit_i1k

# Model -> augmentation for 300 epochs of ImageNet-21k in big_vision; that for
# ImageNet is in vit_i1k.py.
AUGMENTATIONS = {
  **dict.fromkeys(('ti16', 's32'), 'none'),
  's16': 'light1',
  **dict.fromkeys(('b32', 'b16'), 'light2'),
  'l16': 'medium2',
}

WEIGHT_DECAYS = {'wd_0.1': 0.1, 'wd_0.03': 0.03}
# Rates of dropout, and of stochastic depth.
DROPOUTS = {'do_0.0': 0.0, 'do_0.1': 0.1}
LENGTHS = {'300ep': 300.0, '30ep': 30.0}


def get_config(arg: str = 'b16,imagenet21k') -> ml_collections.ConfigDict:
  """Returns the config for 'MODEL,DATA', with ',AUGMENTATION' and so on."""
  model, dataset, settings = common.choose(
    arg,
    {
      'augmentation': tuple(common.AUGREG),
      'weight decay': tuple(WEIGHT_DECAYS),
      'regularisation': tuple(DROPOUTS),
      'length': tuple(LENGTHS),
    },
    'augreg_pretrain.py:b16,/path/to/folder,medium1,wd_0.03',
  )
  is_imagenet = dataset == 'imagenet2012'
  config = vit_i1k.get_config(f'{model},{dataset},none')
  config.total_epochs = LENGTHS[settings['length'] or '300ep']
  config.weight_decay = WEIGHT_DECAYS[settings['weight decay'] or 'wd_0.1']
  config.independent_weight_decay = False
  config.model.representation_size = None
  config.model.head_bias_init = -6.9 if is_imagenet else -10.0
  rate = DROPOUTS[settings['regularisation'] or 'do_0.0']
  config.model.transformer.update(dropout_rate=rate, stochastic_depth=rate)
  augmentation = settings['augmentation']
  if augmentation is None:
    published = vit_i1k.AUGMENTATIONS if is_imagenet else AUGMENTATIONS
    augmentation = vit_i1k.augmentation_of(config.model, published)
  return common.set_augmentation(config, augmentation)


def grid(model: str, dataset: str) -> Iterator[str]:
  """Yields the argument of each setting that the paper trains for a model."""
  settings = (common.AUGREG, WEIGHT_DECAYS, DROPOUTS)
  for setting in itertools.product(*settings):
    yield ','.join((model, dataset, *setting))
