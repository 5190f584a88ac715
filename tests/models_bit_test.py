"""Tests of the BiT ResNets against timm's, with copied weights."""

import re

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_models, torch_models, trees
from vit_jax import checkpoint, models
from vit_jax.weights import reading
from vit_jax.weights.families import families


def test_logits_match_timm():
  units = (2, 1, 2, 1)  # The fewest that have all kinds of units.
  theirs = torch_models.timm.models.resnetv2._create_resnetv2_bit(
    'resnetv2_50x1_bit', layers=units, width_factor=0.5, num_classes=7
  )
  torch_models.randomize(theirs)
  state = {name: value.numpy() for name, value in theirs.state_dict().items()}
  flat = families.from_config({}).load(state, 'timm', None)
  params = flax.traverse_util.unflatten_dict(flat, sep='/')
  model = models.get_model(
    'BiT-R50x1', num_classes=7, num_layers=units, width_factor=0.5
  )
  images = tiny_models.images((2, 64, 64, 3))
  want = torch_models.logits(theirs, np.array(images))
  assert 0.3 < want.std() < 3
  # The published epsilon is 1e-10, timm has 1e-8: both are negligible here.
  compute = jax.jit(lambda p, x: model.apply({'params': p}, x, train=False))
  np.testing.assert_allclose(compute(params, images), want, atol=1e-4)


def test_reads_numbered_convolutions_of_published_files(tmp_path, tiny):
  _, params, _ = tiny
  path = str(tmp_path / 'BiT.npz')
  checkpoint.save(params, path)
  with np.load(path) as file:
    numbered = {
      name.replace('unit01/b/standardized_conv2d', 'unit01/b/standardized_conv2d_7'): x
      for name, x in file.items()
    }
  assert 'resnet/block1/unit01/b/standardized_conv2d_7/kernel' in numbered
  assert numbered['resnet/head/conv2d/kernel'].shape == (1, 1, 128, 5)
  np.savez(tmp_path / 'numbered.npz', **numbered)
  for name in ('BiT.npz', 'numbered.npz'):
    trees.assert_same(reading.read(str(tmp_path / name)).params, params)


def test_reads_big_vision_files(tmp_path, tiny):
  """They have the names used here, and norms of shape [1, 1, 1, C]."""
  _, params, _ = tiny
  flat = flax.traverse_util.flatten_dict(params, sep='/')
  theirs = {
    f'params/{path}': value[None, None, None]
    if re.search(r'(gn\d|norm-pre-head)/', path)
    else value
    for path, value in flat.items()
  }
  np.savez(tmp_path / 'a.npz', **theirs)
  trees.assert_same(reading.read(str(tmp_path / 'a.npz')).params, params)


@pytest.fixture(scope='module')
def tiny():
  """A model with one unit, its parameters, and images."""
  model = models.get_model(
    'BiT-R50x1', num_classes=5, num_layers=(1,), width_factor=0.5
  )
  return model, tiny_models.numbers(model), tiny_models.images((2, 20, 12, 3))


def test_features_average_the_last_feature_map(tiny):
  model, params, images = tiny

  @jax.jit
  def apply(params, images):
    body = model.clone(num_classes=0)
    return *model.apply(
      {'params': params}, images, train=True, mutable='intermediates'
    ), body.apply({'params': params}, images, train=False)

  got, seen, without_head = apply(params, images)
  [features] = seen['intermediates']['features']
  assert (features.shape, float(features.min()) >= 0) == ((2, 128), True)
  head = params['head']
  np.testing.assert_allclose(got, features @ head['kernel'] + head['bias'], rtol=1e-5)
  np.testing.assert_array_equal(without_head, features)


def test_remat_recomputes_convolutions(tiny):
  model, params, images = tiny

  def operations(remat):
    changed = model.clone(remat=remat)
    loss = lambda p: changed.apply({'params': p}, images, train=True).sum()
    return str(jax.make_jaxpr(jax.grad(loss))(params)).count('conv_general')

  assert operations('full') > operations('')
  assert tiny_models.shapes(model.clone(remat='full')) == tiny_models.shapes(model)


def test_dtype_reaches_every_layer_and_logits_are_float32(tiny):
  model, params, images = tiny
  model = model.clone(dtype='bfloat16', param_dtype='bfloat16')
  shapes = tiny_models.shapes(model, (20, 12))
  assert {leaf.dtype for leaf in shapes.values()} == {jnp.dtype('bfloat16')}
  inside = dict(capture_intermediates=True, mutable='intermediates')
  got, seen = jax.eval_shape(
    lambda p: model.apply({'params': p}, images, train=False, **inside), params
  )
  assert got.dtype == jnp.float32
  # Modules; the outputs and intermediates of the model itself are float32.
  found = seen['intermediates'].items()
  layers = {k: x for k, x in found if isinstance(x, dict) and k != 'head'}
  assert {x.dtype.name for x in jax.tree.leaves(layers)} == {'bfloat16'}


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'eps': 'torch'}, "eps='torch' must be one of 'published', 'timm'"),
    ({'remat': 'dots'}, "remat='dots' must be one of '', 'full'"),
    ({'width_factor': 0.25}, 'width_factor=0.25 must be a multiple of 0.5'),
  ],
)  # fmt: skip
def test_wrong_fields_are_named(fields, message):
  model = models.get_model('bit_r50x1', num_classes=5, **fields)
  with pytest.raises(ValueError, match=message):
    tiny_models.shapes(model)


def test_head_starts_at_zero_with_the_configured_bias(tiny):
  model, _, images = tiny
  model = model.clone(head_bias_init=-10.0, num_layers=())
  params = tiny_models.init(model, images)
  assert not params['head']['kernel'].any()
  np.testing.assert_array_equal(params['head']['bias'], -10)
