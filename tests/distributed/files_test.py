"""Tests of reading unknown files, and of writing files that appear once complete."""

from concurrent import futures
import errno
import os
import socket
import threading
import time

import pytest

from vit_jax.distributed import files


@pytest.mark.parametrize('read', [files.read, files.read_json, files.check_input])
def test_only_regular_files_are_read(tmp_path, read):
  """Reading the others would wait for a writer, or never end."""
  pipe, link, listener = (tmp_path / name for name in ('pipe', 'link', 'socket'))
  os.mkfifo(pipe)
  link.symlink_to('/dev/zero')
  with socket.socket(socket.AF_UNIX) as server:
    server.bind(os.fspath(listener))
    for path, kind in (pipe, 'named pipe'), (link, 'device'), (listener, 'socket'):
      with pytest.raises(files.FileError, match=f"{path.name}' is a {kind}, not a reg"):
        read(path)
  with pytest.raises(IsADirectoryError, match=tmp_path.name):
    read(tmp_path)


def test_links_to_regular_files_are_read(tmp_path):
  (tmp_path / 'a').write_text('[1]')
  (tmp_path / 'link').symlink_to('a')
  assert files.read(tmp_path / 'link') == b'[1]'
  assert files.read_json(tmp_path / 'link') == [1]


def test_repeated_keys_in_json_are_rejected(tmp_path):
  path = tmp_path / 'a.json'
  path.write_text('{"a": {"b": 1, "c": 2, "b": 3}}')
  with pytest.raises(ValueError, match="the key 'b' is repeated"):
    files.read_json(path)
  path.write_text('{"a": {"b": 1}, "b": null}')
  assert files.read_json(path, object_hook=sorted) == ['a', 'b']


def test_large_and_deep_json_is_rejected(tmp_path):
  path = tmp_path / 'a.json'
  path.write_text('[1, 2]')
  assert files.read(path, limit=6) == b'[1, 2]'
  with pytest.raises(files.FileError, match="a.json' has more than 5 bytes"):
    files.read_json(path, limit=5)
  with path.open('wb') as file:
    file.truncate(2**40)  # Without any blocks on disk.
  with pytest.raises(files.FileError, match="a.json' has more than 16,777,216 bytes"):
    files.read_json(path)
  path.write_text('[' * 10**6)
  with pytest.raises(ValueError, match='nested too deeply'):
    files.read_json(path)


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


def test_files_of_killed_writers_are_deleted_a_day_later(tmp_path):
  abandoned = ['.a.0123abcd.tmp', '.b[1].0123abcd.tmp']
  others = ['.a.4567abcd.tmp', '.aa.0123abcd.tmp', '.a.tmp', '.a.notes123.tmp']
  for name in abandoned + others:
    folder = tmp_path / name
    folder.mkdir()
    (folder / 'part').touch()
    day_old = 0 if name == '.a.4567abcd.tmp' else 25 * 3600
    os.utime(folder, (time.time() - day_old,) * 2)
  (tmp_path / '.a.89abcdef.tmp').touch()
  os.utime(tmp_path / '.a.89abcdef.tmp', (0, 0))
  files.write(tmp_path / 'a', 'whole')
  with files.new_folder(tmp_path / 'b[1]'):
    pass
  assert {p.name for p in tmp_path.iterdir()} == {'a', 'b[1]', *others}


def test_error_of_a_full_disk_names_the_file(tmp_path):
  path = tmp_path / 'a.txt'
  with pytest.raises(OSError, match=r"No space left on device: '.*/a\.txt'"):
    with files.replacing(path):
      raise OSError(errno.ENOSPC, 'No space left on device')  # As file.write does.
  assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize('name', ['x' * 250, 'ü' * 125])
def test_names_may_have_as_many_bytes_as_file_systems_allow(tmp_path, name):
  files.write(tmp_path / name, 'whole')
  with files.new_folder(tmp_path / f'{name}s') as folder:
    (folder / 'a').touch()
  assert sorted(path.name for path in tmp_path.iterdir()) == [name, f'{name}s']


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
