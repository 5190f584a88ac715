r"""Pre-trains without labels by masked patch prediction (arXiv 2010.11929, B.1.2).

  vit_jax train --config=configs/masked_patches.py:b16,/path/to/folder \
    --workdir=/tmp/run
  vit_jax train --config=configs/masked_patches.py:b16,imagenet2012 \
    --config.total_steps=100_000 --workdir=/tmp/run

The argument is MODEL,DATA: a short name from models.py, and a TFDS name or a
folder, with or without classes: train/* and test/*, at any depth. The paper's other
variants, each slightly worse there: --config.task_options.target=4x4, =l2,
--config.task_options.corruption=0.15.

The recipe is the paper's for JFT-300M: a million steps (14 epochs), of which
the first 100,000 bring most of the gain. The paper gives no weight decay for
it, so there is none here. Expected: B/16 pre-trained this way and fine-tuned
(configs/vit.py) reaches 79.9 % on ImageNet, 2 points above training from scratch,
4 below supervised pre-training.
"""

import ml_collections

from vit_jax.configs import common, models


def get_config(arg: str = 'b16,imagenet2012') -> ml_collections.ConfigDict:
  """Returns the config for 'MODEL,DATA'."""
  model, dataset = common.split_argument(
    arg, 'MODEL,DATA', 'masked_patches.py:b16,/path/to/folder'
  )
  config = common.set_dataset(common.get_config(), dataset)
  config.pretrained_dir = None  # From random weights.
  config.task = 'masked_patches'
  config.model = models.get_config(model)
  config.model.dtype = 'auto'  # bfloat16, except on CPUs.
  config.update(batch=4096, batch_eval=4096)
  config.update(total_steps=1_000_000, warmup_steps=10_000)
  config.update(optimizer='adam', optim_dtype='float32', base_lr=2e-4)
  config.update(eval_every=10_000, checkpoint_every=5_000, progress_every=50)
  return config
