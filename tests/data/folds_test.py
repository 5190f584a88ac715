"""Tests of folds: stratified, disjoint, with groups as a whole."""

import json
import pathlib
import shutil

import numpy as np
from PIL import Image
import pyarrow as pa
from pyarrow import parquet as pq
import pytest
from sklearn import model_selection

from vit_jax.data import folds, slices, sources

COUNTS = (1, 3, 10, 60, 226)  # Images of each class.
CLASSES = np.repeat(np.arange(5), COUNTS)


@pytest.mark.parametrize('count', [2, 5, 7])
@pytest.mark.parametrize('seed', [0, 1])
def test_classes_are_spread_as_by_scikit_learn(count, seed):
  order = np.random.default_rng(seed).permutation(len(CLASSES))
  classes = CLASSES[order]
  fold = folds.parse(f'[fold=0/{count},seed={seed}]')
  numbers = folds.assign('train', fold, classes)
  splitter = model_selection.StratifiedKFold(count)
  expected = np.empty_like(numbers)
  with pytest.warns(UserWarning, match='least populated class'):
    parts = list(splitter.split(classes, classes))
  for number, (_, rows) in enumerate(parts):
    expected[rows] = number
  sizes = np.bincount(numbers, minlength=count)
  assert sorted(sizes) == sorted(np.bincount(expected, minlength=count))
  for label in range(5):
    of_class = np.bincount(numbers[classes == label], minlength=count)
    expected_of_class = np.bincount(expected[classes == label], minlength=count)
    assert sorted(of_class) == sorted(expected_of_class)
    assert of_class.max() - of_class.min() <= 1


def test_groups_stay_together_and_classes_are_spread():
  rng = np.random.default_rng(0)
  groups = rng.integers(0, 60, len(CLASSES))
  fold = folds.parse('[fold=0/5]')
  numbers = folds.assign('train', fold, CLASSES, [f'patient {i}' for i in groups])
  table = np.zeros((60, 5), bool)
  table[groups, numbers] = True
  assert (table.sum(axis=1)[np.unique(groups)] == 1).all()

  other_seed = folds.assign('train', folds.parse('[fold=0/5,seed=1]'), CLASSES, groups)
  assert other_seed.tolist() != numbers.tolist()

  # The shares of the largest classes, compared with groups assigned at random.
  def deviation(numbers):
    counts = [np.bincount(numbers[CLASSES == label], minlength=5) for label in (3, 4)]
    return sum(np.std(x / x.sum()) for x in counts)

  at_random = [deviation(rng.integers(0, 5, 60)[groups]) for _ in range(20)]
  assert deviation(numbers) < min(at_random)


def test_folds_partition_the_items():
  items = np.arange(100, 100 + len(CLASSES))
  parts = []
  for number in range(3):
    part = folds.take(items, 'train', folds.parse(f'[fold={number}/3]'), CLASSES)
    others = folds.take(items, 'train', folds.parse(f'[fold!={number}/3]'), CLASSES)
    assert sorted([*part, *others]) == items.tolist()
    parts.append(part)
  assert sorted(np.concatenate(parts)) == items.tolist()
  other_seed = folds.take(items, 'train', folds.parse('[fold=0/3,seed=1]'), CLASSES)
  assert set(other_seed) != set(parts[0])


def test_folds_are_the_same_on_all_machines():
  """Literals: they must not change with NumPy, since runs resume with them."""
  numbers = folds.assign('train', folds.parse('[fold=0/3]'), [0] * 6 + [1] * 4)
  assert numbers.tolist() == [0, 2, 1, 0, 1, 2, 1, 2, 0, 0]


@pytest.mark.parametrize(
  'instruction, strata, message',
  [
    ('[fold=5/5]', [0] * 9, r"'\[fold=5/5\]' must be one of at least 2 folds"),
    ('[fold==0/5]', [0] * 9, r"is not a fold: write '\[fold=0/5\]'"),
    ('[fold=0/5][:50%]', [0] * 9, 'a fold cannot be sliced'),
    ('[fold=0/1]', [0] * 9, 'at least 2 folds'),
    ('[fold=0/10]', [0] * 9, "'train' has 9 examples, too few for 10 folds"),
  ],
)
def test_impossible_folds_are_rejected(instruction, strata, message):
  with pytest.raises(ValueError, match=message):
    folds.take(np.arange(9), 'train', folds.parse(instruction), strata)


def test_slices_are_not_folds():
  assert folds.parse('[:90%]') is folds.parse('') is None


def test_data_sets_without_folds_say_so():
  with pytest.raises(
    ValueError, match=r"'train\[fold=0/5\]': only folders .* Hub have folds"
  ):
    slices.take(range(9), 'train', '[fold=0/5]')


# --- Data on disk ---


def names_of(config, split, features=sources.LABELLED):
  """Returns names of images, and their labels if these are read."""
  source = sources.open_split(config, split, features)
  names = [pathlib.Path(source.name(i)).stem for i in range(source.num_examples)]
  labels = source.labels() if 'label' in features else None
  return names, labels


def check_folds(config, num_images, num_classes):
  """Checks the folds of a data set; returns the names in each fold."""
  parts = []
  for number in range(3):
    names, labels = names_of(config, f'train[fold={number}/3]')
    assert names_of(config, f'train[fold={number}/3]', ('image',))[0] == names
    counts = np.bincount(labels[:, 0], minlength=num_classes)
    assert counts.max() - counts.min() <= 1
    others, _ = names_of(config, f'train[fold!={number}/3]')
    assert len({*names, *others}) == len(names) + len(others) == num_images
    parts.append(names)
  both, _ = names_of(config, 'train[fold=0/3]+train[fold=2/3]')
  assert both == parts[0] + parts[2]
  assert len(set().union(*parts)) == num_images
  return parts


def test_folds_of_class_folders(tiny_config, image_folder, tmp_path):
  tiny_config.dataset = str(image_folder)
  parts = check_folds(tiny_config, 33, 3)
  assert sorted(map(len, parts)) == [11, 11, 11]
  tiny_config.dataset = str(shutil.copytree(image_folder, tmp_path / 'moved'))
  assert names_of(tiny_config, 'train[fold=1/3]')[0] == parts[1]


@pytest.fixture
def records():
  """18 images of two classes and 9 patients: (number, label, group)."""
  return [(i, 'ab'[i % 2], f'patient {i // 2}') for i in range(18)]


def patients(names):
  return {int(name) // 2 for name in names}


@pytest.mark.parametrize('is_grouped', [False, True])
def test_folds_of_manifests(tiny_config, tmp_path, records, is_grouped):
  lines = []
  for number, label, group in records:
    Image.new('L', (4, 5), number).save(tmp_path / f'{number}.png')
    line = {'image': f'{number}.png', 'label': label}
    lines.append({**line, 'group': group} if is_grouped else line)
  (tmp_path / 'train.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  tiny_config.dataset = str(tmp_path)
  parts = check_folds(tiny_config, 18, 2)
  num_patients = sum(len(patients(names)) for names in parts)
  assert (num_patients == 9) == is_grouped
  if is_grouped:
    del lines[7]['group']
    (tmp_path / 'train.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match='train.jsonl:8: `group` is null'):
      sources.open_split(tiny_config, 'train[fold=0/3]')
    assert sources.open_split(tiny_config, 'train[:50%]').num_examples == 9


@pytest.mark.parametrize('is_grouped', [False, True])
def test_folds_of_parquet_files(tiny_config, tmp_path, records, is_grouped):
  for file_number in range(2):
    rows = records[9 * file_number :][:9]
    columns = {
      'image': [{'bytes': b'', 'path': f'{number}.png'} for number, _, _ in rows],
      'label': [label for _, label, _ in rows],
      'number': [number for number, _, _ in rows],
    }
    if is_grouped:
      columns['group'] = [group for _, _, group in rows]
    path = tmp_path / f'train-0000{file_number}-of-00002.parquet'
    pq.write_table(pa.table(columns), path)
  tiny_config.dataset = str(tmp_path)

  def numbers(split):
    source = sources.open_split(tiny_config, split, ('number', 'label'))
    records = source.lookup(np.arange(source.num_examples))
    assert source.labels().tolist() == records['label'].numpy().tolist()
    assert source.labels()[:, 0].tolist() == (records['number'].numpy() % 2).tolist()
    return records['number'].numpy().tolist()

  parts = [numbers(f'train[fold={number}/3]') for number in range(3)]
  assert sorted(parts[0] + parts[1] + parts[2]) == [*range(18)]
  assert [len(part) for part in parts] == [6, 6, 6]
  assert all(sum(number % 2 for number in part) == 3 for part in parts)
  assert (sum(len(patients(part)) for part in parts) == 9) == is_grouped
  assert numbers('train[fold!=0/3]+train[:2]') == [*sorted(parts[1] + parts[2]), 0, 1]
  first = sources.open_split(tiny_config, 'train[fold=0/3]').fingerprint()
  assert first != sources.open_split(tiny_config, 'train[fold=1/3]').fingerprint()
