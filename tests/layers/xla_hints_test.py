"""Tests of products of 16 bits on CPUs, and that they change nothing else."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_models
from vit_jax.layers import xla_hints
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
def test_products_of_16_bits_and_their_gradients_are_exact(subscripts, dtype):
  x, y = _arrays(subscripts, dtype)
  x64, y64 = np.asarray(x, np.float64), np.asarray(y, np.float64)
  out, pull = jax.vjp(lambda x, y: xla_hints.einsum(subscripts, x, y), x, y)
  assert out.dtype == jnp.float32
  expected = np.einsum(subscripts, x64, y64)
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
  # Numbers of few bits, so that rounding does not change the gradient.
  gradient = np.sign(expected)
  x_axes, y_axes, out_axes = subscripts.replace('->', ',').split(',')
  found = pull(jnp.asarray(gradient, jnp.float32))
  wanted = (
    np.einsum(f'{out_axes},{y_axes}->{x_axes}', gradient, y64),
    np.einsum(f'{x_axes},{out_axes}->{y_axes}', x64, gradient),
  )
  for array, reference in zip(found, wanted):
    assert array.dtype == dtype
    rounded = jnp.asarray(reference, dtype)
    np.testing.assert_allclose(*map(np.float32, (array, rounded)), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize('subscripts', SUBSCRIPTS)
def test_products_of_16_bits_can_be_transformed(subscripts):
  x, y = _arrays(subscripts)
  multiply = functools.partial(xla_hints.einsum, subscripts)
  out = multiply(x, y)
  # Forward mode: the product is linear in each operand.
  _, tangent = jax.jvp(multiply, (x, y), (x, y))
  np.testing.assert_allclose(tangent, 2 * out, rtol=1e-5, atol=1e-5)
  # vmap over either operand and both, also of gradients.
  several = jnp.stack([x, 2 * x]), jnp.stack([y, 4 * y])
  for axes, factors in (((0, None), (1, 2)), ((None, 0), (1, 4)), ((0, 0), (1, 8))):
    operands = [
      arrays if axis == 0 else arrays[0] for arrays, axis in zip(several, axes)
    ]
    found = jax.jit(jax.vmap(multiply, axes))(*operands)
    expected = jnp.stack([factor * out for factor in factors])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)

  def squares(x):
    return (multiply(x, y) ** 2).sum()

  of_each = jax.vmap(jax.grad(squares))(several[0])
  np.testing.assert_allclose(
    *np.float32([of_each[1], 2 * of_each[0]]), rtol=1e-2, atol=1e-2
  )
  # Second order: the gradient of a quadratic form is linear.
  second = jax.grad(lambda x: (jax.grad(squares)(x).astype(jnp.float32) * x).sum())(x)
  np.testing.assert_allclose(
    *np.float32([second, 2 * of_each[0]]), rtol=3e-2, atol=3e-1
  )


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
  # 37 tokens, since attention over few has other products.
  x = tiny_models.images((2, 24, 24, 3))
  model = tiny_models.tiny(dtype='bfloat16')
  params = tiny_models.randomised(model, x)

  def loss(params):
    return model.apply({'params': params}, x, train=False).sum()

  products = collections.Counter(
    _products(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
  )
  head = products.pop(('float32', 'float32', 'float32'))
  assert head == 3
  assert set(products) == {('bfloat16', 'bfloat16', 'float32')}


def test_flops_of_a_model_do_not_depend_on_the_type():
  def count(dtype):
    return flops.forward_flops(tiny_models.tiny(dtype=dtype), (24, 24))

  assert count('bfloat16') == count('float32') > 0
