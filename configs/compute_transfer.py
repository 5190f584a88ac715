r"""Figure 5 in small: transfer by the compute of the pre-training, on the digits.

  python -m vit_jax.main --config=configs/compute_transfer.py \
    --workdir=/tmp/compute
  vit_jax train --config=configs/compute_transfer.py:fashion_mnist --workdir=/tmp/fashion

Models pre-trained for different lengths are compared at equal compute, as in arXiv
2010.11929, section 4.4. Small models learn the digits 0 to 4 for 60, 180 and 540
updates. A linear probe then learns the unseen digits 5 to 9 from 5 images per class.
With Fashion-MNIST, the models make 100, 400 and 1,600 updates of 64 images, and the
probe learns MNIST.

Takes about 13 minutes of processor time. Expected, in percent, over three seeds:

  updates            ViT            BiT         hybrid
       60   37.77 ± 6.37   67.88 ± 3.13   49.17 ± 5.81
      180   40.66 ± 3.43   63.76 ± 3.38   43.71 ± 3.35
      540   42.58 ± 3.65   59.90 ± 4.57   43.59 ± 3.84

The ViT seems to transfer better with more compute, within the deviation over seeds.
Unlike in the paper, the ResNet stays ahead, and transfers worse the longer it memorises
these few images. docs/benchmarks.md
has the results of Fashion-MNIST, where all three models gain from compute.
"""

import ml_collections

from vit_jax.configs import data_scaling, studies

# Data set -> numbers of updates.
STEPS = {'digits': (60, 180, 540), 'fashion_mnist': (100, 400, 1600)}


def get_config(dataset: str = 'digits') -> ml_collections.ConfigDict:
  """Returns the config: a study on a data set of STEPS, whose x is compute."""
  studies.check_dataset(dataset, STEPS, 'compute_transfer')
  models = data_scaling.families()
  places = [(name, steps) for name in models for steps in STEPS[dataset]]
  config = data_scaling.study(
    'Transfer by pre-training compute (figure 5 in small)',
    tuple(
      (
        f'{name}, {steps} updates',
        {
          'model': models[name],
          'total_steps': steps,
          'warmup_steps': steps // 10,
        },
      )
      for name, steps in places
    ),
    tuple((name, 'exaflops') for name, _ in places),
  )
  config.x_label = 'exaFLOPs'
  # As in digits_transfer.py: both help the transfer.
  config.base.update(label_smoothing=0.0, weight_decay=0.3)
  if dataset == 'digits':
    config.base.dataset = 'digits/0to4'
    target, few = 'digits/5to9_few', 'few_0+few_1+few_2'
  else:
    studies.change_dataset(config.base, dataset)
    config.base.batch = 64
    target, few = 'mnist', 'train'
  config.base.fewshot.update(shots=(5,), dataset=target, train=few, test='test')
  config.metric = 'fewshot_5_test'
  return config
