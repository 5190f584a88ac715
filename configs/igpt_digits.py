r"""Trains a small iGPT on the pixels of scikit-learn's digits, without a download.

  vit_jax train --config=configs/igpt_digits.py --workdir=/tmp/igpt

A small Transformer predicts each of the 8x8 pixels, in a palette of 4 greys, from
those before it. Expected, after 800 steps and two minutes on two cores: 0.82 bits per
dimension on the test images, of 2 without training.

The run ends with linear probes of all layers with 10 labels per class
(probe.png), samples.png and completions.png. The best layer reaches 76.7 %,
below the 91.9 % of the raw pixels; docs/pixels.md says why.

With configs/igpt_digits.py:fashion_mnist, 14x14 pixels and 8 narrower layers: 0.50 bits
per dimension after 20 minutes of processor time (docs/benchmarks.md).
"""

import ml_collections

from vit_jax.configs import common, studies

DATASETS = ('digits', 'fashion_mnist')


def get_config(dataset: str = 'digits') -> ml_collections.ConfigDict:
  """Returns the config for a data set of DATASETS."""
  studies.check_dataset(dataset, DATASETS, 'igpt_digits')
  config = common.set_dataset(common.get_config(), dataset)
  config.pretrained_dir = None  # From random weights.
  config.task = 'pixels'
  config.pp.crop = 8
  config.pp.channels = 1
  config.pp.crop_area = None
  config.pp.flip = False  # Mirroring would change the meaning of digits.

  config.model = ml_collections.ConfigDict(
    {
      'kind': 'igpt',
      'model_name': 'iGPT-digits',
      'num_colors': 4,
      'num_positions': 64,
      'hidden_size': 96,
      'num_layers': 4,
      'num_heads': 4,
    }
  )
  config.layer_probe = 10

  config.update(batch=32, batch_eval=120, total_steps=800, warmup_steps=50)
  config.update(optimizer='adam', b2=0.95, optim_dtype='float32')
  config.update(base_lr=3e-3, grad_norm_clip=1.0)
  config.log_images = 16
  config.update(progress_every=50, eval_every=400, checkpoint_every=400)
  if dataset == 'fashion_mnist':
    # Each side is halved: with all 784 pixels, an update takes ten times as long.
    config.pp.crop = 14
    config.model.update(num_positions=14**2, hidden_size=64, num_layers=8)
    config.update(batch_eval=100, total_steps=1_200)
    config.update(progress_every=20, eval_every=0, checkpoint_every=400)
  return config
