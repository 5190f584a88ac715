r"""Fine-tunes an MLP-Mixer B/16 on CIFAR-10 (arXiv 2105.01601).

  vit_jax train --config=configs/mixer_base16_cifar10.py \
    --config.pretrained=Mixer-B_16.npz --workdir=/tmp/mixer

Uses 224 pixels, as in pre-training: a Mixer accepts no other number of patches.
Without --config.pretrained the weights are Mixer-B_16.npz in
--config.pretrained_dir, by default '.'.
"""

import ml_collections

from vit_jax.configs import common, models


def get_config() -> ml_collections.ConfigDict:
  """Returns the config, see the top of this file."""
  config = common.with_dataset(common.get_config(), 'cifar10')
  config.model = models.get_config('mixer_b16')
  config.pp.crop = 224
  return config
