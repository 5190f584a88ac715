"""Writes tables of predictions with one row per image, for any number of images.

A table is a .parquet, .csv or .jsonl file. The rows of each block of images are
written atomically to a part in the folder `OUT.parts`, so the same command resumes
after a stop or a kill. Processes of one job, or independent tasks, compute blocks of
their own without waiting for each other. When all parts are there, they are joined
into one file.

A part is made again if its file is damaged, or the size or time of an image's file
has changed. A table of other weights, images or flags is rejected.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import csv
import functools
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
# Lock files: for all blocks, for the blocks of a shard, for joining the parts.
_LOCK, _SHARD_LOCK, _JOIN_LOCK = '_holder.json', '_holder-{}of{}.json', '_join.json'
# Images per block: fewest and most, for about a thousand blocks.
_FEWEST, _MOST, _BLOCKS = 64, 4096, 1000
_PART = 2**26  # Most bytes of features per block, unless one image has more.
# Fewest rows and most bytes of a row group of a Parquet table, which is read or skipped
# as a whole. Joining takes about twice as much memory.
_GROUP_ROWS, _GROUP_BYTES = 100_000, 2**29
_READ = 2**24  # Bytes read at a time.
# Errors of a single image; other errors of the storage may concern all images.
_BROKEN = (ValueError, FileNotFoundError, PermissionError)


class Columns(NamedTuple):
  """The columns of a task."""

  # By name: str, int, float or bool; [type] for a list; (type, n) for n values;
  # (type, shape) for an array, which only Parquet has.
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
    raise ValueError(f"out='{out}' exists: delete it, or use another path (--out)")
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
    # Names of files that are not UTF-8 have surrogates, which no format can hold.
    path = source.name(number).encode(errors='backslashreplace').decode()
    if number not in found:
      if why := fault(source, number):
        return {'path': path, 'error': why.encode(errors='backslashreplace').decode()}
      found.update(predicted(records.Subset, [number]))
    return {'path': path, **found.pop(number)}

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
  shard: tuple[int, int] | None = None,
  only_join: bool = False,
):
  """Writes a table of `rows` or resumes it; all processes must call it.

  `out` is a file with one of ENDINGS. `facts` are what the rows depend on besides
  images, model and columns, for JSON. `shard` (I, N) computes the I-th of N parts of
  the work, from 0, and the task that finds all parts joins them; `only_join` joins
  them without computing any.

  Raises:
    stopping.Interrupted: after a signal, when finished blocks are saved.
    ValueError: if there are no images, the table was started with other images or
      another model, another process is writing it or the shard, parts to be joined
      are missing, or the complete table differs from what was written.
    OSError: if a file of the table cannot be written or read.
  """
  out, total = epath.Path(out), source.num_examples
  if not total:
    raise ValueError('no images given: pass files, folders or glob patterns')
  kinds = types(columns)
  shapes = [kind[1] for kind in kinds.values() if isinstance(kind, tuple)]
  arrays = [shape for shape in shapes if isinstance(shape, tuple)]
  if arrays and out.suffix != '.parquet':
    raise ValueError(
      f"out='{out}' cannot hold an array {list(arrays[0])} per image: pass "
      '--out=table.parquet, or the features of another layer (--embeddings)'
    )
  size = min(max(_FEWEST, -(-total // _BLOCKS)), _MOST)
  size = min(size, max(1, _PART // max(1, sum(map(_bytes, shapes)))))
  blocks = [range(i, min(i + size, total)) for i in range(0, total, size)]
  facts = {
    **facts, 'weights': sharding.digest((model.params, model.extra)),
    'config': _config_digest(model), 'images': source.fingerprint(),
    'columns': repr(kinds), 'block': size,
  }  # fmt: skip
  processes.agree('the table', facts)
  table = _Table(out, facts, blocks, source, shard[1] if shard else 1)
  begin = functools.partial(table.begin, only_join)
  is_joined, rate, wrong = processes.from_first('starting the table', begin), 0.0, None
  if not is_joined and not only_join:
    rate = _compute(model, source, columns, kinds, broken, table, shard)
    left = processes.from_first('listing the parts', table.left)
    if shard and left:
      console.say(
        f"'{out}': shard {shard[0]}/{shard[1]} is finished, {left:,} of "
        f'{len(blocks):,} parts are left to the others'
      )
      return
  if not is_joined:
    if only_join and table.left():
      table.raise_incomplete()
    held = lock.Holder(table.folder, 'out', _JOIN_LOCK)
    if other := held.take(wait=True):
      console.say(f"'{out}' is being joined by {other}")
      return
    try:
      wrong = processes.from_first('joining the parts', table.join)
    finally:
      held.release()
  done = f"'{out}': {total:,} images"
  console.say(
    (f"'{out}' is complete: {total:,} images" if wrong is None else done)
    + (f', {wrong:,} of them broken (see the column error)' if wrong else '')
    + (f', {rate:.1f} images/s' if rate else '')
  )


def _compute(model, source, columns, kinds, broken, table, shard) -> float:
  """Computes the missing parts of this process or shard; returns images/s of all."""
  index, count = shard or (jax.process_index(), jax.process_count())
  mine = table.blocks[index::count]
  with lock.Holder(
    table.folder, 'out', _SHARD_LOCK.format(*shard) if shard else _LOCK
  ) as held:
    missing = table.missing(mine)
    if len(missing) < len(mine):
      console.say(
        f"Resuming '{table.out}': {len(missing):,} of {len(mine):,} parts left"
      )
    begun = time.monotonic()
    with stopping.StopRequest() as request:
      try:
        for block, found in rows(
          model, source, columns, missing, broken, lambda: request.signal
        ):
          held.check()
          content = encode(found, kinds, table.out.suffix)
          table.write(block, content, sum('error' in row for row in found))
      except engine.Stopped:
        raise Interrupted(table.out, request.signal) from None
      except FileNotFoundError:
        if not table.is_joined():  # By tasks that computed these blocks too.
          raise
    rate = sum(map(len, missing)) / max(time.monotonic() - begun, 1e-9)
    return sum(processes.attempt('finishing the table', lambda: rate))


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


def _named_errors(method: Callable) -> Callable:
  """Makes a method of _Table name the table in errors of the operating system."""

  @functools.wraps(method)
  def call(self, *args, **kwargs):
    try:
      return method(self, *args, **kwargs)
    except OSError as e:
      if e.errno is None:  # Raised by this package.
        raise
      place = f" at '{e.filename}'" if e.filename else ''
      raise type(e)(
        f"out='{self.out}' cannot be written or resumed: {e.strerror}{place}; fix this, "
        'or pass another path (--out), and run the same command again'
      ) from e

  return call


class _Table:
  """The files of a table: its parts, and facts that they share.

  The name of a part has its number, a hash of its inputs, its number of broken images
  and its checksum. So a part is one atomic write, and tasks that compute the same
  block do not disturb each other.
  """

  def __init__(self, out, facts, blocks, source, shards):
    self.out, self.blocks = out, blocks
    self.folder = epath.Path(f'{out}.parts')
    self._path = _facts_path(out)
    self._text = json.dumps(facts, sort_keys=True)
    self._facts = json.loads(self._text)
    self._shards = shards  # Of the first start.
    self._source = source
    self._stamps = {}  # By block.
    self._parts = {}  # Paths by block.

  def _is_begun(self) -> bool:
    """Returns whether there are parts, or locks that were not released."""
    with contextlib.suppress(FileNotFoundError):
      return any(True for _ in self.folder.iterdir())
    return False

  @_named_errors
  def is_joined(self) -> bool:
    """Returns whether the table is complete.

    Raises ValueError if something else is there.
    """
    joined = self.out.is_file()
    if not joined and not self._is_begun():
      return False
    there = self.out if joined else self.folder
    remedy = f"delete '{there}', or use another path (--out)"
    wanted = dict(self._facts)
    if joined:
      wanted |= self._contents(self.out.stat().length)
    try:
      before = json.loads(self._path.read_bytes())
      other = [key for key, x in wanted.items() if before.get(key) != x]
    except FileNotFoundError:
      raise ValueError(
        f"out='{there}' exists and was not started by this command: {remedy}"
      ) from None
    except (ValueError, AttributeError):
      raise ValueError(f"'{self._path}' is damaged: {remedy}") from None
    if other:
      raise ValueError(f"'{there}' is a table of other {', '.join(other)}: {remedy}")
    self._shards = before.get('shards', 1)
    return joined

  @_named_errors
  def begin(self, only_join: bool) -> bool:
    """Returns whether the table is complete; else makes the folder of the parts.

    Raises ValueError if a complete table is damaged.
    """
    is_begun = self._is_begun()  # First: parts are deleted after they are joined.
    if self.is_joined():
      self._check()
      self._delete_parts()
      return True
    if not is_begun and not only_join:
      self._write_facts()
      self.folder.mkdir(exist_ok=True)
    return False

  def _check(self):
    """Raises ValueError if the table's checksum is not the one in the facts."""
    checksum, size = google_crc32c.Checksum(), self.out.stat().length
    with (
      self.out.open('rb') as file,
      console.bar(
        total=size,
        desc=f"Checking '{self.out}'",
        unit='B',
        unit_scale=True,
        leave=False,
      ) as bar,
    ):
      while content := file.read(_READ):
        checksum.update(content)
        bar.update(len(content))
    current = checksum.hexdigest().decode()
    written = json.loads(self._path.read_bytes()).get('checksum')
    if current != written:
      raise ValueError(
        f"'{self.out}' is damaged: its checksum is {current}, but was {written} when it "
        'was written: delete it, and run the same command again to compute it anew'
      )

  def _write_facts(self, **more):
    facts = {**self._facts, 'shards': self._shards, **more}
    files.write(self._path, json.dumps(facts, indent=1))

  def _contents(self, size) -> dict:
    """Returns the facts of the table as one file of some bytes."""
    self._stamp(self.blocks)
    stamps = (self._stamps[block].encode() for block in self.blocks)
    return {'contents of the images': files.digest(stamps), 'bytes': size}

  def _stamp(self, blocks):
    new = [block for block in blocks if block not in self._stamps]
    self._stamps.update(zip(new, records.stamps(self._source, new)))

  def _number(self, block) -> str:
    return f'part-{block.start // len(self.blocks[0]):05}'

  def _name(self, block) -> str:
    made_of = f'{self._text} {block.start} {self._stamps[block]}'
    return f'{self._number(block)}-{files.digest([made_of.encode()])}'

  @_named_errors
  def write(self, block, content: bytes, faults: int):
    name = f'{self._name(block)}-{faults}-{_checksum(content)}{self.out.suffix}'
    files.write(self.folder / name, content)

  def _list(self):
    """Lists the parts by their numbers."""
    self._parts = collections.defaultdict(list)
    with contextlib.suppress(FileNotFoundError):
      for path in sorted(self.folder.iterdir()):
        self._parts['-'.join(path.name.split('-')[:2])].append(path)

  def read(self, block) -> tuple[bytes, int] | None:
    """Returns a part and its number of broken images; None without a valid part."""
    for path in self._parts[self._number(block)]:
      if path.name.startswith(self._name(block)):
        *_, faults, checksum = path.stem.split('-')
        with contextlib.suppress(FileNotFoundError):  # Joined meanwhile.
          content = path.read_bytes()
          if checksum == _checksum(content):
            return content, int(faults)
    return None

  @_named_errors
  def missing(self, blocks) -> list[range]:
    """Returns the blocks without a valid part."""
    self._stamp(blocks)
    self._list()
    return [block for block in blocks if self.read(block) is None]

  @_named_errors
  def left(self) -> int:
    """Returns how many blocks have no part, valid or not."""
    if self.is_joined():
      return 0
    self._list()
    return sum(not self._parts[self._number(block)] for block in self.blocks)

  @_named_errors
  def join(self) -> int | None:
    """Joins all parts into one file, and deletes them.

    Returns the number of broken images; None if the table is already complete. Raises
    ValueError if parts are missing.
    """
    if self.is_joined():
      self._delete_parts()
      return None
    self._stamp(self.blocks)
    self._list()
    faults = []

    def contents():
      for block in self.blocks:
        found = self.read(block)
        if found is None:
          self.raise_incomplete()
        faults.append(found[1])
        yield found[0]

    try:
      with files.replacing(self.out) as file:
        table = _Checksummed(file)
        join(contents(), table, self.out.suffix)
        self._write_facts(
          **self._contents(file.tell()), checksum=table.checksum.hexdigest().decode()
        )
    except ValueError:
      if not self.is_joined():  # By a task that took the lock at the same time.
        raise
      return None
    self._delete_parts()
    return sum(faults)

  def raise_incomplete(self):
    missing = {self.blocks.index(block) for block in self.missing(self.blocks)}
    shards = sorted({number % self._shards for number in missing})
    remedy = 'start the same command, without --join, to compute them'
    if self._shards > 1:
      listed, count = ','.join(map(str, shards)), self._shards
      remedy = f'run --shard=I/{count} again with I={listed}'
    raise ValueError(
      f"out='{self.out}' cannot be joined: {len(missing):,} of {len(self.blocks):,} "
      f'parts are missing, damaged, or of images that were replaced: {remedy}'
    )

  def _delete_parts(self):
    with contextlib.suppress(OSError):  # The next start deletes what is left.
      self.folder.rmtree()


def _facts_path(out) -> epath.Path:
  return out.parent / f'.{out.name}.json'


def _checksum(content: bytes) -> str:
  return f'{google_crc32c.value(content):08x}'


class _Checksummed(io.RawIOBase):
  """Writes to a file, and computes the checksum of what is written."""

  def __init__(self, file):
    super().__init__()
    self._file = file
    self.checksum = google_crc32c.Checksum()

  def writable(self) -> bool:
    return True

  def write(self, content) -> int:
    self.checksum.update(bytes(content))
    return self._file.write(content)


def join(parts: Iterable[bytes], file, ending: str):
  """Concatenates the rows of files of one format into another such file."""
  if ending == '.parquet':
    _join_parquet(parts, file)
    return
  for number, part in enumerate(parts):
    header = ending == '.csv' and number > 0
    file.write(part[part.index(b'\n') + 1 :] if header else part)


def _join_parquet(parts: Iterable[bytes], file):
  """Joins Parquet files into one with large row groups."""
  with contextlib.ExitStack() as stack:
    writer = None
    for table in _groups(parts):
      writer = writer or stack.enter_context(
        arrow().parquet.ParquetWriter(file, table.schema)
      )
      writer.write_table(table)


def _groups(parts: Iterable[bytes]) -> Iterator:
  """Yields pyarrow.Tables of the rows of several Parquet files each."""
  tables, rows, size = [], 0, 0
  for part in parts:
    tables.append(arrow().parquet.read_table(io.BytesIO(part)))
    rows += tables[-1].num_rows
    size += tables[-1].nbytes
    if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
      yield arrow().concat_tables(tables)
      tables, rows, size = [], 0, 0
  if tables:
    yield arrow().concat_tables(tables)


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
      {
        name: json.dumps(value, ensure_ascii=False)
        if isinstance(value, list)
        else value
        for name, value in row.items()
      }
    )
  return text.getvalue().encode()


def _bytes(shape) -> int:
  """Returns the size of float32 numbers of a shape, or their count, in bytes."""
  return 4 * int(np.prod(shape))


def to_arrow(found: Sequence[dict], types: Mapping[str, Any]):
  """Returns rows as a pyarrow.Table with typed columns; arrays are tensors."""
  pa = arrow()

  def kind(of):
    if isinstance(of, list):
      return pa.list_(kind(of[0]))
    if isinstance(of, tuple) and isinstance(of[1], tuple):
      return pa.fixed_shape_tensor(kind(of[0]), of[1])
    if isinstance(of, tuple):
      return pa.list_(kind(of[0]), of[1])
    return {
      str: pa.string(), int: pa.int64(), float: pa.float32(), bool: pa.bool_(),
    }[of]  # fmt: skip

  def column(values, of):
    if not isinstance(of, pa.FixedShapeTensorType):
      return pa.array(values, of)
    flat = [None if x is None else np.ravel(x) for x in values]
    return pa.ExtensionArray.from_storage(of, pa.array(flat, of.storage_type))

  return pa.table(
    {
      name: column([row.get(name) for row in found], kind(of))
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
