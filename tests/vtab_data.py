"""Writes small data sets of random examples under the names of TFDS data sets."""

import numpy as np
import tensorflow_datasets as tfds


def example(features, number: int) -> dict:
  """Returns a record of random numbers with the structure that TFDS declares."""
  rng = np.random.RandomState(number)
  return {name: _value(feature, rng) for name, feature in features.items()}


def _value(feature, rng):
  if isinstance(feature, tfds.features.FeaturesDict):
    return {name: _value(inner, rng) for name, inner in feature.items()}
  if isinstance(feature, tfds.features.Sequence):
    return [_value(feature.feature, rng) for _ in range(rng.randint(4))]
  if isinstance(feature, tfds.features.Image):
    shape = [8 if size is None else size for size in feature.shape]
    return np.full(shape, rng.randint(256), np.uint8)
  if isinstance(feature, tfds.features.ClassLabel):
    return rng.randint(feature.num_classes)
  if isinstance(feature, tfds.features.Text):
    return 'text'
  if isinstance(feature, tfds.features.BBoxFeature):
    return tfds.features.BBox(0.0, 0.0, 1.0, 1.0)
  return np.asarray(rng.rand(*feature.shape), feature.np_dtype)


def write(name: str, data_dir, records: dict, file_format='array_record'):
  """Writes a TFDS data set; returns its builder.

  Args:
    name: name of the data set.
    data_dir: folder of TFDS data sets.
    records: for each split the number of random examples, or a list of changes to
      such examples, {feature: value}.
    file_format: format of the files.
  """
  builder = tfds.builder(name, data_dir=str(data_dir), file_format=file_format)

  def generate(changes):
    for i, change in enumerate(changes):
      yield i, {**example(builder.info.features, i), **change}

  def split_generators(dl_manager, *args):
    return {
      split: generate([{}] * made if isinstance(made, int) else made)
      for split, made in records.items()
    }

  builder._split_generators = split_generators
  builder.download_and_prepare()
  return builder
