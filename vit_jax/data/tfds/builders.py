"""Finds TFDS data sets, and prepares them where they are missing."""

import contextlib
import io
from typing import Any

from google.protobuf import json_format
import ml_collections

from vit_jax import console
from vit_jax.data import registry
from vit_jax.data.lazy import tfds
from vit_jax.distributed import processes

# Python module that TFDS imports to prepare a data set -> its package.
PACKAGES = {'cv2': 'opencv-python-headless', 'skimage': 'scikit-image'}


def find_builder(config: ml_collections.ConfigDict, dataset: str) -> Any:
  """Returns the TFDS builder of a data set, which may not be prepared."""
  registry.register(dataset)
  try:
    return tfds.builder(dataset, data_dir=config.tfds_data_dir)
  except tfds.core.DatasetNotFoundError as e:
    raise ValueError(
      f"dataset='{dataset}' is neither a folder nor known to TFDS: "
      f'{str(e).strip().splitlines()[0]} A folder must hold train/<class>/* and '
      'test/<class>/*; names are listed at '
      'https://www.tensorflow.org/datasets/catalog (config.dataset)'
    ) from e
  except (json_format.ParseError, AssertionError, ValueError) as e:
    # There is no such version, or its dataset_info.json is damaged.
    reason = str(e).rpartition(': Dataset ')[2].strip().splitlines()[0]
    raise ValueError(
      f"dataset='{dataset}' cannot be opened: {reason} (config.dataset, "
      'config.tfds_data_dir)'
    ) from e


def get_builder(config: ml_collections.ConfigDict, dataset: str) -> Any:
  """Returns the TFDS builder of a data set, prepared on this machine."""
  builder = find_builder(config, dataset)

  def prepare() -> Any:
    if builder.info.splits:
      return builder
    # Another process may have prepared it in the meantime.
    current = find_builder(config, dataset)
    return current if current.info.splits else _prepare(config, dataset)

  return processes.first_before_others(f"preparing data set '{dataset}'", prepare)


def _prepare(config: ml_collections.ConfigDict, dataset: str) -> Any:
  # Builders of this package take seconds and need no progress bar.
  quiet: contextlib.AbstractContextManager = contextlib.nullcontext()
  if registry.register(dataset):
    tfds.disable_progress_bar()
    quiet = contextlib.redirect_stdout(io.StringIO())
  # array_record files have random access.
  builder = tfds.builder(
    dataset, data_dir=config.tfds_data_dir, file_format='array_record'
  )
  try:
    with quiet:
      builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(manual_dir=config.tfds_manual_dir)
      )
  except Exception as e:
    prepared = find_builder(config, dataset)
    if prepared.info.splits:
      return prepared  # Another machine has prepared it at the same time.
    package = PACKAGES.get(getattr(e, 'name', ''))
    reason = f'it needs `pip install {package}`' if package else e
    raise ValueError(
      f"data set '{dataset}' is not in {builder.data_dir} and could not be "
      f'prepared: {reason} (config.tfds_data_dir: folder of prepared data sets, '
      'config.tfds_manual_dir: folder of files that TFDS cannot download)'
    ) from e
  return builder


def how_to_get(config: ml_collections.ConfigDict, builder: Any) -> str:
  """Returns a sentence on how to get a data set that TFDS knows."""
  instructions = builder.MANUAL_DOWNLOAD_INSTRUCTIONS
  if instructions:
    root = builder.data_path.parents[builder.info.full_name.count('/')]
    folder = config.tfds_manual_dir or root / 'downloads' / 'manual'
    return (
      f'it must be downloaded by hand: {" ".join(instructions.split())} The manual_dir '
      f'is {folder} (config.tfds_manual_dir).'
    )
  size = sum(info.size for info in (builder.url_infos or {}).values())
  return f'TFDS can download it, {console.size(size)}.'
