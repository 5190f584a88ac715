"""Tests of local and axial attention against dense masked attention in NumPy."""

import functools

import jax
import numpy as np
import pytest

from tests import numpy_vit, tiny_models
from vit_jax.layers import positions
from vit_jax.planning import flops

GRID = (3, 4)
# Whether a query at a may attend to a key at b, (row, column), by kind of block.
NEAR = {
  'local': lambda a, b: max(abs(a[0] - b[0]), abs(a[1] - b[1])) <= 1,
  'row': lambda a, b: a[0] == b[0],
  'column': lambda a, b: a[1] == b[1],
}


def model_of(classifier='gap', registers=0, **fields):
  transformer = {**tiny_models.tiny().transformer, 'attention_window': 3, **fields}
  return tiny_models.tiny(
    classifier=classifier, registers=registers, transformer=transformer
  )


def block(p, x, seen, turns):
  """Equations 2 and 3 of the paper; returns tokens and attention weights.

  `seen` [N, N] are the keys of each query. Queries and keys, as complex numbers, are
  multiplied by `turns` [N, E/2].
  """
  norm, dense = numpy_vit.norm, numpy_vit.dense
  attend, y = p['MultiHeadDotProductAttention_0'], norm(p['LayerNorm_0'], x)
  q, k, v = (dense(attend[name], y) for name in ('query', 'key', 'value'))
  q, k = (
    (x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]) * turns[:, None]
    for x in (q, k)
  )
  scores = np.einsum('bqhe,bkhe->bhqk', q, k.conj()).real / np.sqrt(v.shape[-1])
  weights = np.exp(scores) * seen
  weights /= weights.sum(axis=-1, keepdims=True)
  x = x + dense(attend['out'], np.einsum('bhqk,bkhe->bqhe', weights, v), axes=2)
  y = dense(p['MlpBlock_0']['Dense_0'], norm(p['LayerNorm_1'], x))
  return x + dense(p['MlpBlock_0']['Dense_1'], numpy_vit.gelu(y)), weights


def reference(params, x, kinds, causal, turns):
  """The encoder in float64, with one block per kind in each layer; see `block`."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  places = list(np.ndindex(*GRID))
  x, found = np.asarray(x, np.float64), []
  layers = sum(name.startswith('encoderblock') for name in params)
  for i in range(layers):
    layer = params[f'encoderblock_{i}']
    for kind in kinds:
      near = [[NEAR[kind](a, b) for b in places] for a in places]
      before = ((x.shape[1] - len(places), 0),) * 2
      seen = np.pad(near, before, constant_values=True)
      seen = np.tril(seen) if causal else seen
      x, weights = block(layer.get(kind, layer), x, seen, turns)
      found.append(weights)
  return numpy_vit.norm(params['encoder_norm'], x), found


@pytest.mark.parametrize(
  'pattern, fields',
  [
    ('local', {'classifier': 'token_gap', 'registers': 2, 'attention': 'xla'}),
    ('local', {'position_embedding': 'rope', 'causal': True, 'remat': 'dots'}),
    ('axial', {'num_layers': 2, 'position_embedding': 'rope', 'causal': True}),
    (
      'axial',
      {'num_layers': 2, 'position_embedding': 'learned_2d', 'scan': True,
       'remat': 'full'},
    ),
  ],
)  # fmt: skip
def test_matches_dense_attention_with_a_mask(pattern, fields):
  model = model_of(attention_pattern=pattern, **fields)
  x = np.asarray(tiny_models.images((2, 4 * GRID[0], 4 * GRID[1], 3)))
  params = tiny_models.randomised(model, x)

  @jax.jit
  def encode(params, x):
    apply = functools.partial(model.apply, {'params': params})
    tokens = apply(x, flat=False, method='embed')
    first = apply(tokens, train=False, method='add_positions')
    encode = functools.partial(apply, tokens, train=True, method='encode')
    seen = encode(mutable='intermediates')[1] if 'registers' in fields else {}
    return first, encode(), seen

  first, got, seen = encode(params, x)
  angles = np.zeros((first.shape[1], 4))
  if fields.get('position_embedding') == 'rope':
    angles = positions.rope_angles(GRID, first.shape[1], 8)
  kinds = ('row', 'column') if pattern == 'axial' else (pattern,)
  want, weights = reference(
    params['Transformer'], first, kinds, fields.get('causal'), np.exp(1j * angles)
  )
  registers = slice(1, 1 + fields.get('registers', 0))
  want = np.delete(want, registers, axis=1) if fields.get('registers') else want
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
  if seen:
    layer = seen['intermediates']['Transformer']['encoderblock_0']
    sown = layer['MultiHeadDotProductAttention_0']['attention_weights'][0]
    np.testing.assert_allclose(sown, weights[0], atol=1e-5)


def test_flops_count_the_attended_pairs():
  """4 N^2 D per layer, even with a mask; axial: 4 N D (h + w) and a second block."""
  tokens, width, size = 32 * 64, 16, (128, 256)
  count = lambda **fields: flops.forward_flops(model_of(**fields, num_layers=1), size)
  full = count()
  assert count(attention_pattern='local') == full
  # Projections and MLP of one block, embedding and head.
  rest = full - 4 * tokens**2 * width
  more = tokens * 2 * (4 * width**2 + 2 * width * 32)
  pairs = 4 * tokens * width * (32 + 64)
  assert count(attention_pattern='axial') == rest + more + pairs


@pytest.mark.parametrize(
  'pattern, fields, words',
  [
    ('local', dict(attention_window=4), 'attention_window=4'),
    ('local', dict(attention='flash'), "attention='flash' .*masks: use 'default'"),
    ('axial', dict(classifier='token'), 'classifier=.*gap'),
    (
      'axial',
      dict(position_embedding='relative', position_layers='every'),
      'relative must be',
    ),
  ],
)
def test_rejects_incompatible_options(pattern, fields, words):
  with pytest.raises(ValueError, match=words):
    tiny_models.shapes(model_of(attention_pattern=pattern, **fields), 8)
