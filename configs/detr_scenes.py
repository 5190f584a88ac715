"""Trains a small DETR on scenes of digits, without a download.

  vit_jax train --config=configs/detr_scenes.py --workdir=/tmp/scenes

Expected on the 400 test scenes: AP 47.5, AP50 84.0, AP75 48.9, after ten minutes on
two cores, including the generation of the scenes.

The argument, if any, is a folder of scenes of the same size, such as those of clothes
that `python -m benchmarks.fashion scenes FOLDER` writes. Expected there, after 20
minutes of processor time: AP 25.6 ± 3.0, AP50 51.3 ± 3.2 (docs/benchmarks.md).
"""

import ml_collections

from vit_jax.configs import common


def get_config(dataset: str = 'scenes') -> ml_collections.ConfigDict:
  """Returns the config for scenes of digits, or for scenes in a folder."""
  config = common.set_dataset(common.get_config(), dataset)
  config.pretrained_dir = None  # From random weights.
  config.task = 'detect'
  config.pp.crop = 64
  config.pp.crop_area = (0.7, 1.0)
  # Mirroring would change the meaning of digits.
  config.pp.flip = False

  config.model = ml_collections.ConfigDict(
    {
      'kind': 'detr',
      'model_name': 'DETR-scenes',
      'units': (1, 1, 1),
      'backbone_width': 16,
      'dilate_last': True,
      'norm': 'group',
      'hidden_size': 64,
      'num_queries': 8,
      'num_encoder_layers': 1,
      'num_decoder_layers': 3,
      'num_heads': 4,
      'mlp_dim': 128,
      'dropout_rate': 0.0,
      'attention_dropout_rate': 0.0,
    }
  )
  config.task_options.max_objects = 8
  # The backbone has to learn the classes too, and about a third of the queries have
  # an object.
  config.task_options.class_weight = 5.0
  config.task_options.no_object_weight = 0.3

  config.update(batch=32, batch_eval=50, total_steps=6_400, warmup_steps=200)
  config.update(optimizer='adam', optim_dtype='float32', base_lr=5e-4)
  config.update(weight_decay=1e-4, grad_norm_clip=0.1)
  # From random weights the backbone learns faster with a larger rate.
  config.lr_multipliers = (('^backbone/', 3.0), ('', 1.0))
  config.update(progress_every=100, eval_every=1_600, checkpoint_every=1_600)
  return config
