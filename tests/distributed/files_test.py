"""Tests of files and folders that only appear once they are complete."""

from concurrent import futures
import threading

import pytest

from vit_jax.distributed import files


def test_file_is_replaced_once_complete(tmp_path):
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


def test_folder_appears_once_complete(tmp_path):
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


def test_one_of_two_writers_of_a_folder_wins(tmp_path):
  path, barrier = tmp_path / 'a', threading.Barrier(2)
  (tmp_path / '.a.tmp').mkdir()  # Somebody else's.
  (tmp_path / '.a.tmp' / 'mine').touch()

  def write(name):
    try:
      with files.new_folder(path) as folder:
        (folder / f'1{name}').write_text(name)
        barrier.wait(60)
        (folder / f'2{name}').write_text(name)
    except FileExistsError as e:
      return str(e)

  with futures.ThreadPoolExecutor(2) as pool:
    errors = list(pool.map(write, 'xy'))
  assert sorted(p.name for p in tmp_path.iterdir()) == ['.a.tmp', 'a']
  assert (tmp_path / '.a.tmp' / 'mine').exists()
  [winner] = [i for i, error in enumerate(errors) if error is None]
  name = 'xy'[winner]
  assert sorted(p.name for p in path.iterdir()) == [f'1{name}', f'2{name}']
  assert f"'{path}'" in errors[1 - winner]
