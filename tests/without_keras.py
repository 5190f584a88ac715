"""Imports TensorFlow without Keras, which takes seconds and which no test needs."""

import os
import sys
import types

# TensorBoard would import it for a callback that nobody uses.
sys.modules.setdefault(
  'tensorboard.plugins.hparams._keras', types.SimpleNamespace(Callback=None)
)
# As in vit_jax.console.load_tensorflow, which also starts threads: none may run when
# a process forks.
os.environ['TF_USE_LEGACY_KERAS'] = '1'
try:
  import tensorflow  # noqa: F401
finally:
  del os.environ['TF_USE_LEGACY_KERAS']
