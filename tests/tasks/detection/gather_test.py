"""Tests of results gathered from all processes."""

import pickle

import jax.numpy as jnp
import numpy as np
import pytest

from tests import processes
from vit_jax.tasks.detection import gather


def result(i):
  """What an evaluator might find on image i."""
  return {
    'boxes': np.full((i % 4, 4), i + 0.5, np.float32),
    'label': np.arange(i % 4),
    'score': np.float64(i / 3),
    'name': np.array([f'image {i}', 'ä']),
    'crowd': np.array(i % 2 == 0),
  }


def assert_same(got, want):
  assert len(got) == len(want)
  for a, b in zip(got, want):
    assert a.keys() == b.keys()
    for name in a:
      assert a[name].dtype == np.asarray(b[name]).dtype
      np.testing.assert_array_equal(a[name], b[name])
      assert np.shape(a[name]) == np.shape(b[name])


def test_one_process_has_all_in_order():
  assert gather.gather({}) == []
  got = gather.gather({i: result(i) for i in (3, 0, 11)})
  assert_same(got, [result(0), result(3), result(11)])
  got[0]['label'][:] = 7  # May be changed.
  assert gather.gather({5: {}, 2: {'x': np.zeros(0)}})[1] == {}


def test_types_of_jax():
  [got] = gather.gather({np.int64(4): {'x': jnp.ones(3, jnp.bfloat16)}})
  assert got['x'].dtype == jnp.bfloat16
  np.testing.assert_array_equal(got['x'], np.ones(3))


def test_objects_are_named():
  with pytest.raises(ValueError, match="'x' of image 3 holds Python objects"):
    gather.gather({3: {'x': np.array(['a', None])}})


SHARES = """
import pickle, sys
import jax
address, process, folder = sys.argv[1:]
process = int(process)
jax.distributed.initialize(address, 2, process)
from tests.tasks.detection import gather_test
from vit_jax.tasks.detection import gather
cases = {
  # Unequal, in no order, with images that both have.
  'unequal': ([7, 1, 4], [*range(8, 40), 4, 1]),
  'empty': ([], [2, 0, 1]),
  'nothing': ([], []),
}
got = {}
for chunk in (16 * 2**20, 1000):
  gather.CHUNK = chunk
  for name, shares in cases.items():
    mine = {i: gather_test.result(i) for i in shares[process]}
    got[name, chunk] = gather.gather(mine)
with open(f'{folder}/{process}.pickle', 'wb') as file:
  pickle.dump(got, file)
"""


def test_two_processes_have_the_same(tmp_path):
  statuses, outputs = processes.run_two(SHARES, tmp_path, devices=2)
  assert statuses == [0, 0], outputs
  want = {
    'unequal': [result(i) for i in (1, 4, 7, *range(8, 40))],
    'empty': [result(i) for i in range(3)],
    'nothing': [],
  }
  for i in range(2):
    got = pickle.loads((tmp_path / f'{i}.pickle').read_bytes())
    assert len(got) == 6
    for (name, _), found in got.items():
      assert_same(found, want[name])
