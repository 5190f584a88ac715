"""The Vision Transformer in JAX and Flax. Start with `vit_jax --help`."""

import os

# TensorFlow only reads and augments images here. Keep it from printing its notes
# (levels 0 to 2, its errors reach Python) into every log; set the variable to have
# them back.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
