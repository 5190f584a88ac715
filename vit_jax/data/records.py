"""Base of all sources of examples: records of named features, by number.

A source returns any examples by their numbers:

  lookup(indices [b]) -> records of b examples, by name
  read(record) -> the features of one example

both as TensorFlow graphs. A record has features, with paths instead of images, or
an unparsed example of TFDS. Among the features, 'image' is a string, the contents
of an image file, and 'label' is int64 [L], class numbers, which may be padded
with -1. Only a mixture has no `lookup`: its parts read its examples.
"""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import difflib
import json
import os
from typing import Any, Literal

import numpy as np

from vit_jax.data.images import image_files, images
from vit_jax.data.lazy import tf
from vit_jax.distributed import files

# For slow reading: number of parallel calls, and most bytes and records per call.
CALLS = min(16, 2 * (os.cpu_count() or 1))
_CHUNK_BYTES = 8 * 2**20
_CHUNK = 1024


Record = dict[str, 'tf.Tensor']  # The features of an example, or of several, by name.


class Source:
  """Base class of sources.

  Attributes:
    num_examples: number of examples.
    features: names of the features that `read` returns.
    names: {feature: names of its classes} for the class labels.
  """

  # Numbers of the classes of segments that are not things.
  stuff: Sequence[int] = ()
  # Classes of the pixels of masks, see vit_jax/data/masks.py; (): `names`, from 0.
  mask_classes: Sequence[Any] = ()
  # Examples per call of `lookup`, in CALLS parallel calls; None: a whole batch.
  chunk: int | None = None
  # Number of channels of images.decode_values; None: images of 8-bit colour.
  channels: int | None = None
  # Whether evaluation skips examples that cannot be read.
  tolerant: bool = False
  # Function (positions [b] of a run, seed) -> numbers of the examples, int64 [b]. None: a
  # permutation of all examples per epoch, see vit_jax/data/order.py.
  order: Callable[[np.ndarray, int], np.ndarray] | None = None
  # Name of the data for the fingerprint: {'dataset': 'cifar10/3.0.2', ...}.
  origin: Mapping[str, Any] = {}
  # Maps numbers of examples [b] to their records; a mixture has none.
  lookup: Callable[..., Record]

  def __init__(
    self,
    num_examples: int,
    features: Iterable[str],
    names: Mapping[str, Sequence[str]],
  ) -> None:
    self.num_examples = num_examples
    self.features = tuple(features)
    self.names = {key: tuple(value) for key, value in names.items()}

  @property
  def class_names(self) -> tuple[str, ...]:
    """Names of the classes of 'label'; () if 'label' is not read."""
    return self.names.get('label', ())

  @property
  def evaluated(self) -> 'Source':
    """The source for evaluation: for a mixture its first data set."""
    return self

  def fingerprint(self) -> dict[str, Any]:
    """Returns a short description of the data for JSON, to tell data apart.

    It is cheap, the same in all processes, and independent of the location of a
    folder. Names of a folder's images are hashed, and all their features but pixels.
    """
    names = json.dumps(self.names, sort_keys=True).encode()
    return {
      **self.origin,
      'num_examples': self.num_examples,
      'num_classes': len(self.class_names),
      'class_names': files.digest([names]),
    }

  def lengths(self, feature: str) -> np.ndarray | None:
    """Returns how many values each example has of a feature of varying size.

    int64 [num_examples]; None if that is not known without reading the data.
    """
    del feature
    return None

  def values(self, feature: str) -> 'tf.Tensor | tf.RaggedTensor | None':
    """Returns a feature of all examples, [num_examples, ...], except 'image'.

    None if that is not known without reading the data.
    """
    del feature
    return None

  def shapes(self, upright: bool = False) -> np.ndarray | None:
    """Returns height and width of each image, int64 [num_examples, 2].

    `upright` applies the EXIF orientation. None if they are not known without reading the
    images.
    """
    return None

  def labels(self) -> np.ndarray | None:
    """Returns the classes of each example, int [num_examples, L], padded with -1.

    None if they are not known without reading much data.
    """
    return None

  def store(self, workdir: str | None) -> None:
    """Writes data to the workdir of a run that speed up its next start."""

  def record(self, number: 'int | tf.Tensor') -> dict:
    """Returns the record of an example, before `read`, by its number."""
    records = self.lookup(tf.reshape(tf.cast(number, tf.int64), [1]))
    return {name: value[0] for name, value in records.items()}

  def read(self, record: Record) -> Record:
    """Returns the features of one example, with images instead of paths."""
    return record

  def name(self, index: int) -> str:
    """Names an example for an error message."""
    return f'example {index}'

  def stamp(self, index: int) -> int:
    """Returns a hash of size and time of an image's file; 0 without one."""
    del index
    return 0

  def check(self, record: Record, index: int) -> None:
    """Decodes the image of an example, by its record before `read` and number.

    ValueError if the image cannot be decoded, OSError if its file cannot be read.
    """
    name = f"image '{self.name(index)}'"
    try:
      encoded = self.read(record)['image']
      if self.channels is None:
        images.decode(encoded)
      else:
        images.decode_values(encoded, self.channels)
    except images.decode_errors() as e:
      raise ValueError(
        f'{name} cannot be decoded: {image_files.first_line(e)}. Repair or delete it, '
        'or leave out the broken images of a folder with '
        '--config.broken_images=skip'
      ) from None
    except tf.errors.OpError as e:
      raise OSError(
        f'{name} cannot be read: {image_files.first_line(e)}. Check whether this '
        'machine can read it; the same command resumes the run'
      ) from None

  def locate(self, index: int) -> tuple['Source', int]:
    """Returns the source that holds an example, and its number there."""
    return self, index


class MemorySource(Source):
  """Examples in memory, with encoded images: tensors [n, ...] by feature."""

  def __init__(self, columns: Mapping, names: Mapping[str, Sequence[str]]) -> None:
    self._columns = {}
    for name, column in columns.items():
      is_ragged = isinstance(column, tf.RaggedTensor)
      self._columns[name] = column if is_ragged else tf.convert_to_tensor(column)
    sizes = [column.shape[0] for column in self._columns.values()]
    super().__init__(sizes[0] if sizes else 0, columns, names)

  def lookup(self, indices: 'tf.Tensor') -> Record:
    return {name: tf.gather(x, indices) for name, x in self._columns.items()}

  def values(self, feature: str) -> 'tf.Tensor | tf.RaggedTensor | None':
    return self._columns.get(feature)

  def labels(self) -> np.ndarray | None:
    column = self.values('label')
    if isinstance(column, tf.RaggedTensor):
      column = column.to_tensor(-1)
    return None if column is None else column.numpy()

  def lengths(self, feature: str) -> np.ndarray | None:
    column = self.values(feature)
    if not isinstance(column, tf.RaggedTensor):
      return None
    return column.row_lengths().numpy()


class FolderSource(MemorySource):
  """Images in files, listed by a folder or a manifest.

  Examples are ordered by a hash of their names, so that a slice of the split,
  such as 'train[:90%]', is a random sample of the whole. Among the columns,
  'image' is an index.Paths; a file with more than `max_pixels` is rejected
  before decoding.
  """

  def __init__(self, columns: Mapping, names: Mapping, max_pixels: int) -> None:
    self._paths = columns.get('image')
    self._max_pixels = max_pixels
    super().__init__({k: v for k, v in columns.items() if k != 'image'}, names)
    self.features = tuple(columns)
    if self._paths is not None:
      self.num_examples = len(self._paths)

  def lookup(self, indices: 'tf.Tensor') -> Record:
    columns = super().lookup(indices)
    if 'label' in columns:
      columns['label'] = tf.cast(columns['label'], tf.int64)
    if self._paths is not None:
      paths = tf.numpy_function(
        self._paths.encoded, [indices], tf.string, stateful=False
      )
      columns['image'] = tf.ensure_shape(paths, indices.shape)
    return {name: columns[name] for name in self.features}

  def fingerprint(self) -> dict[str, Any]:
    """Returns hashes of the paths and of each feature too."""
    values = super().fingerprint()
    if self._paths is not None:
      values['images'] = self._paths.digest()
    for name, column in self._columns.items():
      values['labels' if name == 'label' else name] = _column_digest(column)
    return values

  def read(self, record: Record) -> Record:
    if 'image' not in record:
      return record
    encoded = tf.io.read_file(record['image'])
    return {**record, 'image': images.bounded(encoded, self._max_pixels)}

  def name(self, index: int) -> str:
    return super().name(index) if self._paths is None else self._paths[index]

  def stamp(self, index: int) -> int:
    if self._paths is None:
      return 0
    return image_files.stamp(self._paths.encoded([index])[0])

  def store(self, workdir: str | None) -> None:
    if self._paths is not None:
      self._paths.store(workdir)


def _column_digest(column: 'tf.Tensor | tf.RaggedTensor') -> str:
  """Returns a hash of a feature of all examples, texts by a hash of each."""
  tensors = [column]
  if isinstance(column, tf.RaggedTensor):
    tensors = [*column.nested_row_splits, column.flat_values]
  contents = []
  for tensor in tensors:
    if tensor.dtype == tf.string:
      tensor = tf.strings.to_hash_bucket_fast(tensor, 2**63 - 1)
    array = tensor.numpy()
    contents += [str(array.shape).encode(), np.ascontiguousarray(array)]
  return files.digest(contents)


class Subset(Source):
  """Examples of a source by their numbers, int64 [n], which may repeat."""

  def __init__(self, source: Source, indices: np.ndarray) -> None:
    super().__init__(len(indices), source.features, source.names)
    self.mask_classes = source.mask_classes
    self._source = source
    self._indices = np.asarray(indices, np.int64)
    self.chunk = source.chunk

  def lookup(self, indices: 'tf.Tensor') -> Record:
    return self._source.lookup(tf.gather(self._indices, indices))

  def read(self, record: Record) -> Record:
    return self._source.read(record)

  def name(self, index: int) -> str:
    return self._source.name(int(self._indices[index]))

  def lengths(self, feature: str) -> np.ndarray | None:
    lengths = self._source.lengths(feature)
    return None if lengths is None else lengths[self._indices]

  def labels(self) -> np.ndarray | None:
    labels = self._source.labels()
    return None if labels is None else labels[self._indices]

  def locate(self, index: int) -> tuple[Source, int]:
    return self._source.locate(int(self._indices[index]))

  def store(self, workdir: str | None) -> None:
    self._source.store(workdir)


def stamps(source: Source, blocks: Sequence[range]) -> list[str]:
  """Returns a hash of the stamps of the images of each block, see Source.stamp."""

  def stamp(number: int) -> int:
    part, number = source.locate(number)
    return part.stamp(number)

  def digest(block: range) -> str:
    return files.digest([np.array(list(map(stamp, block)), np.uint64)])

  return image_files.in_threads(digest, blocks, 'Comparing images')


def stack_labels(labels: Sequence[np.ndarray]) -> np.ndarray:
  """Concatenates labels, int64 [n, L] of different L, padded with -1."""
  width = max(array.shape[1] for array in labels)
  arrays = []
  for array in labels:
    padding = (0, 0), (0, width - array.shape[1])
    arrays.append(np.pad(array, padding, constant_values=-1))
  return np.concatenate(arrays)


def chunk(num_examples: int, record_bytes: float) -> int:
  """Returns how many records to read at a time, given their mean size."""
  fitting = int(_CHUNK_BYTES / max(1.0, record_bytes))
  return max(1, min(_CHUNK, fitting, num_examples))


def resolve(
  requested: Iterable[str],
  available: Iterable[str],
  where: str,
  noun: Literal['feature', 'column'] = 'feature',
) -> tuple[str, ...]:
  """Selects the requested features of the data, by name.

  'objects' selects all features below it, such as 'objects/bbox'; a name that ends
  with '?' is optional; 'index' always exists. A ValueError names the data, `where`,
  if a required feature is missing. It calls features by a `noun`; a user may rename
  columns.
  """
  available = tuple(available)
  requested = tuple(requested)
  selected = []
  for name in requested:
    key = name.removesuffix('?')
    if key in available or key in ('image', 'label'):  # Excludes 'image/id'.
      matches = [key] if key in available else []
    else:
      matches = [x for x in available if x.startswith(f'{key}/')]
    if not matches and not name.endswith('?') and key != 'index':
      kinds = {'image': ', an image', 'label': ', a class label of the image'}
      remedy = 'use other data, or a task that does not need it'
      candidates = [x for x in available if x not in requested]
      similar = difflib.get_close_matches(key, candidates, 1)
      if similar and noun == 'column':
        remedy = f"rename '{similar[0]}' to '{key}'"
      raise ValueError(
        f"{where} has no {noun} '{key}'{kinds.get(key, '')}: it has {sorted(available)}; "
        f'{remedy} (config.dataset, config.task)'
      )
    selected += [match for match in matches if match != 'index']
  return tuple(dict.fromkeys(selected))


def class_numbers(
  where: str, names: Sequence[str], expected: Sequence[str]
) -> np.ndarray:
  """Returns the place of each class of a split among the expected ones, int64 [n].

  Equal lists match place by place, so that classes may share a name. ValueError if a
  split has other classes, or names that are repeated in another order.
  """
  if tuple(names) == tuple(expected):
    return np.arange(len(expected))
  counts = collections.Counter(names)
  expected_counts = collections.Counter(expected)
  differing = {'has': counts - expected_counts, 'lacks': expected_counts - counts}
  faults = []
  for verb, classes in differing.items():
    if classes:
      faults.append(f'it {verb} {sorted(classes)[:10]}')
  if faults:
    raise ValueError(
      f"the classes of '{where}' differ from the {len(expected)} of the training "
      f'data, {list(expected[:5])}: {" and ".join(faults)}; give both splits the '
      'same classes'
    )
  if repeated := repeated_names(names):
    raise ValueError(
      f"'{where}' lists its classes in another order than the training data, and "
      f"several are named '{repeated[0]}': list them in the same order, or rename them"
    )
  places = {name: i for i, name in enumerate(expected)}
  return np.array([places[name] for name in names], np.int64)


def repeated_names(names: Iterable[str]) -> list[str]:
  """Returns the names that several classes have."""
  return [name for name, count in collections.Counter(names).items() if count > 1]
