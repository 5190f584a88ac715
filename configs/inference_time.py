r"""Measures how many images per second a model classifies on this machine.

  python -m vit_jax.main --config=configs/inference_time.py \
    --config.model_name=ViT-B_32 --config.batch=64 --workdir=/tmp/inference

Prints images per second and device (minimum, maximum, mean and standard
deviation over the measured steps), and logs them to the workdir.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the config, see the top of this file."""
  config = ml_collections.ConfigDict()
  # The program to run.
  config.trainer = 'inference_time'
  # The model: a key of models.MODEL_CONFIGS, or its short form.
  config.model_name = 'ViT-B_32'
  # Type of the computation: 'float32' or 'bfloat16'.
  config.dtype = 'float32'
  # Number of measured steps, and of unmeasured steps before them.
  config.steps = 30
  config.initial_steps = 10
  # Images per step, over all devices.
  config.batch = 32
  # Width of the head.
  config.num_classes = 1000
  # Height and width of the images in pixels.
  config.image_size = 224
  return config
