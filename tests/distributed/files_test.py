"""Tests of files that appear when they are complete."""

import pytest

from vit_jax.distributed import files


def test_a_file_is_replaced_when_it_is_complete(tmp_path):
  path = tmp_path / 'a.txt'
  files.write(path, 'öld')
  with files.replacing(path) as file:
    file.write(b'new')
    assert path.read_text() == 'öld'
  assert path.read_text() == 'new'
  with pytest.raises(TypeError), files.replacing(path) as file:
    file.write('no bytes')
  assert path.read_text() == 'new'
  assert [p.name for p in tmp_path.iterdir()] == ['a.txt']


def test_a_folder_in_the_place_of_a_file_stays(tmp_path):
  (tmp_path / 'a').mkdir()
  with pytest.raises(IsADirectoryError):
    files.write(tmp_path / 'a', b'x')
  assert [p.name for p in tmp_path.iterdir()] == ['a']


def test_a_folder_appears_when_it_is_complete(tmp_path):
  path = tmp_path / 'new' / 'a'
  with pytest.raises(TypeError), files.new_folder(path) as folder:
    (folder / 'b').write_bytes('no bytes')
  assert not list(path.parent.iterdir())
  path.mkdir()  # An empty folder is replaced.
  with files.new_folder(path) as folder:
    (folder / 'b').write_text('whole')
    assert not list(path.iterdir())
  assert [p.name for p in path.parent.iterdir()] == ['a']
  assert (path / 'b').read_text() == 'whole'
