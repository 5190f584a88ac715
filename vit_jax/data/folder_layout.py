"""The layout of a data set in a folder, for messages. Does not import JAX."""

import os

LAYOUT = (
  'a folder must hold train/<class>/* and test/<class>/*, or train.jsonl and '
  'test.jsonl, or data/train-*.parquet'
)


def is_path(dataset: str) -> bool:
  """Returns whether a data set can only be a folder, not a TFDS name."""
  return dataset.startswith(('/', '.', '~')) or '://' in dataset


def missing(dataset: str) -> FileNotFoundError:
  """Returns the error for a folder that does not exist."""
  return FileNotFoundError(
    f"dataset='{dataset}' is not a folder that exists: {LAYOUT} (config.dataset)"
  )


def check_local(dataset: str):
  """Raises FileNotFoundError for the path of a local folder that does not exist."""
  if is_path(dataset) and '://' not in dataset and not os.path.isdir(dataset):
    raise missing(dataset)
