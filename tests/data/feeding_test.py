"""Tests of reading batches."""

import subprocess
import sys

LEFT_OPEN = """
import tensorflow as tf
from vit_jax.data import feeding

batches = feeding.read(tf.data.Dataset.range(8).batch(2), None, None)
print(next(batches))
"""


def test_batches_left_open_end_with_python():
  """Without `Exception ignored in: <generator object read ...>`."""
  done = subprocess.run(
    [sys.executable, '-c', LEFT_OPEN], capture_output=True, text=True
  )
  assert (done.returncode, done.stdout) == (0, '[0 1]\n')
  assert 'generator' not in done.stderr
