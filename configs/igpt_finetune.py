r"""Fine-tunes an iGPT to classify images while it keeps predicting pixels.

  vit_jax train --config=configs/igpt_finetune.py:l,cifar10,32 \
    --config.pretrained=/tmp/igpt --workdir=/tmp/tuned
  vit_jax train --config=configs/igpt_finetune.py:digits \
    --config.pretrained=/tmp/igpt --workdir=/tmp/tuned

The argument is SIZE,DATA,SIDE as in igpt.py, or `digits` for the model of
igpt_digits.py. `pretrained` is the workdir of a run of configs/igpt.py, or a
folder of converted weights.

The loss is the sum of the cross-entropies of the classes and of the pixels, as
in "Generative Pretraining from Pixels" (section 2.3);
--config.task_options.generation=0 leaves the pixels out. Learning rate and length
are ours. Expected, by the paper, of iGPT-L: 99.0 % on CIFAR-10, 88.5 % on CIFAR-100.
"""

import ml_collections

from vit_jax.configs import common, igpt, igpt_digits


def get_config(arg: str = 's,cifar10,32') -> ml_collections.ConfigDict:
  """Returns the config for 'SIZE,DATA,SIDE[,OBJECTIVE]' or 'digits'."""
  if arg == 'digits':
    config = igpt_digits.get_config()
    config.update(layer_probe=0, total_steps=400, base_lr=1e-3)
    config.task_options = {}
  else:
    size, dataset, side, objective = igpt.parse(arg)
    config = common.set_dataset(common.get_config(), dataset)
    config.pretrained_dir = None
    igpt.set_model(config, size, side)
    config.model.causal = objective == 'ar'
    if dataset.startswith('cifar'):
      config.pp.crop_area = (0.75, 1.0)
      config.pp.flip = True
    igpt.set_adam(config)
    config.update(batch=128, batch_eval=128)
    config.update(total_epochs=20.0, warmup_epochs=1.0)
    config.base_lr = igpt.LEARNING_RATES[size] / 10
    config.decay_type = 'constant'
    config.update(eval_every=1_000, checkpoint_every=1_000, progress_every=50)
  config.task = 'pixels_finetune'
  return config
