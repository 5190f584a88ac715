"""Tests of the held-out part of training data."""

import itertools

import pytest
import tensorflow_datasets as tfds

from vit_jax.data import slices
from vit_jax.studies import held_out


@pytest.mark.parametrize('split, amount, parts', [
  ('train[:98%]', None, ('train[:98%]', 'train[98%:]', 'train')),
  ('train[5%:90%]', None, ('train[5%:90%]', 'train[:5%]+train[90%:]', 'train')),
  ('train[:-200]', None, ('train[:-200]', 'train[-200:]', 'train')),
  ('train', '10%', ('train[:90%]', 'train[90%:]', 'train')),
  ('train', '200', ('train[:-200]', 'train[-200:]', 'train')),
  ('train[:90%]', '10%', ('train[:80%]', 'train[80%:90%]', 'train[:90%]')),
  ('train[:-100]', '200', ('train[:-300]', 'train[-300:-100]', 'train[:-100]')),
  ('train[102400:]', '1200000',
   ('train[102400:-1200000]', 'train[-1200000:]', 'train[102400:]')),
])  # fmt: skip
def test_splits_the_training_data(split, amount, parts):
  found = held_out.cut(split, 'test', amount)
  assert found == parts
  info = tfds.core.SplitInfo(
    name='train', shard_lengths=[2_000_003], num_bytes=0, filename_template=None
  )

  def positions(split):
    bounds = [slices.bounds(info, part) for _, part in slices.parts(split)]
    return sorted(bounds)

  # The two parts do not overlap and cover the whole.
  pieces = sorted(positions(found.train) + positions(found.held_out))
  [(begin, end)] = positions(found.all)
  assert (pieces[0][0], pieces[-1][1]) == (begin, end)
  assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))


def test_holds_out_the_other_folds():
  parts = held_out.cut('train[fold!=1/5]', 'test')
  assert parts == ('train[fold!=1/5]', 'train[fold=1/5]', 'train')
  parts = held_out.cut('train[fold=1/5,seed=2]', 'test')
  assert parts.held_out == 'train[fold!=1/5,seed=2]'
  train, test = 'train[fold=2/5]+train[fold=3/5]', 'train[fold=0/5]'
  assert held_out.cut(train, test, 'train[fold=1/5]').train == train
  for other in ('train[fold!=1/5]', 'train[fold=0/4]', 'train[:1%]'):
    with pytest.raises(ValueError, match='overlaps with pp.train'):
      held_out.cut(train, 'test', other)
  with pytest.raises(ValueError, match="held_out='10%' is cut off a slice"):
    held_out.cut('train[fold!=1/5]', 'test', '10%')


def test_holds_out_another_split():
  for split, other in (('a[:5]+b', 'val'), ('train[:80%]', 'train[80%:85%]')):
    found = held_out.cut(split, 'test', other)
    assert found == (split, other, f'{split}+{other}')


@pytest.mark.parametrize('split, amount, message', [
  ('train', None, "pp.train='train' leaves .*--held_out"),
  ('train[:90%]', None, "'train\\[90%:\\]', overlaps with pp.test='train\\[90%:\\]'"),
  ('a+b', None, "pp.train='a\\+b' is a sum of splits: name the split"),
  ('train[:80%]', 'train[85%:95%]', "overlaps with pp.test='train"),
  ('train[:500]', 'train[499:600]', "overlaps with pp.train='train"),
  ('train', '100%', "held_out='100%' leaves nothing"),
  ('train[:20]', '20', "leaves nothing of 'train\\[:20\\]' to train on"),
  ('train[:90%]', '20', 'must both be in percent'),
  ('train', 'train[', "held_out='train\\[' must be a split"),
])  # fmt: skip
def test_unsuitable_held_out_parts_are_rejected(split, amount, message):
  with pytest.raises(ValueError, match=message):
    held_out.cut(split, 'train[90%:]', amount)
