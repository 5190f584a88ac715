r"""Tests of metadata files as in an "imagefolder" of Hugging Face's `datasets`.

`datasets` 5.2.0 reads the same labels from folders like these, but from none in which
no line has a label.
"""

import json
import os
import pathlib
import shutil

from PIL import Image
import pytest

from tests import looked_up
from vit_jax.commands import index as index_command
from vit_jax.data import indexing, manifest_files, sources

CSV = '\ufefffile_name,label,year\r\nant/0.png,"big, cat",1999\r\nbee/0.png,dog,\r\n'
NAMES = 'ant/0.png', 'ant/1.png', 'bee/0.png', 'bee/1.png'


@pytest.fixture
def root(tmp_path):
  """A folder with two images of each of the classes ant and bee."""
  for name in NAMES:
    (tmp_path / 'train' / name).parent.mkdir(parents=True, exist_ok=True)
    Image.new('L', (4, 5)).save(tmp_path / 'train' / name)
  return tmp_path


def labels(config, root, split='train') -> dict[str, str]:
  """Returns the classes of the images by path."""
  config.dataset = str(root)
  source = sources.open_split(config, split)
  numbers = [int(label[0]) for label in looked_up.features(source)['label']]
  paths = [os.path.relpath(source.name(i), root) for i in range(len(numbers))]
  return {path: source.class_names[i] for path, i in zip(paths, numbers)}


def write(root, name, rows):
  (root / name).write_text(''.join(json.dumps(row) + '\n' for row in rows))


def test_labels_of_a_split_win_over_class_folders(root, tiny_config):
  (root / 'train' / 'metadata.csv').write_text(CSV, newline='')
  want = {'train/ant/0.png': 'big, cat', 'train/bee/0.png': 'dog'}
  assert labels(tiny_config, root) == want
  assert labels(tiny_config, root, 'train[:1]+train[1:]') == want
  shutil.move(root / 'train', root / 'images')
  assert labels(tiny_config, root / 'images', '.') == {
    name.removeprefix('train/'): label for name, label in want.items()
  }


@pytest.mark.parametrize('ending', ['jsonl', 'csv'])
def test_labels_in_class_folders_win_over_these(root, tiny_config, caplog, ending):
  for name, label in (('ant', 'dog'), ('bee', 'cat')):
    text = 'file_name,label\n0.png,' + label
    if ending == 'jsonl':
      text = json.dumps({'file_name': '0.png', 'label': label})
    (root / 'train' / name / f'metadata.{ending}').write_text(text)
  want = {'train/ant/0.png': 'dog', 'train/bee/0.png': 'cat'}
  assert labels(tiny_config, root) == want
  assert f'Left out 2 images of {root}/train that no metadata' in caplog.text
  _, count, broken = indexing.make(str(root), 'train')
  assert (count, broken) == (2, [])
  assert labels(tiny_config, root) == want
  (root / 'train' / 'ant' / '0.png').write_bytes(b'x')
  path, _, [broken] = indexing.make(str(root), 'train')
  assert path.endswith('train.jsonl.index.npz')
  assert 'ant/0.png: not an image' in broken
  shutil.rmtree(root / 'train' / 'ant')
  for path in root.glob('train/*/metadata.*'):
    path.unlink()
  assert labels(tiny_config, root) == {f'train/bee/{i}.png': 'bee' for i in range(2)}


def test_one_file_for_all_splits(root, tiny_config, capsys):
  shutil.copytree(root / 'train', root / 'test')
  rows = [{'file_name': f'train/{name}', 'label': name[-5]} for name in NAMES]
  write(root, 'metadata.jsonl', [*rows, {'file_name': 'other/0.png', 'label': 'x'}])
  want = {f'train/{name}': name[-5] for name in NAMES}
  assert labels(tiny_config, root) == want
  assert f"'train' of '{root}' is listed in '{root}/metadata" in capsys.readouterr().out
  # It does not list the images of this split.
  assert set(labels(tiny_config, root, 'test').values()) == {'ant', 'bee'}
  rows = [{'file_name': f'./train/{name}'} for name in NAMES]
  write(root, 'metadata.jsonl', rows)
  assert labels(tiny_config, root) == {f'train/{name}': name[:3] for name in NAMES}
  write(root, 'metadata.jsonl', [{'camera': 'x'}])
  assert labels(tiny_config, root) == {f'train/{name}': name[:3] for name in NAMES}
  assert index_command.main([str(root), '--check=none']) == 0
  assert [path.name for path in pathlib.Path(root).glob('*.npz')] == [
    'test.index.npz', 'train.index.npz',
  ]  # fmt: skip


def test_columns_of_csv_have_types(root):
  path = root / 'train' / 'metadata.csv'
  path.write_text('file_name,a,b,c,d\nant/0.png,-3,1e3,01,\nbee/0.png,,0.5,2,NA\n')
  first, second = manifest_files.parse(str(root), 'train')
  assert first.values == {
    'image': 'ant/0.png', 'a': -3, 'b': 1000.0, 'c': '01', 'd': None, 'label': 'ant'
  }  # fmt: skip
  assert [second.get(name) for name in 'abcd'] == [None, 0.5, '2', 'NA']
  assert second.where == f'{path}:3'


@pytest.mark.parametrize(
  'content, message',
  [
    ('file_name,label\nant/0.png\n', "metadata.csv', line 2, .*must have 2 values"),
    ('image,label\nant/0.png,a\n', 'metadata.csv:2: `file_name` .* is missing'),
    ('file_name;label\nant/0.png;a\n', 'metadata.csv:2: `file_name` .* is missing'),
    ('file_name,label\n,a\n', 'metadata.csv:2: `file_name` .* is null'),
    ('file_name,label\nant/0.png,0.5\n', 'metadata.csv:2: `label` is 0.5: use the name'),
    ('file_name,label\n', "metadata.csv' is empty"),
  ],
)  # fmt: skip
def test_errors_name_the_line(root, tiny_config, content, message):
  (root / 'train' / 'metadata.csv').write_text(content)
  with pytest.raises(ValueError, match=message):
    labels(tiny_config, root)


def test_two_metadata_files_are_ambiguous(root, tiny_config):
  for name in ('metadata.csv', 'metadata.jsonl'):
    (root / 'train' / name).touch()
  with pytest.raises(
    ValueError, match="train' has both metadata.jsonl and metadata.csv"
  ):
    labels(tiny_config, root)
