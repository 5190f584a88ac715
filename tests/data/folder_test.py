"""Tests of image folders: listing, slices, and errors."""

import pathlib
import re
import shlex
import shutil

from PIL import Image
import pytest

from vit_jax.commands import train as train_command
from vit_jax.data import folder, indexing, slices, sources


@pytest.fixture
def root(image_folder, tmp_path):
  """A copy of the folder, for tests that modify it."""
  return pathlib.Path(shutil.copytree(image_folder, tmp_path / 'images'))


def test_classes_and_images_with_any_extension(image_folder):
  paths, labels, names = folder.list_split(str(image_folder), 'train')
  assert names == ('ant', 'bee', 'cow')
  assert len(paths) == 33
  for path, label in zip(paths, labels):
    assert pathlib.Path(path).parent.name == names[label]


def test_slices_partition_the_images(image_folder):
  whole, _, _ = folder.list_split(str(image_folder), 'train')
  first, _, names = folder.list_split(str(image_folder), 'train[:70%]')
  last, _, _ = folder.list_split(str(image_folder), 'train[70%:]')
  assert [*first, *last] == list(whole)
  assert len(first) == 23
  assert names == ('ant', 'bee', 'cow')
  both, _, _ = folder.list_split(str(image_folder), 'train[:2]+test[:3]')
  assert len(both) == 5


def test_hidden_and_other_files_are_ignored(root):
  (root / 'train' / '.DS_Store').write_text('x')
  (root / 'train' / 'ant' / '.hidden.jpg').write_text('x')
  (root / 'train' / 'ant' / 'notes.txt').write_text('x')
  (root / 'train' / 'list.csv').write_text('x')
  assert len(folder.list_split(str(root), 'train')[0]) == 33


def test_missing_split_is_reported(root):
  with pytest.raises(FileNotFoundError, match=r"no split 'val'.*\['test', 'tr"):
    folder.list_split(str(root), 'val')


@pytest.mark.parametrize('split', ['train', ''])
def test_suggested_flags_split_the_existing_images(root, tmp_path, split):
  """For a folder with only train/, and for a folder of class folders."""
  shutil.move(root / 'train', tmp_path / 'data' / split)
  argv = [f'--config=configs/pretrain.py:testing,{tmp_path}/data']

  def opened(argv):
    config = train_command.parse([*argv, '--workdir=/w']).config
    return [sources.open_split(config, config.pp[k]) for k in ('train', 'test')]

  with pytest.raises(FileNotFoundError, match='has no split') as error:
    opened(argv)
  proposed = re.findall(r"--config\.pp\.\w+='[^']+'", str(error.value))
  ours, theirs = opened(argv + shlex.split(' '.join(proposed)))
  assert ours.class_names == theirs.class_names == ('ant', 'bee', 'cow')
  names = [{x.name(i) for i in range(x.num_examples)} for x in (ours, theirs)]
  assert len(names[0] | names[1]) == len(names[0]) + len(names[1]) == 33
  assert len(names[1]) == 3


def test_class_without_images(root):
  for path in (root / 'train' / 'bee').iterdir():
    path.rename(path.with_suffix('.txt'))
  with pytest.raises(ValueError, match=r"train/bee' .*\.jpg"):
    folder.list_split(str(root), 'train')


def test_empty_class_folder_is_rejected(root):
  (root / 'train' / 'wasp').mkdir()
  with pytest.raises(ValueError, match=r"train/wasp' has no images: add .* or delete"):
    folder.list_split(str(root), 'train')


def test_class_with_images_that_are_too_deep(root):
  shutil.move(root / 'train' / 'bee', root / 'train' / 'insects' / 'bee')
  with pytest.raises(ValueError, match="/insects' .* such as 'insects/bee': move"):
    folder.list_split(str(root), 'train')


@pytest.mark.parametrize(
  'place, message',
  [
    (
      'all/cat',
      "too deep, such as those in 'all/cat': .*content of 'all' one level up",
    ),
    ('', "not in class folders: move them to 'train/<class>/' .*'file_name'"),
  ],
)
def test_images_outside_of_class_folders(root, tmp_path, place, message):
  target = tmp_path / 'data' / 'train' / place
  shutil.copytree(root / 'train' / 'ant', target)
  with pytest.raises(ValueError, match=message):
    folder.read_split(str(tmp_path / 'data'), 'train', ('image', 'label'))


def test_splits_in_upper_case_are_reported(root):
  (root / 'train').rename(root / 'Train')
  with pytest.raises(FileNotFoundError, match="'Train'. .*rename it to 'train'"):
    folder.list_split(str(root), 'train')


@pytest.mark.parametrize(
  'split, place, is_inside',
  [
    ('train', '', True),
    ('train[:90%]', 'train/run', True),
    ('.[:90%]', 'run', True),
    ('train', 'run', False),
    ('train', 'training', False),
  ],
)
def test_workdir_in_the_data_is_rejected(tiny_config, root, split, place, is_inside):
  (root / 'link').symlink_to(root)
  tiny_config.dataset = str(root / 'link')
  if is_inside:
    with pytest.raises(ValueError, match='workdir=.* is in the folder of the data'):
      sources.open_split(tiny_config, split, workdir=str(root / place))
    assert not list(root.rglob('*.npz'))
  else:
    sources.open_split(tiny_config, split, workdir=str(root / place))


def test_class_folders_that_look_alike_are_rejected(root):
  """As after copying a data set from macOS over one from elsewhere."""
  (root / 'train' / 'ant').rename(root / 'train' / 'caf\u00e9')
  (root / 'train' / 'bee').rename(root / 'train' / 'cafe\u0301')
  with pytest.raises(ValueError, match='class folders .*cafe.u0301.* same name'):
    folder.list_split(str(root), 'train')


def test_classes_that_differ_from_the_training_split(root):
  shutil.move(root / 'test' / 'bee', root / 'test' / 'wasp')
  message = r"test' differ from the 3 .*has \['wasp'\] and it lacks \['bee'\]"
  with pytest.raises(ValueError, match=message):
    folder.list_split(str(root), 'test', ('ant', 'bee', 'cow'))


def damage(root):
  """Damages three images; returns their paths."""
  zero = root / 'train' / 'ant' / 'ant0.jpg'
  zero.write_bytes(b'')
  cut = root / 'train' / 'bee' / 'bee1.PNG'
  cut.write_bytes(cut.read_bytes()[:-200])
  short = root / 'train' / 'bee' / 'bee5.jpg'
  short.write_bytes(short.read_bytes()[:400])
  return zero, cut, short


def test_broken_images_are_reported(root):
  broken = damage(root)
  with pytest.raises(ValueError, match='6 of 66 images cannot be') as error:
    folder.list_split(str(root), 'train+train')
  lines = str(error.value).splitlines()[1:-1]
  assert [line.strip().partition(': ')[0] for line in lines] == sorted(map(str, broken))
  assert 'zero bytes' in str(error.value)
  assert '--config.broken_images=skip' in str(error.value)


def test_broken_images_are_skipped_if_configured(root, caplog):
  broken = damage(root)
  paths, labels, names = folder.list_split(str(root), 'train', broken='skip')
  assert len(paths) == len(labels) == 30
  assert not {str(path) for path in broken} & set(paths)
  assert names == ('ant', 'bee', 'cow')
  assert 'Skipped 3 of 33 images' in caplog.text
  # Even if an index next to the images lists them as broken.
  indexing.make(str(root), 'train')
  assert len(folder.list_split(str(root), 'train', broken='trust')[0]) == 33


def test_damage_in_the_middle_of_a_file_is_detected(root):
  """A PNG with corrupt data, and truncated JPEGs."""
  ant = root / 'train' / 'ant'
  bad = [ant / 'ant1.PNG', ant / 'half.jpg', ant / 'progressive.jpg']
  data = bytearray(bad[0].read_bytes())
  data[60:90] = bytes(30)
  bad[0].write_bytes(data)
  for path in bad[1:]:
    picture = Image.effect_noise((200, 200), 90)
    picture.save(path, progressive=path.stem == 'progressive')
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
  with pytest.raises(ValueError, match='3 of 35 images cannot') as error:
    folder.list_split(str(root), 'train')
  assert all(str(path) in str(error.value) for path in bad)


@pytest.mark.parametrize(
  'instruction, message',
  [
    ('[:21]', r"split 'test\[:21\]' cannot be sliced: .*has 20 examples"),
    ('[50%:40%]', r"split 'test\[50%:40%\]' is empty, from 10 to 8"),
    ('[abc', r"split 'test\[abc' cannot be sliced: Unrecognized"),
  ],
)
def test_invalid_slices_are_reported(instruction, message):
  with pytest.raises(ValueError, match=message) as error:
    slices.take(range(20), 'test', instruction)
  assert len(str(error.value).splitlines()) == 1
  assert slices.take(range(20), '.', '[:25%]') == range(5)


def test_folder_named_like_a_data_set_is_not_used(tmp_path, monkeypatch):
  """Regression: after --workdir=digits, the same command found no split there."""
  (tmp_path / 'digits').mkdir()
  (tmp_path / 'photos').mkdir()
  monkeypatch.chdir(tmp_path)
  assert not folder.is_folder('digits')
  with pytest.raises(FileNotFoundError, match="dataset='/no/such' is not a fol"):
    folder.is_folder('/no/such')
  assert folder.is_folder('./digits')
  assert folder.is_folder('photos')
