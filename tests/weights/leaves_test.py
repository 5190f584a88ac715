"""Tests of the walk over tables of layers, without a model."""

import numpy as np
import pytest

from vit_jax.weights.families import leaves

_NAMING = leaves.Naming(
  'toy',
  'toy model',
  (
    ('', '', (('cls', 'token', 'cls_token'), ('stem', 'conv', 'proj'))),
    (
      'block{1}/unit{01}/',
      'stages.{0}.units.{0}.',
      (
        ('query', 'heads', 'q'),
        ('key', 'heads', 'k'),
        ('out', 'out', 'o'),
        ('norm', 'norm', 'norm'),
      ),
    ),
  ),
  marks=('cls_token',),
  old_names=((r'^module\.', ''),),
  joined={'.qk.': ('.q.', '.k.')},
  program='toys',
  features={'gamma': 'layer scale'},
)
_UNITS = ((0, 0), (0, 1), (1, 0))  # Two stages, of two units and of one.


def state_dict():
  random = np.random.RandomState(0)
  shapes = {'cls_token': (6,), 'proj.weight': (6, 3, 2, 2), 'proj.bias': (6,)}
  for stage, unit in _UNITS:
    start = f'stages.{stage}.units.{unit}.'
    shapes |= {f'{start}qk.weight': (12, 6), f'{start}qk.bias': (12,)}
    shapes |= {f'{start}o.weight': (6, 6), f'{start}norm.weight': (6,)}
  return {name: random.randn(*shape) for name, shape in shapes.items()}


def test_a_table_converts_in_both_directions():
  state = state_dict()
  assert _NAMING.fits(state)
  renamed = {f'module.{name}': value for name, value in state.items()}
  flat = leaves.load(renamed, _NAMING, 2)
  assert not renamed  # No array is kept twice.
  assert leaves.units(flat, 'block{1}/unit{01}/') == (2, 1)
  assert flat['cls'].shape == (1, 1, 6)
  np.testing.assert_array_equal(
    flat['stem/kernel'], np.einsum('oihw->hwio', state['proj.weight'])
  )
  images = np.random.RandomState(1).randn(6)
  for stage, unit in _UNITS:
    here = f'block{stage + 1}/unit{unit + 1:02}/'
    there = f'stages.{stage}.units.{unit}.'
    # In PyTorch: rows 0 to 2 of the queries are head 0, rows 3 to 5 head 1.
    weight, bias = state[f'{there}qk.weight'], state[f'{there}qk.bias']
    for i, name in enumerate(('query', 'key')):
      got = np.einsum('d,dhs->hs', images, flat[f'{here}{name}/kernel'])
      got = got + flat[f'{here}{name}/bias']
      want = (weight @ images + bias)[6 * i : 6 * i + 6].reshape(2, 3)
      np.testing.assert_allclose(got, want, atol=1e-12)
  back = leaves.dump(flat, _NAMING)
  assert back.keys() == state.keys()
  for name, value in state.items():
    np.testing.assert_array_equal(back[name], value)


@pytest.mark.parametrize(
  'change, words',
  [
    ({'stages.0.units.1.o.weight': None}, None),
    ({'stages.0.units.3.o.weight': np.zeros((6, 6))}, 'stages.0.units.N.*3.*missing'),
    ({'stages.0.units.0.gamma': np.zeros(6)}, r'toy model.*gamma.*\(layer scale\)'),
    ({'proj.weight': np.zeros((6, 3))}, 'stem/kernel.*4 dimensions'),
    ({'stages.0.units.0.qk.bias': np.zeros(11)}, 'qk.bias.*11'),
    ({'stages.0.units.0.qk.weight': np.zeros((10, 6))}, 'num_heads=2.*width 5'),
  ],
)
def test_what_a_table_does_not_have(change, words):
  """A missing leaf is noticed when shapes are compared, not here."""
  state = {k: v for k, v in {**state_dict(), **change}.items() if v is not None}
  if words is None:
    assert 'block1/unit02/out/kernel' not in leaves.load(state, _NAMING, 2)
    return
  with pytest.raises(ValueError, match=words):
    leaves.load(state, _NAMING, 2)


def test_what_has_no_counterpart_elsewhere():
  flat = leaves.load(state_dict(), _NAMING, 2) | {'adapter/kernel': np.zeros((6, 6))}
  with pytest.raises(ValueError, match='adapter/kernel.*toys'):
    leaves.dump(flat, _NAMING)
