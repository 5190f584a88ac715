"""The Vision Transformer in JAX and Flax. Start with `vit_jax --help`."""

import glob
import importlib.util
import os
import sys

__version__ = '0.1.0'

# TensorFlow only reads and augments images here. Keep it from printing its notes
# (levels 0 to 2, its errors reach Python) into every log; set the variable to have
# them back.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


def _leave_libtpu() -> None:
  """Keeps JAX on the CPU if libtpu is installed, for plans, but there is no TPU.

  JAX would load libtpu, which prints errors and lets no other process plan.
  Nothing changes where JAX_PLATFORMS is set, a TPU is seen, or JAX has another
  plugin, such as CUDA's.
  """
  tpu = glob.glob('/dev/accel*') or glob.glob('/dev/vfio/*')
  if 'JAX_PLATFORMS' in os.environ or tpu:
    return
  find = importlib.util.find_spec
  jax = sys.modules.get('jax')
  platforms = jax and jax.config.jax_platforms
  if platforms or find('jax_plugins') or not find('libtpu'):
    return
  os.environ['JAX_PLATFORMS'] = 'cpu'
  if jax:
    jax.config.update('jax_platforms', 'cpu')


_leave_libtpu()
