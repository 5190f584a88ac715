"""Tests of data sets in Parquet files with the layout of the Hugging Face Hub."""

import io
import json
import os

import numpy as np
from PIL import Image
import pyarrow as pa
from pyarrow import parquet as pq
import pytest

from tests import looked_up
from vit_jax import input_pipeline
from vit_jax.commands import index as index_command
from vit_jax.data import arrow, mixture, parquet, row_groups, sources

NAMES = ['cow', 'ant', 'bee']  # Not sorted.


def png(grey):
  file = io.BytesIO()
  Image.new('L', (4, 5), grey).save(file, 'PNG')
  return file.getvalue()


def write(path, columns, names=None, key='label'):
  """Writes row groups of two rows, with class names as `datasets` stores them."""
  path.parent.mkdir(exist_ok=True)
  table = pa.table(columns)
  if names:
    features = {key: {'names': names, '_type': 'ClassLabel'}}
    facts = json.dumps({'info': {'features': features}})
    table = table.replace_schema_metadata({'huggingface': facts})
  pq.write_table(table, path, row_group_size=2)


def images(greys):
  return [{'bytes': png(grey), 'path': f'{grey}.png'} for grey in greys]


@pytest.fixture
def root(tmp_path):
  """Two training files of 5 and 4 rows, and a test file of 3 rows."""
  for name, greys in (
    ('train-00000-of-00002', range(5)),
    ('train-00001-of-00002', range(5, 9)),
    ('test-00000-of-00001', range(20, 23)),
  ):
    columns = {
      'image': images(greys),
      'text': [f'number {grey}' for grey in greys],
      'label': [grey % 3 for grey in greys],
      'tags': [[str(grey)] * (grey % 2) for grey in greys],
      'score': [grey / 4 for grey in greys],
      'other': [{'x': 1}] * len(greys),
    }
    write(tmp_path / 'data' / f'{name}.parquet', columns, NAMES)
  return tmp_path


def open_split(config, root, split='train', *features, **kwargs):
  config.dataset = str(root)
  return sources.open_split(config, split, features or ('image', 'label'), **kwargs)


def greys_of(source):
  found = looked_up.features(source)['image']
  return [Image.open(io.BytesIO(image)).getpixel((0, 0)) for image in found]


def test_rows_keep_their_order_and_can_be_sliced(root, tiny_config):
  source = open_split(
    tiny_config, root, 'train', 'image', 'label', 'text', 'tags', 'score'
  )
  assert source.class_names == tuple(NAMES)
  assert source.name(6) == 'row 1 of train-00001-of-00002.parquet'
  found = looked_up.features(source, [8, 0, 3, 8])
  assert found['image'] == [png(grey) for grey in (8, 0, 3, 8)]
  assert [x.tolist() for x in found['label']] == [[2], [0], [0], [2]]
  assert found['text'] == [b'number 8', b'number 0', b'number 3', b'number 8']
  assert [x.tolist() for x in found['tags']] == [[], [], [b'3'], []]
  assert found['score'] == [2, 0, 0.75, 2]
  assert greys_of(source) == [*range(9)]
  parts = 'train[:10%]', 'train[10%:]', 'test[1:]+train[6:-1]'
  found = [greys_of(open_split(tiny_config, root, part)) for part in parts]
  assert found == [[0], [*range(1, 9)], [21, 22, 6, 7]]
  info = input_pipeline.get_dataset_info(str(root), 'test')
  assert (info['num_examples'], info['int2str'](0)) == (3, 'cow')


def test_startup_reads_only_labels_and_fingerprints_the_data(
  root, tiny_config, monkeypatch
):
  found = open_split(tiny_config, root).fingerprint()
  root = root.rename(root.parent / 'b')
  with monkeypatch.context() as patch:
    for name in ('read_row_group', 'read_row_groups'):
      patch.setattr(pq.ParquetFile, name, None)
    assert open_split(tiny_config, root).fingerprint() == found
  assert open_split(tiny_config, root, 'train[1:]').fingerprint() != found
  path = root / 'data' / 'train-00001-of-00002.parquet'
  size = path.stat().st_size
  rewritten(path, label=[2, 1, 0, 2])
  assert path.stat().st_size == size
  assert open_split(tiny_config, root).fingerprint() != found


def test_row_groups_are_read_once_per_host(
  root, tiny_config, tmp_path, monkeypatch, caplog
):
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
  small = open_split(tiny_config, root)
  monkeypatch.setattr(row_groups, 'MEMORY', 1)  # Too little.
  assert greys_of(open_split(tiny_config, root)) == [*range(9)]
  kept = sorted((tmp_path / 'cache' / 'parquet').iterdir())
  assert len(kept) == 5
  with monkeypatch.context() as patch:
    patch.setattr(pq.ParquetFile, 'read_row_group', None)
    assert greys_of(open_split(tiny_config, root)) == [*range(9)]
  kept[0].write_bytes(kept[0].read_bytes()[:-9])  # Damaged: rewritten.
  assert greys_of(open_split(tiny_config, root)) == [*range(9)]
  assert greys_of(small) == [*range(9)]
  assert len(small._groups) == 1  # The rest does not fit in memory.
  (tmp_path / 'file').touch()
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'file'))
  assert greys_of(open_split(tiny_config, root)) == [*range(9)]
  assert 'random order is slow' in caplog.text


def test_row_groups_with_damaged_offsets_are_rewritten(tmp_path, monkeypatch):
  """Arrow does not check them; reading there can end the process."""
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path))
  texts = {'text': [b'ab', b'cde', b'f']}

  def read():
    groups = row_groups.RowGroups(num_bytes=row_groups.MEMORY + 1)
    return groups.get(('file', 0), lambda: pa.table(texts)).to_pydict()

  assert read() == texts
  [path] = (tmp_path / 'parquet').iterdir()
  content = path.read_bytes()
  offsets, damaged = (np.int32([0, 2, x, 6]).tobytes() for x in (5, 2**30))
  assert content.count(offsets) == 1
  path.unlink()
  path.write_bytes(content.replace(offsets, damaged))
  assert read() == texts
  assert path.read_bytes() == content


@pytest.mark.parametrize(
  'train, names, test, classes, want',
  [
    (['b', 'a', None, 'b'], None, ['a', 'b'], ('a', 'b'), [[0], [1]]),
    ([2, 0, -1, 0], None, [1, -1], ('0', '1', '2'), [[1], [-1]]),
    ([[2, 0], [], None, [1]], None, [[1, 2], []], ('0', '1', '2'), [[1, 2], [-1, -1]]),
    ([1, 0, 0, 2], NAMES, [0, 1], tuple(NAMES), [[1], [2]]),
  ],
)
def test_labels_follow_the_training_split(
  tiny_config, tmp_path, train, names, test, classes, want
):
  key = 'kind' if names else 'label'
  columns = {key: train, 'img': images(range(4))}
  write(tmp_path / 'train' / '0.parquet', columns, names, key)
  columns = {key: test, 'img': images([1, 2])}
  # The test split numbers its classes in a different order.
  write(tmp_path / 'test' / '0.parquet', columns, names and sorted(names), key)
  assert open_split(tiny_config, tmp_path).class_names == classes
  source = open_split(tiny_config, tmp_path, 'test', class_names=classes)
  found = looked_up.features(source)['label']
  assert [x.tolist() for x in found] == want


def test_missing_split_is_reported_and_no_index_is_needed(root, tiny_config):
  with pytest.raises(FileNotFoundError, match=r"no split 'val': .*\['train', 'test'\]"):
    open_split(tiny_config, root, 'val')
  with pytest.raises(ValueError, match="'train' in Parquet files.* without an index"):
    index_command.main([str(root)])


def test_named_pipe_is_not_read(root, tiny_config):
  path = root / 'data' / 'train-00001-of-00002.parquet'
  path.unlink()
  os.mkfifo(path)
  with pytest.raises(ValueError, match="parquet' is a named pipe, not a regular"):
    open_split(tiny_config, root)


def rewritten(path, **columns):
  table = pq.read_table(path)
  columns = {**{x: table[x] for x in table.column_names}, **columns}
  write(path, columns, NAMES)


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda path: path.unlink(), "00000-of-00002.parquet' is one of 2 files.*1 are present"),
    (lambda path: path.write_bytes(b'PAR1'), 'train-00001-of-00002.parquet.* is damaged'),
    (lambda path: rewritten(path, more=[1] * 4), 'differ in .*more: int64'),
    (lambda path: rewritten(path, label=[0, 7, 1, 1]), '-00001-.* label 7 .* 3 '),
    (lambda path: rewritten(path, text=['', '', None, '']), "row 2 of .*00001.*: .* no 'text'"),
    (lambda path: path.write_bytes(zeroed(path)), 'row group 0 of .*00001.* is damaged'),
  ],
)  # fmt: skip
def test_errors_name_file_and_row(root, tiny_config, change, message):
  change(root / 'data' / 'train-00001-of-00002.parquet')

  def read():
    source = open_split(tiny_config, root, 'train', 'image', 'label', 'text')
    source.arrays(np.arange(source.num_examples))

  with pytest.raises((ValueError, FileNotFoundError), match=message):
    read()


def test_classes_of_all_files_must_agree(root, tiny_config):
  path = root / 'data' / 'train-00001-of-00002.parquet'
  table = pq.read_table(path)
  write(path, {x: table[x] for x in table.column_names}, sorted(NAMES))
  with pytest.raises(
    ValueError, match="00001.*00000.* class names of 'label', .*'ant'.* and .*'cow'"
  ):
    open_split(tiny_config, root)


def class_names(facts):
  schema = pa.schema([], metadata={'huggingface': json.dumps(facts)})
  return arrow.read_class_names(schema, 'a.parquet')


def test_class_names_in_the_metadata_of_datasets():
  def of_label(fact):
    return class_names({'info': {'features': {'label': fact}}})

  fact = {'_type': 'ClassLabel', 'names': ['a', 'b']}
  for described in (fact, [fact], {'_type': 'Sequence', 'feature': fact}):
    assert of_label(described) == {'label': ('a', 'b')}
  for other in ([], None, 'x', {'feature': 'x'}, {'_type': 'Value'}, {'names': [1]}):
    assert of_label(other) == {}
  for other in (None, [], {'info': None}, {'info': {'features': [1]}}):
    assert class_names(other) == {}
  for names in ([1, 2], 'ab', {'a': 0}):
    with pytest.raises(ValueError, match="a.parquet' .*'label' .*list of strings"):
      of_label({'_type': 'ClassLabel', 'names': names})


def test_classes_of_the_same_name_stay_apart(tiny_config, tmp_path):
  """ImageNet has two classes 'crane'."""
  names = ['crane', 'cat', 'crane']
  for split, labels in (('train', [0, 1, 2]), ('test', [2, 0, 1])):
    columns = {'image': images(range(3)), 'label': labels}
    write(tmp_path / split / '0.parquet', columns, names)
  train = open_split(tiny_config, tmp_path)
  assert train.class_names == tuple(names)
  assert [x.tolist() for x in looked_up.features(train)['label']] == [[0], [1], [2]]
  test = open_split(tiny_config, tmp_path, 'test', class_names=names)
  assert [x.tolist() for x in looked_up.features(test)['label']] == [[2], [0], [1]]
  pairs = [(str(tmp_path), 1.0), (str(tmp_path), 2.0)]
  assert mixture.MixtureSource([train, train], pairs).class_names == tuple(names)
  with pytest.raises(ValueError, match="test' lists .* order .*named 'crane'"):
    open_split(tiny_config, tmp_path, 'test', class_names=sorted(names))


def test_names_of_several_classes_are_no_labels(tiny_config, tmp_path):
  columns = {'image': images(range(2)), 'label': ['crane', 'cat']}
  write(tmp_path / 'train' / '0.parquet', columns, ['crane', 'cat', 'crane'])
  with pytest.raises(ValueError, match="classes .*named 'crane', .*write the numbers"):
    open_split(tiny_config, tmp_path)


def test_repeated_columns_are_rejected(tiny_config, tmp_path):
  (tmp_path / 'data').mkdir()
  columns = [pa.array(images([1, 2])), pa.array([0, 1]), pa.array([1, 0])]
  table = pa.table(columns, names=['image', 'label', 'label'])
  pq.write_table(table, tmp_path / 'data' / 'train.parquet')
  with pytest.raises(ValueError, match="several columns 'label'"):
    open_split(tiny_config, tmp_path)


def test_bytes_of_an_image_must_be_binary():
  for kind, of in (
    ('bytes', pa.binary()),
    ('', pa.list_(pa.int64())),
    ('', pa.string()),
  ):
    assert arrow.read_column('image', pa.struct([('bytes', of)])).kind == kind


def test_checksums_of_pages_are_compared(tiny_config, tmp_path):
  path = tmp_path / 'data' / 'train.parquet'
  path.parent.mkdir()
  table = pa.table({'image': images(range(3)), 'label': [2, 0, 1]})
  options = dict(write_page_checksum=True, use_dictionary=False, compression='none')
  pq.write_table(table, path, **options)
  stored, damaged = (np.array(x, np.int64).tobytes() for x in ([2, 0, 1], [1, 0, 1]))
  content = path.read_bytes()
  assert content.count(stored) == 1
  path.write_bytes(content.replace(stored, damaged))
  with pytest.raises(ValueError, match="train.parquet' is damaged: .*CRC"):
    open_split(tiny_config, tmp_path)


def test_all_errors_of_arrow_name_the_file():
  with pytest.raises(ValueError, match='a.parquet is damaged: no type'):
    with parquet.name_damaged('a.parquet'):
      raise pa.ArrowNotImplementedError('no type')


def zeroed(path):
  content = path.read_bytes()
  return content[:4] + bytes(200) + content[204:]


def test_missing_or_broken_image_names_the_row(root, tiny_config):
  path = root / 'data' / 'test-00000-of-00001.parquet'
  pictures = images([1, 2, 3])
  pictures[1]['bytes'], pictures[2]['bytes'] = b'no image', None
  rewritten(path, image=pictures)
  source = open_split(tiny_config, root, 'test')
  with pytest.raises(ValueError, match='row 1 of test-.* cannot be decoded'):
    source.check(source.record(1), 1)
  with pytest.raises(FileNotFoundError, match=r"row 2 of test-.*no .* file .*3.png'"):
    source.arrays(np.array([2]))
  pictures[2]['path'] = None
  rewritten(path, image=pictures)
  with pytest.raises(ValueError, match=r'row 2 of test-.*parquet: .*image.bytes'):
    open_split(tiny_config, root, 'test').arrays(np.array([2]))


def test_images_without_bytes_are_read_from_their_paths(root, tiny_config, tmp_path):
  """As `datasets` stores images of files."""
  path = root / 'data' / 'test-00000-of-00001.parquet'
  places = root / '7.png', root / 'data' / '8.png', tmp_path / 'elsewhere' / '9.png'
  places[2].parent.mkdir()
  for place in places:
    place.write_bytes(png(int(place.stem)))
  pictures = [{'bytes': None, 'path': x} for x in ('7.png', '8.png', str(places[2]))]
  rewritten(path, image=pictures)
  assert greys_of(open_split(tiny_config, root, 'test')) == [7, 8, 9]
  pictures[1]['bytes'] = png(3)
  rewritten(path, image=pictures)
  assert greys_of(open_split(tiny_config, root, 'test')) == [7, 3, 9]


@pytest.mark.parametrize(
  'labels, kind',
  [([True, False], 'bool'), ([1.0, None], 'double'), ([[0.5], []], 'list<.*double>')],
)
def test_labels_of_other_types_are_named(tiny_config, tmp_path, labels, kind):
  columns = {'image': images(range(2)), 'label': labels}
  write(tmp_path / 'data' / 'train.parquet', columns)
  with pytest.raises(ValueError, match=f"train.parquet' has labels of the type {kind}"):
    open_split(tiny_config, tmp_path)
  assert greys_of(open_split(tiny_config, tmp_path, 'train', 'image')) == [0, 1]


def test_lists_of_labels_are_padded(tiny_config, tmp_path):
  """Also null, -1 for no label, and different lengths in two files."""
  files = [[[2], [], None, [-1]], [[0, 1], [None, 2]]]
  for number, labels in enumerate(files):
    columns = {'image': images(range(len(labels))), 'label': labels}
    write(tmp_path / 'data' / f'train-{number}.parquet', columns, NAMES)
  tiny_config.dataset = str(tmp_path)
  source = sources.open_split(tiny_config, 'train')
  expected = [[2, -1], [-1, -1], [-1, -1], [-1, -1], [0, 1], [2, -1]]
  assert source.labels().tolist() == expected
  looked_up_labels = looked_up.features(source)['label']
  assert [[x for x in row if x >= 0] for row in expected] == [
    [x for x in row.tolist() if x >= 0] for row in looked_up_labels
  ]
  part = sources.open_split(tiny_config, 'train[3:5]')
  assert part.labels().tolist() == expected[3:5]


def test_misnamed_label_column_is_reported(tiny_config, tmp_path):
  columns = {'image': images(range(2)), 'labels': [0, 1]}
  write(tmp_path / 'data' / 'train-0.parquet', columns)
  tiny_config.dataset = str(tmp_path)
  with pytest.raises(ValueError, match="column 'label'.* rename 'labels' to 'label'"):
    sources.open_split(tiny_config, 'train')
