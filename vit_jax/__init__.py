"""The Vision Transformer in JAX and Flax. Start with `vit_jax --help`."""

import os

# TensorFlow only reads and augments images here. Keep it from printing its
# start-up notes (level 1 and below) into every log; set the variables to have
# them back.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
