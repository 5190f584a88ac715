"""Tests of prediction tables: all tasks, interruptions, several processes."""

import contextlib
import copy
import csv
import errno
import functools
import io
import json
import os
import pathlib
import shlex
import shutil
import signal

import jax
import numpy as np
import pandas as pd
from PIL import Image
import pyarrow.parquet
import pytest

from tests import conftest, processes, tiny_models
from tests.tasks import input_spec_test
from tests.tasks.detection import detect_canvases_test
from vit_jax import models
from vit_jax.commands import predict as predict_command
from vit_jax.data import records, sources
from vit_jax.data.images import listing
from vit_jax.inference import tables
from vit_jax.run import stopping

BLOCK = 12  # Images.
COUNT = 40  # Three blocks and a remainder.
FEW = 28  # Two blocks and a remainder.
BROKEN = (5, 14, 15)


@pytest.fixture(scope='module', autouse=True)
def _small_blocks():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tables, '_FEWEST', BLOCK)
    yield


@pytest.fixture(scope='module')
def images(tmp_path_factory):
  """A folder of small images of two sizes, three of them broken."""
  root = tmp_path_factory.mktemp('photos')
  rng = np.random.RandomState(0)
  for i in range(COUNT):
    size = (10, 14, 3) if i % 3 else (16, 9, 3)
    pixels = rng.randint(0, 256, size, np.uint8)
    Image.fromarray(pixels).save(root / f'{i:03}.png')
  (root / '005.png').write_bytes(b'no image')
  content = (root / '014.png').read_bytes()
  (root / '014.png').write_bytes(content[:-40])
  (root / '015.png').write_bytes(b'')
  return sorted(map(str, root.iterdir()))


def make_model(name, folder):
  task = input_spec_test.TASKS[name](folder)
  return task.predictor(*tiny_models.of_task(task), 7)


@pytest.fixture(scope='module')
def model(data_dir):
  return make_model('classify', data_dir)


@pytest.fixture(scope='module')
def rows(model, images):
  """The rows of an uninterrupted table."""
  return model.table(images, embeddings='features').to_pylist()


@functools.cache
def columns_of(model):
  """Columns, compiled only once."""
  return model.columns(embeddings='features')


def write(model, images, out, **kwargs):
  columns = columns_of(model)
  facts = {'model': 'a run'}
  tables.write(model, model._source(images), out, columns, facts, **kwargs)


def test_rows_are_predictions_in_the_order_of_the_images(model, images, rows):
  assert [row['path'] for row in rows] == images
  broken = [i for i, row in enumerate(rows) if row['error']]
  assert tuple(broken) == BROKEN
  assert all(rows[i]['class'] is None for i in BROKEN)
  assert all(images[i] in rows[i]['error'] for i in BROKEN)
  good = [i for i in range(COUNT) if i not in BROKEN]
  want = model.predict([images[i] for i in good])
  for i, classes in zip(good, want):
    names, shares = zip(*classes)
    assert rows[i]['classes'] == list(names)
    assert rows[i]['class'] == names[0]
    np.testing.assert_allclose(rows[i]['probabilities'], shares, atol=1e-6)
  embedded = np.array([rows[i]['embedding'] for i in good])
  got = model.embed([images[i] for i in good])
  np.testing.assert_allclose(got, embedded, atol=1e-5)
  # The features are the inputs of the head.
  head = model.params['head']
  logits = got @ np.asarray(head['kernel']) + np.asarray(head['bias'])
  np.testing.assert_allclose(logits, model.logits([images[i] for i in good]), atol=1e-5)


def assert_same(got, want):
  """Asserts that rows are equal up to rounding across batches and devices."""
  floats = {'probability', 'probabilities', 'embedding'}
  assert len(got) == len(want)
  for a, b in zip(got, want):
    assert a.keys() == b.keys()
    for name in a:
      if name in floats and b[name] is not None:
        np.testing.assert_allclose(a[name], b[name], atol=1e-6)
      else:
        assert a[name] == b[name]


def read_lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


FILES = ('table.parquet', 'table.csv', 'table.jsonl')


def read_folder(path):
  """Returns the rows of a folder as other programs read them."""
  return pyarrow.parquet.read_table(path).to_pylist()


@pytest.mark.parametrize('name', [*FILES, 'table/'])
def test_all_formats_have_the_same_rows(model, images, rows, tmp_path, name, capsys):
  out, images, rows = tmp_path / name, images[:FEW], rows[:FEW]
  write(model, images, f'{tmp_path}/{name}')
  assert '28 images, 3 of them broken' in capsys.readouterr().out
  visible = [p.name for p in tmp_path.iterdir() if not p.name.startswith('.')]
  assert visible == [out.name]
  if name == 'table/':
    parts = [p.name for p in out.iterdir() if not p.name.startswith('.')]
    assert sorted(parts) == [f'part-0000{i}.parquet' for i in range(3)]
    assert_same(read_folder(out), rows)
    table = pd.read_parquet(out)
    assert list(table['path']) == images
    return
  if out.suffix == '.jsonl':
    records_ = read_lines(out)
  elif out.suffix == '.csv':
    records_ = pd.read_csv(out).replace({np.nan: None}).to_dict('records')
    for row in records_:
      for column in ('classes', 'probabilities', 'embedding'):
        row[column] = row[column] and json.loads(row[column])
  else:
    table = pyarrow.parquet.read_table(out)
    assert table.schema.field('embedding').type.list_size == 16
    records_ = table.to_pylist()
  assert_same(records_, rows)


# Of the files that a table of three parts writes: its facts (0), a part, the description
# of a part, and the facts of the joined file (7).
@pytest.mark.parametrize(
  'name, kills', [('table.jsonl', (3, 4, 7)), ('table/', (0, 4))]
)
def test_a_table_killed_at_any_kind_of_file_resumes(
  model, images, tmp_path, name, kills, monkeypatch
):
  """Existing files are complete and not computed again."""
  write_file, images = tables.files.write, images[:FEW]
  write(model, images, f'{tmp_path}/{name}')
  uninterrupted = read_bytes(tmp_path / name)
  for number in kills:
    folder = tmp_path / str(number)
    folder.mkdir()
    out, paths = folder / name, []

    def dying(path, content, number=number, paths=paths):
      if len(paths) == number:
        path.with_name(f'.{path.name}.tmp').write_bytes(b'cut')
        raise KeyboardInterrupt
      paths.append(path)
      write_file(path, content)

    with monkeypatch.context() as patch:
      patch.setattr(tables.files, 'write', dying)
      with pytest.raises(KeyboardInterrupt):
        write(model, images, f'{folder}/{name}')
    finished = [path for path in paths if path.name.startswith('.part')]
    with counting(model) as counts:
      write(model, images, f'{folder}/{name}')
    assert sum(counts) == max(0, FEW - BLOCK * len(finished))
    assert read_bytes(out) == uninterrupted


def read_bytes(out):
  """Returns the contents of the visible files of a table, by name."""
  if out.is_file():
    return out.read_bytes()
  return {path.name: path.read_bytes() for path in out.glob('part-*')}


def test_a_signal_stops_a_table_which_then_resumes(
  model, images, tmp_path, monkeypatch
):
  out, real, images = tmp_path / 'table.csv', tables.files.write, images[:FEW]

  def signalled(path, content):
    real(path, content)
    if path.name.startswith('.part'):
      with pytest.raises(ValueError, match=f"parts' is held .*{os.getpid()} .*--out"):
        write(model, images, out)  # A second writer.
      os.kill(os.getpid(), signal.SIGTERM)

  with monkeypatch.context() as patch:
    patch.setattr(tables.files, 'write', signalled)
    with pytest.raises(stopping.Interrupted, match='resume.*table.csv') as error:
      write(model, images, out)
  assert error.value.signal == signal.SIGTERM
  parts = sorted((tmp_path / 'table.csv.parts').glob('part-*'))
  assert 1 <= len(parts) < 3
  write(model, images, out)
  assert len(pd.read_csv(out)) == FEW


def test_a_broken_image_stops_the_table_on_request(model, images, tmp_path):
  out = tmp_path / 'table.csv'
  with pytest.raises(ValueError, match='014.png'):
    write(model, images[12:], out, broken='stop')
  assert not out.exists()
  good = images[16:]
  write(model, good, tmp_path / 'good.csv', broken='stop')
  assert len(pd.read_csv(tmp_path / 'good.csv')) == len(good)


@pytest.mark.parametrize(
  'name, columns',
  [
    ('pixels', ['bits_per_dimension']),
    ('pixels_finetune', ['class', 'probability', 'classes', 'probabilities']),
    ('regress', ['age', 'weight']),
    ('canvases', ['classes', 'scores', 'boxes']),
    (
      'segment',
      ['classes', 'scores', 'things', 'areas', 'boxes', 'masks', 'size'],
    ),
    ('masked_patches', []),
  ],
)
def test_each_task_has_its_columns(
  name, columns, images, data_dir, tmp_path, monkeypatch
):
  monkeypatch.setitem(models.KINDS, 'tiny_detector', detect_canvases_test.TinyDetector)
  model = make_model(name, tmp_path if name == 'canvases' else data_dir)
  # One is broken. Both lists fit in a batch of four, so the model is compiled once.
  paths = [images[i] for i in (0, 1, 5, 2)]
  good = [images[i] for i in (0, 1, 2)]
  if not columns:
    with pytest.raises(ValueError, match="'masked_patches' predicts pictures"):
      model.table(paths)
    table = model.table(paths, embeddings='features')
    assert table.column_names == ['path', 'embedding', 'error']
    np.testing.assert_allclose(
      np.array(table.to_pydict()['embedding'][3]), model.embed(good)[2], atol=1e-5
    )
    return
  is_detector = name in ('canvases', 'segment')
  found = model.table(paths, **({'threshold': 0.0} if is_detector else {})).to_pylist()
  assert list(found[0]) == ['path', *columns, 'error']
  assert found.pop(2)['error']
  if name == 'pixels':
    want = [{'bits_per_dimension': bits} for bits in model.predict(good)]
  elif name == 'pixels_finetune':
    want = [dict(classes=list(dict(x))) for x in model.predict(good)]
  elif name == 'regress':
    want = model.predict(good)
  else:
    method = {'canvases': 'detect', 'segment': 'segment'}[name]
    results = getattr(model, method)(good, threshold=0.0)
    if name == 'segment':
      results = [segments for _, segments in results]
    want = [
      dict(zip(columns, map(list, zip(*x)))) if x else {c: [] for c in columns}
      for x in results
    ]
  for row, values in zip(found, want):
    for column, value in values.items():
      if column in ('masks', 'size'):
        continue  # tests/tasks/segmentation/segment_masks_test.py decodes them.
      if column == 'boxes':
        np.testing.assert_allclose(row[column], value, rtol=1e-5)
      else:
        assert row[column] == pytest.approx(value, abs=5e-6)


# --- Several processes ---

_TWO = """
import sys, jax, os, pathlib, signal, time
from vit_jax.distributed import processes
place, number, folder, whole, killed, data_dir = sys.argv[1:]
processes.connect(coordinator=place, num_processes=2, process_id=int(number))
from tests.inference import tables_test
tables = tables_test.tables
tables._FEWEST = tables_test.BLOCK
model = tables_test.make_model('classify', data_dir)
images = sorted(map(str, pathlib.Path(folder).iterdir()))
try:  # The second process lacks an image.
  tables_test.write(model, images[int(number):], whole)
except ValueError as e:
  print(e, flush=True)  # Before it is killed.
assert not pathlib.Path(whole).exists()
for _ in range(2):  # The second time it is complete.
  tables_test.write(model, images, whole)
write = tables.files.write
def dying(path, content):
  write(path, content)
  if not path.name.startswith('.part'):
    return
  while len(list(path.parent.glob('.part-*.json'))) < 3:
    time.sleep(0.05)
  os.kill(os.getpid(), signal.SIGKILL)
tables.files.write = dying
tables_test.write(model, images, killed)
"""


def test_any_number_of_processes_resumes_a_table(
  model, images, rows, data_dir, tmp_path
):
  """One process is stopped after one part, two are killed after one more each."""
  whole, killed = tmp_path / 'whole.jsonl', tmp_path / 'killed.jsonl'
  stop_after(1, model, images, killed)
  folder = pathlib.Path(images[0]).parent
  statuses, outputs = processes.run_two(_TWO, folder, whole, killed, data_dir)
  assert statuses == [-signal.SIGKILL] * 2, outputs
  assert all('differ in the table' in output for output in outputs), outputs
  assert "whole.jsonl': 40 images, 3 of them broken" in outputs[0]
  assert 'is complete: 40 images' in outputs[0]
  assert "killed.jsonl': 1 of 2 parts left" in outputs[0]
  assert 'images' not in outputs[1].split('same files')[1]
  assert not killed.exists()
  with counting(model) as seen:
    write(model, images, killed)
  assert seen == [COUNT % BLOCK]
  for path in (whole, killed):
    assert_same(read_lines(path), rows)
  assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def stop_after(count, model, images, out, **kwargs):
  """Writes `count` parts of a table and stops."""
  real, written = tables.files.write, []

  def stopping_(path, content):
    real(path, content)
    written.extend([path] if path.name.startswith('.part') else [])
    if len(written) == count:
      raise KeyboardInterrupt

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tables.files, 'write', stopping_)
    with pytest.raises(KeyboardInterrupt):
      write(model, images, out, **kwargs)


@contextlib.contextmanager
def counting(model):
  """Yields a list of how many images each call computes."""
  seen, stream = [], model.stream

  def counted(source, *args):
    seen.append(source.num_examples)
    return stream(source, *args)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(model, 'stream', counted)
    yield seen


# --- Independent tasks ---


def test_tasks_share_a_folder(model, images, rows, tmp_path, capsys):
  out = f'{tmp_path}/table/'
  write(model, images, out, shard=(1, 3))
  assert 'shard 1/3 is finished, 3 of 4 parts are left' in capsys.readouterr().out
  stop_after(1, model, images, out, shard=(0, 3))  # It has parts 0 and 3.
  other = copy.copy(model)
  other.params = jax.tree.map(lambda x: x * 2, model.params)
  with pytest.raises(ValueError, match="table' is a table of other weights"):
    write(other, images, out, shard=(2, 3))
  with counting(model) as seen:
    write(model, images, out, shard=(0, 2))  # Parts 0, which exists, and 2.
    assert seen == [BLOCK]
    write(model, images, out, shard=(9, 10))  # A shard without parts.
    write(model, images, out, shard=(0, 3))
  assert seen == [BLOCK, COUNT % BLOCK]
  assert "table/': 40 images, 3 of them broken" in capsys.readouterr().out
  assert_same(read_folder(out), rows)
  for shard in (None, (2, 3)):
    write(model, images, out, shard=shard)
    assert 'is complete: 40 images' in capsys.readouterr().out


def test_two_tasks_of_the_same_shard_are_rejected(model, images, tmp_path, monkeypatch):
  out, write_file = f'{tmp_path}/table/', tables.files.write

  def competing(path, content):
    write_file(path, content)
    if path.name == 'part-00001.parquet':
      with pytest.raises(ValueError, match=f"out='.*table' is held .*{os.getpid()}"):
        write(model, images, out, shard=(1, 4))

  monkeypatch.setattr(tables.files, 'write', competing)
  write(model, images, out, shard=(1, 4))


def test_damaged_or_outdated_parts_are_computed_again(model, images, rows, tmp_path):
  folder, out = tmp_path / 'photos', tmp_path / 'table'
  shutil.copytree(pathlib.Path(images[0]).parent, folder)
  copies = [str(folder / os.path.basename(path)) for path in images]
  write(model, copies, f'{out}/')
  shutil.copy(images[0], folder / '013.png')  # In part 1.
  content = bytearray((out / 'part-00002.parquet').read_bytes())
  content[len(content) // 2] ^= 16
  (out / 'part-00002.parquet').write_bytes(content)
  # The part of other images, with its description.
  for source, target in (('part-00000.parquet',) * 2, ('.part-00000.json',) * 2):
    target = target.replace('00000', '00003')
    shutil.copy(out / source, out / target)
  with counting(model) as counts:
    write(model, copies, f'{out}/')
  assert sum(counts) == 2 * BLOCK + COUNT % BLOCK
  classes = [row['class'] for row in read_folder(out)]
  expected = [row['class'] for row in rows]
  expected[13] = expected[0]
  assert classes == expected


def test_named_pipes_are_not_waited_for(model, images, tmp_path):
  out, images = tmp_path / 'table', images[: 2 * BLOCK]
  write(model, images, f'{out}/')
  expected = read_folder(out)
  for name in ('part-00000.parquet', '.part-00001.json'):
    (out / name).unlink()
    os.mkfifo(out / name)
  with counting(model) as counts:
    write(model, images, f'{out}/')
  assert sum(counts) == 2 * BLOCK
  assert read_folder(out) == expected
  (out / '.table.json').unlink()
  os.mkfifo(out / '.table.json')
  with pytest.raises(ValueError, match=r'\.table\.json.* is damaged: delete'):
    write(model, images, f'{out}/')


# --- The command ---


@pytest.fixture(scope='module')
def weights(model, tmp_path_factory):
  from vit_jax import checkpoint

  path = str(tmp_path_factory.mktemp('weights') / 'model.npz')
  checkpoint.save(model.params, path)
  return path


def test_the_command_writes_tables(weights, images, tmp_path):
  folder = pathlib.Path(images[0]).parent
  listed = folder.parent / 'list.txt'
  listed.write_text('\n'.join(os.path.relpath(x, folder.parent) for x in images))
  lines = folder.parent / 'list.jsonl'
  lines.write_text('\n'.join(json.dumps({'image': x}) for x in images[:9]))
  out = tmp_path / 'a.parquet'
  status, output = processes.finish_module(
    'vit_jax', 'predict', f'--weights={weights}', f'--out={out}',
    '--embeddings', str(listed),
  )  # fmt: skip
  assert status == 0, output
  assert '40 images, 3 of them broken' in output
  table = pd.read_parquet(out)
  assert list(table['path']) == images
  assert len(table['embedding'][0]) == 16
  out = tmp_path / 'b.jsonl'
  predict_command.main(
    [f'--weights={weights}', f'--out={out}', '--nodistributed', str(lines)]
  )
  assert [row['path'] for row in read_lines(out)] == images[:9]


def test_the_command_reads_a_dataset_split(weights, tmp_path, data_dir, monkeypatch):
  monkeypatch.setenv('TFDS_DATA_DIR', str(data_dir))
  out = tmp_path / 'digits.csv'
  predict_command.main(
    [f'--weights={weights}', f'--out={out}', '--nodistributed', 'digits:test[:30]']
  )
  table = pd.read_csv(out)
  assert len(table) == 30
  assert table['error'].isna().all()


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--out=table.xlsx', 'a.png'], 'no picture: leave out --out, or write a ta'),
    (['--out=exists.csv', 'a.png'], "out='.*exists.csv' exists: delete it, or"),
    (['--embeddings', 'a.png'], 'for a table of images: .* --out=table.parquet'),
    (['--broken=stop', 'a.png'], '--broken is for a table of images'),
    (['digits:test'], "'digits:test' is a split of a data set, whose"),
    (['--out=a.csv', 'empty'], "no images in '.*empty'"),
    (['--out=a.csv', 'bad.jsonl'], "bad.jsonl', line 2: must be like"),
    (
      ['--out=a.csv', '--embeddings=layer_9', 'a.png'],
      'layer_9.*features, pixels, layer_0, layer_1, .*such as',
    ),
    (
      ['--out=a.csv', '--embeddings=patches', 'a.png'],
      r"out='a.csv' .*array \[2, 2, 16\].*--out=table.parquet",
    ),
    (['--out=a.csv', '--threshold=.5', 'a.png'], 'has no --threshold'),
    (['--out=no/a.csv', 'a.png'], "out='no/a.csv'.*--out"),
    (['--out=no/table/', 'a.png'], "out='no/table/'.*--out"),
    (['--out=empty/', 'a.png', '--embeddings=layer_9'], 'layer_9.*features'),
    (['--out=empty', 'a.png'], "out='empty' is a folder"),
    (['--shard=0/2', 'a.png'], '--shard is for a folder.*--out=FOLDER/'),
    (['--out=a.csv', '--shard=0/2', 'a.png'], '--shard is for a folder.*out=a.csv'),
    (['--out=a/', '--shard=0/2', '--print=2', 'a.png'], '--print: not allowed with'),
    (['--out=a/', '--print=2', '--coordinator=a:1', 'a.png'], '--coordinator'),
    (['--out=a/', '--shard=2/2', 'a.png'], "--shard: '2/2' must be I/N"),
  ],
)
def test_wrong_input_is_rejected_and_writes_nothing(
  flags, message, weights, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'exists.csv').touch()
  (tmp_path / 'bad.jsonl').write_text('{"image": "a.png"}\n{"img": 3}\n')
  Image.new('RGB', (9, 9)).save('a.png')
  before = sorted(tmp_path.iterdir())
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    predict_command.main([f'--weights={weights}', '--nodistributed', *flags])
  assert sorted(tmp_path.iterdir()) == before


def test_the_command_prints_one_command_per_task(weights, images, tmp_path, capsys):
  folder, out = tmp_path / "O'Neil 1", tmp_path / 'table'
  folder.mkdir()
  for path in images[: 2 * BLOCK]:
    shutil.copy(path, folder)
  argv = [f'--weights={weights}', '--print', '2', f'--out={out}/', str(folder)]
  predict_command.main(argv)
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2
  for line in lines:
    program, command, *argv = shlex.split(line)
    assert (program, command) == ('vit_jax', 'predict')
    predict_command.main(argv)
  assert list(pd.read_parquet(out)['path']) == sorted(map(str, folder.iterdir()))


def test_a_classifier_without_a_head_has_only_embeddings(model, images):
  model = copy.copy(model)
  model.class_names = ()
  with pytest.raises(ValueError, match='has no head, .*--embeddings'):
    model.table(images[:2])
  table = model.table(images[:2], embeddings='features')
  assert table.column_names == ['path', 'embedding', 'error']


def test_patches_are_parquet_arrays_in_small_parts(
  model, images, tmp_path, monkeypatch
):
  monkeypatch.setattr(tables, 'BLOCK_BYTES', 3 * 2 * 2 * 16 * 4)  # Three images.
  out, images = f'{tmp_path}/table/', images[:8]
  columns = model.columns(embeddings='patches')
  tables.write(model, model._source(images), out, columns, {})
  table = pyarrow.parquet.read_table(out)
  assert table['path'].to_pylist() == images
  is_good = table['embedding'].is_valid()
  assert is_good.to_pylist() == [i not in BROKEN for i in range(8)]
  good = table.filter(is_good)
  found = good['embedding'].combine_chunks().to_numpy_ndarray()
  want = model.embed(good['path'].to_pylist(), 'patches')
  assert want.shape == (7, 2, 2, 16)
  np.testing.assert_allclose(found, want, atol=1e-5)


@pytest.mark.parametrize(
  'method, options, error',
  [
    ('table', {'embeddings': True}, "embeddings=True must be .*'features'.*'patches'"),
    ('table', {'embeddings': ['features']}, 'embeddings=.*must be the name of a layer'),
    ('table', {'embeddings': 'layer_99'}, "'layer_99' is not a layer .* layer_0"),
    ('table', {'top': 0}, 'top=0 must be .* at least 1'),
    ('embed', {'layer': True}, "layer=True must be .*'features'.*'patches'"),
    ('predict', {'top': -1}, 'top=-1 must be .* at least 1'),
    ('predict', {'top': 2.5}, 'top=2.5 must be an integer'),
  ],
)
def test_wrong_options_are_named(model, images, method, options, error):
  with pytest.raises(ValueError, match=error):
    getattr(model, method)(images[:1], **options)


# --- Existing tables ---


def test_existing_files_of_another_table_are_rejected(model, images, tmp_path):
  out, few = tmp_path / 'table.csv', images[:9]
  parts = tmp_path / 'table.csv.parts'
  parts.mkdir()
  (parts / 'mine.txt').touch()
  with pytest.raises(ValueError, match="table.csv.parts' exists.*--out"):
    write(model, few, out)
  (parts / 'mine.txt').unlink()
  other = copy.copy(model)
  other.params = jax.tree.map(lambda x: x * (1 + 1e-6), model.params)
  named = copy.copy(model)
  named.metadata = {'class_names': ['c', 'd']}
  mismatches = ((other, few, 'weights'), (named, few, 'config'),
                (model, images[1:9], 'images'))  # fmt: skip
  stop_before_joining(model, few, out)
  for which in (parts, out):
    for args in mismatches:
      with pytest.raises(ValueError, match=f"'{which}'.*other .*{args[2]}[,:].*--out"):
        write(*args[:2], out)
    facts = tmp_path / '.table.csv.json'
    content = facts.read_bytes()
    facts.write_bytes(content[:-9])
    with pytest.raises(ValueError, match='json.*damaged.*--out'):
      write(model, few, out)
    facts.write_bytes(content)
    write(model, few, out)
  assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []
  out.write_text('path\nmine\n')
  with pytest.raises(ValueError, match="table.csv'.*bytes.*--out"):
    write(model, few, out)
  out.unlink()  # Now nothing of the other table is left.
  write(model, images[1:9], out)


def stop_before_joining(model, images, out):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tables, 'encode', dying)
    with pytest.raises(KeyboardInterrupt):
      write(model, images, out)


def dying(*_):
  raise KeyboardInterrupt


def test_a_finished_table_of_changed_images_is_rejected(model, images, tmp_path):
  out, mine = tmp_path / 'table.parquet', tmp_path / 'a.png'
  shutil.copy(images[0], mine)
  write(model, [str(mine)], out)
  shutil.copy(images[1], mine)
  with pytest.raises(ValueError, match='contents of the images'):
    write(model, [str(mine)], out)


@pytest.mark.parametrize('name', FILES)
def test_a_finished_file_with_a_wrong_bit_is_rejected(model, images, tmp_path, name):
  out = tmp_path / name
  write(model, images[:9], out)
  write(model, images[:9], out)
  content = bytearray(out.read_bytes())
  content[len(content) // 2] ^= 16
  out.write_bytes(content)
  with pytest.raises(ValueError, match=f"{name}' is damaged.*checksum.*delete"):
    write(model, images[:9], out)
  out.unlink()
  write(model, images[:9], out)


@pytest.mark.parametrize('name', FILES)
def test_file_names_that_are_not_utf8_are_escaped(model, images, tmp_path, name):
  path = tmp_path / os.fsdecode(b'caf\xe9.png')
  shutil.copy(images[0], path)
  out = tmp_path / name
  [listed] = listing.expand([str(path)])
  write(model, [listed, images[5]], out)
  is_parquet = out.suffix == '.parquet'
  read = pyarrow.parquet.read_table if is_parquet else pathlib.Path.read_text
  text = str(read(out)).replace(2 * '\\', '\\')
  assert r'caf\udce9.png' in text


# --- Files that cannot be written or read ---


@pytest.mark.parametrize('name', ['table.csv.parts', '.table.csv.json', 'part'])
def test_a_file_or_folder_in_the_wrong_place_is_named(model, images, tmp_path, name):
  out, few = tmp_path / 'table.csv', images[:9]
  stop_before_joining(model, few, out)
  path = tmp_path / name
  if name == 'part':
    [path] = out.with_name('table.csv.parts').glob('part-*')
  if path.is_dir():
    shutil.rmtree(path)
    path.touch()
  else:
    path.unlink()
    path.mkdir()
  with pytest.raises((OSError, ValueError), match=f"out='{out}' .*{path.name}.*--out"):
    write(model, few, out)
  assert not out.exists()


@pytest.mark.parametrize(
  'name, code',
  [
    ('.table.parquet.json', errno.ENOSPC),
    ('part-00001', errno.ENOSPC),
    ('table.parquet', errno.ENOSPC),
    ('.table.parquet.json', errno.EROFS),
    ('part-00001', errno.EACCES),
  ],
)
def test_a_full_disk_or_read_only_folder_is_named(
  model, images, tmp_path, monkeypatch, name, code
):
  out, opened = tmp_path / 'table.parquet', tables.files.replacing

  @contextlib.contextmanager
  def replacing(path):
    with opened(path) as file:
      if path.name.startswith(name):
        if code != errno.ENOSPC:
          raise OSError(code, os.strerror(code), str(path))
        file = open('/dev/full', 'wb', buffering=0)  # pylint: disable=consider-using-with
      yield file

  monkeypatch.setattr(tables.files, 'replacing', replacing)
  with pytest.raises(OSError, match=f"^out='{out}' cannot .*{os.strerror(code)}"):
    write(model, images[:18], out)
  monkeypatch.undo()
  assert not out.exists()
  write(model, images[:18], out)


# --- Row groups ---


@pytest.mark.parametrize(
  'rows, size, expected', [(100_000, 2**29, [2500]), (1000, 2**29, [1000, 1000, 500]),
                           (1000, 1, [500] * 5)],
)  # fmt: skip
def test_row_groups_of_a_joined_table_are_large(monkeypatch, rows, size, expected):
  monkeypatch.setattr(tables, 'GROUP_ROWS', rows)
  monkeypatch.setattr(tables, 'GROUP_BYTES', size)
  kinds = {'path': str, 'embedding': (float, (2, 3)), 'error': str}
  numbers = np.arange(2500 * 6, dtype=np.float32).reshape(2500, 2, 3)
  found = [{'path': str(i), 'embedding': x} for i, x in enumerate(numbers)]
  parts = (tables.to_arrow(found[i : i + 500], kinds) for i in range(0, 2500, 500))
  file = io.BytesIO()
  tables.encode(parts, file, '.parquet')
  metadata = pyarrow.parquet.ParquetFile(file).metadata
  groups = range(metadata.num_row_groups)
  assert [metadata.row_group(i).num_rows for i in groups] == expected
  table = pyarrow.parquet.read_table(file)
  assert table['path'].to_pylist() == [str(i) for i in range(2500)]
  joined = table['embedding'].combine_chunks().to_numpy_ndarray()
  np.testing.assert_array_equal(joined, numbers)


def test_cells_of_csv_are_json_in_utf8():
  row = {'path': 'Vögel/猫.png', 'classes': ['Kätzchen', '猫 "Tama"']}
  table = tables.to_arrow([row], {'path': str, 'classes': [str]})
  file = io.BytesIO()
  tables.encode(iter([table]), file, '.csv')
  content = file.getvalue().decode()
  assert 'Vögel/猫.png,"[""Kätzchen"", ""猫' in content
  [again] = csv.DictReader(io.StringIO(content))
  assert json.loads(again['classes']) == row['classes']


def test_stamps_change_with_the_image_file(tmp_path, data_dir):
  for name in 'ab':
    (tmp_path / 'train' / name).mkdir(parents=True)
    Image.new('RGB', (8, 8)).save(tmp_path / 'train' / name / 'x.png')
  config = conftest.make_tiny_config(data_dir)
  source = sources.open_split(config, 'train', ('image',), dataset=str(tmp_path))
  before = records.stamps(source, [range(1), range(1, 2)])
  Image.new('RGB', (9, 8)).save(source.name(1))
  after = records.stamps(source, [range(1), range(1, 2)])
  assert [a == b for a, b in zip(after, before)] == [True, False]
