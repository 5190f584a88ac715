"""Writes tables of predictions with one row per image, for any number of images.

A table is a folder of Parquet files, its parts, each with the rows of a block of
images, or one .parquet, .csv or .jsonl file, into which a job joins its parts at the
end. Parts are written atomically, so the same command resumes after a stop or a kill.
Processes of one job, or independent tasks with a folder in common, compute blocks of
their own without waiting for each other.

Beside each part, a hidden JSON file has a hash of what its rows depend on, and its
checksum. A part is made again if its file is damaged, or the size or time of an
image's file has changed. A table of other weights, images or flags is rejected.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import csv
import functools
import io
import json
import os
import time
from typing import Any, BinaryIO, NamedTuple

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

ENDINGS = ('.parquet', '.csv', '.jsonl', '/')
# Images per block: fewest and most, for about 250 blocks.
_FEWEST, _MOST, _BLOCKS = 256, 4096, 250
BLOCK_BYTES = 2**26  # Most bytes of features per block, unless one image has more.
# Fewest rows and most bytes of a row group of a joined Parquet file, which is read or
# skipped as a whole. Joining takes about twice as much memory.
GROUP_ROWS = 100_000
GROUP_BYTES = 2**29
_READ = 2**24  # Bytes read at a time.
# Errors of a single image; other errors of the storage may concern all images.
_BROKEN = (ValueError, FileNotFoundError, PermissionError)
Row = dict[str, Any]


class Columns(NamedTuple):
  """The columns of a task."""

  # By name: str, int, float or bool; [type] for a list; (type, n) for n values;
  # (type, shape) for an array, which only Parquet has.
  types: Mapping[str, Any]
  # From an image's inputs in `keep` and results of `compute` to its values by name.
  row: Callable[[dict, Any], Row]
  # See Predictor.stream.
  compute: Callable | None = None
  keep: Sequence[str] = ()
  parts: Callable | None = None


def choices(best: Callable, compute: Callable | None = None) -> Columns:
  """Returns the columns of a classifier.

  `best` maps the results of `compute` for an image to pairs of name and probability.
  """

  def row(_: dict, outputs: Any) -> Row:
    names, probabilities = zip(*best(outputs))
    return {
      'class': names[0],
      'probability': probabilities[0],
      'classes': names,
      'probabilities': probabilities,
    }

  column_types = {
    'class': str,
    'probability': float,
    'classes': [str],
    'probabilities': [float],
  }
  return Columns(column_types, row, compute)


class NoColumns(ValueError):
  """The task has no columns for a table."""


def types(columns: Columns) -> dict[str, Any]:
  """Returns the types of all columns of a table, see Columns."""
  return {'path': str, **columns.types, 'error': str}


class Block(records.Subset):
  """Images of a source read by this process only; broken ones are left out."""

  tolerant = True

  def shapes(self, upright: bool = False) -> np.ndarray:
    """Returns the sizes of the images, see Source; (1, 1) for broken ones."""
    recorded = self._source.shapes(upright)
    if recorded is not None:
      return recorded[self._indices]

    def shape(number: int) -> tuple:
      encoded = self.read(self.record(number))['image']
      shape_of = images_lib.upright_shape_of if upright else images_lib.shape_of
      return number, shape_of(encoded)

    data = tf.data.Dataset.range(self.num_examples)
    data = data.map(shape, num_parallel_calls=os.cpu_count())
    sizes = np.ones((self.num_examples, 2), np.int64)
    for number, size in data.ignore_errors().as_numpy_iterator():
      sizes[number] = size
    return sizes


def is_table(out: str | os.PathLike | None) -> bool:
  """Returns whether a path (--out) is for a table; a folder ends with '/'."""
  return os.fspath(out or '').endswith(ENDINGS)


def check(out: str | os.PathLike, resumes: bool = True) -> None:
  """Raises ValueError unless a table can be written to a path (--out).

  `resumes`: whether an earlier run of the command may have written it.
  """
  path = epath.Path(out)
  is_finished = resumes and _joined_facts_path(path).exists()
  if path.is_file() and not is_finished:
    raise ValueError(f"out='{out}' exists: delete it, or use another path (--out)")
  if not _is_folder(out) and path.is_dir():
    raise ValueError(
      f"out='{out}' is a folder: pass --out={out}/ for a table of several files, or "
      'the path of a file (--out)'
    )
  arrow()


def _is_folder(out: str | os.PathLike) -> bool:
  return os.fspath(out).endswith('/')


def arrow() -> Any:
  """Returns the module pyarrow; raises ImportError if it is missing."""
  console.require('pyarrow.parquet', 'tables', 'a table')
  import pyarrow

  return pyarrow


def rows(
  model: Any,
  source: records.Source,
  columns: Columns,
  blocks: Sequence[range],
  broken: str = 'row',
  stop: Callable[[], bool] = engine.never,
) -> Iterator[tuple[range, list[Row]]]:
  """Yields each block of images with its rows: `path`, the columns, and `error`.

  Blocks are image numbers, ascending. A broken image adds a row with an `error`, or
  raises if `broken` is 'stop'.
  """

  def predict(subset: Callable, numbers: Sequence[int]) -> Iterator[tuple[int, Row]]:
    options = columns.compute, columns.keep, columns.parts, stop
    images = subset(source, np.array(numbers))
    for i, inputs, outputs in model.stream(images, *options):
      yield numbers[i], columns.row(inputs, outputs)

  def make_row(number: int, predicted: dict[int, Row]) -> Row:
    path = _utf8(source.name(number))
    if number not in predicted:
      error = fault(source, number)
      if error:
        return {'path': path, 'error': _utf8(error)}
      predicted.update(predict(records.Subset, [number]))
    return {'path': path, **predicted[number]}

  subset = Block if broken == 'row' else records.Subset
  for block in blocks:
    # Block by block, so that batches, and thereby rounding, do not depend on which
    # blocks are left.
    predicted = dict(predict(subset, block))
    yield block, [make_row(number, predicted) for number in block]


def _utf8(text: str) -> str:
  """Escapes what no format can hold: names of files that are not UTF-8."""
  return text.encode(errors='backslashreplace').decode()


def fault(source: records.Source, number: int) -> str:
  """Returns why an image cannot be read, or ''."""
  part, number = source.locate(number)
  record = part.record(number)
  try:
    part.check(record, number)
  except _BROKEN as e:
    return str(e)
  return ''


def write(
  model: Any,
  source: records.Source,
  out: str | os.PathLike,
  columns: Columns,
  facts: Mapping[str, Any],
  broken: str = 'row',
  shard: tuple[int, int] | None = None,
) -> None:
  """Writes a table of `rows` or resumes it; all processes must call it.

  Args:
    model: the predictor.
    source: the images.
    out: path with one of ENDINGS.
    columns: the columns.
    facts: what the rows depend on besides images, model and columns, for JSON.
    broken: 'row' or 'stop', see `rows`.
    shard: (I, N) computes the I-th of N shares of a folder, from 0; None: all.

  Raises:
    stopping.Interrupted: after a signal, when finished blocks are saved.
    ValueError: if there are no images, the table was started with other images or
      another model, another process is writing it or the shard, or the joined file
      differs from what was written.
    OSError: if a file of the table cannot be written or read.
  """
  count = source.num_examples
  if not count:
    raise ValueError('no images given: pass files, folders or glob patterns')
  column_types = types(columns)
  _check_arrays(out, column_types)
  if shard and not _is_folder(out):
    raise ValueError(
      f"out='{out}' has one file: pass --out=FOLDER/ for a shard (--out)"
    )
  blocks = _blocks(count, column_types)
  facts = {
    **facts,
    **model_facts(model),
    'images': source.fingerprint(),
    'columns': repr(column_types),
    'block': len(blocks[0]),
  }
  processes.agree('the table', facts)
  table = _Table(out, facts, blocks, source)
  if processes.from_first('starting the table', table.begin):
    console.log(f"'{out}' is complete: {count:,} images")
    return
  index, shards = shard or (0, 1)
  with lock.Holder(table.folder, 'out', f'.lock-{index}of{shards}.json') as writer_lock:
    computed, rate = _compute(
      model, source, columns, column_types, broken, table, shard, writer_lock
    )
    num_missing = processes.from_first('listing the parts', table.num_missing)
    if num_missing:
      console.log(
        f"'{out}': shard {index}/{shards} is finished, {num_missing:,} of "
        f'{len(blocks):,} parts are left to the others'
      )
      return
    num_broken = processes.from_first('finishing the table', table.finish)
  was_complete = _is_folder(out) and not computed
  state = ' is complete' if was_complete else ''
  summary = f"'{out}'{state}: {count:,} images"
  if num_broken:
    summary += f', {num_broken:,} of them broken (see the column error)'
  if rate:
    summary += f', {rate:.1f} images/s'
  console.log(summary)


def _check_arrays(out: str | os.PathLike, column_types: Mapping[str, Any]) -> None:
  """Raises ValueError if a format cannot hold the array of a column."""
  if epath.Path(out).suffix not in ('.csv', '.jsonl'):
    return
  for column_type in column_types.values():
    if isinstance(column_type, tuple) and isinstance(column_type[1], tuple):
      raise ValueError(
        f"out='{out}' cannot hold an array {list(column_type[1])} per image: pass "
        '--out=table.parquet, or the features of another layer (--embeddings)'
      )


def _blocks(count: int, column_types: Mapping[str, Any]) -> list[range]:
  """Divides `count` images into blocks."""
  row_bytes = 0
  for column_type in column_types.values():
    if isinstance(column_type, tuple):
      row_bytes += 4 * int(np.prod(column_type[1]))  # float32
  size = min(max(_FEWEST, -(-count // _BLOCKS)), _MOST)
  size = min(size, max(1, BLOCK_BYTES // max(1, row_bytes)))
  return [range(i, min(i + size, count)) for i in range(0, count, size)]


def _compute(
  model: Any,
  source: records.Source,
  columns: Columns,
  column_types: Mapping[str, Any],
  broken: str,
  table: '_Table',
  shard: tuple[int, int] | None,
  writer_lock: lock.Holder,
) -> tuple[int, float]:
  """Computes the missing parts of this process or shard.

  Returns the number of images that all processes computed, and images/s.
  """
  index, count = shard or (jax.process_index(), jax.process_count())
  blocks = table.blocks[index::count]
  missing = table.missing(blocks)
  if 0 < len(missing) < len(blocks):
    console.log(
      f"Resuming '{table.out}': {len(missing):,} of {len(blocks):,} parts left"
    )
  start_time = time.monotonic()
  with stopping.StopRequest() as request:
    try:
      for block, block_rows in rows(
        model, source, columns, missing, broken, lambda: request.signal
      ):
        writer_lock.check()
        table.write(block, to_arrow(block_rows, column_types))
    except engine.Stopped:
      raise Interrupted(table.out, request.signal) from None
  computed = sum(map(len, missing))
  rate = computed / max(time.monotonic() - start_time, 1e-9)
  results = processes.attempt('computing the table', lambda: [computed, rate])
  counts, rates = zip(*results)
  return sum(counts), sum(rates)


def model_facts(model: Any) -> dict[str, str]:
  """Returns hashes of the weights and the config that determine the outputs."""
  return {
    'weights': sharding.digest((model.params, model.extra)),
    'config': _config_digest(model),
  }


def _config_digest(model: Any) -> str:
  """Returns a hash of the config keys and metadata that determine the outputs."""
  keys = ('task', 'task_options', 'model', 'pp')
  config = {key: model.config.to_dict()[key] for key in keys}
  content = json.dumps([config, dict(model.metadata)], sort_keys=True)
  return files.digest([content.encode()])


class Interrupted(stopping.Interrupted):
  """A signal stopped a table; see vit_jax.run.stopping.Interrupted."""

  def __init__(self, out: str | os.PathLike, number: int):
    Exception.__init__(self, f"Stopped. Run the same command again to resume '{out}'.")
    self.signal = number

  def _render_traceback_(self) -> list[str]:
    return [str(self)]


def _named_errors(method: Callable) -> Callable:
  """Makes a method of _Table name the table in errors of the operating system."""

  @functools.wraps(method)
  def call(self: '_Table', *args: Any) -> Any:
    try:
      return method(self, *args)
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
  """The files of a table: its parts, and the facts that they share.

  A folder has its parts and `.table.json`, the facts. A file FILE has its parts in
  FILE.parts until they are joined, and the facts next to it in `.FILE.json`.
  """

  def __init__(
    self,
    out: str | os.PathLike,
    facts: Mapping[str, Any],
    blocks: Sequence[range],
    source: records.Source,
  ):
    self.out = out
    self.blocks = blocks
    self.folder = epath.Path(out)
    self._facts_path = self.folder / '.table.json'
    self._file = None  # The joined file, if any.
    if not _is_folder(out):
      self._file = self.folder
      self._facts_path = _joined_facts_path(self._file)
      self.folder = epath.Path(f'{out}.parts')
    self._text = json.dumps(facts, sort_keys=True)
    self._facts = json.loads(self._text)
    self._source = source
    self._stamps: dict[range, str] = {}  # Hashes of the images' sizes and times.

  @_named_errors
  def begin(self) -> bool:
    """Returns whether there is a joined file; else makes the folder of the parts.

    Raises ValueError if something else is there, or the joined file is damaged.
    """
    if self._file is not None and self._file.is_file():
      self._check_facts(self._file, self._file_facts(self._file.stat().length))
      self._check_checksum(self._file)
      self._delete_parts()
      return True
    if self._is_started():
      self._check_facts(self.folder, {})
      return False
    if self._file is None:
      self.folder.mkdir(exist_ok=True)
      self._write_facts({})
    else:
      self._write_facts({})
      self.folder.mkdir(exist_ok=True)
    return False

  def _is_started(self) -> bool:
    """Returns whether the folder has parts, or locks that were not released."""
    with contextlib.suppress(FileNotFoundError):
      # A killed process may leave the temporary file of the facts.
      return any(path.suffix != '.tmp' for path in self.folder.iterdir())
    return False

  def _check_facts(self, place: epath.Path, file_facts: Mapping[str, Any]) -> None:
    """Raises ValueError if `place` has a table of other facts, or something else."""
    remedy = f"delete '{place}', or use another path (--out)"
    try:
      stored = files.read_json(self._facts_path)
      expected = {**self._facts, **file_facts}
      differing = [key for key, value in expected.items() if stored.get(key) != value]
    except FileNotFoundError:
      raise ValueError(
        f"out='{place}' exists and was not started by this command: {remedy}"
      ) from None
    except (ValueError, AttributeError):
      raise ValueError(f"'{self._facts_path}' is damaged: {remedy}") from None
    if differing:
      raise ValueError(
        f"'{place}' is a table of other {', '.join(differing)}: {remedy}"
      )

  def _write_facts(self, file_facts: Mapping[str, Any]) -> None:
    files.write(self._facts_path, json.dumps({**self._facts, **file_facts}, indent=1))

  def _file_facts(self, size: int) -> dict[str, Any]:
    """Returns the facts of a joined file of some bytes."""
    self._stamp(self.blocks)
    stamps = (self._stamps[block].encode() for block in self.blocks)
    return {'contents of the images': files.digest(stamps), 'bytes': size}

  def _check_checksum(self, path: epath.Path) -> None:
    """Raises ValueError if the checksum of the joined file is not the one written."""
    checksum = google_crc32c.Checksum()
    size = path.stat().length
    title = f"Checking '{self.out}'"
    with (
      files.open_input(path) as file,
      console.bar(
        total=size, desc=title, unit='B', unit_scale=True, leave=False
      ) as bar,
    ):
      while content := file.read(_READ):
        checksum.update(content)
        bar.update(len(content))
    current = checksum.hexdigest().decode()
    written = files.read_json(self._facts_path).get('checksum')
    if current != written:
      raise ValueError(
        f"'{self.out}' is damaged: its checksum is {current}, but was {written} when it "
        'was written: delete it, and run the same command again to compute it anew'
      )

  def _stamp(self, blocks: Sequence[range]) -> None:
    """Reads sizes and times of the images of blocks, for `_inputs`."""
    new = [block for block in blocks if block not in self._stamps]
    self._stamps.update(zip(new, records.stamps(self._source, new)))

  def _inputs(self, block: range) -> str:
    """Returns a hash of what the rows of a block depend on."""
    inputs = f'{self._text} {block.start} {self._stamps[block]}'
    return files.digest([inputs.encode()])

  def _paths(self, block: range) -> tuple[epath.Path, epath.Path]:
    """Returns the paths of a part and of its description."""
    name = f'part-{block.start // len(self.blocks[0]):05}'
    return self.folder / f'{name}.parquet', self.folder / f'.{name}.json'

  @_named_errors
  def write(self, block: range, table: Any) -> None:
    """Writes the part of a block, a pyarrow.Table."""
    buffer = io.BytesIO()
    arrow().parquet.write_table(table, buffer)
    content = buffer.getvalue()
    description = {'inputs': self._inputs(block), 'checksum': _checksum(content)}
    path, description_path = self._paths(block)
    files.write(path, content)
    files.write(description_path, json.dumps(description))

  def _read(self, block: range) -> bytes | None:
    """Returns the part of a block; None without a valid part."""
    path, description_path = self._paths(block)
    try:
      description = files.read_json(description_path)
      content = files.read(path)
    except (FileNotFoundError, ValueError):
      return None
    valid = {'inputs': self._inputs(block), 'checksum': _checksum(content)}
    return content if description == valid else None

  @_named_errors
  def missing(self, blocks: Sequence[range]) -> list[range]:
    """Returns the blocks without a valid part."""
    self._stamp(blocks)
    return [block for block in blocks if self._read(block) is None]

  @_named_errors
  def num_missing(self) -> int:
    """Returns how many blocks have no part, valid or not."""
    names = {path.name for path in self.folder.iterdir()}
    required: set[str] = set()
    for block in self.blocks:
      required.update(path.name for path in self._paths(block)[1:])
    return len(required - names)

  def _parts(self) -> Iterator[Any]:
    """Yields the parts as pyarrow.Tables."""
    self._stamp(self.blocks)
    for block in self.blocks:
      content = self._read(block)
      if content is None:
        raise ValueError(
          f"'{self._paths(block)[0]}' is damaged, or of images that were replaced: run "
          'the same command again to compute it anew'
        )
      yield arrow().parquet.read_table(io.BytesIO(content))

  @_named_errors
  def finish(self) -> int:
    """Joins the parts, if the table is one file; returns the number of broken images."""
    num_broken = 0

    def counted() -> Iterator[Any]:
      nonlocal num_broken
      for part in self._parts():
        num_broken += part.num_rows - part['error'].null_count
        yield part

    if self._file is None:
      for _ in counted():
        pass
      return num_broken
    with files.replacing(self._file) as file:
      writer = _Checksummed(file)
      encode(counted(), writer, self._file.suffix)
      checksum = writer.checksum.hexdigest().decode()
      self._write_facts({**self._file_facts(file.tell()), 'checksum': checksum})
    self._delete_parts()
    return num_broken

  def _delete_parts(self) -> None:
    with contextlib.suppress(OSError):  # The next start deletes what is left.
      self.folder.rmtree()


def _joined_facts_path(file: epath.Path) -> epath.Path:
  return file.parent / f'.{file.name}.json'


def _checksum(content: bytes) -> str:
  return f'{google_crc32c.value(content):08x}'


class _Checksummed(io.RawIOBase):
  """Writes to a file, and computes the checksum of what is written."""

  def __init__(self, file: BinaryIO):
    super().__init__()
    self._file = file
    self.checksum = google_crc32c.Checksum()

  def writable(self) -> bool:
    return True

  def write(self, content: Any) -> int:
    self.checksum.update(bytes(content))
    return self._file.write(content)


def encode(tables: Iterator[Any], file: Any, ending: str) -> None:
  """Writes the rows of pyarrow.Tables with the same columns to one file.

  `ending` is one of ENDINGS, and `file` is open for bytes.
  """
  if ending == '.parquet':
    _encode_parquet(tables, file)
    return
  for number, table in enumerate(tables):
    plain = [_plain(row) for row in table.to_pylist()]
    if ending == '.jsonl':
      text = ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in plain)
    else:
      text = _csv(plain, table.column_names, header=number == 0)
    file.write(text.encode())


def _encode_parquet(tables: Iterator[Any], file: Any) -> None:
  """Writes pyarrow.Tables to one Parquet file with large row groups."""
  writer = None
  try:
    for group in _groups(tables):
      if writer is None:
        writer = arrow().parquet.ParquetWriter(file, group.schema)
      writer.write_table(group)
  finally:
    if writer is not None:
      writer.close()


def _groups(tables: Iterator[Any]) -> Iterator[Any]:
  """Yields pyarrow.Tables of the rows of several tables each."""
  group: list[Any] = []
  for table in tables:
    group.append(table)
    num_rows = sum(table.num_rows for table in group)
    num_bytes = sum(table.nbytes for table in group)
    if num_rows >= GROUP_ROWS or num_bytes >= GROUP_BYTES:
      yield arrow().concat_tables(group)
      group = []
  if group:
    yield arrow().concat_tables(group)


def _csv(plain: Sequence[Row], names: Sequence[str], header: bool) -> str:
  """Returns rows as CSV; lists are JSON."""
  text = io.StringIO()
  writer = csv.DictWriter(text, names, lineterminator='\n')
  if header:
    writer.writeheader()
  for row in plain:
    for name, value in row.items():
      if isinstance(value, list):
        row[name] = json.dumps(value, ensure_ascii=False)
    writer.writerow(row)
  return text.getvalue()


def to_arrow(rows: Sequence[Row], types: Mapping[str, Any]) -> Any:
  """Returns rows as a pyarrow.Table with typed columns; arrays are tensors."""
  pa = arrow()
  scalars = {str: pa.string(), int: pa.int64(), float: pa.float32(), bool: pa.bool_()}

  def arrow_type(column_type: Any) -> Any:
    if isinstance(column_type, list):
      return pa.list_(arrow_type(column_type[0]))
    if not isinstance(column_type, tuple):
      return scalars[column_type]
    element, shape = column_type
    if isinstance(shape, tuple):
      return pa.fixed_shape_tensor(arrow_type(element), shape)
    return pa.list_(arrow_type(element), shape)

  def column(values: list[Any], type_: Any) -> Any:
    if not isinstance(type_, pa.FixedShapeTensorType):
      return pa.array(values, type_)
    flat = [None if value is None else np.ravel(value) for value in values]
    return pa.ExtensionArray.from_storage(type_, pa.array(flat, type_.storage_type))

  columns = {}
  for name, column_type in types.items():
    values = [row.get(name) for row in rows]
    columns[name] = column(values, arrow_type(column_type))
  return pa.table(columns)


def _plain(value: Any) -> Any:
  """Returns a value for JSON; floats have the digits of float32."""
  if isinstance(value, dict):
    return {name: _plain(item) for name, item in value.items()}
  if isinstance(value, list):
    return [_plain(item) for item in value]
  return float(f'{value:.7g}') if isinstance(value, float) else value
