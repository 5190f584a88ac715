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
from collections.abc import Mapping, Sequence
import contextlib
import itertools
import json
import os
import re
import threading
from typing import NamedTuple

from absl import logging
import numpy as np

from vit_jax import console
from vit_jax.data import records, slices
from vit_jax.data.images import image_files, images
from vit_jax.data.lazy import tf
from vit_jax.data.tfds import shards
from vit_jax.distributed import files, processes

_PLACES = (
  'data/{}-*.parquet', 'data/{}.parquet', '{}-*.parquet', '{}.parquet', '{}/*.parquet',
)  # fmt: skip
_NUMBER = re.compile(r'-(\d+)-of-(\d+)(?:-\w+)?\.parquet$')
_MEMORY = 2**28  # Most bytes of row groups in memory.
_MOST_CLASSES = 10**6  # Of numbers without names; a greater one is taken for an id.


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
  """The wanted features, and names of classes, see shards.ShardSource."""

  columns: Mapping[str, _Column]
  names: Mapping[str, tuple[str, ...]]
  numbers: Mapping[int | str, int]  # From labels in the files to classes.

  @property
  def features(self) -> tuple[str, ...]:
    return tuple(self.columns)

  @property
  def column_names(self) -> list[str]:
    """Names of the columns of the features, then those of their paths."""
    columns = self.columns.values()
    return [x.name for x in columns] + [x.path for x in columns if x.path]


def exists(root: str, split: str) -> bool:
  """Returns whether a folder has Parquet files for a split."""
  return any(_find(root, base) for base in slices.bases(split))


def _find(root, base) -> list[str]:
  if base == '.':  # Class folders, perhaps next to tables.
    return []
  places = (os.path.join(root, place.format(base)) for place in _PLACES)
  return next((sorted(x) for x in map(tf.io.gfile.glob, places) if x), [])


def _complete(root, base) -> list[str]:
  """Returns the files of a split; FileNotFoundError if any is missing."""
  paths = _find(root, base)
  if not paths:
    raise FileNotFoundError(
      f"there is no '{root}/data/{base}-*.parquet', though another part of the split "
      'has such files (config.pp.train, config.pp.test)'
    )
  numbers = [_NUMBER.search(path) for path in paths]
  if all(numbers):
    count = int(numbers[-1][2])
    if [(int(x[1]), int(x[2])) for x in numbers] != [(i, count) for i in range(count)]:
      raise FileNotFoundError(
        f"'{paths[-1]}' is one of {count:,} files, numbered from 0, of which "
        f'{len(paths):,} are present: download the data set again'
      )
  return paths


def open_split(
  config,
  root: str,
  split: str,
  features: Sequence[str],
  class_names: Sequence[str] | None = None,
) -> 'ParquetSource':
  """Opens a split of a folder, see sources.open_split."""
  footers, taken = {}, []
  for base, instruction in slices.parts(split):
    paths = _complete(root, base)
    new = [path for path in paths if path not in footers]
    read = lambda path: _open(path).metadata
    footers.update(zip(new, shards.each(read, new, 'Reading footers')))
    counts = [footers[path].num_rows for path in paths]
    rows = slices.take(range(sum(counts)), base, instruction)
    for path, count, last in zip(paths, counts, np.cumsum(counts).tolist()):
      first = last - count
      skip, stop = max(rows.start - first, 0), min(rows.stop - first, count)
      if skip < stop:
        taken.append(Shard(path, skip, stop - skip))
  paths = list(footers)
  columns, names = _same_columns(footers)
  if 'label' in features and 'label' not in columns:
    _check_label_type(paths[0], footers[paths[0]])
  wanted = records.resolve(features, columns, f"'{paths[0]}'")
  columns = {name: columns[name] for name in wanted}
  names = {name: names[name] for name in wanted if name in names}
  numbers, hashes = {}, {}
  if 'label' in columns:
    labels, hashes = _labels(paths, columns['label'])
    stored_names, where = names.get('label'), f'{root}/{split}'
    names['label'], numbers = _class_numbers(
      labels, columns['label'], stored_names, class_names, where
    )
  stamps = shards.each(image_files.size_and_time, paths, 'Looking at files')
  listed = [
    [os.path.basename(path), size, hashes.get(path)]
    for path, (size, _) in zip(paths, stamps)
  ]
  origin = {'split': split, 'files': files.digest([json.dumps(listed).encode()])}
  processes.agree(f"the files of '{root}'", origin)
  reader = _Reader(columns, names, numbers)
  stamps = dict(zip(paths, stamps))
  return ParquetSource(
    root, taken, footers, stamps, reader, origin, config.max_image_pixels
  )


@contextlib.contextmanager
def _checked(what: str):
  """Converts pyarrow's errors for damaged files, which do not name the file."""
  import pyarrow as pa

  try:
    yield
  except (pa.ArrowException, ValueError, OSError) as e:
    if getattr(e, 'errno', None) is not None:  # Of the storage, not of the content.
      raise
    raise ValueError(
      f'{what} is damaged: {image_files.first_line(e)}: download it again'
    ) from e


def _open(path: str, footer=None):
  """Opens a file; `footer` is its footer if it has been read."""
  parquet = console.needed('pyarrow.parquet', 'tables', 'a data set in Parquet')
  files.check_input(path)
  with _checked(f"'{path}'"):
    return parquet.ParquetFile(path, metadata=footer, page_checksum_verification=True)


def _same_columns(footers):
  """Returns `_described` of files; ValueError if their columns or classes differ."""
  (first, footer), *others = footers.items()
  schema = footer.schema.to_arrow_schema()
  names = collections.Counter(schema.names)
  if repeated := [name for name, count in names.items() if count > 1]:
    raise ValueError(
      f"'{first}' has several columns '{repeated[0]}': rename or remove all but one"
    )
  classes = _class_names(first, schema)
  for path, other in others:
    other = other.schema.to_arrow_schema()
    if not schema.equals(other):
      texts = (', '.join(f'{x.name}: {x.type}' for x in s) for s in (other, schema))
      raise ValueError(
        f"'{path}' and '{first}' differ in their columns, {' and '.join(texts)}: use "
        'files of one data set (config.dataset)'
      )
    for name, names in _class_names(path, other).items():
      if names != classes.get(name, names):
        raise ValueError(
          f"'{path}' and '{first}' differ in the class names of '{name}', "
          f'{list(names[:5])} and {list(classes[name][:5])}: use files of one data '
          'set (config.dataset)'
        )
  return _described(schema, classes)


def _check_label_type(path: str, footer):
  """Raises ValueError if a file has a column `label` of an unusable type."""
  schema = footer.schema.to_arrow_schema()
  if 'label' in schema.names:
    raise ValueError(
      f"'{path}' has labels of the type {schema.field('label').type} in 'label': write "
      'the numbers of the classes as integers, or their names as strings'
    )


def _class_names(path: str, schema) -> dict[str, tuple[str, ...]]:
  """Returns the class names in the metadata of `datasets`, by column."""
  try:
    facts = json.loads((schema.metadata or {})[b'huggingface'])['info']['features']
  except (KeyError, TypeError, ValueError, RecursionError):
    return {}  # `datasets` has not written the file.
  classes = {}
  for column, fact in facts.items() if isinstance(facts, dict) else ():
    if isinstance(fact, list):  # A list of features, in older versions.
      fact = fact[0] if fact else None
    if isinstance(fact, dict):
      fact = fact.get('feature', fact)
    if not isinstance(fact, dict) or fact.get('_type') != 'ClassLabel':
      continue
    names = fact.get('names') or []
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
  schema, classes
) -> tuple[dict[str, _Column], dict[str, tuple[str, ...]]]:
  """Returns the columns that can be read, and names of classes, by feature."""
  found, pictures = {}, []
  for field in schema:
    column = _column(field.name, field.type)
    if column.kind == 'bytes':
      pictures.append(column)
    elif column.kind:
      found[field.name] = column
  pictures.sort(key=lambda column: column.name not in ('image', 'image.bytes'))
  found.pop('image', None)  # Of another kind, such as paths.
  if pictures and (pictures[0].name.endswith('.bytes') or pictures[0].name == 'image'):
    found['image'] = pictures[0]
  labels = [name for name in ('label', *classes) if name in found]
  if labels and found[labels[0]].kind in ('int64', 'string'):
    found['label'] = found[labels[0]]
  else:
    found.pop('label', None)
  names = {k: classes[x.name] for k, x in found.items() if x.name in classes}
  return found, names


def _column(name: str, of) -> _Column:
  """Returns how a column of an Arrow type is read; its kind is '' if it is not."""
  from pyarrow import types

  if types.is_struct(of):
    fields = {field.name: field.type for field in of}
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
  if types.is_list(of) or types.is_large_list(of) or types.is_fixed_size_list(of):
    inner = _column(name, of.value_type)
    plain = inner.kind != 'bytes' and not inner.listed
    return _Column(name, inner.kind if plain else '', True)
  if types.is_dictionary(of):
    return _column(name, of.value_type)
  kinds = {
    'int64': types.is_integer, 'float32': types.is_floating, 'bool': types.is_boolean,
    'string': lambda x: types.is_string(x) or types.is_large_string(x),
    'bytes': lambda x: types.is_binary(x) or types.is_large_binary(x),
  }  # fmt: skip
  return _Column(name, next((k for k, is_kind in kinds.items() if is_kind(of)), ''))


def _labels(
  paths: Sequence[str], column: _Column
) -> tuple[dict[str, set], dict[str, str]]:
  """Returns the labels in each file, and a hash of the labels of its rows, by path."""
  import pyarrow.compute as pc

  def read(path):
    with _checked(f"'{path}'"):
      values = _open(path).read(columns=[column.name]).column(0).combine_chunks()
    rows = [pc.fill_null(pc.list_value_length(values), -1)] if column.listed else []
    values = pc.list_flatten(values) if column.listed else values
    values = values if hasattr(values, 'indices') else values.dictionary_encode()
    found = values.dictionary.to_pylist()
    rows.append(pc.fill_null(values.indices, -1))
    rows = [row.to_numpy(zero_copy_only=False).tobytes() for row in rows]
    return {*found} - {None, -1}, files.digest([*rows, json.dumps(found).encode()])

  labels, hashes = zip(*shards.each(read, paths, 'Reading labels'))
  return dict(zip(paths, labels)), dict(zip(paths, hashes))


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
  numbers = dict(enumerate(places.tolist()))
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


def _mapped(path):
  """Returns the table in an Arrow file, memory-mapped; None without a whole one."""
  import pyarrow as pa

  try:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
  except (OSError, ValueError):
    return None


class ParquetSource(shards.ShardSource):
  """Rows of Parquet files, see the top; its images may have `max_pixels`.

  All processes must open the same split.
  """

  def __init__(
    self, root: str, taken, footers, stamps, reader: _Reader, origin, max_pixels: int
  ):
    self._root = root
    self._footers, self._stamps, self._max_pixels = footers, stamps, max_pixels
    groups = {
      path: [footer.row_group(i) for i in range(footer.num_row_groups)]
      for path, footer in footers.items()
    }
    self._group_ends = {
      path: np.cumsum([group.num_rows for group in found])
      for path, found in groups.items()
    }
    size = sum(group.total_byte_size for found in groups.values() for group in found)
    count = sum(footer.num_rows for footer in footers.values())
    super().__init__(taken, size / count, reader)
    self.origin = origin
    # Where row groups are kept; None: in memory.
    self._cache = console.cache_folder() / 'parquet' if size > _MEMORY else None
    self._groups = collections.OrderedDict()  # Tables by (path, number).
    self._groups_lock = threading.Lock()

  def open_file(self, path):
    return _open(path, self._footers[path])

  def read_file(self, file, shard, places):
    path, found = self.paths[shard], []
    ends = self._group_ends[path]
    for group, place in zip(np.searchsorted(ends, places, side='right'), places):
      table = self._group(file, path, int(group))
      row = place - (ends[group - 1] if group else 0)
      found.append(tuple(column[row].as_py() for column in table))
    return found

  def _group(self, file, path, group):
    """Returns the columns of a row group, which one thread at a time reads."""
    key = path, group
    if (found := self._groups.get(key)) is not None:
      return found.columns
    with self._groups_lock:
      found = self._groups.get(key)
      if found is not None:  # Another thread has read it in the meantime.
        return found.columns
      names = self._reader.column_names
      call = os.path.abspath(path), self._stamps[path], group, names
      name = f'{files.digest([json.dumps(call).encode()])}.arrow'
      table = self._cache and _mapped(self._cache / name)
      if table is None:
        with _checked(f"row group {group} of '{path}'"):
          table = file.read_row_group(group, names)
        # Two features, such as `label`, may be of one column.
        table = self._kept(table.flatten().select(names), name)
      self._groups[key] = table
      if self._cache is None:
        held = sum(table.nbytes for table in self._groups.values())
        while held > _MEMORY and len(self._groups) > 1:
          held -= self._groups.popitem(last=False)[1].nbytes
      return table.columns

  def _kept(self, table, name):
    """Returns the columns of a row group, memory-mapped where possible."""
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
      found = _mapped(self._cache / name)
      return table.combine_chunks() if found is None else found
    except OSError as e:
      logging.warning(
        "'%s' cannot keep row groups, so reading in random order is slow: %s",
        self._cache, e,
      )  # fmt: skip
      self._cache = None
      self._groups.clear()
      return table.combine_chunks()

  def lookup(self, indices) -> dict:
    types = []
    for name, column in self._reader.columns.items():
      types.append('string' if column.kind == 'bytes' else column.kind)
      if name == 'label':
        types[-1] = 'int64'
      elif column.listed:
        types.append('int64')
    flat = iter(tf.numpy_function(self._features, [indices], types, stateful=False))
    found = {}
    for name, column in self._reader.columns.items():
      shape = [None, None] if name == 'label' else [None]
      found[name] = tf.ensure_shape(next(flat), shape)
      if column.listed and name != 'label':
        lengths = tf.ensure_shape(next(flat), [None])
        found[name] = tf.RaggedTensor.from_row_lengths(found[name], lengths)
    return found

  def _features(self, indices: np.ndarray) -> list[np.ndarray]:
    """Returns the arrays that `lookup` asks for, of rows [b]."""
    rows, found = self.serialized(indices), []
    for i, (name, column) in enumerate(self._reader.columns.items()):
      values = [row[i] for row in rows]
      if name == 'label':
        labels = list(map(self._labels, values))
        found.append(np.full([len(rows), max([1, *map(len, labels)])], -1, np.int64))
        for row, numbers in zip(found[-1], labels):
          row[: len(numbers)] = numbers
        continue
      if column.path:  # The only one, and the last column of a row.
        values = [
          self._read_image(value, row[-1], index)
          for value, row, index in zip(values, rows, indices)
        ]
      for value, index in zip(values, indices):
        if value is None or (column.listed and None in value):
          raise ValueError(
            f"{self.name(index)}: there is no '{column.name}', which all rows need"
          )
      lengths = np.array(list(map(len, values)) if column.listed else [], np.int64)
      values = list(itertools.chain(*values)) if column.listed else values
      if column.kind in ('bytes', 'string'):
        texts = (x.encode() if isinstance(x, str) else x for x in values)
        found.append(np.fromiter(texts, object, len(values)))
      else:
        found.append(np.array(values, column.kind))
      if column.listed:
        found.append(lengths)
    return found

  def _read_image(
    self, content: bytes | None, path: str | None, index: int
  ) -> bytes | None:
    """Returns the content of an image, from its path where it is null."""
    if content is not None or not path:
      return content
    [shard], _ = self._places(np.array([index]))
    folders = os.path.dirname(self.paths[shard]), self._root
    paths = [os.path.join(folder, path) for folder in folders]
    if '://' in path:
      paths = [path]
    existing = next(filter(tf.io.gfile.exists, paths), paths[0])
    try:
      return image_files.read_file(existing)
    except (ValueError, OSError) as e:
      raise type(e)(f'{self.name(index)}: {e}') from e

  def _labels(self, value) -> list[int]:
    """Returns the numbers of the classes of a row."""
    values = value if isinstance(value, list) else [value]
    return [self._reader.numbers[x] for x in values if x is not None and x != -1]

  def read(self, record):
    if 'image' not in record:
      return record
    return {**record, 'image': images.bounded(record['image'], self._max_pixels)}

  def name(self, index: int) -> str:
    [shard], [place] = self._places(np.array([index]))
    return f'row {place} of {os.path.basename(self.paths[shard])}'
