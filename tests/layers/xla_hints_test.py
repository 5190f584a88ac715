"""Tests of 16-bit products on CPUs; other types are unaffected."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_models
from vit_jax.layers import attention, encoder, xla_hints
from vit_jax.planning import flops


def _arrays(subscripts, dtype='bfloat16'):
  """Returns two random arrays, with sizes that all differ."""
  rng = np.random.default_rng(0)
  size = {axis: 3 + 2 * i for i, axis in enumerate('bkqsedDn')}
  operands = subscripts.split('->')[0].split(',')
  shapes = [[size[axis] for axis in axes] for axes in operands]
  return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


# Dense layers on tokens and on vectors; attention's two products.
SUBSCRIPTS = ('bnd,dD->bnD', 'nd,dD->nD', 'bkqe,bkse->bkqs', 'bkqs,bkse->bkqe')


@pytest.mark.parametrize('subscripts', SUBSCRIPTS)
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_products_and_gradients_match_float64(subscripts, dtype):
  x, y = _arrays(subscripts, dtype)
  x64, y64 = np.asarray(x, np.float64), np.asarray(y, np.float64)
  out, pull = jax.vjp(lambda x, y: xla_hints.einsum(subscripts, x, y), x, y)
  assert out.dtype == jnp.float32
  expected = np.einsum(subscripts, x64, y64)
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
  cotangent = np.sign(expected)  # 1 and -1, which 16 bits represent exactly.
  x_axes, y_axes, out_axes = subscripts.replace('->', ',').split(',')
  expected_gradients = (
    np.einsum(f'{out_axes},{y_axes}->{x_axes}', cotangent, y64),
    np.einsum(f'{x_axes},{out_axes}->{y_axes}', x64, cotangent),
  )
  gradients = pull(jnp.asarray(cotangent, jnp.float32))
  tolerance = 2 * float(jnp.finfo(dtype).eps)
  for gradient, expected in zip(gradients, expected_gradients):
    assert gradient.dtype == dtype
    gradient = np.asarray(gradient, np.float32)
    np.testing.assert_allclose(gradient, expected, rtol=tolerance, atol=1e-3)


@pytest.mark.parametrize('subscripts', SUBSCRIPTS)
def test_forward_mode_is_linear_in_each_operand(subscripts):
  x, y = _arrays(subscripts)
  multiply = functools.partial(xla_hints.einsum, subscripts)
  out, tangent = jax.jvp(multiply, (x, y), (x, y))
  np.testing.assert_allclose(tangent, 2 * out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('subscripts', SUBSCRIPTS)
@pytest.mark.parametrize('position', [0, 2])
def test_products_are_batched_over_either_operand_and_both(subscripts, position):
  x, y = _arrays(subscripts)
  multiply = functools.partial(xla_hints.einsum, subscripts)
  out = multiply(x, y)
  position = min(position, x.ndim, y.ndim)
  # Powers of two, so that nothing is rounded.
  xs, ys = jnp.stack([x, 2 * x], position), jnp.stack([y, 4 * y], position)
  for operands, axes, factors in (
    ((xs, y), (position, None), (1, 2)),
    ((x, ys), (None, position), (1, 4)),
    ((xs, ys), (position, position), (1, 8)),
  ):
    batched = jax.jit(jax.vmap(multiply, axes))(*operands)
    expected = jnp.stack([factor * out for factor in factors])
    np.testing.assert_allclose(batched, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('subscripts', SUBSCRIPTS)
def test_gradients_of_rows_and_of_gradients(subscripts):
  x, y = _arrays(subscripts)

  def squares(x):
    return (xla_hints.einsum(subscripts, x, y) ** 2).sum()

  gradients = jax.vmap(jax.grad(squares))(jnp.stack([x, 2 * x])).astype(jnp.float32)
  np.testing.assert_allclose(gradients[1], 2 * gradients[0], rtol=1e-2, atol=1e-2)

  def times_x(x):
    return (jax.grad(squares)(x).astype(jnp.float32) * x).sum()

  # The gradient of a quadratic form is linear.
  product = jax.grad(times_x)(x).astype(jnp.float32)
  np.testing.assert_allclose(product, 2 * gradients[0], rtol=3e-2, atol=3e-1)


# XLA has no program for some of these as 16-bit products with a float32 result.
@pytest.mark.parametrize(
  'subscripts',
  ['nd,dbk->nbk', 'dbk,ed->bke', 'nd,dD->Dn', 'bnd,bnD->Dd', 'bdk,ebd->ekb'],
)
def test_products_of_any_form_run(subscripts):
  x, y = _arrays(subscripts)
  out = jax.jit(lambda x, y: xla_hints.einsum(subscripts, x, y).T)(x, y)
  expected = np.einsum(subscripts, np.float64(x), np.float64(y)).T
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_gradients_inside_of_shard_map_are_summed_over_devices():
  mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  x, kernel = jnp.ones((16, 4), jnp.bfloat16), jnp.ones((4, 2), jnp.bfloat16)

  def gradient(x, kernel):
    def loss(kernel):
      return xla_hints.einsum('nd,dD->nD', x, kernel).astype(jnp.float32).sum()

    return jax.grad(loss)(kernel)

  specs = jax.P('data'), jax.P()
  split = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=jax.P())
  np.testing.assert_array_equal(split(x, kernel), gradient(x, kernel))


def test_mixed_types_are_those_of_jax():
  x, _ = _arrays('bnd,dD->bnD')
  _, y = _arrays('bnd,dD->bnD', 'float32')
  out, pull = jax.vjp(lambda x, y: xla_hints.einsum('bnd,dD->bnD', x, y), x, y)
  assert [gradient.dtype.name for gradient in pull(out)] == ['bfloat16', 'float32']


def test_products_of_float32_are_those_of_jax():
  x, y = _arrays('bnd,dD->bnD', 'float32')
  np.testing.assert_array_equal(
    xla_hints.einsum('bnd,dD->bnD', x, y), jnp.einsum('bnd,dD->bnD', x, y)
  )
  with jax.enable_x64(True):
    doubles = [np.asarray(array, np.float64) for array in (x, y)]
    assert xla_hints.einsum('bnd,dD->bnD', *doubles).dtype == np.float64


def _products(jaxpr):
  """Returns the types of the operands and of the result of each product."""
  found = []
  for equation in jaxpr.eqns:
    if equation.primitive.name in ('dot_general', xla_hints.PRODUCT):
      variables = (*equation.invars, *equation.outvars)
      found.append(tuple(variable.aval.dtype.name for variable in variables))
    for value in equation.params.values():
      inner = getattr(value, 'jaxpr', value)
      if hasattr(inner, 'eqns'):
        found += _products(inner)
  return found


def test_an_update_in_bfloat16_multiplies_numbers_of_16_bits():
  x = tiny_models.images()
  model = tiny_models.tiny(dtype='bfloat16')
  params = tiny_models.randomised(model, x)

  def loss(params):
    return model.apply({'params': params}, x, train=False).sum()

  products = collections.Counter(
    _products(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
  )
  num_head_products = products.pop(('float32', 'float32', 'float32'))
  assert num_head_products == 3
  assert set(products) == {('bfloat16', 'bfloat16', 'float32')}


def test_flops_of_a_model_do_not_depend_on_the_type():
  def count(dtype):
    return flops.forward_flops(tiny_models.tiny(dtype=dtype), (24, 24))

  assert count('bfloat16') == count('float32') > 0


def test_checkpoints_store_products():
  x = tiny_models.images()
  counts = {}
  for dtype in ('bfloat16', 'float32'):
    for remat in ('', 'dots', 'full'):
      model = tiny_models.tiny(2, dtype=dtype)
      model = model.clone(transformer={**model.transformer, 'remat': remat})
      params = tiny_models.randomised(model, x)

      def loss(params, model=model):
        return model.apply({'params': params}, x, train=False).sum()

      counts[dtype, remat] = len(
        _products(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
      )
  for remat in ('', 'dots', 'full'):
    assert counts['bfloat16', remat] == counts['float32', remat]
  assert (
    counts['bfloat16', ''] < counts['bfloat16', 'dots'] < counts['bfloat16', 'full']
  )


def test_a_layer_without_a_type_keeps_that_of_its_input():
  x = jnp.ones((2, 5, 8), jnp.bfloat16)
  for layer in (
    encoder.MlpBlock(16, dtype=None, param_dtype=jnp.bfloat16),
    attention.MultiHeadDotProductAttention(2, dtype=None, param_dtype=jnp.bfloat16),
  ):
    out, _ = layer.init_with_output(jax.random.key(0), x, deterministic=True)
    assert out.dtype == jnp.bfloat16
