"""Trains the task of tests/toy_task.py on the digits."""

from vit_jax.configs import digits


def get_config():
  """Returns the config."""
  config = digits.get_config()
  config.task = 'tests.toy_task'
  return config
