"""TFDS builders that come with this package, by name."""

import importlib

# TFDS name: module that registers its builder.
BUILDERS = {
  'digit_captions': 'vit_jax.data.tfds.digit_captions',
  'digits': 'vit_jax.data.tfds.digits',
  'scenes': 'vit_jax.data.tfds.scenes',
}
# Prefix of the tasks of VTAB, see vit_jax/data/tfds/vtab.py.
VTAB = 'vtab/'


def register(name: str) -> bool:
  """Registers a builder of this package with TFDS; False if there is none."""
  module = BUILDERS.get(name.split(':')[0].split('/')[0])
  if module is not None:
    importlib.import_module(module)
  return module is not None
