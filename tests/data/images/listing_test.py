"""Tests of listing images: which files are found, and in which order."""

import hashlib
import os
import re

from PIL import Image
import pytest
import tensorflow as tf

from vit_jax.data import folder
from vit_jax.data.images import formats, listing


def names(root):
  index = listing.list_folder(str(root), 'train')
  return [os.fsdecode(name) for name in index.names(index.order)]


def write(root, *paths):
  for path in paths:
    (root / 'train' / path).parent.mkdir(parents=True, exist_ok=True)
    (root / 'train' / path).write_bytes(b'x')


def test_images_are_ordered_by_the_hash_of_their_names(tmp_path):
  written = [f'{c}/{i:04}.jpg' for c in ('a', 'bb', 'é') for i in range(300)]
  write(tmp_path, *written, 'top.png', 'a/b/deep.gif')
  want = sorted(
    [*written, 'top.png', 'a/b/deep.gif'],
    key=lambda name: hashlib.md5(f'/{name}'.encode()).digest(),
  )
  assert names(tmp_path) == want


def test_remote_folder():
  for name in ('a/1.jpg', 'a/2.PNG', 'b/3.jpg', 'b/.4.jpg', 'b/c/5.jpg', 'x.txt'):
    path = f'ram://listing/train/{name}'
    tf.io.gfile.makedirs(os.path.dirname(path))
    with tf.io.gfile.GFile(path, 'wb') as file:
      file.write(b'x')
  index = listing.list_folder('ram://listing', 'train')
  assert sorted(index.names(index.order)) == [
    b'a/1.jpg', b'a/2.PNG', b'b/3.jpg', b'b/c/5.jpg',
  ]  # fmt: skip
  assert index.facts['ignored'] == {'first': 'x.txt', 'by_ending': {'.txt': 1}}
  assert index.is_up_to_date()


def test_entries_that_are_not_files_are_ignored(tmp_path, caplog):
  write(tmp_path, 'a/1.jpg', 'a/2.jpg', 'b/3.jpg', 'b/folder.jpg/4.jpg')
  a = tmp_path / 'train' / 'a'
  os.symlink('self.jpg', a / 'self.jpg')
  os.symlink('/no/such/file', a / 'nowhere.jpg')
  os.symlink(tmp_path / 'train', a / 'up')
  os.symlink(tmp_path / 'train' / 'b', a / 'aside')
  os.symlink('1.jpg', a / 'link.jpg')
  assert sorted(names(tmp_path)) == [
    'a/1.jpg', 'a/2.jpg', 'a/aside/3.jpg', 'a/link.jpg', 'b/3.jpg',
  ]  # fmt: skip
  paths, _, classes = folder.list_split(str(tmp_path), 'train', broken='trust')
  assert classes == ('a', 'b')
  assert len(paths) == 4
  assert "Left out 5 of 10 files in '" in caplog.text
  assert 'Left out 1 image of' in caplog.text


def test_links_that_multiply_are_an_error(tmp_path):
  """Five links in each of twenty linked folders are 5^20 paths."""
  write(tmp_path, 'a/1.jpg')
  os.symlink(tmp_path / '0', tmp_path / 'train' / 'a' / 'more')
  for depth in range(20):
    folder = tmp_path / str(depth)
    folder.mkdir()
    for name in 'abcde':
      os.symlink(f'../{depth + 1}', folder / name)
  with pytest.raises(ValueError, match="100 links in '.*' lead to .*remove"):
    listing.list_folder(str(tmp_path), 'train')


def test_folders_and_patterns_expand_to_images(tmp_path):
  write(tmp_path, 'b/2.jpg', 'b/10.PNG', 'a/1.jpg', 'c/x.txt', '[1].jpg')
  top = str(tmp_path / 'train')
  every = [f'{top}/{name}' for name in ('[1].jpg', 'a/1.jpg', 'b/10.PNG')]
  every.append(f'{top}/b/2.jpg')
  assert listing.expand([top]) == every
  assert listing.expand([f'{top}/[ab]', every[0]]) == [*every[1:], every[0]]
  assert listing.expand([f'{top}/*/?.jpg', '/no']) == [
    every[1], every[3], '/no',
  ]  # fmt: skip
  with pytest.raises(FileNotFoundError, match=r"no file matches '.*/d\*'"):
    listing.expand([f'{top}/d*'])
  with pytest.raises(FileNotFoundError, match="no images in .*/c': the known"):
    listing.expand([f'{top}/c'])


def test_ignored_files_are_counted_by_their_endings(tmp_path, caplog, monkeypatch):
  write(
    tmp_path, *(f'a/{i}.jpg' for i in range(28)), *(f'a/{i}.HEIC' for i in range(9))
  )
  write(tmp_path, 'b/0.heic', 'b/1.mov', 'b/2', 'b/3.tiff', 'b/4.jp2', 'b/5.avif')
  assert len(listing.expand([str(tmp_path / 'train')])) == 41
  assert "Left out 2 of 43 files in '" in caplog.text
  assert ': 1 .mov, 1 without ending, the first: ' in caplog.text
  caplog.clear()
  monkeypatch.setattr(listing, '_TICK', 0)
  index = listing.list_folder(str(tmp_path), 'train')
  assert index.is_up_to_date()
  monkeypatch.setattr(formats, '_PACKAGE', 'no_such_package')
  monkeypatch.delitem(Image.OPEN, 'HEIF')
  monkeypatch.setattr(formats, '_readable', formats._readable.__wrapped__)
  for name in ('endings', 'encoded_endings'):
    monkeypatch.setattr(formats, name, getattr(formats, name).__wrapped__)
  assert not index.is_up_to_date()  # HEIC can no longer be read.
  assert len(listing.expand([str(tmp_path / 'train')])) == 31
  message = r"Left out 12 of 43 files in '.*': 10 \.heic, 1 \.mov.*0.HEIC'; HEIC needs"
  assert re.search(message, caplog.text)
  caplog.clear()
  (tmp_path / 'iphone').mkdir()
  (tmp_path / 'iphone' / '0.heic').touch()
  with pytest.raises(
    FileNotFoundError, match=r'no images in .*: the known endings are'
  ):
    listing.expand([str(tmp_path / 'iphone')])
  assert 'HEIC needs' in caplog.text


def test_unreadable_folder_is_reported(tmp_path, monkeypatch):
  write(tmp_path, 'a/1.jpg', 'b/2.jpg')
  scandir = os.scandir

  def fail(path):
    if path.endswith(b'/b'):
      raise PermissionError(13, 'Permission denied', path)
    return scandir(path)

  monkeypatch.setattr(os, 'scandir', fail)
  with pytest.raises(OSError, match=r"train/b' cannot be read: Permission den"):
    folder.list_split(str(tmp_path), 'train', broken='trust')
