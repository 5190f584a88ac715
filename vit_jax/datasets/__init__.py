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


def has_array_records(info) -> bool:
  """Tells whether a TFDS data set lies in array_record files, alone or too.

  Args:
    info: the builder's tfds.core.DatasetInfo.
  """
  stored = (
    info.as_proto
  )  # The list beside it is not always read from the files.
  formats = (stored.file_format, *stored.alternative_file_formats)
  return 'array_record' in formats
