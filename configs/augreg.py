r"""Fine-tunes a checkpoint of "How to train your ViT?" (arXiv 2106.10270).

  vit_jax train --config=configs/augreg.py:R_Ti_16 \
    --config.dataset=oxford_iiit_pet --config.pp.train='train[:90%]' \
    --config.base_lr=0.01 --workdir=/tmp/vit

The argument is a model, whose checkpoint with the best validation accuracy on
ImageNet-21k is taken, or the name of a checkpoint of index.csv without .npz. Both
come from --config.pretrained_dir; if the public bucket does not answer, pass a
local file or a URL: --config.pretrained=FILE. Expected accuracy: the column
adapt_final_test of index.csv (vit_jax.checkpoint.get_augreg_df).
"""

import ml_collections

from vit_jax.configs import common, models


def get_config(model_or_filename: str = 'R_Ti_16') -> ml_collections.ConfigDict:
  """Returns the config for a model or the name of a checkpoint."""
  config = common.get_config()
  config.pretrained_dir = 'gs://vit_models/augreg'
  config.model_or_filename = model_or_filename
  model = model_or_filename.split('-')[0]
  if model not in models.AUGREG_CONFIGS:
    raise ValueError(
      f"AugReg model '{model}' is unknown: use one of {sorted(models.AUGREG_CONFIGS)}"
    )
  config.model = models.get_config(models.AUGREG_CONFIGS[model].model_name)
  # Fine-tuning uses neither dropout nor other regularisation.
  config.model.transformer.dropout_rate = 0.0

  # Often set on the command line, where the data set must be set.
  config.update(base_lr=0.03, total_steps=500, warmup_steps=100)
  config.pp.update(train='train', test='test', resize=448, crop=384)
  return config
