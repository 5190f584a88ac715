r"""Predicts masked patches of scikit-learn's digits, without a download.

  vit_jax train --config=configs/masked_patches_digits.py \
    --workdir=/tmp/masked

Expected: after a few minutes on two cores, 66 % of the corrupted patches of the test
images are predicted right, one of eight values each. The run ends with a picture of
test images, masked_patches.png.
"""

import ml_collections

from vit_jax.configs import digits


def get_config() -> ml_collections.ConfigDict:
  """Returns the config, see the top of this file."""
  config = digits.get_config()
  config.task = 'masked_patches'
  config.update(total_epochs=100.0, label_smoothing=0.0)
  config.update(eval_every=500, checkpoint_every=500)
  return config
