"""Finds and parses the files of a manifest: JSON lines, or `metadata.csv`.

vit_jax/data/manifest.py describes their places and their content.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence
import json
import os
import re
from typing import Any, NamedTuple

from vit_jax import console
from vit_jax.data import typed_json
from vit_jax.data.images import image_files, listing
from vit_jax.data.lazy import tf
from vit_jax.distributed import text_files

_FILE_NAME = 'file_name'  # The key of an image's path in such a manifest.
_KEY_END = re.compile(r'"\s*:')
_INTEGER = re.compile('-?(0|[1-9][0-9]*)')
_DECIMAL = re.compile(r'-?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][-+]?[0-9]+)?')


class Line(NamedTuple):
  """A line of a manifest, an image."""

  file: str  # Path of the file that lists it.
  place: int | str  # Number of the line, or another place in the file.
  folder: str  # Folder that the image's path is relative to.
  values: dict[str, Any]  # By feature.

  @property
  def where(self) -> str:
    """Names the line in messages."""
    return f'{self.file}:{self.place}'

  @property
  def image(self) -> str:
    """Path of the image."""
    image = self.values['image']
    return image if '://' in image else os.path.join(self.folder, image)

  def key(self, top: str) -> str:
    """Returns the sort key, the same as in a listing of the folder `top`."""
    inside = self.image.startswith(f'{top}/')
    return self.image.removeprefix(top) if inside else self.values['image']

  def get(self, name: str) -> Any:
    """Returns a value; None if it is null or missing."""
    if name in self.values:
      return self.values[name]
    for parent in parents(name):
      if self.values.get(parent) == []:
        return []  # An empty list of dicts is an empty list of each of their values.
    return None

  def labels(self) -> list:
    """Returns `label` as a list; [] without a label."""
    label = self.get('label')
    if label is None:
      return []
    return label if isinstance(label, list) else [label]


def parents(name: str) -> list[str]:
  """Returns 'a' and 'a/b' for 'a/b/c'."""
  return [name[:i] for i, c in enumerate(name) if c == '/']


def find(root: str, base: str) -> str | None:
  """Returns the path of the manifest of a split; None if there is none.

  It is `<split>.jsonl`, or metadata in the folder of the split or, if it lists images
  of that folder, in `root`. ValueError for several metadata files in one folder.
  """
  manifest = os.path.join(root, f'{base}.jsonl')
  if tf.io.gfile.exists(manifest):
    return manifest
  path = _find_metadata(os.path.join(root, base))
  if path is not None:
    return path
  path = _find_metadata(root)
  if path is not None and any(_split_rows(path, base)):
    return path
  return None


def _find_metadata(folder: str) -> str | None:
  """Returns the path of the metadata file of a folder, if it has one."""
  paths = []
  for name in listing.METADATA:
    path = os.path.join(folder, name)
    if tf.io.gfile.exists(path):
      paths.append(path)
  if len(paths) > 1:
    raise ValueError(
      f"'{folder}' has both {' and '.join(listing.METADATA)}: remove or rename one of them"
    )
  return paths[0] if paths else None


def parse(root: str, base: str) -> list[Line]:
  """Returns the lines of the manifest of a split."""
  path = find(root, base)
  if path is None:
    raise FileNotFoundError(
      f"there is no manifest '{os.path.join(root, base)}.jsonl', though another part "
      'of the split has one (config.pp.train, config.pp.test)'
    )
  if os.path.basename(path) not in listing.METADATA:
    return [Line(path, number, root, values) for number, values in _all_rows(path)]
  return parse_metadata(root, base, [path])


def parse_metadata(root: str, base: str, paths: Iterable[str]) -> list[Line]:
  """Returns the lines of the metadata files of a split.

  Where no line has a label, images in class folders have theirs.
  """
  lines = []
  for path in paths:
    folder, name = os.path.split(path)
    if path == os.path.join(root, name):
      console.log(f"Split '{base}' of '{root}' is listed in '{path}'.")
      rows = list(_split_rows(path, base))
    else:
      rows = _all_rows(path)
    lines += [Line(path, number, folder, values) for number, values in rows]
  if any('label' in line.values for line in lines):
    return lines
  return [line._replace(values=_with_folder(root, base, line)) for line in lines]


def _with_folder(root: str, base: str, line: Line) -> dict[str, Any]:
  """Returns the values of a line with its class folder, if it has one, as label."""
  folder = os.path.relpath(line.folder, root)
  path = os.path.normpath(os.path.join(folder, line.values['image']))
  if os.path.normpath(base) != '.':
    if not path.startswith(f'{base}/'):
      return line.values
    path = path.removeprefix(f'{base}/')
  label, slash, _ = path.partition('/')
  return {**line.values, 'label': label} if slash and label else line.values


def _split_rows(path: str, base: str) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields the rows of a metadata file whose images are in the folder of a split."""
  header, _, _ = text_files.as_utf8(image_files.read_file(path)).partition(b'\n')
  if _FILE_NAME.encode() not in header:  # It is about something else.
    return
  for number, values in _parsed(path):
    name = values.get(_FILE_NAME)
    if isinstance(name, str) and os.path.normpath(name).startswith(f'{base}/'):
      yield number, _with_image(f'{path}:{number}', values, _FILE_NAME)


def _all_rows(path: str) -> list[tuple[int, dict[str, Any]]]:
  """Returns the number and the values of each line."""
  rows = [
    (number, _with_image(f'{path}:{number}', values, _key(path)))
    for number, values in _parsed(path)
  ]
  if not rows:
    raise ValueError(f"manifest '{path}' is empty: write one image per line")
  return rows


def _key(path: str) -> str:
  """Returns the key of the path of an image in a manifest."""
  return _FILE_NAME if os.path.basename(path) in listing.METADATA else 'image'


def _with_image(where: str, values: dict[str, Any], key: str) -> dict[str, Any]:
  """Returns the values of a line with the path of the image as `image`."""
  image = values.get(key)
  if not isinstance(image, str) or not image or '\0' in image:
    actual = short(image) if key in values else 'missing'
    raise ValueError(f'{where}: `{key}` must be the path of an image, but is {actual}')
  return {'image': values.pop(key), **values}


def _parsed(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields the number and the values of each line that is not blank."""
  content = image_files.read_file(path)
  if path.endswith('.csv'):
    yield from _typed(list(text_files.csv_rows(content, path)))
    return
  for number, line in enumerate(text_files.lines(content, path), 1):
    if line.strip():
      yield number, _parse_line(f'{path}:{number}', line, _key(path))


def _typed(
  rows: Sequence[tuple[int, dict[str, str]]],
) -> Iterator[tuple[int, dict[str, Any]]]:
  """Converts columns of CSV that hold only numbers; an empty value is None."""
  texts = collections.defaultdict(set)
  for _, row in rows:
    for name, text in row.items():
      texts[name].add(text)
  types = {name: _type(column - {''}) for name, column in texts.items()}
  for number, row in rows:
    values = {}
    for name, text in row.items():
      values[name] = types[name](text) if text else None
    yield number, values


def _type(texts: Iterable[str]) -> type:
  """Returns the type of a column; numbers such as 007 are names."""
  if all(map(_INTEGER.fullmatch, texts)):
    return int
  return float if all(map(_DECIMAL.fullmatch, texts)) else str


def _parse_line(where: str, text: str, key: str) -> dict[str, Any]:
  try:
    values = typed_json.decode(text)
  except ValueError as e:
    reason = str(e).removeprefix('JSON is malformed: ')
    raise ValueError(f'{where}: not valid JSON: {reason}') from e
  if not isinstance(values, dict):
    raise ValueError(
      f'{where}: must be an object, {{"{key}": PATH, ...}}, not {short(values)}'
    )
  # A flat object has one quote with a colon for each of its keys.
  if len(_KEY_END.findall(text)) > len(values):
    _check_keys(text, where)
  return dict(_flatten(values, '', where))


def _check_keys(text: str, where: str) -> None:
  """Raises ValueError if an object in a line repeats a key."""
  repeated: list[str] = []

  def collect(pairs: list[tuple[str, Any]]) -> None:
    counts = collections.Counter(name for name, _ in pairs)
    repeated.extend(name for name, count in counts.items() if count > 1)

  json.loads(text, object_pairs_hook=collect)
  if repeated:
    raise ValueError(f"{where}: the key '{repeated[0]}' is repeated: keep one of them")


def short(value: Any) -> str:
  """Returns a value as JSON, cut off for a message."""
  text = json.dumps(value)
  return text if len(text) < 60 else f'{text[:57]}...'


def _flatten(
  values: dict[str, Any], prefix: str, where: str
) -> Iterator[tuple[str, Any]]:
  """Yields (name, value) for nested dicts, with names joined by '/'."""
  for key, value in values.items():
    name = prefix + key
    if isinstance(value, dict):
      yield from _flatten(value, f'{name}/', where)
    elif isinstance(value, list) and any(isinstance(x, dict) for x in value):
      if not all(isinstance(x, dict) for x in value):
        raise ValueError(f"{where}: '{name}' lists objects and other values")
      items = [dict(_flatten(x, f'{name}/', where)) for x in value]
      if any(item.keys() != items[0].keys() for item in items):
        raise ValueError(
          f"{where}: the objects of '{name}' must all have the same keys"
        )
      for inner in items[0]:
        yield inner, [item[inner] for item in items]
    else:
      yield name, value
