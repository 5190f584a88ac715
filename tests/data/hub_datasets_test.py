"""Tests of data sets on the Hugging Face Hub; `datasets` itself says what they hold.

Its loader reads folders of this machine in place of repositories of the hub.
"""

import io
import sys

import datasets
import huggingface_hub
import numpy as np
from PIL import Image
import pyarrow.parquet as pq
import pytest

from tests import looked_up
from vit_jax import predict, train
from vit_jax.commands import index as index_command
from vit_jax.data import hub_datasets, sources
from vit_jax.evaluators import evaluation

NAMES = ['cow', 'ant', 'bee']  # Not sorted.
ANIMALS = 'hf://zoo/animals'


def png(grey):
  file = io.BytesIO()
  Image.new('L', (8, 8), grey).save(file, 'PNG')
  return file.getvalue()


def write(folder, split, greys):
  """Writes a split with two columns of images, two class labels, and a text."""
  rows = {
    'img': [{'bytes': png(grey), 'path': f'{grey}.png'} for grey in greys],
    'thumbnail': [{'bytes': png(grey // 2), 'path': None} for grey in greys],
    'fine': [grey % 3 for grey in greys],
    'coarse': [grey % 2 for grey in greys],
    'caption': [f'number {grey}' for grey in greys],
    'boxes': [[0.5] * (grey % 3) for grey in greys],
  }
  features = datasets.Features(
    img=datasets.Image(decode=False),
    thumbnail=datasets.Image(decode=False),
    fine=datasets.ClassLabel(names=NAMES),
    coarse=datasets.ClassLabel(names=['even', 'odd']),
    caption=datasets.Value('string'),
    boxes=datasets.List(datasets.Value('float32')),
  )
  table = datasets.Dataset.from_dict(rows, features)
  if folder.name == 'animals':
    table = table.remove_columns(['thumbnail', 'coarse'])
  if folder.name == 'texts':
    table = table.select_columns('caption')
  folder.mkdir(parents=True, exist_ok=True)
  table.to_parquet(folder / f'{split}-00000-of-00001.parquet')


@pytest.fixture(scope='module')
def repositories(tmp_path_factory):
  """A folder with three repositories, each with two splits."""
  root = tmp_path_factory.mktemp('hub')
  for name in ('animals', 'views', 'texts'):
    write(root / 'zoo' / name, 'train', range(20))
    write(root / 'zoo' / name, 'validation', range(20, 26))
  return root


@pytest.fixture
def hub(repositories, monkeypatch):
  """Has `datasets` load repositories that exist from their folders."""
  load = datasets.load_dataset_builder

  def load_local(path, name=None, revision=None):
    folder = repositories / path.removeprefix('hf://datasets/')
    if not folder.exists():
      return load(path, name, revision=revision)
    return load(str(folder), name, cache_dir=str(repositories / 'cache'))

  monkeypatch.setattr(datasets, 'load_dataset_builder', load_local)
  monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', True)
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
  hub_datasets._prepare.cache_clear()
  return repositories


def open_split(config, dataset, split='train', *features, **kwargs):
  config.dataset = dataset
  return sources.open_split(config, split, features or ('image', 'label'), **kwargs)


@pytest.mark.parametrize('split', ['train', 'train[:30%]', 'validation[2:]+train[-3:]'])
def test_rows_are_those_of_datasets(hub, tiny_config, split):
  source = open_split(tiny_config, ANIMALS, split, 'image', 'label', 'caption', 'boxes')
  folder = str(hub / 'zoo' / 'animals')
  expected = datasets.load_dataset(folder, split=split, cache_dir=str(hub / 'cache'))
  assert source.num_examples == len(expected)
  assert source.class_names == tuple(expected.features['fine'].names)
  order = np.random.default_rng(0).permutation(len(expected))
  records = looked_up.features(source, order)
  rows = [expected.cast_column('img', datasets.Image(decode=False))[i] for i in order]
  assert records['image'] == [row['img']['bytes'] for row in rows]
  assert [x.tolist() for x in records['label']] == [[row['fine']] for row in rows]
  assert records['caption'] == [row['caption'].encode() for row in rows]
  assert [x.tolist() for x in records['boxes']] == [row['boxes'] for row in rows]


@pytest.mark.parametrize('size', [2_000, 0])
def test_damaged_cache_is_named(hub, tiny_config, size):
  write(hub / 'zoo' / f'damaged{size}', 'train', range(20))
  dataset = f'hf://zoo/damaged{size}'
  open_split(tiny_config, f'{dataset}?image=img&label=fine')
  [arrow_file] = (hub / 'cache').glob(f'damaged{size}/**/*-train.arrow')
  content = arrow_file.read_bytes()
  arrow_file.unlink()
  arrow_file.write_bytes(content[:size])
  message = f"'train' in '{arrow_file.parent}' are damaged: .*: delete this folder"
  with pytest.raises(ValueError, match=message):
    open_split(tiny_config, f'{dataset}?image=img&label=fine')


def test_paths_of_rows_lead_to_cached_files_only(
  hub, tiny_config, tmp_path, monkeypatch
):
  """A stranger's data set reads no other files of this machine."""
  cache = tmp_path / 'cache'
  cache.mkdir()
  paths = [cache / 'inside.png', tmp_path / 'outside.png']
  for path in paths:
    path.write_bytes(png(7))
  (cache / 'link.png').symlink_to(paths[1])
  rows = [*map(str, paths), str(cache / 'link.png'), f'file://{paths[1]}']
  features = datasets.Features(image=datasets.Image(decode=False))
  table = datasets.Dataset.from_dict(
    {'image': [{'bytes': None, 'path': path} for path in rows]}, features
  )
  folder = hub / 'zoo' / 'paths'
  folder.mkdir()
  pq.write_table(table.data.table, folder / 'train-00000-of-00001.parquet')
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', str(cache))
  source = open_split(tiny_config, 'hf://zoo/paths', 'train', 'image')
  assert source.arrays(np.array([0]))[0].tolist() == [png(7)]
  for number, path in enumerate(rows[1:], start=1):
    with pytest.raises(
      ValueError, match=f"row {number} .*'{path}' is not in the caches"
    ):
      source.arrays(np.array([number]))


def test_folds_are_those_of_parquet_files(hub, tiny_config):
  """The hub's data sets are Parquet files, which can also be opened as a folder."""
  for split in ('train[fold=1/3]', 'train[fold!=1/3]+validation[:2]'):
    source = open_split(tiny_config, ANIMALS, split, 'label', 'caption')
    labels = source.labels()
    records = looked_up.features(source)
    assert labels.tolist() == [x.tolist() for x in records['label']]
    folder = str(hub / 'zoo' / 'animals')
    stored = open_split(tiny_config, folder, split, 'label', 'caption')
    assert looked_up.features(stored)['caption'] == records['caption']
  counts = np.bincount(labels[:, 0])
  assert counts.max() - counts.min() <= 2
  unlabelled = open_split(tiny_config, ANIMALS, split, 'caption')
  assert looked_up.features(unlabelled)['caption'] == records['caption']
  assert unlabelled.fingerprint()['split'] == split


def test_columns_are_chosen_in_the_name(hub, tiny_config):
  name = 'hf://zoo/views?image=thumbnail&label=coarse'
  source = open_split(tiny_config, name, 'validation')
  assert source.class_names == ('even', 'odd')
  records = looked_up.features(source)
  assert records['image'] == [png(grey // 2) for grey in range(20, 26)]
  assert [x.tolist() for x in records['label']] == [[grey % 2] for grey in range(6)]
  other = open_split(tiny_config, name.replace('coarse', 'fine'), 'validation')
  assert other.fingerprint() != source.fingerprint()
  text = open_split(tiny_config, 'hf://zoo/texts?text=caption', 'train', 'text')
  assert looked_up.features(text, [3]) == {'text': [b'number 3']}


@pytest.mark.parametrize(
  'name, config, error, message',
  [
    ('hf://zoo', {}, ValueError, "dataset='hf://zoo' must be hf://OWNER/NAME"),
    ('hf://zoo/animals?image', {}, ValueError, 'FEATURE=COLUMN'),
    ('hf://zoo/views', {}, ValueError, r"for 'image', .*'img', 'thumbnail'.*\?image=img'"),
    ('hf://zoo/views?image=img', {}, ValueError, "for 'label', .*img&label=fine'"),
    ('hf://zoo/views?image=photo', {}, ValueError, "no column 'photo' .*'img'"),
    ('hf://zoo/texts', {}, ValueError, "no feature 'image', an image: .*'caption'"),
    (ANIMALS, {'split': 'dev'}, ValueError, "no split 'dev': .*'validation'"),
    ('hf://zoo/none', {}, ConnectionError, "zoo/none' .* hub cannot be reached"),
  ],
)  # fmt: skip
def test_errors_name_the_remedy(hub, tiny_config, name, config, error, message):
  with pytest.raises(error, match=message):
    open_split(tiny_config, name, **config)


def test_missing_package_is_named(hub, tiny_config, monkeypatch):
  monkeypatch.setitem(sys.modules, 'datasets', None)
  with pytest.raises(ImportError, match=r"hf://zoo/animals' needs datasets: .*\[hf\]"):
    open_split(tiny_config, ANIMALS)


def test_images_on_the_hub_are_not_listed():
  with pytest.raises(ValueError, match="'hf://zoo/animals' is .* without an index"):
    index_command.main([ANIMALS])


def test_a_run_trains_on_a_name_and_is_evaluated(hub, tiny_config, tmp_path, capsys):
  """The split 'validation' is the test split."""
  tiny_config.dataset = ANIMALS
  tiny_config.pp.update(train='train', test='test')
  tiny_config.update(total_steps=1, warmup_steps=0, batch=8, batch_eval=8, eval_every=0)
  _, metrics = train.train_and_evaluate(tiny_config, str(tmp_path))
  assert "Split 'test' of 'hf://zoo/animals' is 'validation'" in capsys.readouterr().out
  assert metrics['num_examples_test'] == 6
  model = predict.load(str(tmp_path))
  assert model.class_names == tuple(NAMES)
  again = evaluation.evaluate(model, 'validation')
  assert again['loss'] == pytest.approx(metrics['loss_test'], rel=1e-5)
