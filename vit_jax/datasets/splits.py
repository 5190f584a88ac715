"""Opens splits of TFDS data sets: on disk, in memory, or streamed."""

from absl import logging
from array_record.python import array_record_data_source
from etils import epath
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from vit_jax import datasets
from vit_jax.data import folder
from vit_jax.data import records
from vit_jax.datasets import builders
from vit_jax.datasets import parsing
from vit_jax.datasets import streams

# Files without random access are read into memory, still encoded, if the split
# is at most this large; a larger split is streamed.
MEMORY_LIMIT_BYTES = 4 * 2**30


class ArrayRecordSource(records.Source):
  """A split in array_record files, with random access on disk.

  Args:
    files: files of the split, and which records of each belong to the split.
    record_bytes: mean size of a record.
    reader: parser of the records.
  """

  def __init__(self, files, record_bytes, reader: parsing.Reader):
    self._data = array_record_data_source.ArrayRecordDataSource(
      files, reader_options={'max_parallelism': '0'}
    )
    self._reader = reader
    super().__init__(len(self._data), reader.features, reader.names)
    self.chunk = records.chunk(len(self._data), record_bytes)

  def lookup(self, indices) -> dict:
    """Returns the examples with these numbers; see records.Source.lookup."""

    def read(indices):
      return np.array(self._data.__getitems__(indices.tolist()), dtype=object)

    serialized = tf.numpy_function(read, [indices], tf.string, stateful=False)
    return self._reader.parse_all(tf.ensure_shape(serialized, [None]))


def open_split(config, dataset: str, split: str, features) -> records.Source:
  """Opens a split of a TFDS data set; see vit_jax.data.sources.open_split."""
  builder = builders.get_builder(config, dataset)
  info = builder.info
  available = parsing.features(info)
  wanted = records.resolve(features, available, f"data set '{info.name}'")
  reader = parsing.Reader(info, {name: available[name] for name in wanted})
  source = open_with(builder, dataset, split, reader)
  source.origin = {'dataset': info.full_name, 'split': split}
  return source


def whole(info, dataset: str, split: str):
  """Returns a whole split of a TFDS data set, a tfds.core.SplitInfo.

  Raises:
    ValueError: if there is no such split.
  """
  if split not in info.splits:
    raise ValueError(
      f"data set '{dataset}' has no split '{split}': it has "
      f'{list(info.splits)} (config.pp.train, config.pp.test, '
      'config.evals, --evaluate)'
    )
  return info.splits[split]


def open_with(
  builder, dataset: str, split: str, reader: parsing.Reader
) -> records.Source:
  """Opens a split of a prepared TFDS data set.

  Args:
    builder: the builder of the data set.
    dataset: name of the data set for messages.
    split: a split in the notation of TFDS.
    reader: parser of the records.
  """
  info = builder.info
  bases = []
  for base, instruction in folder.parts(split):
    bases.append(whole(info, dataset, base))
    folder.bounds(bases[-1], instruction)
  count = info.splits[split].num_examples
  if datasets.has_array_records(info):
    info.set_file_format(
      tfds.core.FileFormat.ARRAY_RECORD,
      override=True,
      override_if_initialized=True,
    )
  files = info.splits[split].file_instructions
  record_bytes = _record_bytes(bases, files)
  if info.file_format == tfds.core.FileFormat.ARRAY_RECORD:
    return ArrayRecordSource(files, record_bytes, reader)
  if record_bytes * count > MEMORY_LIMIT_BYTES:
    logging.warning(
      "'%s' is stored as %s files: it is streamed, and shuffled by files and "
      'windows of records only. Run `python -m vit_jax.datasets.convert %s` to get '
      'files with random access, which are shuffled as a whole.',
      dataset,
      info.file_format.value,
      dataset,
    )
    return streams.StreamSource(files, info.file_format, record_bytes, reader)
  data = builder.as_dataset(
    split=split, decoders=reader.decoders, shuffle_files=False
  ).map(reader.select)
  columns = data.ragged_batch(count).get_single_element()
  return records.MemorySource(reader.finish(columns), reader.names)


def _record_bytes(splits, files) -> float:
  """Returns the mean size of a record in bytes.

  Args:
    splits: the whole splits that a slice is taken from.
    files: files of the slice.
  """
  size = sum(split.num_bytes for split in splits)
  if size:
    return size / sum(split.num_examples for split in splits)
  file = files[0]  # The data set does not tell: estimate from the first file.
  return epath.Path(file.filename).stat().length / file.examples_in_shard
