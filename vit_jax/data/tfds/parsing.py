"""Names and parses the features of TFDS data sets.

A nested feature is named by its path: `objects`, a Sequence of dicts with a
`bbox` each, has 'objects/bbox' [n, 4]. Two names are the same for all data
sets: 'image' is the image among the supervised keys, or else the first image;
'label' is likewise a class label or a list of class labels.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import functools
import operator
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.lazy import tf, tfds


class Feature(NamedTuple):
  """A feature of a TFDS data set."""

  path: tuple[str, ...]  # Keys that lead to it in a record of TFDS.
  is_image: bool  # An image, or a sequence of images.
  # Classes of a label, or of the pixels of a mask; None for other features.
  class_names: tuple[str, ...] | None


def features(info: Any) -> dict[str, Feature]:
  """Returns the features of a tfds.core.DatasetInfo by name, see above."""
  features = dict(_leaves(info.features, ()))
  images, labels = [], []
  for name in info.features:
    feature = features.get(name)
    if feature is None:
      continue
    rank = _sequence_rank(info.features[name])
    if feature.is_image and not rank:
      images.append(name)
    if feature.class_names is not None and not feature.is_image and rank < 2:
      labels.append(name)
  keys = info.supervised_keys or ('image', 'label')
  primary = {}
  for name, key, candidates in (
    ('image', keys[0], images),
    ('label', keys[-1], labels),
  ):
    if candidates:
      primary[name] = features[key if key in candidates else candidates[0]]
  for name in ('image', 'label'):
    features.pop(name, None)
  return {**primary, **features}


def _sequence_rank(feature: Any) -> int:
  """Counts the nested sequences that hold a feature."""
  nested = type(feature) is tfds.features.Sequence
  return 1 + _sequence_rank(feature.feature) if nested else 0


def _leaves(feature: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Feature]]:
  """Yields (name, Feature) of a feature of TFDS and the features within it."""
  # Subclasses of these two decode their parts together, so they are leaves.
  if type(feature) is tfds.features.FeaturesDict:
    for key, inner in feature.items():
      yield from _leaves(inner, (*path, key))
  elif type(feature) is tfds.features.Sequence:
    yield from _leaves(feature.feature, path)
  elif isinstance(feature.get_tensor_info(), tfds.features.TensorInfo):
    class_names = None
    if isinstance(feature, tfds.features.ClassLabel | tfds.features.LabeledImage):
      class_names = tuple(feature.names) if feature.num_classes else ()
    is_image = isinstance(feature, tfds.features.Image)
    yield '/'.join(path), Feature(path, is_image, class_names)


class Reader:
  """Parses some features of a record; images stay encoded.

  `features` is a part of the result of the function of this name. The attributes
  `features` and `names` are as in records.Source.
  """

  def __init__(self, info: Any, features: Mapping[str, Feature]) -> None:
    self.features = tuple(features)
    self.names: dict[str, tuple[str, ...]] = {}
    self._paths: dict[str, tuple[str, ...]] = {}
    self._decoders: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    for name, feature in features.items():
      if feature.class_names is not None:
        self.names[name] = feature.class_names
      self._paths[name] = feature.path
      _put(keys, feature.path, True)
      if feature.is_image:
        _put(self._decoders, feature.path, tfds.decode.SkipDecoding())
    self._features = _part(info.features, keys)

  def parse(self, serialized: 'tf.Tensor') -> dict[str, 'tf.Tensor']:
    """Parses a serialized record, a string scalar: features by name.

    'label' is int64 [L], also for data with one class per image.
    """
    record = self._features.deserialize_example(serialized, decoders=self._decoders)
    features = {
      name: functools.reduce(operator.getitem, path, record)
      for name, path in self._paths.items()
    }
    if 'label' in features:
      features['label'] = tf.reshape(tf.cast(features['label'], tf.int64), [-1])
    return features

  def parse_labels(self, contents: Iterable[bytes]) -> np.ndarray:
    """Returns the classes in serialized records, int64 [n, L], padded with -1."""
    key = '/'.join(self._paths['label'])
    rows = []
    for content in contents:
      example = tf.train.Example.FromString(content)
      rows.append(list(example.features.feature[key].int64_list.value))
    labels = np.full([len(rows), max([1, *map(len, rows)])], -1, np.int64)
    for row, numbers in zip(labels, rows):
      row[: len(numbers)] = numbers
    return labels


def _part(feature: Any, keys: Any) -> Any:
  """Selects by nested keys, like tfds.decode.PartialDecoding, which prints warnings."""
  if keys is True:
    return feature
  if isinstance(feature, tfds.features.Sequence):
    inner = _part(feature.feature, keys)
    return tfds.features.Sequence(inner, length=feature._length)
  return tfds.features.FeaturesDict(
    {key: _part(feature[key], inner) for key, inner in keys.items()}
  )


def _put(tree: dict, path: Sequence[str], leaf: Any) -> None:
  """Puts a leaf into nested dicts, which are created as needed."""
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = leaf
