r"""Trains S/16 on ImageNet from scratch, as a simple and good baseline.

  vit_jax train --config=configs/vit_s16_i1k.py --workdir=/tmp/run
  vit_jax train --config=configs/vit_s16_i1k.py:/path/to/folder \
    --workdir=/tmp/run

The recipe follows "Better plain ViT baselines for ImageNet-1k" (arXiv
2205.01580; `vit_s16_i1k` of big_vision). The argument is a TFDS name, by default
imagenet2012, or a folder with train/<class>/* and test/<class>/*.

Expected on the ImageNet validation set: 76.5 % after 90 epochs, which take 6 to
7 hours on a TPU v3-8; 80 % after 300 epochs (--config.total_epochs=300).
"""

import ml_collections

from vit_jax.configs import common, models, vit_i1k


def get_config(dataset: str = 'imagenet2012') -> ml_collections.ConfigDict:
  """Returns the config for a TFDS name or a folder."""
  config = common.set_dataset(common.get_config(), dataset)
  config.model = models.get_config('s16')
  config.model.dtype = 'auto'  # bfloat16, except on CPUs.
  config.model.classifier = 'gap'
  config.model.representation_size = config.model.hidden_size
  config.model.transformer.position_embedding = 'sincos2d'
  vit_i1k.set_optimization(config)
  config.update(total_epochs=90.0, batch=1024, batch_eval=1024)
  config.loss = 'softmax'
  # RandAugment of 2 layers and magnitude 10, mixup of 0.2.
  return common.set_augmentation(config, 'light2')
