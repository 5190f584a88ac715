"""Tests of mixtures of data sets: the order of examples, and their features."""

import json

import numpy as np
from PIL import Image
import pytest
import tensorflow as tf

from tests import input_pipeline_test
from vit_jax import input_pipeline
from vit_jax.commands import train as train_command
from vit_jax.configs import common, schema
from vit_jax.data import mixture, order, records, sources
from vit_jax.distributed import sharding
from vit_jax.run import workdir


def numbered(size, begin=0, **columns):
  """A source of images whose contents are their numbers."""
  names = [str(begin + i) for i in range(size)]
  return records.MemorySource({'image': names, **columns}, {})


def mix(sizes, weights):
  """A mixture of numbered sources; the images of part k start at 1000 k."""
  parts = [numbered(size, 1000 * k) for k, size in enumerate(sizes)]
  pairs = [(f'part{k}', weight) for k, weight in enumerate(weights)]
  return mixture.MixtureSource(parts, pairs)


def number(record, seed):
  """A task's `example` for such an image."""
  return {
    'value': tf.strings.to_number(record['image'], tf.int32),
    'index': tf.cast(record['index'], tf.int32),
    'seed': seed,
  }


def batches(config, source, start=0, count=3, rows=None, example=number):
  rows = np.arange(config.batch) if rows is None else rows
  data = input_pipeline.train_dataset(config, source, example, rows, start)
  return list(data.take(count).as_numpy_iterator())


@pytest.mark.parametrize(
  'weights, bound',
  [
    ((7, 3), 1),
    ((0.11, 0.5, 0.4), 1),
    ((5, 1e-3), 1),
    ((3, 1, 4, 1, 5, 9, 2, 6), 2),
  ],
)
def test_every_prefix_has_the_right_shares_and_no_gaps(weights, bound):
  source = mix([5] * len(weights), weights)
  positions = np.arange(4000)
  part, local = (x.numpy() for x in tf.function(source.place)(positions))
  for k, weight in enumerate(weights):
    mine = part == k
    np.testing.assert_array_equal(local[mine], np.arange(mine.sum()))
    want = (positions + 1) * weight / sum(weights)
    assert np.abs(np.cumsum(mine) - want).max() <= bound


def test_each_data_set_has_its_own_epochs(tiny_config):
  source = mix([7, 10, 5], (2, 1, 1))
  assert source.num_examples == 22
  got = batches(tiny_config, source, count=14)
  values = np.concatenate([b['value'] for b in got])
  index = np.concatenate([b['index'] for b in got])
  offsets = {0: 0, 1: 7, 2: 17}
  for k, size, count in ((0, 7, 112), (1, 10, 56), (2, 5, 56)):
    mine = values[values // 1000 == k] - 1000 * k
    assert len(mine) == count
    epochs = [mine[i : i + size] for i in range(0, count - size, size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    np.testing.assert_array_equal(index[values // 1000 == k], mine + offsets[k])
  indices = order.training_indices(source, np.arange(14 * 16), 0)
  np.testing.assert_array_equal(indices, index)
  for i in (0, 7, 16, 21):
    part, inner = source.locate(i)
    assert part.name(inner) == f'example {inner}'
    value = part.lookup(tf.constant([inner], tf.int64))['image'][0].numpy()
    assert int(value) % 1000 == inner == i - offsets[int(value) // 1000]


def test_resumed_run_and_other_processes_see_the_same_examples(tiny_config):
  source = mix([7, 10], (0.6, 0.4))
  whole = batches(tiny_config, source, count=8)
  positions = np.concatenate([b['seed'][:, 1] for b in whole])
  np.testing.assert_array_equal(positions, np.arange(8 * 16))
  rows = np.array([3, 4, 11])
  for got, want in zip(batches(tiny_config, source, 5, 3, rows), whole[5:]):
    input_pipeline_test.assert_same(got, {k: v[rows] for k, v in want.items()})


def test_mixture_of_one_matches_that_data_set():
  source = mix([5], (3,))
  [part], positions = source.parts, np.arange(80)
  np.testing.assert_array_equal(
    order.training_indices(source, positions, 4),
    order.training_indices(part, positions, 4),
  )


@pytest.fixture
def photos(tmp_path):
  """A folder of white images without labels."""
  (tmp_path / 'train').mkdir()
  for i in range(6):
    path = tmp_path / 'train' / f'{i}.jpg'
    Image.new('L', (12, 10), 255).save(path)
  return tmp_path


def test_mixture_of_a_folder_and_tfds(tiny_config, photos):
  config = tiny_config
  config.dataset = (('digits', 0.75), (str(photos), 0.25))
  source = sources.open_split(config, 'train', ('image', 'label?'))
  assert source.features == ('image',)
  assert source.class_names == ()
  assert source.num_examples == 1437 + 6

  def example(record, seed):
    image = tf.io.decode_image(record['image'], 1, expand_animations=False)
    return {'height': tf.shape(image)[0], 'white': tf.reduce_min(image) == 255}

  [batch] = batches(config, source, count=1, example=example)
  assert np.bincount(batch['height']).tolist()[8:] == [12, 0, 4]
  np.testing.assert_array_equal(batch['white'], batch['height'] == 10)
  # Evaluation reads the first, even if the others lack the split.
  mesh = sharding.make_mesh({'data': -1})
  found = input_pipeline.eval_batches(config, source, example, mesh)
  np.testing.assert_array_equal(next(found)['index'], np.arange(104))
  assert source.evaluated.num_examples == 1437
  assert sources.open_split(config, 'test').num_examples == 360
  with pytest.raises(ValueError, match='not in class folders'):
    sources.open_split(config, 'train')


@pytest.fixture
def manifests(tmp_path):
  """Writes manifests with a feature `x`; returns a mixture of them."""

  def write(**folders):
    for name, values in folders.items():
      (tmp_path / name).mkdir()
      Image.new('L', (4, 4)).save(tmp_path / name / 'x.png')
      lines = [json.dumps({'image': 'x.png', 'x': x}) for x in values]
      (tmp_path / name / 'train.jsonl').write_text('\n'.join(lines))
    return tuple((f'{tmp_path}/{name}', 1) for name in folders)

  return write


def test_data_sets_must_have_the_same_classes_and_types(tiny_config, manifests):
  tiny_config.dataset = (('digits', 1), ('digits/0to4', 1))
  with pytest.raises(
    ValueError, match=r"classes of 'label' are 5, .*'digits/0to4', and in 'dig"
  ):
    sources.open_split(tiny_config, 'train')
  source = sources.open_split(tiny_config, 'train', ('image',))
  assert source.num_examples == 1437 + source.parts[1].num_examples
  tiny_config.dataset = manifests(a=[1], b=['y'])
  with pytest.raises(
    ValueError, match="'x' is string of 0 axes in '.*b', and in '.*a' int64 of"
  ):
    sources.open_split(tiny_config, 'train', ('x',))


def test_ragged_features(tiny_config, manifests):
  tiny_config.dataset = manifests(a=([1.5] * 2, [1.5] * 2), b=([], [1.5] * 3))
  source = sources.open_split(tiny_config, 'train', ('image', 'x'))

  def example(record, seed):
    return {'size': tf.size(record['x'])}

  [batch] = batches(tiny_config, source, count=1, example=example)
  assert sorted(batch['size']) == [0] * 4 + [2] * 8 + [3] * 4


def test_invalid_mixtures():
  field = schema.fields(common.Config)['dataset']
  for dataset in (('digits', 1), (('digits', 0),), (('digits', 'x'),), ()):
    assert not schema.accepts(dataset, field)


CONFIG = """
from vit_jax.configs import common

def get_config():
  config = common.get_config()
  return common.set_dataset(config, {dataset!r})
"""
PAIRS = (('digits', 1), ('digits/0to4', 0.5))


@pytest.mark.parametrize(
  'dataset, args, want',
  [
    (None, ['--config.dataset', 'digits'], 'digits'),
    ('digits', [f'--config.dataset={PAIRS}'], PAIRS),
    (PAIRS, ['--config.dataset=/data/my photos'], '/data/my photos'),
  ],
)
def test_mixtures_in_flags_and_config_files(tmp_path, dataset, args, want):
  path = tmp_path / 'config.py'
  path.write_text(CONFIG.format(dataset=dataset))
  argv = [f'--config={path}', *args, '--config.pp.flip', 'false']
  config = train_command.parse([*argv, '--workdir=/tmp/run']).config
  want = json.loads(json.dumps(want))
  assert json.loads(json.dumps(config.dataset)) == want
  assert config.pp.flip is False
  # As stored in a workdir.
  kept = json.loads(json.dumps(workdir.to_plain(config)))
  assert kept['dataset'] == want
