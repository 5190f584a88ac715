"""Writes tables of predictions with one row per image, for any number of images.

A table is a .parquet, .csv or .jsonl file. The rows of each block of images are
written atomically to a part in the folder `OUT.parts`, so the same command resumes
after a stop or a kill; when all parts are there, they are joined into one file.
Several processes write parts of their own without waiting for each other, and OUT is
then a folder, which readers of Parquet data sets open as one table.

A part is made again if its file is damaged, or the size or time of an image's file
has changed. A table of other weights, images or flags is rejected.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import csv
import io
import json
import os
import time
from typing import Any, NamedTuple

from etils import epath
import google_crc32c
import jax
import numpy as np

from vit_jax import console
from vit_jax.data import records
from vit_jax.data.images import images as images_lib
from vit_jax.data.lazy import tf
from vit_jax.distributed import files, processes, sharding
from vit_jax.inference import engine
from vit_jax.run import lock, stopping

ENDINGS = ('.parquet', '.csv', '.jsonl')
# Readers of Parquet data sets skip names with a `_`.
_FACTS, _LOCK = '_table.json', '_holder.json'
# Images per block: fewest and most, for about a thousand blocks.
_FEWEST, _MOST, _BLOCKS = 64, 4096, 1000
# Errors of a single image; other errors of the storage may concern all images.
_BROKEN = (ValueError, FileNotFoundError, PermissionError)


class Columns(NamedTuple):
  """The columns of a task."""

  # By name: str, int, float or bool; [type] for a list; (type, n) for n values.
  types: Mapping[str, Any]
  # From an image's inputs in `keep` and results of `compute` to its values by name.
  row: Callable[[dict, Any], dict]
  # See Predictor.stream.
  compute: Callable | None = None
  keep: Sequence[str] = ()
  parts: Callable | None = None


def choices(best: Callable, compute: Callable | None = None) -> Columns:
  """Returns the columns of a classifier.

  `best` maps the results of `compute` for an image to pairs of name and probability.
  """

  def row(_, outputs):
    names, shares = zip(*best(outputs))
    return {
      'class': names[0], 'probability': shares[0],
      'classes': names, 'probabilities': shares,
    }  # fmt: skip

  kinds = {
    'class': str, 'probability': float,
    'classes': [str], 'probabilities': [float],
  }  # fmt: skip
  return Columns(kinds, row, compute)


class NoColumns(ValueError):
  """The task has no columns for a table."""


def types(columns: Columns) -> dict[str, Any]:
  """Returns the types of all columns of a table, see Columns."""
  return {'path': str, **columns.types, 'error': str}


class Block(records.Subset):
  """Images of a source read by this process only; broken ones are left out."""

  tolerant = True

  def shapes(self) -> np.ndarray:
    """Returns the sizes of the images, see Source; (1, 1) for broken ones."""
    known = self._source.shapes()
    if known is not None:
      return known[self._indices]

    def shape(number):
      encoded = self.read(self.record(number))['image']
      return number, images_lib.shape_of(encoded)

    data = tf.data.Dataset.range(self.num_examples)
    data = data.map(shape, num_parallel_calls=os.cpu_count())
    found = np.ones((self.num_examples, 2), np.int64)
    for number, shape in data.ignore_errors().as_numpy_iterator():
      found[number] = shape
    return found


def check(out: str | os.PathLike, resumes: bool = True):
  """Raises ValueError unless a table can be written to a path (--out).

  `resumes`: whether an earlier run of the command may have written it.
  """
  path = epath.Path(out)
  if path.is_file() and not (resumes and _facts_path(path).exists()):
    raise ValueError(f"out='{out}' exists: delete it, or give another path (--out)")
  if path.suffix == '.parquet':
    arrow()


def arrow():
  """Returns the module pyarrow; raises ImportError if it is missing."""
  console.needed('pyarrow.parquet', 'tables', 'a Parquet table')
  import pyarrow

  return pyarrow


def rows(
  model,
  source: records.Source,
  columns: Columns,
  blocks: Sequence[range],
  broken: str = 'row',
  stop: Callable[[], bool] = engine.never,
) -> Iterator[tuple[range, list[dict]]]:
  """Yields each block of images with its rows: `path`, the columns, and `error`.

  Blocks are image numbers, ascending. A broken image adds a row with an `error`, or
  raises if `broken` is 'stop'.
  """
  # Images of several sizes arrive out of order, so block by block.
  groups = [[b] for b in blocks] if model.task.CANVASES else [list(blocks)]

  def predicted(make, numbers):
    options = columns.compute, columns.keep, columns.parts, stop
    for i, inputs, outputs in model.stream(make(source, np.array(numbers)), *options):
      yield numbers[i], columns.row(inputs, outputs)

  def row_of(number, found):
    if number not in found:
      why = fault(source, number)
      if why:
        return {'path': source.name(number), 'error': why}
      found.update(predicted(records.Subset, [number]))
    return {'path': source.name(number), **found.pop(number)}

  for group in groups:
    found = {}
    numbers = [number for block in group for number in block]
    for number, row in predicted(Block if broken == 'row' else records.Subset, numbers):
      while number >= group[0].stop:
        block = group.pop(0)
        yield block, [row_of(i, found) for i in block]
      found[number] = row
    for block in group:
      yield block, [row_of(i, found) for i in block]


def fault(source, number: int) -> str:
  """Returns why an image cannot be read, or ''."""
  part, number = source.locate(number)
  record = part.record(number)
  try:
    part.check(record, number)
  except _BROKEN as e:
    return str(e)
  return ''


def write(
  model,
  source: records.Source,
  out: str | os.PathLike,
  columns: Columns,
  facts: Mapping[str, Any],
  broken: str = 'row',
):
  """Writes a table of `rows` or resumes it; all processes must call it.

  `out` is a file with one of ENDINGS, or a folder if there are several processes.
  `facts` are what the rows depend on besides images, model and columns, for JSON.

  Raises:
    stopping.Interrupted: after a signal, when finished blocks are saved.
    ValueError: if there are no images, the table was started with other images or
      another model, or another process is writing it.
  """
  out, count = epath.Path(out), source.num_examples
  if not count:
    raise ValueError('no images given: pass files, folders or glob patterns')
  kinds = types(columns)
  alone = jax.process_count() == 1 and not out.is_dir()
  size = min(max(_FEWEST, -(-count // _BLOCKS)), _MOST)
  blocks = [range(i, min(i + size, count)) for i in range(0, count, size)]
  facts = {
    **facts, 'weights': sharding.digest((model.params, model.extra)),
    'config': _config_digest(model), 'images': source.fingerprint(),
    'columns': repr(kinds), 'block': size,
  }  # fmt: skip
  processes.agree('the table', facts)
  mine = blocks[jax.process_index() :: jax.process_count()]
  table = _Table(out, alone, facts, size, dict(zip(mine, records.stamps(source, mine))))
  complete = f"'{out}' is complete: {count:,} images"
  if processes.from_first('checking the table', table.is_done):
    console.say(complete)
    return
  with lock.Holder(table.folder, 'out', _LOCK) as held:
    if processes.from_first('starting the table', table.begin):
      console.say(complete)
      return
    faults = {block: table.faults(block) for block in mine}
    missing = [block for block in mine if faults[block] is None]
    if len(missing) < len(mine):
      console.say(f"Resuming '{out}': {len(missing):,} of {len(mine):,} parts left")
    begun = time.monotonic()
    with stopping.StopRequest() as request:
      try:
        for block, found in rows(
          model, source, columns, missing, broken, lambda: request.signal
        ):
          held.check()
          faults[block] = sum('error' in row for row in found)
          content = encode(found, kinds, out.suffix)
          table.write(block, content, faults[block])
      except engine.Stopped:
        raise Interrupted(out, request.signal) from None
    rate = sum(map(len, missing)) / max(time.monotonic() - begun, 1e-9)
    done = processes.attempt(
      'finishing the table', lambda: [rate, sum(faults.values())]
    )
    processes.from_first('joining the parts', lambda: table.finish(blocks))
  rate, wrong = map(sum, zip(*done))
  console.say(
    (f"'{out}': {count:,} images" if rate else complete)
    + (f', {wrong:,} of them broken (see the column error)' if wrong else '')
    + (f', {rate:.1f} images/s' if rate else '')
  )


def _config_digest(model) -> str:
  """Returns a hash of the config keys and metadata that determine the outputs."""
  keys = ('task', 'task_options', 'model', 'pp')
  config = {key: model.config.to_dict()[key] for key in keys}
  content = json.dumps([config, dict(model.metadata)], sort_keys=True)
  return files.digest([content.encode()])


class Interrupted(stopping.Interrupted):
  """A signal stopped a table; see vit_jax.run.stopping.Interrupted."""

  def __init__(self, out, number: int):
    Exception.__init__(self, f"Stopped. Run the same command again to resume '{out}'.")
    self.signal = number

  def _render_traceback_(self):
    return [str(self)]


class _Table:
  """The files of a table: facts, parts, and a note on each part.

  A note has a hash of the part's inputs, the checksum of the part, and its number of
  broken images. It is written before the part.
  """

  def __init__(self, out, alone, facts, size, stamps):
    self.out, self.alone, self.size = out, alone, size
    self.folder = epath.Path(f'{out}.parts') if alone else out
    self.path = _facts_path(out) if alone else out / _FACTS
    self.facts = json.loads(json.dumps(facts))
    text = json.dumps(facts, sort_keys=True)
    self.keys = {
      block: files.digest([f'{text} {block.start} {stamp}'.encode()])
      for block, stamp in stamps.items()
    }
    self.stamp = files.digest(x.encode() for x in stamps.values())

  def _is_joined(self) -> bool:
    """Returns whether the table is already one file.

    Raises ValueError if something else is there.
    """
    joined = self.alone and self.out.is_file()
    there = self.out if joined else self.folder
    parts = self.folder.exists() and [
      path for path in self.folder.iterdir() if path.name != _LOCK
    ]
    if not joined and not parts:
      return False
    remedy = f"delete '{there}', or give another path (--out)"
    wanted = dict(self.facts)
    if joined:
      wanted['contents of the images'] = self.stamp
      wanted['bytes'] = self.out.stat().length
    try:
      before = json.loads(self.path.read_bytes())
      other = [key for key, x in wanted.items() if before.get(key) != x]
    except FileNotFoundError:
      raise ValueError(
        f"out='{there}' exists and was not started by this command: {remedy}"
      ) from None
    except (ValueError, AttributeError):
      raise ValueError(f"'{self.path}' is damaged: {remedy}") from None
    if other:
      raise ValueError(f"'{there}' is a table of other {', '.join(other)}: {remedy}")
    return joined

  def is_done(self) -> bool:
    """Returns whether nothing is left to do; raises as `_is_joined`."""
    return self._is_joined() and not self.folder.exists()

  def begin(self) -> bool:
    """Returns True if the table is complete, else writes the facts."""
    if self._is_joined():
      self.folder.rmtree()
      return True
    files.write(self.path, json.dumps(self.facts, indent=1))
    return False

  def _part(self, block) -> epath.Path:
    return self.folder / f'part-{block.start // self.size:05}{self.out.suffix}'

  def _note(self, block) -> epath.Path:
    return self.folder / f'_part-{block.start // self.size:05}.json'

  def write(self, block, content: bytes, faults: int):
    note = {
      'made_of': self.keys[block], 'checksum': google_crc32c.value(content),
      'broken': faults,
    }  # fmt: skip
    files.write(self._note(block), json.dumps(note))
    files.write(self._part(block), content)

  def faults(self, block) -> int | None:
    """Returns the number of broken images of a block; None without a valid part."""
    try:
      note = json.loads(self._note(block).read_bytes())
      found = google_crc32c.value(self._part(block).read_bytes())
      wanted = {'made_of': self.keys[block], 'checksum': found}
      return note['broken'] if note.items() >= wanted.items() else None
    except (OSError, ValueError, KeyError, AttributeError):
      return None

  def finish(self, blocks):
    """Joins the parts into one file if a single process wrote them."""
    if not self.alone:
      return
    with files.replacing(self.out) as file:
      join(map(self._part, blocks), file, self.out.suffix)
      facts = {'contents of the images': self.stamp, 'bytes': file.tell()}
      files.write(self.path, json.dumps({**self.facts, **facts}, indent=1))
    self.folder.rmtree()


def _facts_path(out) -> epath.Path:
  return out.parent / f'.{out.name}.json'


def join(parts: Iterable[epath.Path], file, ending: str):
  """Concatenates the rows of files of one format into another such file."""
  if ending == '.parquet':
    writer = None
    for part in parts:
      table = arrow().parquet.read_table(io.BytesIO(part.read_bytes()))
      writer = writer or arrow().parquet.ParquetWriter(file, table.schema)
      writer.write_table(table)
    if writer:
      writer.close()
    return
  for number, part in enumerate(parts):
    content = part.read_bytes()
    header = ending == '.csv' and number > 0
    file.write(content[content.index(b'\n') + 1 :] if header else content)


def encode(found: Sequence[dict], types: Mapping[str, Any], ending: str) -> bytes:
  """Returns rows in the format of one of ENDINGS."""
  if ending == '.parquet':
    file = io.BytesIO()
    arrow().parquet.write_table(to_arrow(found, types), file)
    return file.getvalue()
  plain = [{k: _plain(row.get(k)) for k in types} for row in found]
  if ending == '.jsonl':
    lines = (json.dumps(row, ensure_ascii=False) + '\n' for row in plain)
    return ''.join(lines).encode()
  text = io.StringIO()
  writer = csv.DictWriter(text, types, lineterminator='\n')
  writer.writeheader()
  for row in plain:
    writer.writerow(
      {k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()}
    )
  return text.getvalue().encode()


def to_arrow(found: Sequence[dict], types: Mapping[str, Any]):
  """Returns rows as a pyarrow.Table with typed columns."""
  pa = arrow()

  def kind(of):
    if isinstance(of, list):
      return pa.list_(kind(of[0]))
    if isinstance(of, tuple):
      return pa.list_(kind(of[0]), of[1])
    return {
      str: pa.string(), int: pa.int64(), float: pa.float32(), bool: pa.bool_(),
    }[of]  # fmt: skip

  return pa.table(
    {
      name: pa.array([row.get(name) for row in found], kind(of))
      for name, of in types.items()
    }
  )


def _plain(value):
  """Returns a value for JSON; floats have the digits of float32."""
  if isinstance(value, np.ndarray):
    value = value.tolist()
  if isinstance(value, list | tuple):
    return [_plain(x) for x in value]
  return float(f'{value:.7g}') if isinstance(value, float) else value
