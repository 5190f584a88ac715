"""Tests of GPU-specific code paths, starting with attention='auto'."""

import collections
import functools
import re

import jax
from jax import test_util
from jax._src.cudnn import fused_attention_stablehlo
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_models, trees
from vit_jax import models
from vit_jax.distributed import sharding
from vit_jax.layers import (
  attention,
  attention_kernels,
  dtypes,
  layer_stack,
  xla_hints,
)


class _Device:
  platform = 'gpu'

  def __init__(self, capability, device_kind='NVIDIA H100 80GB HBM3'):
    self.compute_capability = capability
    self.device_kind = device_kind


@pytest.fixture
def gpu(monkeypatch):
  """Makes JAX report GPUs; returns a function that sets their compute capability."""

  def set_to(capability='9.0'):
    devices = lambda backend=None: [_Device(capability)]
    monkeypatch.setattr(jax, 'local_devices', devices)

  set_to()
  return set_to


@pytest.fixture
def one_gpu(gpu, monkeypatch):
  """Makes JAX report a single GPU."""
  monkeypatch.setattr(jax, 'device_count', lambda: 1)


@pytest.fixture
def tokens(monkeypatch):
  """Replaces cuDNN with XLA; lists the number of keys of each call."""
  library, seen = jax.nn.dot_product_attention, []

  def compute(query, key, value, *, implementation, **kwargs):
    assert implementation == 'cudnn'
    seen.append(key.shape[1])
    return library(query, key, value, implementation='xla', **kwargs)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', compute)
  return seen


@pytest.mark.parametrize(
  'args, want',
  [
    ({}, 'cudnn'),
    ({'dtype': 'float32'}, 'default'),
    ({'head_dim': 20}, 'default'),
    ({'head_dim': 256}, 'default'),
    ({'plain': False}, 'default'),
    ({'name': 'xla'}, 'xla'),
  ],
)
def test_auto_attention_on_a_gpu(gpu, args, want):
  args = {'name': 'auto', 'dtype': 'bfloat16', 'head_dim': 64, 'tokens': 4096, **args}
  assert attention.choose(**args) == want
  gpu('7.5')  # Before Ampere.
  assert attention.choose(**args) == ('xla' if want == 'xla' else 'default')


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_auto_attention_on_a_tpu(monkeypatch, dtype):
  monkeypatch.setattr(dtypes, 'platform', lambda: 'tpu')
  choose = functools.partial(attention.choose, 'auto', dtype, 64)
  assert choose(tokens=641) == 'flash'
  assert choose(tokens=640) == 'default'
  assert choose(tokens=641, plain=False) == 'default'


def test_auto_dtype_follows_the_devices(gpu):
  assert dtypes.resolve('auto', 'cpu') == 'float32'
  assert dtypes.resolve('auto', 'tpu') == 'bfloat16'
  assert dtypes.resolve('float32', 'tpu') == 'float32'
  model = models.get_model('ti16', num_classes=2, dtype='auto')
  assert model.dtype == 'bfloat16'
  with jax.default_device('cpu'):
    model = models.get_model('ti16', num_classes=2, dtype='auto')
  assert model.dtype == 'float32'


def test_uses_the_devices_of_the_mesh_or_the_default_one(gpu):
  for context in (
    jax.set_mesh(sharding.make_mesh({'data': -1})),  # Of CPUs.
    jax.default_device(jax.devices('cpu')[0]),
    jax.default_device('cpu'),
  ):
    with context:
      assert attention.choose('auto', jnp.bfloat16, 64, 4096) == 'default'


FIELDS = dict(
  num_layers=2, mlp_dim=24, num_heads=2, dropout_rate=0.0,
  attention_dropout_rate=0.0,
)  # fmt: skip


def loss(model, params, x, **kwargs):
  kwargs = {'train': True, **kwargs}

  def total(params, x):
    out = model.apply({'params': params}, x, **kwargs)
    return jnp.sum(jnp.sin(3 * out)), out

  return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(params, x)


@pytest.fixture(scope='module')
def tokens_and_params():
  x = jnp.asarray(np.random.RandomState(0).randn(2, 17, 16), jnp.float32)
  return x, tiny_models.randomised(tiny_models.encoder(**FIELDS), x, seed=1)


@pytest.mark.parametrize(
  'fields, call, seen',
  [
    ({}, {'only_first': True}, {24}),
    ({'scan': True, 'causal': True, 'remat': 'dots'}, {}, {24}),
    ({'position_layers': 'shared'}, {}, {18}),  # Even, as the kernel requires.
  ],
)
def test_padded_tokens_change_nothing(tokens, tokens_and_params, fields, call, seen):
  x, params = tokens_and_params
  fields = {**FIELDS, **fields}
  got = loss(tiny_models.encoder(attention='cudnn', **fields), params, x, **call)
  assert set(tokens) == seen
  want = loss(tiny_models.encoder(attention='default', **fields), params, x, **call)
  trees.assert_close(got, want, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(got[0][1], want[0][1], atol=3e-6)


def test_padding_is_hidden_from_masks_and_intermediates(tokens, tokens_and_params):
  """Dropout also draws the same noise."""
  x, params = tokens_and_params
  cudnn = functools.partial(tiny_models.encoder, attention='cudnn')
  fields = {**FIELDS, 'num_layers': 1}
  mask = np.random.RandomState(0).rand(2, 1, 17, 17) < 0.5

  def compare(fields, **kwargs):
    run = lambda model: model.apply({'params': params}, x, train=True, **kwargs)
    models = cudnn(**fields), tiny_models.encoder(**fields)
    got, want = jax.jit(lambda: [run(model) for model in models])()
    np.testing.assert_allclose(got, want, atol=1e-5)

  compare(fields, mask=mask)
  rngs = {'dropout': jax.random.key(0)}
  compare({**fields, 'dropout_rate': 0.5}, rngs=rngs)
  assert set(tokens) == {18}
  # Stochastic depth draws once per image.
  compare({**FIELDS, 'stochastic_depth': 0.5}, rngs=rngs)
  assert set(tokens) == {18, 24}
  apply = functools.partial(cudnn(**fields).apply, {'params': params}, x, train=False)
  _, sown = jax.eval_shape(functools.partial(apply, mutable=['intermediates']))
  sown = sown['intermediates']
  (weights,) = sown['encoderblock_0']['MultiHeadDotProductAttention_0'][
    'attention_weights'
  ]
  assert weights.shape == (2, 2, 17, 17)
  assert sown['tokens'][0].shape == x.shape


def test_deep_models_loop_over_layers_on_tpus(monkeypatch, tokens_and_params):
  x, _ = tokens_and_params
  model = tiny_models.encoder(**{**FIELDS, 'num_layers': 3})
  init = functools.partial(model.init, jax.random.key(0), train=False)
  params = jax.eval_shape(init, x)
  run = lambda train: str(
    jax.make_jaxpr(functools.partial(model.apply, train=train))(params, x)
  )
  monkeypatch.setattr(layer_stack, 'DEEP', 2)
  assert 'scan[' not in run(True)
  monkeypatch.setattr(dtypes, 'platform', lambda: 'tpu')
  assert 'scan[' in run(True)
  assert 'scan[' not in run(False)


def test_gpus_of_other_vendors_have_no_cudnn(monkeypatch):
  def devices(backend=None):
    if backend == 'cuda':
      raise RuntimeError('there is none')
    return [_Device('gfx942', 'AMD Instinct MI300X')]

  monkeypatch.setattr(jax, 'local_devices', devices)
  assert attention.choose('auto', 'bfloat16', 64, 4096) == 'default'


def test_planned_gpus_have_cudnn(monkeypatch):
  """The program is for an H100, but this machine has none."""

  def devices(backend=None):
    if backend == 'cuda':
      raise RuntimeError('there is none')
    return [_Device(None)]

  monkeypatch.setattr(jax, 'local_devices', devices)
  assert attention.choose('auto', 'bfloat16', 64, 4096) == 'cudnn'
  assert attention.choose('auto', 'float32', 64, 4096) == 'default'


@pytest.mark.parametrize('scan', [False, True])
def test_program_for_nvidia_gpus(monkeypatch, scan):
  """Tokens are padded and cut once, and no layer attends twice."""
  # JAX checks the version of cuDNN, which is not installed here.
  monkeypatch.setattr(fused_attention_stablehlo, 'check_cudnn_version', lambda: 91900)
  monkeypatch.setattr(attention_kernels, 'has_cudnn', lambda: True)
  x = jax.ShapeDtypeStruct((2, 17, 16), jnp.bfloat16)
  fields = {**FIELDS, 'num_layers': 3, 'scan': scan}
  model = tiny_models.encoder(attention='auto', dtype=jnp.bfloat16, **fields)
  init = functools.partial(model.init, jax.random.key(0), train=False)
  params = jax.eval_shape(init, x)
  apply = functools.partial(model.apply, train=True, only_first=True)
  total = lambda *args: apply(*args).astype(jnp.float32).sum()
  traced = jax.jit(jax.grad(total)).trace(params, x)
  text = traced.lower(lowering_platforms=('cuda',)).as_text()
  calls = 1 if scan else 2  # The last layer has one query.
  assert len(re.findall(r'@__cudnn\$fmhaSoftmax\(', text)) == calls
  assert len(re.findall(r'@__cudnn\$fmhaSoftmaxBackward\(', text)) == calls
  tokens = re.findall(r'stablehlo\.pad.*-> tensor<2x(\d+)x16xbf16>', text)
  assert tokens == ['24', '17']  # And the gradient back.


def test_gpu_hints_do_not_change_results(one_gpu, tokens_and_params):
  x, params = tokens_and_params
  fields = {'scan': True, 'remat': 'dots', 'gelu': 'quick'}
  model = tiny_models.encoder(**{**FIELDS, **fields})
  on_gpus = loss(model, params, x, only_first=True)
  assert xla_hints.on_gpus()
  with jax.default_device('cpu'):
    assert not xla_hints.on_gpus()
    want = loss(model, params, x, only_first=True)
  trees.assert_close(on_gpus, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('platform', ['cpu', 'gpu', 'tpu'])
def test_hints_are_differentiable_in_every_mode(monkeypatch, platform):
  monkeypatch.setattr(dtypes, 'platform', lambda: platform)

  @jax.jit
  def f(x, kernel):
    y = xla_hints.recomputed(jax.nn.gelu)(xla_hints.row_major(x))
    y = xla_hints.dot_general(y, kernel, (((2,), (0,)), ((), ())))
    return jnp.mean(xla_hints.residual(x, y, train=True) ** 2)

  x = jax.random.normal(jax.random.key(0), (2, 3, 4))
  kernel = jax.random.normal(jax.random.key(1), (4, 4))
  test_util.check_grads(f, (x, kernel), order=2, atol=3e-2, rtol=3e-2)
  gradient = jax.grad(f, argnums=1)
  by_image = jax.vmap(gradient, (0, None))(x[:, None], kernel)
  trees.assert_close(by_image.mean(axis=0), gradient(x, kernel), rtol=1e-5)


def test_gpu_hints_add_no_collectives(gpu, monkeypatch):
  """The hints leave the batch split: each device keeps its own rows."""
  x = jax.ShapeDtypeStruct((8, 17, 16), jnp.float32)
  model = tiny_models.encoder(**{**FIELDS, 'num_layers': 1})
  init = functools.partial(model.init, jax.random.key(0), train=False)
  mesh = sharding.make_mesh({'data': -1})

  def collectives():
    params = jax.eval_shape(init, x)
    total = lambda params, x: model.apply(params, x, train=True).sum()
    rows = sharding.batch_sharding(mesh)
    whole = sharding.replicated(mesh)
    with jax.set_mesh(mesh):
      update = jax.jit(jax.grad(total), in_shardings=(whole, rows))
      text = update.lower(params, x).compile().as_text()
    found = re.findall(r' (all-[a-z]+|collective-permute|reduce-scatter)\(', text)
    return collections.Counter(found), text

  monkeypatch.setattr(xla_hints, 'on_gpus', lambda: False)
  want, _ = collectives()
  monkeypatch.setattr(xla_hints, 'on_gpus', lambda: True)
  got, text = collectives()
  assert got == want
  assert set(got) == {'all-reduce'}
  assert 'f32[8,17,16]' not in text


def test_hints_in_programs_by_platform(one_gpu, monkeypatch, tokens_and_params):
  x, params = tokens_and_params
  model = tiny_models.encoder(**FIELDS)
  found = {}
  for platform in ('cpu', 'gpu', 'tpu'):
    monkeypatch.setattr(dtypes, 'platform', lambda platform=platform: platform)
    total = lambda params, x: model.apply({'params': params}, x, train=True).sum()
    text = jax.jit(jax.grad(total)).lower(params, x).as_text()
    hints = ('LayoutConstraint', 'optimization_barrier')
    found[platform] = [hint in text for hint in hints]
    width, mlp_dim = x.shape[-1], FIELDS['mlp_dim']
    kernel = rf'optimization_barrier %\d+ : tensor<{mlp_dim}x{width}xf32>'
    found[platform].append(bool(re.search(kernel, text)))
  assert found == {
    'cpu': [False, True, True], 'gpu': [True, True, False], 'tpu': [False] * 3
  }  # fmt: skip
