"""Where examples come from: an image folder, a manifest, any TFDS data set.

`open_split` opens any of them; see vit_jax/data/records.py for what a source is.
"""

from collections.abc import Sequence

from absl import logging
from etils import epath
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from vit_jax.data import folder
from vit_jax.data import manifest
from vit_jax.data import mixture
from vit_jax.data import records
from vit_jax.datasets import builders

# A TFDS split that is not random access and not larger than this is read into
# memory, as the files encode it; a larger one is streamed.
MEMORY_LIMIT_BYTES = 4 * 2**30

# What a classifier learns from.
LABELLED = ('image', 'label')


class ArrayRecordSource(records.Source):
  """A TFDS data set in array_record files, read at random from disk."""

  def __init__(self, data, reader: builders.Reader, features, names):
    super().__init__(len(data), features, names)
    self._data = data
    self._reader = reader

  def lookup(self, indices) -> dict:
    """Returns the examples of these numbers, see vit_jax/data/records.py."""

    def read(indices):
      return np.array(self._data.__getitems__(indices.tolist()), dtype=object)

    serialized = tf.numpy_function(read, [indices], tf.string, stateful=False)
    batch = self._reader.parse_all(tf.ensure_shape(serialized, [None]))
    if 'label' in batch:
      batch['label'] = records.padded(batch['label'])
    return batch


class StreamSource(records.Source):
  """A TFDS data set that can only be read from its start (tfrecord files).

  What it cannot promise: the order is a shuffle buffer's, not a permutation of
  the whole; it depends on the number of processes, each of which reads its own
  share of the files; and a resumed run reads again all that came before.
  """

  random_access = False

  def __init__(self, builder, split, reader: builders.Reader, features, names):
    super().__init__(builder.info.splits[split].num_examples, features, names)
    self._builder = builder
    self._split = split
    self._reader = reader

  def stream(self, shards: int, shard: int, shuffle_buffer: int, seed: int):
    """Returns one process's share of the records, as a tf.data.Dataset.

    Args:
      shards: number of shares.
      shard: which of them.
      shuffle_buffer: number of records to shuffle among; 0 keeps the order and
        ends after one pass, else the records repeat without end.
      seed: seed of the order.
    """
    train = shuffle_buffer > 0
    split = (
      tfds.even_splits(self._split, shards)[shard] if train else self._split
    )
    data = self._builder.as_dataset(
      split=split,
      shuffle_files=train,
      decoders=self._reader.decoders,
      read_config=tfds.ReadConfig(
        shuffle_seed=seed, skip_prefetch=True, try_autocache=False
      ),
    ).map(self._reader.select)
    if train:
      data = data.repeat().shuffle(shuffle_buffer, seed=seed)
    return data


def example_file(source, workdir) -> str:
  """Returns the path of an image of a split, written to the workdir if need be.

  Args:
    source: the split.
    workdir: folder of the run.
  """
  source, index = source.locate(0)
  if isinstance(source, records.FolderSource):
    return source.name(index)
  if not source.random_access or 'image' not in source.features:
    return 'IMAGE.jpg'
  [encoded] = source.lookup(tf.constant([index], tf.int64))['image'].numpy()
  ending = 'jpg' if encoded.startswith(b'\xff\xd8') else 'png'
  path = epath.Path(workdir) / f'example.{ending}'
  path.write_bytes(encoded)
  return str(path)


def open_split(
  config,
  split: str,
  features: Sequence[str] = LABELLED,
  class_names: Sequence[str] | None = None,
  dataset=None,
) -> records.Source:
  """Opens one split of a data set, for the features that the caller wants.

  Args:
    config: reads `dataset`, `tfds_data_dir`, `tfds_manual_dir`,
      `broken_images`.
    split: as TFDS writes it: 'train', 'test[:50%]', 'train[:800]+test[:9]'.
    features: names of what records shall have: 'image', 'label', and those of
      the data set, '/' leading into nested ones ('objects/bbox', or 'objects'
      for all of them). Where one that ends with '?' is lacking, the records lack
      it. Nothing else is read.
    class_names: the classes of the training split, which another split of a
      folder must have too; None for the training split itself.
    dataset: the data set, by default `config.dataset`. Of a mixture, the split
      that `config.pp.train` names is that of all its data sets, any other split
      that of the first.

  Returns:
    A source: records.FolderSource or MemorySource, ArrayRecordSource,
    StreamSource, or mixture.MixtureSource.

  Raises:
    ValueError, FileNotFoundError: where data set, split, features or images are
      not as they must be; says which and what to do.
  """
  dataset = config.dataset if dataset is None else dataset
  if not dataset:
    raise ValueError(
      'dataset is not set: use --config.dataset=NAME of a TFDS data set, or of '
      'a folder with train/<class>/* and test/<class>/*'
    )
  dataset = mixture.parse(dataset)
  if not isinstance(dataset, str):
    if split == config.pp.train:
      parts = [
        open_split(config, split, features, class_names, name)
        for name, _ in dataset
      ]
      return mixture.MixtureSource(parts, dataset)
    dataset = dataset[0][0]
  if folder.is_folder(dataset):
    return _open_folder(config, dataset, split, features, class_names)
  return _open_tfds(config, dataset, split, features)


def _open_folder(config, root, split, features, class_names):
  """Opens a split of a folder; see open_split."""
  broken = config.broken_images
  if manifest.exists(root, split):
    columns, names = manifest.read_split(
      root, split, features, class_names, broken
    )
    return records.FolderSource(columns, names)
  available = ['image']
  if folder.has_labels(root, split):
    available.append('label')
  wanted = records.resolve(
    features, available, f"split '{split}' of folder '{root}'"
  )
  names, columns = {}, {}
  if 'label' in wanted:
    paths, labels, class_names = folder.list_split(
      root, split, class_names, broken
    )
    columns['label'] = labels[:, None]
    names['label'] = class_names
  else:
    paths = folder.list_images(root, split, broken)
  columns['image'] = paths
  return records.FolderSource({name: columns[name] for name in wanted}, names)


def _open_tfds(config, dataset, split, features):
  """Opens a split of a TFDS data set; see open_split."""
  builder = builders.get_builder(config, dataset)
  info = builder.info
  available = builders.features(info)
  wanted = records.resolve(features, available, f"data set '{info.name}'")
  names = {
    name: available[name].class_names
    for name in wanted
    if available[name].class_names is not None
  }
  bases = [part.split('[')[0].strip() for part in split.split('+')]
  for base in bases:
    if base not in info.splits:
      raise ValueError(
        f"data set '{dataset}' has no split '{base}': it has "
        f'{list(info.splits)} (config.pp.train, config.pp.test, '
        'config.evals, --evaluate)'
      )
  if not info.splits[split].num_examples:
    raise ValueError(f"split '{split}' of '{dataset}' is empty")
  reader = builders.Reader(info, {name: available[name] for name in wanted})
  if info.file_format == tfds.core.FileFormat.ARRAY_RECORD:
    data = builder.as_data_source(
      split=split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
    )
    return ArrayRecordSource(data, reader, wanted, names)
  if sum(info.splits[b].num_bytes for b in bases) > MEMORY_LIMIT_BYTES:
    logging.warning(
      "'%s' is stored as tfrecord files: it is streamed, through a shuffle "
      'buffer, and a resumed run reads again what came before. Prepared anew '
      "with file_format='array_record' it is shuffled as a whole and resumes "
      'at once.',
      dataset,
    )
    return StreamSource(builder, split, reader, wanted, names)
  data = builder.as_dataset(
    split=split, decoders=reader.decoders, shuffle_files=False
  ).map(reader.select)
  columns = data.ragged_batch(info.splits[split].num_examples)
  columns = columns.get_single_element()
  if 'label' in columns:
    columns['label'] = records.padded(columns['label'])
  return records.MemorySource(columns, names)
