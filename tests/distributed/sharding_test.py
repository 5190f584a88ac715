"""Tests of meshes, rules and rows, on eight simulated devices."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from vit_jax.distributed import sharding


def test_axis_of_minus_1_gets_the_remaining_devices():
  mesh = sharding.make_mesh({'data': -1, 'model': 2})
  assert dict(mesh.shape) == {'data': 4, 'model': 2}
  assert sharding.batch_shards(mesh) == 4
  assert sharding.batch_axes(mesh) == ('data',)
  np.testing.assert_array_equal(sharding.local_rows(mesh, 8), np.arange(8))
  with pytest.raises(ValueError, match='batch=6 is not a multiple of the 4'):
    sharding.local_rows(mesh, 6)
  mesh = sharding.make_mesh({'data': 2, 'fsdp': 4})
  assert sharding.batch_axes(mesh) == ('data', 'fsdp')
  assert sharding.batch_shards(mesh) == 8


@pytest.mark.parametrize(
  'axes, message',
  [
    ({'data': 3}, r"mesh=\{'data': 3\} does not fit 8 device"),
    ({'data': -1, 'model': -1}, 'at most one of them -1'),
    ({'model': 8}, "the axis 'data' is needed"),
  ],
)
def test_rejects_meshes_that_do_not_fit(axes, message):
  with pytest.raises(ValueError, match=message):
    sharding.make_mesh(axes)


TREE = {
  'block': {'kernel': jnp.zeros((8, 4)), 'bias': jnp.zeros((4,))},
  'count': jnp.zeros(()),
}


def test_first_matching_rule_wins():
  mesh = sharding.make_mesh({'data': -1, 'model': 2})
  rules = [
    ('block/kernel', ('data', 'model')),
    ('block/.*', ('model',)),
    ('.*', ('data',)),
  ]
  got = sharding.tree_shardings(TREE, rules, mesh)
  assert got['block']['kernel'].spec == P('data', 'model')
  assert got['block']['bias'].spec == P('model')
  assert got['count'].spec == P()
  placed = jax.device_put(TREE, got)
  assert placed['block']['kernel'].addressable_shards[0].data.shape == (2, 2)


def test_default_shardings():
  mesh = sharding.make_mesh({'data': 1, 'fsdp': 4, 'model': 2})
  tree = {
    'query': {'kernel': jnp.zeros((512, 4, 64)), 'bias': jnp.zeros((4, 64))},
    'MlpBlock_0': {'Dense_1': {'kernel': jnp.zeros((2048, 510))}},
    'head': {'kernel': jnp.zeros((512, 1001))},
    'cls': jnp.zeros((1, 1, 512)),
  }
  got = sharding.tree_shardings(tree, (), mesh)
  assert got['query']['kernel'].spec == P(None, 'model', 'fsdp')
  assert got['query']['bias'].spec == P('model', None)  # Too small for fsdp.
  # 510 is not divisible by 4, and the other dimension is already split.
  assert got['MlpBlock_0']['Dense_1']['kernel'].spec == P('model', None)
  assert got['head']['kernel'].spec == P('fsdp', None)  # 1001 is odd.
  assert got['cls'].spec == P(None, None, None)
  abstract = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, got
  )
  rows = {row['spec']: row for row in sharding.report(abstract)}
  assert rows['fsdp+model']['bytes'] == 512 * 4 * 64 * 4
  assert rows['fsdp+model']['bytes_per_device'] == 512 * 4 * 64 * 4 // 8
  assert rows['replicated']['arrays'] == 1


def test_reports_arrays_that_tensor_parallelism_cannot_split():
  tree = {
    'query': {'kernel': np.zeros((64, 3, 8)), 'bias': np.zeros((3, 8))},
    'MlpBlock_0': {'Dense_0': {'kernel': np.zeros((64, 128))}},
    'scale': np.zeros(64),
  }
  reports = []
  # Arrays that a rule deliberately leaves unsplit are not reported.
  rules = [('Dense_0', ())]
  for axes in ({'data': 8}, {'data': 4, 'model': 2}):
    mesh = sharding.make_mesh(axes)
    abstract = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      tree,
      sharding.tree_shardings(tree, rules, mesh),
    )
    reports.append(sharding.not_split(abstract, mesh))
  # 3 heads.
  assert reports[0] == ''
  assert reports[1].startswith('2 arrays are not split over model=2')
  assert 'query/kernel (64, 3, 8)' in reports[1]


def test_rejects_rules_that_match_nothing():
  mesh = sharding.make_mesh({'data': -1})
  with pytest.raises(ValueError, match=r"\['kernle'\] match nothing.*paths"):
    sharding.tree_shardings(TREE, [('kernle', ('data',))], mesh)


@pytest.mark.parametrize(
  'rule, message',
  [
    (('bias', ('data', 'model')), 'more dimensions than the array has'),
    (('bias', ('fsdp',)), 'Resource axis: fsdp .* is not found in mesh'),
  ],
)
def test_rejects_rules_that_do_not_fit(rule, message):
  mesh = sharding.make_mesh({'data': -1, 'model': 2})
  with pytest.raises(ValueError, match=f'{rule[0]}.*{message}'):
    sharding.tree_shardings(TREE, [rule], mesh)


def test_batch_constraint_with_and_without_a_mesh():
  mesh = sharding.make_mesh({'data': -1, 'model': 2})
  x = jnp.zeros((8, 6))
  with jax.set_mesh(mesh):
    y = jax.jit(sharding.constrain_batch)(x)
  assert y.sharding.is_equivalent_to(sharding.batch_sharding(mesh), 2)
  assert sharding.constrain_batch(x) is x


def test_digest_covers_names_dtypes_shapes_and_values():
  mesh = sharding.make_mesh({'data': -1}, jax.devices())
  x = np.arange(16, dtype=np.float32)
  tree = {'a': x, 'b': {'c': np.ones(3, jnp.bfloat16), 'd': np.int32(2)}}
  split = {**tree, 'a': jax.device_put(x, sharding.batch_sharding(mesh))}
  assert sharding.digest(tree) == sharding.digest(split)
  others = [
    {**tree, 'a': np.where(x == 7, np.float32(7.0000005), x)},
    {**tree, 'a': x.reshape(4, 4)},
    {**tree, 'a': x[[1, 0, *range(2, 16)]]},
    {'a': x, 'b': {'d': tree['b']['c'], 'c': tree['b']['d']}},
    {'b': tree['b']},
  ]
  assert len({sharding.digest(other) for other in [tree, *others]}) == 6
