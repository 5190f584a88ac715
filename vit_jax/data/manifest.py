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

from collections.abc import Callable, Iterable, Sequence
import fcntl
import itertools
import json
import os
import shutil
from typing import Any, NamedTuple

from absl import logging
import numpy as np

from vit_jax import console
from vit_jax.data import checking, manifest_files, records, slices, typed_json
from vit_jax.data.images import image_files, index as index_lib
from vit_jax.data.lazy import tf
from vit_jax.distributed import files

# A greater class number is taken for an id: each class has a row of the head.
_MOST_CLASSES = 10**6
_MOST_LEVELS = 8  # Of lists in lists.
_LARGE = 2**20  # Bytes; a smaller manifest is parsed at every start.
_VERSION = 4  # Of what is stored of a manifest.
_DTYPES = {bool: 'bool', int: 'int64', float: 'float32', str: 'string'}


def exists(root: str, split: str) -> bool:
  """Returns whether a folder has a manifest for a split."""
  return any(manifest_files.find(root, base) for base in slices.bases(split))


def read_split(
  root: str,
  split: str,
  features: Iterable[str],
  class_names: Sequence[str] | None = None,
  parse: Callable[[str, str], list[manifest_files.Line]] | None = None,
  broken: str = 'error',
  max_pixels: int | None = None,
  workdir=None,
):
  """Reads the wanted features of a split, see sources.open_split.

  `parse` maps (root, part of the split) to lines; by default it reads the
  manifest. See checking.usable for `broken`, `max_pixels` and `workdir`.

  Returns the features by name, tensors and RaggedTensors [n, ...], in the order of
  `folder.list_split`, where 'image' is an index.Paths and 'label' int64 [n, L]; and
  {feature: names of its classes}.
  """
  arguments = root, split, tuple(features), class_names
  if parse is None:
    listed = _stored(*arguments)
  else:
    listed = _list(*arguments, parse)
  index, names = listed.index, dict(listed.names)
  checking.recall_listed(index, split, 'jsonl', workdir)

  def named(i):
    return f'{listed.where(i)}: {os.fsdecode(index.paths(index.order[i : i + 1])[0])}'

  paths = checking.usable(
    [(index, index.order)], f'{root}/{split}', broken, max_pixels, named, workdir
  )
  [(_, rows)] = paths.parts
  kept = np.flatnonzero(np.isin(index.order, rows))
  columns = {}
  for name, column in listed.columns.items():
    if name == 'image':
      columns[name] = paths
      continue
    columns[name] = column if len(kept) == len(index) else tf.gather(column, kept)
    if name == 'label':
      columns[name] = _trimmed(columns[name], kept, listed)
  return columns, names


class _Listed(NamedTuple):
  """The images of a split in order, and their features."""

  index: index_lib.Index
  files: list[str]  # Paths of manifests.
  lines: np.ndarray  # bytes [n], b'0:17' for line 17 of files[0].
  columns: dict[str, Any]  # Tensors [n, ...]; 'image' is left empty.
  names: dict[str, tuple[str, ...]]  # Names of classes, by feature.

  def where(self, i) -> str:
    file, _, line = self.lines[i].decode().partition(':')
    return f'{self.files[int(file)]}:{line}'


def _list(root, split, features, class_names, parse=None) -> _Listed:
  """Parses manifests, by default with `manifest_files.parse`."""
  parse = parse or manifest_files.parse
  lines, taken = [], []  # All lines, and the numbers of the lines in the slice.
  for base, instruction in slices.parts(split):
    new_lines, top = parse(root, base), os.path.join(root, base)
    order = index_lib.hash_order(line.key(top) for line in new_lines)
    chosen = slices.take(order, base, instruction)
    taken += [len(lines) + number for number in chosen]
    lines += new_lines
  wanted = records.resolve(features, _available(lines), f"manifest '{lines[0].file}'")
  paths = [lines[i].image for i in taken]
  index = index_lib.of_paths(root, f'{split}.jsonl', paths)
  names = _class_files(root)
  if class_names is not None:
    names['label'] = tuple(class_names)
  columns = {}
  for name in wanted:
    if name == 'image':
      columns[name] = tf.zeros([0])  # The index has the paths.
    elif name == 'label':
      names[name] = _label_names(lines, names.get(name))
      columns[name] = _labels(lines, taken, names[name])
    else:
      columns[name] = tf.gather(_column(name, lines, names.get(name)), taken)
  found_in = list(dict.fromkeys(line.file for line in lines))
  number = {path: i for i, path in enumerate(found_in)}
  places = ((number[lines[i].file], lines[i].place) for i in taken)
  places = np.array([b'%d:%s' % (file, str(x).encode()) for file, x in places])
  names = {name: names[name] for name in wanted if name in names}
  return _Listed(index, found_in, places, columns, names)


def _stored(root, split, features, class_names) -> _Listed:
  """Returns the same as `_list`; a large manifest is parsed once per machine."""
  manifests = [manifest_files.find(root, base) for base in slices.bases(split)]
  if None in manifests:
    return _list(root, split, features, class_names)
  classes = os.path.join(root, 'classes.json')
  paths = [*manifests, classes] if tf.io.gfile.exists(classes) else manifests
  stamps = [[path, *image_files.size_and_time(path)] for path in paths]
  if sum(size for _, size, _ in stamps) < _LARGE:
    return _list(root, split, features, class_names)
  # In the cache, in a folder named after the arguments, and sizes and times of files.
  what = os.path.abspath(root), manifests
  call = _VERSION, root, split, features, class_names, stamps
  name, key = (files.digest([json.dumps(x).encode()]) for x in (what, call))
  top, listed = console.cache_folder() / 'manifests', None
  folder = top / f'{name}-{key}'
  try:
    listed = _load(folder, root, split)
    if listed is not None:
      return listed
    top.mkdir(parents=True, exist_ok=True)
    with open(top / f'{name}.lock', 'wb') as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)  # The others wait for the first to parse.
      listed = _load(folder, root, split)
      if listed is None:
        listed = _list(root, split, features, class_names)
        _remove_old(top, name, folder, stamps)
        with files.new_folder(folder) as new:
          _save(new, listed, stamps)
  except (OSError, tf.errors.OpError) as e:
    logging.warning("The lines of '%s' cannot be stored: %s", manifests[0], e)
  return listed or _list(root, split, features, class_names)


def _remove_old(top, name, folder, stamps):
  """Removes what was stored of earlier versions of a manifest, or incompletely."""
  for old in [*top.glob(f'{name}-*'), *top.glob(f'.{name}-*.tmp')]:
    try:
      kept = json.loads((old / 'facts.json').read_text())['stamps'] == stamps
    except (OSError, ValueError, KeyError):
      kept = False
    if not kept or old == folder or old.suffix == '.tmp':  # Damaged, or left by kill.
      shutil.rmtree(old, ignore_errors=True)


def _save(folder, listed: _Listed, stamps):
  """Writes arrays, what they are, and a hash of all; see `_load`."""
  arrays = {'lines': listed.lines, **listed.index.arrays()}
  kinds = {}
  for i, (name, column) in enumerate(listed.columns.items()):
    ragged = isinstance(column, tf.RaggedTensor)
    tensors = [column.flat_values, *column.nested_row_splits] if ragged else [column]
    kinds[name] = len(tensors)
    for j, tensor in enumerate(tensors):
      if tensor.dtype == tf.string:
        content = tf.io.serialize_tensor(tensor).numpy()
        arrays[f'{i}.{j}.text'] = np.frombuffer(content, np.uint8)
      else:
        arrays[f'{i}.{j}'] = tensor.numpy()
  for name, array in arrays.items():
    np.save(folder / f'{name}.npy', array)
  facts = {
    'files': listed.files,
    'stamps': stamps,
    'kinds': kinds,
    'names': listed.names,
  }
  text = json.dumps(facts)
  (folder / 'facts.json').write_text(text)
  (folder / 'hash').write_text(_hash(text, arrays))


def _hash(text, arrays) -> str:
  """Returns a hash of a text and of the names, types, shapes and values of arrays."""
  parts = [text.encode()]
  for name, array in sorted(arrays.items()):
    kind = f'{name} {array.dtype.str} {array.shape}'
    parts += kind.encode(), np.ascontiguousarray(array)
  return files.digest(parts)


def _load(folder, root, split) -> _Listed | None:
  """Returns what `_save` wrote; None if it is missing or damaged."""
  if not folder.exists():
    return None
  try:
    text = (folder / 'facts.json').read_text()
    arrays = {x.stem: np.load(x, mmap_mode='r') for x in folder.glob('*.npy')}
    if _hash(text, arrays) != (folder / 'hash').read_text():
      raise ValueError('its content has changed')
    facts, columns = json.loads(text), {}
    for i, (name, count) in enumerate(facts['kinds'].items()):
      tensors = []
      for j in range(count):
        if f'{i}.{j}' in arrays:
          tensors.append(tf.constant(arrays[f'{i}.{j}']))
        else:
          content = arrays[f'{i}.{j}.text'].tobytes()
          tensors.append(tf.io.parse_tensor(content, tf.string))
      flat, *splits = tensors
      ragged = tf.RaggedTensor.from_nested_row_splits
      columns[name] = ragged(flat, splits) if splits else flat
    index = index_lib.Index.of_arrays(root, f'{split}.jsonl', arrays)
    index.top = root if '://' in root else ''
    names = {name: tuple(x) for name, x in facts['names'].items()}
    return _Listed(index, facts['files'], arrays['lines'], columns, names)
  except Exception as e:  # NumPy and TensorFlow raise various errors.
    logging.warning("'%s' is damaged: writing it again: %s", folder, e)
    return None


def open_index(
  root: str,
  split: str,
  parse: Callable[[str, str], list[manifest_files.Line]] | None = None,
) -> index_lib.Index:
  """Returns the index of the images of a manifest; see `read_split` for `parse`."""
  paths = [line.image for line in (parse or manifest_files.parse)(root, split)]
  return checking.open_listed(root, split, 'jsonl', paths)


def _available(lines):
  """Returns the names of all features of a manifest."""
  names = dict.fromkeys(name for line in lines for name in line.values)
  # An empty list of dicts has the name of the dicts, which is not a feature.
  dicts = {parent for name in names for parent in manifest_files.parents(name)}
  return [name for name in names if name not in dicts]


def _class_files(root) -> dict[str, tuple[str, ...]]:
  """Reads `root/classes.json`: class names by feature."""
  path = os.path.join(root, 'classes.json')
  if not tf.io.gfile.exists(path):
    return {}
  content = image_files.read_file(path)
  try:
    found = typed_json.decode(content, list[str] | dict[str, list[str]])
    json.loads(content, object_pairs_hook=files.check_unique)
  except ValueError as e:
    raise ValueError(
      f"'{path}' must be a list of class names, or an object with such a list for "
      f'each feature: {e}'
    ) from e
  if isinstance(found, list):
    found = {'label': found}
  return {feature: tuple(names) for feature, names in found.items()}


def _label_names(lines, names) -> tuple[str, ...]:
  """Checks all labels; returns the class names."""
  first, seen = None, set()  # The first label with its line, and all labels.
  most = _MOST_CLASSES if names is None else np.inf
  for line in lines:
    for label in line.labels():
      first, wrong = first or (label, line.where), ''
      if type(label) not in (int, str):
        wrong = 'use the name or the number of a class, or a list of them'
      elif type(label) is not type(first[0]):
        wrong = f'names and numbers cannot be mixed, see {first[1]}'
      elif type(label) is int and not 0 <= label < most:
        wrong = (
          f'class numbers are 0 to {_MOST_CLASSES - 1:,}, and null means no label; '
          'renumber the classes, or use their names (strings)'
        )
      if wrong:
        raise ValueError(
          f'{line.where}: `label` is {manifest_files.short(label)}: {wrong}'
        )
      seen.add(label)
  if names is not None:
    return names
  if first is None:
    raise ValueError(f'{lines[0].where}: neither this line nor any other has a `label`')
  if isinstance(first[0], int):
    return tuple(str(i) for i in range(max(seen) + 1))
  return tuple(sorted(seen))


def _numbers(values, lines, names) -> list:
  """Converts class names, also in nested lists, to numbers; checks numbers."""
  table = {name: i for i, name in enumerate(names)}
  repeated = set(records.repeated_names(names))

  def number(value, where):
    if isinstance(value, list):
      return [number(x, where) for x in value]
    if type(value) is int and 0 <= value < len(names):
      return value
    if isinstance(value, str) and value in repeated:
      raise ValueError(
        f'{where}: several classes are named {manifest_files.short(value)}: write the number of the '
        'class'
      )
    if isinstance(value, str) and value in table:
      return table[value]
    raise ValueError(
      f'{where}: {manifest_files.short(value)} is not one of the {len(names)} classes '
      f'{list(names[:5])}{" ..." if len(names) > 5 else ""} of the training data '
      'or classes.json'
    )

  return [number(value, line.where) for value, line in zip(values, lines)]


def _labels(lines, taken, names):
  """Returns class numbers of the lines taken, int64 [n, L], padded with -1."""
  rows = _numbers([line.labels() for line in lines], lines, names)
  lengths = np.array([len(rows[i]) for i in taken])
  padded = np.full([len(taken), max(1, *lengths)], -1, np.int64)
  filled = np.arange(padded.shape[1]) < lengths[:, None]
  padded[filled] = list(itertools.chain.from_iterable(rows[i] for i in taken))
  return tf.constant(padded)


def _trimmed(labels, kept, listed):
  """Returns the labels of the images kept without needless padding; warns of none."""
  sizes = np.sum(labels.numpy() >= 0, axis=1)
  missing = kept[sizes == 0]
  if len(missing):
    logging.warning(
      'Images without a label do not count: %d of %d, the first: %s',
      len(missing), len(kept), listed.where(missing[0]),
    )  # fmt: skip
  return labels[:, : max(1, sizes.max())]


def _column(name, lines, names):
  """Returns a feature of all lines, as a tensor or RaggedTensor [n, ...]."""
  values = [line.get(name) for line in lines]
  for line, value in zip(lines, values):
    if value is None:
      raise ValueError(f"{line.where}: there is no '{name}', which other lines have")
  if names is not None:
    values = _numbers(values, lines, names)
  level, lengths = _flat(name, values, lines)
  # Ragged up to the last dimension of varying size. A size that is 0 everywhere counts
  # as varying, since tf.data cannot unbatch a tensor without elements.
  shape = []
  while lengths and len(set(lengths[-1])) == 1 and lengths[-1][0]:
    shape.insert(0, lengths.pop()[0])
  types = set(map(type, level))
  [kind] = types if len(types) == 1 else [float]
  flat = tf.reshape(tf.constant(level, _DTYPES[kind]), [-1, *shape])
  return tf.RaggedTensor.from_nested_row_lengths(flat, lengths) if lengths else flat


def _flat(name, values, lines):
  """Returns the innermost values of nested lists, and the lengths of each level."""
  level, owners, lengths = values, lines, []  # Values, and the line of each.
  while level:
    kinds = [float if type(x) is int else type(x) for x in level]
    for kind, line in zip(kinds, owners):
      if kind is not kinds[0] or kind not in (*_DTYPES, list):
        raise ValueError(
          f"{line.where}: '{name}' is {manifest_files.short(line.get(name))}, and "
          f'{manifest_files.short(lines[0].get(name))} on the first line: use strings, booleans '
          'or numbers, or lists of one of these, equally nested on all lines'
        )
    if kinds[0] is not list:
      break
    if len(lengths) == _MOST_LEVELS:
      raise ValueError(
        f"{owners[0].where}: '{name}' has lists in more than {_MOST_LEVELS} levels"
      )
    lengths.append([len(x) for x in level])
    owners = [line for line, x in zip(owners, level) for _ in x]
    level = [y for x in level for y in x]
  if level and kinds[0] is float:
    largest = float(np.finfo(np.float32).max)
    limits = {'int64': (-(2**63), 2**63 - 1), 'float32': (-largest, largest)}
    dtype = 'int64' if all(type(value) is int for value in level) else 'float32'
    low, high = limits[dtype]
    for value, line in zip(level, owners):
      if not low <= value <= high:
        raise ValueError(
          f"{line.where}: '{name}' is {value}, too large for {dtype}: scale its values"
        )
  return level, lengths
