"""Tests of the BiT ResNets beside timm's, with copied weights."""

import re

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_models, torch_models, trees
from vit_jax import checkpoint, models, models_bit
from vit_jax.weights import reading
from vit_jax.weights.families import families


def of_timm(name, units, width):
  """A BiT ResNet of timm, possibly narrower than published."""
  return torch_models.timm.models.resnetv2._create_resnetv2_bit(
    f'resnetv2_{name[1:]}_bit', layers=units, width_factor=width, num_classes=7
  )


def copied(theirs):
  """Fills a model of timm with random numbers; returns them by our names."""
  torch_models.randomize(theirs)
  state = {name: value.numpy() for name, value in theirs.state_dict().items()}
  flat = families.of({}).load(dict(state), 'timm', None)
  params = flax.traverse_util.unflatten_dict(flat, sep='/')
  back = families.of({}).dump(flat, 'timm')
  assert back.keys() == state.keys()
  for name, value in state.items():
    np.testing.assert_array_equal(back[name], value)
  return params


UNITS = (2, 1, 2, 1)  # As few as have all kinds of units.


def test_logits_are_those_of_timm():
  theirs = of_timm('R50x1', UNITS, 0.5)
  params = copied(theirs)
  model = models.get_model(
    'BiT-R50x1', num_classes=7, num_layers=UNITS, width_factor=0.5
  )
  images = tiny_models.images((2, 64, 64, 3))
  want = torch_models.logits(theirs, np.array(images))
  assert 0.3 < want.std() < 3
  # The published epsilon is 1e-10, that of timm 1e-8: here both are nothing.
  compute = jax.jit(lambda p, x: model.apply({'params': p}, x, train=False))
  np.testing.assert_allclose(compute(params, images), want, atol=1e-4)


def test_a_saved_file_has_the_published_names_and_shapes(tmp_path):
  """timm reads published files, by their names, into its own model."""
  theirs, other = (of_timm('R50x1', UNITS, 0.5) for _ in range(2))
  params = copied(theirs)
  path = str(tmp_path / 'BiT.npz')
  checkpoint.save(params, path)
  other.load_pretrained(path)
  for name, value in other.state_dict().items():
    np.testing.assert_array_equal(value, theirs.state_dict()[name])
  # And read again, with numbered convolutions too, as some of those files have.
  with np.load(path) as file:
    numbered = {
      name.replace('unit01/b/standardized_conv2d', 'unit01/b/standardized_conv2d_7'): x
      for name, x in file.items()
    }
  assert 'resnet/block2/unit01/b/standardized_conv2d_7/kernel' in numbered
  assert numbered['resnet/head/conv2d/kernel'].shape == (1, 1, 1024, 7)
  np.savez(tmp_path / 'numbered.npz', **numbered)
  for name in ('BiT.npz', 'numbered.npz'):
    found = reading.read(str(tmp_path / name))
    trees.assert_same(found.params, params)


def test_files_of_big_vision_can_be_read(tmp_path, tiny):
  """They have the names of this package, and norms of shape [1, 1, 1, C]."""
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
  """A model of one unit, its parameters, and images."""
  model = models.get_model(
    'BiT-R50x1', num_classes=5, num_layers=(1,), width_factor=0.5
  )
  return model, tiny_models.numbers(model), tiny_models.images((2, 20, 12, 3))


def test_zeros_around_the_image_count_in_the_max_pool():
  """With a root of negative values, the pool's border is 0."""
  root = models_bit.RootBlock(64)
  images = tiny_models.images((1, 32, 32, 3))
  params = jax.eval_shape(root.init, jax.random.key(0), images)['params']
  pooled = jax.jit(root.apply)({'params': tiny_models.drawn(params)}, images)
  assert pooled.shape == (1, 8, 8, 64)
  assert float(pooled[:, 0].min()) >= 0 > float(pooled[:, 1:, 1:].min())


def test_features_are_the_mean_over_the_last_feature_map(tiny):
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


def test_rematerialisation_computes_each_unit_again(tiny):
  model, params, images = tiny

  def operations(remat):
    changed = model.clone(remat=remat)

    def loss(params):
      return changed.apply({'params': params}, images, train=True).sum()

    return str(jax.make_jaxpr(jax.grad(loss))(params)).count('conv_general')

  # Forward, two gradients for each of five convolutions (of the first, whose
  # input has no gradient, one); and again the two whose results the unit's
  # gradient needs.
  assert operations('') == 5 * 3 - 1
  assert operations('full') == 5 * 3 - 1 + 2
  assert tiny_models.shapes(model.clone(remat='full')) == tiny_models.shapes(model)


def test_types_reach_every_layer_and_logits_are_float32(tiny):
  model, params, images = tiny
  model = model.clone(dtype='bfloat16', param_dtype='bfloat16')
  shapes = tiny_models.shapes(model, (20, 12))
  assert {leaf.dtype for leaf in shapes.values()} == {jnp.dtype('bfloat16')}
  got, seen = jax.eval_shape(
    lambda p: model.apply(
      {'params': p}, images, train=False, capture_intermediates=True,
      mutable='intermediates',
    ),
    params,
  )  # fmt: skip
  assert got.dtype == jnp.float32
  types = {
    (path[-1], leaf.dtype.name)
    for path, leaf in flax.traverse_util.flatten_dict(seen['intermediates']).items()
    for leaf in leaf
    if path[:-1] not in ((), ('head',))
  }
  assert types == {('__call__', 'bfloat16')}


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'eps': 'torch'}, "eps='torch' is unknown: use one of .'published', 'timm'"),
    ({'remat': 'dots'}, "remat='dots' is unknown: use one of .'', 'full'"),
    ({'width_factor': 0.25}, 'width_factor=0.25 must be a multiple of 0.5'),
  ],
)  # fmt: skip
def test_wrong_fields_are_named(fields, message):
  model = models.get_model('bit_r50x1', num_classes=5, **fields)
  with pytest.raises(ValueError, match=message):
    tiny_models.shapes(model)


def test_the_head_starts_at_zero_with_the_bias_of_the_config(tiny):
  model, _, images = tiny
  model = model.clone(head_bias_init=-10.0, num_layers=())
  params = tiny_models.init(model, images)
  assert not params['head']['kernel'].any()
  np.testing.assert_array_equal(params['head']['bias'], -10)
