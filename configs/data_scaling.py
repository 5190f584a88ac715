r"""Figure 4 in small: a ViT, a ResNet and a hybrid on growing parts of a data set.

  python -m vit_jax.main --config=configs/data_scaling.py --workdir=/tmp/scaling
  vit_jax train --config=configs/data_scaling.py:fashion_mnist --workdir=/tmp/fashion

One recipe for all sizes of data and models, as in arXiv 2010.11929, section 4.3:
three models of about the same compute learn from 50, 250 and all 1,437 training
images, with the same number of updates. Each seed has its own 50 images.

Takes about ten minutes of processor time. Expected mean and standard deviation over
three seeds, in percent:

  images          ViT          BiT       hybrid
      50   68.9 ± 2.7   87.1 ± 5.5   85.3 ± 3.5
     250   91.9 ± 1.3   98.5 ± 0.3   96.1 ± 0.3
   1,437   93.5 ± 0.9   99.1 ± 0.2   99.1 ± 0.4

As in the paper, the ViT catches up with more images; with so few it does not
overtake the ResNet. docs/benchmarks.md has the results of Fashion-MNIST, about one hour of
processor time.
"""

import ml_collections

from vit_jax.configs import digits, models, studies

# Data set -> number of images -> split. The seed replaces {seed}.
SUBSETS = {
  'digits': {50: 'train[{seed}00:{seed}50]', 250: 'train[:250]', 1437: 'train'},
  'fashion_mnist': {
    600: 'train[{seed}000:{seed}600]',
    6000: 'train[:6000]',
    60000: 'train',
  },
}


def families() -> dict[str, ml_collections.ConfigDict]:
  """Returns models whose forward passes take 9 to 10 MFLOPs each."""
  vit = models.get_config('ti16')
  hybrid = models.get_config('ti16')
  for config, layers in ((vit, 3), (hybrid, 2)):
    config.hidden_size = 96
    config.transformer.update(num_layers=layers, mlp_dim=384)
  vit.model_name = 'ViT 3x96'
  vit.patches.size = (8, 8)
  hybrid.model_name = 'R+ViT 2x96'
  hybrid.patches.size = (2, 2)  # In cells of 4x4 pixels.
  # One unit of a narrow ResNet.
  hybrid.resnet = ml_collections.ConfigDict({'num_layers': (1,), 'width_factor': 0.5})
  bit = models.get_config('bit_r50x1')
  bit.update(model_name='BiT 111x0.5', num_layers=(1, 1, 1), width_factor=0.5)
  return {'ViT': vit, 'BiT': bit, 'hybrid': hybrid}


def study(title: str, variants: tuple, x: tuple) -> ml_collections.ConfigDict:
  """Returns a study of `families`, which share the recipe of configs/digits.py.

  `variants` as in studies.get_config; `x` has (name of the line, x) for each.
  """
  config = studies.get_config(title, variants)
  config.base = digits.get_config()
  config.base.model = families()['ViT']
  config.base.pp.crop = 32  # Enough for the stages of a ResNet.
  config.base.update(total_epochs=None, warmup_epochs=None, batch=32)
  config.base.update(total_steps=400, warmup_steps=40)
  config.base.update(eval_every=0, checkpoint_every=0, log_images=0)
  config.x = x
  config.x_log = True
  config.checkpoints = 'none'
  return config


def get_config(dataset: str = 'digits') -> ml_collections.ConfigDict:
  """Returns the config of the study on 'digits' or 'fashion_mnist'."""
  studies.check_dataset(dataset, SUBSETS, 'data_scaling')
  variants, places = [], []
  for name, model in families().items():
    for size, split in SUBSETS[dataset].items():
      settings = {'model': model, 'pp.train': split}
      variants.append((f'{name}, {size} images', settings))
      places.append((name, size))
  config = study(
    'Accuracy by the number of training images (figure 4 in small)',
    tuple(variants),
    tuple(places),
  )
  config.x_label = 'training images'
  if dataset == 'fashion_mnist':
    studies.change_dataset(config.base, dataset)
    config.base.update(batch=64, total_steps=2000, warmup_steps=200)
  return config
