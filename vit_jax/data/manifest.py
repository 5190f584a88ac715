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

`root/<split>/metadata.jsonl` or `metadata.csv`, as in an "imagefolder" of Hugging
Face's `datasets`, is such a manifest too: its `file_name` is the path of an image,
relative to its folder. Such files may also be in folders below `root/<split>`, each
for its images (see vit_jax/data/folder.py), or in `root`, for paths that begin with
`<split>/`. As in `datasets`, images that are not listed are left out, and labels win
over class folders; where no line has a label, images in class folders, `<class>/1.jpg`,
have theirs. A column of CSV with only numbers has numbers, and an empty value is null.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import fcntl
import itertools
import json
import os
import pathlib
import shutil
from typing import Any, NamedTuple

from absl import logging
import numpy as np

from vit_jax import console
from vit_jax.data import (
  checking,
  folder_formats,
  manifest_files,
  records,
  slices,
  typed_json,
)
from vit_jax.data.images import image_files, index as index_lib
from vit_jax.data.lazy import tf
from vit_jax.distributed import files

# A greater class number is taken for an id: each class has a row of the head.
_MOST_CLASSES = 10**6
_MOST_LEVELS = 8  # Nesting depth of lists.
_LARGE = 2**20  # Bytes; a smaller manifest is parsed at every start.
_VERSION = 4  # Format of the stored manifests.
_DTYPES = {bool: 'bool', int: 'int64', float: 'float32', str: 'string'}


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
  parse: Callable[[str, str], list[manifest_files.Line]] | None = None,
  broken: str = 'error',
  max_pixels: int | None = None,
  workdir: str | None = None,
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
  """Reads the requested features of a split, see sources.open_split.

  Args:
    root: folder of the data set.
    split: name of the split, or a slice or sum of splits.
    features: names of the features, see records.resolve.
    class_names: names of the classes of 'label', by default those of the split.
    parse: maps (root, part of the split) to lines; by default it reads the manifest.
    broken: see checking.usable, as for `max_pixels` and `workdir`.
    max_pixels: limit on the size of an image.
    workdir: folder of the run, where the results of checks are stored.

  Returns:
    The features by name, tensors and RaggedTensors [n, ...], in the order of
    `folder.list_split`, where 'image' is an index.Paths and 'label' int64 [n, L]; and
    {feature: names of its classes}.
  """
  if parse is None:
    examples = _stored(root, split, tuple(features), class_names)
  else:
    examples = _parse_examples(root, split, tuple(features), class_names, parse)
  index = examples.index
  checking.recall_listed(index, split, 'jsonl', workdir)

  def describe(number: int) -> str:
    [path] = index.paths(index.order[number : number + 1])
    return f'{examples.where(number)}: {os.fsdecode(path)}'

  paths = checking.usable(
    [(index, index.order)], f'{root}/{split}', broken, max_pixels, describe, workdir
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
      column = _trimmed(column, numbers, examples)
    columns[name] = column
  return columns, dict(examples.names)


class _Examples(NamedTuple):
  """The images of a split in order, and their features."""

  index: index_lib.Index
  files: list[str]  # Paths of manifests.
  lines: np.ndarray  # bytes [n], b'0:17' for line 17 of files[0].
  columns: dict[str, Any]  # Tensors [n, ...]; 'image' is left empty.
  names: dict[str, tuple[str, ...]]  # Names of classes, by feature.

  def where(self, number: int) -> str:
    """Names the file and the line of an example in messages."""
    file, _, line = self.lines[number].decode().partition(':')
    return f'{self.files[int(file)]}:{line}'


def _parse_examples(
  root: str,
  split: str,
  features: tuple[str, ...],
  class_names: Sequence[str] | None,
  parse: Callable[[str, str], list[manifest_files.Line]] | None = None,
) -> _Examples:
  """Parses manifests, by default with `manifest_files.parse`."""
  parse = parse or manifest_files.parse
  lines: list[manifest_files.Line] = []
  numbers: list[int] = []  # Numbers of the lines in the slice.
  for base, instruction in slices.parts(split):
    new_lines = parse(root, base)
    top = os.path.join(root, base)
    order = index_lib.hash_order(line.key(top) for line in new_lines)
    for number in slices.take(order, base, instruction):
      numbers.append(len(lines) + number)
    lines += new_lines
  requested = records.resolve(
    features, _available(lines), f"manifest '{lines[0].file}'"
  )
  selected = [lines[i] for i in numbers]
  paths = [line.image for line in selected]
  index = index_lib.from_paths(root, f'{split}.jsonl', paths)
  names = _class_files(root)
  if class_names is not None:
    names['label'] = tuple(class_names)
  columns = {}
  for name in requested:
    if name == 'image':
      columns[name] = tf.zeros([0])  # The index has the paths.
    elif name == 'label':
      names[name] = _label_names(lines, names.get(name))
      columns[name] = _labels(lines, numbers, names[name])
    else:
      columns[name] = tf.gather(_column(name, lines, names.get(name)), numbers)
  manifests = list(dict.fromkeys(line.file for line in lines))
  file_numbers = {path: i for i, path in enumerate(manifests)}
  places = []
  for line in selected:
    places.append(f'{file_numbers[line.file]}:{line.place}'.encode())
  names = {name: names[name] for name in requested if name in names}
  return _Examples(index, manifests, np.array(places), columns, names)


def _stored(
  root: str,
  split: str,
  features: tuple[str, ...],
  class_names: Sequence[str] | None,
) -> _Examples:
  """As `_parse_examples`, but parses a large manifest once per machine."""
  manifests = [manifest_files.find(root, base) for base in slices.bases(split)]
  if None in manifests:
    return _parse_examples(root, split, features, class_names)
  paths = list(manifests)
  classes = os.path.join(root, 'classes.json')
  if tf.io.gfile.exists(classes):
    paths.append(classes)
  stamps = [[path, *image_files.size_and_time(path)] for path in paths]
  if sum(size for _, size, _ in stamps) < _LARGE:
    return _parse_examples(root, split, features, class_names)
  # In the cache, in a folder named after the arguments, and sizes and times of files.
  name = files.digest([json.dumps([os.path.abspath(root), manifests]).encode()])
  arguments = _VERSION, root, split, features, class_names, stamps
  key = files.digest([json.dumps(arguments).encode()])
  top = console.cache_folder() / 'manifests'
  folder = top / f'{name}-{key}'
  examples = None
  try:
    examples = _load(folder, root, split)
    if examples is not None:
      return examples
    top.mkdir(parents=True, exist_ok=True)
    with open(top / f'{name}.lock', 'wb') as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)  # Other processes wait for the first to parse.
      examples = _load(folder, root, split)
      if examples is None:
        examples = _parse_examples(root, split, features, class_names)
        _remove_old(top, name, folder, stamps)
        with files.new_folder(folder) as new_folder:
          _save(new_folder, examples, stamps)
  except (OSError, tf.errors.OpError) as e:
    logging.warning("The lines of '%s' cannot be stored: %s", manifests[0], e)
  if examples is None:
    examples = _parse_examples(root, split, features, class_names)
  return examples


def _remove_old(
  top: pathlib.Path, name: str, folder: pathlib.Path, stamps: list[list]
) -> None:
  """Removes what was stored of earlier versions of a manifest, or incompletely."""
  for old in [*top.glob(f'{name}-*'), *top.glob(f'.{name}-*.tmp')]:
    try:
      facts = json.loads((old / 'facts.json').read_text())
      is_current = facts['stamps'] == stamps
    except (OSError, ValueError, KeyError):
      is_current = False
    is_incomplete = old == folder or old.suffix == '.tmp'  # Damaged, or left by kill.
    if is_incomplete or not is_current:
      shutil.rmtree(old, ignore_errors=True)


def _save(folder: pathlib.Path, examples: _Examples, stamps: list[list]) -> None:
  """Writes arrays, what they are, and a hash of all; see `_load`."""
  arrays = {'lines': examples.lines, **examples.index.arrays()}
  num_tensors = {}
  for i, (name, column) in enumerate(examples.columns.items()):
    tensors = [column]
    if isinstance(column, tf.RaggedTensor):
      tensors = [column.flat_values, *column.nested_row_splits]
    num_tensors[name] = len(tensors)
    for j, tensor in enumerate(tensors):
      if tensor.dtype == tf.string:
        content = tf.io.serialize_tensor(tensor).numpy()
        arrays[f'{i}.{j}.text'] = np.frombuffer(content, np.uint8)
      else:
        arrays[f'{i}.{j}'] = tensor.numpy()
  for name, array in arrays.items():
    np.save(folder / f'{name}.npy', array)
  facts = {
    'files': examples.files,
    'stamps': stamps,
    'kinds': num_tensors,
    'names': examples.names,
  }
  text = json.dumps(facts)
  (folder / 'facts.json').write_text(text)
  (folder / 'hash').write_text(_hash(text, arrays))


def _hash(text: str, arrays: Mapping[str, np.ndarray]) -> str:
  """Returns a hash of a text and of the names, types, shapes and values of arrays."""
  contents = [text.encode()]
  for name, array in sorted(arrays.items()):
    contents.append(f'{name} {array.dtype.str} {array.shape}'.encode())
    contents.append(np.ascontiguousarray(array))
  return files.digest(contents)


def _load(folder: pathlib.Path, root: str, split: str) -> _Examples | None:
  """Returns what `_save` wrote; None if it is missing or damaged."""
  if not folder.exists():
    return None
  try:
    text = (folder / 'facts.json').read_text()
    arrays = {}
    for path in folder.glob('*.npy'):
      arrays[path.stem] = np.load(path, mmap_mode='r')
    if _hash(text, arrays) != (folder / 'hash').read_text():
      raise ValueError('its content has changed')
    facts = json.loads(text)
    columns = {}
    for i, (name, num_tensors) in enumerate(facts['kinds'].items()):
      tensors = [_load_tensor(arrays, f'{i}.{j}') for j in range(num_tensors)]
      column, *splits = tensors
      if splits:
        column = tf.RaggedTensor.from_nested_row_splits(column, splits)
      columns[name] = column
    index = index_lib.Index.from_arrays(root, f'{split}.jsonl', arrays)
    index.top = root if '://' in root else ''
    names = {name: tuple(classes) for name, classes in facts['names'].items()}
    return _Examples(index, facts['files'], arrays['lines'], columns, names)
  except Exception as e:  # NumPy and TensorFlow raise various errors.
    logging.warning("'%s' is damaged: writing it again: %s", folder, e)
    return None


def _load_tensor(arrays: Mapping[str, np.ndarray], name: str) -> 'tf.Tensor':
  if name in arrays:
    return tf.constant(arrays[name])
  return tf.io.parse_tensor(arrays[f'{name}.text'].tobytes(), tf.string)


def open_index(
  root: str,
  split: str,
  parse: Callable[[str, str], list[manifest_files.Line]] | None = None,
) -> index_lib.Index:
  """Returns the index of the images of a manifest; see `read_split` for `parse`."""
  paths = [line.image for line in (parse or manifest_files.parse)(root, split)]
  return checking.open_listed(root, split, 'jsonl', paths)


def _available(lines: Sequence[manifest_files.Line]) -> list[str]:
  """Returns the names of all features of a manifest."""
  names: dict[str, None] = {}  # In the order of the lines.
  for line in lines:
    names.update(dict.fromkeys(line.values))
  # An empty list of dicts has the name of the dicts, which is not a feature.
  dicts: set[str] = set()
  for name in names:
    dicts.update(manifest_files.parents(name))
  return [name for name in names if name not in dicts]


def _class_files(root: str) -> dict[str, tuple[str, ...]]:
  """Reads `root/classes.json`: class names by feature."""
  path = os.path.join(root, 'classes.json')
  if not tf.io.gfile.exists(path):
    return {}
  content = image_files.read_file(path)
  try:
    classes = typed_json.decode(content, list[str] | dict[str, list[str]])
    json.loads(content, object_pairs_hook=files.check_unique)
  except ValueError as e:
    raise ValueError(
      f"'{path}' must be a list of class names, or an object with such a list for "
      f'each feature: {e}'
    ) from e
  if isinstance(classes, list):
    classes = {'label': classes}
  return {feature: tuple(names) for feature, names in classes.items()}


def _label_names(
  lines: Sequence[manifest_files.Line], names: tuple[str, ...] | None
) -> tuple[str, ...]:
  """Checks all labels; returns the class names."""
  limit = _MOST_CLASSES if names is None else np.inf
  first = first_line = None
  labels = set()
  for line in lines:
    for label in line.labels():
      if first_line is None:
        first, first_line = label, line.where
      fault = ''
      if type(label) not in (int, str):
        fault = 'use the name or the number of a class, or a list of them'
      elif type(label) is not type(first):
        fault = f'names and numbers cannot be mixed, see {first_line}'
      elif type(label) is int and not 0 <= label < limit:
        fault = (
          f'class numbers are 0 to {_MOST_CLASSES - 1:,}, and null means no label; '
          'renumber the classes, or use their names (strings)'
        )
      if fault:
        raise ValueError(
          f'{line.where}: `label` is {manifest_files.short(label)}: {fault}'
        )
      labels.add(label)
  if names is not None:
    return names
  if first_line is None:
    raise ValueError(f'{lines[0].where}: neither this line nor any other has a `label`')
  if isinstance(first, int):
    return tuple(str(i) for i in range(max(labels) + 1))
  return tuple(sorted(labels))


def _numbers(
  values: Sequence[Any], lines: Sequence[manifest_files.Line], names: Sequence[str]
) -> list:
  """Converts class names, also in nested lists, to numbers; checks numbers."""
  numbers = {name: i for i, name in enumerate(names)}
  repeated = set(records.repeated_names(names))

  def convert(value: Any, where: str) -> Any:
    if isinstance(value, list):
      return [convert(x, where) for x in value]
    if type(value) is int and 0 <= value < len(names):
      return value
    if isinstance(value, str) and value in repeated:
      raise ValueError(
        f'{where}: several classes are named {manifest_files.short(value)}: write the '
        'number of the class'
      )
    if isinstance(value, str) and value in numbers:
      return numbers[value]
    ellipsis = ' ...' if len(names) > 5 else ''
    raise ValueError(
      f'{where}: {manifest_files.short(value)} is not one of the {len(names)} classes '
      f'{list(names[:5])}{ellipsis} of the training data or classes.json'
    )

  return [convert(value, line.where) for value, line in zip(values, lines)]


def _labels(
  lines: Sequence[manifest_files.Line], numbers: Sequence[int], names: Sequence[str]
) -> 'tf.Tensor':
  """Returns class numbers of lines by their `numbers`, int64 [n, L], padded with -1."""
  rows = _numbers([line.labels() for line in lines], lines, names)
  selected = [rows[i] for i in numbers]
  lengths = np.array([len(row) for row in selected])
  padded = np.full([len(selected), max(1, *lengths)], -1, np.int64)
  is_label = np.arange(padded.shape[1]) < lengths[:, None]
  padded[is_label] = list(itertools.chain.from_iterable(selected))
  return tf.constant(padded)


def _trimmed(
  labels: 'tf.Tensor', numbers: np.ndarray, examples: _Examples
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


def _column(
  name: str, lines: Sequence[manifest_files.Line], names: Sequence[str] | None
) -> 'tf.Tensor | tf.RaggedTensor':
  """Returns a feature of all lines, as a tensor or RaggedTensor [n, ...]."""
  values = [line.get(name) for line in lines]
  for line, value in zip(lines, values):
    if value is None:
      raise ValueError(f"{line.where}: there is no '{name}', which other lines have")
  if names is not None:
    values = _numbers(values, lines, names)
  values, lengths = _flat(name, values, lines)
  # Ragged up to the last dimension of varying size. A size that is 0 everywhere counts
  # as varying, since tf.data cannot unbatch a tensor without elements.
  shape: list[int] = []
  while lengths and len(set(lengths[-1])) == 1 and lengths[-1][0]:
    shape.insert(0, lengths.pop()[0])
  types = set(map(type, values))
  [kind] = types if len(types) == 1 else [float]
  flat = tf.reshape(tf.constant(values, _DTYPES[kind]), [-1, *shape])
  return tf.RaggedTensor.from_nested_row_lengths(flat, lengths) if lengths else flat


def _flat(
  name: str, values: list, lines: Sequence[manifest_files.Line]
) -> tuple[list, list[list[int]]]:
  """Returns the innermost values of nested lists, and the lengths of each level."""
  owners = list(lines)  # The line of each value.
  lengths: list[list[int]] = []
  while values:
    kind = _kind(values[0])
    for value, line in zip(values, owners):
      if _kind(value) is not kind or kind not in (*_DTYPES, list):
        raise ValueError(
          f"{line.where}: '{name}' is {manifest_files.short(line.get(name))}, and "
          f'{manifest_files.short(lines[0].get(name))} on the first line: use strings, '
          'booleans or numbers, or lists of one of these, equally nested on all lines'
        )
    if kind is not list:
      break
    if len(lengths) == _MOST_LEVELS:
      raise ValueError(
        f"{owners[0].where}: '{name}' has lists in more than {_MOST_LEVELS} levels"
      )
    lengths.append([len(value) for value in values])
    inner_owners = []
    for value, line in zip(values, owners):
      inner_owners += [line] * len(value)
    owners = inner_owners
    values = list(itertools.chain.from_iterable(values))
  if values and kind is float:
    _check_range(name, values, owners)
  return values, lengths


def _kind(value: Any) -> type:
  """Returns the type of a value; float for all numbers."""
  return float if type(value) is int else type(value)


def _check_range(
  name: str, values: Sequence[float], lines: Sequence[manifest_files.Line]
) -> None:
  """Raises ValueError if a number is too large for the dtype of all."""
  if all(type(value) is int for value in values):
    dtype, low, high = 'int64', -(2**63), 2**63 - 1
  else:
    dtype, high = 'float32', float(np.finfo(np.float32).max)
    low = -high
  for value, line in zip(values, lines):
    if not low <= value <= high:
      raise ValueError(
        f"{line.where}: '{name}' is {value}, too large for {dtype}: scale its values"
      )
