"""Tests of stored image lists and their checks."""

import errno
import os
import pathlib
import shutil
import signal

import numpy as np
import pytest

from tests import processes
from vit_jax.commands import index as index_command
from vit_jax.data import checking, folder, indexing, sources
from vit_jax.data.images import image_files, images, index as index_lib, listing
from vit_jax.distributed import files


@pytest.fixture
def root(image_folder, tmp_path):
  """A folder of images from an hour ago, for tests that modify it."""
  root = tmp_path / 'images'
  shutil.copytree(image_folder, root)
  age(root)
  return root


@pytest.fixture(autouse=True)
def forget(monkeypatch):
  monkeypatch.setattr(checking, '_recent', {})
  monkeypatch.setattr(image_files, '_DELAYS', (0.0, 0.0))


@pytest.fixture
def checked(monkeypatch):
  """The names of the files that were decoded as a check."""
  found = []
  why = images.broken_reason

  def look(path, limit):
    found.append(os.path.basename(path).decode())
    return why(path, limit)

  monkeypatch.setattr(images, 'broken_reason', look)
  return found


def age(root, seconds=3600):
  for path, _, _ in os.walk(root):
    time = os.stat(path).st_mtime - seconds
    os.utime(path, (time, time))


def forget_all():
  checking._recent.clear()


def test_every_image_is_checked_once(tiny_config, root, checked, tmp_path):
  workdir = str(tmp_path / 'run')
  tiny_config.dataset = str(root)

  def open_split(split='train'):
    forget_all()
    return sources.open_split(tiny_config, split, workdir=workdir)

  first = open_split()
  assert len(checked) == 33
  assert not (tmp_path / 'run').exists()
  first.store(workdir)
  again = open_split('train[:90%]')
  assert len(checked) == 33
  assert [again.name(i) for i in range(30)] == [first.name(i) for i in range(30)]
  assert open_split().fingerprint() == first.fingerprint()
  # Only new and changed files are checked again.
  shutil.copy(root / 'train/ant/ant1.PNG', root / 'train/ant/new.png')
  (root / 'train/ant/ant2.jpeg').write_bytes(b'x')
  tiny_config.broken_images = 'skip'
  source = open_split()
  assert source.num_examples == 33
  assert sorted(checked[33:]) == ['ant2.jpeg', 'new.png']


def test_manifest_images_are_checked_once(tiny_config, root, checked, tmp_path):
  paths = sorted((root / 'train').rglob('*.*'))
  text = ''.join(f'{{"image": "{p}", "label": 0}}\n' for p in paths)
  (root / 'list.jsonl').write_text(text)
  tiny_config.dataset = str(root)
  sources.open_split(tiny_config, 'list', workdir=tmp_path).store(tmp_path)
  sources.open_split(tiny_config, 'list[:9]', workdir=tmp_path)
  assert len(checked) == 33


def test_existing_list_is_used_while_up_to_date(root, checked, capsys):
  path, count, broken = indexing.make(str(root), 'train')
  assert (path, count, broken) == (f'{root}/train.index.npz', 33, [])
  assert folder.list_split(str(root), 'train')[2] == ('ant', 'bee', 'cow')
  assert len(checked) == 33
  assert 'as listed on 2' in capsys.readouterr().out
  forget_all()
  (root / 'train' / 'ant').rename(root / 'train' / 'wasp')
  assert folder.list_split(str(root), 'train')[2] == ('bee', 'cow', 'wasp')
  assert 'has changed since' in capsys.readouterr().out
  assert len(checked) == 33 + 11


def test_missing_folder(tmp_path):
  with pytest.raises(ValueError, match="a.zip' is an archive: unpack it"):
    folder.is_folder(str(tmp_path / 'a.zip'))
  with pytest.raises(FileNotFoundError, match="nowhere' is not a folder that exists"):
    index_command.main([f'{tmp_path}/nowhere'])


def test_unwritable_list_fails_immediately(root, checked, monkeypatch):
  monkeypatch.setattr(index_lib, 'place', lambda *args: '/proc/train.index.npz')
  message = r"the list '/proc/train.index.npz' cannot be written: .*; make its"
  with pytest.raises(OSError, match=message):
    indexing.make(str(root), 'train')
  assert not checked


KILLED = """
import os, signal, sys, threading
from vit_jax.data import indexing
from vit_jax.data.images import images, index
index._BLOCK, index._SAVE_EVERY = 4, 0.0
why, lock, calls = images.broken_reason, threading.Lock(), []
def look(path, limit):
  with lock:
    calls.append(path)
    if len(calls) == 20:
      os.kill(os.getpid(), signal.SIGKILL)
  return why(path, limit)
images.broken_reason = look
indexing.make(sys.argv[1], 'train')
"""


def test_killed_check_is_resumed(root, checked):
  (root / 'train/bee/bee5.jpg').write_bytes(b'x')
  age(root)
  status, _ = processes.finish_code(KILLED, root)
  assert status == -signal.SIGKILL
  path = index_lib.place(None, str(root), 'train')
  stored = index_lib.Index.load(path, str(root), 'train')
  saved = np.count_nonzero(stored.checks.status)
  assert saved in (4, 8, 12, 16)  # Whole blocks before the twentieth check.
  _, _, broken = indexing.make(str(root), 'train')
  assert len(checked) == 33 - saved
  assert [x.split(': ')[0] for x in broken] == [f'{root}/train/bee/bee5.jpg']
  resumed = index_lib.Index.load(path, str(root), 'train')
  content = pathlib.Path(path).read_bytes()
  pathlib.Path(path).write_bytes(content[: len(content) // 2])
  indexing.make(str(root), 'train')  # A truncated list is ignored.
  assert len(checked) == 33 - saved + 33
  whole = index_lib.Index.load(path, str(root), 'train')
  np.testing.assert_array_equal(resumed.checks.status, whole.checks.status)
  np.testing.assert_array_equal(resumed.checks.stamps, whole.checks.stamps)
  assert resumed.checks.reasons == whole.checks.reasons


TWO = """
import json, sys, time
import jax
jax.config.update('jax_platforms', 'cpu')
from vit_jax.distributed import processes
processes.initialize(sys.argv[1], 2, int(sys.argv[2]))
from vit_jax import console
console.load_tensorflow()
from vit_jax.data import checking, folder
from vit_jax.data.images import images, index
root, workdir = sys.argv[3:]
index._BLOCK, index._SAVE_EVERY = 4, 0.0
why, seen = images.broken_reason, []
def look(path, limit):
  if len(seen) == stop:
    raise OSError('stopped')
  seen.append(path.decode())
  return why(path, limit)
images.broken_reason = look
index._THREADS = 1
results = []
for stop, place in ((9, workdir), (None, workdir), (None, None)):
  seen.clear()
  checking._recent.clear()
  try:
    paths, labels, _ = folder.list_split(
      root, 'train', broken='skip', workdir=place
    )
    results.append([sorted(seen), list(paths), labels.tolist()])
  except OSError as e:
    results.append([sorted(seen), str(e)])
print('SAID ' + json.dumps(results), flush=True)
"""


def test_two_processes_each_check_half_of_the_images(root, checked, tmp_path):
  (root / 'train/bee/bee5.jpg').write_bytes(b'x')
  (root / 'train/ant/ant0.jpg').write_bytes(b'')
  age(root)
  workdir = tmp_path / 'run'
  statuses, outputs = processes.run_two(TWO, root, workdir)
  assert statuses == [0, 0], outputs
  stopped, resumed, alone = zip(*processes.said(outputs))
  for (seen, error), (later, *_) in zip(stopped, resumed):
    assert 'stopped' in error
    assert len(seen) == 9
    # The first block of four was saved, or both.
    assert len(set(seen) & set(later)) in (1, 5)
    assert len({*seen, *later}) in (16, 17)
  assert len({path for seen, *_ in (*stopped, *resumed) for path in seen}) == 33
  want, labels, _ = folder.list_split(str(root), 'train', broken='skip')
  assert len(checked) == 33
  assert [len(seen) for seen, *_ in alone] in ([16, 17], [17, 16])
  for _, paths, found in (*resumed, *alone):
    assert (paths, found) == (list(want), labels.tolist())
  # The results are merged into one file, so a single process checks nothing more.
  assert len(list((workdir / 'data').iterdir())) == 1
  forget_all()
  folder.list_split(str(root), 'train', broken='skip', workdir=str(workdir))
  assert len(checked) == 33


def test_merged_checks_prefer_the_first():
  status = np.array([index_lib.DECODED, index_lib.UNKNOWN, index_lib.UNKNOWN], np.uint8)
  settings = {'max_pixels': 9}
  a = index_lib.Checks(status, np.array([7, 0, 0], np.uint64), {}, settings)
  status = np.array([index_lib.BROKEN, index_lib.BROKEN, index_lib.UNKNOWN], np.uint8)
  reasons = {0: 'cut', 1: 'no image'}
  b = index_lib.Checks(status, np.array([5, 6, 0], np.uint64), reasons, settings)
  merged = index_lib.merge(a, b)
  assert merged.status.tolist() == [
    index_lib.DECODED, index_lib.BROKEN, index_lib.UNKNOWN,
  ]  # fmt: skip
  assert merged.stamps.tolist() == [7, 6, 0]
  assert merged.reasons == {1: 'no image'}
  assert a.status.tolist() == [index_lib.DECODED, 0, 0]
  other = b._replace(settings={'max_pixels': 8})
  assert index_lib.merge(a, other) is a


def test_results_for_another_process_count_are_not_merged(root, tmp_path, monkeypatch):
  monkeypatch.setattr(checking.jax, 'process_count', lambda: 2)
  index = listing.list_folder(str(root), 'train')
  path = index_lib.place(str(tmp_path), index.root, index.base)
  index.checks.status[:], index.checks.stamps[:] = index_lib.DECODED, 7
  index.save_checks(f'{path}.1of4', np.arange(1, 33, 4))
  index.save_checks(f'{path}.1of2', np.arange(1, 33, 2)[:5])
  new = listing.list_folder(str(root), 'train')
  checking._merge_results(new, str(tmp_path))
  assert np.flatnonzero(new.checks.status).tolist() == [1, 3, 5, 7, 9]
  assert [x.name for x in (tmp_path / 'data').iterdir()] == [os.path.basename(path)]


def test_checks_before_an_error_are_not_repeated(root, checked, tmp_path):
  path = root / 'train' / 'ant' / 'ant0.jpg'
  good = path.read_bytes()
  for content in (b'x', b'no image'):
    path.write_bytes(content)
    with pytest.raises(ValueError, match='1 of 33 images cannot be'):
      folder.list_split(str(root), 'train', workdir=str(tmp_path))
    forget_all()  # Like a new process.
  path.write_bytes(good)
  found, _, _ = folder.list_split(str(root), 'train', workdir=str(tmp_path))
  assert len(found) == 33
  assert checked[33:] == ['ant0.jpg'] * 2


def test_damaged_list_is_not_used(root, caplog):
  path, _, _ = indexing.make(str(root), 'train', check=False)
  data = bytearray(open(path, 'rb').read())
  rng = np.random.RandomState(0)
  for _ in range(30):
    bad = bytearray(data)
    bad[rng.randint(len(bad))] ^= 1 << rng.randint(8)
    open(path, 'wb').write(bad[: rng.choice([len(bad), rng.randint(len(bad))])])
    found = index_lib.Index.load(path, str(root), 'train')
    # Flips in the archive's metadata may be harmless.
    assert found is None or len(found) == 33
  assert 'is damaged' in caplog.text


def test_storage_error_does_not_mark_an_image_as_broken(root, monkeypatch):
  """Regression: any error marked an image as broken, on one process only."""
  left = [1]

  def flaky(path, *args):
    if path.endswith('bee3.webp') and left[0]:
      left[0] -= 1
      raise OSError(errno.EIO, 'Input/output error', path)
    return read(path, *args)

  read = files.read
  monkeypatch.setattr(files, 'read', flaky)
  assert len(folder.list_split(str(root), 'train', broken='skip')[0]) == 33
  forget_all()
  left[0] = 99
  with pytest.raises(OSError, match="bee3.webp' cannot be read: Input/output"):
    folder.list_split(str(root), 'train', broken='skip')
