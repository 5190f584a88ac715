"""Parquet files with encoded images as a data set, as on the Hugging Face Hub.

A split is one or more files, `data/train-00000-of-00002.parquet` etc.; _PLACES has the
other patterns. Each row is an example:

  image  a column {bytes, path}: `image` or the first such column; or `image` is bytes.
         Where the bytes are null, the path of a file, absolute, or relative to the
         folder of the Parquet file or of the data set
  label  number or name of a class, or a list of them; null and -1 are none. `label`, or
         else the first class label in the metadata of `datasets`
  ...    all other columns of numbers, booleans, strings, or lists of these

Class names are those in the metadata of `datasets` (key 'huggingface' of the schema),
or else the labels of the training split, sorted. Rows are numbered file by file, so
'train[:10%]' selects the same rows as in `datasets`.

At the start only the footers of the files and the labels are read. Parquet is made for
reading whole row groups, which have 100 MB each in files that `datasets` writes. So a
row group is read once, when its first row is needed, and kept: in memory if the data
are small, else memory-mapped in the cache of this package, which needs as much disk
space as the data. Without that space, the last row groups stay in memory.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import itertools
import json
import os
import re
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import logging
import numpy as np

from vit_jax import console
from vit_jax.data import records, slices
from vit_jax.data.images import image_files, images
from vit_jax.data.lazy import tf
from vit_jax.data.tfds import shards
from vit_jax.distributed import files, processes

if TYPE_CHECKING:
  from etils import epath
  import ml_collections
  import pyarrow as pa

_PLACES = (
  'data/{}-*.parquet',
  'data/{}.parquet',
  '{}-*.parquet',
  '{}.parquet',
  '{}/*.parquet',
)
_NUMBER = re.compile(r'-(\d+)-of-(\d+)(?:-\w+)?\.parquet$')
_MEMORY = 2**28  # Most bytes of row groups in memory.
# Classes without names have numbers below this; a greater one is taken for an id.
_MOST_CLASSES = 10**6


class Shard(NamedTuple):
  """Rows of a file, with the attributes of TFDS's FileInstruction."""

  filename: str
  skip: int
  take: int


class _Column(NamedTuple):
  """A column that holds a feature."""

  name: str
  kind: str  # 'bytes', or a type of TensorFlow: 'int64', 'float32', 'bool', 'string'.
  listed: bool = False  # Whether a row has a list of such values.
  path: str | None = None  # Column of the paths of images whose bytes are null.


class _Reader(NamedTuple):
  """The requested features, and names of classes, see shards.ShardSource."""

  columns: Mapping[str, _Column]
  names: Mapping[str, tuple[str, ...]]
  numbers: Mapping[int | str, int]  # From labels in the files to classes.

  @property
  def features(self) -> tuple[str, ...]:
    return tuple(self.columns)

  @property
  def column_names(self) -> list[str]:
    """Names of the columns of the features, then those of their paths."""
    names = [column.name for column in self.columns.values()]
    names += [column.path for column in self.columns.values() if column.path]
    return names


def exists(root: str, split: str) -> bool:
  """Returns whether a folder has Parquet files for a split."""
  return any(_find(root, base) for base in slices.bases(split))


def _find(root: str, base: str) -> list[str]:
  """Returns the files of a split at the first of _PLACES that has any."""
  if base == '.':  # Class folders, perhaps next to tables.
    return []
  for place in _PLACES:
    paths = tf.io.gfile.glob(os.path.join(root, place.format(base)))
    if paths:
      return sorted(paths)
  return []


def _complete(root: str, base: str) -> list[str]:
  """Returns the files of a split; FileNotFoundError if any is missing."""
  paths = _find(root, base)
  if not paths:
    raise FileNotFoundError(
      f"there is no '{root}/data/{base}-*.parquet', though another part of the split "
      'has such files (config.pp.train, config.pp.test)'
    )
  numbers = []  # Pairs (i, count) of names that end with '-i-of-count.parquet'.
  for path in paths:
    if match := _NUMBER.search(path):
      numbers.append((int(match[1]), int(match[2])))
  if len(numbers) == len(paths):
    _, count = numbers[-1]
    if numbers != [(i, count) for i in range(count)]:
      raise FileNotFoundError(
        f"'{paths[-1]}' is one of {count:,} files, numbered from 0, of which "
        f'{len(paths):,} are present: download the data set again'
      )
  return paths


def open_split(
  config: 'ml_collections.ConfigDict',
  root: str,
  split: str,
  features: Sequence[str],
  class_names: Sequence[str] | None = None,
) -> 'ParquetSource':
  """Opens a split of a folder, see sources.open_split."""
  footers, selected = _read_footers(root, split)
  columns, names = _same_columns(footers)
  paths = list(footers)
  if 'label' in features and 'label' not in columns:
    _check_label_type(paths[0], footers[paths[0]])
  requested = records.resolve(features, columns, f"'{paths[0]}'")
  columns = {name: columns[name] for name in requested}
  names = {name: names[name] for name in requested if name in names}
  numbers: dict[int | str, int] = {}
  hashes: dict[str, str] = {}
  if 'label' in columns:
    labels, hashes = _labels(paths, columns['label'])
    names['label'], numbers = _class_numbers(
      labels, columns['label'], names.get('label'), class_names, f'{root}/{split}'
    )
  stamps = shards.each(image_files.size_and_time, paths, 'Looking at files')
  contents = []
  for path, (size, _) in zip(paths, stamps):
    contents.append([os.path.basename(path), size, hashes.get(path)])
  origin = {'split': split, 'files': files.digest([json.dumps(contents).encode()])}
  processes.agree(f"the files of '{root}'", origin)
  reader = _Reader(columns, names, numbers)
  return ParquetSource(
    root,
    selected,
    footers,
    dict(zip(paths, stamps)),
    reader,
    origin,
    config.max_image_pixels,
  )


def _read_footers(root: str, split: str) -> tuple[dict[str, Any], list[Shard]]:
  """Returns the footers of a split's files by path, and the selected rows."""

  def read(path: str) -> Any:
    return _open(path).metadata

  footers: dict[str, Any] = {}
  selected = []
  for base, instruction in slices.parts(split):
    paths = _complete(root, base)
    new_paths = [path for path in paths if path not in footers]
    footers.update(zip(new_paths, shards.each(read, new_paths, 'Reading footers')))
    counts = [footers[path].num_rows for path in paths]
    selected += _select_rows(paths, counts, base, instruction)
  return footers, selected


def _select_rows(
  paths: Sequence[str], counts: Sequence[int], base: str, instruction: str
) -> list[Shard]:
  """Returns the rows of a slice of files with these `counts` of rows."""
  rows = slices.take(range(sum(counts)), base, instruction)
  selected = []
  first = 0  # Number of the file's first row.
  for path, count in zip(paths, counts):
    skip = max(rows.start - first, 0)
    stop = min(rows.stop - first, count)
    if skip < stop:
      selected.append(Shard(path, skip, stop - skip))
    first += count
  return selected


@contextlib.contextmanager
def _checked(name: str) -> Iterator[None]:
  """Converts pyarrow's errors for damaged files, which do not name the file."""
  import pyarrow as pa

  try:
    yield
  except (pa.ArrowException, ValueError, OSError) as e:
    if getattr(e, 'errno', None) is not None:  # The storage failed, not the content.
      raise
    raise ValueError(
      f'{name} is damaged: {image_files.first_line(e)}: download it again'
    ) from e


def _open(path: str, footer: Any = None) -> Any:
  """Opens a file; `footer` is its footer if it has been read."""
  parquet = console.require('pyarrow.parquet', 'tables', 'a data set in Parquet')
  files.check_input(path)
  with _checked(f"'{path}'"):
    return parquet.ParquetFile(path, metadata=footer, page_checksum_verification=True)


def _same_columns(
  footers: Mapping[str, Any],
) -> tuple[dict[str, _Column], dict[str, tuple[str, ...]]]:
  """Returns `_described` of files; ValueError if their columns or classes differ."""
  schemas = {}
  for path, footer in footers.items():
    schemas[path] = footer.schema.to_arrow_schema()
  first, *other_paths = schemas
  schema = schemas[first]
  names = collections.Counter(schema.names)
  if repeated := [name for name, count in names.items() if count > 1]:
    raise ValueError(
      f"'{first}' has several columns '{repeated[0]}': rename or remove all but one"
    )
  classes = _class_names(first, schema)
  for path in other_paths:
    if not schema.equals(schemas[path]):
      raise ValueError(
        f"'{path}' and '{first}' differ in their columns, "
        f'{_list_columns(schemas[path])} and {_list_columns(schema)}: use files of one '
        'data set (config.dataset)'
      )
    for name, class_names in _class_names(path, schemas[path]).items():
      if class_names != classes.get(name, class_names):
        raise ValueError(
          f"'{path}' and '{first}' differ in the class names of '{name}', "
          f'{list(class_names[:5])} and {list(classes[name][:5])}: use files of one '
          'data set (config.dataset)'
        )
  return _described(schema, classes)


def _list_columns(schema: 'pa.Schema') -> str:
  return ', '.join(f'{field.name}: {field.type}' for field in schema)


def _check_label_type(path: str, footer: Any) -> None:
  """Raises ValueError if a file has a column `label` of an unusable type."""
  schema = footer.schema.to_arrow_schema()
  if 'label' in schema.names:
    raise ValueError(
      f"'{path}' has labels of the type {schema.field('label').type} in 'label': write "
      'the numbers of the classes as integers, or their names as strings'
    )


def _class_names(path: str, schema: 'pa.Schema') -> dict[str, tuple[str, ...]]:
  """Returns the class names in the metadata of `datasets`, by column."""
  try:
    metadata = json.loads((schema.metadata or {})[b'huggingface'])
    features = metadata['info']['features']
  except (KeyError, TypeError, ValueError, RecursionError):
    return {}  # `datasets` has not written the file.
  if not isinstance(features, dict):
    return {}
  classes = {}
  for column, feature in features.items():
    if isinstance(feature, list):  # A list of features, in older versions.
      feature = feature[0] if feature else None
    if isinstance(feature, dict):
      feature = feature.get('feature', feature)
    if not isinstance(feature, dict) or feature.get('_type') != 'ClassLabel':
      continue
    names = feature.get('names') or []
    is_text = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_text:
      raise ValueError(
        f"'{path}' has the class names {str(names)[:80]} of '{column}' in the metadata "
        'of `datasets`, which must be a list of strings: write the file again'
      )
    if names:
      classes[column] = tuple(names)
  return classes


def _described(
  schema: 'pa.Schema', classes: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, _Column], dict[str, tuple[str, ...]]]:
  """Returns the columns that can be read, and names of classes, by feature."""
  columns, image_columns = {}, []
  for field in schema:
    column = _column(field.name, field.type)
    if column.kind == 'bytes':
      image_columns.append(column)
    elif column.kind:
      columns[field.name] = column
  columns.pop('image', None)  # Another kind of values, such as paths.
  image = _image_column(image_columns)
  if image is not None:
    columns['image'] = image
  labels = [name for name in ('label', *classes) if name in columns]
  if labels and columns[labels[0]].kind in ('int64', 'string'):
    columns['label'] = columns[labels[0]]
  else:
    columns.pop('label', None)
  names = {}
  for feature, column in columns.items():
    if column.name in classes:
      names[feature] = classes[column.name]
  return columns, names


def _image_column(columns: Sequence[_Column]) -> _Column | None:
  """Returns the column of images among those of bytes: `image`, or the first struct."""
  for column in columns:
    if column.name in ('image', 'image.bytes'):
      return column
  if columns and columns[0].name.endswith('.bytes'):
    return columns[0]
  return None


def _column(name: str, arrow_type: Any) -> _Column:
  """Returns how a column of an Arrow type is read; its kind is '' if it is not."""
  from pyarrow import types

  if types.is_struct(arrow_type):
    fields = {field.name: field.type for field in arrow_type}
    has_paths = 'path' in fields and _column('path', fields['path']).kind == 'string'
    is_image = 'bytes' in fields and (
      _column('bytes', fields['bytes']).kind == 'bytes'
      or (has_paths and types.is_null(fields['bytes']))
    )
    return _Column(
      f'{name}.bytes',
      kind='bytes' if is_image else '',
      path=f'{name}.path' if has_paths else None,
    )
  if (
    types.is_list(arrow_type)
    or types.is_large_list(arrow_type)
    or types.is_fixed_size_list(arrow_type)
  ):
    inner = _column(name, arrow_type.value_type)
    is_readable = inner.kind != 'bytes' and not inner.listed
    return _Column(name, inner.kind if is_readable else '', True)
  if types.is_dictionary(arrow_type):
    return _column(name, arrow_type.value_type)
  kinds = {
    'int64': [types.is_integer],
    'float32': [types.is_floating],
    'bool': [types.is_boolean],
    'string': [types.is_string, types.is_large_string],
    'bytes': [types.is_binary, types.is_large_binary],
  }
  for kind, predicates in kinds.items():
    if any(is_kind(arrow_type) for is_kind in predicates):
      return _Column(name, kind)
  return _Column(name, '')


def _labels(
  paths: Sequence[str], column: _Column
) -> tuple[dict[str, set], dict[str, str]]:
  """Returns the labels in each file, and a hash of the labels of its rows, by path."""

  def read(path: str) -> tuple[set, str]:
    return _file_labels(path, column)

  labels, hashes = {}, {}
  for path, result in zip(paths, shards.each(read, paths, 'Reading labels')):
    labels[path], hashes[path] = result
  return labels, hashes


def _file_labels(path: str, column: _Column) -> tuple[set, str]:
  """Returns the labels in a file, and a hash of the labels of its rows."""
  import pyarrow.compute as pc

  with _checked(f"'{path}'"):
    values = _open(path).read(columns=[column.name]).column(0).combine_chunks()
  rows = []
  if column.listed:
    rows.append(pc.fill_null(pc.list_value_length(values), -1))
    values = pc.list_flatten(values)
  if not hasattr(values, 'indices'):
    values = values.dictionary_encode()
  rows.append(pc.fill_null(values.indices, -1))
  labels = values.dictionary.to_pylist()
  contents = [row.to_numpy(zero_copy_only=False).tobytes() for row in rows]
  contents.append(json.dumps(labels).encode())
  return {*labels} - {None, -1}, files.digest(contents)


def _class_numbers(
  labels: Mapping[str, set],
  column: _Column,
  stored_names: Sequence[str] | None,
  class_names: Sequence[str] | None,
  where: str,
) -> tuple[tuple[str, ...], dict[int | str, int]]:
  """Returns the names of the classes, and the class of each label in the files.

  `stored_names` are in the metadata of the files; `class_names` are the training data's.
  """
  all_labels = set().union(*labels.values())
  if not all_labels:
    raise ValueError(f"no row of '{where}' has a label in '{column.name}'")
  names = tuple(class_names or stored_names or _names(all_labels, column, where))
  places = records.class_numbers(where, stored_names or names, names)
  numbers: dict[int | str, int] = dict(enumerate(places.tolist()))
  if column.kind == 'string':
    if repeated := records.repeated_names(names):
      raise ValueError(
        f"several classes of '{where}' are named '{repeated[0]}', and the labels in "
        f"'{column.name}' are names: write the numbers of the classes, or rename them"
      )
    numbers = {name: i for i, name in enumerate(names)}
  for path, file_labels in labels.items():
    if unknown := [label for label in file_labels if label not in numbers]:
      raise ValueError(
        f"'{path}' has the label {unknown[0]!r} in '{column.name}', not one of the "
        f'{len(names)} classes {list(names[:5])} ...: leave out these rows, or add the '
        'class to the training split'
      )
  return names, numbers


def _names(labels: set, column: _Column, where: str) -> list[str]:
  """Returns the names of the classes with these labels."""
  if column.kind == 'string':
    return sorted(labels)
  lowest, highest = min(labels), max(labels)
  if lowest < 0 or highest >= _MOST_CLASSES:
    raise ValueError(
      f"'{where}' has the label {lowest if lowest < 0 else highest} in "
      f"'{column.name}': class numbers are 0 to {_MOST_CLASSES - 1:,}, and -1 means no "
      'label; renumber the classes, or use their names'
    )
  return [str(i) for i in range(highest + 1)]


def _mapped(path: 'epath.Path') -> Any:
  """Returns the table in an Arrow file, memory-mapped; None without a whole one."""
  import pyarrow as pa

  try:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
  except (OSError, ValueError):
    return None


class ParquetSource(shards.ShardSource):
  """Rows of Parquet files, see the module; its images may have `max_pixels`.

  All processes must open the same split.
  """

  def __init__(
    self,
    root: str,
    selected: Sequence[Shard],
    footers: Mapping[str, Any],
    stamps: Mapping[str, tuple[int, int]],
    reader: _Reader,
    origin: dict[str, str],
    max_pixels: int,
  ) -> None:
    self._root = root
    self._footers, self._stamps, self._max_pixels = footers, stamps, max_pixels
    self._group_ends = {}
    num_bytes = num_rows = 0
    for path, footer in footers.items():
      groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
      self._group_ends[path] = np.cumsum([group.num_rows for group in groups])
      num_bytes += sum(group.total_byte_size for group in groups)
      num_rows += footer.num_rows
    super().__init__(selected, num_bytes / num_rows, reader)
    self.origin = origin
    # Where row groups are cached; None: in memory.
    self._cache = console.cache_folder() / 'parquet' if num_bytes > _MEMORY else None
    # Tables by (path, number of the row group).
    self._groups: collections.OrderedDict[tuple[str, int], Any] = (
      collections.OrderedDict()
    )
    self._groups_lock = threading.Lock()

  def open_file(self, path: str) -> Any:
    return _open(path, self._footers[path])

  def read_file(self, file: Any, shard: int, numbers: list[int]) -> list[tuple]:
    path = self.paths[shard]
    ends = self._group_ends[path]
    rows = []
    for group, number in zip(np.searchsorted(ends, numbers, side='right'), numbers):
      columns = self._group(file, path, int(group))
      row = number - (ends[group - 1] if group else 0)
      rows.append(tuple(column[row].as_py() for column in columns))
    return rows

  def _group(self, file: Any, path: str, group: int) -> list[Any]:
    """Returns the columns of a row group, which one thread at a time reads."""
    key = path, group
    table = self._groups.get(key)
    if table is not None:
      return table.columns
    with self._groups_lock:
      table = self._groups.get(key)
      if table is None:  # No other thread has read it in the meantime.
        table = self._read_group(file, path, group)
        self._groups[key] = table
        if self._cache is None:
          self._limit_memory()
    return table.columns

  def _read_group(self, file: Any, path: str, group: int) -> Any:
    """Returns the table of a row group, from the cache where possible."""
    names = self._reader.column_names
    call = os.path.abspath(path), self._stamps[path], group, names
    name = f'{files.digest([json.dumps(call).encode()])}.arrow'
    if self._cache is not None:
      table = _mapped(self._cache / name)
      if table is not None:
        return table
    with _checked(f"row group {group} of '{path}'"):
      table = file.read_row_group(group, names)
    # Two features, such as `label`, may be read from the same column.
    return self._cached(table.flatten().select(names), name)

  def _limit_memory(self) -> None:
    """Drops the row groups that were read first, but never the last one."""
    num_bytes = sum(table.nbytes for table in self._groups.values())
    while num_bytes > _MEMORY and len(self._groups) > 1:
      _, table = self._groups.popitem(last=False)
      num_bytes -= table.nbytes

  def _cached(self, table: Any, name: str) -> Any:
    """Returns the table of a row group, memory-mapped where possible."""
    if self._cache is None:
      return table.combine_chunks()
    import pyarrow as pa

    try:
      self._cache.mkdir(parents=True, exist_ok=True)
      with (
        files.replacing(self._cache / name) as file,
        pa.ipc.new_file(file, table.schema) as writer,
      ):
        writer.write_table(table.combine_chunks())
      mapped = _mapped(self._cache / name)
      return table.combine_chunks() if mapped is None else mapped
    except OSError as e:
      logging.warning(
        "'%s' cannot keep row groups, so reading in random order is slow: %s",
        self._cache,
        e,
      )
      self._cache = None
      self._groups.clear()
      return table.combine_chunks()

  def lookup(self, indices: 'tf.Tensor') -> dict[str, 'tf.Tensor']:
    types = []
    for name, column in self._reader.columns.items():
      if name == 'label':
        types.append('int64')
        continue
      types.append('string' if column.kind == 'bytes' else column.kind)
      if column.listed:
        types.append('int64')
    arrays = iter(tf.numpy_function(self._features, [indices], types, stateful=False))
    features = {}
    for name, column in self._reader.columns.items():
      shape = [None, None] if name == 'label' else [None]
      features[name] = tf.ensure_shape(next(arrays), shape)
      if column.listed and name != 'label':
        lengths = tf.ensure_shape(next(arrays), [None])
        features[name] = tf.RaggedTensor.from_row_lengths(features[name], lengths)
    return features

  def _features(self, indices: np.ndarray) -> list[np.ndarray]:
    """Returns the arrays that `lookup` asks for, of rows [b]."""
    rows = self.serialized(indices)
    arrays = []
    for i, (name, column) in enumerate(self._reader.columns.items()):
      values = [row[i] for row in rows]
      if name == 'label':
        arrays.append(self._label_array(values))
        continue
      if column.path:  # The only one, and the last column of a row.
        for k, (row, index) in enumerate(zip(rows, indices)):
          values[k] = self._read_image(values[k], row[-1], index)
      self._check_present(column, values, indices)
      lengths = None
      if column.listed:
        lengths = np.array([len(value) for value in values], np.int64)
        values = list(itertools.chain(*values))
      arrays.append(_as_array(values, column.kind))
      if lengths is not None:
        arrays.append(lengths)
    return arrays

  def _label_array(self, values: Sequence[Any]) -> np.ndarray:
    """Returns class numbers of rows, int64 [b, L], padded with -1."""
    labels = [self._labels(value) for value in values]
    width = max([1, *map(len, labels)])
    array = np.full([len(labels), width], -1, np.int64)
    for row, numbers in zip(array, labels):
      row[: len(numbers)] = numbers
    return array

  def _check_present(
    self, column: _Column, values: Sequence[Any], indices: np.ndarray
  ) -> None:
    """Raises ValueError if a row has no value, or null in a list."""
    for value, index in zip(values, indices):
      if value is None or (column.listed and None in value):
        raise ValueError(
          f"{self.name(index)}: there is no '{column.name}', which all rows need"
        )

  def _read_image(
    self, content: bytes | None, path: str | None, index: int
  ) -> bytes | None:
    """Returns the content of an image, from its path where it is null."""
    if content is not None or not path:
      return content
    [shard], _ = self._places(np.array([index]))
    paths = [path]
    if '://' not in path:
      folders = os.path.dirname(self.paths[shard]), self._root
      paths = [os.path.join(folder, path) for folder in folders]
    existing = next(filter(tf.io.gfile.exists, paths), paths[0])
    try:
      return image_files.read_file(existing)
    except (ValueError, OSError) as e:
      raise type(e)(f'{self.name(index)}: {e}') from e

  def _labels(self, value: Any) -> list[int]:
    """Returns the numbers of the classes of a row."""
    values = value if isinstance(value, list) else [value]
    return [self._reader.numbers[x] for x in values if x is not None and x != -1]

  def read(self, record: dict[str, 'tf.Tensor']) -> dict[str, 'tf.Tensor']:
    if 'image' not in record:
      return record
    return {**record, 'image': images.bounded(record['image'], self._max_pixels)}

  def name(self, index: int) -> str:
    [shard], [place] = self._places(np.array([index]))
    return f'row {place} of {os.path.basename(self.paths[shard])}'


def _as_array(values: Sequence[Any], kind: str) -> np.ndarray:
  """Returns values of a column's kind as an array [n]; text and bytes as objects."""
  if kind not in ('bytes', 'string'):
    return np.array(values, kind)
  texts = np.empty(len(values), object)
  for i, value in enumerate(values):
    texts[i] = value.encode() if isinstance(value, str) else value
  return texts
