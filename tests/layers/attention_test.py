"""Tests of attention: every way to compute it, beside the plain one."""

import functools

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_models
from vit_jax import models, train
from vit_jax.configs import pretrain
from vit_jax.distributed import sharding
from vit_jax.layers import attention
from vit_jax.run import config as run_config


def plain(query, key, value):
  """As the paper writes it, differentiated by JAX."""
  logits = jnp.einsum('bqke,bske->bkqs', query, key)
  return jnp.einsum('bkqs,bske->bqke', jax.nn.softmax(logits), value)


@functools.cache
def inputs(tokens=37):
  keys = jax.random.split(jax.random.key(0), 4)
  return tuple(jax.random.normal(key, (2, tokens, 3, 16)) for key in keys)


def loss(function, weights):
  return lambda *args: jnp.sum(function(*args) * weights)


@pytest.mark.parametrize('queries', [37, 1])
@pytest.mark.parametrize('name', ['default', 'xla', 'flash'])
def test_values_and_gradients_are_those_of_the_plain_formula(name, queries):
  *args, weights = inputs()
  args[0], weights = args[0][:, :queries], weights[:, :queries]
  function = attention.IMPLEMENTATIONS[name]
  # Pallas has an interpreter of the TPU's kernels.
  with pltpu.force_tpu_interpret_mode():
    got = jax.jit(function)(*args)
    gradients = jax.jit(jax.grad(loss(function, weights), (0, 1, 2)))(*args)
  np.testing.assert_allclose(got, plain(*args), atol=1e-5)
  want = jax.jit(jax.grad(loss(plain, weights), (0, 1, 2)))(*args)
  for mine, theirs in zip(gradients, want, strict=True):
    np.testing.assert_allclose(mine, theirs, atol=3e-5)


def test_flash_where_images_and_heads_are_split():
  keys = jax.random.split(jax.random.key(0), 4)
  *args, weights = (jax.random.normal(key, (4, 17, 2, 8)) for key in keys)
  mesh = sharding.make_mesh({'data': 2, 'fsdp': 2, 'model': 2})
  function = jax.jit(
    jax.value_and_grad(loss(attention.IMPLEMENTATIONS['flash'], weights), (0, 1, 2))
  )
  with jax.set_mesh(mesh), pltpu.force_tpu_interpret_mode():
    got, gradients = jax.device_get(function(*args))
  want, expected = jax.value_and_grad(loss(plain, weights), (0, 1, 2))(*args)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  for mine, theirs in zip(gradients, expected, strict=True):
    np.testing.assert_allclose(mine, theirs, atol=3e-5)


def test_tangents_and_second_derivatives():
  *args, weights = inputs(5)
  tangents = list(inputs(5)[1:])
  got = jax.jvp(attention.IMPLEMENTATIONS['default'], args, tangents)
  want = jax.jvp(plain, args, tangents)
  for mine, theirs in zip(got, want, strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)

  def second(function):
    inner = jax.grad(loss(function, weights), (0, 1, 2))
    return jax.jvp(inner, args, tangents)[1]

  got = second(attention.IMPLEMENTATIONS['default'])
  for mine, theirs in zip(got, second(plain), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def test_gradients_in_bfloat16_are_near_those_in_float32():
  *args, weights = inputs()
  want = jax.jit(jax.grad(loss(plain, weights), (0, 1, 2)))(*args)
  low = [x.astype(jnp.bfloat16) for x in args]
  function = attention.IMPLEMENTATIONS['default']
  got = jax.grad(loss(function, weights), (0, 1, 2))(*low)
  for mine, theirs in zip(got, want, strict=True):
    assert mine.dtype == jnp.bfloat16
    error = jnp.linalg.norm(mine.astype(jnp.float32) - theirs)
    assert error < 0.02 * jnp.linalg.norm(theirs)


def test_logits_as_large_as_they_come_do_no_harm():
  *args, weights = inputs(5)
  args[0] = args[0] * 1e4
  function = attention.IMPLEMENTATIONS['default']
  values = jax.grad(loss(function, weights), (0, 1, 2))(*args)
  for value in (function(*args), *values):
    assert np.isfinite(value).all()


@pytest.mark.parametrize('scan, remat', [(False, ''), (True, 'full')])
def test_the_last_layer_computes_only_what_is_read(scan, remat):
  """Logits and gradients are those of a model that computes all of it."""
  model = models.get_model('ViT-Ti_16', num_classes=5, transformer=dict(
    num_layers=3, mlp_dim=32, num_heads=3, dropout_rate=0.0,
    attention_dropout_rate=0.0, scan=scan, remat=remat,
  ))  # fmt: skip
  x = jax.random.normal(jax.random.key(1), (2, 48, 32, 3))
  params = tiny_models.init(model, x)
  params = jax.tree.map(
    lambda p: p + 0.05 * jax.random.normal(jax.random.key(p.size), p.shape),
    params,
  )

  def value(params, seen):
    result = model.apply(
      {'params': params}, x, train=True, mutable='intermediates' if seen else False
    )  # fmt: skip
    return jnp.sum((result[0] if seen else result) ** 2)

  gradient = jax.jit(jax.value_and_grad(value), static_argnums=1)
  got, got_grad = gradient(params, False)
  want, want_grad = gradient(params, True)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
    got_grad,
    want_grad,
  )
  # And it does compute less: of 7 tokens one, in one layer of three.
  work = [
    jax.jit(value, static_argnums=1).lower(params, seen).cost_analysis()['flops']
    for seen in (False, True)
  ]  # fmt: skip
  assert scan or work[0] < 0.9 * work[1]


@pytest.mark.parametrize(
  'args, message',
  [
    (('best', 0.0, 'tpu', 'bfloat16'), "attention='best' is unknown: .*flash"),
    (
      ('cudnn', 0.0, 'cpu', 'bfloat16'),
      "devices are 'cpu' and the type is bfloat16: use",
    ),
    (('cudnn', 0.0, 'gpu', 'float32'), 'bfloat16, but the devices are'),
    (
      ('flash', 0.0, 'gpu', 'bfloat16'),
      "needs TPUs, but the devices are 'gpu'",
    ),
    (('flash', 0.1, 'tpu', 'bfloat16'), 'attention_dropout_rate=0.0'),
    (('xla', 0.1), "attention='xla' does not support dropout"),
  ],
)
def test_what_does_not_go_together_is_named(args, message):
  with pytest.raises(ValueError, match=message):
    attention.check(*args)


def test_training_refuses_before_it_compiles():
  config = pretrain.get_config('ti16,imagenet2012')
  config.model.transformer.attention = 'flash'
  config = run_config.resolve_steps(run_config.complete(config), 1_000_000)
  mesh = sharding.make_mesh({'data': -1})
  with pytest.raises(ValueError, match="attention='flash' needs TPUs"):
    train.make_program(config, {'class_names': ['a', 'b']}, mesh)
