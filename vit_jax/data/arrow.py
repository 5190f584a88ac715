"""Rows of Arrow tables as examples.

  image  a column {bytes, path}: `image` or the first such column; or `image` is bytes.
         Where the bytes are null, the path of a file
  segmentation_mask
         such a column or bytes; or a column {bytes, path} named `mask`, `annotation` or `label`
  label  number or name of a class, or a list of them; null and -1 are none. `label`, or
         else the first class label in the metadata of `datasets`
  ...    all other columns of numbers, booleans, strings, or lists of these

Class names are those in the metadata of `datasets` (key 'huggingface' of the schema),
or else the labels of the training split, sorted.
"""

import abc
import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import itertools
import json
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from vit_jax.data import folds, records, slices
from vit_jax.data.images import image_files, images
from vit_jax.data.lazy import tf
from vit_jax.data.tfds import shards
from vit_jax.distributed import files

if TYPE_CHECKING:
  import pyarrow as pa

# Classes without names have numbers below this; a greater one is taken for an id.
_MOST_CLASSES = 10**6
_LABEL_KINDS = ('int64', 'string')
_GROUP = 'group'  # Column whose equal values stay together in folds.
_MASK = 'segmentation_mask'  # Feature of vit_jax/data/masks.py.
# Names of columns of images that are masks.
_MASK_COLUMNS = (_MASK, 'mask', 'annotation', 'label')


class Rows(NamedTuple):
  """Rows of a file, with the attributes of TFDS's FileInstruction."""

  filename: str
  skip: int
  take: int


class Column(NamedTuple):
  """A column that holds a feature."""

  name: str
  # 'bytes', or a dtype: 'int64', 'float32', 'bool', 'string'; '' if unusable.
  kind: str
  is_list: bool = False  # Whether a row has a list of such values.
  path: str | None = None  # Column of the paths of images whose bytes are null.

  @property
  def title(self) -> str:
    """Name of the whole column, of which 'NAME.bytes' is a field."""
    return self.name.removesuffix('.bytes')


class Layout(NamedTuple):
  """The columns that hold features, and the names of classes, both by feature."""

  columns: dict[str, Column]
  class_names: dict[str, tuple[str, ...]]

  def select(
    self,
    features: Iterable[str],
    where: str,
    noun: Literal['feature', 'column'] = 'feature',
  ) -> 'Layout':
    """Returns the layout of the requested features, see records.resolve."""
    names = records.resolve(features, self.columns, where, noun)
    if _MASK in names and self.columns[_MASK].kind != 'bytes':
      column = self.columns[_MASK]
      raise ValueError(
        f"{where} has values of the type {column.kind} in '{column.title}': write the "
        'content of the file of each mask, or list their paths in a manifest'
      )
    return Layout(
      {name: self.columns[name] for name in names},
      {name: self.class_names[name] for name in names if name in self.class_names},
    )


class Labels(NamedTuple):
  """The labels of the rows of a file."""

  values: set[int | str]  # Different labels; null and -1 are none.
  digest: str  # A hash of the labels of all rows.


class Classes(NamedTuple):
  """Names of the classes, and the number of the class of each label."""

  names: tuple[str, ...]
  numbers: dict[int | str, int]


def select_rows(paths: Sequence[str], counts: Sequence[int], rows: range) -> list[Rows]:
  """Returns the rows in each file of a slice of all rows.

  Args:
    paths: the files.
    counts: number of rows of each file.
    rows: selected rows, numbered file by file.
  """
  selected = []
  first = 0  # Number of the file's first row.
  for path, count in zip(paths, counts):
    skip = max(rows.start - first, 0)
    stop = min(rows.stop - first, count)
    if skip < stop:
      selected.append(Rows(path, skip, stop - skip))
    first += count
  return selected


def read_layout(schema: 'pa.Schema', where: str) -> Layout:
  """Returns the columns that can be read; ValueError for two columns of a name."""
  counts = collections.Counter(schema.names)
  if repeated := [name for name, count in counts.items() if count > 1]:
    raise ValueError(
      f"'{where}' has several columns '{repeated[0]}': rename or remove all but one"
    )
  class_names = read_class_names(schema, where)
  candidates = _candidates(schema, class_names)
  columns = {}
  for field in schema:
    column = read_column(field.name, field.type)
    if column.kind not in ('', 'bytes') and field.name not in candidates:
      columns[field.name] = column
  for feature, choices in candidates.items():
    if choices:
      columns[feature] = choices[0]
  names = {}
  for feature, column in columns.items():
    if column.name in class_names:
      names[feature] = class_names[column.name]
  return Layout(columns, names)


def find_candidates(schema: 'pa.Schema', where: str) -> dict[str, list[str]]:
  """Returns the names of the columns that may hold 'image' and 'label'.

  A column that has the name of the feature is the only one.
  """
  candidates = _candidates(schema, read_class_names(schema, where))
  names = {}
  for feature, columns in candidates.items():
    names[feature] = [column.title for column in columns]
  return names


def _candidates(
  schema: 'pa.Schema', class_names: Iterable[str]
) -> dict[str, list[Column]]:
  """Returns the columns that may hold 'image' and 'label', see `find_candidates`."""
  image_columns, label_columns = [], []
  for field in schema:
    column = read_column(field.name, field.type)
    is_image = field.name in ('image', _MASK) or column.name != field.name
    if column.kind == 'bytes' and is_image:
      image_columns.append(column)
    if field.name == 'label' or field.name in class_names:
      label_columns.append(column)
  candidates = {'image': image_columns, 'label': label_columns}
  if masks := _mask_columns(image_columns):
    candidates[_MASK] = masks
    candidates['image'] = [x for x in image_columns if x not in masks]
  for feature, columns in candidates.items():
    for column in columns:
      if column.title == feature:
        candidates[feature] = [column]
  labels = candidates['label']
  if labels and labels[0].kind not in _LABEL_KINDS:
    candidates['label'] = []
  return candidates


def _mask_columns(columns: Sequence[Column]) -> list[Column]:
  """Returns the columns of images that may hold masks, next to one of images."""
  if len(columns) < 2:
    return []
  columns_by_name = {column.title: column for column in columns}
  return [columns_by_name[name] for name in _MASK_COLUMNS if name in columns_by_name]


def read_class_names(schema: 'pa.Schema', where: str) -> dict[str, tuple[str, ...]]:
  """Returns the class names in the metadata of `datasets`, by column."""
  try:
    metadata = json.loads((schema.metadata or {})[b'huggingface'])
    features = metadata['info']['features']
  except (KeyError, TypeError, ValueError, RecursionError):
    return {}  # `datasets` has not written the file.
  if not isinstance(features, dict):
    return {}
  class_names = {}
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
        f"'{where}' has the class names {str(names)[:80]} of '{column}' in the metadata "
        'of `datasets`, which must be a list of strings: write the file again'
      )
    if names:
      class_names[column] = tuple(names)
  return class_names


def read_column(name: str, arrow_type: Any) -> Column:
  """Returns how a column of an Arrow type is read."""
  from pyarrow import types

  if types.is_struct(arrow_type):
    return _read_struct(name, arrow_type)
  list_kinds = (types.is_list, types.is_large_list, types.is_fixed_size_list)
  if any(is_kind(arrow_type) for is_kind in list_kinds):
    inner = read_column(name, arrow_type.value_type)
    is_usable = inner.kind != 'bytes' and not inner.is_list
    return Column(name, inner.kind if is_usable else '', is_list=True)
  if types.is_dictionary(arrow_type):
    return read_column(name, arrow_type.value_type)
  kinds = {
    'int64': [types.is_integer],
    'float32': [types.is_floating],
    'bool': [types.is_boolean],
    'string': [types.is_string, types.is_large_string],
    'bytes': [types.is_binary, types.is_large_binary],
  }
  for kind, predicates in kinds.items():
    if any(is_kind(arrow_type) for is_kind in predicates):
      return Column(name, kind)
  return Column(name, '')


def _read_struct(name: str, arrow_type: Any) -> Column:
  """Returns how a column {bytes, path} of images is read."""
  from pyarrow import types

  fields = {field.name: field.type for field in arrow_type}
  has_paths = 'path' in fields and read_column('path', fields['path']).kind == 'string'
  is_image = False
  if 'bytes' in fields:
    is_null = types.is_null(fields['bytes'])  # All images are files.
    is_image = (
      has_paths if is_null else read_column('', fields['bytes']).kind == 'bytes'
    )
  return Column(
    f'{name}.bytes',
    kind='bytes' if is_image else '',
    path=f'{name}.path' if has_paths else None,
  )


def check_label_type(schema: 'pa.Schema', where: str) -> None:
  """Raises ValueError if there is a column `label` of an unusable type."""
  if 'label' in schema.names:
    raise ValueError(
      f"'{where}' has labels of the type {schema.field('label').type} in 'label': write "
      'the numbers of the classes as integers, or their names as strings'
    )


class EncodedLabels(NamedTuple):
  """The labels in a column, each as its place in a list of all different ones."""

  lengths: np.ndarray | None  # Labels of each row, -1 for null; None without lists.
  codes: np.ndarray  # Places of the labels of all rows; -1 for null.
  labels: list[Any]  # Different labels.


def _encode_labels(values: 'pa.ChunkedArray', is_list: bool) -> EncodedLabels:
  """Encodes the labels in a column, whose rows may have lists of them."""
  import pyarrow.compute as pc

  flat = values.combine_chunks()
  lengths = None
  if is_list:
    lengths = pc.fill_null(pc.list_value_length(flat), -1)
    lengths = lengths.to_numpy(zero_copy_only=False)
    flat = pc.list_flatten(flat)
  if not hasattr(flat, 'indices'):
    flat = flat.dictionary_encode()
  codes = pc.fill_null(flat.indices, -1).to_numpy(zero_copy_only=False)
  return EncodedLabels(lengths, codes, flat.dictionary.to_pylist())


def read_labels(values: 'pa.ChunkedArray', is_list: bool) -> Labels:
  """Returns the labels in a column, whose rows may have lists of them."""
  lengths, codes, labels = _encode_labels(values, is_list)
  contents = [] if lengths is None else [lengths.tobytes()]
  contents += [codes.tobytes(), json.dumps(labels).encode()]
  return Labels({*labels} - {None, -1}, files.digest(contents))


def number_labels(
  values: 'pa.ChunkedArray', is_list: bool, numbers: Mapping[int | str, int]
) -> np.ndarray:
  """Returns the class numbers of the rows of a column, int64 [n, L], padded with -1."""
  lengths, codes, labels = _encode_labels(values, is_list)
  table = [numbers.get(label, -1) for label in labels]
  table.append(-1)  # The last number stands for the code -1.
  flat = np.array(table, np.int64)[codes]
  if lengths is None:
    return flat[:, None]
  rows = np.repeat(np.arange(len(lengths)), np.maximum(lengths, 0))
  is_label = flat >= 0
  counts = np.bincount(rows[is_label], minlength=len(lengths))
  array = np.full([len(lengths), max(1, counts.max(initial=0))], -1, np.int64)
  array[np.arange(array.shape[1]) < counts[:, None]] = flat[is_label]
  return array


class FoldColumns(NamedTuple):
  """What the folds of a part of a split depend on."""

  num_rows: int
  columns: Mapping[str, Column]  # By the feature that they hold.
  read: Callable[[str], Mapping[str, 'pa.ChunkedArray']]  # A column of each file.


def open_with_folds(
  split: str,
  open_slices: Callable[[str], records.Source],
  read_columns: Callable[[str], FoldColumns],
) -> records.Source:
  """Opens a split whose parts may be folds, see vit_jax/data/folds.py.

  `open_slices` opens a split without folds, `read_columns` takes the name of a part.
  """
  terms = list(slices.parts(split))
  if not any(folds.parse(instruction) for _, instruction in terms):
    return open_slices(split)
  selected = []
  first = 0  # Number of the part's first row.
  for base, instruction in terms:
    columns = read_columns(base)
    rows = np.arange(columns.num_rows)
    fold = folds.parse(instruction)
    if fold is None:
      rows = slices.take(rows, base, instruction)
    else:
      rows = folds.take(rows, base, fold, _read_strata(columns), _read_groups(columns))
    selected.append(first + rows)
    first += columns.num_rows
  source = open_slices('+'.join(slices.bases(split)))
  subset = records.Subset(source, np.concatenate(selected))
  subset.origin = {**source.origin, 'split': split}
  return subset


def _read_strata(columns: FoldColumns) -> np.ndarray:
  """Returns a number for the labels of each row, int64 [n]."""
  column = columns.columns.get('label')
  if column is None:
    return np.zeros(columns.num_rows, np.int64)
  arrays = columns.read(column.name).values()
  values = set[int | str]()
  for array in arrays:
    values |= read_labels(array, column.is_list).values
  numbers = {label: number for number, label in enumerate(sorted(values))}
  labels = records.stack_labels(
    [number_labels(array, column.is_list, numbers) for array in arrays]
  )
  _, strata = np.unique(np.sort(labels, axis=1), axis=0, return_inverse=True)
  return strata.reshape(-1)


def _read_groups(columns: FoldColumns) -> list[int | str] | None:
  """Returns the group of each row; ValueError if a row has none."""
  if _GROUP not in columns.columns:
    return None
  groups = []
  for path, values in columns.read(_GROUP).items():
    for number, group in enumerate(values.to_pylist()):
      if not isinstance(group, int | str):
        raise ValueError(
          f"row {number} of '{path}': `{_GROUP}` is {group}, but folds need a string or "
          'an integer, such as the patient, in every row'
        )
      groups.append(group)
  return groups


def number_classes(
  labels: Mapping[str, Labels],
  column: Column,
  stored_names: Sequence[str] | None,
  expected_names: Sequence[str] | None,
  where: str,
) -> Classes:
  """Returns the classes of the labels in files.

  Args:
    labels: by file.
    column: holds the labels.
    stored_names: names of the classes in the metadata of the files, if any.
    expected_names: names of the classes of the training data, if known.
    where: names the split in errors.

  Raises:
    ValueError: if there is no label, or one that is not among the classes.
  """
  all_labels = set[int | str]()
  for file_labels in labels.values():
    all_labels |= file_labels.values
  if not all_labels:
    raise ValueError(f"no row of '{where}' has a label in '{column.name}'")
  names = tuple(
    expected_names or stored_names or _make_class_names(all_labels, column, where)
  )
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
    if unknown := [label for label in file_labels.values if label not in numbers]:
      raise ValueError(
        f"'{path}' has the label {unknown[0]!r} in '{column.name}', not one of the "
        f'{len(names)} classes {list(names[:5])} ...: leave out these rows, or add the '
        'class to the training split'
      )
  return Classes(names, numbers)


def _make_class_names(labels: set, column: Column, where: str) -> list[str]:
  """Returns the names of the classes with these labels."""
  if column.kind == 'string':
    return sorted(labels)
  lowest, highest = min(labels), max(labels)
  if lowest < 0 or highest >= _MOST_CLASSES:
    label = lowest if lowest < 0 else highest
    raise ValueError(
      f"'{where}' has the label {label} in '{column.name}': class numbers are 0 to "
      f'{_MOST_CLASSES - 1:,}, and -1 means no label; renumber the classes, or use their '
      'names'
    )
  return [str(i) for i in range(highest + 1)]


class ArrowSource(shards.ShardSource, abc.ABC):
  """Rows of tables, whose images may have `max_pixels`; see the module.

  A subclass reads rows from its files. `class_numbers` are those of the labels.
  """

  def __init__(
    self,
    selected: Sequence[Rows],
    row_bytes: float,
    layout: Layout,
    class_numbers: Mapping[int | str, int],
    max_pixels: int,
  ) -> None:
    super().__init__(selected, row_bytes, layout.columns, layout.class_names)
    self._selected = selected
    self._labels: np.ndarray | None = None  # Once they are read.
    self._columns = layout.columns
    self._class_numbers = class_numbers
    self._max_pixels = max_pixels
    # Columns of the features, then those of the paths of images.
    self.column_names = [column.name for column in self._columns.values()]
    for column in self._columns.values():
      if column.path is not None:
        self.column_names.append(column.path)

  @abc.abstractmethod
  def read_column(self, name: str) -> Mapping[str, 'pa.ChunkedArray']:
    """Returns a column of all rows of each file, by path."""

  def labels(self) -> np.ndarray | None:
    if 'label' not in self.features:
      return None
    if self._labels is None:
      column = self._columns['label']
      columns = self.read_column(column.name)
      arrays = []
      for path, skip, count in self._selected:
        values = columns[path].slice(skip, count)
        arrays.append(number_labels(values, column.is_list, self._class_numbers))
      self._labels = records.stack_labels(arrays)
    return self._labels

  @abc.abstractmethod
  def image_paths(self, shard: int, path: str) -> list[str]:
    """Returns where an image may be whose row in a file has only its path."""

  def rows(self, table: 'pa.Table') -> list[tuple]:
    """Returns the values of the rows of a table, in the order of `column_names`."""
    columns = table.flatten()  # {bytes, path} become two.
    # Two features, such as `label`, may be read from the same column.
    values = [columns[name].to_pylist() for name in self.column_names]
    return list(zip(*values))

  def lookup(self, indices: 'tf.Tensor') -> records.Record:
    """Returns the features of rows, int64 [b]; lists are ragged."""
    types = []
    for name, column in self._columns.items():
      if name == 'label':
        types.append('int64')
        continue
      types.append('string' if column.kind == 'bytes' else column.kind)
      if column.is_list:
        types.append('int64')
    arrays = iter(tf.numpy_function(self.arrays, [indices], types, stateful=False))
    features = {}
    for name, column in self._columns.items():
      shape = [None, None] if name == 'label' else [None]
      features[name] = tf.ensure_shape(next(arrays), shape)
      if column.is_list and name != 'label':
        lengths = tf.ensure_shape(next(arrays), [None])
        features[name] = tf.RaggedTensor.from_row_lengths(features[name], lengths)
    return features

  def arrays(self, indices: np.ndarray) -> list[np.ndarray]:
    """Returns the features of rows [b] in order.

    A feature with lists has two arrays: the values of all rows, and how many values
    each row has. Labels are class numbers int64 [b, L], padded with -1.

    Raises ValueError or FileNotFoundError, which name the row, if a row has no value,
    or its image has neither bytes nor a file.
    """
    rows = self.stored(indices)
    arrays = []
    for i, (name, column) in enumerate(self._columns.items()):
      values = [row[i] for row in rows]
      if name == 'label':
        arrays.append(self._label_array(values))
        continue
      if column.path is not None:
        place = self.column_names.index(column.path)
        for k, (row, index) in enumerate(zip(rows, indices)):
          values[k] = self._read_image(values[k], row[place], index)
      self._check_present(column, values, indices)
      if column.is_list:
        lengths = np.array([len(value) for value in values], np.int64)
        arrays.append(_as_array(list(itertools.chain(*values)), column.kind))
        arrays.append(lengths)
      else:
        arrays.append(_as_array(values, column.kind))
    return arrays

  def _label_array(self, values: Sequence[Any]) -> np.ndarray:
    """Returns class numbers of rows, int64 [b, L], padded with -1."""
    classes = []
    for value in values:
      labels = value if isinstance(value, list) else [value]
      classes.append([self._class_numbers[x] for x in labels if x not in (None, -1)])
    width = max([1, *map(len, classes)])
    array = np.full([len(classes), width], -1, np.int64)
    for row, numbers in zip(array, classes):
      row[: len(numbers)] = numbers
    return array

  def _check_present(
    self, column: Column, values: Sequence[Any], indices: np.ndarray
  ) -> None:
    """Raises ValueError if a row has no value, or null in a list."""
    for value, index in zip(values, indices):
      if value is None or (column.is_list and None in value):
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
    try:
      paths = self.image_paths(shard, path)
      existing = next(filter(tf.io.gfile.exists, paths), paths[0])
      return image_files.read_file(existing)
    except (ValueError, OSError) as e:
      raise type(e)(f'{self.name(index)}: {e}') from e

  def read(self, record: records.Record) -> records.Record:
    if 'image' not in record:
      return record
    return {**record, 'image': images.bounded(record['image'], self._max_pixels)}


def _as_array(values: Sequence[Any], kind: str) -> np.ndarray:
  """Returns values of a column's kind as an array [n]; text and bytes as objects."""
  if kind not in ('bytes', 'string'):
    return np.array(values, kind)
  texts = np.empty(len(values), object)
  for i, value in enumerate(values):
    texts[i] = value.encode() if isinstance(value, str) else value
  return texts
