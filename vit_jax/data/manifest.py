"""A manifest as a data set: `root/<split>.jsonl`, one JSON object per line.

  {"image": "photos/1.jpg", "label": "cat"}
  {"image": "photos/2.jpg", "label": ["cat", "dog"], "objects":
   [{"bbox": [0.1, 0.2, 0.5, 0.9], "label": 3}]}

`image` is a path, absolute or relative to the folder of the manifest. All other
keys are features: integers as int64, other numbers as float32, strings and
booleans. Lists become arrays, ragged if lengths vary. Values in a dict, or in a
list of dicts, are named with '/': 'objects/bbox' [n, 4].

`label` is the name of a class, its number from 0, or a list of them; an example
without a label has null or no `label`. The class names are those in the training
split, sorted, or the list in `root/classes.json`. In that file,
{"objects/label": [...]} names the classes of another feature.

If lines have a `group`, such as the patient, folds of a split, 'train[fold=0/5]', keep
lines of a group together.

`root/<split>/metadata.jsonl` or `metadata.csv`, as in an "imagefolder" of Hugging
Face's `datasets`, is such a manifest too: its `file_name` is the path of an image,
relative to its folder. Such files may also be in folders below `root/<split>`, each
for its images (see vit_jax/data/folder.py), or in `root`, for paths that begin with
`<split>/`. As in `datasets`, images that are not listed are left out, and labels win
over class folders; where no line has a label, images in class folders, `<class>/1.jpg`,
have theirs. A column of CSV with only numbers has numbers, and an empty value is null.
"""

from collections.abc import Callable, Iterable, Sequence
import json
import os
from typing import Any

from absl import logging
import numpy as np

from vit_jax.data import (
  checking,
  folder_formats,
  folds,
  manifest_cache,
  manifest_columns,
  manifest_files,
  records,
  slices,
  typed_json,
)
from vit_jax.data.images import image_files, index as index_lib
from vit_jax.data.lazy import tf

_GROUP = 'group'  # Column whose equal values stay together in folds.
# Maps the folder of a data set and a part of a split to lines.
ParseFunction = Callable[[str, str], list[manifest_files.Line]]


def exists(root: str, split: str) -> bool:
  """Returns whether a folder has a manifest for a split."""
  return any(manifest_files.find(root, base) for base in slices.bases(split))


class Format(folder_formats.ListedFormat):
  """The folder format of this module."""

  def recognizes(self, root: str, split: str, features: Sequence[str] = ()) -> bool:
    return exists(root, split)

  def read_split(
    self, request: folder_formats.Request, **checks: Any
  ) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    return read_split(
      request.root, request.split, request.features, request.class_names, **checks
    )

  def list_images(self, root: str, split: str) -> folder_formats.Listing | None:
    if not exists(root, split):
      return None
    return folder_formats.Listing(open_index(root, split))


def read_split(
  root: str,
  split: str,
  features: Iterable[str],
  class_names: Sequence[str] | None = None,
  parse: ParseFunction | None = None,
  broken: str = 'error',
  max_pixels: int | None = None,
  workdir: str | None = None,
  channels: int | None = None,
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
  """Reads the requested features of a split, see sources.open_split.

  Args:
    root: folder of the data set.
    split: name of the split, or a slice or sum of splits.
    features: names of the features, see records.resolve.
    class_names: names of the classes of 'label', by default those of the split.
    parse: returns the lines of a part of the split; by default those of its manifest.
    broken: see checking.usable, as for `max_pixels`, `workdir` and `channels`.
    max_pixels: limit on the size of an image.
    workdir: folder of the run, where the results of checks are stored.

  Returns:
    The features by name, tensors and RaggedTensors [n, ...], in the order of
    `folder.list_split`, where 'image' is an index.Paths and 'label' int64 [n, L]; and
    {feature: names of its classes}.
  """
  requested = tuple(features)

  def parse_examples() -> manifest_cache.Examples:
    return _parse_examples(
      root, split, requested, class_names, parse or manifest_files.parse
    )

  if parse is None:
    examples = manifest_cache.parse_once(
      root, split, requested, class_names, parse_examples
    )
  else:
    examples = parse_examples()
  index = examples.index
  checking.recall_listed(index, split, 'jsonl', workdir)

  def describe(number: int) -> str:
    [path] = index.paths(index.order[number : number + 1])
    return f'{examples.where(number)}: {os.fsdecode(path)}'

  paths = checking.usable(
    [(index, index.order)],
    f'{root}/{split}',
    broken,
    max_pixels,
    describe,
    workdir,
    channels=channels,
  )
  [(_, rows)] = paths.parts
  numbers = np.flatnonzero(np.isin(index.order, rows))
  columns = {}
  for name, column in examples.columns.items():
    if name == 'image':
      columns[name] = paths
      continue
    if len(numbers) < len(index):
      column = tf.gather(column, numbers)
    if name == 'label':
      column = _trim_labels(column, numbers, examples)
    columns[name] = column
  return columns, dict(examples.names)


def _parse_examples(
  root: str,
  split: str,
  features: tuple[str, ...],
  class_names: Sequence[str] | None,
  parse: ParseFunction,
) -> manifest_cache.Examples:
  """Parses the lines of a split, see `read_split`."""
  lines: list[manifest_files.Line] = []
  numbers: list[int] = []  # Numbers of the lines in the slice.
  for base, instruction in slices.parts(split):
    new_lines = parse(root, base)
    top = os.path.join(root, base)
    order = index_lib.hash_order(line.key(top) for line in new_lines)
    for number in _select(order, base, instruction, new_lines):
      numbers.append(len(lines) + number)
    lines += new_lines
  available = manifest_columns.list_features(lines)
  where = f"manifest '{lines[0].file}'"
  requested = records.resolve(features, available, where, 'column')
  selected = [lines[i] for i in numbers]
  paths = [line.image for line in selected]
  index = index_lib.from_paths(root, f'{split}.jsonl', paths)
  names = _read_class_names(root)
  if class_names is not None:
    names['label'] = tuple(class_names)
  columns = {}
  for name in requested:
    if name == 'image':
      columns[name] = tf.zeros([0])  # The index has the paths.
    elif name == 'label':
      names[name] = manifest_columns.label_names(lines, names.get(name))
      columns[name] = manifest_columns.label_tensor(lines, numbers, names[name])
    else:
      column = manifest_columns.feature_tensor(name, lines, names.get(name))
      columns[name] = tf.gather(column, numbers)
  manifests = list(dict.fromkeys(line.file for line in lines))
  file_numbers = {path: i for i, path in enumerate(manifests)}
  places = []
  for line in selected:
    places.append(f'{file_numbers[line.file]}:{line.place}'.encode())
  names = {name: names[name] for name in requested if name in names}
  return manifest_cache.Examples(index, manifests, np.array(places), columns, names)


def select_lines(root: str, base: str, instruction: str) -> list[manifest_files.Line]:
  """Returns the lines of a part of a split, in the order of `read_split`."""
  lines = manifest_files.parse(root, base)
  top = os.path.join(root, base)
  order = index_lib.hash_order(line.key(top) for line in lines)
  return [lines[number] for number in _select(order, base, instruction, lines)]


def _select(
  order: Sequence[int],
  base: str,
  instruction: str,
  lines: Sequence[manifest_files.Line],
) -> Sequence[int]:
  """Returns the numbers of the lines in a slice or a fold, in their order."""
  fold = folds.parse(instruction)
  if fold is None:
    return slices.take(order, base, instruction)
  ordered = [lines[number] for number in order]
  strata = [json.dumps(line.labels()) for line in ordered]
  groups = None
  if any(_GROUP in line.values for line in lines):
    groups = [_group_of(line) for line in ordered]
  return folds.take(np.array(order), base, fold, strata, groups).tolist()


def _group_of(line: manifest_files.Line) -> int | str:
  """Returns the group of a line, which is in one fold with all lines of the group."""
  group = line.get(_GROUP)
  if not isinstance(group, int | str):
    raise ValueError(
      f'{line.where}: `{_GROUP}` is {manifest_files.short(group)}, but folds need a '
      'string or an integer, such as the patient, on every line'
    )
  return group


def _trim_labels(
  labels: 'tf.Tensor', numbers: np.ndarray, examples: manifest_cache.Examples
) -> 'tf.Tensor':
  """Returns the labels of some examples without needless padding; warns of none."""
  sizes = np.sum(labels.numpy() >= 0, axis=1)
  unlabelled = numbers[sizes == 0]
  if len(unlabelled):
    logging.warning(
      'Images without a label do not count: %d of %d, the first: %s',
      len(unlabelled),
      len(numbers),
      examples.where(unlabelled[0]),
    )
  return labels[:, : max(1, sizes.max())]


def _read_class_names(root: str) -> dict[str, tuple[str, ...]]:
  """Reads `root/classes.json`: class names by feature."""
  path = os.path.join(root, 'classes.json')
  if not tf.io.gfile.exists(path):
    return {}
  content = image_files.read_file(path)
  try:
    classes = typed_json.decode(content, list[str] | dict[str, list[str]], unique=True)
  except ValueError as e:
    raise ValueError(
      f"'{path}' must be a list of class names, or an object with such a list for "
      f'each feature: {e}'
    ) from e
  if isinstance(classes, list):
    classes = {'label': classes}
  return {feature: tuple(names) for feature, names in classes.items()}


def open_index(
  root: str, split: str, parse: ParseFunction = manifest_files.parse
) -> index_lib.Index:
  """Returns the index of the images of a manifest; see `read_split` for `parse`."""
  paths = [line.image for line in parse(root, split)]
  return checking.open_listed(root, split, 'jsonl', paths)
