"""Examples of a manifest, which a machine parses once if the manifest is large.

They are stored in the cache of this package, in a folder named after the arguments, and
the sizes and times of the files, and memory-mapped from there.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
from typing import Any

from absl import logging
import numpy as np

from vit_jax import console
from vit_jax.data import manifest_files, slices
from vit_jax.data.images import image_files, index as index_lib
from vit_jax.data.lazy import tf
from vit_jax.distributed import files

LARGE = 2**20  # Bytes; a smaller manifest is parsed at every start.
_VERSION = 4  # Format of the stored examples.


@dataclasses.dataclass(frozen=True)
class Examples:
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


@dataclasses.dataclass(frozen=True)
class _Place:
  """Where the examples of a split are stored."""

  root: str
  split: str
  name: str  # Hash of the paths of the manifests.
  key: str  # Hash of all arguments and of the stamps.
  stamps: list[list]  # Path, size and time of each file that was parsed.

  @property
  def parent(self) -> pathlib.Path:
    return console.cache_folder() / 'manifests'

  @property
  def folder(self) -> pathlib.Path:
    return self.parent / f'{self.name}-{self.key}'


def parse_once(
  root: str,
  split: str,
  features: tuple[str, ...],
  class_names: Sequence[str] | None,
  parse: Callable[[], Examples],
) -> Examples:
  """Returns the stored examples of a large manifest, or those that `parse` returns."""
  place = _find_place(root, split, features, class_names)
  if place is None:
    return parse()
  examples = None
  try:
    examples = _load(place)
    if examples is not None:
      return examples
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place.parent / f'{place.name}.lock', 'wb') as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)  # Other processes wait for the first to parse.
      examples = _load(place)
      if examples is None:
        examples = parse()
        _remove_old(place)
        with files.new_folder(place.folder) as new_folder:
          _save(new_folder, examples, place.stamps)
  except (OSError, tf.errors.OpError) as e:
    logging.warning("The lines of '%s' cannot be stored: %s", place.stamps[0][0], e)
  return parse() if examples is None else examples


def _find_place(
  root: str,
  split: str,
  features: tuple[str, ...],
  class_names: Sequence[str] | None,
) -> _Place | None:
  """Returns where examples are stored; None if the manifests are small or missing."""
  manifests = []
  for base in slices.bases(split):
    path = manifest_files.find(root, base)
    if path is None:
      return None
    manifests.append(path)
  paths = list(manifests)
  classes = os.path.join(root, 'classes.json')
  if tf.io.gfile.exists(classes):
    paths.append(classes)
  stamps = []
  num_bytes = 0
  for path in paths:
    size, time = image_files.size_and_time(path)
    stamps.append([path, size, time])
    num_bytes += size
  if num_bytes < LARGE:
    return None
  name = _digest(os.path.abspath(root), manifests)
  key = _digest(_VERSION, root, split, features, class_names, stamps)
  return _Place(root, split, name, key, stamps)


def _digest(*values: Any) -> str:
  """Returns a hash of values of JSON."""
  return files.digest([json.dumps(values).encode()])


def _remove_old(place: _Place) -> None:
  """Removes what was stored of earlier versions of a manifest, or incompletely."""
  parent, name = place.parent, place.name
  for old in [*parent.glob(f'{name}-*'), *parent.glob(f'.{name}-*.tmp')]:
    try:
      facts = json.loads((old / 'facts.json').read_text())
      is_current = facts['stamps'] == place.stamps
    except (OSError, ValueError, KeyError):
      is_current = False
    # Damaged, or left by a kill.
    is_incomplete = old == place.folder or old.suffix == '.tmp'
    if is_incomplete or not is_current:
      shutil.rmtree(old, ignore_errors=True)


def _save(folder: pathlib.Path, examples: Examples, stamps: list[list]) -> None:
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


def _load(place: _Place) -> Examples | None:
  """Returns what `_save` wrote; None if it is missing or damaged."""
  folder, root = place.folder, place.root
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
    index = index_lib.Index.from_arrays(root, f'{place.split}.jsonl', arrays)
    index.top = root if '://' in root else ''
    names = {name: tuple(classes) for name, classes in facts['names'].items()}
    return Examples(index, facts['files'], arrays['lines'], columns, names)
  except Exception as e:  # NumPy and TensorFlow raise various errors.
    logging.warning("'%s' is damaged: writing it again: %s", folder, e)
    return None


def _load_tensor(arrays: Mapping[str, np.ndarray], name: str) -> 'tf.Tensor':
  if name in arrays:
    return tf.constant(arrays[name])
  return tf.io.parse_tensor(arrays[f'{name}.text'].tobytes(), tf.string)
