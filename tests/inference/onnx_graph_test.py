"""Tests of the ONNX translation: each operation against JAX."""

import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest

from vit_jax.inference import onnx_graph

# Functions of x [batch, 4, 6], w [4, 3] and indices [2].
CASES = {
  'constant_left': lambda x, w, at: jnp.einsum('as,nac->nsc', w, x),
  'constant_right': lambda x, w, at: jnp.einsum('nac,as->ncs', x, w),
  'two_sums': lambda x, w, at: jnp.einsum('nab,nab->n', x, x + 1),
  'outer_product': lambda x, w, at: jnp.einsum('na,nb->nab', x[:, 0], x[:, 1]),
  'two_batches': lambda x, w, at: jnp.einsum('nabc,nbd->nabcd', _split(x), x[:, :3]),
  'joined_rows': lambda x, w, at: jnp.einsum('nabc,nad->nbcd', _split(x), x),
  'last': lambda x, w, at: x[:, -1],
  'every_second': lambda x, w, at: lax.slice(x, (0, 1, 0), x.shape, (1, 1, 2)),
  'take': lambda x, w, at: jnp.take(x, at, axis=2),
  'take_inside': lambda x, w, at: _split(x)[:, :, at],
  'take_rows': lambda x, w, at: w[at],
  'take_along': lambda x, w, at: jnp.take_along_axis(
    x, (x[..., :1] > 0).astype(int), axis=1
  ),
  'pad_and_cut': lambda x, w, at: jnp.pad(x, ((0, 0), (1, 0), (0, 2)))[:, :, 1:],
  'cumsum': lambda x, w, at: lax.cumsum(x, 1, reverse=True),
  'argmin': lambda x, w, at: x.argmin(axis=-1),
  'sum_of_nothing': lambda x, w, at: x.sum(axis=()),
  'all_and_any': lambda x, w, at: (x > 0).all(axis=1) | (x > 1).any(axis=1),
  'mean_and_max': lambda x, w, at: x.mean(axis=(1, 2)) - x.max(axis=(1, 2)),
  'gelu': lambda x, w, at: jax.nn.gelu(x, approximate=False),
  'clip': lambda x, w, at: jnp.clip(x, -0.5, 0.5) ** 3,
  'remainder': lambda x, w, at: jnp.sign(x) * (x.astype(int) % 3),
  'choose': lambda x, w, at: jnp.where(x[:, :1] > 0, x, w[0, 0]),
  'broadcast': lambda x, w, at: jnp.concatenate(
    [jnp.broadcast_to(w.reshape(2, 6), (x.shape[0], 2, 6)), x], axis=1
  ),
  'count': lambda x, w, at: x * jnp.arange(4.0)[:, None],
  'loop': lambda x, w, at: lax.scan(
    lambda sum_, row: (sum_ + row, sum_ * row),
    x[:, 0], x.swapaxes(0, 1), reverse=True,
  )[1],
  'convolution': lambda x, w, at: lax.conv_general_dilated(
    x[..., None], w[:3, :, None, None].repeat(2, 3), (2, 1), 'SAME',
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  ),
  'max_pool': lambda x, w, at: nn.max_pool(
    x[..., None], (3, 3), (2, 2), padding='SAME'
  ),
}  # fmt: skip


def _split(x):
  return x.reshape(x.shape[0], 4, 3, 2)


def everything(weights, x):
  w, at = weights
  return {name: case(x, w, at) for name, case in CASES.items()}


def spec():
  [batch] = jax.export.symbolic_shape('batch')
  return {'x': jax.ShapeDtypeStruct((batch, 4, 6), jnp.float32)}


def test_operations_match_jax():
  draw = np.random.RandomState(0).randn
  weights = (draw(4, 3).astype(np.float32), np.array([2, 0], np.int32))
  model = onnx_graph.make_model(everything, weights, spec())
  session = onnxruntime.InferenceSession(model.SerializeToString())
  names = [x.name for x in session.get_outputs()]
  assert names == sorted(CASES)
  for count in (1, 5):
    x = draw(count, 4, 6).astype(np.float32)
    found = dict(zip(names, session.run(None, {'x': x})))
    for name, want in jax.jit(everything)(weights, x).items():
      assert found[name].shape == want.shape, name
      assert found[name].dtype == want.dtype, name
      np.testing.assert_allclose(found[name], want, atol=1e-5, err_msg=name)


def test_operations_without_a_translation_are_named():
  with pytest.raises(ValueError, match="operation 'sort' of the model has no tra"):
    onnx_graph.make_model(lambda w, x: {'a': x.sort()}, (), spec())
