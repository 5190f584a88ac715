"""TFDS builders that this package brings along, by name."""

import importlib

# TFDS name: module that registers its builder.
BUILDERS = {'digits': 'vit_jax.datasets.digits'}


def register(name: str) -> bool:
  """Makes a builder of this package known to TFDS; False if there is none."""
  module = BUILDERS.get(name.split(':')[0].split('/')[0])
  if module is not None:
    importlib.import_module(module)
  return module is not None
