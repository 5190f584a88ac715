"""Data sets on the Hugging Face Hub, which the package `datasets` downloads.

  hf://OWNER/NAME[@REVISION][/CONFIG][?FEATURE=COLUMN[&FEATURE=COLUMN...]]

REVISION is a branch, tag or commit, CONFIG one of several configurations ("subsets").
The splits are those of the data set, sliced as elsewhere: 'train[:90%]'. Each row is an
example, see vit_jax/data/arrow.py. There are folds, 'train[fold=0/5]', as in Parquet files.
FEATURE=COLUMN names the column of `image`, `label` or a text where several columns could
hold it, as in hf://uoft-cs/cifar100?label=coarse_label.

`datasets` converts a data set to Arrow files once per machine, in its cache
(HF_DATASETS_CACHE), and maps them into memory. It works offline once they are there.
"""

from collections.abc import Sequence
import functools
import json
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple
import urllib.parse

import numpy as np

from vit_jax import console
from vit_jax.data import arrow, records, registry, slices
from vit_jax.data.images import image_files
from vit_jax.data.tfds import splits
from vit_jax.distributed import files, processes

if TYPE_CHECKING:
  import ml_collections
  import pyarrow as pa

_FORM = 'hf://OWNER/NAME[@REVISION][/CONFIG][?FEATURE=COLUMN]'
_NAME = re.compile(r'([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/([^/]+))?')


class Address(NamedTuple):
  """The parts of the name of a data set."""

  repository: str  # OWNER/NAME
  revision: str | None
  config: str | None
  columns: dict[str, str]  # Names of columns by feature.


def parse(dataset: str) -> Address:
  """Parses the name of a data set; ValueError if it is wrong."""
  name, _, query = dataset.removeprefix(registry.HUB).partition('?')
  match = _NAME.fullmatch(name)
  try:
    pairs = urllib.parse.parse_qsl(query, strict_parsing=True) if query else []
  except ValueError:
    match = None
  if match is None:
    raise ValueError(f"dataset='{dataset}' must be {_FORM} (config.dataset)")
  return Address(match[1], match[2], match[3], dict(pairs))


def has_split(config: 'ml_collections.ConfigDict', dataset: str, base: str) -> bool:
  """Returns whether a data set has a split."""
  del config
  return base in _prepare(dataset).info.splits


def open_split(
  config: 'ml_collections.ConfigDict',
  dataset: str,
  split: str,
  features: Sequence[str],
  class_names: Sequence[str] | None = None,
) -> records.Source:
  """Opens a split of a data set, see sources.open_split."""
  builder = _prepare(dataset)

  def open_slices(split: str) -> 'HubSource':
    return _open_slices(config, dataset, split, features, class_names)

  def read_columns(base: str) -> arrow.FoldColumns:
    splits.whole(builder.info, dataset, base)
    table = _with_names(_read_split(builder, dataset, base), dataset, ('label',))
    layout = arrow.read_layout(table.features.arrow_schema, dataset)
    return arrow.FoldColumns(
      len(table), layout.columns, lambda name: {base: _read_column(table, name)}
    )

  return arrow.open_with_folds(split, open_slices, read_columns)


def _open_slices(
  config: 'ml_collections.ConfigDict',
  dataset: str,
  split: str,
  features: Sequence[str],
  class_names: Sequence[str] | None,
) -> 'HubSource':
  """Opens slices of a split, see `open_split`."""
  builder = _prepare(dataset)
  tables: dict[str, Any] = {}  # datasets.Dataset by part of the split.
  selected = []
  for base, instruction in slices.parts(split):
    splits.whole(builder.info, dataset, base)
    table = _read_split(builder, dataset, base)
    tables[base] = _with_names(table, dataset, features)
    count = len(tables[base])
    rows = slices.take(range(count), base, instruction)
    selected += arrow.select_rows([base], [count], rows)
  schema = next(iter(tables.values())).features.arrow_schema
  layout = arrow.read_layout(schema, dataset)
  if 'label' in features and 'label' not in layout.columns:
    arrow.check_label_type(schema, dataset)
  layout = layout.select(features, f"dataset='{dataset}'")
  labels: dict[str, arrow.Labels] = {}
  class_numbers: dict[int | str, int] = {}
  if 'label' in layout.columns:
    column = layout.columns['label']
    for base, table in tables.items():
      labels[base] = arrow.read_labels(_read_column(table, column.name), column.is_list)
    stored_names = layout.class_names.get('label')
    classes = arrow.number_classes(
      labels, column, stored_names, class_names, f'{dataset}/{split}'
    )
    layout.class_names['label'] = classes.names
    class_numbers = classes.numbers
  digests = [[base, labels[base].digest] for base in labels]
  origin = {
    'dataset': dataset,
    'split': split,
    'revision': str(builder.hash),
    'labels': files.digest([json.dumps(digests).encode()]),
  }
  processes.agree(f"the data set '{dataset}'", origin)
  return HubSource(
    dataset, tables, selected, layout, class_numbers, origin, config.max_image_pixels
  )


def _read_split(builder: Any, dataset: str, base: str) -> Any:
  """Returns the datasets.Dataset of a split; ValueError if its files are damaged."""
  try:
    table = builder.as_dataset(split=base)
    table.data.validate(full=True)  # Reading damaged offsets may end the process.
  except Exception as e:  # Arrow and `datasets` raise various errors.
    raise ValueError(
      f"dataset='{dataset}': the files of '{base}' in '{builder.cache_dir}' are damaged: "
      f'{image_files.first_line(e)}: delete this folder, which is made again '
      '(config.dataset)'
    ) from e
  return table


def _read_column(table: Any, name: str) -> 'pa.ChunkedArray':
  """Returns a column of a datasets.Dataset."""
  return table.with_format('arrow').select_columns(name)[:][name]


@functools.lru_cache(maxsize=8)
def _prepare(dataset: str) -> Any:
  """Returns the datasets.DatasetBuilder of a data set, prepared on this machine."""
  address = parse(dataset)

  def prepare() -> Any:
    library = console.require('datasets', 'hf', f"dataset='{dataset}'")
    try:
      builder = library.load_dataset_builder(
        f'hf://datasets/{address.repository}',
        address.config,
        revision=address.revision,
      )
      builder.download_and_prepare()  # Other processes of this machine wait.
    except Exception as e:  # Also errors of its HTTP library.
      raise _explain(e, dataset) from e
    return builder

  return processes.first_before_others(f"preparing data set '{dataset}'", prepare)


def _explain(error: Exception, dataset: str) -> Exception:
  """Returns the error to raise if a data set cannot be prepared."""
  reason = image_files.first_line(error)
  if isinstance(error, FileNotFoundError):
    return FileNotFoundError(
      f"dataset='{dataset}' cannot be read: {reason}: check its name at "
      'https://huggingface.co/datasets, or log in (hf auth login) (config.dataset)'
    )
  if isinstance(error, ConnectionError):
    return ConnectionError(
      f"dataset='{dataset}' is not on this machine, and the hub cannot be reached: "
      f'{reason}: connect to the network, or set HF_DATASETS_CACHE to a folder that '
      'has the data set (config.dataset)'
    )
  # Its errors for damaged files tell why only in their cause.
  message = ' '.join(str(error.__cause__ or error).split())[:400]
  return ValueError(
    f"dataset='{dataset}' cannot be prepared: {message}: use {_FORM} (config.dataset)"
  )


def _with_names(table: Any, dataset: str, features: Sequence[str]) -> Any:
  """Renames columns of a datasets.Dataset to the features that they hold.

  ValueError if a requested feature could be in several columns.
  """
  columns = parse(dataset).columns
  for feature, column in columns.items():
    if column not in table.column_names:
      raise ValueError(
        f"dataset='{dataset}' has no column '{column}' for '{feature}': it has "
        f'{table.column_names} (config.dataset)'
      )
  candidates = arrow.find_candidates(table.features.arrow_schema, dataset)
  for feature, names in candidates.items():
    if feature not in features or feature in columns or len(names) < 2:
      continue
    choice = f'{dataset}{"&" if columns else "?"}{feature}={names[0]}'
    raise ValueError(
      f"dataset='{dataset}' has several columns for '{feature}', {names}: choose one, "
      f"as in --config.dataset='{choice}'"
    )
  for feature, column in columns.items():
    if feature == column:
      continue
    if feature in table.column_names:
      table = table.remove_columns(feature)
    table = table.rename_column(column, feature)
  return table


class HubSource(arrow.ArrowSource):
  """Rows of a data set on the hub; all processes must open the same split."""

  def __init__(
    self,
    dataset: str,
    tables: dict[str, Any],
    selected: Sequence[arrow.Rows],
    layout: arrow.Layout,
    class_numbers: dict[int | str, int],
    origin: dict[str, str],
    max_pixels: int,
  ) -> None:
    num_bytes = sum(table.data.nbytes for table in tables.values())
    num_rows = sum(len(table) for table in tables.values())
    super().__init__(selected, num_bytes / num_rows, layout, class_numbers, max_pixels)
    self.origin = origin
    self._dataset = dataset
    columns = {name.partition('.')[0]: None for name in self.column_names}
    self._tables = {}
    for base, table in tables.items():
      self._tables[base] = table.select_columns(list(columns)).with_format('arrow')

  def read_column(self, name: str) -> dict[str, 'pa.ChunkedArray']:
    return {base: _read_column(table, name) for base, table in self._tables.items()}

  def open_file(self, path: str) -> Any:
    return self._tables[path]

  def read_file(self, file: Any, shard: int, numbers: list[int]) -> list[tuple]:
    return self.rows(file[numbers])

  def image_paths(self, shard: int, path: str) -> list[str]:
    import datasets
    import huggingface_hub

    caches = (datasets.config.HF_DATASETS_CACHE, huggingface_hub.constants.HF_HUB_CACHE)
    for cache in caches:
      if os.path.realpath(path).startswith(os.path.realpath(cache) + os.sep):
        return [path]
    raise ValueError(
      f"its image '{path}' is not in the caches of `datasets` ({', '.join(caches)}): a "
      'data set of the hub may read no other files of this machine'
    )

  def name(self, index: int) -> str:
    [shard], [place] = self._places(np.array([index]))
    return f"row {place} of '{self.paths[shard]}' of {self._dataset}"
