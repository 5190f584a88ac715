"""Statistics of the values of images, which `vit_jax index --statistics` measures.

They are of all pixels of at most 10,000 images of a split; percentiles are of a random
sample of these pixels if there are more than 2**24 values. `config.pp.range='percentile'`
and `config.pp.mean='measured'` read them, and a run stores the numbers in its config.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from vit_jax import console
from vit_jax.data import folder, slices, sources, typed_json
from vit_jax.data.images import image_files, images, index as index_lib
from vit_jax.data.lazy import tf
from vit_jax.distributed import files, processes
from vit_jax.weights import descriptions

# Percentiles that `config.pp.range='percentile'` maps to -1 and 1.
PERCENTILES = (0.5, 99.5)
_MOST_IMAGES = 10_000
_MOST_VALUES = 2**24  # In the sample of pixels.
_ENDING = '.statistics.json'


@dataclasses.dataclass(frozen=True)
class Statistics:
  """Statistics of a split; the lists have a number for each channel."""

  num_images: int  # In the split, also those that are broken or not measured.
  lowest: list[float]
  highest: list[float]
  low_percentile: list[float]
  high_percentile: list[float]
  mean: list[float]
  std: list[float]

  def fields(self) -> dict[str, Any]:
    """Returns the values of the keys of `config.pp`."""
    return {
      'range': (tuple(self.low_percentile), tuple(self.high_percentile)),
      'mean': tuple(self.mean),
      'std': tuple(self.std),
    }


class _Moments(NamedTuple):
  """Statistics of the pixels of an image, float64 [C], and a sample of them."""

  num_pixels: int
  lowest: np.ndarray
  highest: np.ndarray
  mean: np.ndarray
  squares: np.ndarray  # Sum of squared differences from the mean.
  sample: np.ndarray  # float32 [n, C].


def place(root: str, split: str) -> str:
  """Returns the path of the statistics of a split, next to its index."""
  return index_lib.place(None, root, split).removesuffix('.index.npz') + _ENDING


def measure(paths: Sequence[str], channels: int) -> Statistics:
  """Returns the statistics of images; ValueError names one that cannot be read."""
  if not paths:
    raise ValueError('the split has no images to measure: pass one that has')
  spaced = np.linspace(0, len(paths) - 1, _MOST_IMAGES)
  numbers = np.unique(spaced.round().astype(int))
  num_samples = max(1, _MOST_VALUES // (channels * len(numbers)))

  def measure_image(number: int) -> _Moments:
    path = paths[number]
    try:
      encoded = tf.constant(image_files.read_file(path))
      values = images.decode_values(encoded, channels).numpy()
    except images.decode_errors() as e:
      raise ValueError(f"'{path}': {image_files.first_line(e)}") from None
    return _moments(values.reshape(-1, channels), num_samples, number)

  title = 'Measuring images'
  statistics = image_files.in_threads(measure_image, numbers.tolist(), title, ' images')
  sample = np.concatenate([part.sample for part in statistics])
  low, high = np.percentile(sample, PERCENTILES, axis=0)
  counts = np.array([part.num_pixels for part in statistics])[:, None]  # [n, 1]
  means = np.stack([part.mean for part in statistics])  # [n, C]
  mean = (counts * means).sum(axis=0) / counts.sum()
  squares = (
    np.stack([part.squares for part in statistics]) + counts * (means - mean) ** 2
  )
  std = np.sqrt(squares.sum(axis=0) / counts.sum())
  lowest = np.min([part.lowest for part in statistics], axis=0)
  highest = np.max([part.highest for part in statistics], axis=0)
  arrays = (lowest, highest, low, high, mean, std)
  return Statistics(len(paths), *(array.tolist() for array in arrays))


def _moments(pixels: np.ndarray, num_samples: int, seed: int) -> _Moments:
  """Returns the moments of pixels [n, C]."""
  sample = pixels
  if len(pixels) > num_samples:
    rng = np.random.default_rng(seed)
    sample = pixels[rng.choice(len(pixels), num_samples, replace=False)]
  pixels = pixels.astype(np.float64)
  mean = pixels.mean(axis=0)
  squares = ((pixels - mean) ** 2).sum(axis=0)
  return _Moments(
    len(pixels), pixels.min(axis=0), pixels.max(axis=0), mean, squares, sample
  )


def write(path: str, statistics: Statistics) -> None:
  """Writes statistics as JSON."""
  files.write(path, json.dumps(dataclasses.asdict(statistics), indent=1))


def read(path: str) -> Statistics:
  """Returns the statistics in a file; ValueError if it is damaged."""
  try:
    statistics = typed_json.decode(image_files.read_file(path), Statistics, unique=True)
  except ValueError as e:
    raise ValueError(
      f"'{path}' is damaged: {e}; run vit_jax index with --statistics again"
    ) from e
  _, *lists = dataclasses.astuple(statistics)
  if len(set(map(len, lists))) > 1:
    raise ValueError(f"'{path}' is damaged: its lists have different lengths")
  return statistics


def resolve(
  config: ml_collections.ConfigDict, stored: Mapping[str, Any] | None = None
) -> ml_collections.ConfigDict:
  """Returns a config with numbers in place of 'percentile' and 'measured' in its `pp`.

  They are those in `stored`, the stored config of the run, or else in the statistics of
  the training split. ValueError or FileNotFoundError if these do not exist or do not fit.
  """
  names = [
    name for name in ('range', 'mean', 'std') if isinstance(config.pp[name], str)
  ]
  if not names:
    return config
  fields = (stored or {}).get('pp', {})
  if any(fields.get(name) is None for name in names):
    fields = _read(config).fields()
  config = config.copy_and_resolve_references()
  with config.ignore_type():
    for name in names:
      config.pp[name] = descriptions.as_tuple(fields[name])
  return config


def _read(config: ml_collections.ConfigDict) -> Statistics:
  """Reads the statistics of the training split."""
  pp, dataset = config.pp, config.dataset
  if not isinstance(dataset, str) or not folder.is_folder(dataset):
    raise ValueError(
      f"dataset='{dataset}' is not a folder, whose images are measured: set "
      '--config.pp.range, --config.pp.mean and --config.pp.std to numbers'
    )
  bases = sorted(set(slices.bases(pp.train)))
  path = place(dataset, bases[0])
  command = f'vit_jax index {dataset} {" ".join(bases)} --statistics'
  if len(bases) > 1:
    raise ValueError(
      f"pp.train='{pp.train}' has several splits, which are measured one by one "
      f'({command}): set --config.pp.range, --config.pp.mean and --config.pp.std to '
      'numbers'
    )
  if not tf.io.gfile.exists(path):
    raise FileNotFoundError(
      f"the values of the images are not measured, '{path}' is missing: run {command}"
    )
  statistics = read(path)
  num_channels = len(statistics.mean)
  if num_channels != pp.channels:
    raise ValueError(
      f'channels={pp.channels}, and the images have {num_channels} ({path}): set '
      f'--config.pp.channels={num_channels}'
    )
  constant = np.flatnonzero(
    (np.array(statistics.std) == 0)
    | (np.array(statistics.low_percentile) >= np.array(statistics.high_percentile))
  )
  if len(constant):
    raise ValueError(
      f'channel {constant[0]} has about the same value in all pixels ({path}): set '
      '--config.pp.range, --config.pp.mean and --config.pp.std to numbers'
    )
  console.notify(f"Values are scaled as measured in '{path}'.")
  num_images = processes.from_first(
    'counting the images', lambda: len(sources.list_images(dataset, bases[0]).index)
  )
  if num_images != statistics.num_images:
    console.notify(
      f"'{path}' was measured when '{bases[0]}' had "
      f'{console.pluralize(statistics.num_images, "image")}, and it has {num_images:,}: '
      f'to measure them again, run {command}'
    )
  return statistics
