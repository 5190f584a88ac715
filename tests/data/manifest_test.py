"""Tests of manifests: features, labels, errors, and the parsed cache."""

from concurrent import futures
import json
import os
import shutil
import signal
import time

import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from tests import looked_up, processes
from vit_jax import input_pipeline
from vit_jax.data import manifest, manifest_cache, manifest_files, records, sources


def write(root, lines, split='train'):
  """Writes a manifest, and small images for its lines.

  Args:
    root: the folder.
    lines: dicts without `image`, which becomes photos/<number>.png of grey
      value <number>; strings are written as they are.
    split: name of the manifest.
  """
  (root / 'photos').mkdir(exist_ok=True)
  texts = []
  for i, line in enumerate(lines):
    if isinstance(line, dict):
      pixels = np.full((4, 5), i, np.uint8)
      Image.fromarray(pixels).save(root / 'photos' / f'{i}.png')
      line = json.dumps({'image': f'photos/{i}.png', **line})
    texts.append(line)
  (root / f'{split}.jsonl').write_text('\n'.join(texts) + '\n')


def read(root, *features, split='train', **kwargs):
  """Returns the features in the order of the lines, and the class names."""
  columns, names = manifest.read_split(str(root), split, ('image', *features), **kwargs)
  numbers = [int(path.split('/')[-1][:-4]) for path in columns.pop('image')]
  order = np.argsort(numbers)
  return {name: tf.gather(x, order) for name, x in columns.items()}, names


def test_types_and_shapes_of_features(tmp_path):
  first = {
    'count': 3, 'score': 1, 'caption': 'a cat', 'seen': True, 'vector': [1, 2.5],
    'words': ['a', 'cat'], 'matrix': [[1, 2], [3, 4]],
    'camera': {'id': 7, 'lens': {'mm': 35.0}},
    'objects': [
      {'bbox': [0, 0.5, 1, 1], 'label': 2, 'outline': [1.5]},
      {'bbox': [0, 0, 1, 1], 'label': 0, 'outline': []},
    ],
    'regions': {'bbox': [[0, 1, 2, 3]], 'area': [4]}, 'nothing': [],
  }  # fmt: skip
  second = {
    'count': -4, 'score': 0.25, 'caption': '', 'seen': False, 'vector': [3, 4],
    'words': [], 'matrix': [[5, 6], [7, 8]], 'camera': {'id': 8, 'lens': {'mm': 50}},
    'objects': [], 'regions': {'bbox': [], 'area': []}, 'nothing': [],
  }  # fmt: skip
  write(tmp_path, [first, second])
  got, names = read(tmp_path, *first, 'depth?')
  assert names == {}

  def values(x):
    return getattr(x, 'to_list', lambda: x.numpy().tolist())()

  found = {k: (x.dtype.name, x.shape.as_list(), values(x)) for k, x in got.items()}
  boxes = [[0.0, 0.5, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]]
  assert found == {
    'count': ('int64', [2], [3, -4]),
    'score': ('float32', [2], [1.0, 0.25]),
    'caption': ('string', [2], [b'a cat', b'']),
    'seen': ('bool', [2], [True, False]),
    'vector': ('float32', [2, 2], [[1.0, 2.5], [3.0, 4.0]]),
    'matrix': ('int64', [2, 2, 2], [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
    'camera/id': ('int64', [2], [7, 8]),
    'camera/lens/mm': ('float32', [2], [35.0, 50.0]),
    'words': ('string', [2, None], [[b'a', b'cat'], []]),
    'objects/bbox': ('float32', [2, None, 4], [boxes, []]),
    'objects/label': ('int64', [2, None], [[2, 0], []]),
    'objects/outline': ('float32', [2, None, None], [[[1.5], []], []]),
    'regions/bbox': ('int64', [2, None, 4], [[[0, 1, 2, 3]], []]),
    'regions/area': ('int64', [2, None], [[4], []]),
    'nothing': ('float32', [2, None], [[], []]),
  }


def test_labels_are_names_numbers_or_missing(tmp_path):
  labels = ['cow', None, ['ant', 'cow'], [], 'bee']
  write(tmp_path, [{'label': label} for label in labels] + [{}])
  got, names = read(tmp_path, 'label')
  assert names == {'label': ('ant', 'bee', 'cow')}
  want = [[2, -1], [-1, -1], [0, 2], [-1, -1], [1, -1], [-1, -1]]
  assert got['label'].numpy().tolist() == want
  write(tmp_path, [{'label': 2}, {'label': 0}, {}], 'test')
  got, names = read(tmp_path, 'label', split='test')
  assert names == {'label': ('0', '1', '2')}
  assert got['label'].numpy().tolist() == [[2], [0], [-1]]


def test_classes_of_the_training_split_apply_to_all_splits(tmp_path):
  write(tmp_path, [{'label': 'bee'}], 'test')
  got, names = read(tmp_path, 'label', split='test', class_names=('ant', 'bee'))
  assert names == {'label': ('ant', 'bee')}
  assert got['label'].numpy().tolist() == [[1]]
  for labels in (('bee', 'wasp'), (1, 2)):
    write(tmp_path, [{'label': label} for label in labels], 'test')
    message = f'test.jsonl:2: {json.dumps(labels[1])} is not .* 2 classes'
    with pytest.raises(ValueError, match=message):
      read(tmp_path, 'label', split='test', class_names=('ant', 'bee'))


def test_classes_may_be_listed_in_a_file(tmp_path):
  write(tmp_path, [{'label': 'bee'}, {'label': ['wasp']}])
  write(tmp_path, [{'label': 1}, {'label': 0}], 'test')
  (tmp_path / 'classes.json').write_text('["wasp", "bee"]')
  for split in ('train', 'test'):
    got, names = read(tmp_path, 'label', split=split)
    assert names == {'label': ('wasp', 'bee')}
    assert got['label'].numpy().tolist() == [[1], [0]]
  # For other features too.
  (tmp_path / 'classes.json').write_text('{"objects/label": ["cat", "dog"]}')
  objects = [{'label': 'dog'}, {'label': 'cat'}]
  write(tmp_path, [{'objects': objects}, {'objects': []}])
  got, names = read(tmp_path, 'objects')
  assert names == {'objects/label': ('cat', 'dog')}
  assert got['objects/label'].to_list() == [[1, 0], []]
  write(tmp_path, [{'objects': objects}, {'objects': [{'label': 'cow'}]}])
  with pytest.raises(ValueError, match=r'train.jsonl:2: "cow" is not .* 2 classes'):
    read(tmp_path, 'objects')


@pytest.mark.parametrize(
  'line, message',
  [
    ('{"image": "photos/0.png"', 'valid JSON'),
    ('{"image": ' + 100_000 * '[', 'not valid JSON: .*nested too deeply'),
    ('{"image": "photos/0.png", "x": [1' + 20 * '0' + ', 2]}', 'large for int64'),
    ('{"image": photos/0.png}', 'not valid JSON: invalid character'),
    ('["photos/0.png"]', r'object, .* \["photos/0.png"\]'),
    ('{"x": [1, 2]}', '`image` must be the path of an image, but is missing'),
    ('{"image": "photos/0.png"}', "there is no 'x', which other lines have"),
    ('{"image": "photos/0.png", "x": [[1]]}', r"'x' is \[\[1\]\], and \[1, 2\] on"),
    ('{"image": "photos/0.png", "x": [{"y": 1}, {}]}', "objects of 'x' must all"),
    (r'{"image": "photos/0.png\u0000", "x": [1, 2]}', '`image` must be .*0.png'),
    ('{"image": "photos/0.png", "x": [0.5, 1e39]}', r"'x' is 1e\+39.*float32"),
    ('{"image": "photos/0.png", "x": [1, 9223372036854775808]}', "'x' is 922.*int64"),
    ('{"image": "photos/0.png", "x": [1, 2], "x": [3, 4]}', "key 'x' is repeated"),
    ('{"image": "photos/0.png", "x": {"y" : 1, "y": 2}}', "key 'y' is repeated"),
    ('{"image": "photos/0.png", "x": ' + 100_000 * '[', 'nested too deeply'),
    ('{"image": "photos/none.png", "x": [1, 2]}', 'there is no image file .*none.png'),
    ('{"image": "train.jsonl", "x": [1, 2]}', 'train.jsonl: not an image of a known'),
  ],
)  # fmt: skip
def test_errors_name_the_line(tmp_path, line, message):
  write(tmp_path, [{'x': [1, 2]}, '', line])
  with pytest.raises(ValueError, match=rf'train.jsonl:3: .*{message}'):
    read(tmp_path, 'x')


@pytest.mark.parametrize(
  'labels, message',
  [
    (['a', 1], 'train.jsonl:2: `label` is 1: .*train.jsonl:1'),
    ([0, -1], 'train.jsonl:2: `label` is -1: .*999,999'),
    ([0, 1.5], 'train.jsonl:2: `label` is 1.5: .*name or the number'),
    ([None, None], 'train.jsonl:1: neither this line nor any other has a `label`'),
  ],
)  # fmt: skip
def test_wrong_labels(tmp_path, labels, message):
  write(tmp_path, [{'label': label} for label in labels])
  with pytest.raises(ValueError, match=message):
    read(tmp_path, 'label')


def test_classes_of_the_same_name_have_numbers(tmp_path):
  write(tmp_path, [{'label': 2}, {'label': [0, 1]}])
  (tmp_path / 'classes.json').write_text('["crane", "cat", "crane"]')
  got, names = read(tmp_path, 'label')
  assert names == {'label': ('crane', 'cat', 'crane')}
  assert sorted(got['label'].numpy().tolist()) == [[0, 1], [2, -1]]
  write(tmp_path, [{'label': 'cat'}, {'label': 'crane'}])
  with pytest.raises(
    ValueError, match='jsonl:2: several .* named "crane": write the n'
  ):
    read(tmp_path, 'label')


def test_invalid_lists_of_classes(tmp_path):
  write(tmp_path, [{'label': 0}])
  for text in ('["a", 1]', '{"label": 3}', '{"label": ["a"], "label": ["b"]}'):
    (tmp_path / 'classes.json').write_text(text)
    with pytest.raises(ValueError, match=r"classes.json' "):
      read(tmp_path, 'label')


@pytest.mark.parametrize('name', ['train.jsonl', 'classes.json', 'photos/0.png'])
def test_named_pipes_are_not_read(tmp_path, name):
  write(tmp_path, [{'label': 0}, {'label': 1}])
  (tmp_path / name).unlink(missing_ok=True)
  os.mkfifo(tmp_path / name)
  with pytest.raises(ValueError, match=f"{name}' is a named pipe, not a regular"):
    read(tmp_path, 'label')


def test_missing_features_and_splits(tiny_config, tmp_path):
  write(tmp_path, [{'x': 1}])
  tiny_config.dataset = str(tmp_path)
  with pytest.raises(
    ValueError, match=r"train.jsonl' has no column 'label'.*\['image', 'x'\]"
  ):
    sources.open_split(tiny_config, 'train')
  with pytest.raises(
    FileNotFoundError, match=r"no split 'test'.*\['photos', 'train.jsonl'\]"
  ):
    sources.open_split(tiny_config, 'test')
  with pytest.raises(FileNotFoundError, match=r"no manifest '.*test.jsonl'"):
    sources.open_split(tiny_config, 'train+test', ('image',))
  (tmp_path / 'empty.jsonl').write_text('\n')
  with pytest.raises(ValueError, match="empty.jsonl' is empty"):
    sources.open_split(tiny_config, 'empty')


@pytest.mark.parametrize('name', ['labels', 'Label'])
def test_misnamed_column_is_reported(tmp_path, name):
  write(tmp_path, [{name: 'cat'}])
  with pytest.raises(ValueError, match=f"column 'label'.* rename '{name}' to 'label'"):
    read(tmp_path, 'label')


def test_broken_images_are_skipped_if_configured(tmp_path, caplog):
  write(tmp_path, [{'x': i} for i in range(5)])
  (tmp_path / 'photos' / '2.png').unlink()
  (tmp_path / 'photos' / '3.png').write_text('no image')
  with pytest.raises(ValueError, match='2 of 5 images cannot be') as error:
    read(tmp_path, 'x')
  for i in (3, 4):
    assert f'train.jsonl:{i}: {tmp_path}/photos/{i - 1}.png' in str(error.value)
  got, _ = read(tmp_path, 'x', broken='skip')
  assert got['x'].numpy().tolist() == [0, 1, 4]
  assert 'Skipped 2 of 5 images' in caplog.text
  got, _ = read(tmp_path, 'x', broken='trust')
  assert got['x'].numpy().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize('kind', ['manifest', 'metadata', 'metadata without labels'])
def test_manifest_of_a_class_folder_gives_the_same_examples(
  tiny_config, image_folder, tmp_path, kind
):
  """As a manifest, or as an "imagefolder" of Hugging Face's `datasets`."""
  root = shutil.copytree(image_folder, tmp_path / 'root')
  key, top = ('image', root) if kind == 'manifest' else ('file_name', None)
  for split in ('train', 'test'):
    lines = []
    for path in sorted((root / split).glob('*/*')):
      name = str(path.relative_to(top or root / split))
      line = {key: name, 'text': path.name, 'label': path.parent.name}
      if kind == 'metadata without labels':
        del line['label']  # Taken from the folder name.
      lines.append(json.dumps(line))
    place = f'{split}.jsonl' if top else f'{split}/metadata.jsonl'
    (root / place).write_text('\n'.join(lines))
  tiny_config.dataset, found = str(image_folder), []
  for features in (('image', 'label'), ('image', 'label', 'text')):
    source = sources.open_split(tiny_config, 'train[:80%]+test[:3]', features)
    assert source.class_names == ('ant', 'bee', 'cow')
    found.append(looked_up.features(source))
    tiny_config.dataset = str(root)
  names = [source.name(i).split('/')[-1] for i in range(source.num_examples)]
  assert [text.decode() for text in found[1]['text']] == names
  assert found[0]['image'] == found[1]['image']
  np.testing.assert_array_equal(found[0]['label'], found[1]['label'])
  info = input_pipeline.get_dataset_info(str(root), 'test')
  assert (info['num_examples'], info['int2str'](2)) == (9, 'cow')
  (root / place).write_text('{"text": "a"}')
  with pytest.raises(ValueError, match=rf'{place}:1: `{key}` .*missing'):
    sources.open_split(tiny_config, 'test')


def test_order_does_not_depend_on_the_location_of_the_manifest(tmp_path):
  orders = []
  for name in ('here', 'there'):
    (tmp_path / name).mkdir()
    write(tmp_path / name, [{'x': i} for i in range(20)])
    columns, _ = manifest.read_split(str(tmp_path / name), 'train', ('x',))
    orders.append(columns['x'].numpy().tolist())
  assert orders[0] == orders[1] != list(range(20))
  first, _ = manifest.read_split(str(tmp_path / 'here'), 'train[:70%]', ('x',))
  last, _ = manifest.read_split(str(tmp_path / 'here'), 'train[70%:]', ('x',))
  assert [*first['x'].numpy(), *last['x'].numpy()] == orders[0]


def test_images_may_be_outside_the_folder(tiny_config, image_folder, tmp_path):
  outside = next((image_folder / 'test' / 'bee').iterdir())
  write(tmp_path, [{'x': [0] * i, 'image': str(outside)} for i in range(3)])
  tiny_config.update(dataset=str(tmp_path), batch_eval=4)
  source = sources.open_split(tiny_config, 'train', ('image', 'x'))

  def example(record, seed):
    assert record['x'].shape.as_list() == [None]
    same = tf.reduce_all(record['image'] == outside.read_bytes())
    return {'same': same, 'size': tf.size(record['x'])}

  data = input_pipeline.eval_dataset(tiny_config, source, example, np.arange(4))
  [batch] = data.as_numpy_iterator()
  assert batch['same'].tolist() == [True, True, True, False]
  assert sorted(batch['size'][:3]) == [0, 1, 2]


@pytest.fixture
def stored(tmp_path, monkeypatch):
  """Caches manifests of any size; returns functions that read and list the cache."""
  cache = tmp_path / 'cache' / 'manifests'
  monkeypatch.setenv('VIT_JAX_CACHE', str(cache.parent))
  monkeypatch.setattr(manifest_cache, 'LARGE', 0)
  lines = [{'label': x, 'caption': x, 'box': [i] * i} for i, x in enumerate('abcab')]
  write(tmp_path, [*lines, {'label': None, 'caption': '', 'box': []}])

  def read_all(split='train[:80%]'):
    wanted = 'image', 'label', 'caption', 'box'
    columns, names = manifest.read_split(str(tmp_path), split, wanted)
    images = list(columns.pop('image'))
    rows = {k: getattr(v, 'to_list', v.numpy)() for k, v in columns.items()}
    return images, {k: np.asarray(v, object).tolist() for k, v in rows.items()}, names

  return read_all, lambda: sorted(x for x in cache.glob('*') if x.is_dir())


def _never(*args):
  raise AssertionError('parsed again')


def test_large_manifest_is_parsed_once(stored, tmp_path, monkeypatch):
  read_all, folders = stored
  with monkeypatch.context() as patch:
    patch.setattr(manifest_cache, 'LARGE', 10**9)
    wanted = read_all()
  assert not folders()
  assert read_all() == wanted
  assert len(folders()) == 1
  with monkeypatch.context() as patch:
    patch.setattr(manifest_files, 'parse', _never)
    assert read_all() == wanted
  assert read_all('train[80%:]') != wanted  # Each slice is stored separately.
  assert len(folders()) == 2
  (tmp_path / 'photos' / '2.png').write_bytes(b'no image')
  with pytest.raises(ValueError, match=r'train.jsonl:3: .*2\.png'):
    read_all('train')


@pytest.mark.parametrize(
  'name, change',
  [
    ('facts.json', lambda x: x[:-1]),
    ('names.npy', lambda x: x[:-1] + bytes([x[-1] ^ 1])),
  ],
)
def test_damaged_stored_manifest_is_rewritten(stored, name, change, monkeypatch):
  read_all, folders = stored
  wanted = read_all()
  path = folders()[0] / name
  content = path.read_bytes()
  assert change(content) != content
  path.write_bytes(change(content))
  assert read_all() == wanted
  monkeypatch.setattr(manifest_files, 'parse', _never)
  assert read_all() == wanted


def test_changed_manifest_of_equal_size_replaces_the_stored_one(stored, tmp_path):
  read_all, folders = stored
  read_all()
  old, path = folders(), tmp_path / 'train.jsonl'
  (old[0].parent / f'.{old[0].name}.1234.tmp').mkdir()  # Left by kill -9.
  path.write_text(path.read_text().replace('"label": "c"', '"label": "d"'))
  assert read_all()[2]['label'] == ('a', 'b', 'd')
  assert len(folders()) == 1
  assert folders() != old
  assert not list(old[0].parent.glob('.*.tmp'))


_KILLED = """
import os, signal, sys
from vit_jax.data import manifest, manifest_cache
os.environ['VIT_JAX_CACHE'] = f'{sys.argv[1]}/cache'
manifest_cache.LARGE = 0
manifest_cache._save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
manifest.read_split(sys.argv[1], 'train', ('image', 'label', 'caption', 'box'))
"""


def test_readers_parse_once_even_after_a_kill(stored, tmp_path, monkeypatch):
  read_all, folders = stored
  status, output = processes.finish_code(_KILLED, tmp_path)
  assert status == -signal.SIGKILL, output
  assert [x.name[0] for x in folders()] == ['.']  # Incomplete.
  parse, parsed = manifest_files.parse, []

  def slow(*args):
    parsed.append(args)
    time.sleep(0.5)
    return parse(*args)

  monkeypatch.setattr(manifest_files, 'parse', slow)
  with futures.ThreadPoolExecutor(3) as pool:
    first, *others = pool.map(lambda _: read_all(), range(3))
  assert others == [first] * 2
  assert len(parsed) == 1
  assert [x.name[0] == '.' for x in folders()] == [False]


def test_columns_that_a_run_reads_are_not_renamed():
  with pytest.raises(ValueError, match="has no column 'age'") as error:
    records.resolve(('image', 'age'), ['image', 'years'], 'train.jsonl', 'column')
  assert 'rename' not in str(error.value)
