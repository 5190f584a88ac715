r"""Figure 5 in small: transfer by the compute of the pre-training, on the digits.

  python -m vit_jax.main --config=configs/compute_transfer.py \
    --workdir=/tmp/compute

Models pre-trained for different lengths are compared at equal compute, as in arXiv
2010.11929, section 4.4. Small models learn the digits 0 to 4 for 60, 180 and 540
updates. A linear probe then learns the unseen digits 5 to 9 from 5 images per class.

Takes about 13 minutes of processor time. Expected, in percent, over three seeds:

  updates            ViT            BiT         hybrid
       60   39.13 ± 4.87   64.69 ± 1.21   47.98 ± 4.76
      180   39.87 ± 1.82   60.52 ± 3.48   42.54 ± 3.22
      540   46.34 ± 1.67   59.83 ± 1.91   47.92 ± 2.10

The ViT transfers better with more compute. Unlike in the paper, the ResNet stays
ahead, and transfers worse the longer it memorises these few images.
"""

import ml_collections

from vit_jax.configs import data_scaling

STEPS = (60, 180, 540)


def get_config() -> ml_collections.ConfigDict:
  """Returns the config: a study, whose x is the compute of its runs."""
  models = data_scaling.families()
  places = [(name, steps) for name in models for steps in STEPS]
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
  config.base.dataset = 'digits/0to4'
  # As in digits_transfer.py: both help the transfer.
  config.base.update(label_smoothing=0.0, weight_decay=0.3)
  config.base.fewshot.update(
    shots=(5,), dataset='digits/5to9_few', train='few_0+few_1+few_2',
    test='test',
  )  # fmt: skip
  config.metric = 'fewshot_5_test'
  return config
