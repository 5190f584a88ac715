"""What all sources of examples share: records of named features, by number.

A source gives example number `index` at any time, in any order (random access):

  lookup(indices [b]) -> features by name, of b examples
  read(record) -> the features of one example, paths replaced by contents

both as TensorFlow graphs. 'image' is a string, the contents of an image file (or
its path, before `read`); 'label' is int64 [b, L], class numbers padded with -1 to
L per example, where -1 alone means that there is no label; what varies from
example to example otherwise is a RaggedTensor. Only a stream cannot be looked up:
see vit_jax/datasets/streams.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import json
import os
from typing import Any
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from vit_jax.data import images
from vit_jax.files import index as index_lib

# Where reading takes long: how often at the same time, and how many records at a
# time, in bytes and in number.
CALLS = min(16, 2 * (os.cpu_count() or 1))
_CHUNK_BYTES = 8 * 2**20
_CHUNK = 1024


class Source:
  """What all sources share.

  Attributes:
    num_examples: number of examples.
    features: names of what `lookup` gives.
    names: names of the classes, for each feature that is a class label.
    random_access: whether `lookup` works.
    chunk: how many examples to look up at a time, in CALLS calls at the same time;
      None for as many as a batch has, in one call.
    origin: which data these are, as JSON can hold it: {'dataset': 'cifar10/3.0.2',
      'split': 'train'} for one; part of the fingerprint.
  """

  random_access = True
  chunk: int | None = None
  origin: Mapping[str, Any] = {}

  def __init__(
    self,
    num_examples: int,
    features: Iterable[str],
    names: Mapping[str, Sequence[str]],
  ):
    self.num_examples = num_examples
    self.features = tuple(features)
    self.names = {key: tuple(value) for key, value in names.items()}

  @property
  def class_names(self) -> tuple[str, ...]:
    """Names of the classes of 'label'; () where it was not asked for."""
    return self.names.get('label', ())

  @property
  def evaluated(self) -> 'Source':
    """What evaluation reads: of a mixture, its first data set."""
    return self

  def fingerprint(self) -> dict[str, Any]:
    """Says in short which data these are: other data have another one.

    It is cheap, the same in all processes, and does not depend on where a folder
    lies.

    Returns:
      What JSON can hold: `num_examples`, `num_classes`, `class_names` (a hash of
      them), and `origin`. Of a folder also `images` and `labels`, hashes of the
      images' names and of their labels; of a mixture `parts`, a list of the
      fingerprints of its parts.
    """
    names = json.dumps(self.names, sort_keys=True).encode()
    return {
      **self.origin,
      'num_examples': self.num_examples,
      'num_classes': len(self.class_names),
      'class_names': index_lib.digest([names]),
    }

  def store(self, workdir):
    """Writes to the workdir of a run what makes its next start quicker."""

  def read(self, record):
    """Returns the record of one example with contents in place of paths."""
    return record

  def name(self, index: int) -> str:
    """Names an example for an error message."""
    return f'example {index}'

  def locate(self, index: int) -> tuple['Source', int]:
    """Returns the source that an example comes from, and its number there."""
    return self, index


class MemorySource(Source):
  """Examples held in memory, images encoded.

  Args:
    columns: features by name: tensors or RaggedTensors [n, ...].
    names: names of the classes, for each feature that is a class label.
  """

  def __init__(self, columns: Mapping, names: Mapping[str, Sequence[str]]):
    columns = {name: _tensor(column) for name, column in columns.items()}
    size = next(iter(columns.values())).shape[0] if columns else 0
    super().__init__(size, columns, names)
    self._columns = columns

  def lookup(self, indices) -> dict:
    """Returns the examples of these numbers, as said in the module's text."""
    return {k: tf.gather(v, indices) for k, v in self._columns.items()}


def _tensor(column):
  if isinstance(column, tf.RaggedTensor):
    return column
  return tf.convert_to_tensor(column)


class FolderSource(MemorySource):
  """Images in files, listed by a folder or a manifest.

  The order is that of a hash of their names: so a slice of the split, like
  'train[:90%]', is a fair sample of the whole.

  Args:
    columns: see MemorySource; 'image', if it is among them, is an
      paths.Paths.
    names: see MemorySource.
    max_pixels: a file of more is an error, before it is decoded.
  """

  def __init__(self, columns: Mapping, names: Mapping, max_pixels: int):
    self._paths = columns.get('image')
    self._max_pixels = max_pixels
    super().__init__({k: v for k, v in columns.items() if k != 'image'}, names)
    self.features = tuple(columns)
    if self._paths is not None:
      self.num_examples = len(self._paths)

  def lookup(self, indices) -> dict:
    """Returns the examples of these numbers, as said in the module's text."""
    found = super().lookup(indices)
    if 'label' in found:
      found['label'] = tf.cast(found['label'], tf.int64)
    if self._paths is not None:
      paths = tf.numpy_function(
        self._paths.encoded, [indices], tf.string, stateful=False
      )
      found['image'] = tf.ensure_shape(paths, indices.shape)
    return {name: found[name] for name in self.features}

  def fingerprint(self) -> dict[str, Any]:
    """Says in short which images these are, see Source.fingerprint."""
    found = super().fingerprint()
    if self._paths is not None:
      found['images'] = self._paths.digest()
    if 'label' in self._columns:
      labels = self._columns['label'].numpy()
      found['labels'] = index_lib.digest([str(labels.shape).encode(), labels])
    return found

  def read(self, record):
    """Returns the record of one example with the contents of its file."""
    if 'image' not in record:
      return record
    encoded = tf.io.read_file(record['image'])
    return {**record, 'image': images.bounded(encoded, self._max_pixels)}

  def name(self, index: int) -> str:
    """Names an example for an error message."""
    return super().name(index) if self._paths is None else self._paths[index]

  def store(self, workdir):
    """Keeps the list of the files in a workdir, see Source.store."""
    if self._paths is not None:
      self._paths.store(workdir)


def chunk(num_examples: int, record_bytes: float) -> int:
  """Returns how many records of a data set to read at a time.

  Args:
    num_examples: its size: no more than that.
    record_bytes: mean size of a record.
  """
  fitting = int(_CHUNK_BYTES / max(1.0, record_bytes))
  return max(1, min(_CHUNK, fitting, num_examples))


def element_spec(source) -> dict[str, tf.TypeSpec]:
  """Returns the types of the record of one example, before `read`."""
  if not source.random_access:
    spec = dict(source.once(1, 0).element_spec)
    spec.pop('index')
    return spec
  data = tf.data.Dataset.range(1).batch(1).map(source.lookup).unbatch()
  return data.element_spec


def resolve(
  wanted: Iterable[str], available: Iterable[str], where: str
) -> tuple[str, ...]:
  """Says which features of the data are wanted.

  Args:
    wanted: names; 'objects' stands for all below it, 'objects/bbox' and others,
      and what ends with '?' may be lacking. 'index' is always there.
    available: names of what the data have.
    where: names the data in an error message.

  Returns:
    Names among `available`, each once.

  Raises:
    ValueError: if the data lack a feature that is not optional.
  """
  available = tuple(available)
  chosen = []
  for name in wanted:
    key = name.removesuffix('?')
    if key in available or key in ('image', 'label'):  # Not 'image/id' for one.
      found = [key] if key in available else []
    else:
      found = [a for a in available if a.startswith(f'{key}/')]
    if not found and not name.endswith('?') and key != 'index':
      kind = {
        'image': ', an image',
        'label': ', a class label (or several) of the image',
      }.get(key, '')
      raise ValueError(
        f"{where} has no feature '{key}'{kind}: it has {sorted(available)}; take "
        'other data, or a task that does without (config.dataset, config.task)'
      )
    chosen += [a for a in found if a != 'index']
  return tuple(dict.fromkeys(chosen))


def with_padded_labels(columns: dict) -> dict:
  """Returns the columns with 'label', where there is one, padded."""
  if 'label' not in columns:
    return columns
  return {**columns, 'label': padded(columns['label'])}


def padded(labels) -> tf.Tensor:
  """Returns labels as int64 [n, L], padded with -1; L is 1 at least.

  Args:
    labels: int64 [n, L], ragged or not.
  """
  if not isinstance(labels, tf.RaggedTensor):
    return labels
  labels = labels.to_tensor(-1)
  # An L of 0 would make tf.data crash.
  missing = tf.cast(tf.shape(labels)[1] == 0, tf.int32)
  return tf.pad(labels, [[0, 0], [0, missing]], constant_values=-1)


class Kind(NamedTuple):
  """Type and shape of values in lists: sizes that vary are None.

  The type is None where there are but empty lists, which may be of anything.
  """

  dtype: str | None
  shape: tuple[int | None, ...]

  def __str__(self):
    return f'{self.dtype or "an empty list"}{list(self.shape)}'


_DTYPES = {bool: 'bool', int: 'int64', float: 'float32', str: 'string'}


def kind_of(value) -> Kind | None:
  """Returns the kind of a value of JSON; None if it is no array of one type."""
  if not isinstance(value, list):
    inner = kind_of([value])
    return inner and Kind(inner.dtype, ())
  if not value:
    return Kind(None, (0,))
  types = set(map(type, value))
  if list in types:
    kinds = set(map(kind_of, value))
  elif int in types and not _fits([x for x in value if type(x) is int]):
    return None
  else:
    kinds = {Kind(_DTYPES[t], ()) if t in _DTYPES else None for t in types}
  inner = functools.reduce(merge_kinds, kinds)
  return inner and Kind(inner.dtype, (len(value), *inner.shape))


def _fits(numbers) -> bool:
  return -(2**63) <= min(numbers) and max(numbers) < 2**63


def merge_kinds(a: Kind | None, b: Kind | None) -> Kind | None:
  """Returns the kind that takes in both; None if there is none."""
  if a is None or b is None:
    return None
  if len(a.shape) > len(b.shape):
    a, b = b, a
  if len(a.shape) < len(b.shape) and a.dtype is not None:
    return None
  dtypes = {a.dtype, b.dtype} - {None}
  if dtypes == {'int64', 'float32'}:
    dtypes = {'float32'}
  if len(dtypes) > 1:
    return None
  sizes = [x if x == y else None for x, y in zip(a.shape, b.shape)]
  shape = (*sizes, *b.shape[len(sizes) :])
  return Kind(next(iter(dtypes), None), shape)


def stack(values: list, kind: Kind):
  """Stacks values of one kind.

  Args:
    values: n values of JSON.
    kind: what takes in the kinds of all of them.

  Returns:
    A tensor [n, ...], or a RaggedTensor whose sizes vary up to the last that
    does.
  """
  # What is empty everywhere counts as varying: tf.data cannot take apart a
  # tensor without elements.
  varying = [i for i, size in enumerate(kind.shape) if not size]
  lengths = []
  for _ in range(varying[-1] + 1 if varying else 0):
    lengths.append(np.array([len(value) for value in values], np.int64))
    values = [x for value in values for x in value]
  dtype = kind.dtype or 'float32'
  flat = np.array(values, object if dtype == 'string' else dtype)
  flat = tf.constant(flat.reshape(-1, *kind.shape[len(lengths) :]), dtype)
  if not lengths:
    return flat
  return tf.RaggedTensor.from_nested_row_lengths(flat, lengths)
