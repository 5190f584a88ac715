"""Tests of decoding the text files of users."""

import csv
import json

import pytest

from vit_jax.commands import convert
from vit_jax.data import typed_json
from vit_jax.data.images import listing
from vit_jax.data.texts import templates
from vit_jax.distributed import files, text_files
from vit_jax.evaluators import real

ENCODINGS = 'utf-8', 'utf-8-sig', 'utf-16'
# Where str.splitlines would split, but no editor does.
SEPARATORS = '\x0b\x0c\x1c\x85\u2028\u2029'


@pytest.mark.parametrize('encoding', ENCODINGS)
@pytest.mark.parametrize('end', ['\n', '\r\n'])
def test_marks_are_left_out_and_lines_end_with_newlines(tmp_path, encoding, end):
  names = [f'köttur{SEPARATORS}x', 'a b']
  path = tmp_path / 'list.txt'
  path.write_bytes(''.join(name + end for name in names).encode(encoding))
  assert text_files.lines(path.read_bytes(), path) == names
  assert convert.read_class_names(str(path)) == names
  assert templates.lines(str(path), 'texts') == names
  paths = [f'{tmp_path}/{name}' for name in names]
  assert listing.expand([str(path)]) == paths
  rows = (json.dumps({'path': name}, ensure_ascii=False) for name in names)
  path = path.with_suffix('.jsonl')
  path.write_bytes(''.join(row + end for row in rows).encode(encoding))
  assert listing.expand([str(path)]) == paths


@pytest.mark.parametrize('encoding', ENCODINGS)
def test_json_may_have_a_mark(tmp_path, encoding):
  path = tmp_path / 'a.json'
  path.write_bytes('[["ö"]]'.encode(encoding))
  assert files.read_json(path) == typed_json.decode(path.read_bytes()) == [['ö']]
  path.write_bytes('[[0], [1, 2]]'.encode(encoding))
  assert real.read_labels(str(path), 3) == [[0], [1, 2]]


@pytest.mark.parametrize('encoding', ENCODINGS)
def test_csv_is_read_as_it_was_written(tmp_path, encoding):
  rows = [{'file_name': 'a, b.jpg', 'text': f'"x"\n{SEPARATORS}'}]
  rows.append({'file_name': 'c.jpg', 'text': ''})
  path = tmp_path / 'a.csv'
  with path.open('w', encoding=encoding, newline='') as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)
  assert list(text_files.csv_rows(path.read_bytes(), path)) == [
    (3, rows[0]),
    (4, rows[1]),
  ]
  for line in ('1', '1,2,3', '"1,2'):
    with pytest.raises(ValueError, match="a.csv', line 2, is not valid CSV"):
      list(text_files.csv_rows(f'x,y\n{line}\n'.encode(), 'a.csv'))

  with pytest.raises(ValueError, match="a.csv', line 1, .*columns are named 'x'"):
    list(text_files.csv_rows(b'x,y,x\n1,2,3\n', 'a.csv'))


def test_other_encodings_are_rejected():
  for content in (b'a\nb\n\xe9\n', '\ufeffa\nb\n\n'.encode('utf-16')[:-1]):
    with pytest.raises(ValueError, match="list.txt', line 3, is not UTF-8: save"):
      text_files.lines(content, 'list.txt')
