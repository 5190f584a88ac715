"""Parquet files with encoded images as a data set, as on the Hugging Face Hub.

A split is one or more files, `data/train-00000-of-00002.parquet` etc.; _PLACES has the
other patterns. Each row is an example, see vit_jax/data/arrow.py; the path of an image
is absolute, or relative to the folder of the Parquet file or of the data set. Rows are
numbered file by file, so 'train[:10%]' selects the same rows as in `datasets`.

Rows of a fold, 'train[fold=0/5]', have their classes spread evenly, and equal values in a
column `group` are in the same fold, see vit_jax/data/folds.py.

At the start only the footers of the files and the labels are read. Parquet is made for
reading whole row groups, which have 100 MB each in files that `datasets` writes: see
vit_jax/data/row_groups.py.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import functools
import json
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vit_jax import console
from vit_jax.data import arrow, folder_formats, records, row_groups, slices
from vit_jax.data.images import image_files
from vit_jax.data.lazy import tf
from vit_jax.data.tfds import shards
from vit_jax.distributed import files, processes

if TYPE_CHECKING:
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


class Selection(NamedTuple):
  """The rows of a split, and the footers of all files of its parts, by path."""

  rows: list[arrow.Rows]
  footers: dict[str, Any]


def exists(root: str, split: str) -> bool:
  """Returns whether a folder has Parquet files for a split."""
  return any(find_files(root, base) for base in slices.bases(split))


def find_files(root: str, base: str) -> list[str]:
  """Returns the files of a split at the first of _PLACES that has any."""
  if base == '.':  # Class folders, perhaps next to tables.
    return []
  for place in _PLACES:
    paths = tf.io.gfile.glob(os.path.join(root, place.format(base)))
    if paths:
      return sorted(paths)
  return []


def _find_complete(root: str, base: str) -> list[str]:
  """Returns the files of a split; FileNotFoundError if any is missing."""
  paths = find_files(root, base)
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


class Format(folder_formats.FolderFormat):
  """The folder format of this module."""

  title = 'Parquet files'

  def recognizes(self, root: str, split: str, features: Sequence[str] = ()) -> bool:
    return exists(root, split)

  def open(self, request: folder_formats.Request) -> records.Source:
    return open_split(
      request.config,
      request.root,
      request.split,
      request.features,
      request.class_names,
    )


def open_split(
  config: 'ml_collections.ConfigDict',
  root: str,
  split: str,
  features: Sequence[str],
  class_names: Sequence[str] | None = None,
) -> records.Source:
  """Opens a split of a folder, see sources.open_split."""

  def open_whole(whole_splits: str) -> records.Source:
    return _open_slices(config, root, whole_splits, features, class_names)

  def read_columns(base: str) -> arrow.FoldColumns:
    paths = _find_complete(root, base)
    footers = shards.map_files(_read_footer, paths, 'Reading footers')
    layout = _common_layout(dict(zip(paths, footers)))
    num_rows = sum(footer.num_rows for footer in footers)
    read_column = functools.partial(_read_column, paths)
    return arrow.FoldColumns(num_rows, layout.columns, read_column)

  return arrow.open_with_folds(split, open_whole, read_columns)


def _open_slices(
  config: 'ml_collections.ConfigDict',
  root: str,
  split: str,
  features: Sequence[str],
  class_names: Sequence[str] | None,
) -> 'ParquetSource':
  """Opens slices of a split, see `open_split`."""
  selection = _select_rows(root, split)
  paths = list(selection.footers)
  layout = _common_layout(selection.footers)
  if 'label' in features and 'label' not in layout.columns:
    arrow.check_label_type(
      selection.footers[paths[0]].schema.to_arrow_schema(), paths[0]
    )
  layout = layout.select(features, f"'{paths[0]}'", 'column')
  labels: dict[str, arrow.Labels] = {}
  class_numbers: dict[int | str, int] = {}
  if 'label' in layout.columns:
    column = layout.columns['label']
    labels = _read_labels(paths, column)
    stored_names = layout.class_names.get('label')
    classes = arrow.number_classes(
      labels, column, stored_names, class_names, f'{root}/{split}'
    )
    layout.class_names['label'] = classes.names
    class_numbers = classes.numbers
  stamps = shards.map_files(image_files.size_and_time, paths, 'Looking at files')
  contents = []
  for path, (size, _) in zip(paths, stamps):
    digest = labels[path].digest if path in labels else None
    contents.append([os.path.basename(path), size, digest])
  origin = {'split': split, 'files': files.digest([json.dumps(contents).encode()])}
  processes.agree(f"the files of '{root}'", origin)
  return ParquetSource(
    root,
    selection,
    dict(zip(paths, stamps)),
    layout,
    class_numbers,
    origin,
    config.max_image_pixels,
  )


def _select_rows(root: str, split: str) -> Selection:
  """Reads the footers of a split's files, and selects its rows."""
  footers: dict[str, Any] = {}
  selected = []
  for base, instruction in slices.parts(split):
    paths = _find_complete(root, base)
    new_paths = [path for path in paths if path not in footers]
    new_footers = shards.map_files(_read_footer, new_paths, 'Reading footers')
    footers.update(zip(new_paths, new_footers))
    counts = [footers[path].num_rows for path in paths]
    rows = slices.take(range(sum(counts)), base, instruction)
    selected += arrow.select_rows(paths, counts, rows)
  return Selection(selected, footers)


def _read_footer(path: str) -> Any:
  return _open(path).metadata


@contextlib.contextmanager
def name_damaged(name: str) -> Iterator[None]:
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
  with name_damaged(f"'{path}'"):
    return parquet.ParquetFile(path, metadata=footer, page_checksum_verification=True)


def _common_layout(footers: Mapping[str, Any]) -> arrow.Layout:
  """Returns the layout of files; ValueError if their columns or classes differ."""
  schemas = {}
  for path, footer in footers.items():
    schemas[path] = footer.schema.to_arrow_schema()
  first, *other_paths = schemas
  schema = schemas[first]
  layout = arrow.read_layout(schema, first)
  class_names = arrow.read_class_names(schema, first)
  for path in other_paths:
    if not schema.equals(schemas[path]):
      raise ValueError(
        f"'{path}' and '{first}' differ in their columns, "
        f'{_list_columns(schemas[path])} and {_list_columns(schema)}: use files of one '
        'data set (config.dataset)'
      )
    for name, names in arrow.read_class_names(schemas[path], path).items():
      if names != class_names.get(name, names):
        raise ValueError(
          f"'{path}' and '{first}' differ in the class names of '{name}', "
          f'{list(names[:5])} and {list(class_names[name][:5])}: use files of one '
          'data set (config.dataset)'
        )
  return layout


def _list_columns(schema: 'pa.Schema') -> str:
  return ', '.join(f'{field.name}: {field.type}' for field in schema)


def _read_labels(paths: Sequence[str], column: arrow.Column) -> dict[str, arrow.Labels]:
  """Returns the labels in each file, by path."""
  labels = {}
  for path, values in _read_column(paths, column.name).items():
    with name_damaged(f"'{path}'"):
      labels[path] = arrow.read_labels(values, column.is_list)
  return labels


def _read_column(paths: Sequence[str], name: str) -> dict[str, 'pa.ChunkedArray']:
  """Returns a column of each file, by path."""

  def read(path: str) -> 'pa.ChunkedArray':
    with name_damaged(f"'{path}'"):
      return _open(path).read(columns=[name]).column(0)

  return dict(zip(paths, shards.map_files(read, paths, f"Reading '{name}'")))


class ParquetSource(arrow.ArrowSource):
  """Rows of Parquet files; all processes must open the same split."""

  def __init__(
    self,
    root: str,
    selection: Selection,
    stamps: Mapping[str, tuple[int, int]],
    layout: arrow.Layout,
    class_numbers: Mapping[int | str, int],
    origin: dict[str, str],
    max_pixels: int,
  ) -> None:
    self._root = root
    self._footers = selection.footers
    self._stamps = stamps
    self._group_ends = {}  # Numbers of the rows after each row group, by path.
    num_bytes = num_rows = 0
    for path, footer in self._footers.items():
      groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
      self._group_ends[path] = np.cumsum([group.num_rows for group in groups])
      num_bytes += sum(group.total_byte_size for group in groups)
      num_rows += footer.num_rows
    row_bytes = num_bytes / num_rows
    super().__init__(selection.rows, row_bytes, layout, class_numbers, max_pixels)
    self.origin = origin
    self._groups = row_groups.RowGroups(num_bytes)

  def read_column(self, name: str) -> dict[str, 'pa.ChunkedArray']:
    return _read_column(list(self._footers), name)

  def open_file(self, path: str) -> Any:
    return _open(path, self._footers[path])

  def read_file(self, file: Any, shard: int, numbers: list[int]) -> list[tuple]:
    path = self.paths[shard]
    ends = self._group_ends[path]
    groups = np.searchsorted(ends, numbers, side='right')
    rows = []
    for group in np.unique(groups).tolist():  # `numbers` ascend, so the groups do.
      table = self._read_group(file, path, group)
      first = ends[group - 1] if group else 0
      rows += self.rows(table.take(np.array(numbers)[groups == group] - first))
    return rows

  def _read_group(self, file: Any, path: str, group: int) -> 'pa.Table':
    """Returns the table of a row group, which is read once."""
    key = os.path.abspath(path), self._stamps[path], group, self.column_names

    def read() -> 'pa.Table':
      with name_damaged(f"row group {group} of '{path}'"):
        return file.read_row_group(group, self.column_names)

    return self._groups.get(key, read)

  def image_paths(self, shard: int, path: str) -> list[str]:
    if '://' in path:
      return [path]
    folders = os.path.dirname(self.paths[shard]), self._root
    return [os.path.join(folder, path) for folder in folders]

  def name(self, index: int) -> str:
    [shard], [place] = self._places(np.array([index]))
    return f'row {place} of {os.path.basename(self.paths[shard])}'
