"""Tests of the models on meshes of explicit axes, on eight simulated devices."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import optax
import pytest

from tests import tiny_models
from vit_jax.distributed import sharding

KINDS = tiny_models.of_every_kind()
IMAGES = tiny_models.images((8, 8, 8, 3))
BATCH = P(('data', 'fsdp'))
# Fields of a model and of its encoder that change the program; fields in one line affect
# different operations.
VARIATIONS = {
  'learned_2d': (
    dict(classifier='map'),
    dict(dropout_rate=0.1, attention_dropout_rate=0.1, stochastic_depth=0.2),
  ),
  'sincos2d': (
    dict(classifier='token_gap', registers=2, representation_size=8),
    dict(attention_pattern='local', attention_window=3),
  ),
  'rope': (dict(distilled=True), dict(mlp='swiglu', mlp_norm=True)),
  'axial_rope': (
    dict(classifier='gap', pool_norm=True),
    dict(attention_pattern='axial'),
  ),
  'learned_axial_rope': (
    dict(classifier='unpooled'),
    dict(parallel=True, norm='rms', layer_scale=0.1, first_norm=True),
  ),
  'relative': (
    dict(classifier='gap'),
    dict(position_layers='every', qk_norm=True, qkv_bias=False, attention_norm=True),
  ),
  'relative_bias': (
    dict(classifier='gap'),
    dict(num_layers=2, position_layers='shared', causal=True),
  ),
  'learned_1d': (
    dict(classifier='gap'),
    dict(num_layers=2, position_layers='every', scan=True, gelu='quick'),
  ),
}


@pytest.fixture
def mesh(monkeypatch):
  """A mesh of explicit axes, on which small parameters are split too."""
  monkeypatch.setattr(sharding, 'FSDP_MIN_SIZE', 2**6)
  return jax.make_mesh((2, 2, 2), ('data', 'fsdp', 'model'))


def on_mesh(tree, shardings):
  """Returns the shapes of a tree with shardings."""

  def abstract(x, placement):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement)

  return jax.tree.map(abstract, tree, shardings)


def assert_close(tree, other):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), tree, other)


def check_types(model, args, kwargs, mesh):
  """Traces results and gradients; the batch stays split, gradients as parameters."""
  static = {k: v for k, v in kwargs.items() if isinstance(v, bool | str)}
  named = {k: v for k, v in kwargs.items() if k not in static}
  key = jax.random.key(0)
  variables = jax.eval_shape(lambda: model.init(key, *args, **kwargs))
  params = variables.pop('params')
  params = on_mesh(params, sharding.tree_shardings(params, (), mesh))
  variables = sharding.abstract_batch(variables, mesh)
  args, named = sharding.abstract_batch((args, named), mesh)
  batch = jax.tree.leaves((args, named))[0].shape[0]

  def loss(params, variables, args, named):
    outputs = model.apply(
      {'params': params, **variables}, *args, **named, **static, rngs={'dropout': key}
    )
    arrays = jax.tree.leaves(outputs)
    for x in arrays:
      spec = jax.typeof(x).sharding.spec
      if batch in x.shape:
        assert spec[x.shape.index(batch)] == ('data', 'fsdp')
    return sum(x.sum() for x in arrays)

  gradients = jax.eval_shape(jax.grad(loss), params, variables, args, named)
  for gradient, param in zip(jax.tree.leaves(gradients), jax.tree.leaves(params)):
    assert gradient.sharding.spec == param.sharding.spec


@pytest.mark.parametrize('name', KINDS)
def test_every_model_runs_on_explicit_axes(name, mesh):
  check_types(*KINDS[name], mesh)


@pytest.mark.parametrize('position_embedding', VARIATIONS)
def test_every_encoder_and_classifier_runs_on_explicit_axes(position_embedding, mesh):
  fields, encoder_fields = VARIATIONS[position_embedding]
  transformer = tiny_models.transformer(
    position_embedding=position_embedding, **encoder_fields
  )
  model = tiny_models.tiny(transformer=transformer, **fields)
  check_types(model, [IMAGES], {'train': True}, mesh)


@pytest.mark.parametrize(
  'transformer',
  [None, tiny_models.transformer(position_grid=(4, 4), remat='dots', attention='xla')],
  ids=['none', 'position_grid'],
)
def test_other_encoders_run_on_explicit_axes(transformer, mesh):
  model = tiny_models.tiny(transformer=transformer, classifier='gap')
  check_types(model, [IMAGES], {'train': True}, mesh)


@pytest.fixture(scope='module')
def small():
  """A model, its parameters, and an update by the gradient."""
  model = tiny_models.tiny()
  params = tiny_models.randomised(model, IMAGES)

  @jax.jit
  def update(params, images, labels):
    def loss(params):
      logits = model.apply({'params': params}, images, train=True)
      return optax.softmax_cross_entropy(logits, labels).mean(), logits

    gradients, logits = jax.grad(loss, has_aux=True)(params)
    return optax.apply_updates(params, gradients), logits

  return model, params, update


def test_updates_on_explicit_axes_equal_one_device(small, mesh):
  """Axes of data, fsdp and model, without a mesh that is set; and a mesh of one device."""
  _, params, update = small
  labels = jax.nn.one_hot(np.arange(8) % 5, 5)
  expected = update(params, IMAGES, labels)
  shardings = sharding.tree_shardings(params, (), mesh)
  axes = {axis for leaf in jax.tree.leaves(shardings) for axis in leaf.spec}
  assert axes == {None, 'fsdp', 'model'}
  split_params = jax.device_put(params, shardings)
  batch = jax.device_put((IMAGES, labels), NamedSharding(mesh, BATCH))
  new_params, logits = update(split_params, *batch)
  assert_close((new_params, logits), expected)
  assert jax.typeof(logits).sharding.spec == P(('data', 'fsdp'), None)
  again, _ = update(new_params, *batch)
  assert_close(again, update(expected[0], IMAGES, labels)[0])
  one = jax.make_mesh((1,), ('data',), devices=jax.devices()[:1])
  batch = jax.device_put((IMAGES, labels), NamedSharding(one, P('data')))
  assert_close(update(params, *batch), expected)


def test_shard_map_over_some_explicit_axes(small, mesh):
  """The axis of the model stays explicit inside of shard_map."""
  model, params, _ = small
  apply = jax.jit(lambda params, x: model.apply({'params': params}, x, train=False))
  expected = apply(params, IMAGES)
  with jax.set_mesh(mesh):
    x = jax.device_put(IMAGES, BATCH)
    for axes in ({'data', 'fsdp'}, set(mesh.axis_names)):
      mapped = jax.shard_map(
        apply, in_specs=(P(), BATCH), out_specs=BATCH, axis_names=axes
      )
      assert_close(jax.jit(mapped)(params, x), expected)


def test_initialisation_replicates_the_parameters(small, mesh):
  """With a mesh that is set, and without one."""
  model, _, _ = small
  init = jax.jit(lambda key, x: model.init(key, x, train=False))
  key = jax.random.key(0)
  init.lower(key, sharding.abstract_batch(IMAGES, mesh))
  with jax.set_mesh(mesh):
    variables = init(key, jax.device_put(IMAGES, BATCH))
  assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(variables))


def test_intermediates_and_methods_stay_split(small, mesh):
  model, params, _ = small
  variables = {'params': on_mesh(params, sharding.tree_shardings(params, (), mesh))}
  x = sharding.abstract_batch(IMAGES, mesh)

  def run(variables, x):
    _, state = model.apply(variables, x, train=False, mutable='intermediates')
    tokens = model.apply(variables, x, method='embed')
    tokens = model.apply(variables, tokens, train=False, method='encode')
    return model.apply(variables, tokens, train=False, method='classify'), state

  for leaf in jax.tree.leaves(jax.eval_shape(run, variables, x)):
    assert leaf.sharding.spec[0] == ('data', 'fsdp')


def test_other_meshes_keep_their_program(small):
  """On automatic axes, and without a mesh, nothing is added to the program."""
  model, params, _ = small
  function = lambda x: x.reshape(-1)
  assert sharding.with_automatic_axes(function, jnp.ones((2, 2)), batch=()).shape == (
    4,
  )
  mesh = sharding.make_mesh({'data': 8})
  with jax.set_mesh(mesh):
    variables = {'params': params}
    x = jax.device_put(IMAGES, P('data'))
    jaxpr = jax.make_jaxpr(lambda v, x: model.apply(v, x, train=False))(variables, x)
  assert 'reshard' not in str(jaxpr)
