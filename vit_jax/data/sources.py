"""Where examples come from: an image folder, or any TFDS data set.

A source gives example number `index` at any time, in any order (random access):

  lookup(indices [b]) -> {'image': string [b], 'label': int64 [b, L]}
  read(image) -> string, the contents of the image's file

both as TensorFlow graphs; labels are padded with -1 to L per example. Only
`StreamSource` cannot do that, and says what it cannot promise.
"""

from collections.abc import Sequence
import contextlib
import io

from absl import logging
from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from vit_jax import datasets
from vit_jax.data import folder

# A TFDS split that is not random access and not larger than this is read into
# memory, as the files encode it; a larger one is streamed.
MEMORY_LIMIT_BYTES = 4 * 2**30


class Source:
  """What all sources share.

  Attributes:
    num_examples: number of examples.
    class_names: names of the classes, by label.
    random_access: whether `lookup` works.
  """

  random_access = True

  def __init__(self, num_examples: int, class_names: Sequence[str]):
    self.num_examples = num_examples
    self.class_names = tuple(class_names)

  def read(self, image):
    """Returns the contents of the image's file."""
    return image

  def name(self, index: int) -> str:
    """Names an example for an error message."""
    return f'example {index}'


class MemorySource(Source):
  """Examples held encoded in memory."""

  def __init__(self, images: Sequence, labels: np.ndarray, class_names):
    super().__init__(len(images), class_names)
    self._images = tf.constant(images, tf.string)
    self._labels = tf.constant(labels, tf.int64)

  def lookup(self, indices):
    """Returns the examples of these numbers, as said in the module's text."""
    return {
      'image': tf.gather(self._images, indices),
      'label': tf.gather(self._labels, indices),
    }


class FolderSource(MemorySource):
  """The images of `root/split/<class>/*`, in an order that no listing changes.

  The order is that of a hash of their names: so a slice of the split, like
  'train[:90%]', is a fair sample of all classes.
  """

  def read(self, image):
    """Returns the contents of the image's file."""
    return tf.io.read_file(image)

  def name(self, index: int) -> str:
    """Names an example for an error message."""
    return self._images[index].numpy().decode()


class ArrayRecordSource(Source):
  """A TFDS data set in array_record files, read at random from disk."""

  def __init__(self, data, class_names, image_key: str, label_key: str):
    super().__init__(len(data), class_names)
    self._data = data
    self._image_key = image_key
    self._label_key = label_key

  def _get(self, indices):
    records = self._data.__getitems__(indices.tolist())
    images = np.array([r[self._image_key] for r in records], dtype=object)
    return images, pad_labels([r[self._label_key] for r in records])

  def lookup(self, indices):
    """Returns the examples of these numbers, as said in the module's text."""
    image, label = tf.numpy_function(
      self._get, [indices], [tf.string, tf.int64], stateful=False
    )
    return {
      'image': tf.ensure_shape(image, [None]),
      'label': tf.ensure_shape(label, [None, None]),
    }


class StreamSource(Source):
  """A TFDS data set that can only be read from its start (tfrecord files).

  What it cannot promise: the order is a shuffle buffer's, not a permutation of
  the whole; it depends on the number of processes, each of which reads its own
  share of the files; and a resumed run reads again all that came before.
  """

  random_access = False

  def __init__(self, builder, split, class_names, image_key, label_key):
    super().__init__(builder.info.splits[split].num_examples, class_names)
    self._builder = builder
    self._split = split
    self._image_key = image_key
    self._label_key = label_key

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
      decoders={self._image_key: tfds.decode.SkipDecoding()},
      read_config=tfds.ReadConfig(
        shuffle_seed=seed, skip_prefetch=True, try_autocache=False
      ),
    )
    data = data.map(
      lambda record: {
        'image': record[self._image_key],
        'label': tf.reshape(tf.cast(record[self._label_key], tf.int64), [-1]),
      }
    )
    if train:
      data = data.repeat().shuffle(shuffle_buffer, seed=seed)
    return data


def example_file(source, workdir) -> str:
  """Returns the path of an image of a split, written to the workdir if need be.

  Args:
    source: the split.
    workdir: folder of the run.
  """
  if isinstance(source, FolderSource):
    return source.name(0)
  if not source.random_access:
    return 'IMAGE.jpg'
  encoded = source.lookup(tf.constant([0], tf.int64))['image'][0].numpy()
  ending = 'jpg' if encoded.startswith(b'\xff\xd8') else 'png'
  path = epath.Path(workdir) / f'example.{ending}'
  path.write_bytes(encoded)
  return str(path)


def pad_labels(labels: Sequence) -> np.ndarray:
  """Stacks label ids or lists of them to int64 [n, L], padded with -1."""
  rows = [np.atleast_1d(np.asarray(label, np.int64)) for label in labels]
  padded = np.full((len(rows), max(map(len, rows), default=1)), -1, np.int64)
  for row, values in zip(padded, rows):
    row[: len(values)] = values
  return padded


def open_split(config, split: str, class_names=None):
  """Opens one split of `config.dataset`.

  Args:
    config: reads `dataset`, `tfds_data_dir`, `tfds_manual_dir`,
      `broken_images`.
    split: as TFDS writes it: 'train', 'test[:50%]', 'train[:800]+test[:9]'.
    class_names: the classes of the training split, which another split of a
      folder must have too; None for the training split itself.

  Returns:
    A source: FolderSource, MemorySource, ArrayRecordSource or StreamSource.

  Raises:
    ValueError, FileNotFoundError: where data set, split or images are not as
      they must be; says which and what to do.
  """
  if not config.dataset:
    raise ValueError(
      'dataset is not set: use --config.dataset=NAME of a TFDS data set, or of '
      'a folder with train/<class>/* and test/<class>/*'
    )
  if folder.is_folder(config.dataset):
    paths, labels, class_names = folder.list_split(
      config.dataset, split, class_names, broken=config.broken_images
    )
    return FolderSource(paths, labels[:, None], class_names)
  return _open_tfds(config, split)


def get_builder(config):
  """Returns the TFDS builder of `config.dataset`, prepared on this machine.

  Raises:
    ValueError: if TFDS knows no such data set or it cannot be prepared.
  """
  name, data_dir = config.dataset, config.tfds_data_dir
  own = datasets.register(name)
  try:
    builder = tfds.builder(name, data_dir=data_dir)
  except (tfds.core.DatasetNotFoundError, ValueError) as e:
    raise ValueError(
      f"dataset='{name}' is neither a folder nor known to TFDS: "
      f'{str(e).strip().splitlines()[0]} A folder must hold train/<class>/* and '
      'test/<class>/*; names are listed at '
      'https://www.tensorflow.org/datasets/catalog (config.dataset)'
    ) from e
  if builder.info.splits:
    return builder
  # Every process asks in turn, the first one first: so files on a shared disk
  # are made once, and on disks of their own everywhere.
  is_first = jax.process_index() == 0
  if not is_first:
    multihost_utils.sync_global_devices('tfds_prepare')
  # What ships with this package is made in a moment, and needs no announcement.
  quiet = contextlib.nullcontext()
  if own:
    tfds.disable_progress_bar()
    quiet = contextlib.redirect_stdout(io.StringIO())
  try:
    # This format gives random access, hence a shuffle of the whole data set.
    builder = tfds.builder(name, data_dir=data_dir, file_format='array_record')
    with quiet:
      builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(
          manual_dir=config.tfds_manual_dir
        )
      )
  except Exception as e:
    raise ValueError(
      f"data set '{name}' is not in {builder.data_dir} and could not be "
      f'prepared: {e} (config.tfds_data_dir is where prepared data sets lie, '
      'config.tfds_manual_dir where files are that TFDS cannot download)'
    ) from e
  finally:
    if is_first:
      multihost_utils.sync_global_devices('tfds_prepare')
  return builder


def _open_tfds(config, split):
  """Opens a split of a TFDS data set; see open_split."""
  builder = get_builder(config)
  image_key, label_key, class_names = _features(builder.info)
  bases = [part.split('[')[0].strip() for part in split.split('+')]
  for base in bases:
    if base not in builder.info.splits:
      raise ValueError(
        f"data set '{config.dataset}' has no split '{base}': it has "
        f'{list(builder.info.splits)} (config.pp.train, config.pp.test, --evaluate)'
      )
  if not builder.info.splits[split].num_examples:
    raise ValueError(f"split '{split}' of '{config.dataset}' is empty")
  decoders = {image_key: tfds.decode.SkipDecoding()}
  if builder.info.file_format == tfds.core.FileFormat.ARRAY_RECORD:
    data = builder.as_data_source(split=split, decoders=decoders)
    return ArrayRecordSource(data, class_names, image_key, label_key)
  if sum(builder.info.splits[b].num_bytes for b in bases) > MEMORY_LIMIT_BYTES:
    logging.warning(
      "'%s' is stored as tfrecord files: it is streamed, through a shuffle "
      'buffer, and a resumed run reads again what came before. Prepared anew '
      "with file_format='array_record' it is shuffled as a whole and resumes "
      'at once.',
      config.dataset,
    )
    return StreamSource(builder, split, class_names, image_key, label_key)
  records = list(
    builder.as_dataset(
      split=split, decoders=decoders, shuffle_files=False
    ).as_numpy_iterator()
  )
  labels = pad_labels([record[label_key] for record in records])
  return MemorySource([r[image_key] for r in records], labels, class_names)


def _features(info):
  """Finds image and label among the features of a TFDS data set.

  Returns:
    The key of the image, the key of the label, and the names of the classes.
  """
  keys = info.supervised_keys or ('image', 'label')
  image_key, label_key = keys[0], keys[-1]
  images = [
    key
    for key, feature in info.features.items()
    if isinstance(feature, tfds.features.Image)
  ]
  labels = {
    key: getattr(feature, 'feature', feature)
    for key, feature in info.features.items()
  }
  labels = {
    key: feature
    for key, feature in labels.items()
    if isinstance(feature, tfds.features.ClassLabel)
  }
  if image_key not in images and images:
    image_key = images[0]
  if label_key not in labels and labels:
    label_key = next(iter(labels))
  if image_key not in images or label_key not in labels:
    raise ValueError(
      f"data set '{info.name}' has no image or no class label to learn: its "
      f'features are {dict(info.features)}'
    )
  return image_key, label_key, tuple(labels[label_key].names)
