"""Names of data sets: TFDS builders that come with this package, and other sources."""

import importlib

# TFDS name: module that registers its builder.
BUILDERS = {
  'digit_angles': 'vit_jax.data.tfds.digit_angles',
  'digit_captions': 'vit_jax.data.tfds.digit_captions',
  'digits': 'vit_jax.data.tfds.digits',
  'scenes': 'vit_jax.data.tfds.scenes',
}
# Prefixes of the names of other data sets, and the modules that open them, see
# vit_jax/data/sources.py.
VTAB, HUB = 'vtab/', 'hf://'
SOURCES = {
  VTAB: 'vit_jax.data.tfds.vtab',
  HUB: 'vit_jax.data.hub_datasets',
}


def module_of(dataset: str) -> str:
  """Returns the module that opens the splits of a name; that of TFDS by default."""
  for prefix, module in SOURCES.items():
    if dataset.startswith(prefix):
      return module
  return 'vit_jax.data.tfds.splits'


def register(name: str) -> bool:
  """Registers a builder of this package with TFDS; False if there is none."""
  module = BUILDERS.get(name.split(':')[0].split('/')[0])
  if module is not None:
    importlib.import_module(module)
  return module is not None
