"""Data sets of TFDS: prepared on this machine, their features by name.

A feature inside others is named with '/': `objects`, a Sequence of dicts with a
`bbox` each, has 'objects/bbox' [n, 4]. What people learn from has one name in
all data sets: 'image' is the image of the data set's supervised keys, or else
its first one, 'label' likewise its class label (or list of them).
"""

from collections.abc import Mapping
import contextlib
import io
from typing import NamedTuple

import jax
import tensorflow as tf
import tensorflow_datasets as tfds

from vit_jax import datasets
from vit_jax.scale import processes


def get_builder(config, dataset: str):
  """Returns the TFDS builder of a data set, prepared on this machine.

  Args:
    config: reads `tfds_data_dir`, `tfds_manual_dir`.
    dataset: the TFDS name.

  Raises:
    ValueError: if TFDS knows no such data set or it cannot be prepared.
  """
  data_dir = config.tfds_data_dir
  own = datasets.register(dataset)
  try:
    builder = tfds.builder(dataset, data_dir=data_dir)
  except AssertionError as e:  # There is no such version.
    reason = str(e).rpartition(': Dataset ')[2]
    raise ValueError(
      f"dataset='{dataset}' cannot be opened: {reason} (config.dataset)"
    ) from e
  except (tfds.core.DatasetNotFoundError, ValueError) as e:
    raise ValueError(
      f"dataset='{dataset}' is neither a folder nor known to TFDS: "
      f'{str(e).strip().splitlines()[0]} A folder must hold train/<class>/* and '
      'test/<class>/*; names are listed at '
      'https://www.tensorflow.org/datasets/catalog (config.dataset)'
    ) from e
  # The first process prepares, then the others: so files on a shared disk are made
  # once, and on disks of their own everywhere.
  is_first = jax.process_index() == 0
  for turn in (True, False):

    def prepare(turn=turn):
      nonlocal builder
      if not builder.info.splits:  # They may have come since.
        builder = tfds.builder(dataset, data_dir=data_dir)
      if is_first == turn and not builder.info.splits:
        builder = _prepare(config, dataset, own)

    processes.attempt(f"preparing data set '{dataset}'", prepare)
  return builder


def _prepare(config, dataset, own):
  """Downloads and writes a data set."""
  # What ships with this package is made in a moment, and needs no announcement.
  quiet = contextlib.nullcontext()
  if own:
    tfds.disable_progress_bar()
    quiet = contextlib.redirect_stdout(io.StringIO())
  # This format gives random access, hence a shuffle of the whole data set.
  builder = tfds.builder(
    dataset, data_dir=config.tfds_data_dir, file_format='array_record'
  )
  try:
    with quiet:
      builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(
          manual_dir=config.tfds_manual_dir
        )
      )
  except Exception as e:
    raise ValueError(
      f"data set '{dataset}' is not in {builder.data_dir} and could not be "
      f'prepared: {e} (config.tfds_data_dir is where prepared data sets lie, '
      'config.tfds_manual_dir where files are that TFDS cannot download)'
    ) from e
  return builder


class Feature(NamedTuple):
  """A feature of a TFDS data set.

  Attributes:
    path: keys that lead to it in a record of TFDS.
    is_image: whether it is an image, or a sequence of them.
    class_names: names of its classes; None if it is no class label.
  """

  path: tuple[str, ...]
  is_image: bool
  class_names: tuple[str, ...] | None


def features(info) -> dict[str, Feature]:
  """Returns the features of a TFDS data set by name, as the module's text says.

  Args:
    info: the builder's tfds.core.DatasetInfo.
  """
  found = dict(_leaves(info.features, ()))
  top = {name: found[name] for name in info.features if name in found}
  ranks = {name: _sequence_rank(info.features[name]) for name in top}
  images = [
    n for n, feature in top.items() if feature.is_image and not ranks[n]
  ]
  labels = [
    name
    for name, feature in top.items()
    if feature.class_names is not None and ranks[name] < 2
  ]
  keys = info.supervised_keys or ('image', 'label')
  chosen = {}
  for name, key, candidates in (
    ('image', keys[0], images),
    ('label', keys[-1], labels),
  ):
    found.pop(name, None)
    if candidates:
      chosen[name] = top[key if key in candidates else candidates[0]]
  return {**chosen, **found}


def _sequence_rank(feature) -> int:
  """Counts the sequences that a feature lies in."""
  rank = 0
  while type(feature) is tfds.features.Sequence:
    feature, rank = feature.feature, rank + 1
  return rank


def _leaves(feature, path):
  """Yields (name, Feature) of all that lies in a feature of TFDS."""
  # Subclasses of these two decode their parts as a whole: they are leaves.
  if type(feature) is tfds.features.FeaturesDict:
    for key, inner in feature.items():
      yield from _leaves(inner, (*path, key))
  elif type(feature) is tfds.features.Sequence:
    yield from _leaves(feature.feature, path)
  elif isinstance(feature.get_tensor_info(), tfds.features.TensorInfo):
    class_names = None
    if isinstance(feature, tfds.features.ClassLabel):
      class_names = tuple(feature.names) if feature.num_classes else ()
    is_image = isinstance(feature, tfds.features.Image)
    yield '/'.join(path), Feature(path, is_image, class_names)


class Reader:
  """Parses the wanted features of records, and leaves images encoded.

  Args:
    info: the builder's tfds.core.DatasetInfo.
    wanted: features by name, among those of `features`.

  Attributes:
    features: names of the wanted features.
    decoders: what `builder.as_dataset` needs to do the same.
  """

  def __init__(self, info, wanted: Mapping[str, Feature]):
    self.features = tuple(wanted)
    self._paths = {name: feature.path for name, feature in wanted.items()}
    self._flat = _flat_specs(info.features, self._paths)
    keys, decoders = {}, {}
    for feature in wanted.values():
      _put(keys, feature.path, True)
      if feature.is_image:
        _put(decoders, feature.path, tfds.decode.SkipDecoding())
    self.decoders = _Wanted(keys, decoders)
    self._features = self.decoders.extract_features(info.features)

  def select(self, record) -> dict:
    """Returns the wanted features of a record of TFDS, by their names.

    'label' is int64 [L], also where the data have one class an image; of any
    other feature, dimensions that vary inside others are ragged.
    """
    selected = {}
    for name, path in self._paths.items():
      value = record
      for key in path:
        value = value[key]
      if name == 'label':
        value = tf.reshape(tf.cast(value, tf.int64), [-1])
      elif not isinstance(value, tf.RaggedTensor):
        varying = [i for i, size in enumerate(value.shape) if size is None]
        if varying and varying[-1]:
          value = tf.RaggedTensor.from_tensor(value, ragged_rank=varying[-1])
      selected[name] = value
    return selected

  def parse(self, serialized):
    """Returns the same of a serialized record, a string scalar."""
    record = self._features.deserialize_example(
      serialized, decoders=self.decoders.decoders
    )
    return self.select(record)

  def parse_all(self, serialized) -> dict:
    """Returns the same of many, strings [b]; what varies is a RaggedTensor."""
    if self._flat is not None:
      batch = tf.io.parse_example(serialized, self._flat)
      batch = {k: batch['/'.join(path)] for k, path in self._paths.items()}
      if 'label' in batch:
        batch['label'] = tf.reshape(batch['label'], [-1, 1])
      return batch
    outputs = (
      tf.function(self.parse)
      .get_concrete_function(tf.TensorSpec([], tf.string))
      .structured_outputs
    )
    return tf.map_fn(
      self.parse,
      serialized,
      fn_output_signature={name: _spec(x) for name, x in outputs.items()},
    )


def _flat_specs(features, paths) -> dict | None:
  """Returns how to parse features that are stored as they are read, all at once.

  Args:
    features: those of a TFDS data set.
    paths: the keys that lead to the wanted ones.

  Returns:
    What tf.io.parse_example needs; None if a feature needs more than that.
  """
  specs = {}
  for path in paths.values():
    feature = features
    for key in path:
      if type(feature) is not tfds.features.FeaturesDict:
        return None
      feature = feature[key]
    if isinstance(feature, tfds.features.Image):
      shape, dtype = (), tf.string  # It stays encoded.
    elif type(feature) in _PLAIN:
      stored, seen = feature.get_serialized_info(), feature.get_tensor_info()
      shape, dtype = stored.shape, stored.tf_dtype
      if (shape, dtype) != (seen.shape, seen.tf_dtype) or None in shape:
        return None
      if dtype not in (tf.int64, tf.float32, tf.string):
        return None
    else:
      return None
    specs['/'.join(path)] = tf.io.FixedLenFeature(shape, dtype)
  return specs


# Features whose values are stored as they are, but for the type of some.
_PLAIN = (
  tfds.features.ClassLabel,
  tfds.features.Scalar,
  tfds.features.Tensor,
  tfds.features.Text,
)


class _Wanted(tfds.decode.PartialDecoding):
  """PartialDecoding without its warnings of what it does itself."""

  def extract_features(self, features):
    """Returns the wanted part of the features of a data set."""
    return _part(features, self._feature_specs)


def _part(feature, keys):
  """Returns the part of a feature that nested keys lead to."""
  if keys is True:
    return feature
  if isinstance(feature, tfds.features.Sequence):
    inner = _part(feature.feature, keys)
    return tfds.features.Sequence(inner, length=feature._length)
  return tfds.features.FeaturesDict(
    {key: _part(feature[key], inner) for key, inner in keys.items()}
  )


def _put(tree, path, leaf):
  """Puts a leaf into nested dicts, which it makes."""
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = leaf


def _spec(tensor):
  """Returns what tf.map_fn needs to know of an output to stack it."""
  if isinstance(tensor, tf.RaggedTensor):
    return tf.RaggedTensorSpec(tensor.shape, tensor.dtype, tensor.ragged_rank)
  if tensor.shape.is_fully_defined():
    return tf.TensorSpec(tensor.shape, tensor.dtype)
  return tf.RaggedTensorSpec(tensor.shape, tensor.dtype, 0)
