r"""Measures how many images a model classifies a second, on this machine.

  python -m vit_jax.main --config=configs/inference_time.py \
    --config.model_name=ViT-B_32 --config.batch=64 --workdir=/tmp/inference

Prints images a second for each device (the least, the most, mean and standard
deviation over the measured steps), and logs them to the workdir.
"""

import ml_collections


def get_config():
  """Returns the config."""
  config = ml_collections.ConfigDict()
  # What runs.
  config.trainer = 'inference_time'
  # Which model: a key of models.MODEL_CONFIGS, or its short form.
  config.model_name = 'ViT-B_32'
  # Type of the computation: 'float32' or 'bfloat16'.
  config.dtype = 'float32'
  # Measured steps, and steps before them.
  config.steps = 30
  config.initial_steps = 10
  # Images a step, over all devices.
  config.batch = 32
  # Width of the head.
  config.num_classes = 1000
  # Height and width of the images in pixels.
  config.image_size = 224
  return config
