"""Tests of what is remembered of a folder's images."""

import errno
import os
import shutil

import numpy as np
import pytest

from vit_jax import manifest
from vit_jax.data import checking
from vit_jax.data import folder
from vit_jax.data import sources
from vit_jax.data.images import images
from vit_jax.data.images import index as index_lib
from vit_jax.data.images import reading


@pytest.fixture
def root(image_folder, tmp_path):
  """A folder of images that were there for an hour, to be changed."""
  root = tmp_path / 'images'
  shutil.copytree(image_folder, root)
  age(root)
  return root


@pytest.fixture(autouse=True)
def forget(monkeypatch):
  monkeypatch.setattr(checking, '_recent', {})
  monkeypatch.setattr(reading, '_DELAYS', (0.0, 0.0))


@pytest.fixture
def looked_at(monkeypatch):
  """The names of the files that were decoded to check them."""
  found = []
  why = images.why_broken

  def look(path, limit):
    found.append(os.path.basename(path).decode())
    return why(path, limit)

  monkeypatch.setattr(images, 'why_broken', look)
  return found


def age(root, seconds=3600):
  for path, _, _ in os.walk(root):
    time = os.stat(path).st_mtime - seconds
    os.utime(path, (time, time))


def forget_all():
  checking._recent.clear()


def test_every_image_is_looked_at_once(tiny_config, root, looked_at, tmp_path):
  workdir = str(tmp_path / 'run')
  tiny_config.dataset = str(root)

  def open_split(split='train'):
    forget_all()
    return sources.open_split(tiny_config, split, workdir=workdir)

  first = open_split()
  assert len(looked_at) == 33
  assert not (tmp_path / 'run').exists()
  first.store(workdir)
  again = open_split('train[:90%]')
  assert len(looked_at) == 33
  assert [again.name(i) for i in range(30)] == [
    first.name(i) for i in range(30)
  ]
  assert open_split().fingerprint() == first.fingerprint()
  # A file that has changed is looked at again, and it alone.
  shutil.copy(root / 'train/ant/ant1.PNG', root / 'train/ant/new.png')
  (root / 'train/ant/ant2.jpeg').write_bytes(b'x')
  tiny_config.broken_images = 'skip'
  source = open_split()
  assert source.num_examples == 33
  assert sorted(looked_at[33:]) == ['ant2.jpeg', 'new.png']


def test_the_check_of_a_manifest_is_remembered_too(
  tiny_config, root, looked_at, tmp_path
):
  paths = sorted((root / 'train').rglob('*.*'))
  text = ''.join(f'{{"image": "{p}", "label": 0}}\n' for p in paths)
  (root / 'list.jsonl').write_text(text)
  tiny_config.dataset = str(root)
  source = sources.open_split(tiny_config, 'list', workdir=tmp_path)
  source.store(tmp_path)
  assert len(looked_at) == 33
  sources.open_split(tiny_config, 'list[:9]', workdir=tmp_path)
  assert len(looked_at) == 33


def test_a_list_made_ahead_is_taken_while_it_is_true(root, looked_at, capsys):
  path, count, broken = manifest.make(str(root), 'train')
  assert (path, count, broken) == (f'{root}/train.index.npz', 33, [])
  assert folder.list_split(str(root), 'train')[2] == ('ant', 'bee', 'cow')
  assert len(looked_at) == 33
  assert 'as listed on 2' in capsys.readouterr().out
  forget_all()
  (root / 'train' / 'ant').rename(root / 'train' / 'wasp')
  assert folder.list_split(str(root), 'train')[2] == ('bee', 'cow', 'wasp')
  assert 'has changed since' in capsys.readouterr().out
  assert len(looked_at) == 33 + 11


def test_a_list_that_cannot_be_written_is_said_at_once(
  root, looked_at, monkeypatch
):
  monkeypatch.setattr(index_lib, 'place', lambda *args: '/proc/train.index.npz')
  message = r"the list '/proc/train.index.npz' cannot be written: .*; make its"
  with pytest.raises(OSError, match=message):
    manifest.make(str(root), 'train')
  assert not looked_at


def test_what_the_form_shows(root, looked_at):
  ant = root / 'train' / 'ant'
  (ant / 'ant0.jpg').write_bytes((ant / 'ant0.jpg').read_bytes()[:-50])
  (ant / 'ant3.webp').write_bytes(b'')
  (ant / 'ant4.bmp').write_bytes(b'text')
  _, count, broken = manifest.make(str(root), 'train', 'form')
  assert count == 33
  assert sorted(x.split('ant/')[1] for x in broken) == [
    'ant0.jpg: it does not end as an image',
    'ant3.webp: zero bytes',
    'ant4.bmp: it does not begin as an image',
  ]
  assert not looked_at
  with pytest.raises(ValueError, match='3 of 33 images cannot be'):
    folder.list_split(str(root), 'train', broken='trust')
  assert len(folder.list_split(str(root), 'train', broken='skip')[0]) == 30


def test_a_file_that_is_mended_is_looked_at_again(root, looked_at):
  path = root / 'train' / 'ant' / 'ant0.jpg'
  good = path.read_bytes()
  path.write_bytes(b'x')
  with pytest.raises(ValueError, match='1 of 33 images cannot be'):
    folder.list_split(str(root), 'train')
  path.write_bytes(good)
  assert len(folder.list_split(str(root), 'train')[0]) == 33
  assert looked_at[33:] == ['ant0.jpg']


def test_a_damaged_list_is_not_used(root, caplog):
  path, _, _ = manifest.make(str(root), 'train', 'none')
  data = bytearray(open(path, 'rb').read())
  rng = np.random.RandomState(0)
  for _ in range(60):
    bad = bytearray(data)
    bad[rng.randint(len(bad))] ^= 1 << rng.randint(8)
    open(path, 'wb').write(bad[: rng.choice([len(bad), rng.randint(len(bad))])])
    found = index_lib.Index.load(path, str(root), 'train')
    # A bit of the archive's own notes may flip without harm.
    assert found is None or len(found) == 33
  assert 'is damaged or of another version: ignored' in caplog.text


def test_an_error_of_the_storage_breaks_no_image(root, monkeypatch):
  """Seen: any error made an image count as broken, on one process alone."""
  opened = os.open
  left = [1]

  def flaky(path, *args, **kwargs):
    if isinstance(path, bytes) and path.endswith(b'bee3.webp') and left[0]:
      left[0] -= 1
      raise OSError(errno.EIO, 'Input/output error', path)
    return opened(path, *args, **kwargs)

  monkeypatch.setattr(os, 'open', flaky)
  assert len(folder.list_split(str(root), 'train', broken='skip')[0]) == 33
  forget_all()
  left[0] = 99
  with pytest.raises(OSError, match="bee3.webp' cannot be read: Input/output"):
    folder.list_split(str(root), 'train', broken='skip')


def test_all_processes_use_what_the_first_found(
  root, looked_at, tmp_path, monkeypatch
):
  (root / 'train/ant/ant0.jpg').write_bytes(b'x')
  told, facts = [], []

  def be(process, workdir):
    """Acts as one of two processes, the first before the second."""
    forget_all()
    monkeypatch.setattr(checking.jax, 'process_count', lambda: 2)
    monkeypatch.setattr(checking.jax, 'process_index', lambda: process)

    def from_first(what, make):
      if process == 0:
        told.append(make())
        return told[-1]
      return told.pop(0)

    monkeypatch.setattr(checking.processes, 'from_first', from_first)
    monkeypatch.setattr(
      checking.processes, 'attempt', lambda what, make: [make()] * 2
    )
    monkeypatch.setattr(
      checking.processes, 'agree', lambda what, found: facts.append(found)
    )
    return folder.list_split(str(root), 'train', broken='skip', workdir=workdir)

  for workdir in (str(tmp_path / 'run'), None):
    first, second = be(0, workdir), be(1, workdir)
    assert list(first[0]) == list(second[0])
    assert len(first[0]) == 32
    assert (first[1] == second[1]).all()
    assert facts[-1] == facts[-2]
  assert len(looked_at) == 33 + 33
