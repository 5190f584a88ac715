r"""Fine-tunes by BiT-HyperRule (arXiv 1912.11370, section 3.3).

  vit_jax train --config=configs/bit_hyperrule.py:bit_r50x1,cifar10 \
    --config.pretrained=BiT-M-R50x1.npz --workdir=/tmp/bit
  vit_jax train --workdir=/tmp/bit --config.pretrained=BiT-M-R50x1.npz \
    --config=configs/bit_hyperrule.py:bit_r50x1,/data/photos,5000,500

The argument is MODEL,DATA or MODEL,DATA,EXAMPLES,PIXELS, with ,paper at its end for
the image sizes of the paper. EXAMPLES is the number of training images, which
determines training length and mixup; PIXELS is their typical height and width, which
determines the size they are resized to. DATASETS has both for some data sets.

Expected of BiT-L R152x4 (arXiv 2010.11929, table 2): ImageNet 87.54, CIFAR-10
99.37, CIFAR-100 93.51, Oxford Pets 96.62, Oxford Flowers 99.63.

Paper and released code (bit_hyperrule.py of github.com/google-research/big_transfer)
differ. This config follows the code in the image sizes and in the warm-up, which the
paper does not mention. For fewer than 20,000 examples the code drops the learning
rate at 40, 60 and 80 % of the training; this config follows the paper: 30, 60 and
90 %.
"""

from collections.abc import Sequence

import ml_collections

from vit_jax.configs import common, models

# Data set -> (training examples, usual side of the images in pixels).
DATASETS = {
  'cifar10': (50_000, 32),
  'cifar100': (50_000, 32),
  'digits': (1_437, 8),
  'imagenet2012': (1_281_167, 400),
  'oxford_flowers102': (1_020, 500),
  'oxford_iiit_pet': (3_680, 400),
}
# Examples, exclusive -> (updates, updates of warm-up), the smallest first.
SCHEDULES = {
  20_000: (500, 100),
  500_000: (10_000, 500),
  float('inf'): (20_000, 500),
}
# From this number of examples on, and its strength.
MIXUP_EXAMPLES, MIXUP = 20_000, 0.1
# Images of fewer pixels than 96 x 96, and all others: resized to a square of
# the first side, from which a square of the second side is cropped.
SMALL_IMAGE = 96
SMALL_SIZES, LARGE_SIZES = (160, 128), (512, 480)
# The latter in the paper, for all models but the largest.
PAPER_SIZES = (448, 384)
PAPER_EXCEPT = 'bit_r152x4'
_PAPER = ',paper'
_FORMS = 'MODEL,DATA or MODEL,DATA,EXAMPLES,PIXELS'
_EXAMPLE = 'bit_hyperrule.py:bit_r50x1,/path/to/folder,5000,500'


def get_config(arg: str = 'bit_r50x1,cifar10') -> ml_collections.ConfigDict:
  """Returns the config for 'MODEL,DATA[,EXAMPLES,PIXELS][,paper]'."""
  plain_arg = arg.removesuffix(_PAPER)
  model, dataset, *numbers = common.split_argument(plain_arg, _FORMS, _EXAMPLE)
  large = LARGE_SIZES
  if plain_arg != arg and model != PAPER_EXCEPT:
    large = PAPER_SIZES
  examples, pixels = _data_size(arg, dataset, numbers)
  config = common.set_dataset(common.get_config(), dataset)
  config.model = models.get_config(model)
  limit = min(limit for limit in SCHEDULES if examples < limit)
  steps, warmup = SCHEDULES[limit]
  config.update(total_steps=steps, warmup_steps=warmup, batch=512)
  config.update(optimizer='sgd', momentum=0.9, optim_dtype='float32')
  config.update(base_lr=0.003, weight_decay=0.0, grad_norm_clip=0.0)
  config.update(decay_type='staircase', decay_at=(0.3, 0.6, 0.9))
  # Training resizes to a square and crops a part of it; evaluation resizes to
  # the size of that part.
  resized, crop = SMALL_SIZES if pixels < SMALL_IMAGE else large
  config.pp.crop = crop
  config.pp.crop_area = ((crop / resized) ** 2,) * 2
  config.pp.crop_ratio = None
  if examples >= MIXUP_EXAMPLES:
    config.task_options.mixup = MIXUP
  return config


def _data_size(arg: str, dataset: str, numbers: Sequence[str]) -> tuple[int, int]:
  """Returns the number of training images, and the usual side of an image."""
  if any(numbers):
    if not all(number.isdigit() and int(number) for number in numbers):
      raise ValueError(f"'{arg}' must be {_FORMS}: --config=configs/{_EXAMPLE}")
    examples, pixels = map(int, numbers)
    return examples, pixels
  if dataset not in DATASETS:
    raise ValueError(
      f"'{dataset}' is not among the data sets of known size, "
      f'{", ".join(DATASETS)}: add the number of training images and their usual '
      'side in pixels, as in '
      f'--config=configs/bit_hyperrule.py:{arg},5000,500'
    )
  return DATASETS[dataset]
